"""The soak: `make soak`, or this file with options of your own.

    soak.py                     an hour
    soak.py --minutes 5 --seed 7

A trainer saves about every second to shared memory, a folder and an object store (SeaweedFS on
loopback), with faults at each: in the first third of the time trainer and flusher are killed
together, also with a bit of the shared memory flipped after that, and the next trainer has to come
back at no less than the newest step that a tier was said to hold; all the time flushers are killed,
the folder's disk is full for seconds, and connections to the server are reset, refused or stand
still. The last trainer lives on, and what it takes is watched: memory, descriptors, threads, shared
memory. At the end every checkpoint that any tier lists is verified and compared with what was
saved, and the second half of the figures must not be above the first by more than a tenth, and a
little. The status is 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "storage"), str(HERE.parent.parent / "src")]

import weed  # noqa: E402
from gate import Gate, Trouble  # noqa: E402
from soak_trainer import children_of, is_of, state_of  # noqa: E402

import laststep  # noqa: E402
from laststep.memory import segments  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

_CLONE_NEWNS = 0x00020000
DISK_MB = 512
STARTS_S = 180.0
"""How long a start may take while everything around it is broken."""


class Trainer:
    """A process that trains, and what it was heard to say."""

    def __init__(self, primary: str, far: str, seed: int) -> None:
        command = [sys.executable, str(HERE / "soak_trainer.py"), primary, far, str(seed)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.began_s = time.monotonic()
        self.restored: int | None = None
        self.held: dict[str, int] = {}
        self.takes: list[dict[str, int]] = []
        self.failed: list[str] = []
        self._listens = threading.Thread(target=self._listen)
        self._listens.start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            word, _, rest = line.decode().strip().partition(" ")
            if word == "restored":
                self.restored = int(rest)
            elif word == "holds":
                tier, step = rest.rsplit(maxsplit=1)
                self.held[tier] = max(int(step), self.held.get(tier, -1))
            elif word == "takes":
                self.takes.append(json.loads(rest))
                print({"step": self.held.get("primary"), **self.takes[-1]}, flush=True)
            elif word == "failed:":
                self.failed.append(rest)

    @property
    def flushers(self) -> list[int]:
        """Its helpers; none where it is not far enough, or has none just now."""
        return children_of(self._process.pid)

    @property
    def ended(self) -> bool:
        """Whether it is gone, and all that it said was heard."""
        return self._process.poll() is not None

    def kill(self) -> None:
        """End it and its flusher, as a machine does that kills a container."""
        flushers = self.flushers
        self._process.kill()
        for pid in flushers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()
        self._listens.join()

    def end(self) -> None:
        """Have it close its checkpointer and go."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(STARTS_S)
        self._listens.join()


class Soak:
    """Trainers one after another, what is done to them, and what is wrong."""

    def __init__(self, disk: Path, gate: Gate, seed: int, *, fills: bool) -> None:
        self.primary, self.far = str(disk / "primary"), f"s3://{weed.BUCKET}/soak"
        self._disk, self._gate, self._seed = disk, gate, seed
        self._chance = random.Random(seed)
        self._full_until_s = 0.0
        self._promised: dict[str, int] = {}
        self.wrong: list[str] = []
        self.faults: dict[str, int] = {}
        self._kinds: list[tuple[float, Callable[[], None]]] = [
            (0.06, self._kill_flusher),
            (0.03, lambda: self._trouble("resets")),
            (0.02, lambda: self._trouble("503")),
            (0.02, lambda: self._trouble("stands still")),
        ]
        if fills:
            self._kinds.append((0.03, self._fill))
        self._trainer = self._start()

    def run(self, seconds: float) -> None:
        """Have it train that long, and be disturbed."""
        began_s = time.monotonic()
        kills_until_s, ends_s = began_s + seconds / 3, began_s + seconds
        next_kill_s = began_s + self._life_s(seconds)
        while (now_s := time.monotonic()) < ends_s:
            time.sleep(0.5)
            for share, fault in self._kinds:
                if self._chance.random() < share:
                    fault()
            if self._trainer.ended or next_kill_s < now_s < kills_until_s:
                self._replace()
                next_kill_s = time.monotonic() + self._life_s(seconds)
            if self._trainer.restored is None and now_s > self._trainer.began_s + STARTS_S:
                self.wrong.append("a trainer did not start in time")
                break
        self._trainer.end()
        self._note(self._trainer)

    def judge(self) -> list[str]:
        """What is wrong, in words."""
        for url in (self.primary, self.far):
            run = laststep.open(url)
            if not run.steps():
                self.wrong.append(f"{url} has no checkpoint")
            for step in run.steps():
                checkpoint = run[step]
                state = {name: checkpoint.tensor(f"state/{name}")[:] for name in state_of(0)}
                if checkpoint.verify().damage or not is_of(state, step):
                    self.wrong.append(f"{url}: step {step} is not what was saved")
        # What the primary did not get, since its disk was full, has to stay.
        left = laststep.recover(self.primary, dry_run=True).segments
        if any(one.is_alive or not one.is_needed for one in left):
            self.wrong.append("shared memory is left behind")
        if not laststep.recover(self.primary).ok or segments.found(run=self.primary):
            self.wrong.append("what shared memory alone has cannot be stored")
        takes = self._trainer.takes
        half = len(takes) // 2
        for name in takes[0] if half > 1 else ():
            before, after = (
                statistics.median(figure[name] for figure in figures)
                for figures in (takes[:half], takes[half:])
            )
            if after > 1.1 * before + (64 if name.endswith("_mb") else 3):
                self.wrong.append(f"{name} grows: {before} at first, {after} later")
        return self.wrong

    def _life_s(self, seconds: float) -> float:
        return seconds / 60 + self._chance.random() * seconds / 15

    def _start(self) -> Trainer:
        self._seed += 1
        return Trainer(self.primary, self.far, self._seed)

    def _replace(self) -> None:
        """The trainer goes, or has gone; another one comes."""
        self._trainer.kill()
        self._count("killed")
        self._note(self._trainer)
        if self._chance.random() < 0.3:
            self._flip()
        self._trainer = self._start()

    def _note(self, trainer: Trainer) -> None:
        """What it found when it came, and what it was promised."""
        wanted = max(self._promised.values(), default=-1)
        if trainer.restored is not None and trainer.restored < wanted:
            self.wrong.append(f"back at {trainer.restored}, {self._promised} was promised")
        if trainer.restored is not None:
            self._promised = {"primary": trainer.restored} if trainer.restored >= 0 else {}
        self._promised |= {tier: trainer.held[tier] for tier in trainer.held if tier != self.far}
        if trainer.failed and time.monotonic() > self._full_until_s + STARTS_S:
            self.wrong += trainer.failed

    def _count(self, fault: str) -> None:
        self.faults[fault] = self.faults.get(fault, 0) + 1

    def _kill_flusher(self) -> None:
        if self._trainer.restored is not None:
            for pid in self._trainer.flushers[:1]:
                os.kill(pid, signal.SIGKILL)
                self._count("flusher killed")

    def _trouble(self, kind: Trouble) -> None:
        self._gate.trouble(kind, 1 + 4 * self._chance.random())
        self._count(f"server: {kind}")

    def _fill(self) -> None:
        """The disk of the folder is full for some seconds."""
        ballast, seconds = self._disk / "ballast", 1 + 3 * self._chance.random()
        if ballast.exists():
            return
        with contextlib.suppress(OSError), ballast.open("wb") as file:
            room = os.statvfs(self._disk)
            os.posix_fallocate(file.fileno(), 0, room.f_bavail * room.f_frsize)
        self._full_until_s = time.monotonic() + seconds
        gone = threading.Timer(seconds, ballast.unlink)
        gone.daemon = True
        gone.start()
        self._count("disk full")

    def _flip(self) -> None:
        """A bit of what the dead have left in memory changes: the folder's checkpoint counts."""
        for segment in segments.found(run=self.primary):
            with Path(segment.pool_path).open("r+b") as pool:
                at = self._chance.randrange(os.fstat(pool.fileno()).st_size)
                pool.seek(at)
                byte = pool.read(1)
                pool.seek(at)
                pool.write(bytes([byte[0] ^ 1]))
            self._promised.pop("shm://", None)
            self._count("bit of memory flipped")


@contextlib.contextmanager
def small_disk(place: Path):  # type: ignore[no-untyped-def]
    """Have a filesystem there that nobody else sees, and that can be filled; False if not ours."""
    place.mkdir()
    if os.geteuid() != 0 or ctypes.CDLL(None).unshare(_CLONE_NEWNS) != 0:
        print("no filesystem of our own to fill: that fault is left out")
        yield False
        return
    for words in (
        ("mount", "--make-rprivate", "/"),
        ("mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "laststep", str(place)),
    ):
        subprocess.run(words, check=True)
    try:
        yield True
    finally:
        subprocess.run(["umount", "-l", str(place)], check=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="laststep-soak-") as place,
        small_disk(Path(place) / "disk") as fills,
    ):
        server = Path(place) / "server"
        server.mkdir()
        with weed.running(server) as endpoint:
            address = urlsplit(endpoint)
            gate = Gate((str(address.hostname), int(address.port or 0)))
            os.environ.update({**weed.KEYS, "AWS_ENDPOINT_URL": gate.endpoint, "AWS_REGION": "x"})
            soak = Soak(Path(place) / "disk", gate, options.seed, fills=fills)
            soak.run(60 * options.minutes)
            gate.trouble("503", 0)
            wrong = soak.judge()
    print(f"{soak.faults}; wrong: {'; '.join(wrong) or 'nothing'}")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
