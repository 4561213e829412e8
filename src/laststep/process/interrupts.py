"""Keep signal handlers from raising in the midst of things that must be done whole.

Python runs a signal's handler between any two steps of the main thread, and one that raises (Ctrl-C
does, and so do many that handle preemption) leaves undone whatever comes next: a lock that was
acquired and is never released, a slot that was leased and is written down nowhere. Inside `held`
a signal is noted instead, and its handler runs where `let_in` is called, or at the end. Whoever
waits inside goes on letting handlers in. Where something inside is stuck all the same, a second
signal of the same kind, later than the first by a second, is not held back. Handlers that only take
note and never raise (`Unheld`) are not held at all.

Only the main thread runs handlers: on any other, nothing here does anything, but for `limited`,
which ends what a thread waits for where a handler could have.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType, TracebackType

Handler = Callable[[int, "FrameType | None"], Any]

LOOK_S = 0.05
"""A signal that comes while the main thread waits is let in after so long at most."""

_STUCK_S = 1.0

_NAMES = ("INT", "TERM", "HUP", "QUIT", "ALRM", "USR1", "USR2", "VTALRM", "PROF", "CHLD", "CONT",
          "TSTP", "WINCH", "XCPU", "PWR")  # fmt: skip
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
