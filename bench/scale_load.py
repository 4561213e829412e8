"""What planning a load costs one rank of a job of up to 131,072, and the metadata that it reads.

The checkpoint and the job that loads it are made up by `bench/scale.py`; the plan is made by the
very code that a restore runs. Headers, tables and trees are encoded to find out how long they are.
"""

from __future__ import annotations

import resource
import time
from typing import TYPE_CHECKING, Any

from laststep.codecs import objects
from laststep.codecs.objects import TensorRef
from laststep.plan.files import LAYOUT_NAME, ItemSpec, plan_save, tree_name
from laststep.plan.layouts import agree, decode_local_layout, digest_of, encode_local_layout
from laststep.plan.reads import FileBox, chunks_of
from laststep.plan.who_reads import Ledger, ReadRequests, decode_request, encode_request
from laststep.state.tree import BoxPart, Piece

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from laststep.plan.layouts import GlobalLayout, LocalLayout
    from laststep.plan.receipts import Groups

    Job = tuple[Sequence[LocalLayout], Callable[[int], int]]


def measure(
    saved: Job,
    ranks: int,
    now: Job,
    loading: int,
    groups: Groups,
    manifest_bytes: int,
    group_bytes: int,
) -> dict[str, Any]:
    """One rank in the middle of `loading` loads what `ranks` have saved."""
    local_layouts, layout_group_of = saved
    data = [encode_local_layout(local_layout) for local_layout in local_layouts]
    names = [digest_of(one) for one in data]
    firsts = [
        next(r for r in range(ranks) if layout_group_of(r) == n) for n in range(len(local_layouts))
    ]
    rank = loading // 2 + 1
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.perf_counter()
    known = {name: decode_local_layout(one) for name, one in zip(names, data, strict=True)}
    global_layout = agree([names[layout_group_of(one)] for one in range(ranks)], known)
    index = {key: at for at, key in enumerate(global_layout.keys)}
    rank_requests = [
        decode_request(
            encode_request(
                {
                    index[item.name, tensor.name]: tensor.layout
                    for item in local_layout
                    for tensor in item.tensors
                }
            )
        )
        for local_layout in now[0]
    ]
    shapes = [spread.layouts[0].shape for spread in global_layout.spreads]
    requests = ReadRequests(rank_requests, {one: now[1](one) for one in range(loading)}, shapes)
    sources = list(Ledger(global_layout.spreads, requests).sources(rank))
    seconds = time.perf_counter() - began
    metadata = manifest_bytes
    for first, local_layout, one in zip(firsts, local_layouts, data, strict=True):
        small = plan_save((), rank=(first, ranks), objects=(tree_name("state"), LAYOUT_NAME))
        tree = {t.name: TensorRef(t.name) for item in local_layout for t in item.tensors}
        whole = objects.encode({"tree": tree, "ties": {}, "views": {}})
        metadata += small.files[0].region_bytes + len(one) + len(whole)
    chunks = 0
    for source in sources:
        stored, header_bytes, size = _stored(global_layout, source.writer, ranks)
        metadata += header_bytes
        began = time.perf_counter()
        chunks += len(chunks_of(rank, source, stored, requests, {0: size}))
        seconds += time.perf_counter() - began
    asked = {*firsts, *(source.writer for source in sources)}
    read = {groups.leader_of(one) for one in asked}
    metadata += len(read) * group_bytes
    return {
        "ranks": loading,
        "seconds": seconds,
        "chunks": chunks,
        "files": len(sources),
        "mb": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024,
        "metadata_bytes": metadata,
    }


def _stored(global_layout: GlobalLayout, writer: int, ranks: int) -> tuple[list[FileBox], int, int]:
    """What lies in the file of a writer, how long its header is, and its tensors."""
    pieces, shares = [], global_layout.assignments(writer)
    for key, share in shares:
        spread = global_layout.spreads[share.tensor]
        size = share.box.volume * spread.itemsize
        part = BoxPart(key[1], spread.layouts[0].shape, share.box.start)
        name = f"{key[1]}~6at{','.join(map(str, share.box.start))}"
        pieces.append(
            Piece(
                name,
                global_layout.dtypes[key],
                share.box.shape,
                size,
                "cuda:0",
                contiguous=True,
                volatile=False,
                part=part,
            )
        )
    spec = ItemSpec(name="state", kind="value", standalone=True, pieces=tuple(pieces))
    plan = plan_save((spec,), rank=(writer, ranks), objects=())
    stored = []
    for file in plan.files:
        for piece, entry in zip(file.pieces, file.entries, strict=True):
            share = shares[piece][1]
            itemsize = global_layout.spreads[share.tensor].itemsize
            stored.append(FileBox(share.tensor, itemsize, 0, entry.start, entry.stop, share.box))
    return stored, sum(file.region_bytes for file in plan.files), plan.tensor_bytes
