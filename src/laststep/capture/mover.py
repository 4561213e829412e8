"""One capture in progress, and the copies of its bytes into slots of the pool.

The training thread makes a `Job` and fills its staging; then the capture thread owns it, except for
the events, for which any thread may wait. `Mover` runs on the capture thread and copies, proves and
hands over the chunks of a job; copying threads also lease and hand over those that they fill. A
slot is handed over only after the copies into it have ended. Lazy copies are proven by the bytes
that landed: in the ring for a device, in the slot for the host.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch

from laststep.capture.device import record
from laststep.capture.gather import copy_each, gather
from laststep.codecs.digests import digest
from laststep.constants import DTYPES
from laststep.errors import AbortedError, StorageError, TornCaptureError
from laststep.memory.pool import Filled
from laststep.process import signals

if TYPE_CHECKING:
    from collections.abc import Sequence

    from laststep.capture.copies import ChunkLooks, Place
    from laststep.capture.device import SideStreams
    from laststep.capture.gather import LiveTensor
    from laststep.capture.layout import ChunkLayout, Layout, StagingGroup
    from laststep.capture.ring import Ring
    from laststep.errors import LaststepError
    from laststep.memory.pool import Pool
    from laststep.plan.files import SavePlan

_BATCH = 8
"""Chunks that are copied, waited for and handed over together: Python work of the capture thread
takes the GIL from training."""
_READ = 0x100
"""PyBUF_READ"""
_look_at = ctypes.pythonapi.PyMemoryView_FromMemory
_look_at.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_look_at.restype = ctypes.py_object

Batch = list[tuple["ChunkLayout", int]]
"""Chunks, each with the slot that it goes into."""


class Sink(Protocol):
    """Receives a capture's chunks: a save of the flusher's client. Called from any thread."""

    @property
    def number(self) -> int:
        """The number of the save."""

    @property
    def since(self) -> int:
        """The number of the last save that is committed; 0: none."""

    def chunks(self, filled: list[Filled]) -> None:
        """Take over filled slots from the capture."""

    def unchanged(
        self, of: int, chunks: Sequence[tuple[int, int, int]]
    ) -> frozenset[tuple[int, int]]:
        """Return which of these chunks, equal to those of save `of`, are not wanted."""

    def captured(self, timing: CaptureTiming) -> None: ...

    def failed(self, error: LaststepError) -> None: ...


@dataclass(slots=True)
class CaptureTiming:
    """The measured cost of a capture to training."""

    stall_s: float = 0.0
    """The training thread, in save()."""
    waited_s: float = 0.0
    """Part of `stall_s` spent waiting for room in the pool or for an earlier capture."""
    device_copy_s: float = 0.0
    """The training stream, copying on the device."""
    fence_s: float = 0.0
    """The training stream, held back before the optimizer's step."""
    drained_s: float = 0.0
    """From save() until all bytes were in host memory."""
    unchanged_bytes: int = 0
    """Bytes that stayed on the device because the last checkpoint has them."""


@dataclass(slots=True)
class Job:
    """A capture; the module docstring says which thread owns what. The first error is final."""

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
    views: dict[int, torch.Tensor] = field(default_factory=dict)
    """Those of `direct`."""
    staging: dict[str, torch.Tensor] = field(default_factory=dict)
    filled: set[Place] = field(default_factory=set)
    """Chunks that the training thread has filled and handed over."""
    aside: dict[Place, torch.Tensor] = field(default_factory=dict)
    """The host's part of chunks that a device fills as well."""
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
    enqueued: threading.Event = field(default_factory=threading.Event)
    over: threading.Event = field(default_factory=threading.Event)
    error: LaststepError | None = None

    def hold_back(self) -> None:
        """Block, in the fence, until the copies of the state are ordered before any change."""
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

    def let_go(self) -> None:
        """Release the state's memory after the copies: a report may keep this job for long."""
        self.sources = ()
        for memory in (self.direct, self.views, self.rings, self.staging, self.aside):
            memory.clear()
        self.host_before.clear()


class Mover:
    def __init__(self, pool: Pool, streams: SideStreams) -> None:
        self._pool = pool
        self._streams = streams

    def lease(self, job: Job, at_most: int = 1) -> list[int]:
        """Lease slots in order: wait for one, take more if free. Hold them until handed over."""
        # Training waits, or will, unless all state is staged, which can take its time.
        slot = self._pool.lease(for_save=True, urgent=bool(job.layout.direct))
        if slot is None:
            raise StorageError("no host memory became free")
        slots = sorted([slot, *self._pool.slots.lease_more(at_most - 1)])
        job.held.update(slots)
        return slots

    def settle(self, job: Job) -> None:
        """After an error, wait until no copy runs into a slot that is given back."""
        for device in job.ready:
            for stream in self._streams.both(device):
                stream.synchronize()
        self._pool.slots.release(*sorted(job.held))
        job.held.clear()

    def move(self, job: Job) -> None:
        """Fill every chunk that is not filled yet; hand each over when its copies have ended."""
        for device, ready in job.ready.items():
            for stream in self._streams.both(device):
                stream.wait_event(ready)
        at_once = min([_BATCH, *(ring.at_once for ring in job.rings.values())])
        done = job.filled | self._unchanged(job)
        todo = [chunk for chunk in job.layout.chunks if (chunk.file, chunk.start) not in done]
        flying: deque[tuple[Batch, list[torch.cuda.Event]]] = deque()
        while todo:
            if job.cancelled:
                raise AbortedError("save() was interrupted")
            # In a small pool only what is handed over comes back: never wait with all in hand.
            while flying and not self._pool.slots.free:
                self.hand_over(job, *flying.popleft())
            slots = self.lease(job, min(at_once, len(todo)))
            batch = list(zip(todo, slots, strict=False))
            del todo[: len(slots)]
            # A lazy capture holds the optimizer back until all its copies are enqueued: no pause.
            if flying and not job.rings:
                # Leave a gap without copies on the device. The copy engine serves another stream
                # only then: a `loss.item()` would otherwise wait for the whole capture.
                for event in flying[-1][1]:
                    event.synchronize()
            flying.append((batch, self._fill(job, batch)))
            while len(flying) > 1 and not job.rings:
                self.hand_over(job, *flying.popleft())
        for device in job.layout.direct:
            if device != "cpu":
                # What is in a ring may change where it came from.
                lazy = device in job.rings
                stream = self._streams.filling(device) if lazy else self._streams.stream(device)
                job.copied[device] = record(stream)
        job.enqueued.set()
        while flying:
            self.hand_over(job, *flying.popleft())
        self._prove(job)
        for device, began in job.staging_began.items():
            job.timing.device_copy_s += began.elapsed_time(job.ready[device]) / 1e3

    def _unchanged(self, job: Job) -> frozenset[Place]:
        """Return the chunks that the last checkpoint already has; they stay on their device. None
        with lazy copies, because training then waits for this thread."""
        if job.looks is None or job.layout.direct:
            return frozenset()
        since, same = job.looks.unchanged(job.staging, self._streams, job.sink)
        if not same:
            return frozenset()
        sizes = {(c.file, c.start): c.size_bytes for c in job.layout.chunks}
        chunks = [(file, start, sizes[file, start]) for file, start in sorted(same)]
        stay = job.sink.unchanged(since, chunks)
        job.timing.unchanged_bytes = sum(sizes[place] for place in stay)
        return stay

    def _fill(self, job: Job, batch: Batch) -> list[torch.cuda.Event]:
        """Enqueue the copies into these slots; return the events that signal their end."""
        used: set[str] = set()
        staged: dict[str, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for chunk, slot in batch:
            target = self._pool.tensor(slot)
            for part in chunk.staged:
                places, parts = staged.setdefault(part.device, ([], []))
                places.append(target[part.at : part.at + part.size_bytes])
                parts.append(job.staging[part.device][part.start : part.start + part.size_bytes])
            if chunk.direct:
                used |= self._fill_direct(job, chunk, slot)
        for device in job.rings:
            if self._pass_through(job, device, batch):
                used.add(device)
        for device, (places, parts) in staged.items():
            if device == "cpu":
                copy_each(places, parts)
                continue
            used.add(device)
            with torch.cuda.stream(self._streams.stream(device)):
                copy_each(places, parts, non_blocking=True)
        return [record(self._streams.stream(device)) for device in used]

    def _fill_direct(self, job: Job, chunk: ChunkLayout, slot: int) -> set[str]:
        """Copy pieces that are neither staged nor pass through a ring; return their devices."""
        used: set[str] = set()
        target = self._pool.tensor(slot)
        aside = job.aside.pop((chunk.file, chunk.start), None)
        for group in chunk.direct:
            if group.device == "cpu" and aside is None:
                land(self._pool, job, group, slot)
            elif group.device == "cpu" and aside is not None:
                window = slice(group.start, group.stop)
                copy_each([target[window]], [aside[window]])
            elif group.device not in job.rings:
                used.add(group.device)
                with torch.cuda.stream(self._streams.stream(group.device)):
                    gather(target, [group], job.views)
        return used

    def _pass_through(self, job: Job, device: str, batch: Batch) -> bool:
        """Enqueue the copies through a device's ring; return False if there are none."""
        ring = job.rings[device]
        numbers = ring.route.numbers
        through = [
            (numbers[chunk.file, chunk.start], self._pool.tensor(slot))
            for chunk, slot in batch
            if (chunk.file, chunk.start) in numbers
        ]
        if not through:
            return False
        pieces = ring.route.pieces(through[0][0], through[-1][0] + 1)
        gone = [piece for piece in sorted(pieces) if not job.direct[piece].in_place()]
        if gone:
            raise torn(job, gone, found="its memory was freed or moved")
        with torch.cuda.device(device):
            filling, emptying = self._streams.filling(device), self._streams.stream(device)
            ring.pass_through(through, job.direct, filling, emptying)
        return True

    def hand_over(self, job: Job, batch: Batch, events: list[torch.cuda.Event]) -> None:
        """Give chunks to the flusher once the copies into their slots have ended."""
        for event in events:
            event.synchronize()
        job.held.difference_update([slot for _, slot in batch])
        job.sink.chunks([Filled(c.file, c.start, c.size_bytes, slot) for c, slot in batch])

    def _prove(self, job: Job) -> None:
        """Raise unless the bytes that passed through rings are those of `save()`."""
        for device, ring in job.rings.items():
            with torch.cuda.device(device), torch.cuda.stream(self._streams.filling(device)):
                changed = ring.changed()
            if changed:
                raise torn(job, changed)


def land(pool: Pool, job: Job, group: StagingGroup, slot: int) -> None:
    """Copy pieces of the host lazily into a slot, and prove what landed there."""
    size, at = DTYPES[group.dtype].size_bytes, group.start
    ranges: list[tuple[int, int]] = []
    for span in group.spans:
        source = job.direct[span.piece]
        if not source.in_place():
            raise torn(job, [span.piece], found="its memory was freed or moved")
        ranges.append((source.address + span.first * size, (span.last - span.first) * size))
    if not pool.land(slot, at, ranges):
        raise torn(job, [span.piece for span in group.spans], found="memory was freed meanwhile")
    landed = pool.view(slot)
    for span, (_, length) in zip(group.spans, ranges, strict=True):
        before = job.host_before[span.piece, span.first, span.last]
        if digest(landed[at : at + length]) != before:
            raise torn(job, [span.piece])
        at += length


def host_digest(address: int, size_bytes: int) -> bytes:
    """Digest memory by address: a tensor that was converted to an array cannot be resized again."""
    return digest(_look_at(address, size_bytes, _READ))


def torn(job: Job, changed: list[int], *, found: str | None = None) -> TornCaptureError:
    names = (f"{item.name}/{piece.name}" for item in job.plan.items for piece in item.pieces)
    more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
    return TornCaptureError(
        "the state changed while it was captured lazily",
        where=next(itertools.islice(names, changed[0], None)) + more,
        expected="no change between save() and the next optimizer step",
        found=found,
        remedy="later saves of this run block until they are captured; "
        "capture='device' or 'blocking' avoids this one",
    )
