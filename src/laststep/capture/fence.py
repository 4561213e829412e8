"""Keep an optimizer from changing state that is still being copied.

One global step pre-hook of torch.optim serves every optimizer in the process. During a lazy capture
the hook blocks the host until all copies are enqueued (waiting for an event that was never recorded
would be a no-op), then makes the current stream wait for them. Steps replayed from a CUDA graph,
traced by Dynamo or taken by foreign optimizers never call it, so lazy capture is chosen only after
it was seen to fire.

Optimizers that step inside backward call the hook from one thread per device, so a lock guards the
fence. It is gone in a forked child, where nobody makes the copies.
"""

from __future__ import annotations

import functools
import os
import threading
from typing import TYPE_CHECKING

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

if TYPE_CHECKING:
    from collections.abc import Callable

    from laststep.capture.mover import Job


class Fence:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fenced: list[Job] = []
        self._fired = False
        self._count = 0
        self._errands: list[tuple[int, Callable[[], bool]]] = []
        _fences[id(self)] = self
        _register_hook()

    def add(self, capture: Job) -> None:
        with self._lock:
            self._fenced.append(capture)

    def at_step(self, number: int, errand: Callable[[], bool]) -> None:
        """Run an errand at that firing of the hook, and if it returns False after twice as many."""
        with self._lock:
            self._errands.append((number, errand))

    def take_evidence(self) -> bool:
        """Return whether the hook fired since the last call."""
        with self._lock:
            fired, self._fired = self._fired, False
            return fired

    def close(self) -> None:
        _fences.pop(id(self), None)

    def before_step(self) -> None:
        with self._lock:
            self._fired = True
            self._fenced = [capture for capture in self._fenced if not capture.over.is_set()]
            fenced = tuple(self._fenced)
            self._count += 1
            count = self._count
            due = [errand for number, errand in self._errands if number <= count]
            self._errands = [errand for errand in self._errands if errand[0] > count]
        for errand in due:
            if not errand():
                self.at_step(2 * count, errand)
        for capture in fenced:
            capture.hold_back()


_fences: dict[int, Fence] = {}
# A child has none of its parent's fences; one that closes its copy there finds nothing to close.
os.register_at_fork(after_in_child=_fences.clear)


@functools.cache
def _register_hook() -> None:
    """Register the hook of all fences. It is never removed: torch iterates over its hooks while
    they run, and any thread may close a fence at any moment."""
    register_optimizer_step_pre_hook(_before_step)


def _before_step(*_: object) -> None:
    # Nothing may be traced or recorded here, so such a step is no evidence either.
    if torch.compiler.is_compiling():
        return
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        return
    for fence in list(_fences.values()):
        fence.before_step()
