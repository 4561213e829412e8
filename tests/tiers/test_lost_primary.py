"""The primary of a run is lost, and shared memory still has its last save."""

from __future__ import annotations

import contextlib
import shutil
from typing import TYPE_CHECKING

import pytest
import torch

import laststep
from expect import raises, warned
from laststep.errors import UsageError
from laststep.memory import segments
from laststep.storage.directory import DirectoryStore
from laststep.tiers import recovery
from tiers.failed_job import fail_after, job
from waiting import wait_until

if TYPE_CHECKING:
    from pathlib import Path

MB = 1 << 20


@pytest.fixture
def base(tmp_path: Path, run_folder: Path) -> Path:
    """Where a job has left steps 4 and 5 when it failed; its primary was lost after that."""
    place, state = tmp_path / "shm", torch.zeros(5 * MB)
    place.mkdir()
    fail_after(job(place, run_folder, state), state, {4: 4.0, 5: 5.0})
    shutil.move(run_folder, tmp_path / "lost")
    return place


def test_the_run_comes_back_out_of_memory_when_that_is_wanted(
    base: Path, run_folder: Path, tmp_path: Path
) -> None:
    state = torch.zeros(5 * MB)
    with job(base, run_folder, state) as ckpt, raises(UsageError, "step 5", where=str(run_folder)):
        ckpt.restore()
    assert laststep.recover(run_folder, base=base).ok
    with job(base, run_folder, state) as ckpt:
        restored = ckpt.restore()
        assert (restored.step, restored.skipped) == (5, ())
        assert bool((state == 5).all())
        ckpt.save(6).result()
    back = laststep.open(run_folder)
    assert back.steps() == [5, 6]
    assert all(back[step].verify().damage == () for step in back.steps())
    # It is the same run, by the same records: a replica that has older ones can be replicated to.
    shutil.rmtree(tmp_path / "lost" / restored.folder)
    laststep.copy(run_folder, tmp_path / "lost")
    assert laststep.open(tmp_path / "lost").steps() == [4, 5, 6]


def test_memory_counts_in_a_home_that_has_lost_run_json_and_the_newest_checkpoint(
    base: Path, run_folder: Path, tmp_path: Path
) -> None:
    shutil.move(tmp_path / "lost", run_folder)
    shutil.rmtree(next(run_folder.glob("step-00000005.*")))
    (run_folder / "run.json").unlink()
    state = torch.zeros(5 * MB)
    with job(base, run_folder, state) as ckpt:
        assert ckpt.restore().step == 5
    assert bool((state == 5).all())
    assert laststep.open(run_folder).steps() == [4, 5]


def test_a_start_that_does_not_restore_begins_a_run_of_its_own(
    base: Path, run_folder: Path
) -> None:
    with job(base, run_folder, torch.zeros(5 * MB)) as ckpt:
        ckpt.save(0).result()
    assert laststep.open(run_folder).steps() == [0]
    assert segments.found(str(base)) == []


def test_a_home_that_another_run_has_taken_since_counts_alone(base: Path, run_folder: Path) -> None:
    state = torch.full((5 * MB,), 1.0)
    with laststep.Checkpointer(
        run_folder, items={"state": {"all": state}}, options=laststep.Options(progress=False)
    ) as ckpt:
        ckpt.save(1).result()
    with job(base, run_folder, torch.zeros(5 * MB)) as ckpt:
        assert ckpt.restore().step == 1
    assert laststep.open(run_folder).steps() == [1]


def test_memory_is_not_given_back_before_somebody_has_gone_on(base: Path, run_folder: Path) -> None:
    with job(base, run_folder, torch.zeros(5 * MB)) as ckpt:
        ckpt._work._start()
    assert [one.records() for one in segments.found(str(base))] == [["1-2"]]


def test_memory_that_is_newer_than_a_further_tier_counts_and_is_stored(
    tmp_path: Path, run_folder: Path
) -> None:
    base, replicas = tmp_path / "shm", tmp_path / "replica"
    base.mkdir()
    state = torch.full((5 * MB,), 1.0)
    with job(base, run_folder, state, replicas) as ckpt:
        ckpt.restore()
        ckpt.save(1).result()

    fail_after(job(base, run_folder, state), state, {3: 3.0})  # which does not replicate
    shutil.move(run_folder, tmp_path / "lost")
    state.zero_()
    with job(base, run_folder, state, replicas) as ckpt, raises(UsageError, "step 3"):
        ckpt.restore()
    assert laststep.recover(run_folder, base=base).ok
    with job(base, run_folder, state, replicas) as ckpt:
        assert ckpt.restore().step == 3
        assert bool((state == 3).all())
    back = laststep.open(run_folder)
    assert back.steps()[-1] == 3
    assert back[3].verify().damage == ()
    with job(base, run_folder, state, replicas) as ckpt:
        assert ckpt.restore().step == 3
        ckpt.save(4).result()
    assert laststep.open(replicas).steps()[-2:] == [3, 4]
    assert segments.found(str(base)) == []


def test_memory_of_a_history_that_an_older_copy_of_the_run_has_replaced_does_not_count(
    tmp_path: Path, run_folder: Path
) -> None:
    base = tmp_path / "shm"
    base.mkdir()
    state = torch.full((5 * MB,), 1.0)
    with laststep.Checkpointer(
        run_folder, items={"state": {"all": state}}, options=laststep.Options(progress=False)
    ) as ckpt:
        ckpt.save(1).result()
    shutil.copytree(run_folder, tmp_path / "older")

    def train() -> None:
        with job(base, run_folder, state) as ckpt:
            ckpt.restore()
            state.fill_(2)
            ckpt.save(2).result()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    shutil.rmtree(run_folder)
    shutil.move(tmp_path / "older", run_folder)
    with laststep.Checkpointer(
        run_folder, items={"state": {"all": state}}, options=laststep.Options(progress=False)
    ) as ckpt:
        ckpt.restore()
        state.fill_(22)
        ckpt.save(2).result()  # by the same name, of another term 2
    state.zero_()
    with job(base, run_folder, state) as ckpt:
        assert ckpt.restore().step == 2
    assert bool((state == 22).all())


def test_what_memory_has_damaged_is_read_at_a_further_tier(
    tmp_path: Path, run_folder: Path
) -> None:
    base, replicas, state = tmp_path / "shm", tmp_path / "replica", torch.zeros(5 * MB)
    base.mkdir()
    ckpt = job(base, run_folder, state, replicas)
    fail_after(ckpt, state, {1: 1.0}, lambda: wait_until(lambda: is_at(replicas, 1)))
    (segment,) = segments.found(str(base))
    with open(segment.pool_path, "r+b") as memory:  # noqa: PTH123 (a str)
        memory.write(b"damage")
    shutil.rmtree(next(run_folder.glob("step-*")))
    state.zero_()
    with job(base, run_folder, state, replicas) as ckpt:
        assert ckpt.restore().step == 1
    assert bool((state == 1).all())


def is_at(place: Path, step: int) -> bool:
    with contextlib.suppress(laststep.NotFoundError):  # it is being made
        return step in laststep.open(place).steps()
    return False


def test_a_flusher_does_not_wait_for_itself(
    base: Path, run_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (own,) = segments.found(str(base))
    monkeypatch.setattr(recovery, "WAIT_FOR_OTHERS_S", 0.1)
    monkeypatch.setattr(segments.Segment, "is_ending", lambda _: True)  # its trainer has died
    store = DirectoryStore(run_folder)
    recovery.snapshots_of(store, str(base), flusher_of=own)
    assert not warned(caplog)
    recovery.snapshots_of(store, str(base))
    assert warned(caplog)


def test_what_is_peeked_at_in_memory_is_restored_from_there_part_by_part(
    base: Path, run_folder: Path, tmp_path: Path
) -> None:
    shutil.move(tmp_path / "lost", run_folder)
    shutil.rmtree(next(run_folder.glob("step-00000005.*")))
    state = torch.zeros(5 * MB)
    with job(base, run_folder, state) as ckpt:
        found = ckpt.peek()
        assert found.step == 5
        restored = ckpt.restore(only="state")
        assert (restored.step, restored.folder) == (5, found.folder)
        assert bool((state == 5).all())
        ckpt.save(6).result()
    assert laststep.open(run_folder).steps() == [4, 5, 6]
    assert not [one.step for one in laststep.open(run_folder) if one.verify().damage]


def test_what_is_peeked_at_a_further_tier_is_restored_from_there(
    tmp_path: Path, run_folder: Path
) -> None:
    base, replicas, state = tmp_path / "shm", tmp_path / "replica", torch.ones(5 * MB)
    base.mkdir()
    with job(base, run_folder, state, replicas) as ckpt:
        ckpt.restore()
        ckpt.save(1).result()
    shutil.rmtree(next(run_folder.glob("step-*")))
    state.zero_()
    with job(base, run_folder, state, replicas) as ckpt:
        assert ckpt.peek().step == 1
        assert ckpt.restore(only="state").step == 1
    assert bool((state == 1).all())


def test_what_is_peeked_at_and_damaged_at_home_is_read_at_the_tier_and_saved_on(
    tmp_path: Path, run_folder: Path
) -> None:
    base, replicas, state = tmp_path / "shm", tmp_path / "replica", torch.ones(5 * MB)
    base.mkdir()
    with job(base, run_folder, state, replicas) as ckpt:
        ckpt.restore()
        ckpt.save(1).result()
    (file,) = run_folder.glob("step-*/state.safetensors")
    stored = bytearray(file.read_bytes())
    stored[2 * MB] ^= 1
    file.write_bytes(stored)
    state.zero_()
    with job(base, run_folder, state, replicas) as ckpt:
        ckpt.peek()
        assert ckpt.restore(only="state").step == 1
        assert bool((state == 1).all())
        ckpt.save(2).result()
    assert laststep.open(run_folder)[2].verify().damage == ()
