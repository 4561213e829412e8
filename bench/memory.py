"""Peak host memory of a process tree, sampled from outside it.

Run as a script it is the sampler: a process of its own, so that neither the trainer's GIL nor its
own cost falls into what it watches. It adds up the proportional set size (Pss) of the trainer and
all its descendants, so memory shared between them counts once. Reading Pss walks page tables under
a lock that page faults want too, so timings of a sampled repetition are kept apart.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

_INTERVAL_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """Bytes beyond what was in use when watching began."""

    pss_bytes: int
    samples: int


class Watch:
    """Watches this process and its children from construction until `stop`."""

    def __init__(self) -> None:
        self._before = tree_pss_bytes(os.getpid())
        self._sampler = subprocess.Popen(
            [sys.executable, "-I", __file__, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def stop(self) -> Peak:
        """The peak since construction."""
        answer, _ = self._sampler.communicate()
        peak, samples = answer.split()
        return Peak(pss_bytes=int(peak) - self._before, samples=int(samples))


def tree_pss_bytes(root: int, without: int = 0) -> int:
    """Pss of `root` and its descendants, less the process `without`."""
    parents: dict[int, int] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                stat = Path(entry.path, "stat").read_text()
            except OSError:
                continue
            parents[int(entry.name)] = int(stat.rpartition(")")[2].split()[1])
    total = 0
    for pid in parents:
        at = pid
        while at in parents and at != root:
            at = parents[at]
        if at == root and pid != without:
            total += _pss_bytes(pid)
    return total


def _pss_bytes(pid: int) -> int:
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass  # it ended between the listing and now
    return 0


def _sample_until_told(root: int) -> None:
    peak, samples = 0, 0
    while True:
        started = time.monotonic()
        peak = max(peak, tree_pss_bytes(root, without=os.getpid()))
        samples += 1
        # At most a fifth of the time is spent looking, however large the process has become.
        pause_s = max(_INTERVAL_S, 4 * (time.monotonic() - started))
        if select.select([sys.stdin], [], [], pause_s)[0]:
            break
    print(peak, samples)


if __name__ == "__main__":
    _sample_until_told(int(sys.argv[1]))
