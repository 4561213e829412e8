"""Locks between processes on a file, which the kernel drops when the last holder exits.

A lock belongs to the open file description (`F_OFD_SETLK`). So reading and closing the file
elsewhere in the process does not release it, and a process that is passed the descriptor holds it
too. A forked child closes its copies first: a data loader's worker that outlives its trainer must
not make the trainer look alive. A file has numbered places, each a byte that can be locked. Place 0
shows that a process holds the lock; the owner of the file defines the meaning of the others.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
import threading
import weakref

from laststep.errors import AlreadyExistsError
from laststep.process import system
from laststep.storage.files import Disk, failed, open_to_read, os_errors

_FLOCK = "@hhqqi"  # l_type, l_whence, l_start, l_len, l_pid on 64-bit Linux
_LAST_PLACE = (1 << 63) - 1
_OF_ONE_MACHINE = frozenset(
    ("bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "ramfs", "tmpfs", "xfs", "zfs")
)


class FileLock:
    """A held lock; see `store.Lock`."""

    def __init__(self, fd: int, path: str) -> None:
        self._fd = fd
        self._path = path
        _held.locks.add(self)

    def mark(self, place: int) -> None:
        """Lock that place too; a second call does nothing."""
        self._set(fcntl.F_WRLCK, place)

    def clear(self, place: int) -> None:
        """Unlock that place, whichever holder marked it."""
        self._set(fcntl.F_UNLCK, place)

    def fileno(self) -> int:
        """Return the descriptor; a process that receives a copy of it holds the lock too."""
        return self._fd

    def close(self) -> None:
        """Release the lock; it stays held while another process has a copy of the descriptor."""
        with _held.mutex:
            if self._fd >= 0:
                fd, self._fd = self._fd, -1
                os.close(fd)

    def _set(self, kind: int, place: int) -> None:
        with _held.mutex:
            if self._fd >= 0:
                with os_errors("mark a byte of the lock", self._path):
                    fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _flock(kind, place))


class _HeldLocks:
    """The locks of this process, also closed ones, and the mutex that guards every change of one. A
    fork waits for the mutex, because a child would keep holding a lock that is not listed yet."""

    def __init__(self) -> None:
        self.locks: weakref.WeakSet[FileLock] = weakref.WeakSet()
        self.mutex = threading.RLock()  # reentrant for a signal handler that forks

    def before_fork(self) -> None:
        self.mutex.acquire()

    def in_parent(self) -> None:
        self.mutex.release()

    def in_child(self) -> None:
        """Close the child's copies, and free the mutex for its other threads: a handler may have
        forked inside of a function that holds it."""
        for lock in list(self.locks):
            lock.close()
        self.mutex = threading.RLock()


_held = _HeldLocks()
os.register_at_fork(
    before=_held.before_fork, after_in_parent=_held.in_parent, after_in_child=_held.in_child
)


def take(disk: Disk, path: str) -> FileLock:
    """Take the lock on `path`, creating the file if needed; raise `AlreadyExistsError` if it is
    held."""
    with _held.mutex:
        while True:
            with os_errors("open the lock", path):
                fd = _open_or_create(disk, path)
            try:
                fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _flock(fcntl.F_WRLCK, 0))
                is_same = os.path.samestat(os.lstat(path), os.fstat(fd))
            except FileNotFoundError:
                is_same = False
            except OSError as error:
                os.close(fd)
                if error.errno not in (errno.EACCES, errno.EAGAIN):
                    raise failed("lock", path, error) from error
                raise AlreadyExistsError(
                    "cannot take a lock that is held",
                    where=path,
                    found="held by a live process",
                    remedy="wait for that writer or end it",
                ) from error
            if is_same:
                return FileLock(fd, path)
            # A cleanup of free locks has removed the file between opening and locking.
            os.close(fd)


def adopt(fd: int, path: str) -> FileLock:
    """Take over a lock whose descriptor was passed to this process."""
    with _held.mutex:
        return FileLock(fd, path)


def are_all_seen(path: str) -> bool:
    """Return whether the path is on a filesystem of this machine only, so that all its locks are
    visible here."""
    return system.filesystem_of(path) in _OF_ONE_MACHINE


def is_held(path: str) -> bool:
    """Return whether any live process, including this one, holds the lock on `path`.

    The query does not take the lock, so it cannot make another process's attempt fail.
    """
    return bool(_locked(path, 0, 0))


def marked(path: str) -> tuple[tuple[int, int], ...]:
    """Return the locked places after place 0, as (first, last) ranges in order."""
    return _locked(path, 1, _LAST_PLACE)


def _locked(path: str, first: int, last: int) -> tuple[tuple[int, int], ...]:
    """Return the locked parts of this range; empty if the file does not exist."""
    locked, wanted = [], [(first, last)]
    with os_errors("ask for the lock", path), contextlib.ExitStack() as stack:
        try:
            fd = open_to_read(path, os.O_NOFOLLOW)
        except FileNotFoundError:
            return ()
        stack.callback(os.close, fd)
        while wanted:
            first, last = wanted.pop()
            question = _flock(fcntl.F_WRLCK, first, 0 if last == _LAST_PLACE else last - first + 1)
            answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, question)
            kind, _, start, size, _ = struct.unpack(_FLOCK, answer)
            if kind == fcntl.F_UNLCK:
                continue
            start, end = max(start, first), last if size == 0 else min(start + size - 1, last)
            locked.append((start, end))
            # The kernel reports an arbitrary one of several locks.
            rest = ((first, start - 1), (end + 1, last))
            wanted += [(low, high) for low, high in rest if low <= high]
    return tuple(sorted(locked))


def _flock(kind: int, place: int, count: int = 1) -> bytes:
    """Return a lock of `count` places for the kernel; 0 means all to the end."""
    return struct.pack(_FLOCK, kind, os.SEEK_SET, place, count, 0)


def _open_or_create(disk: Disk, path: str) -> int:
    while True:
        with contextlib.suppress(FileNotFoundError):
            return os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        with contextlib.suppress(FileExistsError):
            return disk.create_file(path, direct=False)
