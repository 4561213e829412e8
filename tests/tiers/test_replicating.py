"""Checkpoints go on to replicas beside training; what is lost nearer comes back from there."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

import laststep
from expect import warned
from laststep import events
from laststep.catalog.attempt import AttemptName
from laststep.errors import StorageError
from laststep.settings import as_keywords
from laststep.storage.directory import DirectoryStore
from laststep.tiers.replicating import ReplicaOrder, Replicator, TierStatus
from laststep.tiers.tier import Tier
from waiting import PATIENCE_S, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from laststep.storage.store import FileWriting


class Places:
    """A primary and a replica, and a state that tells its step."""

    def __init__(self, folder: Path) -> None:
        self.primary, self.far = folder / "primary", folder / "far"
        self.state = {"w": torch.zeros(3 << 20), "s": torch.zeros(5)}
        self.heard: list[events.Event] = []

    def open(self, tier: Tier | None = None, **settings: object) -> laststep.Checkpointer:
        tiers = [str(self.primary), tier or str(self.far)]
        how: dict[str, object] = {"flush": "thread", "progress": False, **settings}
        return laststep.Checkpointer(
            tiers=tiers,
            state=self.state,
            **as_keywords({"subscribers": [self.heard.append], **how}),
        )  # type: ignore[call-overload]

    def save(self, ckpt: laststep.Checkpointer, step: int) -> laststep.SaveHandle:
        for tensor in self.state.values():
            tensor.fill_(step)
        handle = ckpt.save(step)
        handle.result()
        return handle

    def wait_for(self, step: int) -> None:
        wait_until(lambda: step in self.reached())

    def reached(self) -> list[int]:
        """The steps that the replica is said to have."""
        return [e.step for e in self.heard if isinstance(e, events.TierHolds)]

    def steps(self, place: Path) -> list[int]:
        return laststep.open(place).steps()

    def is_all(self, step: int) -> bool:
        return all(bool((tensor == step).all()) for tensor in self.state.values())


@pytest.fixture
def places(run_folder: Path) -> Places:
    run_folder.mkdir()
    return Places(run_folder)


def test_a_checkpoint_goes_on_to_the_next_tier(places: Places) -> None:
    with places.open() as ckpt:
        ckpt.restore()
        handle = places.save(ckpt, 1)
        places.wait_for(1)
        assert list(handle.report.tiers) == [str(places.primary), str(places.far)]
    assert places.steps(places.far) == [1]
    assert laststep.open(places.far)[1].verify().damage == ()


def test_the_last_one_is_brought_before_close_returns(places: Places) -> None:
    with places.open(flush="process") as ckpt:
        ckpt.restore()
        for step in range(3):
            places.save(ckpt, step)
    assert places.steps(places.far)[-1] == 2


def test_of_so_many_one_goes_there_and_old_ones_go(places: Places) -> None:
    tier = Tier(str(places.far), every=2, keep=laststep.Keep(last=2))
    with places.open(tier) as ckpt:
        ckpt.restore()
        for step in range(7):
            places.save(ckpt, step)
            if step % 2 == 0:
                places.wait_for(step)
    assert places.steps(places.far) == [4, 6]
    assert places.steps(places.primary) == list(range(7))


def test_a_tier_that_fails_hurts_nobody_and_is_tried_again(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("laststep.tiers.replicating._FIRST_PAUSE_S", 0.05)
    with laststep.Checkpointer(places.primary, state=places.state) as ckpt:
        places.save(ckpt, 0)
    places.far.write_text("a file where a folder is wanted")
    with places.open() as ckpt:
        ckpt.restore()
        for step in (1, 2):
            assert places.save(ckpt, step).error is None
        wait_until(lambda: any(isinstance(event, events.TierLags) for event in places.heard))
        assert places.reached() == []
        places.far.unlink()
        places.wait_for(2)
    assert places.steps(places.far)[-1] == 2


def test_where_home_is_lost_the_run_comes_back_from_the_tier(places: Places) -> None:
    with places.open() as ckpt:
        ckpt.restore()
        places.save(ckpt, 1)
        places.save(ckpt, 2)
    shutil.rmtree(places.primary)
    places.state["w"].zero_()
    with places.open() as ckpt:
        assert ckpt.restore().step == 2
        assert places.is_all(2)
        places.save(ckpt, 3)
    assert places.steps(places.primary) == [3]
    assert places.steps(places.far)[-2:] == [2, 3]


def test_a_step_that_home_no_longer_has_comes_back_from_the_tier(places: Places) -> None:
    with places.open(keep=laststep.Keep(last=1)) as ckpt:
        ckpt.restore()
        for step in range(3):
            places.save(ckpt, step)
            places.wait_for(step)
        wait_until(lambda: places.steps(places.primary) == [2])
    with places.open() as ckpt:
        assert ckpt.restore(0).step == 0
        assert places.is_all(0)


def test_a_tier_that_is_another_run_is_left_alone(
    places: Places, caplog: pytest.LogCaptureFixture
) -> None:
    with laststep.Checkpointer(places.far, state=places.state) as other:
        other.restore()
        other.save(99).result()
    with places.open() as ckpt:
        assert ckpt.restore().step == 99  # primary is new, and this is what there is
    shutil.rmtree(places.primary)
    with laststep.Checkpointer(places.primary, state=places.state) as ckpt:
        ckpt.restore()
        ckpt.save(1).result()
    caplog.clear()
    with places.open() as ckpt:
        assert ckpt.restore().step == 1
        places.save(ckpt, 2)
    assert warned(caplog, places.far)
    assert places.steps(places.far) == [99]


def test_the_next_start_brings_what_the_last_one_did_not(places: Places) -> None:
    with laststep.Checkpointer(places.primary, state=places.state) as ckpt:
        ckpt.restore()
        places.save(ckpt, 1)
        places.save(ckpt, 2)
    with places.open() as ckpt:
        ckpt.restore()
        places.wait_for(2)
    assert places.steps(places.far) == [2]


def test_drains_that_are_killed_leave_nothing_once_a_later_one_is_there(places: Places) -> None:
    slow = Tier(str(places.far), keep=laststep.Keep(last=1), limit="1 kB/s")

    def cut_off() -> int:
        return len(list(places.far.glob("step-*/copying.lock")))

    with places.open(slow, flush="process") as ckpt:
        ckpt.restore()
        for step in (1, 2, 3, 4):  # each flusher begins with what the one before has left undone
            places.save(ckpt, step)
            wait_until(lambda: cut_off() >= max(step - 1, 1))  # noqa: B023 (called here)
            os.kill(ckpt._client.helper_pid, signal.SIGKILL)
            wait_until(lambda: ckpt._client.saves.refusal is not None)
    assert (places.steps(places.far), cut_off() >= 3) == ([], True)
    with places.open(Tier(str(places.far), keep=laststep.Keep(last=1))) as ckpt:
        ckpt.restore()
        last = places.save(ckpt, 5).report.folder
        places.wait_for(5)
    assert [path.name for path in places.far.glob("step-*")] == [last]


class Gate(DirectoryStore):
    """A store that lets files through when it is told to."""

    opened = threading.Event()
    asked = threading.Event()

    def open_writer(self, name: str, *, expected_bytes: int) -> FileWriting:
        self.asked.set()
        self.opened.wait()
        return super().open_writer(name, expected_bytes=expected_bytes)


@pytest.fixture
def gate(places: Places, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Gate]]:
    Gate.opened.clear()
    Gate.asked.clear()
    monkeypatch.setattr(
        "laststep.tiers.replicating.open_store",
        lambda url: (Gate if url == str(places.far) else DirectoryStore)(url),
    )
    opener = threading.Timer(2 * PATIENCE_S, Gate.opened.set)  # a test that fails must not hang
    opener.start()
    yield Gate
    opener.cancel()


def test_while_one_is_on_its_way_only_the_newest_waits(places: Places, gate: type[Gate]) -> None:
    with places.open(keep=laststep.Keep(last=1)) as ckpt:
        ckpt.restore()
        places.save(ckpt, 0)
        gate.asked.wait()
        for step in (1, 2, 3):
            places.save(ckpt, step)
        # Retention leaves alone what is on its way, and what waits.
        wait_until(lambda: places.steps(places.primary) == [0, 3])
        gate.opened.set()
        places.wait_for(3)
    assert places.steps(places.far) == [0, 3]


class Said:
    """Hears a replicator, without a flusher."""

    def __init__(self) -> None:
        self.news: list[TierStatus] = []

    def replicated(self) -> list[int]:
        return [news.at.step for news in self.news if news.state == "held"]


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("laststep.tiers.replicating._LOOK_S", 0.01)
    monkeypatch.setattr("laststep.tiers.replicating._LAST_PATIENCE_S", 0.05)


@pytest.mark.usefixtures("hurried")
def test_ranks_bring_their_own_files_and_the_first_commits(places: Places) -> None:
    """Files of three ranks, as a replicator sees them: what is copied is a checkpoint of one, whose
    files are shared out."""
    with laststep.Checkpointer(places.primary, state=places.state) as ckpt:
        ckpt.restore()
        at = attempt_of(places.save(ckpt, 4))
    heard = [Said() for _ in range(3)]
    replicators = replicators_of(places, heard)
    for each in reversed(replicators):  # the first is the last to hear of it
        each.start()
        each.committed(at)
    wait_until(lambda: heard[0].replicated() == [4])
    end(replicators)
    assert places.steps(places.far) == [4]
    assert not any(news.state == "failed" for said in heard for news in said.news)


@pytest.mark.usefixtures("hurried")
def test_a_copy_that_is_committed_stays_though_what_comes_after_it_fails(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("laststep.tiers.replicating._PATIENCE_S", 0.05)
    delete = DirectoryStore.delete

    def refused(store: DirectoryStore, name: str) -> None:
        if name.endswith(".lock") and str(places.far) in store.url:
            raise StorageError("cannot delete", found="EIO")
        delete(store, name)

    monkeypatch.setattr(DirectoryStore, "delete", refused)
    with laststep.Checkpointer(places.primary, state=places.state) as ckpt:
        ckpt.restore()
        at = attempt_of(places.save(ckpt, 4))
    heard = [Said() for _ in range(3)]
    replicators = replicators_of(places, heard)
    for each in replicators:
        each.committed(at)
        each.start()
    wait_until(lambda: heard[0].replicated() == [4])
    end(replicators)
    assert places.steps(places.far) == [4]


@pytest.mark.usefixtures("hurried")
def test_a_rank_brings_what_the_first_has_begun_with_and_then_what_is_newer(places: Places) -> None:
    with laststep.Checkpointer(places.primary, state=places.state) as ckpt:
        ckpt.restore()
        older, newer = (attempt_of(places.save(ckpt, step)) for step in (1, 2))
    heard = [Said() for _ in range(2)]
    first, other = replicators_of(places, heard)
    for at in (older, newer):  # it knows of both before the first begins with the older
        other.committed(at)
    other.start()
    first.committed(older)
    first.start()
    wait_until(lambda: 1 in heard[0].replicated())
    first.committed(newer)
    wait_until(lambda: 2 in heard[0].replicated())
    end([first, other])
    assert places.steps(places.far) == [1, 2]


@pytest.mark.usefixtures("hurried")
def test_ranks_bring_their_own_files_of_some_items(places: Places) -> None:
    golden = Path(__file__).resolve().parent.parent / "golden" / "version-1" / "fsdp2"
    shutil.copytree(golden, places.primary)
    heard = [Said() for _ in range(3)]
    replicators = replicators_of(places, heard, ("model",))
    for each in reversed(replicators):
        each.start()
        each.committed(AttemptName(step=5, term=1, attempt=1))
    wait_until(lambda: heard[0].replicated() == [5])
    end(replicators)
    checkpoint = laststep.open(places.far)[5]
    assert (checkpoint.items(), checkpoint.omitted_items) == (["model"], ("optimizer",))
    assert checkpoint.verify().damage == ()
    whole = laststep.open(places.primary)[5]
    for name in checkpoint.tensors():
        assert torch.equal(checkpoint.tensor(name)[:], whole.tensor(name)[:])


@pytest.mark.usefixtures("hurried")
def test_a_rank_ends_though_the_first_has_never_begun(places: Places) -> None:
    with laststep.Checkpointer(places.primary, state=places.state) as ckpt:
        ckpt.restore()
        at = attempt_of(places.save(ckpt, 1))
    _, other = replicators_of(places, [Said(), Said()])
    other.committed(at)
    other.start()
    end([other])
    assert not places.far.exists()


class Half:
    """A copy of which another rank brings its part for a while."""

    def __init__(self, looks: int) -> None:
        self.looks = looks

    def commit(self, _: str) -> None:
        if self.looks:
            raise StorageError("it is not whole")

    def is_under_way(self, _: str) -> bool:
        self.looks -= 1
        return True


@pytest.mark.usefixtures("hurried")
def test_the_first_rank_waits_for_one_that_brings_its_files_however_long(places: Places) -> None:
    order, copy = ReplicaOrder(url=str(places.far)), Half(looks=20)
    replicator = Replicator(DirectoryStore(str(places.primary)), order, lambda _: None, 0, 2)
    replicator.ask_to_end(at_once=False)
    at = AttemptName(step=1, term=1, attempt=1)
    replicator._commit_when_whole(copy, at)  # type: ignore[arg-type]
    assert copy.looks == 0


def replicators_of(
    places: Places, heard: list[Said], items: tuple[str, ...] | None = None
) -> list[Replicator]:
    """One for each rank."""
    primary, order = (
        DirectoryStore(str(places.primary)),
        ReplicaOrder(url=str(places.far), items=items),
    )
    return [
        Replicator(primary, order, said.news.append, rank, len(heard))
        for rank, said in enumerate(heard)
    ]


def end(replicators: list[Replicator]) -> None:
    for each in replicators:
        each.ask_to_end(at_once=False)
    for each in replicators:
        each.join()


def attempt_of(handle: laststep.SaveHandle) -> AttemptName:
    folder = handle.report.folder or ""
    step, _, rest = folder.removeprefix("step-").partition(".")
    term, _, attempt = rest.partition("-")
    return AttemptName(step=int(step), term=int(term), attempt=int(attempt))


def test_the_last_checkpoint_of_a_job_goes_to_all_tiers(places: Places) -> None:
    with places.open(Tier(str(places.far), every=10)) as ckpt:
        ckpt.restore()
        for step in (1, 2, 3):
            places.save(ckpt, step)
    assert places.steps(places.far) == [1, 3]


@pytest.mark.parametrize("limit", ["200 MB/s", "1.5GiB/s", "10 kB/s"])
def test_a_limit_is_a_rate(limit: str) -> None:
    rate = Tier("far", limit=limit).limit_bytes_per_s
    assert rate in (200e6, 1.5 * 2**30, 1e4)


def test_a_tier_that_cannot_be_reached_does_not_keep_a_run_from_its_restore(
    places: Places, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with laststep.Checkpointer(places.primary, state=places.state) as ckpt:
        ckpt.restore()
        places.save(ckpt, 1)

    def fail(_: str) -> DirectoryStore:
        raise StorageError("the network is down")

    monkeypatch.setattr("laststep.tiers.nearest.open_store", fail)
    with places.open() as ckpt:
        assert ckpt.restore().step == 1
    assert warned(caplog, places.far, "the network is down")


def test_a_damaged_record_at_the_target_is_reported_and_tried_again(places: Places) -> None:
    with places.open() as ckpt:
        ckpt.restore()
        places.save(ckpt, 1)
        places.wait_for(1)
    record = places.far / "run.json"
    good = record.read_bytes()
    record.write_bytes(b"")
    with places.open() as ckpt:
        ckpt.restore()
        places.save(ckpt, 2)
        wait_until(lambda: any(isinstance(e, events.TierLags) for e in places.heard))
        record.write_bytes(good)
        places.wait_for(2)
    assert places.steps(places.far) == [1, 2]
