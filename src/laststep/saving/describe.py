"""Take the state of all items at one moment, ready to be planned and captured.

Runs on the training thread in `save()`. Containers and plain values are copied there and then; the
tensors are only referred to, for the capture to copy. What can wait (turning trees into bytes) is
left to the capture thread.

Also works out what this rank writes of the state: windows into the memory that it holds. The
garbage collector is held back meanwhile; with 100,000 tensors that halves the time on the training
thread.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from msgspec import structs

from laststep.checks import plain, shown
from laststep.codecs import objects
from laststep.errors import MismatchError, UsageError
from laststep.format.manifest import ItemRecord
from laststep.plan.files import TABLE_NAME, ItemSpec
from laststep.plan.tables import (
    Agreement,
    Replicas,
    Table,
    TableItem,
    TableTensor,
    agree,
    digest_of,
    encode_table,
)
from laststep.state.boxes import Box, whole
from laststep.state.modules import one_moment
from laststep.state.provider import BoxPart, Piece
from laststep.state.tensors import (
    CollectCache,
    box_of,
    check_held,
    collect,
    hold_scalar,
    plain_scalar,
)
from laststep.state.tree import encode_item

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import torch

    from laststep.flush.saves import SealedParts, SealParts
    from laststep.saving.prepare import Prepared
    from laststep.state.layouts import Layout
    from laststep.state.provider import Collected, StateProvider

    Described = tuple[tuple[ItemSpec, dict[str, Layout]], ...]
    """Each item as the planner sees it, and how those of its tensors lie that are in parts."""
    from laststep.plan.who_writes import Share


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """No automatic collection inside; as it was before, afterwards."""
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

    specs: tuple[ItemSpec, ...]
    sources: tuple[torch.Tensor, ...]
    collected: dict[str, Collected]
    metrics: dict[str, object]
    metadata: object

    @property
    def described(self) -> Described:
        """How it is built, whatever its numbers are."""
        return tuple((spec, self.collected[spec.name].layouts) for spec in self.specs)

    def sealing(
        self, prepared: Prepared, note: Callable[[dict[str, bytes]], bytes] | None = None
    ) -> SealParts:
        """What the capture thread calls to serialise the rest, once all tensors are under way;
        `note` is told the plain values of each item, and gives this rank's receipt."""
        plan, kept = prepared.plan, prepared.trees
        table = b"" if prepared.portion is None else prepared.portion.encoded

        def seal() -> SealedParts:
            encoded = {
                name: _encoded(name, part, kept.setdefault(name, objects.EncodedDicts()))
                for name, part in self.collected.items()
            }
            receipt = b"" if note is None else note(encoded)
            known = {**encoded, TABLE_NAME: table}
            values = {name: known[name] for name in plan.values}
            items = tuple(
                ItemRecord(
                    name=item.name,
                    kind=item.kind,
                    tensors=len(item.pieces),
                    size_bytes=item.size_bytes,
                    per_rank=item.per_rank,
                )
                for item in plan.items
            )
            metrics = {name: plain_scalar(value) for name, value in self.metrics.items()}
            return values, items, objects.encode(metrics), objects.encode(self.metadata), receipt

        return seal


def take_state(
    providers: Mapping[str, StateProvider],
    caches: dict[str, CollectCache],
    metrics: Mapping[str, object] | None,
    metadata: object,
    *,
    allow_pickle: bool,
) -> TakenState:
    """Describe every item now; `caches` from one save to the next spare what stays as it was."""
    specs: list[ItemSpec] = []
    sources: list[torch.Tensor] = []
    collected: dict[str, Collected] = {}
    only_ours = all(provider.passive for provider in providers.values())
    with one_moment() if only_ours else contextlib.nullcontext():
        for name, provider in providers.items():
            cache = caches.setdefault(name, CollectCache())
            with naming(name):
                state = provider.describe()
                part = collect(
                    state.value, volatile=state.volatile, allow_pickle=allow_pickle, cache=cache
                )
            collected[name] = part
            sources += part.sources
            specs.append(
                ItemSpec(
                    name=name,
                    kind=provider.kind,
                    standalone=state.standalone,
                    pieces=part.pieces,
                    per_rank=provider.per_rank,
                    mixed=getattr(provider, "mixed", False),
                )
            )
    held = dict(_metric(name, value) for name, value in (metrics or {}).items())
    return TakenState(
        specs=tuple(specs),
        sources=tuple(sources),
        collected=collected,
        metrics=held,
        metadata=_plain_metadata(metadata),
    )


@contextlib.contextmanager
def naming(item: str, did: str = "looked at") -> Iterator[None]:
    """Have errors inside say whose state they are about, and what laststep did with it."""
    try:
        yield
    except (UsageError, MismatchError) as error:
        raise _about(error, f"item {item!r}") from error.__cause__
    except Exception as error:  # out of a state_dict or a provider of the user's own
        error.add_note(f"while laststep {did} item {item!r}")
        raise


def _about(
    error: UsageError | MismatchError, whose: str, *, remedy: str | None = None
) -> UsageError | MismatchError:
    """The same error, which also says whose value it is about."""
    named = type(error)(
        error.what,
        where=whose if error.where is None else f"{error.where} of {whose}",
        expected=error.expected,
        found=error.found,
        remedy=remedy or error.remedy,
    )
    if isinstance(error, MismatchError) and isinstance(named, MismatchError):
        named.problems = error.problems
    return named


def _encoded(name: str, collected: Collected, kept: objects.EncodedDicts) -> bytes:
    try:
        return encode_item(collected, kept)
    except UsageError as error:
        # What can be pickled was, if that was allowed: this is a member of a set, or a key.
        remedy = "use plain values as keys and in sets, or leave it out"
        raise _about(error, f"item {name!r}", remedy=remedy) from error


def _plain_metadata(metadata: object) -> object:
    """A copy of the metadata, which is stored as plain values whatever allow_pickle says."""
    try:
        return objects.decode(objects.encode(metadata), where="metadata")
    except UsageError as error:
        remedy = "make it plain, e.g. with str() or float(), or save it as an item"
        raise _about(error, "the metadata", remedy=remedy) from error


def _metric(name: str, value: object) -> tuple[str, object]:
    if not isinstance(name, str):
        raise UsageError(
            "a metric's name is a string", found=shown(name), remedy="pass metrics={'loss': loss}"
        )
    return str(plain(name)), hold_scalar(name, value)


def table_of(taken: TakenState) -> Table:
    """How this rank describes its state to the others."""
    _refuse_parts_of_one(taken)
    return tuple(
        TableItem(
            spec.name,
            spec.kind,
            spec.per_rank,
            () if spec.per_rank else _tensors(spec, layouts),
            () if spec.per_rank else _ties(spec.name, taken.collected[spec.name]),
        )
        for spec, layouts in taken.described
    )


def agree_alone(table: Table) -> Agreement:
    """What a rank that saves alone holds: all of it. `MismatchError` where that is only a part of a
    tensor, which lies over other ranks as well."""
    name = digest_of(encode_table(table))
    return agree([name], {name: table})


class _Window(NamedTuple):
    """What is written of the memory of a piece."""

    source: int
    first: int | None
    """Where it begins in the flattened memory, if that holds several boxes one after the other."""
    held: tuple[int, ...]
    """The shape of the box that the memory is."""
    box: Box | None
    """The part of that box; None: all of it."""

    def of(self, memory: torch.Tensor) -> torch.Tensor:
        if self.first is not None:
            flat = memory.reshape(-1)[self.first : self.first + math.prod(self.held)]
            memory = flat.view(self.held)
        elif tuple(memory.shape) != self.held:
            memory = memory.view(self.held)
        return memory if self.box is None else box_of(memory, self.box)


class Portion(NamedTuple):
    """What a rank writes, under an agreement."""

    agreement: Agreement
    table: Table
    specs: tuple[ItemSpec, ...]
    windows: tuple[_Window, ...]
    contiguous: list[bool]
    """Of each window: whether it lies in one stretch of memory."""
    values: tuple[str, ...]
    """The names of the plain values that this rank writes."""
    encoded: bytes
    """The table, if this rank says it for its class."""

    def sources(self, taken: TakenState) -> tuple[torch.Tensor, ...] | None:
        """What is written, of this memory. None where a piece lies in it otherwise than it did: of
        that a table says nothing, and two strides of a tensor can differ in it for a window."""
        found = tuple(window.of(taken.sources[window.source]) for window in self.windows)
        same = [source.is_contiguous() for source in found] == self.contiguous
        return found if same else None


def _tensors(spec: ItemSpec, layouts: dict[str, Layout]) -> tuple[TableTensor, ...]:
    found = []
    for piece in spec.pieces:
        layout = layouts.get(piece.name)
        shape = piece.shape if layout is None else layout.shape
        found.append(TableTensor(piece.name, piece.dtype, shape, layout, _replicas(piece, layout)))
    return tuple(found)


def _replicas(piece: Piece, layout: Layout | None) -> Replicas:
    """A layout is somebody's word that replicas are equal; of plain tensors nobody has given it."""
    if piece.volatile:
        return Replicas.CHANGING
    return Replicas.UNPROVEN if layout is None else Replicas.EQUAL


def _refuse_parts_of_one(taken: TakenState) -> None:
    """`UsageError` where a rank is said to have for itself what it shares with others: such tensors
    would come back as if the part were the whole."""
    for spec in taken.specs:
        layouts = taken.collected[spec.name].layouts
        if spec.per_rank and layouts:
            raise UsageError(
                "an item that each rank has for itself holds parts of tensors that ranks share",
                where=f"item {spec.name!r}",
                found=next(iter(layouts)),
                remedy=f"pass {spec.name} without laststep.PerRank: the parts of all are one state",
            )


def refuse_mixed(item: str, *, mixed: bool) -> None:
    """`UsageError` for a group of which a part is each rank's own and a part is not."""
    if mixed:
        raise UsageError(
            "a group mixes what ranks have in common with what each has for itself",
            where=f"item {item!r}",
            remedy="pass random numbers, loaders and the like as items of their own",
        )


def _ties(item: str, collected: Collected) -> tuple[tuple[str, str], ...]:
    """What is tied, where tensors lie in parts. `UsageError` where parts overlap otherwise: their
    common memory would be stored as one, and is other bytes on every rank."""
    over = next((name for name in collected.views if name in collected.layouts), None)
    if over is not None:
        raise UsageError(
            "cannot save parts of tensors that lie over each other in memory",
            where=f"{item}/{over}",
            remedy="describe the same memory once, or by the same layout",
        )
    return tuple(collected.ties.items()) if collected.layouts else ()


def work_out(
    taken: TakenState, agreement: Agreement, table: Table, rank: int
) -> tuple[Portion, tuple[torch.Tensor, ...]]:
    """What a rank writes, and the memory that it writes it from."""
    if len(agreement.class_of) > 1:
        for spec in taken.specs:
            refuse_mixed(spec.name, mixed=spec.mixed)
    shares: dict[tuple[str, str], list[Share]] = {}
    for key, share in agreement.shares(rank):
        shares.setdefault(key, []).append(share)
    specs: list[ItemSpec] = []
    windows: list[_Window] = []
    sources: list[torch.Tensor] = []
    at = 0
    for spec in taken.specs:
        layouts = taken.collected[spec.name].layouts
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
            for share in shares.get((spec.name, piece.name), ()):
                box = None if share.box == share.held else share.box.within(share.held)
                window = _Window(number, held.get(share.held), share.held.shape, box)
                windows.append(window)
                sources.append(window.of(taken.sources[number]))
                pieces.append(_piece(piece, shape, share, sources[-1]))
        at += len(spec.pieces)
        specs.append(structs.replace(spec, pieces=tuple(pieces)))
    first = agreement.is_first(rank)
    values = tuple(spec.name for spec in specs if first or spec.per_rank)
    encoded = encode_table(table) if first and len(agreement.class_of) > 1 else b""
    portion = Portion(
        agreement,
        table,
        tuple(specs),
        tuple(windows),
        [source.is_contiguous() for source in sources],
        values + ((TABLE_NAME,) if encoded else ()),
        encoded,
    )
    return portion, tuple(sources)


def _held(rank: int, piece: Piece, layout: Layout | None, where: str) -> dict[Box, int | None]:
    """The boxes that the memory of a piece holds, and where each begins in it; None: it is all."""
    if layout is None:
        return {whole(piece.shape): None}
    boxes = layout.held(rank)
    check_held(rank, boxes, math.prod(piece.shape), where)
    if len(boxes) == 1:
        return {boxes[0]: None}
    starts = itertools.accumulate((box.volume for box in boxes), initial=0)
    return dict(zip(boxes, starts, strict=False))


def _piece(piece: Piece, shape: tuple[int, ...], share: Share, window: torch.Tensor) -> Piece:
    if share.box == whole(shape):
        return piece._replace(shape=shape, contiguous=window.is_contiguous())
    start = share.box.start
    return piece._replace(
        # `~6` stands in no name of a tensor's path, so nothing else has this one.
        name=f"{piece.name}~6at{','.join(map(str, start))}",
        shape=share.box.shape,
        size_bytes=window.numel() * window.element_size(),
        contiguous=window.is_contiguous(),
        part=BoxPart(piece.name, shape, start),
    )
