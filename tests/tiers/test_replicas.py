"""What the primary has lost is read at a replica; nothing else takes the place of what it has."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import threading
from typing import TYPE_CHECKING

import pytest
import torch

import laststep
from expect import raises, warned
from laststep.errors import StorageError
from laststep.settings import as_keywords
from laststep.tiers import nearest
from waiting import wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from laststep.storage.directory import DirectoryStore


class Job:
    """A primary and a replica, and a state that tells what was saved."""

    def __init__(self, folder: Path) -> None:
        self.primary, self.far = folder / "primary", folder / "far"
        self.state = {"w": torch.zeros(1 << 18), "s": torch.zeros(5)}

    def open(self, *places: Path, **settings: object) -> laststep.Checkpointer:
        tiers = [str(place) for place in places or (self.primary, self.far)]
        how: dict[str, object] = {"flush": "thread", "progress": False, **settings}
        return laststep.Checkpointer(tiers=tiers, state=self.state, **as_keywords(how))  # type: ignore[call-overload]

    def save(self, ckpt: laststep.Checkpointer, step: int, value: float | None = None) -> None:
        for tensor in self.state.values():
            tensor.fill_(step if value is None else value)
        ckpt.save(step).result()

    def start(self, *steps: int, at: int | None = None, value: float | None = None) -> None:
        """One start that restores, saves these steps, and ends."""
        with self.open() as ckpt:
            ckpt.restore(at)
            for step in steps:
                self.save(ckpt, step, value)

    def back(self, *places: Path, at: int | None = None) -> float | None:
        """What a start comes back to; None for a new run."""
        for tensor in self.state.values():
            tensor.fill_(-1)
        with self.open(*places) as ckpt:
            if ckpt.restore(at).step is None:
                return None
        values = {float(value) for tensor in self.state.values() for value in tensor.unique()}
        assert len(values) == 1, "two steps in one state"
        return values.pop()

    def far_has(self, step: int) -> bool:
        with contextlib.suppress(laststep.NotFoundError):  # it is being made
            return step in steps(self.far)
        return False

    def newest(self, place: Path) -> Path:
        return place / laststep.open(place).latest().folder

    def lose_home(self) -> None:
        shutil.rmtree(self.primary)


@pytest.fixture
def job(run_folder: Path) -> Job:
    run_folder.mkdir()
    return Job(run_folder)


def steps(place: Path) -> list[int]:
    return laststep.open(place).steps()


def flip(folder: Path) -> None:
    file = folder / "state.safetensors"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


# Whose checkpoint counts


def test_what_somebody_saved_at_the_tier_does_not_turn_home_back(job: Job) -> None:
    for step in (1, 2, 3):
        job.start(step)
    with job.open(job.far) as other:
        other.restore(2)
        job.save(other, 3, value=33.0)
    with job.open(job.primary) as ckpt:
        ckpt.restore()
        job.save(ckpt, 4)
    assert job.back() == 4


def test_home_counts_where_it_has_gone_on_within_an_epoch_that_both_know(job: Job) -> None:
    with job.open() as ckpt:
        ckpt.restore()
        for step in (1, 2, 3):
            job.save(ckpt, step)
            wait_until(functools.partial(job.far_has, step))
        with job.open(job.far) as other:
            other.restore(2)
            job.save(other, 3, value=33.0)
        for step in (4, 5):
            job.save(ckpt, step)
    assert steps(job.far)[-1] == 3
    assert job.back() == 5


def test_a_start_at_the_tier_that_knew_what_home_has_is_gone_on_from(job: Job) -> None:
    job.start(1, 2, 3)
    with job.open(job.far) as other:
        other.restore()
        job.save(other, 4, value=44.0)
    assert job.back() == 44


def test_of_a_step_the_one_on_the_lineage_comes_back(job: Job) -> None:
    for step in (1, 2, 3):
        job.start(step)
    job.start(2, at=1, value=22.0)
    job.start(4, at=3)
    job.lose_home()
    assert job.back(at=2) == 2


def test_a_step_comes_back_though_home_has_gone_on_without_the_tier(job: Job) -> None:
    job.start(1, 2)
    with job.open(job.primary, keep=laststep.Keep(last=1)) as ckpt:
        ckpt.restore()
        job.save(ckpt, 3)
    assert steps(job.primary) == [2, 3]  # that it was resumed from stays for now
    with job.open(job.primary, keep=laststep.Keep(last=1)) as ckpt:
        ckpt.restore()
        job.save(ckpt, 4)
    assert 2 not in steps(job.primary)
    assert job.back(at=2) == 2


# The primary has lost the record of the run


def id_at(place: Path) -> str:
    return json.loads((place / "run.json").read_text())["run"]


def test_a_home_without_run_json_reads_its_newest_checkpoint_at_the_tier(job: Job) -> None:
    job.start(1, 2, 3)
    known = id_at(job.primary)
    shutil.rmtree(job.newest(job.primary))
    (job.primary / "run.json").unlink()
    assert job.back() == 3
    job.start(4)
    assert steps(job.far)[-2:] == [3, 4]
    assert id_at(job.primary) == id_at(job.far) == known


def test_a_home_without_run_json_keeps_its_id_when_no_tier_is_asked(job: Job) -> None:
    job.start(1)
    known = id_at(job.primary)
    (job.primary / "run.json").unlink()
    with job.open(job.primary) as ckpt:
        assert ckpt.restore().step == 1
        job.save(ckpt, 2)
    assert id_at(job.primary) == known
    job.start(3)
    assert steps(job.far)[-1] == 3


def test_a_tier_without_run_json_takes_new_checkpoints(job: Job) -> None:
    job.start(1)
    (job.far / "run.json").unlink()
    job.start(2)
    assert steps(job.far) == [1, 2]
    assert id_at(job.far) == id_at(job.primary)


def test_a_home_without_run_json_reads_nothing_at_a_tier_of_another_run(job: Job) -> None:
    other = Job(job.far.parent / "other")
    other.start(7)
    job.start(1)
    shutil.rmtree(job.far)
    shutil.copytree(other.primary, job.far)
    (job.primary / "run.json").unlink()
    assert job.back() == 1


def test_damage_at_the_tier_is_reported_with_the_path_at_the_tier(job: Job) -> None:
    job.start(1, 2)
    newest = job.newest(job.primary).name
    shutil.rmtree(job.primary / newest)
    flip(job.far / newest)
    with job.open() as ckpt:
        restored = ckpt.restore()
    assert restored.step == 1
    (skipped,) = restored.skipped
    assert str(job.far / newest) in skipped.reason
    assert str(job.primary / newest) not in skipped.reason


# Where nothing can be said


def test_a_home_without_checkpoints_is_no_new_run_while_a_tier_cannot_be_asked(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.start(1)
    job.lose_home()

    def fail(_: str) -> DirectoryStore:
        raise StorageError("the key is wrong")

    with monkeypatch.context() as patch:
        patch.setattr(nearest, "open_store", fail)
        for _ in range(2):  # whoever starts it again is told so again
            told = raises(StorageError, job.far, where=job.primary)
            with job.open() as ckpt, told:
                ckpt.restore()
    assert job.back() == 1


def test_a_tier_that_does_not_answer_holds_up_no_start_for_long(
    job: Job, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    job.start(1)
    answers = threading.Event()

    def stuck(_: str) -> DirectoryStore:
        answers.wait()
        raise StorageError("too late")

    monkeypatch.setattr(nearest, "BRIEF_S", 0.1)
    monkeypatch.setattr(nearest, "open_store", stuck)
    assert job.back() == 1
    answers.set()
    assert warned(caplog, job.far)


def test_a_tier_of_another_run_is_refused_where_home_has_nothing(job: Job) -> None:
    job.start(1)
    shutil.copytree(job.far, job.far.with_name("other"))
    job.lose_home()
    shutil.rmtree(job.far)
    job.start(7)
    shutil.rmtree(job.far)
    job.far.with_name("other").rename(job.far)
    for folder in job.primary.glob("step-*"):
        shutil.rmtree(folder)
    with job.open() as ckpt, raises(laststep.UsageError, where=job.primary, expected=job.far):
        ckpt.restore()


# Damage


def test_where_the_newest_at_the_tier_is_damaged_the_one_before_comes_back(job: Job) -> None:
    with job.open() as ckpt:
        ckpt.restore()
        for step in (1, 2):
            job.save(ckpt, step)
    job.start(3)
    flip(job.newest(job.far))
    before = [step for step in steps(job.far) if step != 3][-1]
    job.lose_home()
    assert job.back() == before


def test_where_the_newest_at_home_is_damaged_a_newer_one_at_the_tier_counts(job: Job) -> None:
    for step in (1, 2, 3):
        job.start(step)
    with job.open(job.primary) as ckpt:  # the tier was not reached that day
        ckpt.restore()
        job.save(ckpt, 4)
    for folder in job.primary.glob("step-*"):
        if not folder.name.startswith(("step-00000001", "step-00000004")):
            shutil.rmtree(folder)
    flip(job.newest(job.primary))
    assert job.back() == 3


def test_a_record_that_is_nowhere_any_more_is_told_of(
    job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2):
        with job.open(job.primary) as ckpt:
            ckpt.restore()
            job.save(ckpt, step)
    (job.primary / "terms" / "00000002.json").unlink()
    assert job.back(job.primary) == 1
    assert warned(caplog, "step-00000002")
    assert job.back(job.primary, at=2) == 2


def test_a_record_that_home_has_lost_comes_back_from_the_tier(job: Job) -> None:
    for step in (1, 2):
        job.start(step)
    (job.primary / "terms" / "00000001.json").unlink()
    job.start(3)
    assert job.back() == 3
    assert steps(job.far)[-1] == 3


def _without_a_file(folder: Path) -> None:
    (folder / "state.safetensors").unlink()


def _cut_off(folder: Path) -> None:
    os.truncate(folder / "state.safetensors", 5000)


def _without_a_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_bytes(b"xx")


@pytest.mark.parametrize("spoil", [flip, _without_a_file, _cut_off, _without_a_manifest])
def test_damage_everywhere_is_no_new_run(job: Job, spoil: object) -> None:
    job.start(1)
    spoil(job.newest(job.far))  # type: ignore[operator]
    job.lose_home()
    with job.open() as ckpt, raises(laststep.CorruptError, where=job.primary, found="step 1"):
        ckpt.restore()


def test_what_is_damaged_at_one_tier_is_read_at_the_next(job: Job) -> None:
    third = job.far.with_name("third")
    with job.open(job.primary, job.far, third) as ckpt:
        ckpt.restore()
        job.save(ckpt, 1)
    flip(job.newest(job.far))
    job.lose_home()
    assert job.back(job.primary, job.far, third) == 1


@pytest.mark.parametrize("at", [None, 2])
@pytest.mark.parametrize("spoil", [flip, _without_a_file, _cut_off, _without_a_manifest])
def test_what_is_damaged_at_home_is_read_at_the_tier(
    job: Job, spoil: object, at: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    job.start(1)
    job.start(2)
    spoil(job.newest(job.primary))  # type: ignore[operator]
    assert job.back(at=at) == 2
    assert warned(caplog, job.far)
    job.start(3)
    assert job.back() == 3


def test_nothing_is_borrowed_of_what_is_damaged_at_home(job: Job) -> None:
    for at in range(2):
        with job.open() as ckpt:
            ckpt.restore()
            job.state["s"].fill_(at)  # what is large does not change
            ckpt.save(at).result()
    primary = job.newest(job.primary)
    largest = max(primary.glob("*.safetensors"), key=lambda file: file.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) * 3 // 4] ^= 1
    largest.write_bytes(data)
    with job.open() as ckpt:
        assert ckpt.restore().step == 1
        job.state["s"].fill_(2)
        ckpt.save(2).result()
    assert laststep.open(job.primary)[2].verify().damage == ()


def test_what_is_damaged_in_both_places_is_passed_over(job: Job) -> None:
    job.start(1)
    job.start(2)
    for place in (job.primary, job.far):
        flip(job.newest(place))
    assert job.back() == 1


# After a loss the tier takes what comes


def test_a_drain_that_was_cut_off_before_the_loss_does_not_close_the_tier(job: Job) -> None:
    job.start(1)
    with job.open(job.primary) as ckpt:
        ckpt.restore()
        job.save(ckpt, 2)
    # What a replication brings first, of the second start.
    for record in sorted((job.primary / "terms").glob("*.json")):
        shutil.copy(record, job.far / "terms")
    job.lose_home()
    job.start(2, 3, value=9.0)
    assert steps(job.far)[-1] == 3
    job.lose_home()
    assert job.back() == 9


def test_an_older_step_that_was_gone_on_from_after_the_loss_reaches_the_tier(job: Job) -> None:
    for step in (1, 2, 3):
        job.start(step)
    job.lose_home()
    job.start(7, at=1)
    assert steps(job.far)[-1] == 7
    job.start(8)
    assert steps(job.far)[-1] == 8
