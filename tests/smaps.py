"""What the kernel tells of the memory of this process."""

from __future__ import annotations

from pathlib import Path


def flags_at(address: int) -> list[str]:
    """How the kernel treats the memory there: `hg` where huge pages were asked for."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split(" ", 1)[0]
        if "-" in head and not head.endswith(":"):
            first, last = (int(bound, 16) for bound in head.split("-"))
            inside = first <= address < last
        elif inside and head == "VmFlags:":
            return line.split()[1:]
    return []
