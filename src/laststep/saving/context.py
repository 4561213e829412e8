"""Check the run of a Checkpointer before anything is saved: location, memory and disk.

`look_at` only reads and creates nothing: a process that only restores needs no write permission, so
an existing read-only run is just logged as a warning (docs/decisions/0008).
"""

from __future__ import annotations

import errno
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from laststep.catalog.attempt import is_checkpoint
from laststep.catalog.listing import remedy_for_no_run
from laststep.catalog.run import Run
from laststep.catalog.terms import TERMS_FOLDER
from laststep.constants import CHUNK_BYTES, listed
from laststep.errors import LaststepError, NotFoundError, StorageError, UsageError
from laststep.memory.segments import available_bytes
from laststep.process.system import shared_warning
from laststep.ranks.group import ranks_on_this_node
from laststep.settings import MIN_SLOTS, Settings
from laststep.state.items import make_deferred
from laststep.state.modules import TrainableProvider
from laststep.state.tensors import expected_bytes
from laststep.storage.directory import TEMPORARY
from laststep.storage.registry import local_path

if TYPE_CHECKING:
    from collections.abc import Mapping

    from laststep.events import Bus
    from laststep.ranks.group import Rank
    from laststep.state.provider import StateProvider
    from laststep.storage.store import Store
    from laststep.tiers.tier import Arranged

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """A run and the objects with which this process works on it."""

    store: Store
    """The primary of `tiers`."""
    tiers: Arranged
    providers: Mapping[str, StateProvider]
    settings: Settings
    rank: Rank
    bus: Bus


def look_at(store: Store) -> None:
    """Check that a run exists or can be created, and log if it is new. Raises `StorageError` if
    there is no run and none can be created, `UsageError` if the path is a single checkpoint."""
    local = local_path(store.url)
    path = None if local is None else Path(local)
    nearest = None if path is None else _nearest(path)
    if nearest == path:
        if is_checkpoint(store):
            # Retention of the outer run would delete a run inside of a checkpoint with it.
            raise UsageError(
                "this is not the folder of a run",
                where=store.url,
                expected="a run, or a place for one",
                found="one checkpoint",
                remedy=f"laststep.load({store.url!r}) reads it; pass the folder of its run",
            )
        try:
            Run.open(store)
        except NotFoundError:
            pass
        except StorageError:
            raise
        except LaststepError:
            return  # a damaged run: restore() reports the details
        else:
            if path is not None and (why := _why_not_written(path)) is not None:
                log.log(
                    shared_warning(), "%s can be restored, but saves to it will fail: %s", path, why
                )
            return
    if path is not None:
        check_new_folder(path)
    # A run whose first save has only begun holds nothing but this folder.
    strangers = [entry.name for entry in store.list("") if entry.name != TERMS_FOLDER]
    if strangers:
        log.log(
            shared_warning(),
            "%s is not empty and holds no run (found %s): starting a new run there; %s",
            store.url,
            listed(strangers),
            remedy_for_no_run(store) or "check the path if you meant to resume one",
        )
    elif path is None or TEMPORARY not in path.name:  # laststep.save's temporary is no run
        log.info("new run at %s", store.url)


def _why_not_written(folder: Path) -> str | None:
    """Return the reason why nothing can be created in a folder, or None."""
    if os.access(folder, os.W_OK | os.X_OK, effective_ids=True):
        return None
    is_read_only = os.statvfs(folder).f_flag & os.ST_RDONLY
    return os.strerror(errno.EROFS if is_read_only else errno.EACCES)


def check_new_folder(path: Path) -> None:
    """Raise `StorageError` if no folder can be created there."""
    nearest = _nearest(path)
    if (why := _why_not_written(nearest)) is not None:
        raise _unusable(path, f"{why} in {nearest}")


def _nearest(path: Path) -> Path:
    """Return the folder at a path or its nearest parent. Raise `StorageError` if it is none."""
    for place in (path, *path.parents):
        try:
            place.stat()
        except (FileNotFoundError, NotADirectoryError):
            if place.is_symlink():
                raise _unusable(path, f"{place}, a link to nothing") from None
            continue
        except OSError as error:
            code = errno.errorcode.get(error.errno or 0, str(error.errno))
            raise _unusable(path, f"{error.strerror} ({code})") from error
        if not place.is_dir():
            raise _unusable(
                path, f"{place}, which is not a folder", remedy="choose a folder, or a new path"
            )
        return place
    return Path("/")


def _unusable(
    path: Path,
    found: str,
    remedy: str = "give this user the right to write there, or choose another path",
) -> StorageError:
    return StorageError(
        "cannot keep a run",
        where=str(path),
        expected="a folder that can be written",
        found=found,
        remedy=remedy,
    )


def memory_for(context: RunContext) -> tuple[int, int, dict[str, int]]:
    """Return (limit of host memory, bytes to allocate now, expected bytes per device). Replicated
    state counts only in part, since each rank writes a part of it."""
    rank, settings = context.rank, context.settings
    share = available_bytes() // 4 // ranks_on_this_node(rank)
    cap = settings.host_memory_bytes or max(share, MIN_SLOTS * CHUNK_BYTES)
    total: dict[str, int] = {}
    for provider in context.providers.values():
        parts = provider.parts()  # empty for a deferred item
        trained_only = bool(parts) and isinstance(make_deferred(provider), TrainableProvider)
        for part in parts:
            for device, size in expected_bytes(part, rank.ranks, trained_only=trained_only):
                total[device] = total.get(device, 0) + size
    on_device = {d: size + CHUNK_BYTES for d, size in total.items() if d.startswith("cuda")}
    return cap, sum(total.values()) + 4 * CHUNK_BYTES, on_device
