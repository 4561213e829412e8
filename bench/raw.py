"""What the disk can do at most, measured in the same run as everything that is compared with it.

Writes go to new files only: overwriting or truncating a large file is much slower than writing a
new one on some filesystems. Deleting is never timed. Uses O_DIRECT where the filesystem grants it,
else buffered writes with fsync, and says which.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from bench.files import make_cold

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MIB = 1 << 20
REQUESTS_BYTES = (4 * MIB, 16 * MIB)
THREADS = (1, 4, 8)
_BUFFER_BYTES = 64 * MIB


class Layout(Enum):
    """How the bytes are spread. Writers that extend one file take its lock in turn; preallocation
    avoids that, as does a file for each."""

    ONE_FILE = "one preallocated file"
    FILE_PER_THREAD = "a file for each thread"


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way of driving the disk."""

    threads: int
    request_bytes: int
    layout: Layout
    direct: bool

    def __str__(self) -> str:
        kind = "O_DIRECT" if self.direct else "buffered"
        request = f"{self.request_bytes // MIB} MiB"
        return f"{kind}, {self.threads} threads, {request}, {self.layout.value}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskSample:
    """One timed write of new files and the cold read of the same bytes."""

    way: str
    size_bytes: int
    write_s: float
    read_s: float
    read_to_device_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskLimits:
    """All ways tried, and the best of them, for writing and for reading."""

    direct: bool
    scan: list[DiskSample]
    best_write: Way
    best_read: Way


def random_buffer() -> mmap.mmap:
    """Page-aligned random bytes, so that no layer below can compress or dedupe them."""
    buffer = mmap.mmap(-1, _BUFFER_BYTES)
    buffer.write(os.urandom(_BUFFER_BYTES))
    return buffer


def direct_is_granted(folder: Path) -> bool:
    """Whether the filesystem takes an aligned O_DIRECT write."""
    probe = folder / "direct.probe"
    try:
        fd = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600)
        try:
            os.pwrite(fd, mmap.mmap(-1, mmap.PAGESIZE), 0)
        finally:
            os.close(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        return False
    finally:
        probe.unlink(missing_ok=True)
    return True


def scan(folder: Path, size_bytes: int) -> DiskLimits:
    """Try every way with `size_bytes` and name the best."""
    folder.mkdir(parents=True, exist_ok=True)
    direct = direct_is_granted(folder)
    buffer = random_buffer()
    ways = [
        Way(threads=threads, request_bytes=request, layout=layout, direct=direct)
        for threads in THREADS
        for request in REQUESTS_BYTES
        for layout in (Layout if threads > 1 else (Layout.ONE_FILE,))
    ]
    samples = [sample(folder, size_bytes, way, way, buffer) for way in ways]
    write_s, read_s = ([s.write_s for s in samples], [s.read_s for s in samples])
    return DiskLimits(
        direct=direct,
        scan=samples,
        best_write=ways[write_s.index(min(write_s))],
        best_read=ways[read_s.index(min(read_s))],
    )


def sample(
    folder: Path,
    size_bytes: int,
    write: Way,
    read: Way,
    buffer: mmap.mmap | None = None,
    to_device: Callable[[list[Path], int], float] | None = None,
) -> DiskSample:
    """Write `size_bytes` of new files one way, read them back cold another way, delete them.

    `to_device` may time another cold read, to wherever it likes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    view = memoryview(buffer or random_buffer())
    size_bytes -= size_bytes % (max(THREADS) * max(REQUESTS_BYTES))
    size_bytes = max(size_bytes, max(THREADS) * max(REQUESTS_BYTES))
    files = [folder / f"raw-{i}.bin" for i in range(_file_count(write))]
    try:
        write_s = _write(files, size_bytes, write, view)
        make_cold(folder)
        read_s = _read(files, size_bytes, read)
        make_cold(folder)
        read_to_device_s = to_device(files, size_bytes) if to_device else None
    finally:
        for file in files:
            file.unlink(missing_ok=True)
        os.sync()  # see files.remove
    way = str(write) if write == read else f"write: {write}; read: {read}"
    return DiskSample(
        way=way,
        size_bytes=size_bytes,
        write_s=write_s,
        read_s=read_s,
        read_to_device_s=read_to_device_s,
    )


def _file_count(way: Way) -> int:
    return way.threads if way.layout is Layout.FILE_PER_THREAD else 1


def _write(files: list[Path], size_bytes: int, way: Way, source: memoryview) -> float:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | (os.O_DIRECT if way.direct else 0)
    each_bytes = size_bytes // len(files)

    def put(fd: int, offset: int) -> None:
        start = offset % (_BUFFER_BYTES - way.request_bytes + 1) // mmap.PAGESIZE * mmap.PAGESIZE
        done = os.pwrite(fd, source[start : start + way.request_bytes], offset)
        if done != way.request_bytes:
            raise OSError(f"short write: {done} of {way.request_bytes} bytes at {offset}")

    started = time.perf_counter()
    fds = [os.open(file, flags, 0o600) for file in files]
    try:
        for fd in fds:
            os.posix_fallocate(fd, 0, each_bytes)
        _drive(fds, each_bytes, way, put)
        for fd in fds:
            os.fsync(fd)
    finally:
        for fd in fds:
            os.close(fd)
    return time.perf_counter() - started


def _read(files: list[Path], size_bytes: int, way: Way) -> float:
    each_bytes = size_bytes // len(files)
    started = time.perf_counter()
    fds = [os.open(file, os.O_RDONLY | (os.O_DIRECT if way.direct else 0)) for file in files]
    buffers = [_huge_pages(way.request_bytes) for _ in range(way.threads)]

    def get(fd: int, offset: int) -> None:
        buffer = buffers.pop()
        if os.preadv(fd, [buffer], offset) != way.request_bytes:
            raise OSError(f"short read at {offset}")
        buffers.append(buffer)

    try:
        _drive(fds, each_bytes, way, get)
    finally:
        for fd in fds:
            os.close(fd)
    return time.perf_counter() - started


def _huge_pages(size_bytes: int) -> mmap.mmap:
    """Memory that a direct read fills fastest: a page that lies by itself is a piece of a request,
    and a disk takes only so many in one."""
    pages = mmap.mmap(-1, size_bytes, mmap.MAP_PRIVATE)
    with contextlib.suppress(OSError):  # this system has none
        pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


def _drive(fds: list[int], each_bytes: int, way: Way, act: Callable[[int, int], None]) -> None:
    """Let `way.threads` threads act on every request of every file, neighbours at the same time."""
    places = [(fd, at) for at in range(0, each_bytes, way.request_bytes) for fd in fds]
    with ThreadPoolExecutor(way.threads) as pool:
        shares = [places[i :: way.threads] for i in range(way.threads)]
        for future in [pool.submit(_all, act, share) for share in shares]:
            future.result()


def _all(act: Callable[[int, int], None], places: list[tuple[int, int]]) -> None:
    for fd, offset in places:
        act(fd, offset)
