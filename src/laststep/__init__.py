"""laststep: checkpointing for PyTorch training that training does not notice.

Public names are imported on first use, so that `import laststep` and the command line start without
torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from laststep.version import VERSION as __version__  # noqa: N811 (every package has this name)

if TYPE_CHECKING:
    from laststep import accelerate as accelerate
    from laststep import dcp as dcp
    from laststep import deepspeed as deepspeed
    from laststep import fsdp1 as fsdp1
    from laststep import hf as hf
    from laststep import lightning as lightning
    from laststep import megatron as megatron
    from laststep import ray as ray
    from laststep import torchtitan as torchtitan
    from laststep.browse import Catalog, Checkpoint, StoredTensor, open  # noqa: A004
    from laststep.catalog.retention import Keep
    from laststep.checkpointer import Checkpointer
    from laststep.errors import (
        AbortedError,
        AlreadyExistsError,
        CorruptError,
        LaststepError,
        MismatchError,
        NotFoundError,
        Problems,
        StorageError,
        TornCaptureError,
        UsageError,
    )
    from laststep.flush.saves import SaveHandle, SaveReport
    from laststep.oneoff import load, save
    from laststep.plan.frequency import IntervalEstimate
    from laststep.restoring.choose import Skipped
    from laststep.restoring.restore import Peeked, Restored
    from laststep.saving.preempting import Preempted
    from laststep.settings import Capture, CompareReplicas, FlushIn, OnBusy, Options, Preemption
    from laststep.state.items import Deferred
    from laststep.state.layouts import Flat, Mesh, Replicate, Shard, Sharded
    from laststep.state.modules import trainable
    from laststep.state.provider import ABSENT, RNG, PerRank, State, StateProvider
    from laststep.state.tensors import LocalShard, register_tensor_type
    from laststep.storage.registry import register_store
    from laststep.tiers.recovery import RecoverReport, recover
    from laststep.tiers.runs import CopyReport, copy
    from laststep.tiers.tier import Tier

_WHERE = {
    "laststep.checkpointer": ("Checkpointer",),
    "laststep.catalog.retention": ("Keep",),
    "laststep.oneoff": ("load", "save"),
    "laststep.browse": ("Catalog", "Checkpoint", "StoredTensor", "open"),
    "laststep.plan.frequency": ("IntervalEstimate",),
    "laststep.restoring.choose": ("Skipped",),
    "laststep.restoring.restore": ("Peeked", "Restored"),
    "laststep.saving.preempting": ("Preempted",),
    "laststep.settings": (
        "Capture",
        "CompareReplicas",
        "FlushIn",
        "OnBusy",
        "Options",
        "Preemption",
    ),
    "laststep.flush.saves": ("SaveHandle", "SaveReport"),
    "laststep.errors": (
        "AbortedError",
        "CorruptError",
        "AlreadyExistsError",
        "LaststepError",
        "MismatchError",
        "NotFoundError",
        "Problems",
        "StorageError",
        "TornCaptureError",
        "UsageError",
    ),
    "laststep.state.provider": ("ABSENT", "RNG", "PerRank", "State", "StateProvider"),
    "laststep.state.layouts": ("Flat", "Mesh", "Replicate", "Shard", "Sharded"),
    "laststep.state.tensors": ("LocalShard", "register_tensor_type"),
    "laststep.state.items": ("Deferred",),
    "laststep.state.modules": ("trainable",),
    "laststep.storage.registry": ("register_store",),
    "laststep.tiers.recovery": ("RecoverReport", "recover"),
    "laststep.tiers.runs": ("CopyReport", "copy"),
    "laststep.tiers.tier": ("Tier",),
}
_HOME = {name: module for module, names in _WHERE.items() for name in names}
_ADAPTERS = frozenset(
    {"accelerate", "dcp", "deepspeed", "fsdp1", "hf", "lightning", "megatron", "ray", "torchtitan"}
)
"""Modules that import another framework, which the extra of the same name installs."""

__all__ = [
    "ABSENT",
    "RNG",
    "AbortedError",
    "AlreadyExistsError",
    "Capture",
    "Catalog",
    "Checkpoint",
    "Checkpointer",
    "CompareReplicas",
    "CopyReport",
    "CorruptError",
    "Deferred",
    "Flat",
    "FlushIn",
    "IntervalEstimate",
    "Keep",
    "LaststepError",
    "LocalShard",
    "Mesh",
    "MismatchError",
    "NotFoundError",
    "OnBusy",
    "Options",
    "Peeked",
    "PerRank",
    "Preempted",
    "Preemption",
    "Problems",
    "RecoverReport",
    "Replicate",
    "Restored",
    "SaveHandle",
    "SaveReport",
    "Shard",
    "Sharded",
    "Skipped",
    "State",
    "StateProvider",
    "StorageError",
    "StoredTensor",
    "Tier",
    "TornCaptureError",
    "UsageError",
    "__version__",
    "copy",
    "load",
    "open",
    "recover",
    "register_store",
    "register_tensor_type",
    "save",
    "trainable",
]


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
