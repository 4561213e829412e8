"""Reconstruct blocks with derived tensors: read their masters and round them.

Masters are read in stored order in whole blocks, a few of which are kept while one extent is
filled, because small tensors are usually neighbours in both layouts. If only a little of a block is
needed, only that part is read. Damage to a master first shows as a wrong digest of the derived
block, as with a base, and is then traced to the master.
"""

from __future__ import annotations

import mmap
from collections import Counter
from typing import TYPE_CHECKING

from laststep.constants import BLOCK_BYTES
from laststep.errors import CorruptError
from laststep.format.deriving import DerivedRuns, unpack

if TYPE_CHECKING:
    from collections.abc import Iterator

    from laststep.format.deriving import DerivedRun
    from laststep.read.blocks import Damage, KeptBlocks, LayoutBlocks

_MOST_KEPT = 8
"""Number of master blocks that are kept; one run needs at most three."""

_LITTLE = BLOCK_BYTES // 8
"""A block is not read whole if fewer of its bytes are needed."""


class Masters:
    """The tensors that those of one layout are derived from."""

    def __init__(self, layout: LayoutBlocks) -> None:
        derived = layout.stored.derived
        self._runs = DerivedRuns(layout.layout.tensors, derived)
        there = {name: layout.named(name) for name in {name for name, _ in derived.values()}}
        starts = {
            name: {entry.name: entry.start for entry in master.layout.tensors}
            for name, master in there.items()
        }
        self._places = {
            tensor: (there[name], starts[name][master])
            for tensor, (name, master) in derived.items()
        }
        """For each derived tensor, the layout of its master and the master's offset there."""

    def block(self, number: int, stored: memoryview, size: int, kept: KeptBlocks) -> memoryview:
        """Return a block of the layout, reconstructed from its stored bytes and its masters."""
        from laststep.codecs.rounding import rounded  # imports numpy, rarely needed

        block, at = memoryview(bytearray(size)), number * BLOCK_BYTES
        try:
            left = unpack(stored, block, at, self._runs.of_block(number))
        except ValueError as error:
            raise CorruptError("a block cannot be decoded", found=str(error)) from None
        needed: Counter[tuple[str, int]] = Counter()
        for run in left:
            for layout, there, first, last in self._ranges(run):
                needed[layout.layout.name, there] += last - first
        for run in sorted(left, key=self._order):
            values = rounded(self._master(run, kept, needed), run.dtype)
            block[run.start - at : run.stop - at] = values
        return block

    def damage(self, number: int) -> list[Damage]:
        """Return the damage to the masters of a block."""
        found: dict[tuple[str, int], list[Damage]] = {}
        for run in self._runs.of_block(number):
            for layout, there, _, _ in self._ranges(run):
                if (layout.layout.name, there) not in found:
                    extent = layout.blocks(there * BLOCK_BYTES, there * BLOCK_BYTES + 1)
                    into = memoryview(bytearray(extent.size_bytes))
                    found[layout.layout.name, there] = extent.read(into)
        return [damage for each in found.values() for damage in each]

    def _order(self, run: DerivedRun) -> tuple[str, int]:
        layout, begins = self._places[run.tensor]
        return layout.layout.name, run.of_master(begins)[0]

    def _ranges(self, run: DerivedRun) -> Iterator[tuple[LayoutBlocks, int, int, int]]:
        """Yield the blocks of its master that a run is derived from, with bytes [first, last) of
        each."""
        layout, begins = self._places[run.tensor]
        start, stop = run.of_master(begins)
        for there in range(start // BLOCK_BYTES, -(-stop // BLOCK_BYTES)):
            low = there * BLOCK_BYTES
            yield layout, there, max(start - low, 0), min(stop - low, BLOCK_BYTES)

    def _master(self, run: DerivedRun, kept: KeptBlocks, needed: Counter[tuple[str, int]]) -> bytes:
        """Return the bytes of its master that a run is the rounding of. `needed` is the number of
        bytes of each block that all runs need."""
        parts: list[bytes | memoryview] = []
        for layout, there, first, last in self._ranges(run):
            key = layout.layout.name, there
            extent = layout.blocks(there * BLOCK_BYTES, there * BLOCK_BYTES + 1)
            part: bytes | memoryview | None = None
            if key not in kept and needed[key] < _LITTLE:
                part = extent.part(first, last)
            if part is None:
                block = kept.pop(key, None)
                if block is None:
                    # Page-aligned, so that direct reads need no copy; buffers are reused.
                    is_full = len(kept) >= _MOST_KEPT
                    block = kept.pop(next(iter(kept))) if is_full else _new_block()
                    extent.fill(block)
                kept[key] = block  # now the most recently used
                part = block[first:last]
            parts.append(part)
        return b"".join(parts)


def _new_block() -> memoryview:
    return memoryview(mmap.mmap(-1, BLOCK_BYTES))
