"""How much memory and disk saves need: estimated at construction, said before the first save."""

from __future__ import annotations

import contextlib
import logging
import mmap
import secrets
import threading
import time
from typing import TYPE_CHECKING, Any

from laststep.errors import LaststepError, StorageError
from laststep.events import Bus, Preflight
from laststep.memory.segments import available_bytes
from laststep.process import threads
from laststep.ranks.rank import ranks_on_this_node
from laststep.settings import MIN_SLOTS, Settings
from laststep.state.items import TrainableProvider, make_late
from laststep.state.tensors import is_module, is_optimizer, share_bytes
from laststep.terms import CHUNK_BYTES
from laststep.watching import human

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from laststep.capture.job import Job
    from laststep.capture.layout import Way
    from laststep.catalog.retention import Keep
    from laststep.flush.saves import SaveReport
    from laststep.ranks.rank import Rank
    from laststep.state.provider import Piece, StateProvider
    from laststep.storage.store import Store

log = logging.getLogger(__name__)

_PROBE_BYTES = 32 << 20


def memory_for(
    providers: Mapping[str, StateProvider], settings: Settings, rank: Rank
) -> tuple[int, int, dict[str, int]]:
    """(cap, bytes of host memory to make ready now, bytes expected on each device); of what all
    ranks hold, each writes a part."""
    share = available_bytes() // 4 // ranks_on_this_node(rank)
    cap = settings.host_memory_bytes or max(share, MIN_SLOTS * CHUNK_BYTES)
    total: dict[str, int] = {}
    for provider in providers.values():
        parts = provider.parts()  # of what is not made yet there are none
        trained_only = bool(parts) and isinstance(make_late(provider), TrainableProvider)
        for part in parts:
            for device, size in _estimate(part, rank.ranks, trained_only=trained_only):
                total[device] = total.get(device, 0) + size
    on_device = {d: size + CHUNK_BYTES for d, size in total.items() if d.startswith("cuda")}
    return cap, sum(total.values()) + 4 * CHUNK_BYTES, on_device


def _estimate(part: Any, ranks: int, *, trained_only: bool) -> list[tuple[str, int]]:
    """(device, bytes) of a module's tensors, or of an optimizer's once it has taken a step, for
    which two moments like the parameter are guessed."""
    if is_module(part):
        tensors = (*part.parameters(), *part.buffers())
        return [
            (str(t.device), share_bytes(t, ranks))
            for t in tensors
            if t.requires_grad or not trained_only
        ]
    if is_optimizer(part):
        parameters = [p for group in part.param_groups for p in group["params"]]
        return [(str(p.device), 2 * share_bytes(p, ranks)) for p in parameters]
    return []


def describe_ways(pieces: Sequence[Piece], ways: Sequence[Way]) -> str:
    """For a report: how many bytes went which way."""
    sums: dict[str, int] = {}
    for piece, way in zip(pieces, ways, strict=True):
        where = "host" if piece.device == "cpu" else "device"
        key = f"{where} {way.value}"
        sums[key] = sums.get(key, 0) + piece.size_bytes
    return ", ".join(f"{key} {human(size)}" for key, size in sums.items())


def report_of(job: Job) -> Callable[[SaveReport], None]:
    """What fills a report with what a capture cost, as far as that is known."""

    def refresh(report: SaveReport) -> None:
        job.read_fence_timers()
        timing = job.timing
        report.capture = report.capture or describe_ways(job.plan.pieces, job.layout.ways)
        report.stall_s, report.waited_s = timing.stall_s, timing.waited_s
        report.device_copy_s, report.fence_s = timing.device_copy_s, timing.fence_s
        report.unchanged_bytes = timing.unchanged_bytes

    return refresh


def start_preflight(
    store: Store, state_bytes: int, host_bytes: int, keep: Keep | None, bus: Bus
) -> threading.Thread:
    """Say what every save will need; the thread, which ends by itself, measures the disk with a
    small file, unless the state is smaller than that or the room for it could be missed."""
    kept = None if keep is None else keep.bound()
    needed = state_bytes * ((kept or 1) + 1)

    def run() -> None:
        probe = min(state_bytes // CHUNK_BYTES * CHUNK_BYTES, _PROBE_BYTES)
        free = None
        with contextlib.suppress(LaststepError):  # then nobody can tell
            free = store.free_bytes()
        roomy = free is None or free > needed + 2 * _PROBE_BYTES
        rate = _write_rate(store, probe) if probe and roomy else None
        bus.emit(
            Preflight(
                state_bytes=state_bytes,
                host_memory_bytes=host_bytes,
                free_disk_bytes=free,
                needed_disk_bytes=needed,
                kept_checkpoints=kept,
                estimated_s=None if rate is None else state_bytes / rate,
            )
        )

    thread = threading.Thread(target=run, name="laststep-preflight", daemon=True)
    try:
        threads.start(thread)
    except StorageError as error:
        log.warning("what saves need could not be found out: %s", error)
    return thread


def _write_rate(store: Store, size_bytes: int) -> float | None:
    """Bytes a second to a new file in the run's folder, synced; None where it cannot be written."""
    name = f"probe.tmp-{secrets.token_hex(4)}"
    try:
        writer = store.open_writer(name, expected_bytes=size_bytes)
        try:
            began = time.perf_counter()
            with mmap.mmap(-1, CHUNK_BYTES) as buffer, memoryview(buffer) as view:
                for offset in range(0, size_bytes, CHUNK_BYTES):
                    writer.write_at(offset, view)
            writer.finish(size_bytes)
            return size_bytes / (time.perf_counter() - began)
        finally:
            writer.close()
            with contextlib.suppress(LaststepError):
                store.delete(name)
    except LaststepError as error:
        log.debug("the disk could not be measured: %s", error)
        return None
