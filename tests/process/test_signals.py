"""Signals that are noted: what their earlier handlers see of them, and what a second one does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import pytest

from expect import raises
from laststep.errors import UsageError
from laststep.process import signals
from laststep.process.signals import RecordedSignals

if TYPE_CHECKING:
    from collections.abc import Iterator

NAME, NUMBER = "SIGUSR1", signal.SIGUSR1


@pytest.fixture(autouse=True)
def earlier() -> Iterator[list[int]]:
    """A handler that was there before, and what it was called with."""
    seen: list[int] = []
    before = signal.signal(NUMBER, lambda number, _: seen.append(number))
    yield seen
    signal.signal(NUMBER, before)


@pytest.fixture
def noted() -> Iterator[RecordedSignals]:
    handler = RecordedSignals([NAME])
    handler.install()
    yield handler
    handler.let_go()


def send() -> None:
    os.kill(os.getpid(), NUMBER)


def test_a_signal_is_noted_with_its_name_and_the_earlier_handler_runs(
    noted: RecordedSignals, earlier: list[int]
) -> None:
    assert noted.came is None
    send()
    assert noted.came is not None
    assert noted.came.cause == NAME
    assert earlier == [NUMBER]


def test_the_first_one_counts(noted: RecordedSignals, earlier: list[int]) -> None:
    send()
    first = noted.came
    send()
    assert noted.came is first
    assert earlier == [NUMBER, NUMBER]


def test_it_is_noted_at_once_where_handlers_are_held_and_the_earlier_one_is_held(
    noted: RecordedSignals, earlier: list[int]
) -> None:
    with signals.defer_signals():
        send()
        assert noted.came is not None
        assert earlier == []
        signals.check_signals()
        assert earlier == [NUMBER]
    assert earlier == [NUMBER]
    assert signal.getsignal(NUMBER) is noted


def test_an_earlier_handler_that_raises_does_so_where_it_would_have(noted: RecordedSignals) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    noted._earlier[NUMBER] = stop
    done = False
    with pytest.raises(KeyboardInterrupt), signals.defer_signals():  # noqa: PT012
        send()
        done = True
    assert done
    assert noted.came is not None


def test_handlers_are_given_back(earlier: list[int]) -> None:
    before = signal.getsignal(NUMBER)
    handler = RecordedSignals([NAME])
    assert signal.getsignal(NUMBER) is before
    handler.install()
    assert signal.getsignal(NUMBER) is handler
    handler.let_go()
    assert signal.getsignal(NUMBER) is before
    send()
    assert handler.came is None
    assert earlier == [NUMBER]


def test_one_that_is_let_go_in_another_order_or_thread_only_passes_on(earlier: list[int]) -> None:
    before = signal.getsignal(NUMBER)
    first, second = RecordedSignals([NAME]), RecordedSignals([NAME])
    first.install()
    second.install()
    first.let_go()
    thread = threading.Thread(target=second.let_go)
    thread.start()
    thread.join()
    assert signal.getsignal(NUMBER) is second
    send()
    assert (first.came, second.came, earlier) == (None, None, [NUMBER])
    signal.signal(NUMBER, before)


def test_of_two_both_note_it(noted: RecordedSignals, earlier: list[int]) -> None:
    another = RecordedSignals([NAME])
    another.install()
    send()
    another.let_go()
    assert noted.came is not None
    assert another.came is not None
    assert earlier == [NUMBER]


def test_other_threads_than_the_main_one_cannot_have_signals() -> None:
    found: list[UsageError] = []

    def make() -> None:
        RecordedSignals([])
        try:
            RecordedSignals([NAME])
        except UsageError as error:
            found.append(error)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    assert len(found) == 1


def test_a_handler_that_python_does_not_know_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal, "getsignal", lambda _: None)
    with raises(UsageError, "SIGUSR1", remedy="signals="):
        RecordedSignals([NAME])


def test_a_forked_child_has_the_earlier_handler(noted: RecordedSignals) -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0 if signal.getsignal(NUMBER) is noted._earlier[NUMBER] else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert signal.getsignal(NUMBER) is noted


SECOND = """
import os, signal, sys
from laststep.process import signals
{before}
noted = signals.RecordedSignals(["{name}"])
noted.install()
for time in (1, 2):
    with signals.defer_signals():
        signal.raise_signal(signal.{name})
        print(time, flush=True)
    if time == 1:
        signal.raise_signal(signal.{name})  # a launcher passes it on
        signals.SAME_S = 0.0
"""


@pytest.mark.parametrize(
    ("name", "before", "said", "code"),
    [
        ("SIGTERM", "", "1\n", -signal.SIGTERM),
        ("SIGUSR1", "", "1\n", -signal.SIGUSR1),
        ("SIGTERM", "signal.signal(signal.SIGTERM, signal.SIG_IGN)", "1\n2\n", 0),
        ("SIGINT", "signal.signal(signal.SIGINT, signal.default_int_handler)", "1\n2\n", 130),
        ("SIGTERM", "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))", "1\n", 7),
    ],
)
def test_the_second_does_what_it_would_have_done_without(
    name: str, before: str, said: str, code: int
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SECOND.format(name=name, before=before)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )
    assert done.stdout == said, done.stderr
    assert done.returncode in (code, -signal.SIGINT if code == 130 else code)


def test_what_waits_ends_when_its_time_is_up() -> None:
    with pytest.raises(signals.DeadlineExceeded), signals.deadline(lambda: True):
        signals.wait(threading.Event())
    assert not signals.wait(threading.Event(), 0.0)


def test_what_does_not_wait_does_not_end() -> None:
    event = threading.Event()
    event.set()
    with signals.deadline(lambda: True):
        assert signals.wait(event)


def test_the_innermost_limit_counts_and_the_outer_one_is_there_again() -> None:
    with signals.deadline(lambda: True):
        with signals.deadline(lambda: False):
            assert not signals.wait(threading.Event(), 0.01)
        with pytest.raises(signals.DeadlineExceeded):
            signals.wait(threading.Event())


def test_each_thread_has_a_limit_of_its_own() -> None:
    found: list[bool] = []

    def work() -> None:
        found.append(signals.wait(threading.Event(), 0.01))
        with pytest.raises(signals.DeadlineExceeded), signals.deadline(lambda: True):
            signals.wait(threading.Event())
        found.append(True)

    with signals.deadline(lambda: True):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert found == [False, True]


def test_handlers_that_an_interrupt_has_left_do_not_pile_up() -> None:
    def handler(*_: object) -> None:
        pass

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        for _ in range(50):  # as if a handler had raised before the block was left
            signals.defer_signals().__enter__()
            signals._holding = None
        with signals.defer_signals():
            assert len(repr(signal.getsignal(signal.SIGUSR1))) < 200
        assert signal.getsignal(signal.SIGUSR1) is handler
    finally:
        for number in signals._NUMBERS:
            if isinstance(
                getattr(signal.getsignal(number), "__self__", None), signals.defer_signals
            ):
                signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGUSR1, before)
