"""Make one checkpoint of what the ranks of a DCP save have written: check it, write the trees, and
say what is to be committed.

Runs on the coordinator, after every rank has made its files durable. What no reader would take is
refused here, before anything is committed.
"""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING

from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from laststep.adapters.dcp import record as dcp_record
from laststep.adapters.dcp.layout import tensor_name
from laststep.adapters.dcp.record import DcpRecord, RecordEntry
from laststep.adapters.dcp.writing import KIND, WrittenEntry
from laststep.adapters.nesting import nest
from laststep.codecs import objects
from laststep.codecs.objects import TensorRef
from laststep.errors import AbortedError, UsageError
from laststep.flush.writer import SaveWriter
from laststep.format.layout import FileLayout, TensorEntry, header_bytes_of
from laststep.format.manifest import Commit, ItemRecord, WrittenIndexes
from laststep.plan.files import SHARED_FILE
from laststep.read.files import box_text
from laststep.state.boxes import covers_once
from laststep.terms import listed
from laststep.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.storage import WriteResult

    from laststep.adapters.dcp.attempts import DcpSave

_SHARED = f"{SHARED_FILE}.safetensors"


@dataclass(slots=True)
class _ManifestItem:
    """What the manifest says of an item."""

    tensors: int = 0
    size_bytes: int = 0


@dataclass(slots=True)
class _WrittenByAll:
    """What the ranks have written, put together."""

    written: dict[str, list[WrittenEntry]] = field(default_factory=dict)
    by_rank: dict[int, WrittenIndexes] = field(default_factory=dict)
    items: dict[str, _ManifestItem] = field(default_factory=dict)


def make_commit(
    attempt: DcpSave,
    metadata: Metadata,
    results: Sequence[Sequence[WriteResult]],
    *,
    save_id: str,
    allow_pickle: bool,
) -> Commit:
    """Write what is left to write into the attempt's folder; returns the commit."""
    gathered = _gather(results, attempt.folder)
    entries = [
        entry
        for fqn, content in metadata.state_dict_metadata.items()
        for entry in _checked(fqn, gathered, content)
    ]
    unknown = sorted(gathered.written.keys() - metadata.state_dict_metadata.keys())
    if unknown:
        raise UsageError("the planner's metadata lacks what was written", found=listed(unknown))
    record = DcpRecord(entries=tuple(entries), planner_data=metadata.planner_data, save_id=save_id)
    trees = nest(
        ((entry.location, _node(entry, gathered)) for entry in entries), where=attempt.folder
    )
    values = {
        item: objects.encode({"tree": tree, "ties": {}, "views": {}})
        for item, tree in trees.items()
    }
    values[dcp_record.OBJECT_NAME] = dcp_record.encode(record, allow_pickle=allow_pickle)
    ranks = len(results)
    written = WrittenIndexes()
    for rank in range(ranks):
        written = written.plus(gathered.by_rank.get(rank) or _nothing(attempt, rank, ranks))
    written = written.plus(
        _write_shared(attempt, _empty_tensors(gathered, metadata), values, ranks)
    )
    return Commit(
        run=attempt.run.id,
        step=attempt.step,
        epoch=attempt.epoch,
        attempt=attempt.number,
        created_s=time.time(),
        laststep=VERSION,
        written=written,
        items=tuple(
            ItemRecord(name=name, kind=KIND, tensors=item.tensors, size_bytes=item.size_bytes)
            for name, item in gathered.items.items()
        ),
        continues=attempt.continues,
        ranks=ranks,
    )


def _gather(results: Sequence[Sequence[WriteResult]], folder: str) -> _WrittenByAll:
    gathered = _WrittenByAll()
    for result in chain.from_iterable(results):
        written: WrittenEntry = result.storage_data
        known = gathered.written.setdefault(result.index.fqn, [])
        item = gathered.items.setdefault(str(written.location[0]), _ManifestItem())
        if written.tree is not None or not known:  # a tensor counts once, whatever its parts
            item.tensors += written.tensors
        item.size_bytes += written.tensor_bytes
        known.append(written)
        if written.files is not None:
            if written.files.folder != folder:
                raise AbortedError(
                    "the Writer was used for another save before this one ended",
                    expected=f"files in {folder}",
                    found=f"files in {written.files.folder}",
                    remedy="make a Writer for each of the saves that run at once",
                )
            gathered.by_rank[written.files.rank] = written.files.written
    return gathered


def _checked(fqn: str, gathered: _WrittenByAll, content: object) -> list[RecordEntry]:
    """Check an entry of the metadata: all of it MUST have been written, and only once. Of a rank
    that saves for itself, each part of a tensor is an entry."""
    written = gathered.written.get(fqn)
    if not written:
        raise UsageError(f"no rank has written {fqn}, which the planner's metadata lists")
    first = written[0]
    if isinstance(content, TensorStorageMetadata) and all(entry.is_part for entry in written):
        return [
            RecordEntry(
                fqn=fqn,
                location=part.location,
                kind="part",
                start=part.box.start,
                shape=tuple(content.size),
            )
            for part in written
            if part.box is not None
        ]
    if any(other.location != first.location for other in written):
        raise UsageError(
            f"the ranks do not agree where {fqn} belongs",
            found=", ".join(sorted({str(other.location) for other in written})),
            remedy="save without the plan caching of the planner",
        )
    if not isinstance(content, TensorStorageMetadata):
        if len(written) > 1 or first.tree is None:
            raise UsageError(f"{fqn} was written {len(written)} times, or as a tensor")
        return [RecordEntry(fqn=fqn, location=first.location, kind=first.kind)]
    boxes = [entry.box for entry in written if entry.box is not None]
    shape = tuple(content.size)
    alike = len(boxes) == len(written) and len({entry.dtype for entry in written}) == 1
    if not alike or not covers_once(shape, [box for box in boxes if box.volume]):
        raise UsageError(
            f"the chunks of {fqn} do not make it up",
            expected=f"every element of {list(shape)} once, of one dtype",
            found=listed(f"[{box_text(box)}]" for box in boxes),
            remedy="save on all ranks that hold a part of it, without no_dist",
        )
    return [RecordEntry(fqn=fqn, location=first.location, kind="tensor")]


def _node(entry: RecordEntry, gathered: _WrittenByAll) -> object:
    if entry.kind in ("tensor", "part"):
        return TensorRef(tensor_name(entry.location))
    tree = gathered.written[entry.fqn][0].tree
    return objects.decode(tree or b"", where=entry.fqn)


def _empty_tensors(gathered: _WrittenByAll, metadata: Metadata) -> tuple[TensorEntry, ...]:
    """The tensors without elements, of which no rank has written a chunk."""
    entries: dict[str, TensorEntry] = {}
    for fqn, content in metadata.state_dict_metadata.items():
        for written in gathered.written[fqn]:
            if not isinstance(content, TensorStorageMetadata) or written.box is None:
                continue
            shape = written.box.shape if written.is_part else tuple(content.size)
            if 0 in shape:
                name = f"{written.location[0]}/{tensor_name(written.location)}"
                entries[name] = TensorEntry(name, written.dtype or "", shape, 0, 0)
    return tuple(entries.values())


def _nothing(attempt: DcpSave, rank: int, ranks: int) -> WrittenIndexes:
    """The index of a rank that had nothing to write."""
    with closing(SaveWriter(attempt.run.store, attempt.folder, (), rank=(rank, ranks))) as writer:
        return writer.finish({})


def _write_shared(
    attempt: DcpSave, tensors: tuple[TensorEntry, ...], values: dict[str, bytes], ranks: int
) -> WrittenIndexes:
    """Write what is of no rank, in an index of the coordinator's own, behind those of ranks."""
    layouts = []
    if tensors:
        layout = FileLayout(
            name=_SHARED,
            item=None,
            header_bytes=header_bytes_of(tensors),
            tensor_bytes=0,
            tensors=tensors,
        )
        layouts.append(layout)
    store, folder = attempt.run.store, attempt.folder
    with closing(SaveWriter(store, folder, layouts, rank=(ranks, ranks))) as writer:
        return writer.finish(values)
