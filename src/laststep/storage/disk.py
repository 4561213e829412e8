"""The system calls that change a disk, one thin method each, and what their failures mean.

Knows nothing of names, checkpoints or order: the callers decide what is called when. This is the
lowest seam of the library: tests replace a `Disk` to record, to fail or to cut what a store does.
A `Disk` holds no state, so one may be shared by all threads; every method raises plain `OSError`,
which callers turn into `StorageFailed` by `failed`.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import stat

from laststep.errors import NotFound, StorageFailed

_KEEP_SIZE = 0x01
_RENAME_NOREPLACE = 0x01
_RENAME_EXCHANGE = 0x02
_AT_FDCWD = -100
_O_DIRECT: int = getattr(os, "O_DIRECT", 0)

_libc = ctypes.CDLL(None, use_errno=True)

UNSUPPORTED = frozenset((errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOTTY))
"""The error numbers by which a filesystem says that it does not know a call or a flag."""

_TRANSIENT = frozenset(
    (errno.EAGAIN, errno.EBUSY, errno.ETIMEDOUT, errno.ESTALE, errno.ECONNRESET, errno.EHOSTDOWN)
)

_DEVICE_FAILED = frozenset(
    (errno.EIO, errno.EREMOTEIO, errno.EUCLEAN, errno.EBADMSG, errno.EILSEQ, errno.ENODATA)
)
"""What the kernel reports for bytes that a device, or the checksums of a filesystem, have lost."""

_REMEDIES = {
    errno.ENOSPC: "free some room or save to another place",
    errno.EDQUOT: "the quota is used up: free some room or have it raised",
    errno.EIO: "the device failed: look at `dmesg` and save to another place",
    errno.EROFS: "the filesystem is mounted read-only, often after an error: look at `dmesg`",
    errno.EACCES: "give this user the right to write there",
    errno.ENOTDIR: "the path, or a part of it, is a file: name a folder",
    errno.EPERM: "give this user the right to do so, or use a filesystem that allows it",
    errno.ENOLCK: "this filesystem has no locks: mount it with locking, or use another one",
    errno.EFBIG: "the file would be larger than is allowed: raise the limit (`ulimit -f`), or "
    "save to a filesystem that holds such files",
    errno.ENOMEM: "give the process more memory (`ulimit -v`, the limit of its container)",
    errno.ESTALE: "the server has lost the file: look at the mount, and try again",
    errno.ENOENT: "somebody has deleted or renamed it: bring it back, or name another place",
    errno.EMFILE: "raise the limit on open files (`ulimit -n`)",
}
_LOOK = "look at `dmesg` and at the mount; try again, or use another place"


class Disk:
    """The changing system calls. Paths are absolute; descriptors are close-on-exec."""

    def create_file(self, path: str, *, direct: bool) -> int:
        """Make a new file and open it for reading and writing; never follows a symlink."""
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        return os.open(path, flags | _O_DIRECT if direct else flags, 0o666)

    def set_buffered(self, fd: int) -> None:
        """Turn direct I/O off for an open file."""
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~_O_DIRECT)

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        """One write, which may be short."""
        return os.pwrite(fd, data, offset)

    def truncate(self, fd: int, size_bytes: int) -> None:
        """Set the file's size; also gives back room that was asked for beyond it."""
        os.ftruncate(fd, size_bytes)

    def allocate(self, fd: int, size_bytes: int) -> None:
        """Ask for room without changing the size.

        Not `os.posix_fallocate`: where the filesystem cannot do it, glibc writes a byte into every
        block instead, and it changes the size.
        """
        call = getattr(_libc, "fallocate", None)
        if call is None:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        call.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
        if call(fd, _KEEP_SIZE, 0, size_bytes) != 0:
            raise _last_error()

    def sync(self, fd: int) -> None:
        """Make a file's bytes and size durable."""
        os.fsync(fd)

    def sync_folder(self, path: str) -> None:
        """Make the names in a folder durable."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def link(self, path: str, new: str) -> None:
        """Give a file a second name; fails where that name is taken."""
        os.link(path, new, follow_symlinks=False)

    def rename(self, path: str, new: str) -> None:
        """Give a file or folder another name in one step."""
        os.rename(path, new)

    def rename_new(self, path: str, new: str) -> None:
        """As `rename`, but fails where the new name is taken."""
        _renameat2(path, new, _RENAME_NOREPLACE)

    def exchange(self, path: str, other: str) -> None:
        """Give each of two the name of the other, at once."""
        _renameat2(path, other, _RENAME_EXCHANGE)

    def unlink(self, path: str) -> None:
        """Remove one name of a file, or a symlink."""
        os.unlink(path)

    def make_folder(self, path: str) -> None:
        """Make one folder; its parent is there."""
        os.mkdir(path)

    def remove_folder(self, path: str) -> None:
        """Remove one empty folder."""
        os.rmdir(path)

    def close(self, fd: int) -> None:
        """Close a file that was opened for writing; may report a late write error."""
        os.close(fd)


def _renameat2(path: str, new: str, flags: int) -> None:
    call = getattr(_libc, "renameat2", None)
    if call is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    names = os.fsencode(path), os.fsencode(new)
    if call(_AT_FDCWD, names[0], _AT_FDCWD, names[1], ctypes.c_uint(flags)) != 0:
        raise _last_error()


def _last_error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))


def open_to_read(path: str, flags: int = 0) -> int:
    """Open a regular file and nothing else: opening a pipe would wait for its writer."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | flags)
    mode = os.fstat(fd).st_mode
    if stat.S_ISREG(mode):
        return fd
    os.close(fd)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    raise OSError(errno.ENXIO, "a pipe or a device, not a file")


def absent(what: str, path: str) -> NotFound:
    """The error for a file or folder that was there and is gone."""
    return NotFound(
        what, where=path, remedy="somebody has deleted or renamed it: bring it back, or use another"
    )


def failed(operation: str, path: str, error: OSError) -> StorageFailed:
    """The error for the caller of a store: what was done, where, what the system said."""
    number = error.errno or 0
    failure = StorageFailed(
        f"cannot {operation}",
        where=path,
        found=f"{error.strerror or error} ({errno.errorcode.get(number, number)})",
        remedy=_REMEDIES.get(number, _LOOK),
    )
    failure.transient = number in _TRANSIENT
    failure.device_failed = number in _DEVICE_FAILED
    return failure
