"""Take the state of all items at one moment and prepare everything that its save needs.

Runs on the training thread in `save()`. Containers and plain values are copied immediately; tensors
are only referenced, and the capture copies them. Between two saves, usually only the numbers
change: each description is compared with the previous one, once, and everything derived from it
hangs on one value, `Prepared`, so that no part of it can belong to another state.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from msgspec import structs

from laststep.capture.copies import Copies
from laststep.checks import checked
from laststep.codecs import objects
from laststep.codecs.objects import EncodedDicts
from laststep.errors import LaststepError, MismatchError, UsageError
from laststep.flush.protocol import CaptureDone
from laststep.plan.files import LAYOUT_NAME, ItemSpec, SavePlan, plan_save
from laststep.plan.layouts import (
    GlobalLayout,
    LocalItem,
    LocalLayout,
    LocalTensor,
    Replicas,
    digest_of,
    encode_local_layout,
)
from laststep.plan.layouts import agree as agree_of
from laststep.state.boxes import Box, whole
from laststep.state.collecting import CollectCache, collect
from laststep.state.tensors import box_of, check_held, hold_scalar, plain_scalar
from laststep.state.tree import BoxPart, Piece, encode_item

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import torch

    from laststep.plan.who_writes import Assignment
    from laststep.ranks.group import Rank
    from laststep.state.layouts import Layout
    from laststep.state.provider import StateProvider
    from laststep.state.tree import Collected

    Described = tuple[tuple[ItemSpec, dict[str, Layout]], ...]
    """Each item as the planner sees it, with the layouts of its sharded tensors."""


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Suspend garbage collection, which doubles the stall of a save of 100,000 tensors."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenState:
    """The state of all items at the moment of `save()`."""

    described: Described
    """The structure of the state, without its values."""
    sources: tuple[torch.Tensor, ...]
    """One tensor for each piece of `described`, in order."""
    collected: dict[str, Collected]
    metrics: dict[str, object]
    metadata: bytes

    def seal(
        self, prepared: Prepared, note: Callable[[dict[str, bytes]], bytes] | None, save: int
    ) -> CaptureDone:
        """Serialise everything but tensors. Called on the capture thread once all tensors are on
        their way. `note` receives the encoded plain values of each item and returns this rank's
        receipt."""
        encoded: dict[str, bytes] = {}
        for name, part in self.collected.items():
            try:
                encoded[name] = encode_item(part, prepared.trees[name])
            except UsageError as error:
                # A dict key or a member of a set: other values are already pickled or refused.
                remedy = "use plain values as keys and in sets, or leave it out"
                raise _about(error, f"item {name!r}", remedy=remedy) from error
        receipt = b"" if note is None else note(encoded)
        if prepared.write_shard is not None:
            encoded[LAYOUT_NAME] = prepared.write_shard.encoded
        metrics = dict(zip(self.metrics, map(plain_scalar, self.metrics.values()), strict=True))
        names = prepared.plan.values
        return CaptureDone(
            save=save,
            values=dict(zip(names, map(encoded.__getitem__, names), strict=True)),
            items=prepared.plan.item_records,
            metrics=objects.encode(metrics),
            metadata=self.metadata,
            receipt=receipt,
        )


def take_state(
    providers: Mapping[str, StateProvider],
    caches: dict[str, CollectCache],
    metrics: Mapping[str, object],
    metadata: object,
    *,
    allow_pickle: bool,
) -> TakenState:
    """Describe every item now; `caches` keeps unchanged parts from one save to the next."""
    sources: list[torch.Tensor] = []
    collected: dict[str, Collected] = {}
    described: list[tuple[ItemSpec, dict[str, Layout]]] = []
    for name, provider in providers.items():
        cache = caches.setdefault(name, CollectCache())
        with naming(name):
            state = provider.describe()
            part = collect(
                state.value, volatile=state.volatile, allow_pickle=allow_pickle, cache=cache
            )
        collected[name] = part
        sources += part.sources
        spec = ItemSpec(
            name=name,
            kind=provider.kind,
            standalone=state.standalone,
            pieces=part.pieces,
            per_rank=provider.per_rank,
        )
        described.append((spec, part.layouts))
    held: dict[str, object] = {}
    for name, value in metrics.items():
        held[checked("the name of a metric", name, str)] = hold_scalar(name, value)
    try:
        encoded = objects.encode(metadata)  # plain values, regardless of allow_pickle
    except UsageError as error:
        remedy = "make it plain, e.g. with str() or float(), or save it as an item"
        raise _about(error, "the metadata", remedy=remedy) from error
    return TakenState(
        described=tuple(described),
        sources=tuple(sources),
        collected=collected,
        metrics=held,
        metadata=encoded,
    )


@contextlib.contextmanager
def naming(item: str, did: str = "looked at") -> Iterator[None]:
    """Add the item's name and laststep's action to errors raised inside the block."""
    try:
        yield
    except (UsageError, MismatchError) as error:
        raise _about(error, f"item {item!r}") from error.__cause__
    except Exception as error:  # raised by the user's state_dict or provider
        error.add_note(f"while laststep {did} item {item!r}")
        raise


def _about(error: LaststepError, whose: str, **fields: str) -> LaststepError:
    """Return a copy of the error that also names the owner of the value."""
    where = whose if error.where is None else f"{error.where} of {whose}"
    return error.amended(where=where, **fields)


def local_layout_of(taken: TakenState) -> LocalLayout:
    """Return this rank's description of its state for the other ranks. Raises `UsageError` if a
    per-rank item holds shards of a tensor: each would be restored as if it were the whole."""
    for spec, layouts in taken.described:
        if spec.per_rank and layouts:
            raise UsageError(
                "a per-rank item holds shards of shared tensors",
                where=f"item {spec.name!r}",
                found=next(iter(layouts)),
                remedy=f"pass {spec.name} without laststep.PerRank: its shards form one state",
            )
    return tuple(
        LocalItem(
            spec.name,
            spec.kind,
            spec.per_rank,
            () if spec.per_rank else _tensors(spec, layouts),
            () if spec.per_rank else _ties(spec.name, taken.collected[spec.name]),
        )
        for spec, layouts in taken.described
    )


class _Window(NamedTuple):
    """The part of a piece's memory that is written."""

    source: int
    first: int | None
    """Offset in the flattened memory, in elements, if that holds several boxes; else None."""
    held: tuple[int, ...]
    """The shape of the held box."""
    box: Box | None
    """The part of the held box to write; None means all of it."""

    def of(self, memory: torch.Tensor) -> torch.Tensor:
        if self.first is not None:
            flat = memory.reshape(-1)[self.first : self.first + math.prod(self.held)]
            memory = flat.view(self.held)
        elif tuple(memory.shape) != self.held:
            memory = memory.view(self.held)
        return memory if self.box is None else box_of(memory, self.box)


class WriteShard(NamedTuple):
    """Everything that one rank writes of a save, under a global layout."""

    global_layout: GlobalLayout
    local_layout: LocalLayout
    specs: tuple[ItemSpec, ...]
    windows: tuple[_Window, ...]
    contiguous: list[bool]
    """Tells for each window if it is contiguous in memory."""
    values: tuple[str, ...]
    """The names of the plain values that this rank writes."""
    encoded: bytes
    """The encoded local layout, if this rank writes it for its layout group; else empty."""

    def sources(self, taken: TakenState) -> tuple[torch.Tensor, ...] | None:
        """Return the windows into the memory of `taken`. None if the contiguity of a window has
        changed: local layouts do not record strides, and a window of a tensor can be contiguous
        with some strides only."""
        found = tuple(window.of(taken.sources[window.source]) for window in self.windows)
        return found if [source.is_contiguous() for source in found] == self.contiguous else None


def _tensors(spec: ItemSpec, layouts: dict[str, Layout]) -> tuple[LocalTensor, ...]:
    found = []
    for piece in spec.pieces:
        layout = layouts.get(piece.name)
        shape = piece.shape if layout is None else layout.shape
        # A layout asserts that replicas are equal; a plain tensor carries no such promise.
        replicas = Replicas.UNPROVEN if layout is None else Replicas.EQUAL
        if piece.volatile:
            replicas = Replicas.CHANGING
        found.append(LocalTensor(piece.name, piece.dtype, shape, layout, replicas))
    return tuple(found)


def _ties(item: str, collected: Collected) -> tuple[tuple[str, str], ...]:
    """Return the ties of an item with sharded tensors. Raises `UsageError` if shards overlap in
    another way: their memory would be stored once, but holds other bytes on every rank."""
    over = next((name for name in collected.views if name in collected.layouts), None)
    if over is not None:
        raise UsageError(
            "cannot save shards of tensors that overlap in memory",
            where=f"{item}/{over}",
            remedy="describe the same memory once, or by the same layout",
        )
    return tuple(collected.ties.items()) if collected.layouts else ()


def work_out(
    taken: TakenState, global_layout: GlobalLayout, local_layout: LocalLayout, rank: int
) -> tuple[WriteShard, tuple[torch.Tensor, ...]]:
    """Return this rank's write shard and the memory that it is written from."""
    assignments: dict[tuple[str, str], list[Assignment]] = {}
    for key, assignment in global_layout.assignments(rank):
        assignments.setdefault(key, []).append(assignment)
    specs: list[ItemSpec] = []
    windows: list[_Window] = []
    sources: list[torch.Tensor] = []
    at = 0
    for spec, layouts in taken.described:
        pieces: list[Piece] = []
        for number, piece in enumerate(spec.pieces, at):
            if spec.per_rank:
                pieces.append(piece)
                windows.append(_Window(number, None, piece.shape, None))
                sources.append(taken.sources[number])
                continue
            layout = layouts.get(piece.name)
            held = _held(rank, piece, layout, f"{spec.name}/{piece.name}")
            shape = piece.shape if layout is None else layout.shape
            for assignment in assignments.get((spec.name, piece.name), ()):
                box = assignment.box.within(assignment.held)
                window = _Window(
                    number,
                    held.get(assignment.held),
                    assignment.held.shape,
                    None if assignment.box == assignment.held else box,
                )
                windows.append(window)
                sources.append(window.of(taken.sources[number]))
                pieces.append(_piece(piece, shape, assignment, sources[-1]))
        at += len(spec.pieces)
        specs.append(structs.replace(spec, pieces=tuple(pieces)))
    first = global_layout.is_first(rank)
    values = tuple(spec.name for spec in specs if first or spec.per_rank)
    several = len(global_layout.layout_group_of) > 1
    encoded = encode_local_layout(local_layout) if first and several else b""
    write_shard = WriteShard(
        global_layout,
        local_layout,
        tuple(specs),
        tuple(windows),
        [source.is_contiguous() for source in sources],
        values + ((LAYOUT_NAME,) if encoded else ()),
        encoded,
    )
    return write_shard, tuple(sources)


def _held(rank: int, piece: Piece, layout: Layout | None, where: str) -> dict[Box, int | None]:
    """Return the boxes in a piece's memory, each with its offset; None if a single one fills it."""
    if layout is None:
        return {whole(piece.shape): None}
    boxes = layout.held(rank)
    check_held(rank, boxes, math.prod(piece.shape), where)
    if len(boxes) == 1:
        return {boxes[0]: None}
    starts = itertools.accumulate((box.volume for box in boxes), initial=0)
    return dict(zip(boxes, starts, strict=False))


def _piece(
    piece: Piece, shape: tuple[int, ...], assignment: Assignment, window: torch.Tensor
) -> Piece:
    if assignment.box == whole(shape):
        return piece._replace(shape=shape, contiguous=window.is_contiguous())
    start = assignment.box.start
    return piece._replace(
        # No tensor's path contains `~6`, so this name is unique.
        name=f"{piece.name}~6at{','.join(map(str, start))}",
        shape=assignment.box.shape,
        size_bytes=window.numel() * window.element_size(),
        contiguous=window.is_contiguous(),
        part=BoxPart(piece.name, shape, start),
    )


class Prepared(NamedTuple):
    """Everything that a save needs besides the state itself."""

    described: Described
    plan: SavePlan
    write_shard: WriteShard | None
    """The part of its state that this rank writes; None means all of it, unchanged."""
    copies: Copies
    trees: defaultdict[str, EncodedDicts]
    """Encoded dicts of each item's tree, kept by the capture thread for the next save."""


class Preparer:
    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self.last: Prepared | None = None

    def prepare(
        self, taken: TakenState, agree: Callable[[LocalLayout], GlobalLayout] | None = None
    ) -> tuple[Prepared, tuple[torch.Tensor, ...]]:
        """Return the cached `Prepared` if the state's structure has not changed, else a new one;
        and the memory to write, one tensor per piece of the plan. In a job of several ranks,
        `agree` returns the global layout for this rank's local layout."""
        described = taken.described
        last = self.last if self.last and self.last.described == described else None
        if agree is None and not any(layouts for _, layouts in described):
            if last is not None:
                return last, taken.sources
            write_shard, sources = None, taken.sources
            plan = plan_save(tuple(spec for spec, _ in described))
        else:
            known = last and last.write_shard
            local_layout = known.local_layout if known else local_layout_of(taken)
            if agree is not None:
                global_layout = agree(local_layout)
            elif known:
                global_layout = known.global_layout
            else:  # `MismatchError` if other ranks hold the other shards of a tensor
                name = digest_of(encode_local_layout(local_layout))
                global_layout = agree_of([name], {name: local_layout})
            if last and known and known.global_layout is global_layout:
                same = known.sources(taken)
                if same is not None:
                    return last, same
            write_shard, sources = work_out(taken, global_layout, local_layout, self._rank.number)
            rank = None if agree is None else self._rank
            plan = plan_save(write_shard.specs, rank=rank, values=write_shard.values)
        trees = defaultdict[str, EncodedDicts](EncodedDicts)
        self.last = Prepared(described, plan, write_shard, Copies(plan), trees)
        return self.last, sources
