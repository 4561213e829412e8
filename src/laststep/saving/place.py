"""Look at the folder of a run before anything is saved: is there one, or can one be made?

Only looks and makes nothing: a process that only restores needs no right to write, so a run that is
there is only warned of where it is read-only (docs/decisions/0008).

Also says which steps a run has, and what happens when saves come faster than they are stored.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from laststep.catalog.decision import is_checkpoint
from laststep.catalog.lineage import EPOCHS_FOLDER
from laststep.catalog.listing import remedy_for_no_run
from laststep.catalog.run import Run
from laststep.errors import (
    AlreadyExistsError,
    LaststepError,
    NotFoundError,
    StorageError,
    UsageError,
)
from laststep.process import signals
from laststep.settings import MAX_UNCOMMITTED
from laststep.storage.directory import TEMPORARY
from laststep.storage.registry import local_path, open_parent

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from laststep.catalog.listing import Listed
    from laststep.flush.saves import SaveHandle, Saves, SaveUnderWay
    from laststep.storage.store import Store


log = logging.getLogger(__name__)

_ELSEWHERE = "choose another path for the run"


def look_at(store: Store) -> None:
    """Say whether a run is new; `StorageError` where there is none and none can be made,
    `UsageError` where there is a single checkpoint."""
    local = local_path(store.url)
    path = None if local is None else Path(local)
    there = None if path is None else _nearest(path)
    if there == path:
        _refuse_checkpoint(store)
        try:
            Run.open(store)
        except NotFoundError:
            pass
        except StorageError:
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
            store.url,
            shown,
            remedy_for_no_run(store) or "check the path if you meant to resume one",
        )
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
    except NotFoundError:
        remedy = f"laststep.load({store.url!r}) reads it; {_ELSEWHERE}"
    except LaststepError:
        remedy = _ELSEWHERE
    else:
        step = name.removeprefix("step-").partition(".")[0]
        named = f"step={int(step)}" if step.isdecimal() else "step=…"
        remedy = f"its run is {parent.url}: pass that, and restore({named})"
    raise UsageError(
        "this is not the folder of a run",
        where=store.url,
        expected="a run, or a place for one",
        found="one checkpoint",
        remedy=remedy,
    )


def refuse_to_leave(newest: Listed | None, run: str) -> None:
    """`UsageError` where saves would begin beside a checkpoint that nobody has restored."""
    if newest is not None:
        raise UsageError(
            "this save would leave the checkpoints of the run behind",
            where=run,
            expected="restore() before the first save",
            found=f"step {newest.step}, which was not restored",
            remedy="call restore() to continue it; Checkpointer(…, new_lineage=True) begins a new "
            "lineage beside it; or choose another path",
        )


def check_new_folder(path: Path) -> None:
    """`StorageError` where a folder that is not there yet cannot be made."""
    _check_can_be_made(path, _nearest(path))


def _nearest(path: Path) -> Path:
    """The folder at a path, or else the nearest above it; `StorageError` where something else is
    in the way."""
    for place in (path, *path.parents):
        try:
            place.stat()
        except (FileNotFoundError, NotADirectoryError):
            if place.is_symlink():
                raise _unusable(
                    path,
                    f"{place} is a link to {place.readlink()}, which is not there",
                    f"remove the link, or {_ELSEWHERE}",
                ) from None
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


def _unusable(path: Path, found: str, remedy: str) -> StorageError:
    return StorageError(
        "cannot keep a run",
        where=str(path),
        expected="a folder that can be written",
        found=found,
        remedy=remedy,
    )


def _code(error: OSError) -> str:
    return errno.errorcode.get(error.errno or 0, str(error.errno))


def refuse_unusable(what: str, *, closed: bool, mixed: str | None) -> None:
    """`UsageError` for a Checkpointer that is closed, or whose state a restore of that left
    `mixed`."""
    if closed:
        raise UsageError(
            f"cannot {what}: the Checkpointer is closed", remedy="make a new one for the same run"
        )
    if mixed is not None:
        raise UsageError(
            f"cannot {what}: the live state is mixed",
            found=f"{mixed} was restored only in part",
            remedy="restore() a whole checkpoint first",
        )


class SavedSteps:
    """Steps of the lineage."""

    def __init__(self) -> None:
        self._committed: set[int] = set()
        self._ahead: set[int] = set()
        """Those beyond the one that was restored: saving them replaces them."""

    def restored(self, step: int, steps: Iterable[int] = ()) -> None:
        """Saves go on from that step of a lineage that has these."""
        every = set(steps)
        self._ahead = {one for one in every if one > step}
        self._committed = every - self._ahead

    def add(self, steps: Iterable[int]) -> None:
        """These are committed."""
        self._committed.update(steps)

    def take_over(self, saves: Saves) -> None:
        """Saves that are over are no longer under way."""
        over = [save.handle for save in saves.take_over()]
        self.add(handle.step for handle in over if handle.error is None)

    def newest(self) -> int | None:
        """The last that is committed."""
        return max(self._committed, default=None)

    def replaces(self, step: int, under_way: Iterable[int], where: str, *, overwrite: bool) -> bool:
        """Whether a save of that step may replace one; `AlreadyExistsError` where it would and may
        not."""
        taken = self._committed.union(under_way)
        if step in taken and not overwrite:
            raise AlreadyExistsError(
                f"step {step} has been saved already",
                where=where,
                remedy="save with overwrite=True to replace it, or restore an earlier step",
            )
        return overwrite or step in self._ahead - taken


class Turn:
    """One call at a time, whichever threads they come from."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: int | None = None
        """Whose turn it is, and for what."""
        self._what = ""

    @contextlib.contextmanager
    def of(self, what: str) -> Iterator[None]:
        """While inside, it is the turn of that call; with interrupts held."""
        self.check(what)
        while not self._lock.acquire(timeout=signals.LOOK_S):
            signals.let_in()
        self._thread, self._what = threading.get_ident(), what
        try:
            yield
        finally:
            self._thread = None
            self._lock.release()

    def check(self, what: str) -> None:
        """`UsageError` in the midst of another call of this thread, which cannot end before this
        one: a signal's handler may run there."""
        if self._thread == threading.get_ident():
            raise UsageError(
                f"cannot {what} in the midst of a {self._what}()",
                found=f"{what}() was called by a signal's handler, or by what {self._what}() calls",
                remedy=f"set a flag there, and call {what}() when {self._what}() has returned",
            )


def obstacle(saves: Sequence[SaveUnderWay], *, short_of_room: bool) -> str | None:
    """Why the next save cannot begin at once, in words."""
    uncommitted = [save for save in saves if not save.over]
    if any(save.capturing for save in saves):
        return "an earlier save is still being captured"
    if len(uncommitted) >= MAX_UNCOMMITTED:
        return f"{len(uncommitted)} earlier saves are not committed yet"
    if uncommitted and short_of_room:
        return "an earlier save still holds the host memory that this one needs"
    return None


def call_off_queued(saves: Sequence[SaveUnderWay], step: int) -> None:
    """Have only the first of the saves under way finished, which is being written: there is no time
    for the others before the last save of a job, of that step, and none is wanted after it."""
    for save in [one for one in saves if not one.over and one.handle.step != step][1:]:
        save.call_off("it was called off, so that the last save of its job is in time")


def of_step(saves: Sequence[SaveUnderWay], step: int) -> SaveHandle | None:
    """The save of that step, unless it has failed."""
    found = [one.handle for one in saves if one.handle.step == step and one.handle.error is None]
    return found[-1] if found else None


def raise_first(failed: Sequence[LaststepError]) -> None:
    """Raise why the first of some saves has failed, which speaks of the others."""
    steps: dict[str, list[str]] = {}
    for error in failed[1:]:
        steps.setdefault(error.without_remedy(), []).append(str(error.step))
    for reason, some in steps.items():
        same = reason == failed[0].without_remedy()
        why = "of the same" if same else f"too: {reason}"
        failed[0].add_note(f"step{'s' if some[1:] else ''} {', '.join(some)} failed {why}")
    if failed:
        raise failed[0]


def wait_for_turn(saves: Sequence[SaveUnderWay]) -> float:
    """Wait until one more save may begin; returns the seconds. Failures are told by the next call,
    as always."""
    began = time.perf_counter()
    uncommitted = [save for save in saves if not save.over]
    # They are finished in order: once one is over, so are those before it.
    for save in uncommitted[: max(len(uncommitted) - MAX_UNCOMMITTED + 1, 0)][-1:]:
        save.handle.committed.over_within(None)
    for job in [save.job for save in saves if save.job is not None][-1:]:
        signals.wait(job.over)
    return time.perf_counter() - began
