"""What the kernel tells in small files, such as those below /proc.

With `open`, not `pathlib`: the flusher would import that for nothing else, which is 3 ms of its
start.
"""

from __future__ import annotations

import os


def told(path: str) -> str:
    """All that such a file says; "" where there is none, or it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:  # noqa: PTH123 (see above)
            return file.read()
    except OSError:
        return ""


def filesystem_of(path: str) -> str:
    """The kind of filesystem that a path lies on, such as `tmpfs`; "" where that is not told."""
    try:
        device = os.stat(path).st_dev  # noqa: PTH116 (see above)
    except OSError:
        return ""
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in told("/proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        if before.split()[2:3] == [number]:
            return after.split()[0]
    return ""
