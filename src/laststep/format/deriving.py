"""Derived tensors of a file, and the stored form of a block that contains some.

Pure. A bf16 or fp16 tensor may be *derived*: it is the rounding of an fp32 tensor of the same
shape, its *master*, in this or another file of the same checkpoint. The part of a derived tensor in
one block is a *run*. The stored form of such a block has one bit per run, set if the run is the
rounding of its master, followed by all other bytes. A master's own blocks are never stored in this
form: decoding a block needs its masters and nothing else.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, NamedTuple

from laststep.constants import BLOCK_BYTES

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from laststep.format.layout import TensorEntry

ROUNDED = ("rounded", 2)
"""Encoding of blocks in this form: codec and element size."""
DERIVED_DTYPES = ("bfloat16", "float16")
MASTER_DTYPE = "float32"
_RATIO = 2
"""Bytes of a master's element per byte of the derived one."""


class Master(NamedTuple):
    """The tensor that another one is the rounding of."""

    file: str
    tensor: str


class DerivedRun(NamedTuple):
    """Bytes [start, stop) of a layout: the part of a derived tensor in one block."""

    tensor: str
    dtype: str
    start: int
    stop: int
    ahead: int
    """Number of bytes of the tensor before these."""

    def of_master(self, begins: int) -> tuple[int, int]:
        """Return the bytes [start, stop) of its master, which starts at `begins`, that it is the
        rounding of."""
        start = begins + _RATIO * self.ahead
        return start, start + _RATIO * (self.stop - self.start)


class DerivedRuns:
    """The runs of a layout, looked up by block."""

    def __init__(self, entries: Iterable[TensorEntry], derived: Collection[str]) -> None:
        self._entries = [e for e in entries if e.name in derived and e.start < e.stop]
        self._stops = [entry.stop for entry in self._entries]

    def blocks(self) -> Iterator[int]:
        """Yield the blocks that have any runs, in order; a block may be repeated."""
        for entry in self._entries:
            yield from range(entry.start // BLOCK_BYTES, -(-entry.stop // BLOCK_BYTES))

    def of_block(self, number: int) -> list[DerivedRun]:
        """Return the runs of one block, in order."""
        low, high = number * BLOCK_BYTES, (number + 1) * BLOCK_BYTES
        runs = []
        for at in range(bisect_right(self._stops, low), len(self._entries)):
            name, dtype, _, start, stop = self._entries[at]
            if start >= high:
                break
            first = max(start, low)
            runs.append(DerivedRun(name, dtype, first, min(stop, high), first - start))
        return runs


def pack(block: memoryview, at: int, runs: Sequence[DerivedRun], rounded: Sequence[bool]) -> bytes:
    """Return the stored form of a block that starts at byte `at` of the layout; `rounded` marks the
    runs that are the rounding of their masters."""
    bits = sum(1 << number for number, is_rounded in enumerate(rounded) if is_rounded)
    kept = [bits.to_bytes(-(-len(runs) // 8), "little")]
    low = 0
    for run, is_rounded in zip(runs, rounded, strict=True):
        if is_rounded:
            kept.append(bytes(block[low : run.start - at]))
            low = run.stop - at
    kept.append(bytes(block[low:]))
    return b"".join(kept)


def unpack(
    stored: memoryview, into: memoryview, at: int, runs: Sequence[DerivedRun]
) -> list[DerivedRun]:
    """Copy the stored bytes into a block that starts at byte `at` of the layout, and return the
    runs that the caller has to round from their masters. Raise `ValueError` if the size or the bits
    do not fit."""
    size = -(-len(runs) // 8)
    bits = int.from_bytes(stored[:size], "little")
    left = [run for number, run in enumerate(runs) if bits >> number & 1]
    due = size + len(into) - sum(run.stop - run.start for run in left)
    if len(stored) != due or bits >> len(runs):
        raise ValueError(f"{len(stored)} bytes of a block of {len(runs)} runs where {due} are due")
    low = 0
    for start, stop in [*((run.start - at, run.stop - at) for run in left), (len(into),) * 2]:
        into[low:start] = stored[size : size + start - low]
        size, low = size + start - low, stop
    return left


def problem(entries: Iterable[TensorEntry], derived: Collection[str]) -> str | None:
    """Return a description of the first tensor that cannot be derived, or None."""
    known = {entry.name: entry for entry in entries}
    for name in derived:
        entry = known.get(name)
        if entry is None or entry.dtype not in DERIVED_DTYPES or entry.start % _RATIO:
            return f"the derived tensor {name!r}, which is {entry}"
    return None
