"""Says on what a benchmark ran. Fields that cannot be had say so; nothing here fails a run."""

from __future__ import annotations

import os
import platform
import subprocess
from dataclasses import dataclass
from pathlib import Path

UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """The machine, as far as it decides the figures."""

    cpu: str
    cores: int
    ram_bytes: int
    gpu: str
    gpu_bytes: int
    filesystem: str
    kernel: str
    python: str
    torch: str


def hardware(folder: Path) -> Hardware:
    """The machine, with the filesystem that holds `folder`."""
    import torch

    gpu, gpu_bytes = "none", 0
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        gpu, gpu_bytes = str(properties.name), int(properties.total_memory)
    return Hardware(
        cpu=_cpu_model(),
        cores=len(os.sched_getaffinity(0)),
        ram_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        gpu=gpu,
        gpu_bytes=gpu_bytes,
        filesystem=_filesystem(folder),
        kernel=platform.release(),
        python=platform.python_version(),
        torch=str(torch.__version__),
    )


def commit(root: Path) -> str:
    """The commit of the checkout at `root`, with `+` where files differ from it."""
    try:
        head = _git(root, "rev-parse", "--short=12", "HEAD")
        changed = _git(root, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        return UNKNOWN
    return head + ("+" if changed else "")


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(root), *arguments], check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or UNKNOWN
    for line in lines:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or UNKNOWN


def _filesystem(folder: Path) -> str:
    """Type and options of the mount that holds `folder`: the longest prefix of it."""
    best, found = "", UNKNOWN
    try:
        mounts = Path("/proc/self/mounts").read_text().splitlines()
    except OSError:
        return UNKNOWN
    where = folder.resolve()
    for line in mounts:
        _, point, kind, options, *_ = line.split()
        if where.is_relative_to(point) and len(point) >= len(best):
            best, found = point, f"{kind} ({options})"
    return found
