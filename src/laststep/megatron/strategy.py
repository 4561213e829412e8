"""Strategies that make Megatron's own save and load calls use laststep.

    dist_checkpointing.save(state, folder, sharded_strategy=laststep.megatron.SaveStrategy())
    state = dist_checkpointing.load(
        state, folder, sharded_strategy=laststep.megatron.LoadStrategy()
    )

Megatron describes which part of which tensor a rank has, for tensor, pipeline and expert
parallelism alike. Its own strategy converts that to a state for DCP, and so do these, with the same
functions. The files are a laststep checkpoint in a folder inside Megatron's.

Megatron calls values that are not sharded the common state. They are pickled in `common.pt`, which
Megatron itself writes up to 0.18, and `SaveStrategy` since 0.19. All releases read that file, so
they load each other's checkpoints.
"""

# ruff: noqa: SLF001 (the conversions of Megatron's strategy have no public names)

from __future__ import annotations

import io
import os
import pickle
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)

from laststep.adapters.export.folder import new_file
from laststep.adapters.importing.dcp_folder import METADATA_NAME
from laststep.dcp import Reader, Writer
from laststep.errors import MismatchError, UsageError
from laststep.megatron import FRAMEWORK, check_version
from laststep.storage.files import Disk

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import SavePlan

check_version()  # before the imports below, which fail if it is not installed

from megatron.core.dist_checkpointing.dict_utils import nested_values  # noqa: E402
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor  # noqa: E402
from megatron.core.dist_checkpointing.strategies import torch as theirs  # noqa: E402
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME  # noqa: E402

__all__ = ["LoadStrategy", "SaveStrategy"]

BACKEND, VERSION = "laststep", 1
FOLDER = "laststep"
"""The run's folder, next to `common.pt` and Megatron's own `metadata.json`."""
RELEASE = tuple(map(int, FRAMEWORK.version.split(".")[:2]))
PASSES_COMMON = RELEASE >= (0, 19)
"""True if Megatron passes the common state to the strategy instead of writing it."""


class SaveStrategy(theirs.TorchDistSaveShardedStrategy):  # type: ignore[misc]
    """Saves the sharded state, and the common state if Megatron does not write it itself.

    A subclass of Megatron's own strategy: since 0.17, `dist_checkpointing.save` ignores any other.
    """

    can_handle_sharded_objects = True

    def __init__(self) -> None:
        super().__init__(backend=BACKEND, version=VERSION)

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str) -> None:
        """Save on all ranks; durable on return. An unfinished save in this folder is replaced."""
        sharded = dict(sharded_state_dict)
        common = sharded.pop("common_state").data if PASSES_COMMON else None
        by_key, _, _ = theirs._replace_state_dict_keys_with_sharded_keys(
            sharded, keep_only_main_replica=True
        )
        state_dict_saver.save(
            theirs.mcore_to_pyt_state_dict(by_key, is_loading=False),
            storage_writer=Writer(
                _run_in(checkpoint_dir), step=_step_of(checkpoint_dir), overwrite=True
            ),
            planner=_SavePlanner(checkpoint_dir, common),
        )

    def async_save(self, *_: object, **__: object) -> None:
        """Raise UsageError. Without this, Megatron's strategy would save in its own format."""
        raise UsageError(
            "laststep.megatron.SaveStrategy cannot save asynchronously",
            found="async_sharded_save=True",
            remedy="pass async_sharded_save=False, or save in the background with a Checkpointer",
        )


class _SavePlanner(theirs.MCoreSavePlanner):  # type: ignore[misc]
    """Also writes the common state, on the first rank: DCP raises errors of planners on all."""

    def __init__(self, checkpoint_dir: str, common: object) -> None:
        super().__init__(dedup_replicated_tensors=False, flatten_state_dict=False)
        self._checkpoint_dir = checkpoint_dir
        self._common = common

    def create_local_plan(self) -> SavePlan:
        if self._common is not None and dist.get_rank() == 0:
            _save_common(self._common, self._checkpoint_dir)
        plan: SavePlan = super().create_local_plan()
        return plan


def _save_common(state: object, checkpoint_dir: str) -> None:
    """Write `common.pt`. Raise UsageError if Megatron could not load it again."""
    file, data = Path(checkpoint_dir) / COMMON_STATE_FNAME, io.BytesIO()
    torch.save(state, data)
    data.seek(0)
    try:
        torch.load(data, map_location="cpu")  # as Megatron does
    except pickle.UnpicklingError as error:
        data.seek(0)
        unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(data)
        raise UsageError(
            "cannot save Megatron's common state: torch.load would refuse a value in it",
            where=str(file),
            expected="values that torch.load(weights_only=True) accepts",
            found=", ".join(unsafe) or str(error),
            remedy="pass its class to torch.serialization.add_safe_globals before every save and "
            "load, or store a plain value",
        ) from error
    file.unlink(missing_ok=True)
    with new_file(file) as opened:
        opened.write(data.getbuffer())
    Disk().sync_folder(str(file.parent))


class LoadStrategy(theirs.TorchDistLoadShardedStrategy):  # type: ignore[misc]
    """Loads a checkpoint of `SaveStrategy`, also with another number of ranks."""

    can_handle_sharded_objects = True

    def load(
        self, sharded_state_dict: dict[str, Any], checkpoint_dir: str, async_strategy: str = "mcore"
    ) -> dict[str, Any]:
        """Load the parts that the state describes. `async_strategy` is Megatron's, and unused."""
        by_key, flat, renamed = theirs._replace_state_dict_keys_with_sharded_keys(
            sharded_state_dict
        )
        tensors = [t for t in nested_values(sharded_state_dict) if isinstance(t, ShardedTensor)]
        state = theirs.mcore_to_pyt_state_dict(by_key, is_loading=True)
        state_dict_loader.load(
            state,
            storage_reader=_reader(checkpoint_dir),
            no_dist=RELEASE >= (0, 18),  # a `process_group` of some ranks may load since then
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
        known = metadata or _reader(checkpoint_dir).read_metadata()
        # Megatron passes on all properties, of which torch.empty does not take the newest.
        return {
            key: ShardedTensor.from_rank_offsets(
                key, torch.empty(stored.size, dtype=stored.properties.dtype, device="meta")
            ).without_data()
            for key, stored in known.state_dict_metadata.items()
            if isinstance(stored, TensorStorageMetadata)
        }

    def load_sharded_metadata(self, checkpoint_dir: str) -> dict[str, Any]:
        known = _reader(checkpoint_dir).read_metadata()
        objects = [
            ShardedObject.empty_from_unique_key(key)
            for key, stored in known.state_dict_metadata.items()
            if isinstance(stored, BytesStorageMetadata)
        ]
        tensors = self.load_tensors_metadata(checkpoint_dir, known)
        return {stored.unique_key: stored for stored in objects} | tensors


def _reader(checkpoint_dir: str | os.PathLike[str]) -> Reader:
    """Return a reader of the folder. Raise MismatchError if Megatron's own strategy wrote it."""
    folder = Path(checkpoint_dir)
    if (folder / METADATA_NAME).exists() and not (folder / FOLDER).exists():
        raise MismatchError(
            "this checkpoint was saved by Megatron's own strategy",
            where=str(folder),
            expected=f"a folder {FOLDER!r}, which laststep.megatron.SaveStrategy writes",
            found=METADATA_NAME,
            remedy="load it without sharded_strategy; if it was to be saved by laststep, pass "
            "SaveStrategy() itself to save: Megatron 0.17 and later ignore tuples and wrappers",
        )
    return Reader(_run_in(checkpoint_dir))


def _run_in(checkpoint_dir: str | os.PathLike[str]) -> str:
    return os.path.join(checkpoint_dir, FOLDER)  # noqa: PTH118 (it may be a URL)


def _step_of(checkpoint_dir: str | os.PathLike[str]) -> int:
    """Return the step from Megatron's folder names, `iter_0000100`; 0 for other names."""
    found = re.search(r"iter_0*([0-9]+)/?$", os.fspath(checkpoint_dir))
    return int(found[1]) if found else 0


if RELEASE < (0, 17):  # later releases have no register, and need the strategy in each call
    from megatron.core.dist_checkpointing.strategies.base import (
        StrategyAction,
        register_default_strategy,
    )

    register_default_strategy(StrategyAction.LOAD_SHARDED, BACKEND, VERSION, LoadStrategy())
    register_default_strategy(StrategyAction.SAVE_SHARDED, BACKEND, VERSION, SaveStrategy())
