"""Locks between processes on a file, which the kernel drops when the last holder exits.

A lock belongs to the open file description (`F_OFD_SETLK`). So reading and closing the file
elsewhere in the process does not release it, and a process that is passed the descriptor holds it
too. A forked child closes its copies first: a data loader's worker that outlives its trainer must
not make the trainer look alive. A file has numbered places, each a byte that can be locked. Place 0
shows that a process holds the lock; the owner of the file defines the meaning of the others.

If the system has no such locks, POSIX record locks are used, for place 0 only. They have two traps,
both handled here: they never conflict within one process, and closing *any* descriptor of the file
drops the lock. So a table records the files that this process has locked that way, and a file in
that table is never opened again. One mutex guards the table and every open-lock-close of a lock
file.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import threading
import weakref

from laststep.errors import AlreadyExistsError, StorageError
from laststep.process import system
from laststep.storage.files import Disk, absent, failed, open_to_read

_FLOCK = "@hhqqi"  # l_type, l_whence, l_start, l_len, l_pid on 64-bit Linux
_LAST_PLACE = (1 << 63) - 1
_OF_ONE_MACHINE = frozenset(
    ("bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "ramfs", "tmpfs", "xfs", "zfs")
)


class _HeldLocks:
    """The locks that this process holds; a forked child starts with none."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self.mutex = threading.RLock()  # reentrant for a signal handler that forks
        self.locks: weakref.WeakSet[FileLock] = weakref.WeakSet()
        self.records: set[tuple[int, int]] = set()
        """Device and inode of the files with record locks."""

    def before_fork(self) -> None:
        """Wait until every open lock is registered here: a child would keep holding one that is
        not."""
        self.mutex.acquire()

    def in_parent(self) -> None:
        self.mutex.release()

    def leave_to_parent(self) -> None:
        for lock in list(self.locks):
            lock.forsake()
        self._begin()


class FileLock:
    """A held lock; see `store.Lock`."""

    def __init__(self, fd: int, path: str, *, record: tuple[int, int] | None = None) -> None:
        self._fd = fd
        self._path = path
        self._record = record
        """Device and inode of the file if this is a record lock, else None."""

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
            if self._fd < 0:
                return
            fd, self._fd = self._fd, -1
            os.close(fd)
            _held.locks.discard(self)
            if self._record is not None:
                _held.records.discard(self._record)

    def forsake(self) -> None:
        """Close a forked child's copy of the descriptor: the lock belongs to the parent."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)

    def _set(self, kind: int, place: int) -> None:
        with _held.mutex:
            if self._fd < 0:
                return
            if self._record is not None:
                raise failed("mark a byte of the lock", self._path, _unsupported())
            try:
                fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _flock(kind, place))
            except OSError as error:
                raise failed("mark a byte of the lock", self._path, error) from error


_held = _HeldLocks()
os.register_at_fork(
    before=_held.before_fork, after_in_parent=_held.in_parent, after_in_child=_held.leave_to_parent
)


def take(disk: Disk, path: str) -> FileLock:
    """Take the lock on `path`, creating the file if needed; raise `AlreadyExistsError` if it is
    held."""
    with _held.mutex:
        while True:
            if _key_of(path) in _held.records:
                raise _taken(path)
            fd = _open_or_create(disk, path)
            try:
                record = _lock_first(fd, path)
            except (AlreadyExistsError, StorageError):
                os.close(fd)
                raise
            # A cleanup of free locks may have removed the file between opening and locking.
            if _key_of(path) == _key(os.fstat(fd)):
                break
            os.close(fd)
        if record is not None:
            _held.records.add(record)
        lock = FileLock(fd, path, record=record)
        _held.locks.add(lock)
        return lock


def adopt(fd: int, path: str) -> FileLock:
    """Take over a lock whose descriptor was passed to this process."""
    with _held.mutex:
        lock = FileLock(fd, path)
        _held.locks.add(lock)
        return lock


def are_all_seen(path: str) -> bool:
    """Return whether the path is on a filesystem of this machine only, so that all its locks are
    visible here."""
    return system.filesystem_of(path) in _OF_ONE_MACHINE


def is_held(path: str) -> bool:
    """Return whether any live process, including this one, holds the lock on `path`.

    The query does not take the lock, so it cannot make another process's attempt fail.
    """
    return bool(_ask(path, [(0, 0)]))


def marked(path: str) -> tuple[tuple[int, int], ...]:
    """Return the locked places after place 0, as (first, last) ranges in order."""
    return _ask(path, [(1, _LAST_PLACE)])


def _ask(path: str, wanted: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Return the locked parts of these ranges; empty if the file does not exist."""
    with _held.mutex:
        key = _key_of(path)
        if key is None:
            return ()
        if key in _held.records:
            return tuple((0, 0) for first, _ in wanted if first == 0)
        try:
            fd = open_to_read(path, os.O_NOFOLLOW)
        except FileNotFoundError:
            return ()
        except OSError as error:
            raise failed("open the lock", path, error) from error
        locked = []
        try:
            while wanted:
                first, last = wanted.pop()
                held = _locked_within(fd, first, last)
                if held is None:
                    continue
                locked.append(held)
                # The kernel reports an arbitrary one of several locks.
                rest = ((first, held[0] - 1), (held[1] + 1, last))
                wanted += [(low, high) for low, high in rest if low <= high]
        except OSError as error:
            raise failed("ask for the lock", path, error) from error
        finally:
            os.close(fd)
        return tuple(sorted(locked))


def _locked_within(fd: int, first: int, last: int) -> tuple[int, int] | None:
    length = 0 if last == _LAST_PLACE else last - first + 1
    question = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, first, length, 0)
    try:
        answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, question)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        answer = fcntl.fcntl(fd, fcntl.F_GETLK, question)
    kind, _, start, size, _ = struct.unpack(_FLOCK, answer)
    if kind == fcntl.F_UNLCK:
        return None
    return max(start, first), last if size == 0 else min(start + size - 1, last)


def _lock_first(fd: int, path: str) -> tuple[int, int] | None:
    """Lock place 0. Return device and inode if only record locks are supported, else None."""
    try:
        try:
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _flock(fcntl.F_WRLCK, 0))
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1)
            return _key(os.fstat(fd))
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            raise _taken(path) from error
        raise failed("lock", path, error) from error
    return None


def _flock(kind: int, place: int) -> bytes:
    return struct.pack(_FLOCK, kind, os.SEEK_SET, place, 1, 0)


def _open_or_create(disk: Disk, path: str) -> int:
    while True:
        try:
            return os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            try:
                return disk.create_file(path, direct=False)
            except FileExistsError:
                continue
            except FileNotFoundError as error:
                raise absent("cannot lock: the folder does not exist", path) from error
            except OSError as error:
                raise failed("make the lock", path, error) from error
        except OSError as error:
            raise failed("open the lock", path, error) from error


def _key_of(path: str) -> tuple[int, int] | None:
    try:
        return _key(os.lstat(path))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise failed("look at the lock", path, error) from error


def _key(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _taken(path: str) -> AlreadyExistsError:
    return AlreadyExistsError(
        "cannot take a lock that is held",
        where=path,
        found="held by a live process",
        remedy="wait for that writer or end it",
    )


def _unsupported() -> OSError:
    return OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
