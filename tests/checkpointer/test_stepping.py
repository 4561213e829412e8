"""step(): real saves at the steps that it chooses itself."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import time
from typing import TYPE_CHECKING

import pytest
import torch

import laststep
from expect import raises, warned
from laststep.catalog.instances import Past
from laststep.flush import server as serving
from laststep.plan.frequency import APART, Bound

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from conftest import Training

    Opened = Callable[..., laststep.Checkpointer]

MANY = 1_000_000
OFTEN = {"every": "auto", "mtbf": "0.1 s", "most_share": 0.9}


def step_until_saved(
    checkpointer: laststep.Checkpointer, training: Training, first: int
) -> laststep.SaveHandle:
    for step in range(first, first + MANY):
        training.become(step % 100)
        handle = checkpointer.step(step)
        if handle is not None:
            return handle
    raise AssertionError(f"nothing was saved in {MANY} steps")


def fail_the_save_of(
    checkpointer: laststep.Checkpointer, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object) -> None:
        raise laststep.StorageError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(serving.SaveWriter, "finish", failing)
        handle = checkpointer.step(step)
        assert handle is not None
        handle.committed.over_within(None)


def test_steps_are_saved_at_multiples_and_the_last_in_any_case(
    opened: Opened, training: Training, fresh: Training, run_folder: Path
) -> None:
    with opened(training, every=5) as checkpointer:
        assert checkpointer.restore().next_step == 0
        made = {}
        for step in range(18):
            training.become(step)
            handle = checkpointer.step(
                step, metrics={"n": step}, metadata={"at": step}, last=step == 17
            )
            made[step] = handle
    saved = [step for step, handle in made.items() if handle is not None]
    assert saved == [5, 10, 15, 17] == laststep.open(run_folder).steps()
    with opened(fresh, every=5) as checkpointer:
        restored = checkpointer.restore()
        assert (restored.step, restored.metrics, restored.metadata) == (17, {"n": 17}, {"at": 17})
        assert fresh.is_wholly(17)


def test_auto_measures_by_its_first_save_and_then_says_what_it_reckoned(
    opened: Opened, training: Training, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "laststep")
    with opened(training, **OFTEN) as checkpointer:
        first = step_until_saved(checkpointer, training, 0)
        assert 5 < first.step < 40
        assert first.result().estimate is None
        second = step_until_saved(checkpointer, training, first.step + 1)
        estimate = second.result().estimate
        assert estimate is not None
        assert estimate.cost_s >= first.report.stall_s
        assert estimate.latency_s == first.report.committed_s
        assert (estimate.mtbf_s, estimate.mtbf_from) == (0.1, "given")
        bounds = {
            Bound.LEAST: (2 * estimate.cost_s * 0.1) ** 0.5,
            Bound.LATENCY: APART * estimate.latency_s,
            Bound.SHARE: estimate.cost_s / 0.9,
        }
        assert estimate.interval_s == pytest.approx(max(bounds.values()))
        assert estimate.interval_s == pytest.approx(bounds[estimate.bound])
        assert f"step {second.step}: {estimate}" in caplog.text


def test_a_duration_is_a_frequency(opened: Opened, training: Training) -> None:
    with opened(training, every="0.01 s") as checkpointer:
        first = step_until_saved(checkpointer, training, 0)
        second = step_until_saved(checkpointer, training, first.step + 1)
        assert second.step > first.step
        assert second.result().estimate is None


def test_a_step_twice_is_fine_and_one_that_goes_back_needs_a_restore(
    opened: Opened, training: Training
) -> None:
    with opened(training, every=2) as checkpointer:
        checkpointer.restore()
        for step in range(5):
            checkpointer.step(step)
        assert checkpointer.step(4) is None
        assert checkpointer.step(4, last=True) is None  # it is saved
        with raises(laststep.UsageError, "step 3", "step 4", found="3"):
            checkpointer.step(3)
        assert checkpointer.restore(2).next_step == 3
        assert checkpointer.step(3) is None
        assert checkpointer.step(4) is not None


def test_a_step_that_the_user_has_saved_is_not_saved_again(
    opened: Opened, training: Training
) -> None:
    with opened(training, every=2) as checkpointer:
        checkpointer.save(2)
        assert checkpointer.step(2) is None
        assert checkpointer.step(2, last=True) is None


def test_a_save_that_failed_is_raised_by_the_next_step(
    opened: Opened, training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(training, every=2) as checkpointer:
        fail_the_save_of(checkpointer, 2, monkeypatch)
        with pytest.raises(laststep.StorageError, match="the disk is full"):
            checkpointer.step(3)
        assert checkpointer.step(4) is not None


def test_the_last_save_is_made_though_an_earlier_failure_is_raised(
    opened: Opened, training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failure becomes known between the moment it is looked for and the last save."""
    asked = laststep.Preemption(signals=("SIGUSR1",), exit_code=None)
    earlier = [laststep.StorageError("the disk is full").of_save(1)]
    with opened(training, every=100, preemption=asked) as checkpointer:
        save = checkpointer.save

        def failing_once(step: int, **more: object) -> laststep.SaveHandle:
            if earlier:
                raise earlier.pop()
            return save(step, **more)

        monkeypatch.setattr(checkpointer, "save", failing_once)
        os.kill(os.getpid(), signal.SIGUSR1)
        handle = checkpointer.step(3)
        assert handle is not None
        assert handle.result().folder is not None
        assert checkpointer.preempted


@pytest.mark.parametrize("retried", [4, 5])
def test_a_step_stays_due_while_an_earlier_failure_is_raised(
    opened: Opened, training: Training, monkeypatch: pytest.MonkeyPatch, retried: int
) -> None:
    """Whether the loop calls step() again for the same step, or goes on with the next."""
    with opened(training, every=2) as checkpointer:
        fail_the_save_of(checkpointer, 2, monkeypatch)
        with pytest.raises(laststep.StorageError) as failed:
            checkpointer.step(4)
        assert failed.value.step == 2
        assert checkpointer.step(retried).result().folder is not None
        assert checkpointer.step(retried) is None  # only once


def test_nothing_is_owed_after_a_restore_or_a_save_of_the_users_own(
    opened: Opened, training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(training, every=2) as checkpointer:
        checkpointer.step(2).result()
        for settle in (lambda: checkpointer.restore(2), lambda: checkpointer.save(9).result()):
            fail_the_save_of(checkpointer, 4, monkeypatch)
            with pytest.raises(laststep.StorageError):
                checkpointer.step(6)
            settle()
            at = checkpointer._schedule._last_step or 2
            assert checkpointer.step(at + 1) is None
            checkpointer.restore(2)


def test_a_save_that_cannot_be_made_is_not_tried_at_every_step(
    opened: Opened, training: Training
) -> None:
    with opened(training, every=10) as checkpointer:
        training.plain["bad"] = object()
        refused = []
        for step in range(1, 31):
            try:
                checkpointer.step(step)
            except laststep.UsageError:
                refused.append(step)
        assert refused == [10, 20, 30]


def test_without_every_step_is_refused(opened: Opened, training: Training) -> None:
    with opened(training) as checkpointer:
        with pytest.raises(laststep.UsageError, match="every='auto'"):
            checkpointer.step(0)
        with raises(laststep.UsageError, found="-1"):
            checkpointer.step(-1)
    with raises(laststep.UsageError, remedy=True):
        checkpointer.step(0)


@pytest.mark.parametrize("every", ["10 minutes", "autom", 0, 2.5, "0 s", "-1 s", True, "10m"])
def test_a_frequency_that_cannot_be_is_refused(every: object, tmp_path: Path) -> None:
    with raises(laststep.UsageError, expected="'auto'", found=repr(every)):
        laststep.Checkpointer(tmp_path / "run", s={"a": 1}, every=every)


def test_a_misspelt_frequency_is_known(tmp_path: Path) -> None:
    with raises(laststep.UsageError, remedy="every=…"):
        laststep.Checkpointer(tmp_path / "run", s={"a": 1}, evry="auto")


def test_close_says_which_steps_were_not_saved(
    opened: Opened, training: Training, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(training, every=5) as checkpointer:
        for step in range(8):
            checkpointer.step(step)
    assert warned(caplog, "step 7", "last=True")


class Breaks(Exception):
    pass


def test_starts_that_failed_are_counted_by_those_that_come(
    opened: Opened, training: Training
) -> None:
    def train(end: BaseException | None = None) -> Past:
        with opened(training, every="auto", most_share=0.9) as checkpointer:
            next_step = checkpointer.restore().next_step
            past = checkpointer._client.instance.past()
            step_until_saved(checkpointer, training, next_step).wait()
            if end is not None:
                raise end
        return past

    assert train() == Past(0, 0.0)
    assert train().failures == 0
    with pytest.raises(Breaks):
        train(Breaks())
    with pytest.raises(KeyboardInterrupt):
        train(KeyboardInterrupt())  # somebody has stopped it
    assert train().failures == 1
    assert train().uptime_s > 0.0


@pytest.mark.parametrize("fails", [True, False])
def test_a_clock_that_jumped_does_not_make_a_run_look_reliable(
    opened: Opened, training: Training, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    auto = {"every": "auto", "most_share": 0.9}
    with contextlib.suppress(Breaks), opened(training, **auto) as checkpointer:
        with monkeypatch.context() as patch:
            patch.setattr(time, "time", lambda: 1000.0)
            first = step_until_saved(checkpointer, training, 0)
            first.result()
        checkpointer.step(first.step + 1, last=True).result()
        if fails:
            raise Breaks
    with opened(training, **auto) as checkpointer:
        first = step_until_saved(checkpointer, training, checkpointer.restore().next_step)
        first.result()
        estimate = checkpointer.step(first.step + 1, last=True).result().estimate
        assert estimate.mtbf_s < 9 * 24 * 3600  # not the 50 years that the clock has jumped
    assert not fails or checkpointer._client.instance.past().failures == 1


KILLED = """
import os, signal, sys, torch, laststep

c = laststep.Checkpointer(sys.argv[1], s={"t": torch.zeros(9)}, every="auto",
    options=laststep.Options(progress=False))
step, handle = c.restore().next_step, None
while handle is None:
    handle = c.step(step)
    step += 1
handle.wait()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_start_that_was_killed_has_failed(run_folder: Path) -> None:
    for killed in range(1, 3):
        command = [os.environ["WARM_PYTHON"], "-c", KILLED, str(run_folder)]
        assert subprocess.run(command, check=False).returncode in (-9, 137)
        state = {"t": torch.zeros(9)}
        with laststep.Checkpointer(
            run_folder, s=state, options=laststep.Options(flush="thread"), every="auto"
        ) as c:
            c.restore()
            assert c._client.instance.past().failures == killed


def test_every_start_that_ends_well_is_recorded_whatever_decides_when_to_save(
    opened: Opened, training: Training, run_folder: Path
) -> None:
    for settings in ({}, {"every": 1}, {"every": "0.01 s"}):
        with opened(training, **settings) as checkpointer:
            checkpointer.save(checkpointer.restore().next_step)
    assert len([*(run_folder / "terms").glob("*.ended")]) == 3
    with opened(training, every="auto") as checkpointer:
        checkpointer.restore()
        assert checkpointer._client.instance.past().failures == 0
