"""Look at the folder of a run before anything is saved: is there one, or can one be made?

Only looks and makes nothing: a process that only restores needs no right to write, so a run that is
there is only warned of where it is read-only (docs/decisions/0008).
"""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

from laststep.catalog.decision import is_checkpoint
from laststep.catalog.listing import remedy_for_no_run
from laststep.catalog.names import EPOCHS_FOLDER
from laststep.catalog.run import Run
from laststep.errors import LaststepError, NotFound, StorageFailed, Usage
from laststep.storage.directory import TEMPORARY
from laststep.storage.registry import local_path, open_parent

if TYPE_CHECKING:
    from laststep.catalog.listing import Listed
    from laststep.storage.store import Store

log = logging.getLogger(__name__)

_ELSEWHERE = "choose another path for the run"


def look_at(store: Store) -> None:
    """Say whether a run is new; `StorageFailed` where there is none and none can be made, `Usage`
    where there is a single checkpoint."""
    local = local_path(store.url)
    path = None if local is None else Path(local)
    there = None if path is None else _nearest(path)
    if there == path:
        _refuse_checkpoint(store)
        try:
            Run.open(store)
        except NotFound:
            pass
        except StorageFailed:
            raise
        except LaststepError:
            return  # something of a run is there; restore() says what is wrong with it
        else:
            _warn_of_read_only(path)
            return
    if path is not None and there is not None:
        _check_can_be_made(path, there)
    # Of a run whose first save is only announced there is this.
    strangers = [entry.name for entry in store.list("") if entry.name != EPOCHS_FOLDER]
    if strangers:
        shown = ", ".join(strangers[:3]) + (", …" if len(strangers) > 3 else "")
        log.warning(
            "%s is not empty and holds no run (found %s): a new run begins there; %s",
            store.url, shown,
            remedy_for_no_run(store) or "check the path if you meant to resume one",
        )  # fmt: skip
    elif path is None or TEMPORARY not in path.name:  # as laststep.save makes, which is no run
        log.info("new run at %s", store.url)


def _warn_of_read_only(path: Path | None) -> None:
    if path is not None and (why := _why_not_written(path)) is not None:
        log.warning("%s can be restored, but saves to it will fail: %s", path, os.strerror(why))


def _why_not_written(folder: Path) -> int | None:
    """The system's number for why nothing can be made in a folder; None where it can."""
    if os.access(folder, os.W_OK | os.X_OK, effective_ids=True):
        return None
    return errno.EROFS if os.statvfs(folder).f_flag & os.ST_RDONLY else errno.EACCES


def _refuse_checkpoint(store: Store) -> None:
    """A run inside a checkpoint would go with it, when retention of the outer run removes it."""
    if not is_checkpoint(store):
        return
    try:
        parent, name = open_parent(store.url)
        Run.open(parent)
    except NotFound:
        remedy = f"laststep.load({store.url!r}) reads it; {_ELSEWHERE}"
    except LaststepError:
        remedy = _ELSEWHERE
    else:
        step = name.removeprefix("step-").partition(".")[0]
        named = f"step={int(step)}" if step.isdecimal() else "step=…"
        remedy = f"its run is {parent.url}: pass that, and restore({named})"
    raise Usage(
        "this is not the folder of a run", where=store.url, expected="a run, or a place for one",
        found="one checkpoint", remedy=remedy,
    )  # fmt: skip


def refuse_to_leave(newest: Listed | None, run: str) -> None:
    """`Usage` where saves would begin beside a checkpoint that nobody has restored."""
    if newest is not None:
        raise Usage(
            "this save would leave the checkpoints of the run behind", where=run,
            expected="restore() before the first save",
            found=f"step {newest.step}, which was not restored",
            remedy="call restore() to continue it; Checkpointer(…, new_lineage=True) begins a new "
            "lineage beside it; or choose another path",
        )  # fmt: skip


def check_new_folder(path: Path) -> None:
    """`StorageFailed` where a folder that is not there yet cannot be made."""
    _check_can_be_made(path, _nearest(path))


def _nearest(path: Path) -> Path:
    """The folder at a path, or else the nearest above it; `StorageFailed` where something else is
    in the way."""
    for place in (path, *path.parents):
        try:
            place.stat()
        except (FileNotFoundError, NotADirectoryError):
            if place.is_symlink():
                raise _unusable(
                    path, f"{place} is a link to {place.readlink()}, which is not there",
                    f"remove the link, or {_ELSEWHERE}",
                ) from None  # fmt: skip
            continue
        except OSError as error:
            raise _unusable(path, f"{error.strerror} ({_code(error)})", _ELSEWHERE) from error
        if not place.is_dir():
            raise _unusable(path, f"{place} is not a folder", f"remove it, or {_ELSEWHERE}")
        return place
    return Path("/")


def _check_can_be_made(path: Path, there: Path) -> None:
    longest = os.pathconf(there, "PC_NAME_MAX")
    for part in path.relative_to(there).parts:
        if 0 < longest < len(os.fsencode(part)):
            found = f"a name of {len(os.fsencode(part))} bytes where {longest} are the most"
            raise _unusable(path, found, "choose a shorter name")
    if (number := _why_not_written(there)) is not None:
        remedy = "give this user the right to write there"
        if number == errno.EROFS:
            remedy = "mount it writable"
        raise _unusable(path, f"{os.strerror(number)} in {there}", f"{remedy}, or {_ELSEWHERE}")


def _unusable(path: Path, found: str, remedy: str) -> StorageFailed:
    return StorageFailed(
        "cannot keep a run", where=str(path), expected="a folder that can be written",
        found=found, remedy=remedy,
    )  # fmt: skip


def _code(error: OSError) -> str:
    return errno.errorcode.get(error.errno or 0, str(error.errno))


def refuse_unusable(what: str, *, closed: bool, mixed: str | None) -> None:
    """`Usage` for a Checkpointer that is closed, or whose state a restore of that left `mixed`."""
    if closed:
        raise Usage(
            f"cannot {what}: the Checkpointer is closed", remedy="make a new one for the same run"
        )
    if mixed is not None:
        raise Usage(
            f"cannot {what}: the live state is mixed", found=f"{mixed} was restored only in part",
            remedy="restore() a whole checkpoint first",
        )  # fmt: skip
