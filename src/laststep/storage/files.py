"""The open files of a directory store, written and read at given offsets, bypassing the page cache.

Writers and readers know nothing about names or folders: they are given descriptors. With direct I/O
a writer's offsets, lengths and addresses MUST be multiples of 4,096. A reader accepts any and
copies only the unaligned parts through an aligned buffer. Any thread may read or write; the thread
that opened a file closes it, after all others are done with it.

A `Disk` has one method for each system call that changes a disk. It is the lowest seam, which tests
replace to record calls or to inject failures. Paths and URLs given by users are made absolute here.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import mmap
import os
import re
import resource
import stat
from typing import TYPE_CHECKING

from laststep.constants import ALIGN_BYTES, align_up
from laststep.errors import (
    AlreadyExistsError,
    LaststepError,
    NotFoundError,
    StorageError,
    UsageError,
)

if TYPE_CHECKING:
    from types import TracebackType


_KEEP_SIZE = 0x01
_RENAME_NOREPLACE = 0x01
_RENAME_EXCHANGE = 0x02
_AT_FDCWD = -100

_libc = ctypes.CDLL(None, use_errno=True)

UNSUPPORTED = frozenset((errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOTTY))
"""Error numbers with which a filesystem reports that it does not support a call or a flag."""

_TRANSIENT = frozenset(
    (errno.EAGAIN, errno.EBUSY, errno.ETIMEDOUT, errno.ESTALE, errno.ECONNRESET, errno.EHOSTDOWN)
)

_DEVICE_FAILED = frozenset(
    (errno.EIO, errno.EREMOTEIO, errno.EUCLEAN, errno.EBADMSG, errno.EILSEQ, errno.ENODATA)
)
"""Error numbers for bytes lost by a device or refused by a filesystem's checksums."""

_REMEDIES = {
    errno.ENOSPC: "free some room or save to another place",
    errno.EIO: "the device failed: check `dmesg` and save to another place",
    errno.EROFS: "the filesystem is mounted read-only, often after an error: check `dmesg`",
    errno.EACCES: "give this user the right to write there",
    errno.ENOTDIR: "the path, or a part of it, is a file: name a folder",
    errno.EFBIG: "the file would be larger than is allowed: raise the limit (`ulimit -f`), or "
    "save to a filesystem that holds such files",
    errno.ENOMEM: "give the process more memory (`ulimit -v`, the limit of its container)",
    errno.EMFILE: "raise the limit on open files (`ulimit -n`)",
}
_LOOK = "check `dmesg` and the mount; try again, or use another place"


class Disk:
    """The system calls that change a disk. Paths are absolute; descriptors are close-on-exec."""

    write = staticmethod(os.pwrite)
    truncate = staticmethod(os.ftruncate)
    """Set the file's size; this also frees space allocated beyond it."""
    sync = staticmethod(os.fsync)
    close = staticmethod(os.close)
    """Close a file that was opened for writing; may report a late write error."""
    link = staticmethod(functools.partial(os.link, follow_symlinks=False))
    rename = staticmethod(os.rename)
    unlink = staticmethod(os.unlink)
    make_folder = staticmethod(os.mkdir)
    remove_folder = staticmethod(os.rmdir)

    def create_file(self, path: str, *, direct: bool) -> int:
        """Create a file and open it for reading and writing; never follows a symlink."""
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        return os.open(path, flags | os.O_DIRECT if direct else flags, 0o666)

    def allocate(self, fd: int, size_bytes: int) -> None:
        """Allocate space without changing the size.

        Not `os.posix_fallocate`: if the filesystem does not support it, glibc writes a byte into
        every block instead, and it changes the size.
        """
        _call("fallocate", fd, _KEEP_SIZE, ctypes.c_int64(0), ctypes.c_int64(size_bytes))

    def sync_folder(self, path: str) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def rename_new(self, path: str, new: str) -> None:
        """Rename atomically; raise `FileExistsError` if the new name is taken."""
        _rename(path, new, _RENAME_NOREPLACE)

    def exchange(self, path: str, other: str) -> None:
        """Swap the names of two files or folders atomically."""
        _rename(path, other, _RENAME_EXCHANGE)


def _rename(path: str, new: str, flag: int) -> None:
    _call("renameat2", _AT_FDCWD, os.fsencode(path), _AT_FDCWD, os.fsencode(new), flag)


def _call(name: str, *arguments: object) -> None:
    """Call a function of the C library that Python does not have."""
    if getattr(_libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def open_to_read(path: str, flags: int = 0) -> int:
    """Open a regular file for reading: opening a pipe would wait for its writer."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | flags)
    mode = os.fstat(fd).st_mode
    if stat.S_ISREG(mode):
        return fd
    os.close(fd)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    raise OSError(errno.ENXIO, "a pipe or a device, not a file")


class os_errors:  # noqa: N801 (used like the functions of contextlib)
    """Translate an `OSError` that leaves the block into the error that a store raises.

    Not a generator: in Python 3.13 an error that a generator raises for another is part of a cycle,
    which keeps every caller's variables alive until the next garbage collection.
    """

    def __init__(self, operation: str, path: str) -> None:
        self._operation = operation
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: object, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, FileExistsError):
            raise AlreadyExistsError(
                f"cannot {self._operation}: the name is taken", where=self._path
            ) from error
        if isinstance(error, FileNotFoundError):
            raise NotFoundError(
                f"cannot {self._operation}: there is no such file or folder",
                where=self._path,
                remedy="it was deleted or renamed: bring it back, or use another",
            ) from error
        if isinstance(error, OSError):
            raise failed(self._operation, self._path, error) from error


def failed(operation: str, path: str, error: OSError) -> StorageError:
    """Translate an `OSError` into the error that a store raises."""
    number = error.errno or 0
    failure = StorageError(
        f"cannot {operation}",
        where=path,
        found=f"{error.strerror or error} ({errno.errorcode.get(number, number)})",
        remedy=_REMEDIES.get(number, _LOOK),
    )
    failure.transient = number in _TRANSIENT
    failure.device_failed = number in _DEVICE_FAILED
    return failure


_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_ONE_SLASH = re.compile(r"(?:s3|gs|az|shm):/?[^/]")


def scheme_of(place: object) -> str | None:
    """Return the scheme of a URL in lower case; None for anything else."""
    match = _SCHEME.match(place) if isinstance(place, str) else None
    return None if match is None else match[1].lower()


def refuse_secrets(url: str) -> None:
    """Raise `UsageError` for a URL with a user or password: logs and manifests would show it."""
    scheme = scheme_of(url)
    if scheme is not None and "@" in url.partition("://")[2].partition("/")[0]:
        raise UsageError(
            "URL contains a user or a password",
            where=f"{scheme}://…",
            expected="credentials by the environment, where no log and no manifest has them",
            remedy="docs/guides/object-storage.md has the variables",
        )


def absolute(path: object) -> str:
    """Return the absolute path, with `~`, `.` and `..` resolved textually; `file://…` is accepted
    too. Raise `UsageError` for what is no path on this machine, such as `s3://…`."""
    try:
        text: str = os.fspath(path)  # type: ignore[call-overload]
        str.encode(text)  # messages between processes and log lines are UTF-8
    except (TypeError, UnicodeEncodeError):
        text = ""
    scheme = scheme_of(text)
    if scheme == "file":
        from urllib.parse import unquote  # late: a flusher is given a path and needs no URLs

        host, slash, rest = text.partition("://")[2].partition("/")
        text = unquote(slash + rest)
        scheme = None if host in ("", "localhost") and slash else scheme
    is_malformed = _ONE_SLASH.match(text) is not None
    if not text or "\0" in text or scheme is not None or is_malformed:
        raise UsageError(
            "this is not the path of a folder",
            found=repr(path),
            expected="a folder on this machine: a str or an os.PathLike, or file:///…",
            remedy=f"a URL has two slashes; a folder of that name is ./{text}"
            if is_malformed
            else 'pass a path, such as "runs/first"',
        )
    return os.path.abspath(os.path.expanduser(text))


_BOUNCE_BYTES = 1 << 20


class FileWriter:
    """A new file; see `store.FileWriting`."""

    def __init__(self, disk: Disk, fd: int, path: str, *, direct: bool) -> None:
        self.alignment_bytes = ALIGN_BYTES if direct else 1
        self._disk = disk
        self._fd = fd
        self._path = path

    def write_at(self, offset: int, data: memoryview) -> None:
        # Release views explicitly: a traceback keeps the frames that hold them alive, and a caller
        # that handles the error could then not close the underlying memory.
        with data.cast("B") as flat:
            if offset % self.alignment_bytes or flat.nbytes % self.alignment_bytes:
                raise self._misaligned(offset, flat.nbytes)
            done = 0
            while done < flat.nbytes:
                with flat[done:] as rest:
                    try:
                        count = self._disk.write(self._fd, rest, offset + done)
                    except OSError as error:
                        raise self._write_error(error, offset + done, rest.nbytes) from error
                if count <= 0:
                    raise StorageError(
                        "cannot write",
                        where=self._path,
                        found="a write of 0 bytes without an error",
                        remedy="check `dmesg`, and save to another place",
                    )
                # The rest of a short direct write must start on a boundary again.
                done += count // self.alignment_bytes * self.alignment_bytes

    def finish(self, size_bytes: int) -> None:
        """Truncate, sync and close. A failed sync is final: a second would falsely succeed."""
        try:
            self._disk.truncate(self._fd, size_bytes)
            self._disk.sync(self._fd)
            fd, self._fd = self._fd, -1
            self._disk.close(fd)
        except OSError as error:
            self.close()
            raise failed("make durable", self._path, error) from error

    def close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            # The file need not be durable, or another error is being raised.
            with contextlib.suppress(OSError):
                self._disk.close(fd)

    def _write_error(self, error: OSError, offset: int, length: int) -> LaststepError:
        if error.errno == errno.EINVAL and self.alignment_bytes > 1:
            # If the process's file size limit is not a multiple of the alignment, the kernel
            # shortens a direct write and then rejects the rest as misaligned.
            limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
            if limit == resource.RLIM_INFINITY or offset + length <= limit:
                return self._misaligned(offset, length)
            error = OSError(errno.EFBIG, os.strerror(errno.EFBIG))
        return failed("write", self._path, error)

    def _misaligned(self, offset: int, length: int) -> UsageError:
        return UsageError(
            "refused a direct write that is not aligned",
            where=self._path,
            expected=f"offset, length and address in multiples of {self.alignment_bytes}",
            found=f"offset {offset}, length {length}",
            remedy="write from memory that is aligned",
        )


class FileReader:
    """An existing file; see `store.FileReading`."""

    def __init__(self, fd: int, path: str, *, direct: bool) -> None:
        self.alignment_bytes = ALIGN_BYTES if direct else 1
        self.size_bytes = os.fstat(fd).st_size
        self._fd = fd
        self._path = path
        self._cached_fd = -1
        self._cached_hits: set[int] | None = None
        """Offsets of reads that were tried in the page cache; None if it is not used (any more)."""

    def prefer_cached(self) -> None:
        """Implement `store.PrefersCached`, until the first read that is not in the page cache."""
        if self.alignment_bytes > 1 and self._cached_fd < 0:
            with contextlib.suppress(OSError):
                self._cached_fd = os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC)
                self._cached_hits = set()

    def read_into(self, offset: int, into: memoryview) -> int:
        flat = into.cast("B")
        want = max(0, min(flat.nbytes, self.size_bytes - offset))
        if want == 0:
            return 0
        try:
            return want if self._is_cached(offset, flat[:want]) else self._read(offset, flat, want)
        except OSError as error:
            raise failed("read", self._path, error) from error

    def close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)
        if self._cached_fd >= 0:
            fd, self._cached_fd = self._cached_fd, -1
            os.close(fd)

    def _is_cached(self, offset: int, flat: memoryview) -> bool:
        """Fill `flat` from the page cache only; return False if that fails. After a first miss the
        cache is not tried again, because each try makes the kernel read ahead."""
        hits = self._cached_hits
        if hits is None or offset in hits:
            return False
        hits.add(offset)
        try:
            if os.preadv(self._cached_fd, [flat], offset, os.RWF_NOWAIT) == flat.nbytes:
                return True
        except OSError:  # EAGAIN, or RWF_NOWAIT is not supported
            pass
        self._cached_hits = None
        return False

    def _read(self, offset: int, flat: memoryview, want: int) -> int:
        """Read whole aligned pages straight into place, the rest through a bounce buffer."""
        done, page = 0, self.alignment_bytes
        address = ctypes.addressof(ctypes.c_char.from_buffer(flat))
        if offset % page == 0 and address % page == 0:
            straight = flat.nbytes // page * page
            while done < min(straight, want) and done % page == 0:
                count = os.preadv(self._fd, [flat[done:straight]], offset + done)
                if count == 0:
                    return done
                done += count
        if done >= want:
            return want
        start = (offset + done) // page * page
        window = min(_BOUNCE_BYTES, align_up(offset + want - start, page))
        with mmap.mmap(-1, window) as memory, memoryview(memory) as bounce:
            while done < want:
                start = (offset + done) // page * page
                skip = offset + done - start
                fresh = os.preadv(self._fd, [bounce], start) - skip
                if fresh <= 0:
                    break
                take = min(fresh, want - done)
                flat[done : done + take] = bounce[skip : skip + take]
                done += take
        return done
