"""Note the first of some signals, and pass each on to whoever had it before.

Knows nothing of what is done about it. A handler runs on the main thread, between any two steps of
it: so this one only sets attributes, which other threads may read, and takes no lock. It never
raises, and runs at once inside `interrupts.held` too; the handlers before it are held there as
always.
"""

from __future__ import annotations

import signal
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from laststep.errors import Usage
from laststep.process import interrupts, lifetimes

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import FrameType

OF_SCHEDULERS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU")
"""What people and schedulers send, often to all processes of a job at once. The flusher ignores
these: it ends with its trainer, after its work is done."""

SAME_S = 3.0
"""Signals that come within so long of the first are the same: where a scheduler signals all
processes of a job, a launcher among them passes it on as well."""


class Notice(NamedTuple):
    """That this process, or its job, is to end."""

    cause: str
    came_s: float
    """Monotonic, of this process."""
    at_s: float
    """By the wall clock."""


def notice(cause: str) -> Notice:
    """That it was noticed now."""
    return Notice(cause, time.monotonic(), time.time())


class NotedSignals(interrupts.Unheld):
    """The handler of some signals, until it is let go."""

    def __init__(self, names: Iterable[str]) -> None:
        """`Usage` where they cannot be had. Nothing is installed yet."""
        self._numbers = [int(signal.Signals[name]) for name in names]
        self._earlier: dict[int, Any] = {}
        self._noting = True
        self.came: Notice | None = None
        if self._numbers and not interrupts.on_main_thread():
            raise Usage(
                "signals are handled on the main thread only",
                expected="a Checkpointer that is made there",
                found=f"the thread {threading.current_thread().name}",
                remedy="make it there, or pass Preemption(signals=(), file=…)",
            )  # fmt: skip
        for number in self._numbers:
            if signal.getsignal(number) is None:
                name = signal.Signals(number).name
                raise Usage(
                    f"{name} has a handler that Python cannot put back", expected="one of Python's",
                    found="one of another library", remedy=f"leave {name} out of signals=(…)",
                )  # fmt: skip

    def install(self) -> None:
        """Handle them from now on. MUST NOT be called inside `interrupts.held`."""
        lifetimes.watch(self, at_exit=self.let_go, in_child=self.let_go)
        for number in self._numbers:
            self._earlier[number] = signal.signal(number, self)

    def let_go(self) -> None:
        """Give them back. On another thread than the main one, or where somebody has come after
        this, the handler stays and only passes on."""
        self._noting = False
        lifetimes.let_be(self)
        for number, earlier in self._earlier.items():
            if interrupts.on_main_thread() and signal.getsignal(number) is self:
                signal.signal(number, earlier)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        earlier, came = self._earlier.get(number, signal.SIG_DFL), self.came
        is_same = came is None or time.monotonic() - came.came_s < SAME_S
        if not (self._noting and is_same):
            self._act(number, frame, earlier)
            return
        self.came = came or notice(signal.Signals(number).name)
        # What would end the program by itself waits until something was done about it.
        if callable(earlier) and earlier is not signal.default_int_handler:
            interrupts.pass_on(number, frame, earlier)

    @staticmethod
    def _act(number: int, frame: FrameType | None, earlier: Any) -> None:
        """Do what would be done without this."""
        if callable(earlier):
            interrupts.pass_on(number, frame, earlier)
        elif earlier is signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
