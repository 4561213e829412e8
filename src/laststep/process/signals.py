"""Interrupts and signals: let them in at safe points, hold them back elsewhere."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from laststep.errors import UsageError
from laststep.process import system

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from types import FrameType, TracebackType


Handler = Callable[[int, "FrameType | None"], Any]

LOOK_S = 0.05
"""A signal that comes while the main thread waits is let in after so long at most."""

_STUCK_S = 1.0

_NAMES = (
    "INT",
    "TERM",
    "HUP",
    "QUIT",
    "ALRM",
    "USR1",
    "USR2",
    "VTALRM",
    "PROF",
    "CHLD",
    "CONT",
    "TSTP",
    "WINCH",
    "XCPU",
    "PWR",
)
_NUMBERS = tuple(getattr(signal, f"SIG{name}") for name in _NAMES if hasattr(signal, f"SIG{name}"))
"""Those that people, launchers and timers send. To look at all of them takes five times as long."""

_holding: HeldHandlers | None = None
"""Of the main thread."""
_limits: dict[int, Callable[[], bool]] = {}
"""Says of threads, by their numbers, whether the time is up for what they do."""


def on_main_thread() -> bool:
    """Whether this is the thread on which handlers run."""
    return threading.get_ident() == threading.main_thread().ident


class Unheld:
    """A handler that only takes note, and never raises: it runs at once."""


class TimeIsUp(Exception):
    """What was waited for did not come in time."""


class HeldHandlers:
    """Handlers wait until the outermost of these is over: `with held(): …`."""

    def __init__(self) -> None:
        self._before: dict[int, Handler] = {}
        self._came: dict[int, float] = {}
        """Signals that are held back, and since when."""
        self._holds = False

    def __enter__(self) -> None:
        global _holding  # noqa: PLW0603 (there is one main thread)
        if _holding is not None or not on_main_thread():
            return
        self._before = _handlers()
        for number in self._before:
            signal.signal(number, self._note)
        self._holds = True
        _holding = self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        global _holding
        if not self._holds:
            return
        # From here on `_note` passes every signal on: one that raises before its handler is back in
        # place loses nothing.
        _holding, self._holds = None, False
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._note:  # else somebody has set another inside
                signal.signal(number, handler)
        self.let_in()

    def let_in(self) -> None:
        """Run the handlers of what came; the first that raises leaves the others for later."""
        while self._came:
            number = next(iter(self._came))
            del self._came[number]
            self._before[number](number, None)

    def pass_on(self, number: int, frame: FrameType | None, handler: Handler) -> None:
        """Hold back a handler that another one calls."""
        self._before[number] = handler
        self._note(number, frame)

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._holds and now - self._came.setdefault(number, now) < _STUCK_S:
            return
        self._came.pop(number, None)
        self._before[number](number, frame)


def held() -> HeldHandlers:
    """Let no handler run inside, except where one is let in. May be nested."""
    return HeldHandlers()


def let_in() -> None:
    """Here a handler may raise, and a limit end what is done."""
    if _holding is not None and on_main_thread():
        _holding.let_in()
    limit = _limits.get(threading.get_ident())
    if limit is not None and limit():
        raise TimeIsUp


def pass_on(number: int, frame: FrameType | None, handler: Handler) -> None:
    """For handlers: call another one, which may raise, where one that raises may run."""
    if _holding is not None:
        _holding.pass_on(number, frame, handler)
    else:
        handler(number, frame)


@contextlib.contextmanager
def limited(is_over: Callable[[], bool]) -> Iterator[None]:
    """Whatever this thread waits for inside ends with `TimeIsUp` once that is true, where a handler
    could have raised as well. The innermost counts."""
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
    """How long to wait before the next `let_in`, when `left_s` are left."""
    looks = threading.get_ident() in _limits or (_holding is not None and on_main_thread())
    if not looks:
        return left_s
    return LOOK_S if left_s is None else min(left_s, LOOK_S)


def wait(event: threading.Event, timeout_s: float | None = None) -> bool:
    """Wait for an event, letting handlers in; False when the time is up. An `Event.wait` that is
    interrupted at the wrong step would block those who set the event for ever."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    with held():
        while True:
            left = None if deadline is None else max(deadline - time.monotonic(), 0)
            if event.wait(look_within(left)):
                return True
            let_in()
            if deadline is not None and time.monotonic() >= deadline:
                return False


def _handlers() -> dict[int, Handler]:
    """What Python runs at each signal that it handles, and may raise."""
    found: dict[int, Handler] = {}
    for number in _NUMBERS:
        handler = signal.getsignal(number)
        if callable(handler) and not isinstance(handler, Unheld):
            found[number] = handler
    return found


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


class NotedSignals(Unheld):
    """The handler of some signals, until it is let go."""

    def __init__(self, names: Iterable[str]) -> None:
        """`UsageError` where they cannot be had. Nothing is installed yet."""
        self._numbers = [int(signal.Signals[name]) for name in names]
        self._earlier: dict[int, Any] = {}
        self._noting = True
        self.came: Notice | None = None
        if self._numbers and not on_main_thread():
            raise UsageError(
                "signals are handled on the main thread only",
                expected="a Checkpointer that is made there",
                found=f"the thread {threading.current_thread().name}",
                remedy="make it there, or pass Preemption(signals=(), file=…)",
            )
        for number in self._numbers:
            if signal.getsignal(number) is None:
                name = signal.Signals(number).name
                raise UsageError(
                    f"{name} has a handler that Python cannot put back",
                    expected="one of Python's",
                    found="one of another library",
                    remedy=f"leave {name} out of signals=(…)",
                )

    def install(self) -> None:
        """Handle them from now on. MUST NOT be called inside `interrupts.held`."""
        system.watch(self, at_exit=self.let_go, in_child=self.let_go)
        for number in self._numbers:
            self._earlier[number] = signal.signal(number, self)

    def let_go(self) -> None:
        """Give them back. On another thread than the main one, or where somebody has come after
        this, the handler stays and only passes on."""
        self._noting = False
        system.let_be(self)
        for number, earlier in self._earlier.items():
            if on_main_thread() and signal.getsignal(number) is self:
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
            pass_on(number, frame, earlier)

    @staticmethod
    def _act(number: int, frame: FrameType | None, earlier: Any) -> None:
        """Do what would be done without this."""
        if callable(earlier):
            pass_on(number, frame, earlier)
        elif earlier is signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
