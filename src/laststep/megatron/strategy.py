"""Strategies that make Megatron's own save and load calls use laststep.

    dist_checkpointing.save(state, folder, sharded_strategy=laststep.megatron.SaveStrategy())
    state = dist_checkpointing.load(state, folder)

Megatron describes which part of which tensor a rank has, for tensor, pipeline and expert
parallelism alike. Its own strategy converts that to a state for DCP, and so do these, with the same
functions. The files are a laststep checkpoint in a folder inside Megatron's. Megatron still
serialises values other than tensors itself, by pickle.
"""

# ruff: noqa: SLF001 (the conversions of Megatron's strategy have no public names)

from __future__ import annotations

import os
import re
from typing import Any

from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from laststep.adapters.framework import Framework
from laststep.dcp import Reader, Writer

FRAMEWORK = Framework(package="megatron-core", extra="megatron", oldest="0.16", newest="0.16")
FRAMEWORK.check()  # before the imports below, which fail if it is not installed

from megatron.core.dist_checkpointing.dict_utils import nested_values  # noqa: E402
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor  # noqa: E402
from megatron.core.dist_checkpointing.strategies import torch as theirs  # noqa: E402
from megatron.core.dist_checkpointing.strategies.base import (  # noqa: E402
    SaveShardedStrategy,
    StrategyAction,
    register_default_strategy,
)

__all__ = ["LoadStrategy", "SaveStrategy"]

BACKEND, VERSION = "laststep", 1
FOLDER = "laststep"
"""The run's folder, next to Megatron's own `common.pt` and `metadata.json`."""


class SaveStrategy(SaveShardedStrategy):  # type: ignore[misc]
    """Saves the sharded state; Megatron itself writes `common.pt`."""

    can_handle_sharded_objects = True

    def __init__(self) -> None:
        super().__init__(BACKEND, VERSION)

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str) -> None:
        """Save on all ranks; durable on return. An unfinished save in this folder is replaced."""
        by_key, _, _ = theirs._replace_state_dict_keys_with_sharded_keys(
            sharded_state_dict, keep_only_main_replica=True
        )
        state_dict_saver.save(
            theirs.mcore_to_pyt_state_dict(by_key, is_loading=False),
            storage_writer=Writer(
                _run_in(checkpoint_dir), step=_step_of(checkpoint_dir), overwrite=True
            ),
            planner=theirs.MCoreSavePlanner(
                dedup_replicated_tensors=False, flatten_state_dict=False
            ),
        )


class LoadStrategy(theirs.TorchDistLoadShardedStrategy):  # type: ignore[misc]
    """Loads a checkpoint of `SaveStrategy`, also with another number of ranks."""

    can_handle_sharded_objects = True

    def load(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str) -> dict[str, Any]:
        by_key, flat, renamed = theirs._replace_state_dict_keys_with_sharded_keys(
            sharded_state_dict
        )
        tensors = [t for t in nested_values(sharded_state_dict) if isinstance(t, ShardedTensor)]
        state = theirs.mcore_to_pyt_state_dict(by_key, is_loading=True)
        state_dict_loader.load(
            state,
            storage_reader=Reader(_run_in(checkpoint_dir)),
            planner=theirs.MCoreLoadPlanner(
                shapes_validation_sharded_tensors=[
                    tensor for tensor in tensors if not tensor.allow_shape_mismatch
                ],
                allow_shape_mismatch_sharded_tensors={
                    tensor.key: tensor for tensor in tensors if tensor.allow_shape_mismatch
                },
            ),
        )
        loaded = {key: theirs._unwrap_pyt_sharded_tensor(entry) for key, entry in state.items()}
        whole: dict[str, Any] = theirs._replace_sharded_keys_with_state_dict_keys(
            loaded, flat, renamed
        )
        theirs._restore_dict_types(whole, sharded_state_dict)
        return whole

    def load_tensors_metadata(
        self, checkpoint_dir: str, metadata: Metadata | None = None
    ) -> dict[str, Any]:
        known = metadata or Reader(_run_in(checkpoint_dir)).read_metadata()
        found: dict[str, Any] = super().load_tensors_metadata(checkpoint_dir, known)
        return found

    def load_sharded_metadata(self, checkpoint_dir: str) -> dict[str, Any]:
        known = Reader(_run_in(checkpoint_dir)).read_metadata()
        objects = [
            ShardedObject.empty_from_unique_key(key)
            for key, stored in known.state_dict_metadata.items()
            if isinstance(stored, BytesStorageMetadata)
        ]
        tensors = self.load_tensors_metadata(checkpoint_dir, known)
        return {stored.unique_key: stored for stored in objects} | tensors


def _run_in(checkpoint_dir: str | os.PathLike[str]) -> str:
    return os.path.join(checkpoint_dir, FOLDER)  # noqa: PTH118 (it may be a URL)


def _step_of(checkpoint_dir: str | os.PathLike[str]) -> int:
    """Return the step from Megatron's folder names, `iter_0000100`; 0 for other names."""
    found = re.search(r"iter_0*([0-9]+)/?$", os.fspath(checkpoint_dir))
    return int(found[1]) if found else 0


# If the caller passes no strategy, Megatron chooses one by the checkpoint's `metadata.json`.
register_default_strategy(StrategyAction.LOAD_SHARDED, BACKEND, VERSION, LoadStrategy())
register_default_strategy(StrategyAction.SAVE_SHARDED, BACKEND, VERSION, SaveStrategy())
