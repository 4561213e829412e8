"""Take a consistent copy of the state while training goes on.

`Capturer.take` runs on the training thread and returns as soon as the state may change again or is
fenced; one capture thread moves what was staged, and copies what is lazy, into slots of the pool and
hands them to the sink, job by job in order. Every way carries its proof that what is stored is the
state at `save()`: stream order for what is staged on the device, the copy itself for what is copied at
once, the fence and equal fingerprints before and after for what is lazy.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Sequence

import torch

from laststep.codecs.digests import digest
from laststep.config import Capture
from laststep.engine.copy.device import SideStreams, record, spare_bytes
from laststep.engine.copy.fence import Fence
from laststep.engine.copy.fingerprint import fingerprints
from laststep.engine.copy.gather import elements, gather, windows
from laststep.engine.copy.job import Job, Sink
from laststep.engine.copy.layout import ChunkLayout, Group, Layout, Way, lower
from laststep.engine.pool import Pool
from laststep.errors import LaststepError, StorageFailed, Torn, Usage
from laststep.plan.save import SavePlan
from laststep.state.pieces import Piece

log = logging.getLogger(__name__)

_HOST_STAGING_BYTES = 64 << 20
"""Up to this much host state is copied aside at save(), outside the pool, rather than into slots."""
_IN_FLIGHT = 8
"""Chunks whose copies may be under way before the oldest is waited for."""


class Capturer:
    """Captures saves, one after the other, into a pool."""

    def __init__(self, pool: Pool, *, mode: Capture, margin_bytes: int) -> None:
        self._pool = pool
        self._mode = mode
        self._margin = margin_bytes
        self._fence = Fence()
        self._streams = SideStreams()
        self._layout: tuple[SavePlan, Layout] | None = None
        self._torn = False
        self._last: Job | None = None
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="laststep-capture", daemon=True)
        self._thread.start()

    def take(
        self,
        plan: SavePlan,
        pieces: Sequence[Piece],
        sink: Sink,
        streams: Sequence[torch.cuda.Stream] = (),
    ) -> Job:
        """Capture the state as it is now. On return training may go on; what the way that was
        chosen still needs is behind the fence. Raises what made the capture impossible."""
        began = time.perf_counter()
        sources = [piece.data for piece in pieces]
        lazy = self._lazy_is_safe()
        ways = self._choose(pieces)
        job = Job(layout=self._lower(plan, ways), sources=sources, names=[p.name for p in pieces],
                  sink=sink, began_s=began)  # type: ignore[arg-type]  # fmt: skip
        for stream in streams:
            torch.cuda.current_stream(stream.device).wait_stream(stream)
        self._stage(job)
        host_lazy = lazy and self._mode is Capture.LAZY
        has_device_direct = self._mark_devices(job)
        if lazy and (has_device_direct or host_lazy):
            self._prepare_lazy(job, host_lazy)
        if not host_lazy:
            self._fill_from_host(job)
        self._last = job
        if lazy and (has_device_direct or host_lazy):
            self._fence.add(job)
        self._jobs.put(job)
        if has_device_direct and not lazy:
            job.over.wait()
            if job.error is not None:
                raise job.error
        job.timing.stall_s = time.perf_counter() - began
        return job

    def close(self) -> None:
        """Finish what was taken and stop."""
        self._jobs.put(None)
        self._thread.join()
        self._fence.close()

    # -- on the training thread -----------------------------------------------------------------

    def _lazy_is_safe(self) -> bool:
        """Lazy needs the fence, and the fence only works where its hook was seen to fire."""
        fired = self._fence.take_evidence()
        return fired and not self._torn and self._mode in (Capture.AUTO, Capture.LAZY)

    def _choose(self, pieces: Sequence[Piece]) -> tuple[Way, ...]:
        host_bytes = sum(p.size_bytes for p in pieces if p.device == "cpu")
        host_way = Way.DIRECT
        if host_bytes <= _HOST_STAGING_BYTES and self._mode is not Capture.LAZY:
            host_way = Way.STAGED
        spare: dict[str, int] = {}
        ways: list[Way] = []
        for piece in pieces:
            if piece.device == "cpu":
                ways.append(host_way if self._mode is not Capture.LAZY or not piece.volatile else Way.STAGED)
                continue
            if piece.device not in spare:
                spare[piece.device] = self._room(piece.device)
            tensor = piece.data
            # Buffers change in forward, and strided tensors need gathering: neither can wait.
            must = piece.volatile or not tensor.is_contiguous()  # type: ignore[attr-defined]
            fits = spare[piece.device] >= piece.size_bytes
            if must or (fits and self._mode in (Capture.AUTO, Capture.DEVICE)):
                ways.append(Way.STAGED)
                spare[piece.device] -= piece.size_bytes
            elif self._mode is Capture.DEVICE:
                raise Usage(
                    "device memory is short for capture='device'",
                    where=piece.device,
                    expected=f"{sum(p.size_bytes for p in pieces if p.device == piece.device)} spare bytes",
                    found=f"{self._room(piece.device)}",
                    remedy="use capture='auto', which captures lazily what does not fit",
                )
            else:
                ways.append(Way.DIRECT)
        return tuple(ways)

    def _room(self, device: str) -> int:
        if not device.startswith("cuda"):
            raise Usage("cannot capture from this kind of device", found=device, expected="cpu or cuda")
        return spare_bytes(device, self._margin)

    def _lower(self, plan: SavePlan, ways: tuple[Way, ...]) -> Layout:
        known = self._layout
        if known is None or known[0] is not plan or known[1].ways != ways:
            known = self._layout = (plan, lower(plan, ways))
        return known[1]

    def _stage(self, job: Job) -> None:
        """Gather what is staged, on the stream that training uses, so that it stands in order."""
        for device, size in job.layout.staging_bytes.items():
            if device == "cpu":
                job.staging[device] = torch.empty(size, dtype=torch.uint8)
                gather(job.staging[device], job.layout.gathers[device], job.sources)
                continue
            with torch.cuda.device(device):
                job.staging_began[device] = record(torch.cuda.current_stream(), timing=True)
                job.staging[device] = torch.empty(size, dtype=torch.uint8, device=device)
                gather(job.staging[device], job.layout.gathers[device], job.sources)
                job.ready[device] = record(torch.cuda.current_stream(), timing=True)

    def _mark_devices(self, job: Job) -> bool:
        """Whether anything is copied straight from a device; its state is marked on its stream."""
        found = False
        for chunk in job.chunks():
            for group in chunk.direct:
                if group.device != "cpu":
                    found = True
                    if group.device not in job.ready:
                        with torch.cuda.device(group.device):
                            job.ready[group.device] = record(torch.cuda.current_stream(), timing=True)
        return found

    def _prepare_lazy(self, job: Job, host_lazy: bool) -> None:
        devices = {g.device for c in job.chunks() for g in c.direct if g.device != "cpu"}
        for device in devices:
            with torch.cuda.device(device):
                pieces = job.direct_pieces(device)
                job.before[device] = pieces, fingerprints([job.sources[p] for p in pieces])
                job.ready[device] = record(torch.cuda.current_stream(), timing=True)
        if host_lazy:
            for group in (g for c in job.chunks() for g in c.direct if g.device == "cpu"):
                for index, span in enumerate(group.spans):
                    key = (span.piece, span.first, span.last)
                    job.host_before[key] = _host_digest(elements(job.sources[span.piece], group, index))

    def _fill_from_host(self, job: Job) -> None:
        """Copy host state that is not staged straight into slots, and hand over whole chunks."""
        chunks = [c for c in job.chunks() if any(g.device == "cpu" for g in c.direct)]
        if not chunks:
            return
        began = time.perf_counter()
        if self._last is not None:
            # Slots are leased in the order of saves: the one before must have all of its own.
            self._last.over.wait()
        job.timing.waited_s += time.perf_counter() - began
        for chunk in chunks:
            began = time.perf_counter()
            slot = self._lease(job)
            job.timing.waited_s += time.perf_counter() - began
            target = self._pool.tensor(slot)
            host = [group for group in chunk.direct if group.device == "cpu"]
            gather(target, host, job.sources)
            if len(host) == len(chunk.direct) and not chunk.staged:
                self._hand_over(job, chunk, slot, [])
                job.filled[chunk.file, chunk.start] = -1
            else:
                job.filled[chunk.file, chunk.start] = slot

    def _lease(self, job: Job) -> int:
        slot = self._pool.lease()
        if slot is None:
            raise StorageFailed("no host memory became free")
        job.held.add(slot)
        return slot

    # -- on the capture thread --------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            job = self._jobs.get()
            if job is None:
                return
            try:
                self._move(job)
            except LaststepError as error:
                job.error = error
            except Exception as error:
                log.exception("a capture failed")
                job.error = StorageFailed("a capture failed", found=repr(error))
            if isinstance(job.error, Torn):
                self._torn = True
            job.staging.clear()
            job.sources = []
            job.timing.drained_s = time.perf_counter() - job.began_s
            if job.error is not None:
                job.enqueued.set()
                self._settle(job)
                job.sink.failed(job.error)
            else:
                job.sink.captured(job.timing)
            job.over.set()

    def _settle(self, job: Job) -> None:
        """After an error: no copy may still run into a slot that is given back."""
        for device in job.ready:
            self._streams.stream(device).synchronize()
        self._pool.slots.release(sorted(job.held))
        job.held.clear()

    def _move(self, job: Job) -> None:
        """Fill every chunk that is not filled yet, and hand each over when its copies have ended."""
        for device, ready in job.ready.items():
            self._streams.stream(device).wait_event(ready)
        flying: deque[tuple[ChunkLayout, int, list[torch.cuda.Event]]] = deque()
        for chunk in job.chunks():
            slot = job.filled.get((chunk.file, chunk.start))
            if slot == -1:
                continue
            host_done = slot is not None
            if slot is None:
                slot = self._lease(job)
            flying.append((chunk, slot, self._fill(job, chunk, slot, host_done)))
            while len(flying) > _IN_FLIGHT:
                self._hand_over(job, *flying.popleft())
        after = self._after(job)
        for device in {g.device for c in job.chunks() for g in c.direct if g.device != "cpu"}:
            job.copied[device] = record(self._streams.stream(device))
        job.enqueued.set()
        while flying:
            self._hand_over(job, *flying.popleft())
        self._prove(job, after)
        self._read_timers(job)

    def _fill(
        self, job: Job, chunk: ChunkLayout, slot: int, host_done: bool
    ) -> list[torch.cuda.Event]:
        """Enqueue the copies into one slot; the events that say when they have ended."""
        target = self._pool.tensor(slot)
        used: set[str] = set()
        for part in chunk.staged:
            source = job.staging[part.device][part.start : part.start + part.size_bytes]
            into = target[part.at : part.at + part.size_bytes]
            if part.device == "cpu":
                into.copy_(source)
                continue
            used.add(part.device)
            with torch.cuda.stream(self._streams.stream(part.device)):
                into.copy_(source, non_blocking=True)
        for group in chunk.direct:
            if group.device == "cpu":
                if not host_done:
                    gather(target, [group], job.sources)
                    self._prove_host(job, group, target)
                continue
            used.add(group.device)
            with torch.cuda.stream(self._streams.stream(group.device)):
                gather(target, [group], job.sources)
        return [record(self._streams.stream(device)) for device in used]

    def _hand_over(
        self, job: Job, chunk: ChunkLayout, slot: int, events: list[torch.cuda.Event]
    ) -> None:
        for event in events:
            event.synchronize()
        job.held.discard(slot)
        job.sink.chunk(chunk.file, chunk.start, chunk.size_bytes, slot)

    def _after(self, job: Job) -> dict[str, torch.Tensor]:
        after: dict[str, torch.Tensor] = {}
        for device, (pieces, _) in job.before.items():
            with torch.cuda.device(device), torch.cuda.stream(self._streams.stream(device)):
                after[device] = fingerprints([job.sources[p] for p in pieces])
        return after

    def _prove(self, job: Job, after: dict[str, torch.Tensor]) -> None:
        """Lazy copies count only if the state was the same before and after them."""
        for device, (pieces, before) in job.before.items():
            with torch.cuda.device(device), torch.cuda.stream(self._streams.stream(device)):
                same = (before == after[device]).all(dim=1).cpu()
            changed = [job.names[p] for p, ok in zip(pieces, same.tolist(), strict=True) if not ok]
            if changed:
                raise _torn(changed)

    def _prove_host(self, job: Job, group: Group, target: torch.Tensor) -> None:
        for span, copied in zip(group.spans, windows(target, group), strict=True):
            before = job.host_before.get((span.piece, span.first, span.last))
            if before is not None and _host_digest(copied) != before:
                raise _torn([job.names[span.piece]])

    def _read_timers(self, job: Job) -> None:
        for device, began in job.staging_began.items():
            job.timing.device_copy_s += began.elapsed_time(job.ready[device]) / 1e3


def _host_digest(flat: torch.Tensor) -> bytes:
    return digest(memoryview(flat.view(torch.uint8).numpy()))


def _torn(changed: list[str]) -> Torn:
    more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
    return Torn(
        "the state changed while it was captured lazily",
        where=changed[0] + more,
        expected="no change between save() and the next optimizer step",
        remedy="later saves of this run block until they are captured; "
        "capture='device' or 'blocking' avoids this one",
    )
