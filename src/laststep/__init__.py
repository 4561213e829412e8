"""laststep: checkpointing for PyTorch training that training does not notice.

Public names are imported on first use, so that `import laststep` and the command line start without
torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from laststep.version import VERSION as __version__  # noqa: N811 (every package has this name)

if TYPE_CHECKING:  # `as` exports a name to type checkers
    from laststep import accelerate as accelerate
    from laststep import dcp as dcp
    from laststep import deepspeed as deepspeed
    from laststep import fsdp1 as fsdp1
    from laststep import hf as hf
    from laststep import lightning as lightning
    from laststep import megatron as megatron
    from laststep import ray as ray
    from laststep import torchtitan as torchtitan
    from laststep.browse import Catalog as Catalog
    from laststep.browse import Checkpoint as Checkpoint
    from laststep.browse import StoredTensor as StoredTensor
    from laststep.browse import open as open  # noqa: A004
    from laststep.catalog.retention import Keep as Keep
    from laststep.checkpointer import Checkpointer as Checkpointer
    from laststep.errors import AbortedError as AbortedError
    from laststep.errors import AlreadyExistsError as AlreadyExistsError
    from laststep.errors import CorruptError as CorruptError
    from laststep.errors import LaststepError as LaststepError
    from laststep.errors import MismatchError as MismatchError
    from laststep.errors import NotFoundError as NotFoundError
    from laststep.errors import Problems as Problems
    from laststep.errors import StorageError as StorageError
    from laststep.errors import TornCaptureError as TornCaptureError
    from laststep.errors import UsageError as UsageError
    from laststep.flush.saves import SaveHandle as SaveHandle
    from laststep.flush.saves import SaveReport as SaveReport
    from laststep.oneoff import load as load
    from laststep.oneoff import save as save
    from laststep.plan.frequency import IntervalEstimate as IntervalEstimate
    from laststep.preempting import Preempted as Preempted
    from laststep.restoring.choose import Skipped as Skipped
    from laststep.restoring.restore import Peeked as Peeked
    from laststep.restoring.restore import Restored as Restored
    from laststep.settings import Capture as Capture
    from laststep.settings import CompareReplicas as CompareReplicas
    from laststep.settings import FlushIn as FlushIn
    from laststep.settings import OnBusy as OnBusy
    from laststep.settings import OnError as OnError
    from laststep.settings import Options as Options
    from laststep.settings import Preemption as Preemption
    from laststep.state.items import Deferred as Deferred
    from laststep.state.layouts import Flat as Flat
    from laststep.state.layouts import Mesh as Mesh
    from laststep.state.layouts import Replicate as Replicate
    from laststep.state.layouts import Shard as Shard
    from laststep.state.layouts import Sharded as Sharded
    from laststep.state.modules import trainable as trainable
    from laststep.state.provider import ABSENT as ABSENT
    from laststep.state.provider import RNG as RNG
    from laststep.state.provider import PerRank as PerRank
    from laststep.state.provider import State as State
    from laststep.state.provider import StateProvider as StateProvider
    from laststep.state.tensors import LocalShard as LocalShard
    from laststep.state.tensors import register_tensor_type as register_tensor_type
    from laststep.storage.registry import register_store as register_store
    from laststep.tiers.recovery import RecoverReport as RecoverReport
    from laststep.tiers.recovery import recover as recover
    from laststep.tiers.runs import CopyReport as CopyReport
    from laststep.tiers.runs import copy as copy
    from laststep.tiers.tier import Tier as Tier

_HOME = {
    name: f"laststep.{module}"
    for module, names in (
        ("browse", "Catalog Checkpoint StoredTensor open"),
        ("catalog.retention", "Keep"),
        ("checkpointer", "Checkpointer"),
        ("errors", "AbortedError AlreadyExistsError CorruptError LaststepError MismatchError"),
        ("errors", "NotFoundError Problems StorageError TornCaptureError UsageError"),
        ("flush.saves", "SaveHandle SaveReport"),
        ("oneoff", "load save"),
        ("plan.frequency", "IntervalEstimate"),
        ("preempting", "Preempted"),
        ("restoring.choose", "Skipped"),
        ("restoring.restore", "Peeked Restored"),
        ("settings", "Capture CompareReplicas FlushIn OnBusy OnError Options Preemption"),
        ("state.items", "Deferred"),
        ("state.layouts", "Flat Mesh Replicate Shard Sharded"),
        ("state.modules", "trainable"),
        ("state.provider", "ABSENT RNG PerRank State StateProvider"),
        ("state.tensors", "LocalShard register_tensor_type"),
        ("storage.registry", "register_store"),
        ("tiers.recovery", "RecoverReport recover"),
        ("tiers.runs", "CopyReport copy"),
        ("tiers.tier", "Tier"),
    )
    for name in names.split()
}
"""The module of each public name. Type checkers read the imports above instead."""
_ADAPTERS = frozenset(
    {"accelerate", "dcp", "deepspeed", "fsdp1", "hf", "lightning", "megatron", "ray", "torchtitan"}
)
"""Modules that import another framework, which the extra of the same name installs."""

__all__ = ["__version__"]
__all__ += list(_HOME)


def __getattr__(name: str) -> object:
    value: object
    if name in _ADAPTERS:
        value = importlib.import_module(f"laststep.{name}")
    elif name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
    else:
        raise AttributeError(f"module 'laststep' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *_ADAPTERS})
