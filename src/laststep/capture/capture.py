"""Take a consistent copy of the state while training continues.

`Capturer.take` runs on the training thread and returns as soon as the state may change again or is
fenced. One capture thread copies staged and lazy state into slots of the pool, one job after the
other. Each capture mode has its own proof that the stored bytes are the state at `save()`: stream
order for device staging, the copy itself for state that is copied at once, and for lazy copies the
fence and the fingerprint of the bytes that landed.
"""

from __future__ import annotations

import functools
import logging
import os
import queue
import time
from concurrent.futures import Future, wait
from itertools import chain
from typing import TYPE_CHECKING

import torch

from laststep.capture.copies import Early
from laststep.capture.device import DeviceShort, DeviceStaging, SideStreams, record
from laststep.capture.fence import Fence
from laststep.capture.gather import fill, hold_all
from laststep.capture.kernels import prepare_kernels
from laststep.capture.layout import choose
from laststep.capture.mover import Job, Mover, Sink, host_digest, torn
from laststep.capture.ring import RING_CHUNKS, Ring, Route, chunks_through, ring_chunks
from laststep.constants import CHUNK_BYTES, DTYPES
from laststep.errors import LaststepError, StorageError, TornCaptureError, UsageError
from laststep.process import signals, system, threads
from laststep.settings import Capture
from laststep.state.tensors import in_batches

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from laststep.capture.copies import Copies
    from laststep.capture.layout import ChunkLayout
    from laststep.memory.pool import Pool

log = logging.getLogger(__name__)

_MAX_COPIERS = 4


class Capturer:
    """Captures saves into a pool, one after the other."""

    def __init__(self, pool: Pool, *, mode: Capture, margin_bytes: int) -> None:
        self._pool = pool
        self._mode = mode
        self._margin = margin_bytes
        self._fence = Fence()
        self._streams = SideStreams()
        self._mover = Mover(pool, self._streams)
        self._staging: dict[str, DeviceStaging] = {}
        self._copiers = threads.WorkerPool("copy", min(_MAX_COPIERS, os.cpu_count() or 1))
        self._torn = False
        self._last: Job | None = None
        self._devices: tuple[str, ...] = ()
        self._jobs: queue.SimpleQueue[Job | Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threads.Worker("capture", self._work)

    def start(self, expected_bytes: dict[str, int]) -> bool:
        staged = self.expect(expected_bytes)
        self._devices = tuple(expected_bytes)
        self._thread.start()
        return staged

    def expect(self, expected_bytes: dict[str, int]) -> bool:
        """Reserve the expected bytes on each device if they are spare. Return False if they are
        not, or not wanted: captures then need all their host memory at once."""
        wanted = staged = self._mode in (Capture.AUTO, Capture.DEVICE)
        for device, size in expected_bytes.items():
            staging = self._staging_on(device)
            fits = wanted and staging.set_aside(size)
            staged = staged and fits
            if not fits and self._mode in (Capture.AUTO, Capture.LAZY):
                staging.set_aside(min(RING_CHUNKS * CHUNK_BYTES, size))
        return staged

    @system.translate_oom("capture the state")
    def take(
        self, copies: Copies, sources: Sequence[torch.Tensor], sink: Sink, early: Early | None
    ) -> Job:
        """Capture the state as it is now; copies that are still to be made are behind the fence."""
        began = time.perf_counter()
        # Lazy capture needs the fence, which works only if its hook was seen to fire.
        fired = self._fence.take_evidence()
        lazy = fired and not self._torn and self._mode in (Capture.AUTO, Capture.LAZY)
        if early is not None and not (
            early.of is copies.remembered and early.of.are_among(sources, early.sources)
        ):
            self.cancel(early)
            early = None
        if early is None:
            copies.remembered = None  # from here on the tables may be those of these sources
            self._choose(copies)
        job = Job(copies.plan, copies.layout, sources, sink, began, copies.looks)
        try:
            self._stage_or_choose_again(job, copies, early)
            if early is None:
                copies.remember(sources)
            self._hold_direct(job)
            devices = [device for device in job.layout.direct if device != "cpu"]
            rings = lazy and self._take_rings(job, copies, devices)
            for device in devices:
                with torch.cuda.device(device):
                    job.ready[device] = record(torch.cuda.current_stream(), timing=True)
            host_lazy = lazy and self._mode is Capture.LAZY and "cpu" in job.layout.direct
            if host_lazy:
                self._digest_host(job)
            elif "cpu" in job.layout.direct:
                self._fill_from_host(job)
        except BaseException:
            self._pool.slots.release(*sorted(job.held))
            self._let_go(job)
            raise
        self._last = job
        if (rings and devices) or host_lazy:
            self._fence.add(job)
        self._jobs.put(job)
        if devices and not rings:
            self._wait_for(job)
        job.timing.stall_s = time.perf_counter() - began
        return job

    def join(self, streams: Sequence[torch.cuda.Stream]) -> None:
        """Make the current streams wait for these, on which state was also written."""
        for stream in streams:
            torch.cuda.current_stream(stream.device).wait_stream(stream)

    def start_early(self, copies: Copies) -> Early | None:
        """Start staging on the guess that no tensor has moved since the last save; `take` copies
        again if it was wrong. Memory that moved or was freed is never read: every tensor is held
        and its address compared before the launch."""
        known = copies.remembered
        sources = None if known is None else known.in_place()
        if known is None or sources is None:
            return None
        sizes = {d: n for d, n in known.layout.staging_bytes.items() if d != "cpu"}
        if any(self._staging_on(device).room() < size for device, size in sizes.items()):
            return None
        early = Early(known, sources)
        try:
            for device, size in sizes.items():
                with torch.cuda.device(device):
                    buffer = early.staging[device] = self._staging_on(device).take(size)
                    began = record(torch.cuda.current_stream(), timing=True)
                    copies.gatherers[device].run_again(buffer)
                    early.events[device] = began, record(torch.cuda.current_stream(), timing=True)
        except DeviceShort:
            self.cancel(early)
            self._forget_staging(copies)
            return None
        except BaseException:
            self.cancel(early)
            raise
        return early

    def cancel(self, early: Early) -> None:
        """Discard an early copy; stream order keeps its memory until the copies end."""
        self._give_back(early.staging)

    def settle(self) -> None:
        """Wait until everything that was taken is captured or has failed."""
        if self._last is not None:
            signals.wait(self._last.over)

    def at_optimizer_step(self, number: int, errand: Callable[[], bool]) -> None:
        """Run `errand` just before that optimizer step, and again later if it returns False."""
        self._fence.at_step(number, errand)

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join()
        self._copiers.close()
        self._fence.close()

    def _choose(self, copies: Copies) -> None:
        """Choose the capture mode of each piece; keep the previous choice while it still fits."""
        if copies.needs is not None and all(
            self._staging_on(device).room() >= need for device, need in copies.needs.items()
        ):
            return
        pieces = copies.plan.pieces
        devices = dict.fromkeys([piece.device for piece in pieces if piece.device != "cpu"])
        rooms = {device: self._room_on(device, copies) for device in devices}
        copies.go(*choose(pieces, self._mode, rooms))

    def _room_on(self, device: str, copies: Copies) -> int:
        """Return how much of a device may be used for staging, beside a ring if any is lazy."""
        room = self._staging_on(device).room()
        needed = sum(piece.size_bytes for piece in copies.plan.pieces if piece.device == device)
        lazy = needed > room and self._mode is Capture.AUTO
        return max(room - RING_CHUNKS * CHUNK_BYTES, 0) if lazy else room

    def _staging_on(self, device: str) -> DeviceStaging:
        if not device.startswith("cuda"):
            raise UsageError(
                "cannot capture from this kind of device", found=device, expected="cpu or cuda"
            )
        if device not in self._staging:
            self._staging[device] = DeviceStaging(device, self._margin)
            if self._thread.is_alive() and device not in self._devices:
                # Nobody expected it at construction: this save goes slowly, later ones do not.
                self._pool.pin()
                self._jobs.put(functools.partial(prepare_kernels, torch.device(device)))
        return self._staging[device]

    def _stage_or_choose_again(self, job: Job, copies: Copies, early: Early | None) -> None:
        """Stage; if training has taken the reserved memory, choose again with what is left."""
        try:
            self._stage(job, copies, early)
        except DeviceShort:
            self._forget_staging(copies)
            self._give_back(job.staging)
            if self._mode is not Capture.AUTO:
                raise
            self._choose(copies)
            job.layout, job.looks = copies.layout, copies.looks
            self._stage(job, copies, None)

    def _stage(self, job: Job, copies: Copies, early: Early | None) -> None:
        """Copy the staged pieces on the stream that training uses, so that stream order holds."""
        if early is not None:
            # All of it is this job's now, to be given back with it.
            job.staging.update(early.staging)
            early.staging.clear()
        for device, size in job.layout.staging_bytes.items():
            gatherer = copies.gatherers[device]
            if device == "cpu":
                job.staging[device] = torch.empty(size, dtype=torch.uint8)
                gatherer.run(job.staging[device], job.sources, None)
                continue
            if early is not None:
                job.staging_began[device], job.ready[device] = early.events[device]
                continue
            with torch.cuda.device(device):
                job.staging[device] = self._staging_on(device).take(size)
                job.staging_began[device] = record(torch.cuda.current_stream(), timing=True)
                gatherer.run(job.staging[device], job.sources, self._streams.stream(device))
                job.ready[device] = record(torch.cuda.current_stream(), timing=True)

    def _forget_staging(self, copies: Copies) -> None:
        for staging in self._staging.values():
            staging.forget()
        copies.needs = None

    def _give_back(self, buffers: dict[str, torch.Tensor]) -> None:
        for device, buffer in buffers.items():
            if device != "cpu":
                self._staging[device].give_back(buffer.nbytes)
        buffers.clear()

    def _let_go(self, job: Job) -> None:
        """Return staging memory and release live tensors after the copies have ended."""
        self._give_back(job.staging)
        self._give_back({device: ring.memory for device, ring in job.rings.items()})
        job.let_go()

    def _hold_direct(self, job: Job) -> None:
        """Hold the tensors that are copied after planning, as they are now."""
        sources, pieces = job.sources, job.plan.pieces
        for some in chain.from_iterable(map(in_batches, job.layout.direct.values())):
            held = hold_all([sources[n] for n in some], [pieces[n] for n in some])
            if held is None:
                wrong = [n for n in some if hold_all([sources[n]], [pieces[n]]) is None]
                changed = wrong or some[:1]
                tensor = sources[changed[0]]
                raise torn(job, list(changed), found=f"{tuple(tensor.shape)} of {tensor.dtype}")
            job.direct.update(zip(some, held, strict=True))
            job.views.update((n, live.tensor) for n, live in zip(some, held, strict=True))

    def _take_rings(self, job: Job, copies: Copies, devices: list[str]) -> bool:
        """Allocate rings and fingerprint the live memory; return False if a device has no room."""
        for device in devices:
            staging = self._staging_on(device)
            wanted = len(chunks_through(job.layout, device))
            count = ring_chunks(wanted, staging.room(with_margin=True))
            with torch.cuda.device(device):
                try:
                    memory = staging.take(count * CHUNK_BYTES) if count else None
                except DeviceShort:
                    memory = None
                if memory is None:
                    log.warning(
                        "save() blocks: %s has no room for what a lazy capture needs", device
                    )
                    self._give_back({device: ring.memory for device, ring in job.rings.items()})
                    job.rings.clear()
                    return False
                try:
                    route = copies.routes.get(device)
                    if route is None or not route.fits(job.layout, job.direct, memory):
                        stream = self._streams.filling(device)
                        route = Route(job.layout, device, job.direct, memory, stream)
                        copies.routes[device] = route
                    job.rings[device] = Ring(route, memory, job.direct)
                except BaseException:
                    staging.give_back(memory.nbytes)
                    raise
        return True

    def _digest_host(self, job: Job) -> None:
        for group in (g for c in job.layout.chunks for g in c.direct if g.device == "cpu"):
            size = DTYPES[group.dtype].size_bytes
            for span in group.spans:
                start = job.direct[span.piece].address + span.first * size
                before = host_digest(start, (span.last - span.first) * size)
                job.host_before[span.piece, span.first, span.last] = before

    def _fill_from_host(self, job: Job) -> None:
        """Copy unstaged host state straight into slots, and hand over complete chunks. Every thread
        takes the next chunk when it has finished one: a single call of torch would wait for the
        slowest thread, which on a busy machine shares its core with the flusher."""
        began = time.perf_counter()
        if self._last is not None:
            # Slots are leased in the order of saves: the one before must have all of its own.
            signals.wait(self._last.over)
        job.timing.waited_s += time.perf_counter() - began
        chunks = [c for c in job.layout.chunks if any(g.device == "cpu" for g in c.direct)]
        self._copiers.start()
        running: list[Future[None]] = []
        try:
            for chunk in chunks:
                if chunk.staged or any(group.device != "cpu" for group in chunk.direct):
                    running.append(self._copiers.submit(self._set_aside, job, chunk))
                    continue
                began = time.perf_counter()
                (slot,) = self._mover.lease(job)
                job.timing.waited_s += time.perf_counter() - began
                running.append(self._copiers.submit(self._fill_chunk, job, chunk, slot))
        finally:
            # Their threads write into slots, and nobody may have these back before.
            _outlast(lambda: all(copy.done() for copy in running), lambda: wait(running))
        for copy in running:
            copy.result()

    def _fill_chunk(self, job: Job, chunk: ChunkLayout, slot: int) -> None:
        """Fill a chunk that is entirely host state; runs on a copying thread."""
        fill(self._pool.tensor(slot), chunk.direct, job.views)
        self._mover.hand_over(job, [(chunk, slot)], [])
        job.filled.add((chunk.file, chunk.start))

    def _set_aside(self, job: Job, chunk: ChunkLayout) -> None:
        """Copy the host's part of a chunk that waits for a device, one where devices meet in a
        file, into a buffer outside the pool, which may have too few slots to keep one waiting."""
        buffer = torch.empty(chunk.size_bytes, dtype=torch.uint8)
        fill(buffer, [group for group in chunk.direct if group.device == "cpu"], job.views)
        job.aside[chunk.file, chunk.start] = buffer

    def _wait_for(self, job: Job) -> None:
        """Block until a capture is over: its copies read the live state."""

        def wait_once() -> None:
            try:
                signals.wait(job.over)
            except BaseException:
                job.cancelled = True
                raise

        _outlast(job.over.is_set, wait_once)
        if job.error is not None:
            raise job.error

    def _work(self) -> None:
        for device in self._devices:
            prepare_kernels(torch.device(device))
        while (job := self._jobs.get()) is not None:
            with threads.outlasting(log, "a capture could not be ended"):
                if isinstance(job, Job):
                    self._move(job)
                else:
                    job()

    def _move(self, job: Job) -> None:
        try:
            with system.translate_oom("capture the state"):
                self._mover.move(job)
        except LaststepError as error:
            job.error = error
        except BaseException as error:
            job.error = StorageError("a capture failed", found=repr(error))
            log.exception("a capture failed")
        finally:
            self._torn = self._torn or isinstance(job.error, TornCaptureError)
            self._end(job)

    def _end(self, job: Job) -> None:
        """Report how a capture ended and release all it held; waiters are woken in any case."""
        sink, job.timing.drained_s = job.sink, time.perf_counter() - job.began_s
        try:
            try:
                if job.error is not None:
                    self._mover.settle(job)
            finally:
                self._let_go(job)
            if job.error is None:
                sink.captured(job.timing)
        except BaseException as error:
            job.error = job.error or StorageError("a capture failed", found=repr(error))
            raise
        finally:
            try:
                if job.error is not None:
                    sink.failed(job.error)
                del job.sink  # the save, which keeps this job
            finally:
                job.enqueued.set()
                job.over.set()


def _outlast(is_done: Callable[[], bool], wait_once: Callable[[], object]) -> None:
    """Wait until copies have ended, also during Ctrl-C, which is raised afterwards."""
    interrupted: BaseException | None = None
    while not is_done():
        try:
            wait_once()
        except BaseException as raised:  # noqa: BLE001 (raised below, once it is safe)
            interrupted = raised
    if interrupted is not None:
        raise interrupted
