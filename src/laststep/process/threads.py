"""All threads of the library: workers that run one function, and pools that run tasks. Also what
makes msgspec safe for threads (`ready`)."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import queue
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn, Self, SupportsIndex, TypeVar, TypeVarTuple

import msgspec

from laststep.errors import StorageError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from concurrent.futures import Future

_log = logging.getLogger(__name__)
_Args = TypeVarTuple("_Args")
_Result = TypeVar("_Result")

_Kind = TypeVar("_Kind")

_preparing = threading.RLock()
_prepared: set[object] = set()

_OURS = "laststep-"
"""Prefix of the names of all threads of the library."""


class Worker:
    """A thread that runs one function. The program can exit without waiting for it."""

    def __init__(self, name: str, run: Callable[[*_Args], object], *args: *_Args) -> None:
        name = f"{_OURS}{name}"
        self._thread = threading.Thread(target=run, name=name, args=args, daemon=True)

    def start(self) -> Self:
        """Start the thread. Raise `StorageError` if the system cannot create one."""
        try:
            self._thread.start()
        except RuntimeError as error:
            raise StorageError(
                "cannot start a thread",
                where=self._thread.name,
                found=str(error),
                remedy="raise the limit on processes and threads (`ulimit -u`, the pids of the "
                "container) or on memory (`ulimit -v`)",
            ) from error
        return self

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait for its end, if it was started; return False if it still runs after the timeout."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()


def ready(kind: _Kind) -> _Kind:
    """Return a type for msgspec to decode into, from any thread.

    msgspec 0.22 analyses a class at its first use, and a thread that uses the class meanwhile
    crashes the process. So one thread does it, before any other uses the class.
    """
    if kind not in _prepared:
        with _preparing:
            msgspec.msgpack.Decoder(kind)  # also analyses the classes inside
            _prepared.add(kind)
    return kind


def _in_child() -> None:
    global _preparing  # noqa: PLW0603 (another thread of the parent may have held it)
    _preparing = threading.RLock()


os.register_at_fork(after_in_child=_in_child)


@contextlib.contextmanager
def outlasting(log: logging.Logger, what: str, *details: object) -> Iterator[None]:
    """Log exceptions raised inside, such as those of user callbacks, and continue. Other
    `BaseException`s, such as Ctrl-C, `sys.exit()` or the cancellation of a task, are meant for the
    thread on which they are raised: they propagate, except on a thread of this library, which users
    do not know and others wait for; there they are logged too."""
    try:
        yield
    except BaseException as error:
        if threading.current_thread().name.startswith(_OURS):
            with contextlib.suppress(BaseException):  # log handlers are user code too
                log.exception(what, *details)
            return
        if not isinstance(error, Exception):
            raise
        log.exception(what, *details)


class WorkerPool:
    """Up to `count` threads that take tasks from one queue in order.

    Threads are started when there are tasks for them, and end with the pool. With a `limit`, adding
    a task blocks while that many are queued; 0 is for callers that bound their tasks themselves.
    """

    def __init__(self, name: str, count: int, *, limit: int = 0) -> None:
        self._name, self._count = name, count
        room = threading.Semaphore(limit) if limit else None
        self._queue = _TaskQueue(queue.SimpleQueue(), threading.Condition(), room)
        self.queued = self._queue.tasks
        """The tasks that wait for a thread."""
        self._workers: list[Worker] = []
        self._lock = threading.Lock()
        # Bypass the queue's lock: the thread that garbage-collects this pool may hold it.
        ending = weakref.finalize(self, _end, self.queued, self._workers)
        ending.atexit = False

    def start(self) -> Self:
        """Start all threads now; if one cannot be started, raise `StorageError` and leave none."""
        try:
            while self._add_worker():
                pass
        except StorageError:
            self.close()
            raise
        return self

    def put(self, call: Callable[[*_Args], object], *args: *_Args) -> None:
        """Queue a call. Raise the first error of an earlier task, if there is one."""
        if self._queue.error is not None:
            raise self._queue.error
        try:
            self._add_worker()
        except StorageError:
            if not self._workers:  # else the running threads do it
                raise
        if self._queue.room is not None:
            self._queue.room.acquire()
        with self._queue.changed:
            self._queue.left += 1
        self.queued.put(functools.partial(call, *args))

    def submit(self, call: Callable[[*_Args], _Result], *args: *_Args) -> Future[_Result]:
        """Queue a call; the future receives its result or its error."""
        from concurrent.futures import Future  # late: every flusher waits for imports

        future: Future[_Result] = Future()
        self.put(_fulfil, future, functools.partial(call, *args))
        return future

    def wait(self) -> None:
        """Wait until no task is left, including those that tasks add."""
        with self._queue.changed:
            while self._queue.left:
                self._queue.changed.wait()

    def close(self) -> None:
        """Wait until no task is left, end the threads, and raise the first error of a task."""
        self.wait()
        _end(self.queued, self._workers)
        for worker in self._workers:
            worker.join()
        self._workers.clear()
        if self._queue.error is not None:
            raise self._queue.error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _add_worker(self) -> bool:
        with self._lock:
            if len(self._workers) == self._count:
                return False
            name = f"{self._name}_{len(self._workers)}"
            self._workers.append(Worker(name, self._queue.work).start())
            return True


class _TaskQueue(msgspec.Struct, eq=False):
    """The tasks of a pool. Threads refer to this queue and not to the pool, so that the pool can be
    garbage-collected."""

    tasks: queue.SimpleQueue[Callable[[], object] | None]
    changed: threading.Condition
    room: threading.Semaphore | None = None
    error: BaseException | None = None
    left: int = 0

    def work(self) -> None:
        while (task := self.tasks.get()) is not None:
            if self.room is not None:
                self.room.release()
            try:
                task()
            except BaseException as error:  # noqa: BLE001 (raised by `put` and `close`)
                self.error = self.error or error
                with contextlib.suppress(BaseException):  # log handlers are user code
                    name = threading.current_thread().name
                    _log.error("a task failed on %s", name, exc_info=error)
            del task  # free the task's objects before waiting for the next one
            with self.changed:
                self.left -= 1
                if not self.left:
                    self.changed.notify_all()


def _end(tasks: queue.SimpleQueue[Callable[[], object] | None], workers: Sequence[Worker]) -> None:
    for _ in workers:
        tasks.put(None)


def _fulfil(future: Future[_Result], call: Callable[[], _Result]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(call())
    except BaseException as error:  # noqa: BLE001 (raised to the holder of the future)
        future.set_exception(error)


class OnlyOne:
    """Base of objects that cannot be copied or pickled: closing one copy would affect the other."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        kind = next(k.__name__ for k in type(self).__mro__ if not k.__name__.startswith("_"))
        raise UsageError(
            f"a {kind} cannot be copied or pickled",
            expected="one object for its threads and files",
            remedy="pass this very one on, or make another one in the place that needs it",
        )
