"""Interrupts and signals: run handlers at safe points, and defer them elsewhere."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from laststep.errors import UsageError
from laststep.process import system

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from types import FrameType


Handler = Callable[[int, "FrameType | None"], Any]

LOOK_S = 0.05
"""Maximum delay of a signal that arrives while the main thread waits."""

_STUCK_S = 1.0

_FROM_OUTSIDE = ("INT", "TERM", "HUP", "QUIT", "USR1", "USR2", "TSTP", "CONT", "WINCH", "PWR")
_OF_THIS_PROCESS = ("ALRM", "VTALRM", "PROF", "XCPU", "CHLD")
_NUMBERS = tuple(getattr(signal, f"SIG{name}") for name in (*_FROM_OUTSIDE, *_OF_THIS_PROCESS))
"""Signals that people, launchers and timers send; checking all takes five times as long."""

_holding: defer_signals | None = None
"""Active deferral of the main thread, if any."""
_limits: dict[int, Callable[[], bool]] = {}
"""Deadline checks by thread id; they return True once the deadline has passed."""


def on_main_thread() -> bool:
    """Return True on the thread that runs signal handlers."""
    return threading.get_ident() == threading.main_thread().ident


class DeadlineExceeded(Exception):
    """A wait did not end before its deadline."""


class defer_signals(  # noqa: N801 (called like a function: `with defer_signals():`)
    msgspec.Struct, eq=False
):
    """Run handlers only in `check_signals` and at the end of the outermost block."""

    _before: dict[int, Handler] = {}
    _came: dict[int, float] = {}
    """Deferred signals, with the time of arrival."""

    def __repr__(self) -> str:
        return "defer_signals()"  # `signal.signal` takes the repr of a handler: keep it short

    def __enter__(self) -> None:
        global _holding  # noqa: PLW0603 (there is one main thread)
        if _holding is not None or not on_main_thread():
            return
        for number in _NUMBERS:
            handler = signal.getsignal(number)
            # A handler that raised inside of these methods has left one of ours installed.
            while isinstance(stale := getattr(handler, "__self__", None), defer_signals):
                handler = stale._before.get(number, signal.SIG_DFL)  # noqa: SLF001 (of this class)
            # One that only records the signal never raises, so it runs at once.
            if callable(handler) and not isinstance(handler, RecordedSignals):
                self._before[number] = handler
                signal.signal(number, self._note)
        _holding = self

    def __exit__(self, *_: object) -> None:
        global _holding  # noqa: PLW0603 (as above)
        if _holding is not self:
            return
        # From here on `_note` forwards every signal, so that none is lost if a handler raises
        # before all handlers are restored.
        _holding = None
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._note:  # else another handler was installed inside
                signal.signal(number, handler)
        self.check_signals()

    def check_signals(self) -> None:
        """Run the handlers of deferred signals. If one raises, the others stay deferred inside the
        block; at its end they run all the same."""
        while self._came:
            number = next(iter(self._came))
            del self._came[number]
            try:
                self._before[number](number, None)
            finally:
                if _holding is not self:
                    self.check_signals()

    def pass_on(self, number: int, frame: FrameType | None, handler: Handler) -> None:
        """Defer a handler that another handler calls."""
        self._before[number] = handler
        self._note(number, frame)

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if _holding is self and now - self._came.setdefault(number, now) < _STUCK_S:
            return
        self._came.pop(number, None)
        self._before[number](number, frame)


def check_signals() -> None:
    """Run deferred handlers, which may raise; raise `DeadlineExceeded` past the deadline."""
    if _holding is not None and on_main_thread():
        _holding.check_signals()
    limit = _limits.get(threading.get_ident())
    if limit is not None and limit():
        raise DeadlineExceeded


def pass_on(number: int, frame: FrameType | None, handler: Handler) -> None:
    """For handlers: call another handler that may raise, now or when deferred handlers run."""
    if _holding is not None:
        _holding.pass_on(number, frame, handler)
    else:
        handler(number, frame)


@contextlib.contextmanager
def deadline(is_over: Callable[[], bool]) -> Iterator[None]:
    """Raise `DeadlineExceeded` from any wait of this thread inside the block once `is_over()`
    returns True. Only the innermost deadline counts."""
    me = threading.get_ident()
    before = _limits.get(me)
    try:
        _limits[me] = is_over
        yield
    finally:
        if before is None:
            _limits.pop(me, None)
        else:
            _limits[me] = before


def look_within(left_s: float | None) -> float | None:
    """Return the time to wait before the next `check_signals`, given the remaining time."""
    looks = threading.get_ident() in _limits or (_holding is not None and on_main_thread())
    if not looks:
        return left_s
    return LOOK_S if left_s is None else min(left_s, LOOK_S)


def wait(event: threading.Event, timeout_s: float | None = None) -> bool:
    """Wait for an event and run handlers meanwhile; return False on timeout. A plain `Event.wait`
    that is interrupted at the wrong moment would block the setters of the event forever."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    with defer_signals():
        while True:
            left = None if deadline is None else max(deadline - time.monotonic(), 0)
            if event.wait(look_within(left)):
                return True
            check_signals()
            if deadline is not None and time.monotonic() >= deadline:
                return False


OF_SCHEDULERS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU")
"""Signals that people and schedulers send, often to a whole job; the flusher ignores them."""

SAME_S = 3.0
"""Signals within this time of the first count as the same one: when a scheduler signals all
processes of a job, a launcher among them forwards it as well."""


class PreemptionSignal(NamedTuple):
    """A signal that this process, or its job, is about to end."""

    cause: str
    came_s: float
    """Time of arrival on this process's monotonic clock."""


def preemption_signal(cause: str) -> PreemptionSignal:
    """Return a signal with the current time."""
    return PreemptionSignal(cause, time.monotonic())


class RecordedSignals:
    """Handler that records some signals until `let_go`."""

    def __init__(self, names: Iterable[str]) -> None:
        """Raise `UsageError` if these signals cannot be handled. Installs nothing yet."""
        self._numbers = [int(signal.Signals[name]) for name in names]
        self._earlier: dict[int, Any] = {}
        self._noting = True
        self.came: PreemptionSignal | None = None
        if self._numbers and not on_main_thread():
            raise UsageError(
                "signals can be handled only on the main thread",
                expected="a Checkpointer that is made there",
                found=f"the thread {threading.current_thread().name}",
                remedy="make it there, or leave preemption out",
            )
        for number in self._numbers:
            if signal.getsignal(number) is None:
                name = signal.Signals(number).name
                raise UsageError(
                    f"{name} has a handler that Python cannot restore",
                    expected="one of Python's",
                    found="one of another library",
                    remedy=f"leave {name} out of signals=(…)",
                )

    def install(self) -> None:
        """Handle the signals from now on. MUST NOT be called inside `defer_signals`."""
        system.watch(self, at_exit=self.let_go, in_child=self.let_go)
        for number in self._numbers:
            self._earlier[number] = signal.signal(number, self)

    def let_go(self) -> None:
        """Restore the earlier handlers. On another thread than the main one, or if another handler
        was installed later, this handler stays and only forwards signals."""
        self._noting = False
        system.let_be(self)
        for number, earlier in self._earlier.items():
            if on_main_thread() and signal.getsignal(number) is self:
                signal.signal(number, earlier)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        earlier, came = self._earlier.get(number, signal.SIG_DFL), self.came
        is_same = came is None or time.monotonic() - came.came_s < SAME_S
        if not (self._noting and is_same):
            # As if this handler were not installed.
            if callable(earlier):
                pass_on(number, frame, earlier)
            elif earlier is signal.SIG_DFL:
                signal.signal(number, signal.SIG_DFL)
                signal.raise_signal(number)
            return
        self.came = came or preemption_signal(signal.Signals(number).name)
        # A default action that would end the program is not run: the caller saves first.
        if callable(earlier) and earlier is not signal.default_int_handler:
            pass_on(number, frame, earlier)
