"""A short, seeded share of the model of a job of several ranks; `make torture` has the long one."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SCRIPT = """
import functools, os, sys
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path[:0] = [{here!r}, {source!r}]
from pathlib import Path
import job_model, trials
trial = functools.partial(job_model.trial, starts={starts}, deeds={deeds})
tally = trials.run("job model", trial, Path({folder!r}), seed={seed}, trials=1)
print(*tally.findings, sep="\\n")
sys.exit(bool(tally.findings) or not tally.compared)
"""


def run(folder: Path, seed: int, *, starts: int, deeds: int) -> subprocess.CompletedProcess[str]:
    """A trial in an interpreter without threads: it forks."""
    source = HERE.parent.parent / "src"
    script = SCRIPT.format(
        here=str(HERE),
        source=str(source),
        folder=str(folder),
        seed=seed,
        starts=starts,
        deeds=deeds,
    )
    return subprocess.run(
        [os.environ["WARM_PYTHON"], "-c", script], capture_output=True, text=True, check=False
    )


@pytest.mark.slow
def test_what_a_job_of_several_ranks_saves_is_what_any_job_restores(run_folder: Path) -> None:
    done = run(run_folder, 1, starts=2, deeds=4)
    assert done.returncode == 0, done.stdout + done.stderr
