"""Copy pieces from a device to the host through a small private buffer on that device.

A lazy copy reads memory that training also uses. So each chunk is first copied into a ring that
nothing else touches; the copy to the host and the fingerprint both read the ring, so the
fingerprint is one of the very bytes that land. It must equal that of the live memory at `save()`,
span by span. One stream fills the ring and another empties it, so that copies to the host never
wait. `Route` and `Ring` are made on the training thread; then the capture thread owns the ring.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from laststep.capture.device import record
from laststep.capture.gather import LiveTensor, bytes_of, copy_each, gather
from laststep.capture.kernels import CopyTable, Fingerprint, kernels_on
from laststep.constants import CHUNK_BYTES, DTYPES

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from laststep.capture.layout import ChunkLayout, Layout

RING_CHUNKS = 8
"""While one half is emptied at the speed of the bus, the other is filled."""
_LEAST_CHUNKS = 2


def chunks_through(layout: Layout, device: str) -> list[ChunkLayout]:
    """Return the chunks that pass through the ring of a device, in order."""
    return [c for c in layout.chunks if any(group.device == device for group in c.direct)]


def ring_chunks(wanted: int, room_bytes: int) -> int:
    """Return how many chunks the ring should hold; 0 if there is no room."""
    for count in (min(wanted, RING_CHUNKS), min(wanted, _LEAST_CHUNKS)):
        if count * CHUNK_BYTES <= room_bytes:
            return count
    return 0


class _Row(NamedTuple):
    """A span, and its place in the ring."""

    piece: int
    address: int
    at: int
    size_bytes: int
    first_byte: int


class Route:
    """How the pieces of one device pass through a ring while their addresses stay the same."""

    def __init__(
        self,
        layout: Layout,
        device: str,
        sources: Mapping[int, LiveTensor],
        ring: torch.Tensor,
        stream: torch.cuda.Stream | None,
    ) -> None:
        """`stream` is a side stream for uploads; None for memory of the host, as in tests."""
        self._layout, self._device = layout, device
        self._base, self._count = ring.data_ptr(), ring.nbytes // CHUNK_BYTES
        self._addresses = self._addresses_of(sources)
        chunks = chunks_through(layout, device)
        self.numbers = {(chunk.file, chunk.start): n for n, chunk in enumerate(chunks)}
        self._groups = [[g for g in chunk.direct if g.device == device] for chunk in chunks]
        rows: list[_Row] = []
        self._rows_before = [0]
        for number, groups in enumerate(self._groups):
            for group in groups:
                size, at = DTYPES[group.dtype].size_bytes, self.place(number) + group.start
                for span in group.spans:
                    length, skipped = (span.last - span.first) * size, span.first * size
                    address = sources[span.piece].address + skipped
                    rows.append(_Row(span.piece, address, at, length, skipped))
                    at += length
            self._rows_before.append(len(rows))
        self.rows = rows
        kernels = None if stream is None else kernels_on(stream.device)
        live = [(row.address, row.size_bytes) for row in rows]
        landed = [(self._base + row.at, row.size_bytes) for row in rows]
        self._live = Fingerprint(live, kernels, stream)
        self._landed = Fingerprint(landed, kernels, stream)
        self._copies: CopyTable | None = None
        if kernels is not None and stream is not None:
            copies = [(row.address, row.at, row.size_bytes) for row in rows]
            self._copies = CopyTable(kernels, copies, stream)

    def fits(self, layout: Layout, sources: Mapping[int, LiveTensor], ring: torch.Tensor) -> bool:
        return (
            layout is self._layout
            and ring.data_ptr() == self._base
            and ring.nbytes // CHUNK_BYTES == self._count
            and self._addresses_of(sources) == self._addresses
        )

    def fingerprint(self, sources: Mapping[int, LiveTensor]) -> torch.Tensor:
        """Return the fingerprint of the live memory now, computed on the current stream."""

        def bytes_at(number: int) -> torch.Tensor:
            row = self.rows[number]
            flat = bytes_of(sources[row.piece].tensor)
            return flat[row.first_byte : row.first_byte + row.size_bytes]

        return self._live.sums(0, len(self.rows), bytes_at)[1]

    def place(self, number: int) -> int:
        return number % self._count * CHUNK_BYTES

    def pieces(self, first: int, last: int) -> set[int]:
        """Return the pieces in the chunks [first, last)."""
        low, high = self._rows_before[first], self._rows_before[last]
        return {row.piece for row in self.rows[low:high]}

    def fill(
        self, ring: torch.Tensor, first: int, last: int, sources: Mapping[int, LiveTensor]
    ) -> tuple[slice, torch.Tensor]:
        """Copy the chunks [first, last) into the ring on the current stream; return the
        fingerprints of the copies and their positions among all rows."""
        low, high = self._rows_before[first], self._rows_before[last]
        if self._copies is not None:
            self._copies.run(ring, low, high)
        else:
            tensors = {piece: sources[piece].tensor for piece in self.pieces(first, last)}
            for number in range(first, last):
                place = self.place(number)
                gather(ring[place : place + CHUNK_BYTES], self._groups[number], tensors)
        rows = self.rows
        return self._landed.sums(
            low, high, lambda n: ring[rows[n].at : rows[n].at + rows[n].size_bytes]
        )

    def windows(self, number: int) -> list[tuple[int, int]]:
        """Return the bytes of a chunk that come through this ring."""
        return [(group.start, group.stop) for group in self._groups[number]]

    def changed(self, same: Iterable[bool]) -> list[int]:
        """Return the pieces of which not all rows are equal."""
        owners = zip(self._live.owners, same, strict=True)
        return list(dict.fromkeys(self.rows[owner].piece for owner, ok in owners if not ok))

    def _addresses_of(self, sources: Mapping[int, LiveTensor]) -> list[int]:
        return [sources[piece].address for piece in self._layout.direct[self._device]]


class Ring:
    """The private buffer of one capture on one device, and the state of its copies."""

    def __init__(
        self, route: Route, memory: torch.Tensor, sources: Mapping[int, LiveTensor]
    ) -> None:
        self.route = route
        self.memory = memory
        self.before = route.fingerprint(sources)
        # Zeros: a stretch that never landed must not look as it did at an earlier save.
        self._after = torch.zeros_like(self.before)
        self._busy: dict[int, torch.cuda.Event] = {}
        """Per place: its last copy to the host has ended once this event has passed."""

    @property
    def at_once(self) -> int:
        """How many chunks pass through together: half, so that filling and emptying overlap."""
        return max(self.memory.nbytes // CHUNK_BYTES // 2, 1)

    def pass_through(
        self,
        into: list[tuple[int, torch.Tensor]],
        sources: Mapping[int, LiveTensor],
        filling: torch.cuda.Stream,
        emptying: torch.cuda.Stream,
    ) -> None:
        """Enqueue the copies of consecutive chunks into their slots."""
        first, last = into[0][0], into[-1][0] + 1
        with torch.cuda.stream(filling):
            for number in range(first, last):
                busy = self._busy.get(self.route.place(number))
                if busy is not None:
                    filling.wait_event(busy)
            where, sums = self.route.fill(self.memory, first, last, sources)
            self._after[where] = sums
            filled = record(filling)
        with torch.cuda.stream(emptying):
            emptying.wait_event(filled)
            places, parts = [], []
            for number, slot in into:
                place = self.route.place(number)
                for start, stop in self.route.windows(number):
                    places.append(slot[start:stop])
                    parts.append(self.memory[place + start : place + stop])
            copy_each(places, parts, non_blocking=True)
            emptied = record(emptying)
        self._busy.update((self.route.place(number), emptied) for number in range(first, last))

    def changed(self) -> list[int]:
        """Return the pieces whose copies differ from the state at `save()`. Waits for the current
        stream, which MUST be the one that filled the ring."""
        same = (self.before == self._after).all(dim=1).cpu().tolist()
        return self.route.changed(same)
