"""Move one capture's bytes into slots of the pool, prove them, and hand the slots over.

Knows nothing of how a way is chosen or of other captures. Runs on the capture thread, except that
copying threads lease and hand over the chunks that they fill. A slot is handed over only when the
copies into it have ended.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import torch

from laststep.codecs.digests import digest
from laststep.engine.copy.device import record
from laststep.engine.copy.gather import gather, windows
from laststep.engine.wire import Filled
from laststep.errors import Aborted, StorageFailed, Torn

if TYPE_CHECKING:
    from laststep.engine.copy.device import SideStreams
    from laststep.engine.copy.job import Job
    from laststep.engine.copy.layout import ChunkLayout, Group
    from laststep.engine.pool import Pool

_BATCH = 8
"""Chunks that are copied, waited for and handed over together: what the capture thread does in
Python takes the GIL from training, so it does little."""
_IN_FLIGHT = 3
"""Batches whose copies may be under way before the oldest is waited for."""


Batch = list[tuple["ChunkLayout", int]]
"""Chunks, each with the slot that it goes into."""


class Mover:
    """Fills slots of a pool, on side streams."""

    def __init__(self, pool: Pool, streams: SideStreams) -> None:
        self._pool = pool
        self._streams = streams

    def lease(self, job: Job, at_most: int = 1) -> list[int]:
        """Slots for this job, in order: one that is waited for, and more if there are any. They
        are held until they are handed over."""
        slot = self._pool.lease(urgent=job.urgent())
        if slot is None:
            raise StorageFailed("no host memory became free")
        slots = sorted([slot, *self._pool.slots.lease_more(at_most - 1)])
        job.held.update(slots)
        return slots

    def settle(self, job: Job) -> None:
        """After an error: no copy may still run into a slot that is given back."""
        for device in job.ready:
            self._streams.stream(device).synchronize()
        self._pool.slots.release(sorted(job.held))
        job.held.clear()

    def move(self, job: Job) -> None:
        """Fill every chunk that is not filled yet; hand each over when its copies have ended."""
        for device, ready in job.ready.items():
            self._streams.stream(device).wait_event(ready)
        todo = [c for c in job.chunks() if (c.file, c.start) not in job.filled]
        flying: deque[tuple[Batch, list[torch.cuda.Event]]] = deque()
        while todo:
            if job.cancelled:
                raise Aborted("save() was interrupted")
            # In a small pool only what is handed over comes back: never wait with all in hand.
            while flying and self._pool.slots.free == 0:
                self.hand_over(job, *flying.popleft())
            slots = self.lease(job, min(_BATCH, len(todo)))
            batch = list(zip(todo, slots, strict=False))
            del todo[: len(slots)]
            flying.append((batch, self._fill(job, batch)))
            # A lazy capture holds the optimizer back until all its copies are enqueued: no pause.
            while len(flying) > _IN_FLIGHT and not job.before:
                self.hand_over(job, *flying.popleft())
        after = self._after(job)
        for device in job.layout.direct:
            if device != "cpu":
                job.copied[device] = record(self._streams.stream(device))
        job.enqueued.set()
        while flying:
            self.hand_over(job, *flying.popleft())
        self._prove(job, after)
        self._read_timers(job)

    def _fill(self, job: Job, batch: Batch) -> list[torch.cuda.Event]:
        """Enqueue the copies into these slots; the events that say when they have ended."""
        used: set[str] = set()
        staged: dict[str, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for chunk, slot in batch:
            target = self._pool.tensor(slot)
            for part in chunk.staged:
                places, parts = staged.setdefault(part.device, ([], []))
                places.append(target[part.at : part.at + part.size_bytes])
                parts.append(job.staging[part.device][part.start : part.start + part.size_bytes])
            used.update(self._fill_direct(job, chunk, target))
        for device, (places, parts) in staged.items():
            if device == "cpu":
                torch._foreach_copy_(places, parts)
                continue
            used.add(device)
            with torch.cuda.stream(self._streams.stream(device)):
                torch._foreach_copy_(places, parts, non_blocking=True)
        return [record(self._streams.stream(device)) for device in used]

    def _fill_direct(self, job: Job, chunk: ChunkLayout, target: torch.Tensor) -> set[str]:
        """Enqueue the copies of pieces that are not staged; the devices that they come from."""
        used: set[str] = set()
        aside = job.aside.pop((chunk.file, chunk.start), None)
        for group in chunk.direct:
            if group.device == "cpu":
                if aside is not None:
                    target[group.start : group.stop].copy_(aside[group.start : group.stop])
                else:
                    gather(target, [group], job.sources)
                    self._prove_host(job, group, target)
                continue
            used.add(group.device)
            with torch.cuda.stream(self._streams.stream(group.device)):
                gather(target, [group], job.sources)
        return used

    def hand_over(self, job: Job, batch: Batch, events: list[torch.cuda.Event]) -> None:
        for event in events:
            event.synchronize()
        job.held.difference_update(slot for _, slot in batch)
        job.sink.chunks([Filled(c.file, c.start, c.size_bytes, slot) for c, slot in batch])

    def _after(self, job: Job) -> dict[str, torch.Tensor]:
        after: dict[str, torch.Tensor] = {}
        for device, (fingerprint, _) in job.before.items():
            with torch.cuda.device(device), torch.cuda.stream(self._streams.stream(device)):
                tensors = [job.sources[piece] for piece in job.layout.direct[device]]
                after[device] = fingerprint.rows(tensors)
        return after

    def _prove(self, job: Job, after: dict[str, torch.Tensor]) -> None:
        """Lazy copies count only if the state was the same before and after them."""
        for device, (fingerprint, before) in job.before.items():
            with torch.cuda.device(device), torch.cuda.stream(self._streams.stream(device)):
                same = (before == after[device]).all(dim=1).cpu().tolist()
            pieces = job.layout.direct[device]
            owners = zip(fingerprint.owners, same, strict=True)
            changed = list(dict.fromkeys(pieces[owner] for owner, ok in owners if not ok))
            if changed:
                raise _torn(job, changed)

    def _prove_host(self, job: Job, group: Group, target: torch.Tensor) -> None:
        for span, copied in zip(group.spans, windows(target, group), strict=True):
            before = job.host_before.get((span.piece, span.first, span.last))
            if before is not None and host_digest(copied) != before:
                raise _torn(job, [span.piece])

    def _read_timers(self, job: Job) -> None:
        for device, began in job.staging_began.items():
            job.timing.device_copy_s += began.elapsed_time(job.ready[device]) / 1e3


def host_digest(flat: torch.Tensor) -> bytes:
    return digest(flat.view(torch.uint8).numpy().data)


def _torn(job: Job, changed: list[int]) -> Torn:
    more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
    return Torn(
        "the state changed while it was captured lazily",
        where=job.full_name(changed[0]) + more,
        expected="no change between save() and the next optimizer step",
        remedy="later saves of this run block until they are captured; "
        "capture='device' or 'blocking' avoids this one",
    )
