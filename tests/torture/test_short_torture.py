"""A short, seeded share of the torture with every test run; `make torture` is the long one."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

TORTURE = Path(__file__).with_name("torture.py")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "seed", "faults"),
    [
        pytest.param("kills", 0, 10, marks=pytest.mark.long),
        ("flips", 1, 50),
        ("crashes", 1, 20),
        ("model", 301, 5),
        pytest.param("system", 5, 3, marks=pytest.mark.long),
    ],
)
def test_a_part_of_the_torture_violates_nothing(
    part: str, seed: int, faults: int, run_folder: Path
) -> None:
    run_folder.mkdir()
    result = run_folder / "result.json"
    command = [os.environ["WARM_PYTHON"], str(TORTURE), "--part", part, "--seed", str(seed)]
    done = subprocess.run(
        [*command, "--trials", "1", "--folder", str(run_folder), "--json", str(result)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(result.read_text())
    assert told["faults"] >= faults
    assert told["compared"] > 0
    assert told["found"] == {"wrong": 0, "hang": 0, "crash": 0, "foreign error": 0}
