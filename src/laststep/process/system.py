"""What the system says of this process: kernel, identity, memory that is short, its end; and
warnings that are told once."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import errno
import functools
import logging
import os
import weakref
from typing import TYPE_CHECKING

from laststep.errors import StorageError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


HUGE_PAGE_BYTES = 2 << 20
_MADV_HUGEPAGE = 14
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def advise(address: int, size_bytes: int, advice: int) -> int:
    """Advise the kernel on whole pages of this process; 0, or the number of the error."""
    return 0 if _libc.madvise(address, size_bytes, advice) == 0 else ctypes.get_errno()


def prefer_huge_pages(address: int, size_bytes: int) -> None:
    """Have what lies wholly in that memory, and was not touched yet, made of huge pages, where the
    system has some: touched one by one, small pages take longer than what is copied into them."""
    first = -(-address // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    whole = (address + size_bytes - first) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    if whole > 0:
        advise(first, whole, _MADV_HUGEPAGE)


def told(path: str) -> str:
    """All that such a file says; "" where there is none, or it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:  # noqa: PTH123 (see above)
            return file.read()
    except OSError:
        return ""


def filesystem_of(path: str) -> str:
    """The kind of filesystem that a path lies on, such as `tmpfs`; "" where that is not told."""
    try:
        device = os.stat(path).st_dev  # noqa: PTH116 (see above)
    except OSError:
        return ""
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in told("/proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        if before.split()[2:3] == [number]:
            return after.split()[0]
    return ""


def boot() -> str:
    """The name of this start of the kernel; "" where it does not tell."""
    return told("/proc/sys/kernel/random/boot_id").strip()


def pid_namespace() -> str:
    """Within what the numbers of processes mean the same; "" where the kernel does not tell."""
    try:
        return os.readlink("/proc/self/ns/pid")  # noqa: PTH115 (see `kernel`)
    except OSError:
        return ""


def process_started(pid: int) -> str:
    """When a process has started, in ticks since the boot; "" where there is none, or one
    that is dead and not reaped yet."""
    state, *more = told(f"/proc/{pid}/stat").rpartition(")")[2].split() or [""]
    return more[18] if len(more) > 18 and state not in ("Z", "X") else ""


_OF_A_DEVICE = ("torch", "OutOfMemoryError")
_OF_THE_HOST = "DefaultCPUAllocator: can't allocate memory"
"""In the text of the plain `RuntimeError` that torch raises then."""


def is_one(error: BaseException) -> bool:
    """Whether that came of too little memory."""
    kind = type(error)
    if isinstance(error, MemoryError) or (kind.__module__, kind.__name__) == _OF_A_DEVICE:
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and _OF_THE_HOST in str(error)


def error_for(doing: str, error: BaseException) -> StorageError:
    """What to raise in its place."""
    told = StorageError(
        f"there is too little memory to {doing}",
        found=str(error).partition("\n")[0] or type(error).__name__,
        remedy="free memory, or give the process more (`ulimit -v`, the limit of its container)",
    )
    told.transient = True
    return told


@contextlib.contextmanager
def translate_oom(doing: str) -> Iterator[None]:
    """`StorageError` where memory does not suffice for what is done inside."""
    try:
        yield
    except Exception as error:
        if not is_one(error):
            raise
        raise error_for(doing, error) from error


_ROOT = "laststep"
_rank: int | None = None


def speak_as(rank: int | None) -> None:
    """From now on lines carry that rank; None: no rank."""
    global _rank  # noqa: PLW0603 (a process is one rank)
    _rank = rank
    known = list(logging.Logger.manager.loggerDict.values())
    for logger in (logging.getLogger(_ROOT), *known):
        if isinstance(logger, logging.Logger) and logger.name.partition(".")[0] == _ROOT:
            logger.addFilter(_carry_rank)


def speaks_as() -> int | None:
    """The rank that lines carry."""
    return _rank


@functools.lru_cache(maxsize=1000)
def warn_once(log: logging.Logger, message: str) -> None:
    """Log a warning, unless this process has logged the same one before."""
    log.warning("%s", message)


def _carry_rank(record: logging.LogRecord) -> bool:
    record.rank = _rank
    if _rank is not None:
        record.msg = f"rank {_rank}: {record.msg}"
    return True


_watched: dict[int, tuple[object, Callable[[], None], Callable[[], None]]] = {}


def watch(what: object, *, at_exit: Callable[[], None], in_child: Callable[[], None]) -> None:
    """Have these called at the end of the program and in forked children."""
    _watched[id(what)] = what, at_exit, in_child


def let_be(what: object) -> None:
    """It has ended by itself."""
    _watched.pop(id(what), None)


def weakly(act: Callable[[], bool]) -> Callable[[], bool]:
    """A method that does not keep its object alive; True when that is gone: there is no more to
    be done."""
    reference = weakref.WeakMethod(act)

    def if_there() -> bool:
        method = reference()
        return method is None or method()

    return if_there


def check_process(what: str, pid: int) -> None:
    """`UsageError` in a process that was forked from the one that made something."""
    if os.getpid() != pid:
        raise UsageError(
            f"cannot {what} in a forked process",
            expected=f"process {pid}, which made the Checkpointer",
            found=f"process {os.getpid()}",
            remedy="make one in this process, with a run of its own",
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
