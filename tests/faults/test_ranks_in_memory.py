"""A job's checkpoint in shared memory, of which each rank has a part: whole or not there."""

from __future__ import annotations

import os
import random
import shutil
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from rank_jobs import check, wait_for_end

import laststep
from laststep.format import index as index_format
from laststep.memory import segments
from laststep.tiers import snapshots
from waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

    from rank_jobs import Job, Process

    from laststep.memory.segments import Segment

RANKS = 4
MB = 1 << 20


class Starts:
    """The starts of one job, one after the other, whose saves are kept in shared memory."""

    def __init__(
        self,
        start_job: Callable[..., Job],
        folder: Path,
        run: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        self._start_job = start_job
        self._monkeypatch = monkeypatch
        self._store = None
        self._count = 0
        self.base = folder / "shm"
        self.base.mkdir()
        self.run = run

    def __call__(self, ranks: int = RANKS, *, many: bool = False, **options: object) -> Job:
        """`many`: cut into groups and folders, as jobs of very many ranks are."""
        self._count += 1
        how: dict[str, Any] = {}
        if many:
            how = {"group": 2, "folders": True}
            self._monkeypatch.setattr(index_format, "FLAT_RANKS", 2)
            self._monkeypatch.setattr(index_format, "_RANKS_PER_FOLDER", 2)
        job = self._start_job(ranks, store=self._store, start=f"start{self._count}", **how)
        self._store = job.store
        how = {"memory": str(self.base), "host_memory_bytes": 160 * MB, **options}
        job.open(self.run, only=dict.fromkeys(range(ranks), how))
        return job

    def segments(self) -> list[Segment]:
        return segments.found(str(self.base))

    def steps_in(self, segment: Segment) -> list[int]:
        return [save.at.step for save in snapshots.records_in(segment)]

    def wait_for(self, step: int, *ranks: int) -> None:
        """Until these ranks, or all of four, hold that step in memory."""
        wanted = set(ranks or range(RANKS))
        wait_until(
            lambda: wanted <= {s.owner.rank for s in self.segments() if step in self.steps_in(s)}
        )


@pytest.fixture
def starts(
    start_job: Callable[..., Job], tmp_path: Path, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Starts:
    return Starts(start_job, tmp_path, run_folder, monkeypatch)


def kill(job: Job, *, with_flushers: bool = True) -> None:
    """Kill all at once, as far as can be, and wait until they hold no lock of a segment."""
    flushers = [pid for rank in job.ranks for pid in rank.flushers if with_flushers]
    for pid in (*(rank.pid for rank in job.ranks), *flushers):
        os.kill(pid, signal.SIGKILL)
    for rank in job.ranks:
        rank.end()
    for pid in flushers:
        wait_for_end(pid)


def test_what_all_ranks_have_sealed_comes_back_though_nothing_of_it_is_durable(
    starts: Starts,
) -> None:
    job = starts(stuck=True, flush="thread")
    job.tell("save 1")
    starts.wait_for(1)
    kill(job)
    assert laststep.open(starts.run).steps() == []
    again = starts()
    assert restored_by(again) == 1
    again.save(2)
    again.close()
    check(starts.run, [1, 2], ranks=RANKS)
    assert starts.segments() == []


def test_what_one_rank_has_sealed_ahead_of_the_others_takes_nothing_from_them(
    starts: Starts,
) -> None:
    job = starts(stuck=True, flush="thread")
    job.tell("save 1")
    starts.wait_for(1)
    job.tell("save 2")
    starts.wait_for(2, 0)  # the others do not know where it is, before step 1 is decided
    kill(job)
    again = starts()
    assert restored_by(again) == 1
    told = [f"step 2 (1 of {RANKS} ranks)" in rank.log.read_text() for rank in again.ranks]
    assert told == [True, *[False] * (RANKS - 1)]


@pytest.mark.parametrize("with_flushers", [True, pytest.param(False, marks=pytest.mark.long)])
def test_after_all_ranks_are_killed_the_newest_that_all_had_sealed_comes_back(
    starts: Starts, *, with_flushers: bool
) -> None:
    kill_at_random(starts, random.Random(3), trials=2, only=with_flushers)


@pytest.mark.long
@pytest.mark.timeout(3600)  # a kill and a start take seconds
def test_after_a_hundred_kills_of_all_ranks_the_newest_that_all_had_sealed_comes_back(
    starts: Starts,
) -> None:
    kill_at_random(starts, random.Random(5), trials=100)


def kill_at_random(
    starts: Starts, chance: random.Random, *, trials: int, only: bool | None = None
) -> None:
    promised = -1
    for _ in range(trials):
        job = starts()
        step = restored_by(job)
        assert step >= promised
        job.tell(f"train {step + 1}")
        until = step + 1 + chance.randrange(3)
        said: dict[Process, list[list[str]]] = {rank: [] for rank in job.ranks}
        teller = chance.choice(job.ranks)
        while not said[teller] or int(said[teller][-1][1]) < until:
            said[teller].append(teller.next_words())
        signal.sigtimedwait((), chance.random() * 0.1)  # any instant of the next save
        chance.shuffle(job.ranks)
        kill(job, with_flushers=chance.random() < 0.5 if only is None else only)
        promised = max(promised, newest_of_all(said))
        # A start that dies right after its first commit leaves what it should have freed as well.
        assert len(starts.segments()) <= 3 * RANKS
    last = starts()
    step = restored_by(last)
    assert step >= promised
    last.save(step + 1)
    last.close()
    assert starts.segments() == []
    assert all(checkpoint.verify().damage == () for checkpoint in laststep.open(starts.run))


def restored_by(job: Job) -> int:
    """The step that all ranks have restored, bit for bit; -1: none."""
    (found,) = set(job.restore())
    if found == "None":
        return -1
    job.tell(f"exact {found}")
    assert {rank.hear("exact") for rank in job.ranks} == {"True"}
    return int(found)


def newest_of_all(said: dict[Process, list[list[str]]]) -> int:
    """The newest step that all ranks held in memory, or that one knew to be committed."""
    sealed_steps, committed = [], [-1]
    for rank, words in said.items():
        while (more := rank.next_words()) != [""]:
            words.append(more)
        sealed_steps.append(max((int(n) for what, n in words if what == "TierHolds"), default=-1))
        committed += [int(n) for what, n in words if what == "Committed"]
    return max(min(sealed_steps), *committed)


def stand_sealed(starts: Starts, **options: Any) -> Job:
    """A job whose step 1 is committed, and step 2 is in the memory of all ranks and will not be."""
    job = starts(**options)
    job.save(1)
    job.stand_at("decide", 2)
    starts.wait_for(2)
    return job


@pytest.mark.parametrize("many", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_job_that_died_before_it_decided_is_committed_by_the_next(
    starts: Starts, *, many: bool
) -> None:
    kill(stand_sealed(starts, sharded=True, many=many))
    again = starts(sharded=True, many=many)
    assert restored_by(again) == 2
    again.save(3)
    again.close()
    check(starts.run, [1, 2, 3], ranks=RANKS)


def test_where_the_memory_of_one_rank_is_gone_the_checkpoint_before_comes_back(
    starts: Starts,
) -> None:
    kill(stand_sealed(starts))
    (lost,) = [segment for segment in starts.segments() if segment.owner.rank == 2]
    shutil.rmtree(lost.folder)
    again = starts()
    assert restored_by(again) == 1
    again.save(2)
    again.close()
    check(starts.run, [1, 2], ranks=RANKS)


def damage(segment: Segment) -> None:
    """One byte of each slot that a snapshot needs."""
    with Path(segment.pool_path).open("r+b") as pool:
        for save in snapshots.records_in(segment):
            for slot in save.needed_slots:
                pool.seek(slot * (16 << 20) + 5)
                pool.write(b"\x01")


@pytest.mark.parametrize("many", [False, pytest.param(True, marks=pytest.mark.long)])
def test_what_is_committed_comes_out_of_memory_too_in_the_same_start_and_the_next(
    starts: Starts, *, many: bool
) -> None:
    job = starts(many=many)
    job.save(1)
    for path in starts.run.rglob("*.safetensors"):
        path.write_bytes(bytes(path.stat().st_size))
    assert restored_by(job) == 1
    kill(job)
    again = starts(many=many)
    assert restored_by(again) == 1
    again.close()


@pytest.mark.parametrize("committed", [True, pytest.param(False, marks=pytest.mark.long)])
def test_damaged_memory_of_one_rank_gives_way_to_the_store_on_all(
    starts: Starts, *, committed: bool
) -> None:
    job = stand_sealed(starts)
    if committed:
        job.ranks[0].do("go decide")
        for rank in job.ranks:
            rank.hear("committed", "2")
    kill(job)
    (segment,) = [segment for segment in starts.segments() if segment.owner.rank == 3]
    damage(segment)
    again = starts()
    assert restored_by(again) == (2 if committed else 1)
    assert "xxh3-128:" in again.ranks[0].log.read_text()
    again.save(3)
    again.close()
    check(starts.run, [1, *([2] if committed else []), 3], ranks=RANKS)


def test_a_save_of_ranks_that_differ_does_not_count(starts: Starts) -> None:
    job = starts()
    job.save(1)
    for rank in job.ranks:
        rank.do("differ")
    assert all("state/odd" in error for error in job.fails(2))
    starts.wait_for(2)
    kill(job)
    again = starts()
    assert restored_by(again) == 1
    again.close()


@pytest.mark.parametrize("ranks", [2, pytest.param(1, marks=pytest.mark.long)])
def test_another_number_of_ranks_restores_it_and_leaves_nothing_in_memory(
    starts: Starts, ranks: int
) -> None:
    kill(stand_sealed(starts, sharded=True))
    again = starts(ranks, sharded=ranks > 1)
    assert again.restore() == ["2"] * ranks
    again.save(3)
    wait_until(lambda: len(starts.segments()) == ranks)
    again.close()
    assert laststep.open(starts.run).steps() == [1, 2, 3]
    assert all(checkpoint.verify().damage == () for checkpoint in laststep.open(starts.run))
    assert starts.segments() == []
