"""Locks between processes on one file, which the system drops when the holder dies.

POSIX record locks: a child does not inherit them, and they work over NFS. They have two traps, both
handled here: they never conflict within one process, and closing *any* descriptor of the file drops
the lock. So a process-wide table knows what this process holds, and a file in that table is never
opened again. One mutex guards the table and every open-lock-close of a lock file.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import threading

from laststep.errors import Exists, NotFound
from laststep.storage.disk import Disk, failed

_FLOCK = "@hhqqi"  # l_type, l_whence, l_start, l_len, l_pid of Linux on 64 bits


class _Held:
    """What this process holds, by device and inode; a forked child starts with nothing."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.mutex = threading.Lock()
        self.keys: set[tuple[int, int]] = set()


_held = _Held()
os.register_at_fork(after_in_child=_held.reset)


class FileLock:
    """A held lock; see `store.Lock`."""

    def __init__(self, fd: int, key: tuple[int, int]) -> None:
        self._fd = fd
        self._key = key
        self._pid = os.getpid()

    def close(self) -> None:
        """Let go. In a forked child this only closes the child's descriptor."""
        with _held.mutex:
            if self._fd < 0:
                return
            fd, self._fd = self._fd, -1
            os.close(fd)
            if self._pid == os.getpid():
                _held.keys.discard(self._key)


def take(disk: Disk, path: str) -> FileLock:
    """The lock on `path`, which is made where it is absent and never removed."""
    with _held.mutex:
        if _key_of(path) in _held.keys:
            raise _taken(path, "this process")
        try:
            fd = _open_or_create(disk, path)
        except FileNotFoundError as error:
            raise NotFound("cannot lock, there is no such folder", where=path) from error
        except OSError as error:
            raise failed("open the lock", path, error) from error
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(fd)
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise _taken(path, "another process") from error
            raise failed("lock", path, error) from error
        status = os.fstat(fd)
        key = (status.st_dev, status.st_ino)
        _held.keys.add(key)
        return FileLock(fd, key)


def is_held(path: str) -> bool:
    """Whether any live process, this one included, holds the lock on `path`.

    Asks without taking it (F_GETLK), so that it cannot make somebody else's attempt fail.
    """
    with _held.mutex:
        key = _key_of(path)
        if key is None or key in _held.keys:
            return key is not None
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise failed("open the lock", path, error) from error
        try:
            question = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            answer = fcntl.fcntl(fd, fcntl.F_GETLK, question)
            return bool(struct.unpack(_FLOCK, answer)[0] != fcntl.F_UNLCK)
        except OSError as error:
            raise failed("ask for the lock", path, error) from error
        finally:
            os.close(fd)


def _open_or_create(disk: Disk, path: str) -> int:
    while True:
        try:
            return os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            try:
                return disk.create_file(path, direct=False)
            except FileExistsError:
                continue


def _key_of(path: str) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise failed("look at the lock", path, error) from error
    return status.st_dev, status.st_ino


def _taken(path: str, holder: str) -> Exists:
    return Exists(
        "cannot take a lock that is held",
        where=path,
        found=f"held by {holder}",
        remedy="wait for that writer or end it",
    )
