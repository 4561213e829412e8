"""The open files of a directory store: written and read at given offsets, past the page cache.

Knows nothing of names or folders: it is handed descriptors. With direct I/O a writer's offsets,
lengths and addresses MUST be multiples of 4,096; a reader takes anything and copies through an
aligned buffer only what is not aligned. Any thread may read or write; whoever opened a file closes
it, after all others are done with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import resource
from typing import TYPE_CHECKING

from laststep.errors import Corrupt, StorageFailed, Usage
from laststep.storage.disk import UNSUPPORTED, Disk, failed, open_to_read
from laststep.terms import ALIGN_BYTES, align_up

if TYPE_CHECKING:
    from collections.abc import Callable

_BOUNCE_BYTES = 1 << 20


class FileWriter:
    """A new file; see `store.FileWriting`."""

    def __init__(self, disk: Disk, fd: int, path: str, *, direct: bool) -> None:
        self.alignment_bytes = ALIGN_BYTES if direct else 1
        self._disk = disk
        self._fd = fd
        self._path = path

    def write_at(self, offset: int, data: memoryview) -> None:
        """Write all of `data` at `offset`."""
        self._check_open("write")
        # Views are released, not dropped: an error's traceback keeps the frames that hold them, and
        # the memory below could then not be closed by a caller who is handling that error.
        with data.cast("B") as flat:
            if offset % self.alignment_bytes or flat.nbytes % self.alignment_bytes:
                raise self._misaligned(offset, flat.nbytes)
            done = 0
            while done < flat.nbytes:
                with flat[done:] as rest:
                    done += self._write_some(offset + done, rest)
                if self.alignment_bytes > 1 and done < flat.nbytes:
                    # The rest of a short direct write has to start on a boundary again.
                    done = done // ALIGN_BYTES * ALIGN_BYTES

    def _write_some(self, offset: int, rest: memoryview) -> int:
        """One write, which may be short, but is never empty."""
        try:
            count = self._disk.write(self._fd, rest, offset)
        except OSError as error:
            if error.errno == errno.EINVAL and self.alignment_bytes > 1:
                if not _is_too_large(offset + rest.nbytes):
                    raise self._misaligned(offset, rest.nbytes) from error
                error.errno, error.strerror = errno.EFBIG, os.strerror(errno.EFBIG)
            raise failed("write", self._path, error) from error
        if count <= 0:
            raise StorageFailed(
                "cannot write", where=self._path, found="a write of 0 bytes without an error",
                remedy="look at `dmesg`, and save to another place",
            )  # fmt: skip
        return count

    def finish(self, size_bytes: int) -> None:
        """Cut to size, sync, close. A failed sync is final: a second one would lie."""
        self._check_open("finish")
        fd, self._fd = self._fd, -1
        try:
            self._disk.truncate(fd, size_bytes)
            self._disk.sync(fd)
        except OSError as error:
            _close_quietly(self._disk, fd)
            raise failed("make durable", self._path, error) from error
        try:
            self._disk.close(fd)
        except OSError as error:
            raise failed("close", self._path, error) from error

    def close(self) -> None:
        """Close without promising anything."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            _close_quietly(self._disk, fd)

    def _check_open(self, operation: str) -> None:
        if self._fd < 0:
            raise Usage(f"cannot {operation} a file that has been closed", where=self._path)

    def _misaligned(self, offset: int, length: int) -> Usage:
        return Usage(
            "refused a direct write that is not aligned",
            where=self._path,
            expected=f"offset, length and address in multiples of {self.alignment_bytes}",
            found=f"offset {offset}, length {length}",
            remedy="write from memory that is aligned",
        )


def _is_too_large(end: int) -> bool:
    """Whether the process may not have a file that ends there. Where that limit is no multiple of
    the alignment, the system shortens a direct write, and then calls the rest misaligned."""
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    return limit != resource.RLIM_INFINITY and end > limit


class FileReader:
    """An existing file; see `store.FileReading`."""

    def __init__(self, fd: int, path: str, *, direct: bool) -> None:
        self.alignment_bytes = ALIGN_BYTES if direct else 1
        self.size_bytes = os.fstat(fd).st_size
        self._fd = fd
        self._path = path
        self._cached_fd = -1
        self._cached_hits: set[int] | None = None
        """Where reads began that came out of the page cache; None where it is not asked."""

    def prefer_cached(self) -> None:
        """See `store.PrefersCached`; ends with the first read that is not in the page cache."""
        if self.alignment_bytes > 1 and self._cached_fd < 0:
            with contextlib.suppress(OSError):
                self._cached_fd = os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC)
                self._cached_hits = set()

    def read_into(self, offset: int, into: memoryview) -> int:
        """Fill `into` from `offset`, as far as the file goes."""
        if self._fd < 0:
            raise Usage("cannot read a file that has been closed", where=self._path)
        if offset < 0:
            raise Usage("cannot read before the start", where=self._path, found=f"offset {offset}")
        flat = into.cast("B")
        want = max(0, min(flat.nbytes, self.size_bytes - offset))
        if want == 0:
            return 0
        try:
            if self.alignment_bytes == 1:
                return self._read_straight(offset, flat, want)
            if self._is_cached(offset, flat[:want]):
                return want
            return self._read_direct(offset, flat, want)
        except OSError as error:
            raise failed("read", self._path, error) from error

    def close(self) -> None:
        """Close; a second time does nothing."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)
        if self._cached_fd >= 0:
            fd, self._cached_fd = self._cached_fd, -1
            os.close(fd)

    def _is_cached(self, offset: int, flat: memoryview) -> bool:
        """Whether `flat` could be filled without asking the disk. After the first time that it
        could not nobody tries again: each try makes the system read ahead."""
        hits = self._cached_hits
        if hits is None or offset in hits:
            return False
        hits.add(offset)
        try:
            if os.preadv(self._cached_fd, [flat], offset, os.RWF_NOWAIT) == flat.nbytes:
                return True
        except OSError:  # EAGAIN, or a filesystem that cannot tell
            pass
        self._cached_hits = None
        return False

    def _read_straight(self, offset: int, flat: memoryview, want: int) -> int:
        done = 0
        while done < want:
            count = os.preadv(self._fd, [flat[done:want]], offset + done)
            if count == 0:
                break
            done += count
        return done

    def _read_direct(self, offset: int, flat: memoryview, want: int) -> int:
        """Read what is aligned straight into place, and the rest through a bounce buffer."""
        done = 0
        if offset % ALIGN_BYTES == 0 and address_of(flat) % ALIGN_BYTES == 0:
            straight = flat.nbytes // ALIGN_BYTES * ALIGN_BYTES
            while done < min(straight, want) and done % ALIGN_BYTES == 0:
                count = os.preadv(self._fd, [flat[done:straight]], offset + done)
                if count == 0:
                    return done
                done += count
        if done >= want:
            return want
        return done + self._read_bounced(offset + done, flat[done:want])

    def _read_bounced(self, offset: int, flat: memoryview) -> int:
        start = offset // ALIGN_BYTES * ALIGN_BYTES
        window = min(_BOUNCE_BYTES, align_up(offset + flat.nbytes - start, ALIGN_BYTES))
        done = 0
        with mmap.mmap(-1, window) as pages, memoryview(pages) as bounce:
            while done < flat.nbytes:
                start = (offset + done) // ALIGN_BYTES * ALIGN_BYTES
                skip = offset + done - start
                fresh = os.preadv(self._fd, [bounce], start) - skip
                if fresh <= 0:
                    break
                take = min(fresh, flat.nbytes - done)
                flat[done : done + take] = bounce[skip : skip + take]
                done += take
        return done


def read_whole(path: str, limit_bytes: int) -> bytes:
    """All of a small file, with few calls; `Corrupt` where it is larger than that."""
    fd = open_to_read(path)
    try:
        size_bytes = os.fstat(fd).st_size
        if size_bytes > limit_bytes:
            raise Corrupt(
                "a file is too large to be what it should be",
                where=path,
                expected=f"at most {limit_bytes} bytes",
                found=f"{size_bytes} bytes",
                remedy="restore it from a copy, or take another checkpoint",
            )
        content = b""
        while data := os.read(fd, size_bytes + 1):
            content += data
            if len(content) == size_bytes:  # one byte more was asked for and not there
                break
        return content
    finally:
        os.close(fd)


def address_of(flat: memoryview) -> int:
    """Where the bytes of a writable view lie."""
    return ctypes.addressof(ctypes.c_char.from_buffer(flat)) if flat.nbytes else 0


def accepts_direct_writes(disk: Disk, fd: int) -> bool:
    """Whether a new file, opened for direct I/O, takes a direct write.

    Some filesystems accept the flag and refuse the write. The page of zeros that is tried reads as
    the hole that was there before, and is overwritten or cut off later.
    """
    with mmap.mmap(-1, ALIGN_BYTES) as page, memoryview(page) as view:
        return _unless_refused(lambda: disk.write(fd, view, 0))


def accepts_direct_reads(fd: int) -> bool:
    """Whether a file that is not empty, opened for direct I/O, can be read."""
    with mmap.mmap(-1, ALIGN_BYTES) as page, memoryview(page) as view:
        return _unless_refused(lambda: os.preadv(fd, [view], 0))


def _unless_refused(call: Callable[[], int]) -> bool:
    try:
        call()
    except OSError as error:
        if error.errno in UNSUPPORTED:
            return False
        raise
    return True


def _close_quietly(disk: Disk, fd: int) -> None:
    # Only where an earlier error is on its way up, or where nothing was promised.
    with contextlib.suppress(OSError):
        disk.close(fd)
