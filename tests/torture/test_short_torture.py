"""A short torture with every test run; `make torture` is the long one."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

TORTURE = Path(__file__).with_name("torture.py")


@pytest.mark.slow
def test_kills_flips_and_crashes_violate_nothing(run_folder: Path) -> None:
    run_folder.mkdir()
    counts = ("--kills", "10", "--flips", "60", "--crashes", "8", "--histories", "2")
    done = subprocess.run(
        [sys.executable, str(TORTURE), *counts, "--folder", str(run_folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    table = dict(re.split(r"  +", line) for line in done.stdout.splitlines() if "  " in line)
    assert table["kill -9: trials"] == "10"
    assert table["bit flips"] == "60"
