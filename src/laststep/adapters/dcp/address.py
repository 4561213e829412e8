"""Where a DCP save goes, or a load comes from: a path or URL, and maybe a step of the run there.

Without a step a path is one checkpoint, as it is to torch's own storage: a run that has but one. A
rank that saves for itself (`use_collectives=False`) has a run of its own below the path.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import torch.distributed as dist

from laststep.arguments import plain_step
from laststep.errors import NotFoundError, UsageError
from laststep.storage.registry import open_store

SOLE_STEP = 0
"""The step of a checkpoint that has its path for itself."""
_RANK = "rank-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """A path, by its URL, and a step there, if one was named."""

    path: str
    step: int | None

    @classmethod
    def of(cls, path: str | os.PathLike[str], step: int | None = None) -> Address:
        return cls(path=open_store(path).url, step=None if step is None else plain_step(step))

    def named(self, checkpoint_id: object) -> Address:
        """What a `checkpoint_id` names: digits are a step, anything else is another path."""
        if checkpoint_id is None or checkpoint_id == "":
            return self
        if is_step(checkpoint_id):
            return replace(self, step=plain_step(int(str(checkpoint_id))))
        if isinstance(checkpoint_id, str | os.PathLike):
            return Address.of(checkpoint_id)
        raise UsageError(
            "a checkpoint_id is a path or a step",
            expected='a path, or a step such as "100"',
            found=repr(checkpoint_id),
        )

    def __str__(self) -> str:
        return self.path if self.step is None else str(self.step)


def is_step(checkpoint_id: object) -> bool:
    text = str(checkpoint_id) if type(checkpoint_id) in (str, int) else ""
    return text.isascii() and text.isdigit() and len(text) < 20


def is_address(checkpoint_id: object) -> bool:
    """What DCP asks of a class of storage."""
    return is_step(checkpoint_id) or (
        isinstance(checkpoint_id, str | os.PathLike) and bool(os.fspath(checkpoint_id))
    )


def this_rank() -> int:
    """In the whole job, whatever group saves or loads: so no two ranks of a job have the same."""
    return dist.get_rank() if _in_job() else 0


def is_alone() -> bool:
    return not _in_job() or dist.get_world_size() == 1


def _in_job() -> bool:
    return dist.is_available() and dist.is_initialized()


def own_path(path: str, rank: int) -> str:
    """Where a rank saves that saves for itself."""
    return f"{path}/{_RANK}{rank:05d}"


def is_own_path(name: str) -> bool:
    return name.startswith(_RANK) and name.removeprefix(_RANK).isdigit()


def own_paths_there(path: str) -> list[str]:
    """The names of the folders in which ranks have saved for themselves."""
    return sorted(filter(is_own_path, open_store(path).folder_names("")))


def found_own_path(path: str) -> str | None:
    """Where this rank has saved for itself; None where none has, `NotFoundError` where others
    have."""
    there, mine = own_paths_there(path), own_path(path, this_rank())
    if there and mine.rpartition("/")[2] not in there:
        raise NotFoundError(
            f"rank {this_rank()} has saved nothing here",
            where=path,
            found=f"{len(there)} ranks that have each saved for themselves",
            remedy="load with as many ranks as have saved, or save with collectives",
        )
    return mine if there else None
