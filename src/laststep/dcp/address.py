"""The address of a DCP save or load: a path or URL, and optionally a step of the run there.

Without a step, a path is a single checkpoint, as in torch's own storage: a run with only one
checkpoint. A rank that saves separately (`use_collectives=False`) has a run of its own below the
path. Torch's own storage may have saved to the same path.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

import torch.distributed as dist

from laststep.adapters.importing import dcp_folder
from laststep.arguments import plain_step
from laststep.errors import NotFoundError, UsageError
from laststep.storage.registry import import_path, local_path, open_store

SOLE_STEP = 0
"""The step of a checkpoint that was saved without one and is alone at its path."""
_RANK = "rank-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    path: str
    step: int | None

    @classmethod
    def of(cls, path: str | os.PathLike[str], step: int | None = None) -> Address:
        return cls(path=open_store(path).url, step=None if step is None else plain_step(step))

    def named(self, checkpoint_id: object) -> Address:
        """Return the address of a `checkpoint_id`: digits are a step, all else is another path."""
        if checkpoint_id is None or checkpoint_id == "":
            return self
        if is_step(checkpoint_id):
            return replace(self, step=plain_step(int(str(checkpoint_id))))
        if isinstance(checkpoint_id, str | os.PathLike):
            return Address.of(checkpoint_id)
        raise UsageError(
            "invalid checkpoint_id",
            expected='a path, or a step such as "100"',
            found=repr(checkpoint_id),
        )

    def __str__(self) -> str:
        return self.path if self.step is None else str(self.step)


def is_step(checkpoint_id: object) -> bool:
    text = str(checkpoint_id) if type(checkpoint_id) in (str, int) else ""
    return text.isascii() and text.isdigit() and len(text) < 20


def is_address(checkpoint_id: object) -> bool:
    """Return True if this is a step, or the path or URL of a store that can be opened."""
    if is_step(checkpoint_id):
        return True
    if not isinstance(checkpoint_id, str | os.PathLike) or not os.fspath(checkpoint_id):
        return False
    try:
        import_path(os.fspath(checkpoint_id))
    except UsageError:
        return False
    return True


def this_rank() -> int:
    """Return the rank in the whole job, whichever group saves or loads."""
    return dist.get_rank() if _in_job() else 0


def is_alone() -> bool:
    return not _in_job() or dist.get_world_size() == 1


def _in_job() -> bool:
    return dist.is_available() and dist.is_initialized()


def own_path(path: str, rank: int) -> str:
    """Return the path of a rank that saves separately."""
    return f"{path}/{_RANK}{rank:05d}"


def is_own_path(name: str) -> bool:
    return name.startswith(_RANK) and name.removeprefix(_RANK).isdigit()


def own_paths_there(path: str) -> list[str]:
    """Return the names of the folders of ranks that saved separately."""
    return sorted(filter(is_own_path, open_store(path).folder_names("")))


def found_own_path(path: str) -> str | None:
    """Return the path at which this rank saved separately. Raise if only others did."""
    folders, own = own_paths_there(path), own_path(path, this_rank())
    if folders and own.rpartition("/")[2] not in folders:
        raise NotFoundError(
            f"rank {this_rank()} has not saved anything here",
            where=path,
            found=f"{len(folders)} ranks that saved separately",
            remedy="load with as many ranks as have saved, or save with collectives",
        )
    return own if folders else None


def stock_saved_s(path: str) -> float | None:
    """Return the time at which torch's own storage has finished a save there, if it has."""
    folder = local_path(path)
    metadata = None if folder is None else dcp_folder.metadata_in(Path(folder), 0)
    return None if metadata is None else metadata.stat().st_mtime


def remove_stock(path: str) -> None:
    """Delete the files of torch's own storage, starting with the metadata that identifies them."""
    folder = local_path(path)
    if folder is not None:
        for pattern in (dcp_folder.METADATA_NAME, "__*.metadata", "__*_*.distcp"):
            for file in Path(folder).glob(pattern):
                file.unlink(missing_ok=True)
