"""At which step ranks stop, with a board of the tests' own: whoever is told, however far apart."""

from __future__ import annotations

import gc
import signal
import threading
import time
import weakref
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expect import names, raises
from laststep import preempting
from laststep.checkpointer import Checkpointer
from laststep.errors import StorageError, UsageError
from laststep.events import Bus, PreemptionEnded
from laststep.preempting import Preempting
from laststep.process.signals import preemption_signal
from laststep.ranks.group import Rank
from laststep.settings import Options, Preemption
from waiting import PATIENCE_S, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

ASKED = Preemption(grace="60 s")


@pytest.fixture(autouse=True)
def _often() -> Iterator[None]:
    """Ranks look for each other all the time."""
    before, preempting._LOOK_S = preempting._LOOK_S, 0.002
    yield
    preempting._LOOK_S = before


class Notes:
    """A board without a store."""

    def __init__(self) -> None:
        self.notes: dict[str, bytes] = {}
        self.hushed = 0

    def put(self, name: str, note: bytes) -> None:
        self.notes[name] = note

    def look(self, name: str) -> bytes | None:
        return self.notes.get(name)

    def until(self, look: Callable[[], object], until_s: float) -> object:
        # As long as the real one: a thread that nobody answers any more ends by itself.
        while (found := look()) is None and time.monotonic() < until_s:
            time.sleep(0.001)
        return found

    def wait_all(self, names: Iterable[str], until_s: float) -> dict[str, bytes]:
        wanted = list(names)
        self.until(lambda: all(name in self.notes for name in wanted) or None, until_s)
        return {name: self.notes[name] for name in wanted if name in self.notes}

    def close_at_exit(self) -> None:
        self.hushed += 1


class Job:
    """Ranks whose training passes steps when the test says so."""

    def __init__(self, ranks: int) -> None:
        self.notes = Notes()
        self.ranks = [Preempting(ASKED, Rank(n, ranks), Bus()) for n in range(ranks)]
        self.stopped: dict[int, int] = {}

    def step(self, rank: int, step: int) -> bool:
        return self.ranks[rank].reached(step, lambda: self.notes)  # type: ignore[arg-type,return-value]

    def train(self, rank: int, first: int) -> None:
        """Until it stops."""
        step = first
        while not self.step(rank, step):
            time.sleep(0.001)
            step += 1
        self.stopped[rank] = step

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()


@given(st.lists(st.integers(0, 9), min_size=2, max_size=4), st.data())
def test_ranks_stop_at_one_step_that_nobody_has_passed(
    passed: list[int], data: st.DataObject
) -> None:
    job = Job(len(passed))
    for rank, last in enumerate(passed):
        for step in range(last + 1):
            assert not job.step(rank, step)
    told = data.draw(st.sampled_from(range(len(passed))))
    job.ranks[told]._watched.signals.came = preemption_signal("SIGTERM")
    threads = [
        threading.Thread(target=job.train, args=(rank, last + 1))
        for rank, last in enumerate(passed)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    job.close()
    assert set(job.stopped) == set(range(len(passed)))
    (step,) = set(job.stopped.values())
    assert step > max(passed)


def test_a_rank_in_the_middle_of_a_step_is_waited_for_by_nobody() -> None:
    """Its training stands in a collective with one that waits already: its thread speaks."""
    job = Job(2)
    for step in range(8):
        assert not job.step(0, step)
        assert not job.step(1, step)
    assert not job.step(1, 8)  # and is in step 9 now
    job.ranks[0]._watched.signals.came = preemption_signal("SIGTERM")
    assert not job.step(0, 8)
    assert job.step(0, 9)
    assert job.step(1, 9)
    job.close()


def test_strides_do_not_matter() -> None:
    job = Job(2)
    for step in (0, 10, 20):
        assert not job.step(0, step)
    for step in (0, 10):
        assert not job.step(1, step)
    job.ranks[1]._watched.signals.came = preemption_signal("SIGTERM")
    assert not job.step(1, 20)
    assert job.step(0, 30)
    assert job.step(1, 30)
    assert [rank.stops for rank in job.ranks] == [True, True]
    job.close()


def test_it_is_told_once_and_its_cause_is_that_of_the_rank_that_saw_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    job = Job(2)
    assert not job.step(0, 0)
    assert not job.step(1, 0)
    job.ranks[0]._watched.signals.came = preemption_signal("SIGUSR1")
    assert job.step(0, 1)
    wait_until(lambda: job.ranks[1]._watched.known is not None)
    assert job.step(1, 1)
    assert job.step(1, 1)
    told = [record.getMessage() for record in caplog.records]
    assert [names(text, "rank 0", "SIGUSR1", "60 s") for text in told[1:]] == [True]
    job.close()


def test_a_board_that_does_not_answer_is_asked_again() -> None:
    job, failures = Job(2), iter(range(30))
    look = job.notes.look

    def fail(name: str) -> bytes | None:
        if next(failures, None) is not None:
            raise StorageError("the store does not answer")
        return look(name)

    job.notes.look = fail  # type: ignore[method-assign]
    assert not job.step(1, 0)
    job.notes.put("seen", b"rank 0: SIGTERM")
    wait_until(lambda: job.ranks[1]._watched.known is not None)
    job.step(0, 0)
    wait_until(lambda: look("stop") is not None)  # or the thread of rank 1 waits for all the grace
    job.close()


def test_after_a_restore_ranks_meet_anew() -> None:
    job = Job(2)
    for rank in (0, 1):
        assert not job.step(rank, 100)
        job.ranks[rank].anew()
    job.ranks[0]._watched.signals.came = preemption_signal("SIGTERM")
    assert not job.step(1, 5)
    assert not job.step(0, 5)
    assert job.step(0, 6)
    assert job.step(1, 6)
    job.close()


def test_threads_end_with_what_they_are_for() -> None:
    job = Job(2)
    assert not job.step(0, 0)
    thread = job.ranks[0]._watcher._thread  # type: ignore[union-attr]
    job.ranks.clear()
    gc.collect()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert job.notes.hushed


def test_a_checkpointer_that_is_dropped_gives_its_signals_back(run_folder: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    made = Checkpointer(
        run_folder, state={"n": 1}, preemption=True, options=Options(flush="thread", progress=False)
    )
    assert signal.getsignal(signal.SIGTERM) is not before
    gone = weakref.ref(made)
    del made
    gc.collect()
    assert gone() is None
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"signals": ("SIGKILL",)}, "SIGKILL"),
        ({"signals": ()}, "()"),
        ({"signals": "SIGTERM"}, "'SIGTERM'"),
        ({"grace": "0 s"}, "'0 s'"),
        ({"exit_code": 256}, "256"),
    ],
)
def test_what_cannot_be_is_refused(wrong: dict[str, object], said: str) -> None:
    with raises(UsageError, found=said):
        Preemption(**wrong)  # type: ignore[arg-type]


def test_without_it_no_handler_is_installed_and_what_is_none_is_refused(run_folder: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    for off in (False, None):
        with Checkpointer(
            run_folder, state={"n": 1}, preemption=off, options=Options(progress=False)
        ) as ckpt:
            assert signal.getsignal(signal.SIGTERM) is before
            assert not ckpt.preempted
    with raises(UsageError, found="'30 s'", remedy="preemption=True"):
        Checkpointer(run_folder, state={"n": 1}, preemption="30 s")  # type: ignore[arg-type]


def test_a_job_that_saves_nothing_is_not_said_to_have_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LASTSTEP_DISABLED", "1")
    events: list[object] = []
    ckpt = Checkpointer(
        tmp_path / "run",
        s={"n": 1},
        preemption=Preemption(signals=("SIGUSR1",), exit_code=None),
        options=Options(flush="thread", progress=False, subscribers=(events.append,)),
    )
    with ckpt:
        signal.raise_signal(signal.SIGUSR1)
        wait_until(lambda: ckpt.step(0) is not None or ckpt.preempted)
    [ended] = [event for event in events if isinstance(event, PreemptionEnded)]
    assert (ended.committed, "LASTSTEP_DISABLED" in ended.problem) == (False, True)
    assert not (tmp_path / "run").exists()
