"""A minute of the soak in the long suite; `make soak` is the whole of it.

Not with every test run: on a busy machine a minute may be over before anything was saved.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "storage"))
import weed  # noqa: E402


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_minute_of_the_soak_finds_nothing_wrong() -> None:
    weed.program()  # or it is skipped
    done = subprocess.run(
        [sys.executable, str(HERE / "soak.py"), "--minutes", "1", "--seed", "3"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "wrong: nothing" in done.stdout
    assert "'killed'" in done.stdout  # or the seed brings no fault of that kind in that time
