"""This process and its system: kernel, identity, memory errors, exit and fork hooks, logging."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import errno
import functools
import logging
import mmap
import os
import weakref
from typing import TYPE_CHECKING

from laststep.errors import StorageError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


HUGE_PAGE_BYTES = 2 << 20
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def advise(address: int, size_bytes: int, advice: int) -> int:
    """Call madvise on whole pages of this process; return 0 or the errno."""
    return 0 if _libc.madvise(address, size_bytes, advice) == 0 else ctypes.get_errno()


def prefer_huge_pages(address: int, size_bytes: int) -> None:
    """Ask for huge pages for the untouched memory in this range, if the system has them: faulting
    in small pages one by one takes longer than copying into them."""
    first = -(-address // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    whole = (address + size_bytes - first) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    if whole > 0:
        advise(first, whole, mmap.MADV_HUGEPAGE)


def huge_pages(size_bytes: int) -> memoryview:
    """Return an aligned buffer, in huge pages if the system has them; its last view frees it."""
    mapped = mmap.mmap(-1, size_bytes + HUGE_PAGE_BYTES, mmap.MAP_PRIVATE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
    prefer_huge_pages(address, len(mapped))
    first = -address % HUGE_PAGE_BYTES
    return memoryview(mapped)[first : first + size_bytes]


def told(path: str) -> str:
    """Return the contents of a file of the kernel; "" if it is missing or unreadable."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:  # noqa: PTH123 (no pathlib)
            return file.read()
    except OSError:
        return ""


def filesystem_of(path: str) -> str:
    """Return the kind of filesystem of a path, such as `tmpfs`; "" if unknown."""
    try:
        device = os.stat(path).st_dev  # noqa: PTH116 (slow to import)
    except OSError:
        return ""
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in told("/proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        if before.split()[2:3] == [number]:
            return after.split()[0]
    return ""


def boot() -> str:
    """Return the id of this boot of the kernel; "" if unknown."""
    return told("/proc/sys/kernel/random/boot_id").strip()


def pid_namespace() -> str:
    """Return the pid namespace, within which pids are unique; "" if unknown."""
    try:
        return os.readlink("/proc/self/ns/pid")  # noqa: PTH115 (slow to import)
    except OSError:
        return ""


def process_started(pid: int) -> str:
    """Return the start time of a process, in ticks since boot; "" if there is none or it ended."""
    state, *more = told(f"/proc/{pid}/stat").rpartition(")")[2].split() or [""]
    return more[18] if len(more) > 18 and state not in ("Z", "X") else ""


def own_birth() -> str:
    """Return the start time of this process and its pid namespace, because pids are reused."""
    return f"{process_started(os.getpid())}@{pid_namespace()}"


def has_died(pid: int, birth: str) -> bool:
    """Return True if the process with that `own_birth`, of this boot, is known to be dead. Nothing
    is known of other namespaces: containers number their processes alike."""
    started, _, namespace = birth.partition("@")
    is_known = "" not in (started, namespace) and namespace == pid_namespace()
    return is_known and process_started(pid) != started


_OF_A_DEVICE = ("torch", "OutOfMemoryError")
_OF_THE_HOST = "DefaultCPUAllocator: can't allocate memory"
"""Part of the plain `RuntimeError` that torch raises if the host is out of memory."""


def is_one(error: BaseException) -> bool:
    """Return True if the error means that memory ran out."""
    kind = type(error)
    if isinstance(error, MemoryError) or (kind.__module__, kind.__name__) == _OF_A_DEVICE:
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and _OF_THE_HOST in str(error)


def error_for(doing: str, error: BaseException) -> StorageError:
    """Return the `StorageError` to raise instead."""
    told = StorageError(
        f"not enough memory to {doing}",
        found=str(error).partition("\n")[0] or type(error).__name__,
        remedy="free memory, or give the process more (`ulimit -v`, the limit of its container)",
    )
    told.transient = True
    return told


@contextlib.contextmanager
def translate_oom(doing: str) -> Iterator[None]:
    """Raise `StorageError` if the code inside runs out of memory."""
    try:
        yield
    except Exception as error:
        if not is_one(error):
            raise
        raise error_for(doing, error) from error


_ROOT = "laststep"
_rank: int | None = None


def log_as_rank(rank: int | None) -> None:
    """Prefix log lines with that rank from now on; None for no prefix. Lines of ranks other than 0
    at INFO are dropped, unless the logger is at DEBUG: they mostly repeat those of rank 0."""
    global _rank  # noqa: PLW0603 (a process is one rank)
    _rank = rank
    known = list(logging.Logger.manager.loggerDict.values())
    for logger in (logging.getLogger(_ROOT), *known):
        if isinstance(logger, logging.Logger) and logger.name.partition(".")[0] == _ROOT:
            logger.addFilter(_carry_rank)


def logging_rank() -> int | None:
    """Return the rank in the prefix of log lines."""
    return _rank


def shared_warning() -> int:
    """Return the level for a warning that is the same on all ranks: INFO on ranks other than 0."""
    return logging.INFO if _rank else logging.WARNING


@functools.lru_cache(maxsize=1000)
def warn_once(log: logging.Logger, message: str) -> None:
    """Log a warning, unless this process has logged the same one before."""
    log.warning("%s", message)


def _carry_rank(record: logging.LogRecord) -> bool:
    is_repeated = bool(_rank) and record.levelno <= logging.INFO
    if is_repeated and not logging.getLogger(record.name).isEnabledFor(logging.DEBUG):
        return False
    record.rank = _rank
    if _rank is not None:
        record.msg = f"rank {_rank}: {record.msg}"
    return True


_watched: dict[int, tuple[object, Callable[[], None], Callable[[], None]]] = {}


def watch(what: object, *, at_exit: Callable[[], None], in_child: Callable[[], None]) -> None:
    """Call these functions at program exit and in forked children."""
    _watched[id(what)] = what, at_exit, in_child


def let_be(what: object) -> None:
    """Cancel `watch`."""
    _watched.pop(id(what), None)


def weakly(act: Callable[[], bool]) -> Callable[[], bool]:
    """Wrap a method without keeping its object alive; the wrapper returns True, for "nothing left
    to do", once the object is gone."""
    reference = weakref.WeakMethod(act)

    def if_there() -> bool:
        method = reference()
        return method is None or method()

    return if_there


def check_process(what: str, pid: int) -> None:
    """Raise `UsageError` in a process that was forked from process `pid`."""
    if os.getpid() != pid:
        raise UsageError(
            f"cannot {what} in a forked process",
            expected=f"process {pid}, which created the Checkpointer",
            found=f"process {os.getpid()}",
            remedy="create a Checkpointer in this process, with a run of its own",
        )


def _tell_at_exit() -> None:
    for _, at_exit, _ in list(_watched.values()):
        at_exit()


def _after_fork() -> None:
    for _, _, in_child in list(_watched.values()):
        in_child()
    _watched.clear()


atexit.register(_tell_at_exit)
os.register_at_fork(after_in_child=_after_fork)
