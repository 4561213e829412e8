"""Copy what a DCP planner wants of stored chunks into the tensors that it names.

Of a chunk only the rows that hold something wanted are read, each block once, verified, a few reads
ahead. The planner is called on the calling thread only.
"""

from __future__ import annotations

import ctypes
import math
from contextlib import closing
from typing import TYPE_CHECKING, NamedTuple

import torch

from laststep.errors import UsageError
from laststep.memory.slots import SLOT_BYTES
from laststep.plan.reads import Read, Want, plan_reads
from laststep.read.blocks import read_ahead, refuse
from laststep.state.tensors import TORCH_DTYPES
from laststep.state.tensors.kinds import PLAIN_TENSORS
from laststep.terms import CHUNK_BYTES, DTYPES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem

    from laststep.read.content import Place
    from laststep.read.files import DataFile

_THREADS = 4


class ChunkRead(NamedTuple):
    """A request, the place of the chunk from which it wants something, and the chunk's dtype."""

    request: ReadItem
    place: Place
    dtype: str


class _Rows(NamedTuple):
    """Rows of the chunk of one read, and their bytes in the tensor area of its file."""

    read: int
    first: int
    number: int
    start: int
    stop: int


def put_whole(tensor: torch.Tensor, request: ReadItem, planner: LoadPlanner) -> None:
    """Copy what a request wants of a tensor that has been read."""
    target = _target(request, planner)
    target.copy_(_narrowed(tensor, request.storage_offsets, request.lengths))
    planner.commit_tensor(request, target)


def copy_chunks(
    files: Sequence[DataFile], reads: Sequence[ChunkRead], planner: LoadPlanner
) -> None:
    """Read, verify and copy, in the order of the files."""
    used = {read.place.file for read in reads}
    # Small pieces are still in the processor's caches when they are verified and copied. A request
    # to a server costs more than one to a disk.
    most_bytes = SLOT_BYTES if all(files[file].prefer_cached() for file in used) else CHUNK_BYTES
    missing = [0] * len(reads)
    wanted: list[_Rows] = []
    for number, read in enumerate(reads):
        before = len(wanted)
        wanted += _rows_of(number, read, most_bytes)
        missing[number] = len(wanted) - before
        if not missing[number]:
            planner.commit_tensor(read.request, _target(read.request, planner))
    targets: dict[int, torch.Tensor] = {}
    for rows, data in _read_rows(files, reads, wanted, most_bytes):
        read = reads[rows.read]
        if rows.read not in targets:
            targets[rows.read] = _target(read.request, planner)
        _copy_rows(torch.frombuffer(data, dtype=torch.uint8), rows, read, targets[rows.read])
        missing[rows.read] -= 1
        if not missing[rows.read]:
            planner.commit_tensor(read.request, targets.pop(rows.read))


def _rows_of(number: int, read: ChunkRead, most_bytes: int) -> Iterator[_Rows]:
    """Yield the rows that hold what a request wants, none where it wants nothing. Rows that lie in
    the same `most_bytes` of the file come together; a row that crosses their end comes alone."""
    request, place, dtype = read
    if 0 in request.lengths:
        return
    row_bytes = math.prod(place.box.shape[1:]) * DTYPES[dtype].size_bytes
    row, last = 0, 1
    if place.box.shape:
        row, last = request.storage_offsets[0], request.storage_offsets[0] + request.lengths[0]
    while row < last:
        start = place.start + row * row_bytes
        count = min(max((most_bytes - start % most_bytes) // row_bytes, 1), last - row)
        yield _Rows(number, row, count, start, start + count * row_bytes)
        row += count


def _read_rows(
    files: Sequence[DataFile], reads: Sequence[ChunkRead], wanted: Sequence[_Rows], most_bytes: int
) -> Iterator[tuple[_Rows, memoryview | bytearray]]:
    """Yield all rows with their bytes, which are valid only until the next ones are asked for;
    `CorruptError` for bytes that have changed."""
    wants: dict[int, list[Want]] = {}
    for number, rows in enumerate(wanted):
        file = reads[rows.read].place.file
        wants.setdefault(file, []).append(Want(rows.start, rows.stop, number))
    planned: list[Read] = []
    for file in sorted(wants):
        planned += plan_reads(file, files[file].layout.tensor_bytes, wants[file], most_bytes)
    extents = (files[read.file].blocks(read.start, read.stop) for read in planned)
    cut: dict[int, bytearray] = {}  # rows of which a part was read, the rest to come
    with closing(read_ahead(extents, threads=_THREADS, buffer_bytes=most_bytes)) as ahead:
        for read, (data, damage) in zip(planned, ahead, strict=True):
            refuse(damage)
            for part in read.parts:
                rows, piece = wanted[part.target], data[part.at : part.at + part.size_bytes]
                size = rows.stop - rows.start
                if part.size_bytes == size:
                    yield rows, piece
                    continue
                if part.target not in cut:
                    cut[part.target] = bytearray(size)
                stop = part.target_at + part.size_bytes
                cut[part.target][part.target_at : stop] = piece
                if stop == size:
                    yield rows, cut.pop(part.target)


def _copy_rows(data: torch.Tensor, rows: _Rows, read: ChunkRead, target: torch.Tensor) -> None:
    request, place, dtype = read
    stored = data.view(TORCH_DTYPES[dtype])
    if not place.box.shape:
        _copy(stored.view(()), target)
        return
    stored = stored.view(rows.number, *place.box.shape[1:])
    offsets, lengths = request.storage_offsets[1:], request.lengths[1:]
    at = rows.first - request.storage_offsets[0]
    part = _narrowed(stored, (0, *offsets), (rows.number, *lengths))
    _copy(part, target[at : at + rows.number])


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    plain = type(target) in PLAIN_TENSORS and not target.is_conj() and not target.is_neg()
    together = source.is_contiguous() and target.is_contiguous()
    if plain and together and target.device.type == "cpu" and source.dtype == target.dtype:
        # By this thread alone: beside those that read, a piece is copied before torch's are awake.
        ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)
    else:
        target.copy_(source)


def _narrowed(tensor: torch.Tensor, offsets: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
    for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        tensor = tensor.narrow(dim, offset, length)
    return tensor


def _target(request: ReadItem, planner: LoadPlanner) -> torch.Tensor:
    target = planner.resolve_tensor(request).detach()
    if target.shape != request.lengths:
        raise UsageError(
            f"cannot load {request.dest_index.fqn}: the planner gave a tensor of another shape",
            expected=f"{list(request.lengths)}",
            found=f"{list(target.shape)}",
        )
    return target
