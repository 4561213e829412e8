"""The home of a run is lost, and shared memory still has its last save."""

from __future__ import annotations

import logging
import shutil
from typing import TYPE_CHECKING

import pytest
import torch

import laststep
from laststep.memory import segments

if TYPE_CHECKING:
    from pathlib import Path

MB = 1 << 20


def trainer(base: Path, run: Path, state: torch.Tensor) -> laststep.Checkpointer:
    return laststep.Checkpointer(
        tiers=[f"shm://{base}", str(run)], items={"state": {"all": state}}, progress=False,
        host_memory_bytes=160 * MB, flush="thread",
    )  # fmt: skip


@pytest.fixture
def base(tmp_path: Path, run_folder: Path) -> Path:
    """Where a job has left steps 4 and 5 when it failed; its home was lost after that."""
    place = tmp_path / "shm"
    place.mkdir()

    def train() -> None:
        state = torch.full((5 * MB,), 4.0)
        with trainer(place, run_folder, state) as ckpt:
            ckpt.restore()
            ckpt.save(4).result()
            state.fill_(5)
            ckpt.save(5).result()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    shutil.move(run_folder, tmp_path / "lost")
    return place


def test_the_run_comes_back_out_of_memory_and_is_stored_again(
    base: Path, run_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = torch.zeros(5 * MB)
    with trainer(base, run_folder, state) as ckpt, caplog.at_level(logging.WARNING):
        restored = ckpt.restore()
        assert (restored.step, restored.skipped) == (5, ())
        assert bool((state == 5).all())
        assert "step 5 comes back out of shared memory" in caplog.text
        ckpt.save(6).result()
    back = laststep.open(run_folder)
    assert back.steps() == [5, 6]
    assert all(back[step].verify().damage == () for step in back.steps())
    # It is the same run, by the same records: a further tier that has older ones can be drained to.
    shutil.rmtree(tmp_path / "lost" / restored.folder)
    laststep.copy(run_folder, tmp_path / "lost")
    assert laststep.open(tmp_path / "lost").steps() == [4, 5, 6]


def test_it_is_stored_though_nothing_is_saved_after_it(base: Path, run_folder: Path) -> None:
    with trainer(base, run_folder, torch.zeros(5 * MB)) as ckpt:
        ckpt.restore()
    assert laststep.open(run_folder).steps() == [5]


def test_a_start_that_does_not_restore_begins_a_run_of_its_own(
    base: Path, run_folder: Path
) -> None:
    with trainer(base, run_folder, torch.zeros(5 * MB)) as ckpt:
        ckpt.save(0).result()
    assert laststep.open(run_folder).steps() == [0]
    assert segments.found(str(base)) == []


def test_a_home_that_another_run_has_taken_since_counts_alone(base: Path, run_folder: Path) -> None:
    state = torch.full((5 * MB,), 1.0)
    with laststep.Checkpointer(run_folder, items={"state": {"all": state}}, progress=False) as ckpt:
        ckpt.save(1).result()
    with trainer(base, run_folder, torch.zeros(5 * MB)) as ckpt:
        assert ckpt.restore().step == 1
    assert laststep.open(run_folder).steps() == [1]


def test_memory_is_not_given_back_before_somebody_has_gone_on(base: Path, run_folder: Path) -> None:
    with trainer(base, run_folder, torch.zeros(5 * MB)) as ckpt:
        ckpt._work._start()
    assert [one.records() for one in segments.found(str(base))] == [["1-2"]]


def trainer_of_three(
    base: Path, run: Path, further: Path, state: torch.Tensor
) -> laststep.Checkpointer:
    return laststep.Checkpointer(
        tiers=[f"shm://{base}", str(run), str(further)], items={"state": {"all": state}},
        host_memory_bytes=160 * MB, progress=False, flush="thread",
    )  # fmt: skip


def test_memory_that_is_newer_than_a_further_tier_counts_and_is_stored(
    tmp_path: Path, run_folder: Path
) -> None:
    base, further = tmp_path / "shm", tmp_path / "further"
    base.mkdir()
    state = torch.full((5 * MB,), 1.0)
    with trainer_of_three(base, run_folder, further, state) as ckpt:
        ckpt.restore()
        ckpt.save(1).result()

    def train() -> None:
        with trainer(base, run_folder, state) as ckpt:  # a start that does not drain
            ckpt.restore()
            state.fill_(3)
            ckpt.save(3).result()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    shutil.move(run_folder, tmp_path / "lost")
    state.zero_()
    with trainer_of_three(base, run_folder, further, state) as ckpt:
        assert ckpt.restore().step == 3
        assert bool((state == 3).all())
    back = laststep.open(run_folder)
    assert back.steps()[-1] == 3
    assert back[3].verify().damage == ()
    with trainer_of_three(base, run_folder, further, state) as ckpt:
        assert ckpt.restore().step == 3
        ckpt.save(4).result()
    assert laststep.open(further).steps()[-2:] == [3, 4]
    assert segments.found(str(base)) == []


def test_memory_of_a_history_that_an_older_copy_of_the_run_has_replaced_does_not_count(
    tmp_path: Path, run_folder: Path
) -> None:
    base = tmp_path / "shm"
    base.mkdir()
    state = torch.full((5 * MB,), 1.0)
    with laststep.Checkpointer(run_folder, items={"state": {"all": state}}, progress=False) as ckpt:
        ckpt.save(1).result()
    shutil.copytree(run_folder, tmp_path / "older")

    def train() -> None:
        with trainer(base, run_folder, state) as ckpt:
            ckpt.restore()
            state.fill_(2)
            ckpt.save(2).result()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    shutil.rmtree(run_folder)
    shutil.move(tmp_path / "older", run_folder)
    with laststep.Checkpointer(run_folder, items={"state": {"all": state}}, progress=False) as ckpt:
        ckpt.restore()
        state.fill_(22)
        ckpt.save(2).result()  # by the same name, of another epoch 2
    state.zero_()
    with trainer(base, run_folder, state) as ckpt:
        assert ckpt.restore().step == 2
    assert bool((state == 22).all())
