"""A training script of a framework: run to its end, killed in the middle of a save, run again.

Each script takes the run's folder as its first argument, a file for losses as its second, and more
as the test likes. It appends a line `STEP LOSS` for each step that it has done, the loss by
`float.hex()`, on the first rank only.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

SCRIPTS = Path(__file__).parent
PATIENCE_S = 240.0
_OF_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What a test that has run in this process may have left, and a script has not been told."""


class Script:
    """Starts of one script over one run, each with its losses in a file of its own."""

    def __init__(
        self, name: str, folder: Path, *arguments: str, ranks: int = 1, gpu: bool = False
    ) -> None:
        self.script = SCRIPTS / name
        self.run, self.folder = folder / "run", folder
        self._arguments, self._ranks, self._starts = arguments, ranks, 0
        self._gpu = gpu
        folder.mkdir(parents=True, exist_ok=True)

    def to_its_end(self, *more: str, ranks: int | None = None) -> dict[int, str]:
        """The losses of all steps that this start has done."""
        process, losses = self._start(more, ranks)
        log = self._log.read_text
        try:
            code = process.wait(PATIENCE_S)
        finally:
            _kill(process)
        assert code == 0, f"it ended with {code}\n{log()[-6000:]}"
        return read(losses)

    def killed_in_save(self, step: int, *more: str, ranks: int | None = None) -> dict[int, str]:
        """Kill -9, all its ranks and flushers, as soon as an attempt of that step is begun."""
        process, losses = self._start(more, ranks)
        deadline = time.monotonic() + PATIENCE_S
        while not any(self.run.rglob(f"step-{step:08}.*")):
            assert process.poll() is None, f"it has ended\n{self._log.read_text()[-6000:]}"
            assert time.monotonic() < deadline, f"no save of step {step} in {self.run}"
            time.sleep(0.0005)
        _kill(process)
        return read(losses)

    def output(self) -> str:
        """All that the last start has printed."""
        return self._log.read_text()

    def _start(
        self, more: tuple[str, ...], ranks: int | None
    ) -> tuple[subprocess.Popen[bytes], Path]:
        self._starts += 1
        losses = self.folder / f"losses{self._starts}"
        self._log = self.folder / f"log{self._starts}"
        count = self._ranks if ranks is None else ranks
        launch = [sys.executable, "-W", "ignore"]
        if count > 1:
            launch += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
        command = [*launch, self.script, self.run, losses, *self._arguments, *more]
        with self._log.open("wb") as log:
            process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env=environment(gpu=self._gpu),
            )
        return process, losses


def environment(*, gpu: bool = False) -> dict[str, str]:
    """No network, few threads, and the same numbers each time."""
    known = {name: value for name, value in os.environ.items() if name not in _OF_RANKS}
    device = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} if gpu else {"CUDA_VISIBLE_DEVICES": ""}
    return {
        **known,
        **device,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "0",
        "WANDB_MODE": "disabled",
        "RAY_DEDUP_LOGS": "0",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }


def _kill(process: subprocess.Popen[bytes]) -> None:
    """The process and all that it has started."""
    for pid in [*_descendants(process.pid), process.pid]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def _descendants(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children")
    try:
        own = [int(child) for child in children.read_text().split()]
    except OSError:
        return []
    return [inner for child in own for inner in (*_descendants(child), child)]


def read(losses: Path) -> dict[int, str]:
    """STEP → LOSS; a line that a kill has cut off does not count."""
    if not losses.exists():
        return {}
    lines = [line.split(" ") for line in losses.read_text().split("\n")[:-1]]
    return {int(step): loss for step, loss in lines}
