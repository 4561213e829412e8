"""laststep: checkpointing for PyTorch training that training does not notice.

The public names are loaded when first used, so that `import laststep` and the command line start
without torch.
"""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import ModuleSpec
from typing import TYPE_CHECKING

from laststep.version import VERSION as __version__  # noqa: N811 (every package has this name)

if TYPE_CHECKING:
    from types import ModuleType

    from laststep.adapters import accelerate as accelerate
    from laststep.adapters import dcp as dcp
    from laststep.adapters import deepspeed as deepspeed
    from laststep.adapters import hf as hf
    from laststep.adapters import lightning as lightning
    from laststep.adapters import megatron as megatron
    from laststep.adapters import ray as ray
    from laststep.adapters import torchtitan as torchtitan
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
    from laststep.plan.frequency import Reckoning
    from laststep.restoring.choose import Skipped
    from laststep.restoring.restore import Peeked, Restored
    from laststep.saving.preempting import Preempted
    from laststep.settings import Capture, CompareReplicas, FlushIn, OnBusy, Preemption
    from laststep.state.items import Late, trainable
    from laststep.state.layouts import Flat, Mesh, Replicate, Shard, Sharded
    from laststep.state.provider import ABSENT, State, StateProvider
    from laststep.state.tensors import Laid, register_tensor_type
    from laststep.state.values import RNG, PerRank
    from laststep.storage.registry import register_store
    from laststep.tiers.leftovers import RescueReport, rescue
    from laststep.tiers.runs import CopyReport, copy
    from laststep.tiers.tier import Tier

_WHERE = {
    "laststep.checkpointer": ("Checkpointer",),
    "laststep.catalog.retention": ("Keep",),
    "laststep.oneoff": ("load", "save"),
    "laststep.browse": ("Catalog", "Checkpoint", "StoredTensor", "open"),
    "laststep.plan.frequency": ("Reckoning",),
    "laststep.restoring.choose": ("Skipped",),
    "laststep.restoring.restore": ("Peeked", "Restored"),
    "laststep.saving.preempting": ("Preempted",),
    "laststep.settings": ("Capture", "CompareReplicas", "FlushIn", "OnBusy", "Preemption"),
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
    "laststep.state.provider": ("ABSENT", "State", "StateProvider"),
    "laststep.state.layouts": ("Flat", "Mesh", "Replicate", "Shard", "Sharded"),
    "laststep.state.tensors": ("Laid", "register_tensor_type"),
    "laststep.state.items": ("Late", "trainable"),
    "laststep.state.values": ("RNG", "PerRank"),
    "laststep.storage.registry": ("register_store",),
    "laststep.tiers.leftovers": ("RescueReport", "rescue"),
    "laststep.tiers.runs": ("CopyReport", "copy"),
    "laststep.tiers.tier": ("Tier",),
}
_HOME = {name: module for module, names in _WHERE.items() for name in names}
_ADAPTERS = frozenset(
    {"accelerate", "dcp", "deepspeed", "hf", "lightning", "megatron", "ray", "torchtitan"}
)
"""Of frameworks: `laststep.hf` is `laststep.adapters.hf`, and needs what its extra installs."""

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
    "Flat",
    "FlushIn",
    "Keep",
    "Laid",
    "LaststepError",
    "Late",
    "Mesh",
    "MismatchError",
    "NotFoundError",
    "OnBusy",
    "Peeked",
    "PerRank",
    "Preempted",
    "Preemption",
    "Problems",
    "Reckoning",
    "Replicate",
    "RescueReport",
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
    "register_store",
    "register_tensor_type",
    "rescue",
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


class _ShortNames:
    """Has `import laststep.hf` and `from laststep.hf import attach` find the adapter. It has the
    methods of a finder and of a loader; their classes would bring much to a flusher."""

    def find_spec(self, fullname: str, *_path: object) -> ModuleSpec | None:
        package, _, name = fullname.rpartition(".")
        known = package == __name__ and name in _ADAPTERS
        return ModuleSpec(fullname, self) if known else None  # type: ignore[arg-type]

    def create_module(self, _: ModuleSpec) -> None:
        """As any module is made; it is replaced at once."""

    def exec_module(self, module: ModuleType) -> None:
        short = module.__name__
        name = short.rpartition(".")[2]
        sys.modules[short] = importlib.import_module(f"laststep.adapters.{name}")


sys.meta_path.append(_ShortNames())


def __dir__() -> list[str]:
    return sorted({*__all__, *_ADAPTERS})
