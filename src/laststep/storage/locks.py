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
from laststep.storage.files import Disk, failed, open_to_read, os_errors

_FLOCK = struct.Struct("@hhqqi")  # l_type, l_whence, l_start, l_len, l_pid on 64-bit Linux
LAST_PLACE = (1 << 63) - 1

_mutex = threading.RLock()  # reentrant for a signal handler that forks
"""Guards every change; a fork waits, because a child would keep a lock not listed yet."""
_locks: weakref.WeakSet[FileLock] = weakref.WeakSet()
"""The locks of this process, also closed ones."""


class FileLock:
    """A held lock; see `store.Lock`."""

    def __init__(self, fd: int, path: str) -> None:
        self._fd = fd
        self._path = path
        with _mutex:
            _locks.add(self)

    def mark(self, place: int, kind: int = fcntl.F_WRLCK) -> None:
        with _mutex:
            if self._fd >= 0:
                with os_errors("mark a byte of the lock", self._path):
                    place_lock = _FLOCK.pack(kind, os.SEEK_SET, place, 1, 0)
                    fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, place_lock)

    def clear(self, place: int) -> None:
        self.mark(place, fcntl.F_UNLCK)

    def fileno(self) -> int:
        return self._fd

    def close(self) -> None:
        """Release the lock; it stays held while another process has a copy of the descriptor."""
        with _mutex:
            if self._fd >= 0:
                fd, self._fd = self._fd, -1
                os.close(fd)


def _in_child() -> None:
    """Close the child's copies, and free the mutex for its other threads: a handler may have forked
    inside of a function that holds it."""
    global _mutex  # noqa: PLW0603 (of the process)
    for lock in list(_locks):
        lock.close()
    _mutex = threading.RLock()


os.register_at_fork(
    before=lambda: _mutex.acquire(),  # noqa: PLW0108 (a child has another mutex)
    after_in_parent=lambda: _mutex.release(),  # noqa: PLW0108 (as above)
    after_in_child=_in_child,
)


def take(disk: Disk, path: str) -> FileLock:
    """Take the lock on `path`, creating it if needed; raise `AlreadyExistsError` if held."""
    with _mutex:
        while True:
            with os_errors("open the lock", path):
                try:
                    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
                except FileNotFoundError:
                    try:
                        fd = disk.create_file(path, direct=False)
                    except FileExistsError:
                        continue
            try:
                held = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0)
                fcntl.fcntl(fd, fcntl.F_OFD_SETLK, held)
                if os.path.samestat(os.lstat(path), os.fstat(fd)):
                    return FileLock(fd, path)
            except FileNotFoundError:
                pass
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
            # A cleanup of free locks has removed the file between opening and locking.
            os.close(fd)


def locked_places(path: str, first: int, last: int) -> tuple[tuple[int, int], ...]:
    """Return the locked parts of this range, in order; empty without a file. Takes no lock itself,
    so it cannot make another process's attempt fail."""
    locked, wanted = [], [(first, last)]
    with os_errors("ask for the lock", path), contextlib.ExitStack() as stack:
        try:
            fd = open_to_read(path, os.O_NOFOLLOW)
        except FileNotFoundError:
            return ()
        stack.callback(os.close, fd)
        while wanted:
            first, last = wanted.pop()
            question = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, first, last - first + 1, 0)
            answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, question)
            kind, _, start, size, _ = _FLOCK.unpack(answer)
            if kind == fcntl.F_UNLCK:
                continue
            # A size of 0 means to the end.
            start, end = max(start, first), last if size == 0 else min(start + size - 1, last)
            locked.append((start, end))
            # The kernel reports an arbitrary one of several locks.
            rest = ((first, start - 1), (end + 1, last))
            wanted += [(low, high) for low, high in rest if low <= high]
    return tuple(sorted(locked))
