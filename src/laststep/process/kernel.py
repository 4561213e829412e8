"""What the kernel tells in small files, such as those below /proc.

With `open`, not `pathlib`: the flusher would import that for nothing else, which is 3 ms of its
start.
"""

from __future__ import annotations


def told(path: str) -> str:
    """All that such a file says; "" where there is none, or it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:  # noqa: PTH123 (see above)
            return file.read()
    except OSError:
        return ""
