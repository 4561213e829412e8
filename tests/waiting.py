"""Waiting for what other threads and processes do, within a bound that only a hang reaches."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from laststep.memory.pool import Pool

PATIENCE_S = 120.0


def wait_until(condition: Callable[[], bool]) -> None:
    """Until that is true."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("it does not happen")
        time.sleep(0.005)


def wait_ready(pool: Pool) -> None:
    """Until all memory that was asked for is ready, or there is none left."""
    wait_until(lambda: pool._ready >= pool._wanted)


def is_flusher(pid: int) -> bool:
    """Whether that process still is a flusher."""
    try:
        return b"laststep.flush" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False
