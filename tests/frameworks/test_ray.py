"""Ray Train gets what is committed, and a worker that dies is resumed to the bit."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

import laststep
from frameworks import trained
from frameworks.trained import SCRIPTS, Script, read

pytest.importorskip("ray.train.torch", reason="laststep[ray] is not installed")

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(550)]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `ray_jobs.py` has left; Ray starts slowly, so all share one cluster."""
    folder = tmp_path_factory.mktemp("ray")
    script = Script("ray_jobs.py", folder)
    script.run = folder  # it takes a folder for all of its runs
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trained, "PATIENCE_S", 500.0)  # three jobs, each with workers that start
        script.to_its_end()
    return folder


def told(jobs: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((jobs / name / "told.json").read_text())
    return found


def test_after_a_worker_was_killed_in_a_save_losses_are_those_of_a_run_without_that(
    jobs: Path,
) -> None:
    whole, killed = (
        (jobs / name / "losses").read_text().splitlines() for name in ("whole", "killed")
    )
    assert (jobs / "killed" / "was_killed").exists()
    assert len(killed) > len(whole), "no step was done again"
    assert {*killed} == {*whole}


def test_ray_is_handed_the_last_checkpoint_as_the_folder_in_the_run(jobs: Path) -> None:
    for name in ("whole", "killed"):
        handed = told(jobs, name)
        run = jobs / name / "experiment" / "laststep"
        assert Path(handed["path"]) == run / laststep.open(run)[8].folder
        assert handed["metrics"]["checkpoint_step"] == 8
        assert handed["metrics"]["step"] == 9
        assert [*laststep.load(handed["path"], rank=0)] == ["model", "optimizer", "rng"]


def test_another_number_of_workers_goes_on_with_a_run_elsewhere(jobs: Path) -> None:
    run = jobs / "killed" / "experiment" / "laststep"
    assert sorted(read(jobs / "alone" / "losses")) == [9, 10, 11, 12]
    assert told(jobs, "alone")["path"] is None
    assert laststep.open(run).latest().step == 12


def test_outside_of_a_worker_ray_refuses_it(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError):
        laststep.ray.Checkpointer(tmp_path / "run", state={"a": 1})


def test_the_example_runs(tmp_path: Path) -> None:
    example = SCRIPTS.parents[1] / "examples" / "ray_train.py"
    script = Script(os.fspath(example), tmp_path)
    script.to_its_end()
    assert "the weights of step-00000039" in script.output()
