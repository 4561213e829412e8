"""One capture in progress: its sources, its progress and its outcome.

The training thread makes a job and fills `staging`; then the capture thread owns it, except for the
events, for which any thread may wait. The first error is final.
"""

from __future__ import annotations

import itertools
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch

from laststep.process import signals

if TYPE_CHECKING:
    from collections.abc import Sequence

    from laststep.capture.layout import ChunkLayout, Layout
    from laststep.capture.ring import Ring
    from laststep.capture.sources import LiveTensor
    from laststep.capture.unchanged import ChunkLooks
    from laststep.errors import LaststepError
    from laststep.memory.slots import Filled
    from laststep.plan.files import SavePlan


class Sink(Protocol):
    """Receives a capture's chunks: the flusher's client. Called from any thread."""

    @property
    def number(self) -> int:
        """The number of the save, by which later ones refer to it."""

    @property
    def since(self) -> int:
        """The number of the last save that is committed; 0: none."""

    def chunks(self, filled: list[Filled]) -> None:
        """Take over filled slots from the capture."""

    def unchanged(
        self, of: int, chunks: Sequence[tuple[int, int, int]]
    ) -> frozenset[tuple[int, int]]:
        """Given chunks (file, start, bytes) that equal those of that save, return those (file,
        start) that need not be handed over."""

    def captured(self, timing: CaptureTiming) -> None:
        """All bytes have been handed over."""

    def failed(self, error: LaststepError) -> None:
        """The capture failed; nothing more will come."""


@dataclass(slots=True)
class CaptureTiming:
    """The measured cost of a capture to training."""

    stall_s: float = 0.0
    """The training thread, in save()."""
    waited_s: float = 0.0
    """Of that, waiting for room in the pool or for an earlier capture."""
    device_copy_s: float = 0.0
    """The training stream, copying on the device."""
    fence_s: float = 0.0
    """The training stream, held back before the optimizer's step."""
    drained_s: float = 0.0
    """From save() until all bytes were in host memory."""
    unchanged_bytes: int = 0
    """Bytes that stayed on the device because the last checkpoint has them."""


class _Nobody:
    """The sink of a finished job."""

    number = since = 0

    def unchanged(
        self, of: int, chunks: Sequence[tuple[int, int, int]]
    ) -> frozenset[tuple[int, int]]:
        return frozenset()

    def chunks(self, filled: list[Filled]) -> None: ...

    def captured(self, timing: CaptureTiming) -> None: ...

    def failed(self, error: LaststepError) -> None: ...


@dataclass(slots=True)
class Job:
    """A capture; the module docstring says which thread owns what."""

    plan: SavePlan
    layout: Layout
    sources: Sequence[torch.Tensor]
    sink: Sink
    began_s: float
    looks: ChunkLooks | None = None
    """Digests of the chunks of this layout in earlier saves."""
    timing: CaptureTiming = field(default_factory=CaptureTiming)
    direct: dict[int, LiveTensor] = field(default_factory=dict)
    """Tensors that are copied after planning, by piece, held as they were at `save()`."""
    staging: dict[str, torch.Tensor] = field(default_factory=dict)
    filled: set[tuple[int, int]] = field(default_factory=set)
    """(file, start) of chunks that the training thread has filled and handed over."""
    aside: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    """(file, start) → the host's part of chunks that a device fills as well."""
    held: set[int] = field(default_factory=set)
    """Slots that are leased and not handed over yet; given back if the capture fails."""
    ready: dict[str, torch.cuda.Event] = field(default_factory=dict)
    """Per device: the state at save() is complete (and staged) once this event has passed."""
    staging_began: dict[str, torch.cuda.Event] = field(default_factory=dict)
    fence_began: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = field(
        default_factory=dict
    )
    rings: dict[str, Ring] = field(default_factory=dict)
    """Per device: what is copied lazily passes through these, and is proven there."""
    host_before: dict[tuple[int, int, int], bytes] = field(default_factory=dict)
    """Digests at save() of host spans that are copied lazily."""
    copied: dict[str, torch.cuda.Event] = field(default_factory=dict)
    host_held_s: float = 0.0
    """How long the training thread waited in the fence."""
    cancelled: bool = False
    """Set by the training thread if the outcome is no longer wanted."""
    enqueued: threading.Event = field(default_factory=threading.Event)
    over: threading.Event = field(default_factory=threading.Event)
    error: LaststepError | None = None

    def hold_back(self) -> None:
        """Called by the fence: block until the copies of the state are ordered before any
        change."""
        began = time.perf_counter()
        signals.wait(self.enqueued)
        if not self.copied:
            signals.wait(self.over)  # host memory has no stream order: wait for the copy itself
        self.host_held_s += time.perf_counter() - began
        for device, event in self.copied.items():
            stream = torch.cuda.current_stream(device)
            start = torch.cuda.Event(enable_timing=True)
            start.record(stream)
            stream.wait_event(event)
            end = torch.cuda.Event(enable_timing=True)
            end.record(stream)
            self.fence_began.setdefault(device, []).append((start, end))

    def read_fence_timers(self) -> None:
        """Add up how long the fence delayed host and streams, for waits that have ended."""
        total = self.host_held_s
        for waits in list(self.fence_began.values()):
            total += sum(start.elapsed_time(end) for start, end in waits if end.query()) / 1e3
        self.timing.fence_s = total

    def forget(self) -> None:
        """Drop everything but the figures; a report may be kept for long."""
        self.sink = _Nobody()
        self.let_go()
        self.host_before.clear()
        self.aside.clear()

    def let_go(self) -> None:
        """Release all memory of the state after the copies have ended."""
        self.sources = ()
        self.direct.clear()
        self.rings.clear()
        self.staging.clear()

    def full_name(self, piece: int) -> str:
        """Return the name of a piece for people: `item/name`."""
        names = (f"{item.name}/{one.name}" for item in self.plan.items for one in item.pieces)
        return next(itertools.islice(names, piece, None))

    def urgent(self) -> bool:
        """Return whether training waits or will wait; staged state can take its time."""
        return bool(self.layout.direct)

    def is_over(self) -> bool:
        return self.over.is_set()

    def chunks(self) -> tuple[ChunkLayout, ...]:
        return self.layout.chunks
