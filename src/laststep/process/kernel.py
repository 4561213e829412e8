"""What the kernel tells in small files, such as those below /proc, and what it is told of memory.

With `open`, not `pathlib`: the flusher would import that for nothing else, which is 3 ms of its
start.
"""

from __future__ import annotations

import ctypes
import os

HUGE_PAGE_BYTES = 2 << 20
_MADV_HUGEPAGE = 14
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def advise(address: int, size_bytes: int, advice: int) -> int:
    """Advise the kernel on whole pages of this process; 0, or the number of the error."""
    return 0 if _libc.madvise(address, size_bytes, advice) == 0 else ctypes.get_errno()


def prefer_huge_pages(address: int, size_bytes: int) -> None:
    """Have what lies wholly in that memory, and was not touched yet, made of huge pages, where the
    system has some: touched one by one, small pages take longer than what is copied into them."""
    first = -(-address // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    whole = (address + size_bytes - first) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    if whole > 0:
        advise(first, whole, _MADV_HUGEPAGE)


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
