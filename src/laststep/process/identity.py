"""Which process a process is: its number alone is given away again once it is dead."""

from __future__ import annotations

import os

from laststep.process import kernel


def boot() -> str:
    """The name of this start of the kernel; "" where it does not tell."""
    return kernel.told("/proc/sys/kernel/random/boot_id").strip()


def pid_namespace() -> str:
    """Within what the numbers of processes mean the same; "" where the kernel does not tell."""
    try:
        return os.readlink("/proc/self/ns/pid")  # noqa: PTH115 (see `kernel`)
    except OSError:
        return ""


def process_started(pid: int) -> str:
    """When a process has started, in ticks since the boot; "" where there is none, or one
    that is dead and not reaped yet."""
    state, *more = kernel.told(f"/proc/{pid}/stat").rpartition(")")[2].split() or [""]
    return more[18] if len(more) > 18 and state not in ("Z", "X") else ""
