"""Copy one capture's bytes into slots of the pool, prove them, and hand the slots over.

Knows nothing of other captures or of how modes are chosen. Runs on the capture thread; copying
threads also lease and hand over the chunks that they fill. A slot is handed over only after the
copies into it have ended. Lazy copies are proven by the bytes that landed: in the ring for a
device, in the slot for the host.
"""

from __future__ import annotations

import ctypes
from collections import deque
from typing import TYPE_CHECKING

import torch

from laststep.capture.device import record
from laststep.capture.exact import copy_each
from laststep.capture.gather import gather
from laststep.capture.sources import Views
from laststep.codecs.digests import digest
from laststep.constants import DTYPES
from laststep.errors import AbortedError, StorageError, TornCaptureError
from laststep.memory.slots import Filled

if TYPE_CHECKING:
    from laststep.capture.device import SideStreams
    from laststep.capture.job import Job
    from laststep.capture.layout import ChunkLayout, StagingGroup
    from laststep.memory.pool import Pool

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


class Mover:
    """Fills slots of a pool, on side streams."""

    def __init__(self, pool: Pool, streams: SideStreams) -> None:
        self._pool = pool
        self._streams = streams

    def lease(self, job: Job, at_most: int = 1) -> list[int]:
        """Lease slots for this job, in order: wait for one, and take more if they are free. They
        are held until they are handed over."""
        slot = self._pool.lease(for_save=True, urgent=job.urgent())
        if slot is None:
            raise StorageError("no host memory became free")
        slots = sorted([slot, *self._pool.lease_more(at_most - 1)])
        job.held.update(slots)
        return slots

    def settle(self, job: Job) -> None:
        """After an error, wait until no copy runs into a slot that is given back."""
        for device in job.ready:
            for stream in self._streams.both(device):
                stream.synchronize()
        self._pool.slots.release(sorted(job.held))
        job.held.clear()

    def move(self, job: Job) -> None:
        """Fill every chunk that is not filled yet; hand each over when its copies have ended."""
        for device, ready in job.ready.items():
            for stream in self._streams.both(device):
                stream.wait_event(ready)
        at_once = min([_BATCH, *(ring.at_once for ring in job.rings.values())])
        stay = self._unchanged(job)
        todo = [c for c in job.chunks() if (c.file, c.start) not in job.filled | stay]
        flying: deque[tuple[Batch, list[torch.cuda.Event]]] = deque()
        while todo:
            if job.cancelled:
                raise AbortedError("save() was interrupted")
            # In a small pool only what is handed over comes back: never wait with all in hand.
            while flying and self._pool.slots.free == 0:
                self.hand_over(job, *flying.popleft())
            slots = self.lease(job, min(at_once, len(todo)))
            batch = list(zip(todo, slots, strict=False))
            del todo[: len(slots)]
            # A lazy capture holds the optimizer back until all its copies are enqueued: no pause.
            if flying and not job.rings:
                _let_others_copy(flying[-1][1])
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
        self._read_timers(job)

    def _unchanged(self, job: Job) -> frozenset[tuple[int, int]]:
        """Return the chunks that the last checkpoint already has; they stay on their device. Not
        used with lazy copies, because training then waits for this thread."""
        if job.looks is None or job.layout.direct:
            return frozenset()
        found, since = job.looks.look(job, self._streams), job.sink.since
        same = set(job.looks.unchanged(found, since))
        job.looks.keep(job.sink.number, found)
        if not same:
            return frozenset()
        sizes = {(c.file, c.start): c.size_bytes for c in job.chunks()}
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
            used.update(self._fill_direct(job, chunk, slot))
        for device in job.rings:
            used.update(self._pass_through(job, device, batch))
        for device, (places, parts) in staged.items():
            if device == "cpu":
                copy_each(places, parts)
                continue
            used.add(device)
            with torch.cuda.stream(self._streams.stream(device)):
                copy_each(places, parts, non_blocking=True)
        return [record(self._streams.stream(device)) for device in used]

    def _fill_direct(self, job: Job, chunk: ChunkLayout, slot: int) -> set[str]:
        """Copy, or enqueue copies of, pieces that are neither staged nor pass through a ring;
        return their devices."""
        used: set[str] = set()
        aside = job.aside.pop((chunk.file, chunk.start), None)
        for group in chunk.direct:
            target = self._pool.tensor(slot)
            if group.device == "cpu" and aside is None:
                land(self._pool, job, group, slot)
            elif group.device == "cpu" and aside is not None:
                window = slice(group.start, group.stop)
                copy_each([target[window]], [aside[window]])
            elif group.device not in job.rings:
                used.add(group.device)
                with torch.cuda.stream(self._streams.stream(group.device)):
                    gather(target, [group], Views(job.direct))
        return used

    def _pass_through(self, job: Job, device: str, batch: Batch) -> set[str]:
        """Enqueue the copies of chunks that pass through a device's ring; return the device, if
        there are any."""
        ring = job.rings[device]
        numbers = ring.route.numbers
        through = [
            (numbers[chunk.file, chunk.start], self._pool.tensor(slot))
            for chunk, slot in batch
            if (chunk.file, chunk.start) in numbers
        ]
        if not through:
            return set()
        pieces = ring.route.pieces(through[0][0], through[-1][0] + 1)
        gone = [piece for piece in sorted(pieces) if not job.direct[piece].in_place()]
        if gone:
            raise torn(job, gone, found="its memory was freed or moved")
        with torch.cuda.device(device):
            filling, emptying = self._streams.filling(device), self._streams.stream(device)
            ring.pass_through(through, job.direct, filling, emptying)
        return {device}

    def hand_over(self, job: Job, batch: Batch, events: list[torch.cuda.Event]) -> None:
        for event in events:
            event.synchronize()
        self._pool.seal(slot for _, slot in batch)
        job.held.difference_update(slot for _, slot in batch)
        job.sink.chunks([Filled(c.file, c.start, c.size_bytes, slot) for c, slot in batch])

    def _prove(self, job: Job) -> None:
        """Raise unless the bytes that passed through rings are those that were there at
        `save()`."""
        for device, ring in job.rings.items():
            with torch.cuda.device(device), torch.cuda.stream(self._streams.filling(device)):
                changed = ring.changed()
            if changed:
                raise torn(job, changed)

    def _read_timers(self, job: Job) -> None:
        for device, began in job.staging_began.items():
            job.timing.device_copy_s += began.elapsed_time(job.ready[device]) / 1e3


def _let_others_copy(events: list[torch.cuda.Event]) -> None:
    """Leave a gap without copies on the device by waiting for those in flight. The copy engine
    serves another stream only then: a `loss.item()` would otherwise wait for the whole capture."""
    for event in events:
        event.synchronize()


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
    """Return the digest of host memory by its address: a tensor that was converted to an array can
    never be resized again."""
    return digest(_look_at(address, size_bytes, _READ))


def torn(job: Job, changed: list[int], *, found: str | None = None) -> TornCaptureError:
    """Return the error for pieces whose copies differ from the state at `save()`."""
    more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
    return TornCaptureError(
        "the state changed while it was captured lazily",
        where=job.full_name(changed[0]) + more,
        expected="no change between save() and the next optimizer step",
        found=found,
        remedy="later saves of this run block until they are captured; "
        "capture='device' or 'blocking' avoids this one",
    )
