"""Threads of our own: they start, or there is an error of ours, and no code of a user's ends them.

Their names tell them from the user's.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

from laststep.errors import StorageFailed

if TYPE_CHECKING:
    import logging
    from collections.abc import Iterator

_OURS = "laststep-"
"""So the name of every thread begins that the library starts."""


def start(thread: threading.Thread) -> None:
    """Start it; `StorageFailed` where that cannot be done."""
    try:
        thread.start()
    except RuntimeError as error:
        raise refused(thread.name, error) from error


def refused(name: str, error: RuntimeError) -> StorageFailed:
    """The error for a thread that could not be started."""
    return StorageFailed(
        "cannot start a thread", where=name, found=str(error),
        remedy="raise the limit on processes and threads (`ulimit -u`, the pids of the container) "
        "or on memory (`ulimit -v`)",
    )  # fmt: skip


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
