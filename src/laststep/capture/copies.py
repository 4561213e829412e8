"""How a plan is carried out, and what later saves with the same plan can use again.

`Copies` is made with a plan and replaced with it. It holds no memory of the state between saves.
"""

from __future__ import annotations

import operator
import weakref
from dataclasses import dataclass, field
from itertools import repeat
from typing import TYPE_CHECKING, Final

import torch

from laststep.capture.gather import Gatherer
from laststep.capture.kernels import Fingerprint, kernels_on
from laststep.capture.layout import lower
from laststep.constants import BLOCK_BYTES
from laststep.state.tensors import forms_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from laststep.capture.device import SideStreams
    from laststep.capture.layout import ChunkLayout, Layout, Way
    from laststep.capture.mover import Sink
    from laststep.capture.ring import Route
    from laststep.plan.files import SavePlan

EARLY_PAYS_BYTES: Final = 2 << 20
"""Average tensor size from which an early copy pays off: checking that a tensor is in place takes
the training thread a microsecond, in which an H200 copies this much."""
_SAVES_KEPT = 8
"""Saves whose digests are kept: as many as may be in progress."""
_LEAST_BYTES = 16 * BLOCK_BYTES
"""Smaller states are compared only in the flusher, which compares anyway."""

Place = tuple[int, int]
"""A chunk: its file, and where it begins there."""


class Copies:
    """The capture modes, layout and address tables of a plan. Belongs to the training thread."""

    layout: Layout
    """That of the last choice of modes; set by `go`."""
    looks: ChunkLooks

    def __init__(self, plan: SavePlan) -> None:
        self.plan = plan
        self.needs: dict[str, int] | None = None
        """The device memory that the choice of modes needs; None: choose again."""
        self.gatherers: dict[str, Gatherer] = {}
        self.routes: dict[str, Route] = {}
        self.remembered: Remembered | None = None
        """What the last capture staged on devices, if the next one may start early."""

    def go(self, ways: tuple[Way, ...], needs: dict[str, int]) -> None:
        before, self.needs = self.needs, needs
        if before is None or self.layout.ways != ways:
            self.layout = lower(self.plan, ways)
            self.gatherers = {d: Gatherer(groups) for d, groups in self.layout.gathers.items()}
            self.looks = ChunkLooks(self.layout)
            self.remembered = None  # those tables of addresses went with their layout

    def remember(self, sources: Sequence[torch.Tensor]) -> None:
        self.remembered = None
        size = count = 0
        for device, groups in self.layout.gathers.items():
            if device == "cpu":
                continue
            if not self.gatherers[device].can_run_again():
                return
            size += self.layout.staging_bytes[device]
            count += sum(len(group.spans) for group in groups)
        if count and size >= count * EARLY_PAYS_BYTES:
            self.remembered = Remembered(self.layout, sources)


class Remembered:
    """The tensors that the last capture staged on devices, by weak references, and their forms."""

    def __init__(self, layout: Layout, sources: Sequence[torch.Tensor]) -> None:
        self.layout = layout
        self._pieces = [
            span.piece
            for device, groups in layout.gathers.items()
            if device != "cpu"
            for group in groups
            for span in group.spans
        ]
        tensors = [sources[piece] for piece in self._pieces]
        self._refs = list(map(weakref.ref, tensors))
        self._forms = forms_of(tensors)

    def in_place(self) -> list[torch.Tensor] | None:
        """Return all tensors if each is alive with the same form and memory; else None."""
        alive: list[torch.Tensor | None] = list(map(operator.call, self._refs))
        if any(map(operator.is_, alive, repeat(None))):
            return None
        tensors: list[torch.Tensor] = alive  # type: ignore[assignment]
        try:
            return tensors if forms_of(tensors) == self._forms else None
        except RuntimeError:
            return None

    def are_among(self, sources: Sequence[torch.Tensor], held: Sequence[torch.Tensor]) -> bool:
        """Return whether a save of `sources` stages exactly the held tensors."""
        staged = [sources[piece] for piece in self._pieces]
        return all(map(operator.is_, staged, held))


@dataclass(slots=True)
class Early:
    """Staging that started on a guess."""

    of: Remembered
    sources: list[torch.Tensor]
    """The tensors being copied, held."""
    staging: dict[str, torch.Tensor] = field(default_factory=dict)
    events: dict[str, tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=dict)


class ChunkLooks:
    """Finds on the device which chunks of a layout are equal to those of an earlier save.

    Such a chunk need not be copied to the host: its blocks are reused from that save's files. Only
    chunks entirely in one staging buffer are compared: nobody changes those bytes any more. Digests
    have 128 bits per 256 KiB; those of a few saves are kept. Belongs to the capture thread.
    """

    def __init__(self, layout: Layout) -> None:
        self._chunks: dict[str, list[ChunkLayout]] = {}
        for chunk in layout.chunks:
            devices = {part.device for part in chunk.staged}
            if len(devices) == 1 and not chunk.direct and "cpu" not in devices:
                self._chunks.setdefault(chunk.staged[0].device, []).append(chunk)
        self._tables: dict[str, tuple[int, Fingerprint]] = {}
        """Per device: the address of the staging buffer that they are for, and the tables."""
        self._seen: dict[int, dict[Place, bytes]] = {}
        """Digests by save number."""

    def unchanged(
        self, staging: Mapping[str, torch.Tensor], streams: SideStreams, sink: Sink
    ) -> tuple[int, list[Place]]:
        """Return the number of the last committed save, and the chunks that equal its own. Staged
        bytes MUST be complete in the order of the side streams."""
        found: dict[Place, bytes] = {}
        for device, chunks in self._chunks.items():
            buffer = staging.get(device)
            if buffer is not None and buffer.nbytes >= _LEAST_BYTES:
                found.update(self._digests(device, chunks, buffer, streams))
        since = sink.since  # not earlier: a save may have been committed meanwhile
        before = self._seen.get(since, {})
        self._seen[sink.number] = found
        for old in sorted(self._seen)[:-_SAVES_KEPT]:
            del self._seen[old]
        return since, [place for place, sums in found.items() if before.get(place) == sums]

    def _digests(
        self, device: str, chunks: list[ChunkLayout], staging: torch.Tensor, streams: SideStreams
    ) -> dict[Place, bytes]:
        kernels = kernels_on(torch.device(device))
        if kernels is None:
            return {}
        with torch.cuda.device(device), torch.cuda.stream(streams.filling(device)):
            address, table = self._tables.get(device, (0, None))
            if table is None or address != staging.data_ptr():
                address = staging.data_ptr()
                ranges = [(address + p.start, p.size_bytes) for c in chunks for p in c.staged]
                table = Fingerprint(ranges, kernels, streams.stream(device), strong=True)
                self._tables[device] = address, table
            sums = table.sums(0, sum(len(chunk.staged) for chunk in chunks))[1].cpu().numpy()
        found: dict[Place, bytes] = {}
        first = 0
        for chunk in chunks:
            last = first + len(chunk.staged)
            found[chunk.file, chunk.start] = sums[table.rows(first, last)].tobytes()
            first = last
        return found
