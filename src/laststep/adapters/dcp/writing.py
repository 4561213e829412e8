"""Write what a DCP plan gives to one rank into data files of its own, and say where it lies.

Offsets are fixed before anything moves. Tensors are resolved one at a time, in the order of the
files, and pass through a few buffers of 16 MiB: the calling thread fills them, others digest and
write. Knows nothing of other ranks or of who commits.
"""

from __future__ import annotations

import mmap
import operator
import queue
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch
from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from laststep.adapters.dcp.layout import tensor_name
from laststep.adapters.dcp.values import take_apart
from laststep.capture.gather import bytes_of
from laststep.errors import UsageError
from laststep.flush.writer import SaveWriter
from laststep.plan.files import ItemSpec, plan_save
from laststep.state.boxes import Box, whole
from laststep.state.provider import BoxPart, Piece
from laststep.state.tensors import DTYPE_NAMES
from laststep.state.tensors.kinds import PLAIN_TENSORS
from laststep.terms import CHUNK_BYTES, DTYPES, with_article

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch.distributed.checkpoint.planner import SavePlanner, WriteItem

    from laststep.adapters.nesting import Path
    from laststep.format.manifest import WrittenIndexes
    from laststep.plan.files import SavePlan
    from laststep.storage.store import Store

KIND = "value"


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteOptions:
    """How a rank writes. One that saves for its `own` has nobody who writes the rest of a tensor:
    its part is stored as a tensor by itself."""

    allow_pickle: bool
    own: bool
    threads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """What one rank has written."""

    folder: str
    rank: int
    written: WrittenIndexes


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenEntry:
    """Where an entry lies: for the coordinator, and in DCP's metadata."""

    location: Path
    box: Box | None = None
    """The box that was written, for an entry that is a tensor."""
    dtype: str | None = None
    is_part: bool = False
    """Whether that box is a tensor by itself, of a rank that saves for itself."""
    tree: bytes | None = None
    """The typed JSON of an entry that is a value. `tensors` counts the tensors that it names."""
    kind: Literal["value", "typed", "raw"] = "value"
    tensors: int = 1
    tensor_bytes: int = 0
    files: Files | None = None
    """The files of the rank, which its first entry carries."""


@dataclass(slots=True, kw_only=True)
class _WrittenItem:
    """The pieces of one item that this rank writes, and what each is made of: an entry of the plan,
    which is resolved when its turn comes, or a tensor of a value."""

    pieces: list[Piece]
    sources: list[WriteItem | torch.Tensor]


def write_items(
    items: Sequence[WriteItem],
    planner: SavePlanner,
    locations: dict[str, Path],
    *,
    store: Store,
    folder: str,
    rank: tuple[int, int],
    how: WriteOptions,
) -> list[WriteResult]:
    """Write all of it, durably; `folder` is that of the attempt, `rank` this one of so many. A rank
    with nothing to write leaves its index to the coordinator, which would not hear of it."""
    if not items:
        return []
    work: dict[str, _WrittenItem] = {}
    entries: list[WrittenEntry] = []
    for item in items:
        location = locations[item.index.fqn]
        into = work.setdefault(str(location[0]), _WrittenItem(pieces=[], sources=[]))
        if item.type is WriteItemType.BYTE_IO:
            entries.append(_add_value(item, planner, location, into, allow_pickle=how.allow_pickle))
        else:
            entries.append(_add_tensor(item, location, into, own=how.own))
    specs = tuple(
        ItemSpec(name=name, kind=KIND, standalone=False, pieces=tuple(item.pieces))
        for name, item in work.items()
    )
    plan = plan_save(specs, rank=rank, values=())
    written = _write_files(plan, list(work.values()), planner, store, folder, rank, how.threads)
    files = Files(folder=folder, rank=rank[0], written=written)
    if entries:
        entries[0] = replace(entries[0], files=files)
    return [
        WriteResult(
            index=item.index,
            size_in_bytes=written.tensor_bytes + len(written.tree or b""),
            storage_data=written,
        )
        for item, written in zip(items, entries, strict=True)
    ]


def _add_value(
    item: WriteItem, planner: SavePlanner, location: Path, into: _WrittenItem, *, allow_pickle: bool
) -> WrittenEntry:
    fqn = item.index.fqn
    given = planner.resolve_data(item)
    if isinstance(given, torch.Tensor):
        raise UsageError(f"cannot save {fqn}", expected="bytes from the planner", found="a tensor")
    value = take_apart(given.getvalue(), location, fqn=fqn, allow_pickle=allow_pickle)
    for name, tensor in value.tensors.items():
        into.pieces.append(
            Piece(
                name,
                DTYPE_NAMES[tensor.dtype],
                tuple(tensor.shape),
                tensor.nbytes,
                "cpu",
                tensor.is_contiguous(),
                volatile=False,
            )
        )
        into.sources.append(tensor)
    return WrittenEntry(
        location=location,
        tree=value.tree,
        kind=value.kind,
        tensors=len(value.tensors),
        tensor_bytes=sum(tensor.nbytes for tensor in value.tensors.values()),
    )


def _add_tensor(item: WriteItem, location: Path, into: _WrittenItem, *, own: bool) -> WrittenEntry:
    fqn, data = item.index.fqn, item.tensor_data
    if data is None or data.chunk is None:
        raise UsageError(
            f"cannot save {fqn}: the planner does not say which part of which tensor it is"
        )
    if data.properties.layout is not torch.strided or data.properties.dtype not in DTYPE_NAMES:
        raise UsageError(
            f"cannot save {fqn}",
            expected="a dense tensor of a plain dtype",
            found=f"{data.properties.layout}, {data.properties.dtype}",
            remedy="convert it in the state, e.g. with to_dense() or dequantize()",
        )
    dtype, shape = DTYPE_NAMES[data.properties.dtype], tuple(data.size)
    start, sizes = tuple(data.chunk.offsets), tuple(data.chunk.sizes)
    box = Box(start, tuple(map(operator.add, start, sizes)))
    size = box.volume * DTYPES[dtype].size_bytes
    is_part = own and box != whole(shape)
    if is_part:
        location, shape = (*location, f"at {','.join(map(str, start))}"), sizes
    if size:  # an empty tensor is the coordinator's: no rank holds more of it than another
        name, part = tensor_name(location), None
        if not is_part and box != whole(shape):
            # As a Checkpointer names it: `~6` stands in no name of a tensor's path.
            name, part = f"{name}~6at{','.join(map(str, start))}", BoxPart(name, shape, start)
        into.pieces.append(
            Piece(name, dtype, sizes, size, "cpu", contiguous=True, volatile=False, part=part)
        )
        into.sources.append(item)
    return WrittenEntry(location=location, box=box, dtype=dtype, tensor_bytes=size, is_part=is_part)


def _write_files(
    plan: SavePlan,
    work: list[_WrittenItem],
    planner: SavePlanner,
    store: Store,
    folder: str,
    rank: tuple[int, int],
    threads: int,
) -> WrittenIndexes:
    sources = [source for item in work for source in item.sources]
    layouts = [file.layout for file in plan.files]
    with closing(SaveWriter(store, folder, layouts, rank=rank)) as flush:
        with ThreadPoolExecutor(threads, thread_name_prefix="laststep-dcp-write") as writers:
            free: queue.SimpleQueue[mmap.mmap] = queue.SimpleQueue()
            for _ in range(threads + 1):
                free.put(mmap.mmap(-1, CHUNK_BYTES))
            for number, file in enumerate(plan.files):
                image = _Image(flush, number, writers, free)
                for piece in file.pieces:
                    for data in _stretches(_resolved(sources[piece], planner)):
                        image.append(data)
                image.end()
        return flush.finish({})


def _resolved(source: WriteItem | torch.Tensor, planner: SavePlanner) -> torch.Tensor:
    """The tensor of a piece, which MUST be what the plan said."""
    if isinstance(source, torch.Tensor):
        return source
    fqn, data = source.index.fqn, source.tensor_data
    given = planner.resolve_data(source)
    if not isinstance(given, torch.Tensor) or type(given) not in PLAIN_TENSORS:
        raise UsageError(
            f"cannot save {fqn}",
            expected="a plain tensor from the planner",
            found=with_article(type(given)),
            remedy="save the tensors that it is made of",
        )
    assert data is not None  # noqa: S101 (checked when it was added)
    if given.shape != data.chunk.sizes or given.dtype != data.properties.dtype:
        raise UsageError(
            f"cannot save {fqn}: the planner gave something else than it had planned",
            expected=f"{data.properties.dtype}{list(data.chunk.sizes)}",
            found=f"{given.dtype}{list(given.shape)}",
            remedy="let its create_local_plan say the dtype and shape that resolve_data gives",
        )
    if given.is_meta:
        raise UsageError(f"cannot save {fqn}: it is a meta tensor, without data")
    return given


def _stretches(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The bytes of a tensor in row-major order; a strided one is copied a few rows at a time."""
    tensor = tensor.detach()
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        yield bytes_of(tensor)
    elif tensor.nbytes <= CHUNK_BYTES or not tensor.dim():
        yield bytes_of(tensor.resolve_conj().resolve_neg().contiguous())
    else:
        rows = max(CHUNK_BYTES * tensor.shape[0] // tensor.nbytes, 1)
        for part in tensor.split(rows):
            yield from _stretches(part[0] if rows == 1 else part)


class _Image:
    """One file being filled from front to back, through buffers that come back when written."""

    def __init__(
        self,
        flush: SaveWriter,
        file: int,
        threads: ThreadPoolExecutor,
        free: queue.SimpleQueue[mmap.mmap],
    ) -> None:
        self._flush = flush
        self._file = file
        self._threads = threads
        self._free = free
        self._buffer: mmap.mmap | None = None
        self._start = self._filled = 0

    def append(self, data: torch.Tensor) -> None:
        at = 0
        while at < data.numel():
            if self._buffer is None:
                self._buffer = self._free.get()
            size = min(data.numel() - at, CHUNK_BYTES - self._filled)
            target = torch.frombuffer(self._buffer, dtype=torch.uint8)
            target[self._filled : self._filled + size].copy_(data[at : at + size])
            at += size
            self._filled += size
            if self._filled == CHUNK_BYTES:
                self.end()

    def end(self) -> None:
        """Hand over what is filled; raises the first error of the writers."""
        error = self._flush.error
        if error is not None:
            raise error
        if self._buffer is not None:
            self._threads.submit(self._write, self._buffer, self._start, self._filled)
            self._start += self._filled
            self._buffer, self._filled = None, 0

    def _write(self, buffer: mmap.mmap, start: int, size: int) -> None:
        self._flush.write(self._file, start, memoryview(buffer), size)  # keeps its error
        self._free.put(buffer)
