"""Copy what a DCP planner wants of stored chunks into the tensors that it names.

Of a chunk only the rows that hold something wanted are read, at most 16 MiB at a time. The planner
is called on the calling thread only.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch

from laststep.adapters.dcp.reading import Wanted, plan_stretches, read_stretches
from laststep.errors import Usage
from laststep.state.tensors import TORCH_DTYPES
from laststep.terms import CHUNK_BYTES, DTYPES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem

    from laststep.read.content import Place
    from laststep.read.files import DataFile


class ChunkRead(NamedTuple):
    """A request, where the chunk lies that it wants something of, and the chunk's dtype."""

    request: ReadItem
    place: Place
    dtype: str


class _Rows(NamedTuple):
    """Rows of the chunk of one read."""

    read: int
    first: int
    number: int


def put_whole(tensor: torch.Tensor, request: ReadItem, planner: LoadPlanner) -> None:
    """Copy what a request wants of a tensor that has been read."""
    target = _target(request, planner)
    target.copy_(_narrowed(tensor, request.storage_offsets, request.lengths))
    planner.commit_tensor(request, target)


def copy_chunks(
    files: Sequence[DataFile], reads: Sequence[ChunkRead], planner: LoadPlanner
) -> None:
    """Read, verify and copy, in the order of the files."""
    wanted = [list(_rows_of(number, read)) for number, read in enumerate(reads)]
    missing = [len(rows) for rows in wanted]
    targets: dict[int, torch.Tensor] = {}
    for number, (request, _, _) in enumerate(reads):
        if not wanted[number]:
            planner.commit_tensor(request, _target(request, planner))
    stretches = plan_stretches(one for rows in wanted for one in rows)
    for stretch, data in read_stretches(files, stretches):
        flat = torch.frombuffer(data, dtype=torch.uint8)
        for _, start, stop, rows in stretch.wanted:
            read = reads[rows.read]
            if rows.read not in targets:
                targets[rows.read] = _target(read.request, planner)
            _copy_rows(flat[start - stretch.start : stop - stretch.start], rows, read,
                       targets[rows.read])  # fmt: skip
            missing[rows.read] -= 1
            if not missing[rows.read]:
                planner.commit_tensor(read.request, targets.pop(rows.read))


def _rows_of(number: int, read: ChunkRead) -> Iterator[Wanted[_Rows]]:
    """The bytes of the rows that hold what is wanted; none where nothing is."""
    request, place, dtype = read
    if 0 in request.lengths:
        return
    row_bytes = math.prod(place.box.shape[1:]) * DTYPES[dtype].size_bytes
    first, last = 0, 1
    if place.box.shape:
        first, last = request.storage_offsets[0], request.storage_offsets[0] + request.lengths[0]
    step = max(CHUNK_BYTES // row_bytes, 1)
    for row in range(first, last, step):
        count = min(step, last - row)
        start = place.start + row * row_bytes
        yield Wanted(place.file, start, start + count * row_bytes, _Rows(number, row, count))


def _copy_rows(data: torch.Tensor, rows: _Rows, read: ChunkRead, target: torch.Tensor) -> None:
    request, place, dtype = read
    stored = data.view(TORCH_DTYPES[dtype])
    if not place.box.shape:
        target.copy_(stored.view(()))
        return
    stored = stored.view(rows.number, *place.box.shape[1:])
    offsets, lengths = request.storage_offsets[1:], request.lengths[1:]
    at = rows.first - request.storage_offsets[0]
    target[at : at + rows.number].copy_(
        _narrowed(stored, (0, *offsets), (rows.number, *lengths))
    )  # fmt: skip


def _narrowed(tensor: torch.Tensor, offsets: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
    for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        tensor = tensor.narrow(dim, offset, length)
    return tensor


def _target(request: ReadItem, planner: LoadPlanner) -> torch.Tensor:
    target = planner.resolve_tensor(request).detach()
    if target.shape != request.lengths:
        raise Usage(
            f"cannot load {request.dest_index.fqn}: the planner gave a tensor of another shape",
            expected=f"{list(request.lengths)}", found=f"{list(target.shape)}",
        )  # fmt: skip
    return target
