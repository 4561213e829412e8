"""Threads that do what they are given, for which the end of the program waits in no case.

It does wait for those of a `ThreadPoolExecutor`, also where a server never answers one of them: a
job that is to end within its grace would not.
"""

from __future__ import annotations

import queue
import threading
import weakref
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, ParamSpec, Self, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

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
