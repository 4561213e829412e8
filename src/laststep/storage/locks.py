"""Locks between processes on one file, which the system drops when the last holder is gone.

A lock belongs to the open file description (`F_OFD_SETLK`), so reading and closing the file
elsewhere in the process leaves it alone, and whoever is handed the descriptor holds it too. A
forked child closes its copies before anything else: a loader's worker that outlives its trainer
must not make that look alive. A file has numbered places, each a byte that can be locked: place 0
shows that somebody has the file open, the others mean what the owner of the file says.

Where there are no such locks, POSIX record locks show place 0 alone. They have two traps, both
handled here: they never conflict within one process, and closing *any* descriptor of the file drops
the lock. So a table knows what this process holds that way, and a file in that table is never
opened again. One mutex guards the table and every open-lock-close of a lock file.
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

_FLOCK = "@hhqqi"  # l_type, l_whence, l_start, l_len, l_pid of Linux on 64 bits
_LAST_PLACE = (1 << 63) - 1
_OF_ONE_MACHINE = frozenset(
    ("bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "ramfs", "tmpfs", "xfs", "zfs")
)


class _HeldLocks:
    """The locks that this process holds; a forked child starts with none."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self.mutex = threading.RLock()  # for a signal's handler that forks
        self.locks: weakref.WeakSet[FileLock] = weakref.WeakSet()
        self.records: set[tuple[int, int]] = set()
        """The files with record locks, by device and inode."""

    def before_fork(self) -> None:
        """Wait until no thread has a lock open that is not noted here: a child would hold it."""
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
        """Device and inode of the file, where the lock is a record lock; else None."""

    def mark(self, place: int) -> None:
        """Lock that place too; a second time does nothing."""
        self._set(fcntl.F_WRLCK, place)

    def clear(self, place: int) -> None:
        """Let go of that place, whoever of the holders has marked it."""
        self._set(fcntl.F_UNLCK, place)

    def fileno(self) -> int:
        """The descriptor; who gets a copy of it holds the lock too."""
        return self._fd

    def close(self) -> None:
        """Let go; the lock stays while somebody else has a copy of the descriptor."""
        with _held.mutex:
            if self._fd < 0:
                return
            fd, self._fd = self._fd, -1
            os.close(fd)
            _held.locks.discard(self)
            if self._record is not None:
                _held.records.discard(self._record)

    def forsake(self) -> None:
        """Close the copy of a forked child: the lock is the parent's."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)

    def _set(self, kind: int, place: int) -> None:
        with _held.mutex:
            if self._fd < 0:
                return
            if self._record is not None:
                raise failed("mark a place of the lock", self._path, _unsupported())
            try:
                fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _flock(kind, place))
            except OSError as error:
                raise failed("mark a place of the lock", self._path, error) from error


_held = _HeldLocks()
os.register_at_fork(
    before=_held.before_fork, after_in_parent=_held.in_parent, after_in_child=_held.leave_to_parent
)


def take(disk: Disk, path: str) -> FileLock:
    """The lock on `path`, which is made where it is absent."""
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
            # Who removes locks that nobody holds may have come between the two.
            if _key_of(path) == _key(os.fstat(fd)):
                break
            os.close(fd)
        if record is not None:
            _held.records.add(record)
        lock = FileLock(fd, path, record=record)
        _held.locks.add(lock)
        return lock


def adopt(fd: int, path: str) -> FileLock:
    """A lock that this process was handed by its descriptor."""
    with _held.mutex:
        lock = FileLock(fd, path)
        _held.locks.add(lock)
        return lock


def are_all_seen(path: str) -> bool:
    """Whether that lies on a filesystem that only this machine has, and so all who lock there."""
    return system.filesystem_of(path) in _OF_ONE_MACHINE


def is_held(path: str) -> bool:
    """Whether any live process, this one included, holds the lock on `path`.

    Asks without taking it, so that it cannot make somebody else's attempt fail.
    """
    return bool(_ask(path, [(0, 0)]))


def marked(path: str) -> tuple[tuple[int, int], ...]:
    """The places after the first that are locked, as (first, last), in order."""
    return _ask(path, [(1, _LAST_PLACE)])


def _ask(path: str, wanted: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """What is locked of these stretches; nothing where the file is absent."""
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
                # The system names one lock of several, whichever it likes.
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
    """Lock place 0. Returns device and inode where the system has only record locks; else None."""
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
                raise absent("cannot lock, there is no such folder", path) from error
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
