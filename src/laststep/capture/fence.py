"""Keep an optimizer from changing state that is still being copied.

One global step pre-hook of torch.optim serves every optimizer in the process. During a lazy capture
the hook blocks the host until all copies are enqueued (waiting for an event that was never recorded
would be a no-op), then makes the current stream wait for them. It also records that it fires at
all: steps replayed from a CUDA graph, traced by Dynamo or taken by foreign optimizers never call
it, so lazy capture is chosen only after it was seen to fire.

Optimizers that step inside backward call the hook from one thread per device, so a lock guards the
fence. A fence belongs to the process that made it and is gone in a forked child, where nobody makes
the copies.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, ClassVar, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

if TYPE_CHECKING:
    from collections.abc import Callable


class Fenced(Protocol):
    """A capture that must end before the state may change."""

    def hold_back(self) -> None:
        """Block the host, and the current stream, until the state may change."""

    def is_over(self) -> bool:
        """Return whether all copies have ended."""


class Fence:
    """The hook, the captures it waits for, and whether it has been seen to fire."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fenced: list[Fenced] = []
        self._fired = False
        self._count = 0
        self._errands: list[tuple[int, Callable[[], bool]]] = []
        _Hook.fences[id(self)] = self
        _Hook.register()

    def add(self, capture: Fenced) -> None:
        with self._lock:
            self._fenced.append(capture)

    def at_step(self, number: int, errand: Callable[[], bool]) -> None:
        """Run an errand at that firing of the hook; if it returns False, again after twice as
        many."""
        with self._lock:
            self._errands.append((number, errand))

    def take_evidence(self) -> bool:
        """Return whether the hook fired since the last call."""
        with self._lock:
            fired, self._fired = self._fired, False
            return fired

    def close(self) -> None:
        _Hook.fences.pop(id(self), None)

    def before_step(self) -> None:
        """Run before an optimizer steps."""
        with self._lock:
            self._fired = True
            self._fenced = [capture for capture in self._fenced if not capture.is_over()]
            fenced = tuple(self._fenced)
            self._count += 1
            count, due = self._count, self._take_due()
        for errand in due:
            if not errand():
                self.at_step(2 * count, errand)
        for capture in fenced:
            capture.hold_back()

    def _take_due(self) -> list[Callable[[], bool]]:
        """Remove and return the errands due at this firing; call with the lock held."""
        if not self._errands:
            return []
        due = [errand for number, errand in self._errands if number <= self._count]
        self._errands = [errand for errand in self._errands if errand[0] > self._count]
        return due


class _Hook:
    """The one hook of all fences. It is never removed: torch iterates over its hooks while they
    run, and any thread may close a fence at any moment."""

    fences: ClassVar[dict[int, Fence]] = {}
    _registered = False

    @classmethod
    def register(cls) -> None:
        if not cls._registered:
            cls._registered = True
            register_optimizer_step_pre_hook(cls._before_step)

    @classmethod
    def _before_step(cls, *_: object) -> None:
        if torch.compiler.is_compiling() or _capturing_graph():
            return  # nothing may be traced or recorded here, so this step is no evidence either
        for fence in list(cls.fences.values()):
            fence.before_step()


# A child has none of its parent's fences; one that closes its copy there finds nothing to close.
os.register_at_fork(after_in_child=_Hook.fences.clear)


def _capturing_graph() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
