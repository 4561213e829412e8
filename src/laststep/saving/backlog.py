"""What stands in the way of one more save, and waiting for it.

Runs on the training thread. Memory bounds how many large states are under way, a count how many
small ones are; room in the pool itself is waited for slot by slot, while the capture runs.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING

from laststep.errors import Usage
from laststep.process import interrupts
from laststep.settings import MAX_UNCOMMITTED

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from laststep.errors import LaststepError
    from laststep.flush.handle import SaveHandle
    from laststep.flush.saves import SaveUnderWay


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
        while not self._lock.acquire(timeout=interrupts.LOOK_S):
            interrupts.let_in()
        self._thread, self._what = threading.get_ident(), what
        try:
            yield
        finally:
            self._thread = None
            self._lock.release()

    def check(self, what: str) -> None:
        """`Usage` in the midst of another call of this thread, which cannot end before this one:
        a signal's handler may run there."""
        if self._thread == threading.get_ident():
            raise Usage(
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
        interrupts.wait(job.over)
    return time.perf_counter() - began
