"""The soak: `make soak`, or this file with options of your own.

    soak.py                     an hour
    soak.py --minutes 5 --seed 7

One trainer saves about every second to shared memory, a folder and an object store (SeaweedFS on
loopback), while flushers are killed and the server stands still for seconds at a time. Every minute
it prints what the trainer and its flusher take: memory, descriptors, threads, shared memory. At the
end every checkpoint that any of the tiers lists is verified and compared with what was saved, and
the second half of the figures must not be above the first by more than a tenth. The status is 1 if
anything is wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "storage"), str(HERE.parent.parent / "src")]

import torch  # noqa: E402
import weed  # noqa: E402

import laststep  # noqa: E402
from laststep.cli.processes import children_of  # noqa: E402
from laststep.memory import segments  # noqa: E402

MB = 1 << 20
KILL_SHARE, STALL_SHARE = 0.03, 0.01


class Soak:
    """A trainer, and what is done to those that work for it."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.home, self.far = str(folder / "home"), f"s3://{weed.BUCKET}/soak"
        self.chance = random.Random(seed)
        self.state = {"weight": torch.zeros(4 * MB), "small": torch.zeros(7)}
        self.faults = 0
        self.figures: list[dict[str, int]] = []

    def run(self, until_s: float) -> None:
        """Save until then."""
        few = laststep.Keep(last=3)
        tiers = ["shm://", laststep.Tier(self.home, keep=few), laststep.Tier(self.far, keep=few)]
        ckpt = laststep.Checkpointer(
            tiers=tiers, state=self.state, host_memory_bytes=160 * MB, progress=False
        )
        step, told_s = ckpt.restore().next_step, time.monotonic()
        while time.monotonic() < until_s:
            for tensor in self.state.values():
                tensor.fill_(step)
            with contextlib.suppress(laststep.LaststepError):  # the flusher was killed
                ckpt.save(step)
            step += 1
            self.disturb()
            if time.monotonic() - told_s > min(60, (until_s - told_s) / 4 + 1):
                told_s = time.monotonic()
                self.look(step)
            time.sleep(2 * self.chance.random())
        with contextlib.suppress(laststep.LaststepError):  # one that failed at the very end
            ckpt.close()

    def disturb(self) -> None:
        """Now and then, kill a flusher, or have the server stand still."""
        flushers = [pid for pid in children_of(os.getpid()) if is_of(pid, b"laststep.flush")]
        servers = [pid for pid in children_of(os.getpid()) if is_of(pid, b"weed")]
        if flushers and self.chance.random() < KILL_SHARE:
            os.kill(flushers[0], signal.SIGKILL)
            self.faults += 1
        if servers and self.chance.random() < STALL_SHARE:
            os.kill(servers[0], signal.SIGSTOP)
            wakes = threading.Timer(5, os.kill, (servers[0], signal.SIGCONT))
            wakes.start()
            self.faults += 1

    def look(self, step: int) -> None:
        """Note what is taken now."""
        figure = {
            "step": step, "faults": self.faults, "memory_mb": resident_mb(os.getpid()),
            "descriptors": len(list(Path("/proc/self/fd").iterdir())),
            "threads": threading.active_count(),
            "shared_mb": sum(one.size_bytes for one in segments.found(run=self.home)) // MB,
        }  # fmt: skip
        self.figures.append(figure)
        print(figure, flush=True)

    def judge(self) -> list[str]:
        """What is wrong, in words."""
        wrong = []
        for url in (self.home, self.far):
            run = laststep.open(url)
            for step in run.steps():
                checkpoint = run[step]
                if checkpoint.verify().damage or not bool(
                    (checkpoint.tensor("state/weight")[:] == step).all()
                ):
                    wrong.append(f"{url}: step {step} is not what was saved")
        if segments.found(run=self.home):
            wrong.append("shared memory is left behind")
        half = len(self.figures) // 2
        for name in ("memory_mb", "descriptors", "threads", "shared_mb") if half > 1 else ():
            before, after = (
                statistics.median(figure[name] for figure in figures)
                for figures in (self.figures[:half], self.figures[half:])
            )
            if after > 1.1 * before + 3:
                wrong.append(f"{name} grows: {before} in the first half, {after} in the second")
        return wrong


def is_of(pid: int, program: bytes) -> bool:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return program in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def resident_mb(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) // 1024 for line in lines if line.startswith("VmRSS"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="laststep-soak-") as place:
        server = Path(place) / "server"
        server.mkdir()
        with weed.running(server) as endpoint:
            os.environ.update({**weed.KEYS, "AWS_ENDPOINT_URL": endpoint, "AWS_REGION": "x"})
            soak = Soak(Path(place), options.seed)
            soak.run(time.monotonic() + 60 * options.minutes)
            wrong = soak.judge()
    print(f"{soak.faults} faults; wrong: {'; '.join(wrong) or 'nothing'}")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
