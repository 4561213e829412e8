"""Start threads of our own, with an error of ours where the system has no more of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from laststep.errors import StorageFailed

if TYPE_CHECKING:
    import threading


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
