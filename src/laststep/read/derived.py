"""Put blocks together that hold tensors which follow from others: read those, and round them.

Masters are read in the order in which they lie, whole block by whole block, a few of which are kept
while one extent is filled: small tensors lie side by side in both files. Of a block of which little
is needed, because they do not, only that is read. As of an anchor, what is wrong with a master
shows in what is made of it, and is then found out.
"""

from __future__ import annotations

import mmap
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from laststep.errors import CorruptError
from laststep.format.deriving import unpack
from laststep.format.manifest import DAMAGE_REMEDY
from laststep.read.blocks import Extent
from laststep.terms import BLOCK_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from laststep.format.deriving import DerivedRun, DerivedRuns
    from laststep.read.blocks import Damage, Readable
    from laststep.read.files import DataFile

_KEPT = 8
"""Blocks of masters that are kept; those of one run are three at the most."""

_LITTLE = BLOCK_BYTES // 8
"""A block of which less is needed is not read whole."""

Kept = dict[tuple[str, int], memoryview]
"""Blocks of masters, by file and number; those that were read last."""


class Masters:
    """The tensors that those of one file follow from."""

    def __init__(self, runs: DerivedRuns, places: Mapping[str, tuple[DataFile, int]]) -> None:
        """`places` says of each derived tensor in which file, and where in its image, its master
        begins."""
        self._runs = runs
        self._places = places

    def block(self, number: int, stored: bytes, size: int, kept: Kept) -> memoryview:
        """A block of the image, out of what is stored of it and its masters."""
        from laststep.codecs.rounding import rounded  # numpy, which few need

        block, at = memoryview(bytearray(size)), number * BLOCK_BYTES
        try:
            left = unpack(memoryview(stored), block, at, self._runs.of_block(number))
        except ValueError as error:
            raise CorruptError(
                "a block cannot be decoded", found=str(error), remedy=DAMAGE_REMEDY
            ) from None
        needed: Counter[tuple[str, int]] = Counter()
        for run in left:
            needed.update(self._needed(run))
        for run in sorted(left, key=self._place):
            values = rounded(self._master(run, kept, needed), run.dtype)
            block[run.start - at : run.stop - at] = values
        return block

    def damage(self, number: int, size: int) -> list[Damage]:
        """What is wrong with the masters of a block of the image, of that many bytes."""
        found: dict[tuple[str, int], list[Damage]] = {}
        for run in self._runs.of_block(number):
            for file, there in self._blocks(run):
                if (file.layout.name, there) not in found:
                    extent = file.blocks(there * BLOCK_BYTES, there * BLOCK_BYTES + 1)
                    into = memoryview(bytearray(extent.size_bytes))
                    found[file.layout.name, there] = extent.read(into)
        data = number * BLOCK_BYTES, number * BLOCK_BYTES + size
        return [replace(wrong, data=data) for some in found.values() for wrong in some]

    def _blocks(self, run: DerivedRun) -> Iterator[tuple[DataFile, int]]:
        file, begins = self._places[run.tensor]
        start, stop = run.of_master(begins)
        for there in range(start // BLOCK_BYTES, -(-stop // BLOCK_BYTES)):
            yield file, there

    def _place(self, run: DerivedRun) -> tuple[str, int]:
        """Where the master of a run lies."""
        file, begins = self._places[run.tensor]
        return file.layout.name, run.of_master(begins)[0]

    def _needed(self, run: DerivedRun) -> dict[tuple[str, int], int]:
        """How many bytes of which blocks of masters a run follows from."""
        start, stop = run.of_master(self._places[run.tensor][1])
        return {
            (file.layout.name, there): min(stop, (there + 1) * BLOCK_BYTES)
            - max(start, there * BLOCK_BYTES)
            for file, there in self._blocks(run)
        }

    def _master(self, run: DerivedRun, kept: Kept, needed: Counter[tuple[str, int]]) -> bytes:
        """The bytes of its master that a run is the rounding of; `needed` says how much of each
        block is, by all runs."""
        start, stop = run.of_master(self._places[run.tensor][1])
        parts: list[bytes | memoryview] = []
        for file, there in self._blocks(run):
            low, key = there * BLOCK_BYTES, (file.layout.name, there)
            first, last = max(start - low, 0), min(stop - low, BLOCK_BYTES)
            extent = file.blocks(low, low + 1)
            if key not in kept and needed[key] < _LITTLE and isinstance(extent, Extent):
                parts.append(extent.part(first, last))
            else:
                parts.append(_kept(key, extent, kept)[first:last])
        return b"".join(parts)


def _kept(key: tuple[str, int], extent: Readable, kept: Kept) -> memoryview:
    """A block of a master's image, which is kept as the one that was read last."""
    block = kept.pop(key, None)
    if block is None:
        # Page-aligned, so that a direct read lands in it uncopied; used again and again.
        full = len(kept) >= _KEPT
        block = kept.pop(next(iter(kept))) if full else memoryview(mmap.mmap(-1, BLOCK_BYTES))
        extent.fill(block)
    kept[key] = block
    return block
