"""A new flusher in place of a dead one goes on from the last commit, whoever found out about it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from expect import raises
from laststep.catalog.attempt import AttemptName
from laststep.catalog.terms import Seen
from laststep.constants import CHUNK_BYTES
from laststep.errors import StorageError
from laststep.events import Bus
from laststep.flush.client import Client
from laststep.flush.protocol import Connection, Continue, Instruct, in_flusher
from laststep.flush.saves import Save, SaveState
from laststep.memory.pool import Pool
from laststep.plan.files import plan_save
from saves_of import flush
from waiting import PATIENCE_S

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator

BEFORE = Continue(after=AttemptName(step=1, term=1, attempt=1), seen=Seen(term=1, commit=(1, 1)))
COMMITTED = AttemptName(step=2, term=1, attempt=2)


class Flusher:
    """Is there and does nothing, until it is killed."""

    pid = pidfd = None

    def __init__(self, end: socket.socket) -> None:
        self.kill = end.close
        self.connection = Connection(end)

    def join(self, _timeout_s: float) -> bool:
        return True

    end = join

    def how_it_ended(self) -> str:
        return "killed"


class Job:
    """A start of a job of several ranks; `over` is called between a save's end and its telling."""

    liveness_lock_name = "start-1"

    def __init__(self) -> None:
        self.over: Callable[[int], None] = lambda _save: None

    url = "a run"

    def close(self) -> None: ...


class FirstRank:
    """The first rank of a job, with a save that all ranks decide about."""

    def __init__(self) -> None:
        self.flushers: list[Flusher] = []
        self.pool = Pool(CHUNK_BYTES, pinned=False)
        self.job = Job()
        self.client = Client(self._launch, self.pool, Bus(), self.job)  # type: ignore[arg-type]
        self.client.continue_from(BEFORE)
        self.save = Save(self.client, 2, role="first")
        self.client.begin(self.save, plan_save(()), lambda: None)  # type: ignore[arg-type,return-value]
        flush(self.save)

    def _launch(self, end: socket.socket) -> Flusher:
        self.flushers.append(Flusher(end))
        return self.flushers[-1]

    def commit(self) -> None:
        """What the commit thread does when it has found the commit."""
        while self.save.lost is None:
            self.save.rest(PATIENCE_S)
        self.save.decided(COMMITTED)

    def continues(self) -> AttemptName | None:
        """What the newest flusher was told to continue."""
        told = self.flushers[-1].connection.receive(in_flusher)
        assert isinstance(told, Instruct)
        assert told.continues is not None
        return told.continues.after


@pytest.fixture
def rank() -> Iterator[FirstRank]:
    rank = FirstRank()
    yield rank
    rank.flushers[-1].connection.close()
    rank.client.close()
    rank.pool.close()


@pytest.fixture
def waited_for(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set when somebody waits for the end of a save."""
    asked, wait = threading.Event(), Save.wait_for

    def ask(save: Save, state: SaveState, timeout_s: float | None = None) -> bool:
        asked.set()
        return wait(save, state, timeout_s)

    monkeypatch.setattr(Save, "wait_for", ask)
    return asked


def test_a_flusher_whose_death_is_still_being_told_is_not_replaced_before(
    rank: FirstRank, waited_for: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, joined, receiver = threading.Event(), threading.Event(), rank.client._receiver
    join, fail = receiver.join, rank.pool.slots.lose_flusher

    def note_and_join(timeout_s: float) -> bool:
        joined.set()
        return join(timeout_s)

    def fail_slowly(error: Exception) -> None:
        fail(error)  # type: ignore[arg-type]
        known.set()
        joined.wait(PATIENCE_S)  # nobody was told yet that the save is lost

    def commit() -> None:
        waited_for.wait(PATIENCE_S)
        rank.commit()

    monkeypatch.setattr(receiver, "join", note_and_join)
    monkeypatch.setattr(rank.pool.slots, "lose_flusher", fail_slowly)
    committing = threading.Thread(target=commit)
    committing.start()
    rank.flushers[0].kill()
    known.wait(PATIENCE_S)
    rank.client.restart(PATIENCE_S)
    waited_for.set()
    committing.join()
    assert rank.continues() == COMMITTED


def test_a_commit_that_is_just_being_told_is_waited_for(
    rank: FirstRank, waited_for: threading.Event
) -> None:
    ended = threading.Event()

    def over(_save: int) -> None:
        ended.set()
        waited_for.wait(PATIENCE_S)

    rank.job.over = over
    committing = threading.Thread(target=rank.commit)
    committing.start()
    rank.flushers[0].kill()
    ended.wait(PATIENCE_S)
    rank.client.restart(PATIENCE_S)
    waited_for.set()
    committing.join()
    assert rank.continues() == COMMITTED


def test_a_save_that_nobody_ends_is_waited_for_only_so_long(rank: FirstRank) -> None:
    rank.flushers[0].kill()
    rank.client._receiver.join(PATIENCE_S)
    with raises(StorageError, found="step 2"):
        rank.client.restart(0.01)
    assert rank.client.saves.refusal is not None
    rank.commit()
    rank.client.restart(PATIENCE_S)  # it does
    assert rank.continues() == COMMITTED


def test_a_death_that_is_looked_into_for_ever_is_waited_for_only_so_long(
    rank: FirstRank, monkeypatch: pytest.MonkeyPatch
) -> None:
    looking, known = threading.Event(), threading.Event()

    def hang(_error: Exception) -> None:
        looking.set()
        known.wait(PATIENCE_S)

    monkeypatch.setattr(rank.pool.slots, "lose_flusher", hang)
    rank.save.decided(COMMITTED)
    rank.flushers[0].kill()
    looking.wait(PATIENCE_S)
    with pytest.raises(StorageError):
        rank.client.restart(0.01)
    known.set()
    rank.client.restart(PATIENCE_S)
    assert rank.continues() == COMMITTED
