"""The jobs that `bench/scale.py` makes up, what their ranks write, and how work is measured.

3,000 bf16 weights with AdamW state, in three layouts. Their memory is on torch's meta device.
"""

from __future__ import annotations

import multiprocessing
import time
import tracemalloc
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch

from laststep.codecs.digests import DIGEST_BYTES
from laststep.codecs.objects import TensorRef
from laststep.format.index import Index, StoredLayout, plain_index
from laststep.plan.files import LAYOUT_NAME, ItemSpec, SavePlan, plan_save
from laststep.plan.layouts import (
    LocalItem,
    LocalLayout,
    LocalTensor,
    Replicas,
    digest_of,
    encode_local_layout,
)
from laststep.saving.describe import TakenState, work_out
from laststep.state.layouts import Layout, Mesh, Shard, Sharded
from laststep.state.tree import Collected, Piece, encode_item

if TYPE_CHECKING:
    from collections.abc import Callable

    from laststep.plan.layouts import GlobalLayout

TENSORS = 3000
SHAPES = ((8192, 8192), (8192, 28672), (28672, 8192), (8192,))
STAGES, TP, EP = 16, 8, 64
LEAST_RANKS = 2 * STAGES * TP
"""A job of half the size must still have a rank at each place of these meshes."""


class Job:
    """Ranks in layout groups of equal size, one after the other."""

    def __init__(self, ranks: int, *local_layouts: LocalLayout) -> None:
        self.ranks = ranks
        self.local_layouts = local_layouts
        self._group_size = ranks // len(local_layouts)

    def layout_group_of(self, rank: int) -> int:
        return rank // self._group_size

    @cached_property
    def encoded(self) -> list[bytes]:
        """The local layouts as ranks tell them to each other."""
        return list(map(encode_local_layout, self.local_layouts))

    @cached_property
    def digests(self) -> list[bytes]:
        """The digest of each rank's local layout."""
        names = list(map(digest_of, self.encoded))
        return [names[self.layout_group_of(rank)] for rank in range(self.ranks)]


def pipeline(ranks: int) -> Job:
    """PP16 x TP8 x FSDP2: stages of consecutive ranks; the embedding is tied to the last stage."""
    size = ranks // STAGES
    local_layouts = []
    for stage in range(STAGES):
        mesh = Mesh.of(("dp", "tp"), (size // TP, TP), range(stage * size, (stage + 1) * size))
        weights: dict[str, Layout | tuple[int, ...]] = {}
        if stage in (0, STAGES - 1):
            weights["embedding"] = Sharded((1 << 17, 8192), mesh, (Shard(0, TP), Shard(0)))
        for number in range(stage, TENSORS, STAGES):
            shape = SHAPES[number % len(SHAPES)]
            dim = len(shape) - 1 if number % 2 else 0
            first = Shard(0, TP if dim == 0 else 1)
            weights[f"layers.{number}"] = Sharded(shape, mesh, (first, Shard(dim)))
        local_layouts.append(_with_adamw(weights))
    return Job(ranks, *local_layouts)


def experts(ranks: int) -> Job:
    """A mixture of experts: a third of the tensors are experts, each sharded over 64 ranks."""
    mesh = Mesh.of(("dp", "ep"), (ranks // EP, EP), range(ranks))
    flat = Mesh.of(("dp",), (ranks,), range(ranks))
    weights: dict[str, Layout | tuple[int, ...]] = {}
    for number in range(TENSORS):
        shape = SHAPES[number % len(SHAPES)]
        if number % 3 == 0:
            weights[f"experts.{number}"] = Sharded((128, *shape), mesh, (Shard(1), Shard(0)))
        else:
            weights[f"dense.{number}"] = Sharded(shape, flat, (Shard(0),))
    return Job(ranks, _with_adamw(weights))


def replicated(ranks: int) -> Job:
    """Plain DDP. Every rank holds all of it: sides are an eighth, so that it takes 63 GB."""
    weights: dict[str, Layout | tuple[int, ...]] = {}
    for number in range(TENSORS):
        shape = SHAPES[number % len(SHAPES)]
        weights[f"layers.{number}"] = tuple(side // 8 for side in shape)
    return Job(ranks, _with_adamw(weights))


JOBS = {"pp-tp-fsdp": pipeline, "experts": experts, "ddp": replicated}


def _with_adamw(weights: dict[str, Layout | tuple[int, ...]]) -> LocalLayout:
    """Return the local layout of weights, each given by its layout or its shape, and of their
    optimizer."""
    model: list[LocalTensor] = []
    optimizer: list[LocalTensor] = []
    for name, given in weights.items():
        if isinstance(given, tuple):
            shape, layout, replicas = given, None, Replicas.UNPROVEN
        else:
            shape, layout, replicas = given.shape, given, Replicas.EQUAL
        model.append(LocalTensor(name, "bfloat16", shape, layout, replicas))
        optimizer += [
            LocalTensor(f"{name}/{moment}", "float32", shape, layout, replicas)
            for moment in ("exp_avg", "exp_avg_sq")
        ]
        optimizer.append(LocalTensor(f"{name}/step", "float32", (), None, Replicas.UNPROVEN))
    return (
        LocalItem("model", "module", per_rank=False, tensors=tuple(model)),
        LocalItem("optimizer", "optimizer", per_rank=False, tensors=tuple(optimizer)),
    )


def taken_on(job: Job, rank: int) -> TakenState:
    """Return the state of a rank as `save()` takes it."""
    described, sources = [], []
    for item in job.local_layouts[job.layout_group_of(rank)]:
        pieces: list[Piece] = []
        layouts: dict[str, Layout] = {}
        for name, dtype, shape, layout, _ in item.tensors:
            held = shape
            if layout is not None:
                layouts[name] = layout
                held = (sum(box.volume for box in layout.held(rank)),)
            memory = torch.empty(held, dtype=getattr(torch, dtype), device="meta")
            sources.append(memory)
            pieces.append(
                Piece(name, dtype, held, memory.nbytes, "cuda:0", contiguous=True, volatile=False)
            )
        spec = ItemSpec(name=item.name, kind=item.kind, standalone=True, pieces=tuple(pieces))
        described.append((spec, layouts))
    return TakenState(
        described=tuple(described), sources=tuple(sources), collected={}, metrics={}, metadata=b""
    )


class Share(NamedTuple):
    """What one rank writes: its files, and its index with digests of 0."""

    plan: SavePlan
    trees: dict[str, bytes]
    """The encoded plain values of each item."""
    rank_index: Index


def plan_of(job: Job, global_layout: GlobalLayout, rank: int, taken: TakenState) -> SavePlan:
    """Plan the files of a rank."""
    write_shard, _ = work_out(
        taken, global_layout, job.local_layouts[job.layout_group_of(rank)], rank
    )
    return plan_save(write_shard.specs, rank=(rank, job.ranks), values=write_shard.values)


def share_of(job: Job, global_layout: GlobalLayout, rank: int) -> Share:
    number = job.layout_group_of(rank)
    plan = plan_of(job, global_layout, rank, taken_on(job, rank))
    trees = {
        item.name: encode_item(
            Collected(
                tree={tensor.name: TensorRef(tensor.name) for tensor in item.tensors},
                pieces=(),
                sources=(),
            )
        )
        for item in job.local_layouts[number]
    }
    values = {**trees, LAYOUT_NAME: job.encoded[number]}
    layouts = tuple(
        StoredLayout(
            layout=file.layout, digests=bytes(file.layout.block_count * DIGEST_BYTES), runs=()
        )
        for file in plan.files
    )
    written = {name: values[name] for name in plan.values}
    return Share(plan, trees, plain_index(Index(rank=rank, layouts=layouts, values=written)))


Result = TypeVar("Result")


def measured(act: Callable[[], Result]) -> tuple[Result, float, float]:
    """Return the result of `act`, its CPU seconds, and its peak of Python's memory in MB. Seconds
    and memory come from two forks, because a second call would find caches filled."""

    def timed() -> tuple[Result, float]:
        began = time.process_time()
        result = act()
        return result, time.process_time() - began

    def traced() -> float:
        tracemalloc.start()
        act()
        return tracemalloc.get_traced_memory()[1] / 1e6

    return (*forked(timed), forked(traced))


def forked(act: Callable[[], Result]) -> Result:
    """Return what `act` returns in a fork of this process."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=lambda: sender.send(act()))
    child.start()
    sender.close()  # so that a child that dies ends `recv`
    try:
        result: Result = receiver.recv()
    finally:
        child.join()
    return result
