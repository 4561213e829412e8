"""Retention by the flusher, in a run of which something was lost."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import torch

import laststep
from expect import names
from laststep.flush.listeners import Retention
from laststep.settings import as_keywords

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("flush", ["thread", "process"])
def test_a_metric_that_no_checkpoint_has_is_told_once(
    flush: str,
    run_folder: Path,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    keep = laststep.Keep(best=1, metric="los")
    with laststep.Checkpointer(
        run_folder, state={"n": 1}, keep=keep, options=laststep.Options(flush=flush, progress=False)
    ) as ckpt:
        for step in range(3):
            ckpt.save(step, metrics={"loss": 1.0}).wait()
    [told] = [record for record in caplog.records if record.levelname == "WARNING"]
    assert names(told.getMessage(), "'los'", "loss")
    assert told.name == Retention.__module__
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), signal.SIGKILL)", "del ckpt"])
def test_warnings_of_a_flusher_whose_trainer_has_ended_are_printed(
    end: str, run_folder: Path
) -> None:
    trainer = f"""
import os, signal, laststep
keep = laststep.Keep(best=1, metric="los")
ckpt = laststep.Checkpointer({str(run_folder)!r}, state={{"n": 1}}, keep=keep)
ckpt.save(1, metrics={{"loss": 1.0}}).result()
{end}
"""
    # The helper inherits the pipe: this returns once it has ended too.
    done = subprocess.run(
        [sys.executable, "-c", trainer], stderr=subprocess.PIPE, text=True, check=False
    )
    assert [names(line, "'los'", "loss") for line in done.stderr.splitlines()] == [True]


@pytest.mark.parametrize("flush", ["thread", "process"])
def test_a_checkpoint_that_lost_a_file_takes_no_place_among_the_last(
    flush: str, run_folder: Path
) -> None:
    state = {"t": torch.zeros(400_000)}
    keep = laststep.Keep(last=2)
    with laststep.Checkpointer(
        run_folder, state=state, keep=keep, options=laststep.Options(flush=flush, progress=False)
    ) as ckpt:
        ckpt.restore()
        for step in range(3):
            ckpt.save(step).wait()
        [lost] = run_folder.glob("step-00000002.*/state.safetensors")
        lost.unlink()
        ckpt.save(3)
    # Steps 3 and 1 can be restored; step 2 stays for somebody to look at.
    assert laststep.open(run_folder).steps() == [1, 2, 3]
    with laststep.Checkpointer(
        run_folder, state=state, options=laststep.Options(flush=flush, progress=False)
    ) as ckpt:
        assert ckpt.restore(1).step == 1


def test_a_replaced_checkpoint_does_not_come_back(run_folder: Path) -> None:
    """Not even the one that the job resumed from, which stays on the disk."""
    state = {"n": 0}
    keep = laststep.Keep(last=1, best=1, metric="loss")
    how = {"state": state, "keep": keep, "flush": "thread", "progress": False}
    with laststep.Checkpointer(run_folder, **as_keywords(how)) as ckpt:
        ckpt.save(5, metrics={"loss": 1.0})
    with laststep.Checkpointer(run_folder, **as_keywords(how)) as ckpt:
        ckpt.restore()
        state["n"] = 1
        ckpt.save(5, metrics={"loss": 9.0}, overwrite=True).result()
        for step in (6, 7):
            ckpt.save(step, metrics={"loss": 8.0 - step}).result()
    assert laststep.open(run_folder).steps() == [5, 7]
    assert laststep.load(run_folder, step=5)["state"] == {"n": 1}
    with laststep.Checkpointer(run_folder, **as_keywords(how)) as ckpt:
        ckpt.restore()
        ckpt.save(8, metrics={"loss": 0.5}).result()
    assert laststep.open(run_folder).steps() == [7, 8]


def test_going_back_behind_a_replacement_frees_the_steps_after_it(run_folder: Path) -> None:
    """The replaced step 1 stays, since the job resumed from it; its replacement is left behind."""
    state = {"x": torch.zeros(3)}
    with laststep.Checkpointer(
        run_folder, s=state, options=laststep.Options(flush="thread", progress=False)
    ) as ckpt:
        ckpt.restore()
        ckpt.save(0).wait()
        ckpt.save(1).wait()
    with laststep.Checkpointer(
        run_folder, s=state, options=laststep.Options(flush="thread", progress=False)
    ) as ckpt:
        ckpt.restore()
        for step in (0, 1):
            ckpt.save(step, overwrite=True).wait()
        ckpt.save(2).wait()
        state["x"].fill_(7)
        ckpt.save(ckpt.restore(0).next_step).wait()
    assert laststep.open(run_folder).steps() == [0, 1]
