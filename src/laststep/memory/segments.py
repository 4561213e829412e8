"""Shared memory that outlives its processes: one *segment* per rank and job instance.

A segment is a folder on an in-memory filesystem, /dev/shm by default, that other users cannot read.
It contains the memory of a pool, a file that names its owner, and small records of the complete
snapshots in that memory, which this module does not interpret. A lock on the memory's file, which
trainer and flusher share, shows that one of them is alive: the kernel releases it with the last.

A record is complete or absent: it is renamed into place. Nothing is synced, since nothing in memory
survives the machine anyway. Anything else in these folders (links, pipes, unreadable files) is left
alone, with one warning. The mapping of memory is here too, without torch.
"""

# The flusher starts without pathlib.
# ruff: noqa: PTH102, PTH104, PTH106, PTH108, PTH116, PTH123, PTH208

from __future__ import annotations

import array
import contextlib
import ctypes
import errno
import fcntl
import logging
import mmap
import os
import re
import socket
import stat
import time
import weakref
from typing import TYPE_CHECKING

import msgspec

from laststep.codecs.digests import DIGEST_BYTES, digest
from laststep.errors import CorruptError, StorageError
from laststep.process import system
from laststep.process.system import has_died, own_birth, warn_once
from laststep.process.threads import ready
from laststep.storage.files import failed
from laststep.storage.shared_memory import BASE, RUNS, made_own_folder, own_folder

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


_MADV_DONTFORK = 10
_MADV_POPULATE_WRITE = 23
_libc = ctypes.CDLL(None, use_errno=True)
_libc.pwritev.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_long)
_libc.pwritev.restype = ctypes.c_ssize_t
_IOV_MAX = 1024


def create(size_bytes: int) -> int:
    """Create a shared memory file of that length and return its descriptor."""
    fd = os.memfd_create("laststep", os.MFD_CLOEXEC)
    os.ftruncate(fd, size_bytes)
    return fd


def write_from(fd: int, at: int, ranges: Sequence[tuple[int, int]]) -> bool:
    """Write memory of this process, given as ranges of (address, bytes), back to back into a file.
    Return False if another thread has freed some: the kernel checks the addresses, so no crash."""
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
            while batch and written >= batch[0][1]:
                written -= batch.pop(0)[1]
            if written:
                batch[0] = batch[0][0] + written, batch[0][1] - written
    return True


class Mapping:
    """One process's view of a shared memory file; private memory if `fd` is -1."""

    def __init__(self, fd: int, size_bytes: int) -> None:
        self._fd = fd
        status = None if fd < 0 else os.fstat(fd)
        self.file = status and (status.st_dev, status.st_ino)
        mapped = mmap.mmap(fd, size_bytes, mmap.MAP_SHARED if status else mmap.MAP_PRIVATE)
        self._map: mmap.mmap | None = mapped
        self.view = memoryview(mapped)
        self.size_bytes = size_bytes
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        # A forked data loader worker must neither keep the pages alive nor fail on pinned memory.
        system.advise(self.address, size_bytes, _MADV_DONTFORK)
        system.prefer_huge_pages(self.address, size_bytes)
        _mappings.add(self)

    def allocate(self, start: int, size_bytes: int) -> None:
        """Allocate pages of the file without mapping them; the first access maps them."""
        os.posix_fallocate(self._fd, start, size_bytes)

    def populate(self, start: int, size_bytes: int) -> None:
        """Allocate and map pages; raise `OSError` if there is no memory left. Kernels without
        MADV_POPULATE_WRITE allocate first: touching a page that cannot be had would kill us."""
        refused = system.advise(self.address + start, size_bytes, _MADV_POPULATE_WRITE)
        if refused == errno.EINVAL:
            if self._fd >= 0:
                self.allocate(start, size_bytes)
            for offset in range(start, start + size_bytes, mmap.PAGESIZE):
                self.view[offset] = 0
        elif refused:
            number = errno.ENOSPC if refused == errno.EFAULT else refused
            raise OSError(number, os.strerror(number))

    def close(self) -> None:
        """Release the memory, or leave that to the last view of it."""
        if self._map is None:
            return
        with contextlib.suppress(BufferError):
            self.view.release()
            self._map.close()

    def disown(self) -> tuple[int, int] | None:
        """Keep the mmap object forever, in a forked child where the memory is not mapped:
        collecting it would unmap whatever is at its address. Return the file if it is open."""
        kept, self._map = self._map, None
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
        return None if kept is None or kept.closed else self.file


_mappings: weakref.WeakSet[Mapping] = weakref.WeakSet()
"""Mappings of this process that have not been garbage-collected, closed or not."""


def _in_child() -> None:
    """Close every descriptor of the files of mappings. An mmap has a hidden descriptor of its own;
    any that is left would keep the memory after the parent has released it."""
    files = {mapping.disown() for mapping in list(_mappings)} - {None}
    _mappings.clear()
    for name in os.listdir("/proc/self/fd") if files else ():
        with contextlib.suppress(OSError):  # the descriptor of the listing itself is closed by now
            status = os.fstat(int(name))
            if (status.st_dev, status.st_ino) in files:
                os.close(int(name))


os.register_at_fork(after_in_child=_in_child)


def available_bytes() -> int:
    """Return the host memory that is available within the control group's limit."""
    free = re.search(r"^MemAvailable: *(\d+) kB$", system.told("/proc/meminfo"), re.MULTILINE)
    available = int(free[1]) * 1024 if free is not None else 0
    limit = _number("/sys/fs/cgroup/memory.max")
    used = _number("/sys/fs/cgroup/memory.current")
    if limit is not None and used is not None:
        available = min(available, max(limit - used, 0))
    return available


def _number(path: str) -> int | None:
    try:
        return int(system.told(path))
    except ValueError:
        return None


log = logging.getLogger(__name__)

_POOL, _OWNER, _RECORD = "pool", "owner.json", "sealed-"
_BEING_MADE = "new-"
_IN_MEMORY = ("tmpfs", "ramfs")
_SMALL_BYTES = 64 << 20
"""Default size of /dev/shm in containers."""


class SegmentOwner(msgspec.Struct, frozen=True, kw_only=True):
    run: str
    """Location of the run that its saves are written to, with links resolved."""
    rank: int
    ranks: int
    pid: int
    host: str
    created_s: float
    started: str = ""
    """Start time of that process and its pid namespace, because pids are reused."""


class Segment:
    """A segment, for its owner or for a process that found it."""

    def __init__(self, folder: str, owner: SegmentOwner) -> None:
        self.folder = folder
        self.owner = owner

    @property
    def base(self) -> str:
        """The folder that contains the user's folder."""
        return self.folder.rsplit("/", 2)[0]

    @property
    def pool_path(self) -> str:
        return f"{self.folder}/{_POOL}"

    def is_alive(self) -> bool:
        """Return True if its trainer or its flusher is alive, or if that cannot be determined."""
        try:
            fd = open_file(self.pool_path)
        except (FileNotFoundError, NotAFileError):
            return False
        except OSError as error:
            warn_once(log, f"cannot determine the owner of {self.pool_path}: {error}")
            return True
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(fd)
        return False

    def is_ending(self) -> bool:
        """Return True if its flusher is alive but its trainer is dead: no more saves will come."""
        return has_died(self.owner.pid, self.owner.started) and self.is_alive()

    @property
    def size_bytes(self) -> int:
        with contextlib.suppress(OSError):
            return os.stat(self.pool_path).st_blocks * 512
        return 0

    def records(self) -> list[str]:
        """Return the names of its records, numbers with dashes between them, oldest first."""
        names = list[str]()
        try:
            names += os.listdir(self.folder)
        except OSError as error:
            if not isinstance(error, FileNotFoundError):
                warn_once(log, f"cannot list shared memory: {error}")
        return sorted(
            (name.removeprefix(_RECORD) for name in names if name.startswith(_RECORD)),
            key=lambda name: [int(part) for part in name.split("-") if part.isdecimal()],
        )

    def ranks_with(self, name: str) -> frozenset[int]:
        """Return the ranks of its run on this machine that also have a record of this name."""
        of_run = found(self.base, self.owner.run)
        return frozenset(segment.owner.rank for segment in of_run if name in segment.records())

    def put(self, name: str, data: bytes) -> None:
        """Write a record; each name is used only once."""
        path = f"{self.folder}/{_RECORD}{name}"
        unfinished = f"{self.folder}/{_BEING_MADE}{name}"
        try:
            with open(unfinished, "wb") as file:
                file.write(digest(data))
                file.write(data)
            os.rename(unfinished, path)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(unfinished)
            raise failed("record a snapshot in shared memory", path, error) from error

    def read(self, name: str) -> bytes | None:
        """Return a record; None if it is gone. Raise `CorruptError` if it has changed."""
        path = f"{self.folder}/{_RECORD}{name}"
        try:
            found = _contents(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise failed("read a record in shared memory", path, error) from error
        said, data = found[:DIGEST_BYTES], found[DIGEST_BYTES:]
        if digest(data) != said:
            raise CorruptError(
                "a record in shared memory has changed",
                where=path,
                expected=said.hex(),
                found=digest(data).hex(),
            )
        return data

    def drop(self, name: str) -> None:
        """Remove a record; the snapshot it describes may be overwritten from now on."""
        _unlink(f"{self.folder}/{_RECORD}{name}")

    def remove(self) -> bool:
        """Remove the segment, records first; its memory is freed with the last process that has it
        mapped. Return False, and log the reason, if something cannot be removed."""
        for name in self.records():
            self.drop(name)
        return _remove(self.folder)


def make(base: str, run: str, *, rank: int, ranks: int, size_bytes: int) -> tuple[Segment, int]:
    """Create a segment for saves to that run. Return it with the descriptor of its memory, of
    `size_bytes`; every process with a copy of the descriptor holds the lock."""
    place = made_own_folder(base)
    room = os.statvfs(place)
    if room.f_blocks * room.f_frsize <= _SMALL_BYTES < size_bytes:
        raise StorageError(
            "not enough shared memory",
            where=base,
            expected=f"{size_bytes} bytes",
            found=f"{room.f_blocks * room.f_frsize} bytes",
            remedy="a container gets more by --shm-size (Docker), or by an emptyDir of medium "
            "Memory mounted at /dev/shm (Kubernetes); or name another tmpfs: "
            "Tier('shm:///path/of/it'); or pass a smaller host_memory_bytes=…",
        )
    owner = SegmentOwner(
        run=run,
        rank=rank,
        ranks=ranks,
        pid=os.getpid(),
        host=socket.gethostname(),
        created_s=time.time(),
        started=own_birth(),
    )
    name = f"{digest(run.encode()).hex()[:16]}-{rank}-{os.urandom(6).hex()}"
    unfinished, folder = f"{place}/{_BEING_MADE}{name}", f"{place}/{name}"
    try:
        with _locked(place, fcntl.LOCK_SH):
            os.mkdir(unfinished, 0o700)
            with open(f"{unfinished}/{_OWNER}", "wb") as file:
                file.write(msgspec.json.encode(owner))
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            fd = os.open(f"{unfinished}/{_POOL}", flags, 0o600)
            try:
                os.ftruncate(fd, size_bytes)
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.rename(unfinished, folder)
            except BaseException:
                os.close(fd)
                raise
    except OSError as error:
        raise failed("make a segment of shared memory", place, error) from error
    return Segment(folder, owner), fd


def refuse_disks(base: str) -> None:
    """Raise `StorageError` for a path on a disk: a device cannot write into its page cache."""
    kind = system.filesystem_of(base)
    if kind not in _IN_MEMORY:
        raise StorageError(
            "this is not shared memory",
            where=base,
            expected=f"a filesystem in memory ({', '.join(_IN_MEMORY)})",
            found=kind or "no such",
            remedy="mount a tmpfs there, or name one: Tier('shm:///path/of/it')",
        )


def opened(folder: str) -> Segment:
    """Return the segment in that folder. Raise `StorageError` if there is none."""
    owner = _owner_of(folder)
    if owner is None:
        raise StorageError("there is no segment of shared memory", where=folder)
    return Segment(folder, owner)


def found(base: str = BASE, run: str | None = None) -> list[Segment]:
    """Return the existing segments of that run, or of all runs, oldest first."""
    try:
        place = own_folder(base)
        names = [name for name in os.listdir(place) if not name.startswith(_BEING_MADE)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise failed("list shared memory", base, error) from error
    owners = {f"{place}/{name}": _owner_of(f"{place}/{name}") for name in names if name != RUNS}
    segments = [
        Segment(folder, owner)
        for folder, owner in owners.items()
        if owner is not None and run in (None, owner.run)
    ]
    return sorted(segments, key=lambda segment: segment.owner.created_s)


def of_dead_processes(base: str, run: str) -> list[Segment]:
    """Return the segments of a run on this node whose trainer and flusher have both ended."""
    return [segment for segment in found(base, run) if not segment.is_alive()]


def remove_debris(base: str) -> list[str]:
    """Remove and return half made or half removed folders, unless a segment is being made."""
    try:
        place = own_folder(base)
        with _locked(place, fcntl.LOCK_EX | fcntl.LOCK_NB):
            folders = [f"{place}/{name}" for name in sorted({*os.listdir(place)} - {RUNS})]
            debris = [
                folder
                for folder in filter(_is_own_folder, folders)
                if f"/{_BEING_MADE}" in folder or not os.path.lexists(f"{folder}/{_OWNER}")
            ]
            return [folder for folder in debris if _remove(folder)]
    except (FileNotFoundError, BlockingIOError):
        return []
    except OSError as error:
        raise failed("list shared memory", base, error) from error


def _remove(folder: str) -> bool:
    """Remove a folder and its files; return False, and log the reason, if something stays. The
    owner file is removed last, so that a partly removed folder is found again."""
    try:
        names = set(os.listdir(folder)) - {_OWNER}
        removed = [_unlink(f"{folder}/{name}") for name in names]
        if not all(removed):
            return False
        _unlink(f"{folder}/{_OWNER}")
        os.rmdir(folder)
    except FileNotFoundError:
        return True  # another process has removed it
    except OSError as error:
        warn_once(log, f"cannot free shared memory: {error}")
        return False
    return True


def _unlink(path: str) -> bool:
    """Remove a file; return False, and log the reason, if it stays."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return True  # another process has removed it
    except OSError as error:
        warn_once(log, f"cannot remove a snapshot from shared memory: {error}")
        return False
    return True


class NotAFileError(OSError):
    """Something other than a plain file is at the path."""


def open_file(path: str) -> int:
    """Open a file for reading. Raise `NotAFileError` for anything but a plain file: a pipe would
    block, and a link may point anywhere."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):  # a link, a socket
            raise NotAFileError(errno.EINVAL, "not a plain file", path) from None
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise NotAFileError(errno.EINVAL, "not a plain file", path)
    return fd


def _contents(path: str) -> bytes:
    with open(open_file(path), "rb") as file:
        return file.read()


def _is_own_folder(path: str) -> bool:
    status = os.lstat(path)
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()


@contextlib.contextmanager
def _locked(place: str, how: int) -> Iterator[None]:
    """Lock the user's folder; its holder knows, if alone, that no segment is being made."""
    fd = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, how)
        yield
    finally:
        os.close(fd)


def _owner_of(folder: str) -> SegmentOwner | None:
    try:
        if _is_own_folder(folder):
            return msgspec.json.decode(_contents(f"{folder}/{_OWNER}"), type=ready(SegmentOwner))
    except FileNotFoundError:
        return None  # being removed, or half removed
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        warn_once(log, f"skipped {folder}, which is not a segment of shared memory: {error}")
        return None
    warn_once(log, f"skipped {folder}, which is not a folder of this user")
    return None
