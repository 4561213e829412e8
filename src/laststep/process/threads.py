"""Threads: start them, run tasks on a few of them, outlast their errors."""

from __future__ import annotations

import contextlib
import queue
import threading
import weakref
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec, Self, SupportsIndex, TypeVar

from laststep.errors import StorageError, UsageError

if TYPE_CHECKING:
    import logging
    from collections.abc import Callable, Iterator
    from concurrent.futures import Future


_OURS = "laststep-"
"""So the name of every thread begins that the library starts."""


def start(thread: threading.Thread) -> None:
    """Start it; `StorageError` where that cannot be done."""
    try:
        thread.start()
    except RuntimeError as error:
        raise refused(thread.name, error) from error


def refused(name: str, error: RuntimeError) -> StorageError:
    """The error for a thread that could not be started."""
    return StorageError(
        "cannot start a thread",
        where=name,
        found=str(error),
        remedy="raise the limit on processes and threads (`ulimit -u`, the pids of the container) "
        "or on memory (`ulimit -v`)",
    )


@contextlib.contextmanager
def outlasting(log: logging.Logger, what: str, *details: object) -> Iterator[None]:
    """Log what a function of the user's raises inside, and go on. What is no `Exception`, such as
    Ctrl-C, `sys.exit()` or the end of a task, is meant for the thread on which it is raised: it
    goes on there, unless that is one of ours, of which nobody knows and for which many wait."""
    try:
        yield
    except BaseException as error:
        if threading.current_thread().name.startswith(_OURS):
            with contextlib.suppress(BaseException):  # the log's handlers are the user's as well
                log.exception(what, *details)
            return
        if not isinstance(error, Exception):
            raise
        log.exception(what, *details)


_Asked = ParamSpec("_Asked")
_Result = TypeVar("_Result")
_Task = tuple["Future[Any]", "Callable[[], Any]"]


class Workers:
    """Up to so many threads, each started when there is something to do; they end with this."""

    def __init__(self, count: int, name: str) -> None:
        self._count, self._name = count, name
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        weakref.finalize(self, _end, self._tasks, self._threads).atexit = False

    def submit(
        self, call: Callable[_Asked, _Result], *args: _Asked.args, **more: _Asked.kwargs
    ) -> Future[_Result]:
        """Have it called; `RuntimeError` where no thread can be started."""
        with self._lock:
            if len(self._threads) < self._count:
                name = f"{self._name}_{len(self._threads)}"
                thread = threading.Thread(target=_work, args=[self._tasks], name=name, daemon=True)
                thread.start()
                self._threads.append(thread)
        from concurrent.futures import Future  # every flusher waits for what is imported

        future: Future[_Result] = Future()
        self._tasks.put((future, lambda: call(*args, **more)))
        return future

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Wait until all is done."""
        _end(self._tasks, self._threads)
        for thread in self._threads:
            thread.join()
        self._threads.clear()


def _end(tasks: queue.SimpleQueue[_Task | None], threads: list[threading.Thread]) -> None:
    for _ in threads:
        tasks.put(None)


def _work(tasks: queue.SimpleQueue[_Task | None]) -> None:
    while (task := tasks.get()) is not None:
        future, call = task
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001 (whoever asked for it hears of it)
            future.set_exception(error)
        del task, future, call  # what they hold may be gone before the next comes


class OnlyOne:
    """Cannot be copied or pickled: what ends a copy, or tells it, would be meant for both."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        kind = next(k.__name__ for k in type(self).__mro__ if not k.__name__.startswith("_"))
        raise UsageError(
            f"a {kind} cannot be copied or pickled",
            expected="one object for its threads and files",
            remedy="pass this very one on, or make another one in the place that needs it",
        )
