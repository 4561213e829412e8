"""Copies and fingerprints over tables of addresses, as Triton kernels: one launch, one pass.

Imported only where Triton can be; `gather` and `fingerprint` fall back to plain torch operations
elsewhere. A table is uploaded on a side stream, because an upload on the training stream would wait
for all that training has enqueued; whoever launches waits for it in stream order.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

_TILE_BYTES = 256 << 10
_WORDS = 1024
_ITEMS = 8192
"""Measured on an H200 over 7.26 GB in 963 tensors: copies in 3.7 ms (a plain copy of one buffer
takes 3.4, a multi-tensor copy 8.5), fingerprints in 2.1 ms."""


class _Table:
    """Columns of numbers on the device: 64-bit addresses and offsets, 32-bit counts."""

    def __init__(self, stream: torch.cuda.Stream, **columns: np.ndarray) -> None:
        with torch.cuda.stream(stream):
            self._columns = {
                name: torch.from_numpy(np.ascontiguousarray(column)).to(stream.device)
                for name, column in columns.items()
            }
        self._uploaded = torch.cuda.Event()
        self._uploaded.record(stream)

    def columns(self, *names: str) -> list[torch.Tensor]:
        """The columns, once they have arrived, for the current stream."""
        stream = torch.cuda.current_stream()
        stream.wait_event(self._uploaded)
        columns = [self._columns[name] for name in names]
        for column in columns:
            # Made on the side stream: without this it could be reused there while a launch waits.
            column.record_stream(stream)
        return columns


def _tiles(sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cut ranges into tiles: (whose range, first byte within it, bytes)."""
    counts = -(-sizes // _TILE_BYTES)
    owners = np.repeat(np.arange(len(sizes)), counts)
    ends = np.cumsum(counts)
    within = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)
    starts = within * _TILE_BYTES
    return owners, starts, np.minimum(_TILE_BYTES, sizes[owners] - starts)


@triton.jit  # type: ignore[untyped-decorator]
def _mix_tiles(  # type: ignore[no-untyped-def]
    addresses,
    counts,
    firsts,
    sums,
    WORDS: tl.constexpr,  # noqa: N803 (as Triton's constants are)
):
    tile = tl.program_id(0)
    words = tl.load(addresses + tile).to(tl.pointer_type(tl.uint32))
    count = tl.load(counts + tile)
    first = tl.load(firsts + tile)
    one = tl.zeros([WORDS], dtype=tl.uint64)
    two = tl.zeros([WORDS], dtype=tl.uint64)
    for start in range(0, count, WORDS):
        at = start + tl.arange(0, WORDS)
        word = tl.load(words + at, mask=at < count, other=0)
        # murmur3's finaliser is a bijection: a single changed word always changes the sum.
        mixed = word ^ ((at + first).to(tl.uint32) * 0x9E3779B1)
        mixed = (mixed ^ (mixed >> 16)) * 0x85EBCA6B
        mixed = (mixed ^ (mixed >> 13)) * 0xC2B2AE35
        mixed = mixed ^ (mixed >> 16)
        other = (mixed ^ (mixed >> 15)) * 0x2C1B3C6D
        other = (other ^ (other >> 12)) * 0x297A2D39
        one += mixed.to(tl.uint64)
        two += (other ^ (other >> 15)).to(tl.uint64)
    tl.store(sums + 2 * tile, tl.sum(one, axis=0).to(tl.int64))
    tl.store(sums + 2 * tile + 1, tl.sum(two, axis=0).to(tl.int64))


class Tiles:
    """Fingerprints of tensors that stay in place; sizes MUST be multiples of 4 bytes."""

    def __init__(self, tensors: list[torch.Tensor], stream: torch.cuda.Stream) -> None:
        addresses = np.array([t.data_ptr() for t in tensors], dtype=np.int64)
        owners, starts, sizes = _tiles(np.array([t.nbytes for t in tensors], dtype=np.int64))
        self.owners: list[int] = owners.tolist()
        self._table = _Table(
            stream,
            addresses=addresses[owners] + starts,
            counts=(sizes // 4).astype(np.int32),
            firsts=(starts // 4 & 0x7FFFFFFF).astype(np.int32),
        )

    def sums(self) -> torch.Tensor:
        """Two sums per tile, made on the current stream."""
        addresses, counts, firsts = self._table.columns("addresses", "counts", "firsts")
        sums = torch.empty(len(self.owners), 2, dtype=torch.int64, device=addresses.device)
        _mix_tiles[(len(self.owners),)](addresses, counts, firsts, sums, WORDS=_WORDS, num_warps=8)
        return sums


@triton.jit  # type: ignore[untyped-decorator]
def _copy_tiles(  # type: ignore[no-untyped-def]
    sources,
    offsets,
    counts,
    target,
    ALIGN: tl.constexpr,  # noqa: N803
    ITEMS: tl.constexpr,  # noqa: N803
):
    tile = tl.program_id(0)
    count = tl.load(counts + tile)
    source = tl.load(sources + tile)
    place = tl.load(offsets + tile)
    if ALIGN == 16:
        count = tl.multiple_of(count, 2)  # so that the mask allows pairs
        origin = tl.multiple_of(source, 16).to(tl.pointer_type(tl.int64))
        into = (target + tl.multiple_of(place, 16)).to(tl.pointer_type(tl.int64))
    elif ALIGN == 4:
        origin = source.to(tl.pointer_type(tl.int32))
        into = (target + place).to(tl.pointer_type(tl.int32))
    else:
        origin = source.to(tl.pointer_type(tl.int8))
        into = (target + place).to(tl.pointer_type(tl.int8))
    for start in range(0, count, ITEMS):
        at = start + tl.arange(0, ITEMS)
        inside = at < count
        tl.store(into + at, tl.load(origin + at, mask=inside), mask=inside)


_WIDTH = {16: 8, 4: 4, 1: 1}
"""Bytes per element by alignment; neighbours of 8 bytes are loaded in pairs."""


class Copies:
    """Many copies into one buffer, by a launch for each alignment that occurs."""

    def __init__(self, rows: list[tuple[int, int, int]], stream: torch.cuda.Stream) -> None:
        """Rows of (source address, offset in the buffer, bytes)."""
        address, offset, size = np.array(rows, dtype=np.int64).T
        bits = address | offset | size
        alignment = np.where(bits % 16 == 0, 16, np.where(bits % 4 == 0, 4, 1))
        self._launches: list[tuple[int, int, _Table]] = []
        for align, width in _WIDTH.items():
            mine = alignment == align
            if not mine.any():
                continue
            owners, starts, sizes = _tiles(size[mine])
            table = _Table(
                stream,
                sources=address[mine][owners] + starts,
                offsets=offset[mine][owners] + starts,
                counts=(sizes // width).astype(np.int32),
            )
            self._launches.append((align, len(owners), table))

    def run(self, target: torch.Tensor) -> None:
        """Copy everything into the buffer, on the current stream."""
        for align, count, table in self._launches:
            sources, offsets, counts = table.columns("sources", "offsets", "counts")
            _copy_tiles[(count,)](
                sources, offsets, counts, target, ALIGN=align, ITEMS=_ITEMS, num_warps=8
            )
