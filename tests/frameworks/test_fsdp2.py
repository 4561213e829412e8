"""The example for FSDP2 saves when its job is stopped, and goes on with another number of ranks."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from frameworks.trained import SCRIPTS, environment
from waiting import PATIENCE_S, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

EXAMPLE = SCRIPTS.parents[1] / "examples" / "fsdp2.py"
FOREVER = 1_000_000
SAMPLES, BATCH = 512, 16
"""As in the example."""


class Starts:
    """Starts of the example over one folder."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        self.log = folder / "log"

    @contextlib.contextmanager
    def start(self, ranks: int, steps: int) -> Iterator[subprocess.Popen[bytes]]:
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        with self.log.open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, *launch, EXAMPLE, self.folder, "--steps", str(steps)],
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=environment() | {"PYTHON_EXEC": os.environ["WARM_PYTHON"]},
            )
        try:
            yield process
        finally:
            process.terminate()  # torchrun then ends its ranks
            process.wait()

    def to_its_end(self, ranks: int, steps: int) -> str:
        """What it printed."""
        with self.start(ranks, steps) as process:
            assert process.wait(PATIENCE_S) == 0, self.log.read_text()
        return self.log.read_text()

    def stopped(self, ranks: int, *, after: int) -> int:
        """The exit code of torchrun, after SIGTERM in mid-epoch."""
        with self.start(ranks, FOREVER) as process:
            wait_until(lambda: process.poll() is not None or len(self.lines()) > after)
            process.send_signal(signal.SIGTERM)
            return process.wait(PATIENCE_S)

    def lines(self) -> list[str]:
        log = self.folder / "losses.jsonl"
        return log.read_text().splitlines() if log.exists() else []

    def losses(self) -> list[float]:
        rows = [json.loads(line) for line in self.lines()]
        assert [row["step"] for row in rows] == [*range(len(rows))], "a step is there twice"
        return [row["loss"] for row in rows]


@pytest.mark.slow
def test_a_stopped_epoch_is_finished_by_another_number_of_ranks(tmp_path: Path) -> None:
    """Each step sees the same samples on any number of ranks, so losses differ by rounding only."""
    stopped, whole = Starts(tmp_path / "stopped"), Starts(tmp_path / "whole")
    assert stopped.stopped(2, after=3) == 1, "torchrun does not pass on the code 75"
    saved = len(stopped.lines())
    steps = saved + SAMPLES // BATCH  # another epoch begins in between
    assert f"starting at step {saved} with 1 ranks" in stopped.to_its_end(1, steps)
    assert "starting at step 0 with 2 ranks" in whole.to_its_end(2, steps)
    assert stopped.losses() == pytest.approx(whole.losses(), rel=1e-3)
