"""Shared memory that two processes map: made, grown page by page, and measured, without torch.

A memfd rather than /dev/shm, whose size in a container is often 64 MB. The file has its full length
from the start and costs nothing until pages are touched. Both ways of having pages ahead of time
work outside the GIL: `allocate` makes them, without any lock of this process; `populate` also maps
them into it, so that the first save does not pay for page faults.

A mapping belongs to the process that made it. A forked child does not have it, and may have mapped
something else at its address: there its end unmaps nothing. Nor does a child keep the file, which
would keep the memory.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import errno
import mmap
import os
import weakref
from typing import TYPE_CHECKING

from laststep.process import kernel

if TYPE_CHECKING:
    from collections.abc import Sequence

_MADV_DONTFORK = 10
_MADV_POPULATE_WRITE = 23
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.pwritev.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_long)
_libc.pwritev.restype = ctypes.c_ssize_t
_IOV_MAX = 1024


def create(size_bytes: int) -> int:
    """The descriptor of a new shared memory file of that length."""
    fd = os.memfd_create("laststep", os.MFD_CLOEXEC)
    os.ftruncate(fd, size_bytes)
    return fd


def write_from(fd: int, at: int, ranges: Sequence[tuple[int, int]]) -> bool:
    """Write memory of this process, ranges of (address, bytes), one behind the other into a file,
    from `at` on. Returns False where some of that memory is gone: the system checks before it
    reads, so this process does not die of memory that another thread has just freed."""
    for first in range(0, len(ranges), _IOV_MAX):
        batch = [stretch for stretch in ranges[first : first + _IOV_MAX] if stretch[1]]
        while batch:
            vector = array.array("L", [number for stretch in batch for number in stretch])
            written = _libc.pwritev(fd, vector.buffer_info()[0], len(batch), at)
            if written < 0:
                number = ctypes.get_errno()
                if number == errno.EINTR:
                    continue
                if number == errno.EFAULT:
                    return False
                raise OSError(number, os.strerror(number))
            at += written
            batch = _rest(batch, written)
    return True


def _rest(ranges: list[tuple[int, int]], written: int) -> list[tuple[int, int]]:
    """What is left of ranges of which so many bytes are done."""
    for number, (address, size) in enumerate(ranges):
        if written < size:
            return [(address + written, size - written), *ranges[number + 1 :]]
        written -= size
    return []


class Mapping:
    """One process's view of a shared memory file; without a file (-1), memory of its own."""

    def __init__(self, fd: int, size_bytes: int) -> None:
        self._fd = fd
        status = None if fd < 0 else os.fstat(fd)
        self.file = status and (status.st_dev, status.st_ino)
        mapped = mmap.mmap(fd, size_bytes, mmap.MAP_SHARED if status else mmap.MAP_PRIVATE)
        self._map: mmap.mmap | None = mapped
        self.view = memoryview(mapped)
        self.size_bytes = size_bytes
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        # A forked loader worker must neither keep the pages nor trip over registered memory.
        kernel.advise(self.address, size_bytes, _MADV_DONTFORK)
        kernel.prefer_huge_pages(self.address, size_bytes)
        _mappings.add(self)

    def allocate(self, start: int, size_bytes: int) -> None:
        """Make pages of the file; whoever touches them first maps them."""
        os.posix_fallocate(self._fd, start, size_bytes)

    def populate(self, start: int, size_bytes: int) -> None:
        """Make pages present; `OSError` where there are no more. Where the kernel is too old for
        the advice, touch them, once they are there: who touches what cannot be made dies."""
        refused = kernel.advise(self.address + start, size_bytes, _MADV_POPULATE_WRITE)
        if refused == errno.EINVAL:
            if self._fd >= 0:
                self.allocate(start, size_bytes)
            for offset in range(start, start + size_bytes, mmap.PAGESIZE):
                self.view[offset] = 0
        elif refused:
            number = errno.ENOSPC if refused == errno.EFAULT else refused
            raise OSError(number, os.strerror(number))

    def close(self) -> None:
        """Let go of the memory, unless somebody still looks at it: then it goes with the last."""
        if self._map is None:
            return
        with contextlib.suppress(BufferError):
            self.view.release()
            self._map.close()

    def protect(self, start: int, size_bytes: int, *, writable: bool) -> None:
        """Have writes through this mapping to that part end the process, or allow them again."""
        allowed = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        if _libc.mprotect(self.address + start, size_bytes, allowed) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

    def disown(self) -> None:
        """Called in a forked child, where this is not mapped. If the mmap object were collected, it
        would unmap whatever lies at its address there, so it is kept for ever."""
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._map))
        self._map = None

    @property
    def is_open(self) -> bool:
        """Whether this mapping still keeps the file."""
        return self._map is not None and not self._map.closed


_mappings: weakref.WeakSet[Mapping] = weakref.WeakSet()
"""The mappings of this process that are not collected yet, closed or not."""


def _in_child() -> None:
    mappings = list(_mappings)
    _close_all({mapping.file for mapping in mappings if mapping.file and mapping.is_open})
    for mapping in mappings:
        mapping.disown()
    _mappings.clear()


def _close_all(files: set[tuple[int, int]]) -> None:
    """Close every descriptor of these files, which are named by device and inode. An mmap has a
    hidden one of its own; any that is left keeps the memory when the parent has let go of it."""
    for name in os.listdir("/proc/self/fd") if files else ():  # noqa: PTH208 (see `kernel`)
        with contextlib.suppress(OSError):  # that of the listing is closed by now
            status = os.fstat(int(name))
            if (status.st_dev, status.st_ino) in files:
                os.close(int(name))


os.register_at_fork(after_in_child=_in_child)


def available_bytes() -> int:
    """Host memory that can still be had: the machine's, or what the control group leaves of it."""
    available = _meminfo("MemAvailable")
    limit = _number("/sys/fs/cgroup/memory.max")
    used = _number("/sys/fs/cgroup/memory.current")
    if limit is not None and used is not None:
        available = min(available, max(limit - used, 0))
    return available


def _meminfo(field: str) -> int:
    for line in kernel.told("/proc/meminfo").splitlines():
        name, _, rest = line.partition(":")
        if name == field:
            return int(rest.split()[0]) * 1024
    return 0


def _number(path: str) -> int | None:
    try:
        return int(kernel.told(path))
    except ValueError:
        return None
