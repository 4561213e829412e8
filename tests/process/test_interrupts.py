"""Signal handlers that raise, kept out of what must be done whole."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import TYPE_CHECKING

import pytest

from laststep.process import signals

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture
def came() -> Iterator[list[int]]:
    """Handlers that raise, and a list of the signals that they were called with."""
    seen: list[int] = []

    def handler(number: int, _: object) -> None:
        seen.append(number)
        raise KeyboardInterrupt

    numbers = (signal.SIGUSR1, signal.SIGUSR2)
    before = {number: signal.signal(number, handler) for number in numbers}
    yield seen
    for number, old in before.items():
        assert signal.getsignal(number) is handler, "a handler was not put back"
        signal.signal(number, old)


def send(number: int = signal.SIGUSR1) -> None:
    os.kill(os.getpid(), number)


def test_a_handler_waits_for_the_end(came: list[int]) -> None:
    done = False
    with pytest.raises(KeyboardInterrupt), signals.defer_signals():  # noqa: PT012
        send()
        assert came == []
        done = True
    assert done
    assert came == [signal.SIGUSR1]


def test_a_handler_is_let_in_where_it_may_raise(came: list[int]) -> None:
    with signals.defer_signals():
        signals.check_signals()
        send()
        with pytest.raises(KeyboardInterrupt):
            signals.check_signals()
        signals.check_signals()
    assert came == [signal.SIGUSR1]


def test_the_outermost_holds(came: list[int]) -> None:
    with pytest.raises(KeyboardInterrupt), signals.defer_signals():  # noqa: PT012
        with signals.defer_signals():
            send()
        assert came == []


def test_every_signal_is_handled_though_the_first_raises(came: list[int]) -> None:
    with pytest.raises(KeyboardInterrupt), signals.defer_signals():  # noqa: PT012
        send(signal.SIGUSR1)
        send(signal.SIGUSR2)
        with pytest.raises(KeyboardInterrupt):
            signals.check_signals()
        assert len(came) == 1
    assert sorted(came) == [signal.SIGUSR1, signal.SIGUSR2]


def test_every_signal_is_handled_at_the_end_of_the_block(came: list[int]) -> None:
    with pytest.raises(KeyboardInterrupt), signals.defer_signals():  # noqa: PT012
        send(signal.SIGUSR1)
        send(signal.SIGUSR2)
    assert sorted(came) == [signal.SIGUSR1, signal.SIGUSR2]


def test_what_is_stuck_can_be_left(came: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    with signals.defer_signals():
        send()
        send()
        assert came == []
        now_s += 1.01
        with pytest.raises(KeyboardInterrupt):
            send()
    assert came == [signal.SIGUSR1]


def test_an_error_inside_is_not_lost(came: list[int]) -> None:
    with pytest.raises(KeyboardInterrupt) as raised, signals.defer_signals():  # noqa: PT012
        send()
        raise ValueError("inside")
    assert isinstance(raised.value.__context__, ValueError)
    assert came


def test_a_handler_that_is_set_inside_stays(came: list[int]) -> None:
    old = signal.getsignal(signal.SIGUSR1)
    with signals.defer_signals():
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
    signal.signal(signal.SIGUSR1, old)
    assert came == []


def test_waiting_lets_handlers_in(came: list[int]) -> None:
    class Signalled(threading.Event):
        """A signal comes to whoever waits for it."""

        def wait(self, timeout: float | None = None) -> bool:
            send()
            return super().wait(timeout)

    with pytest.raises(KeyboardInterrupt):
        signals.wait(Signalled(), 30)
    assert came == [signal.SIGUSR1]


def test_waiting_ends_in_time_and_with_the_event() -> None:
    event = threading.Event()
    began = time.monotonic()
    assert not signals.wait(event, 0.12)
    assert time.monotonic() - began >= 0.12
    threading.Timer(0.05, event.set).start()
    assert signals.wait(event)


def test_on_another_thread_it_does_nothing(came: list[int]) -> None:
    """Handlers run on the main thread whoever receives the signal."""

    def elsewhere(work: Callable[[], object]) -> None:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()

    def work() -> None:
        with signals.defer_signals():
            signals.check_signals()
            assert signals.look_within(None) is None
            inside.append(signal.getsignal(signal.SIGUSR1))

    inside: list[object] = []
    elsewhere(work)
    assert inside == [signal.getsignal(signal.SIGUSR1)]
    with signals.defer_signals():
        send()
        elsewhere(signals.check_signals)
        assert came == []
        with pytest.raises(KeyboardInterrupt):
            signals.check_signals()
