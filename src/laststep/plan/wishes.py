"""Say what every rank of a job wants of a checkpoint, without a list for each rank.

Pure. Ranks that want the same tensors in the same layouts form a class and say so once; who wants
what of a box follows by arithmetic, however many ranks there are.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from laststep.state.boxes import Box, whole
from laststep.state.layouts import Layout, Mesh, MeshRange, from_plain, held_whole, to_plain

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

Wish = dict[int, Layout | None]
"""The tensors that a rank wants, by number; without a layout, it wants all of it."""


def encode_wish(wish: Wish) -> bytes:
    """A wish as bytes; equal wishes give equal bytes. Layouts, of which there are few, are listed
    once."""
    distinct: dict[Layout, int] = {}
    table = {
        tensor: -1 if layout is None else distinct.setdefault(layout, len(distinct))
        for tensor, layout in wish.items()
    }
    return msgspec.msgpack.encode((table, [to_plain(layout) for layout in distinct]))


def decode_wish(data: bytes) -> Wish:
    """The wish again."""
    table, plain = msgspec.msgpack.decode(data, strict=False)
    layouts = [from_plain(layout) for layout in plain]
    return {int(t): None if number < 0 else layouts[number] for t, number in table.items()}


class RanksWanting(NamedTuple):
    """Ranks that want something of a box: those of a span, or of them only some classes."""

    span: MeshRange
    classes: tuple[int, ...] | None


class _WantedLayout(NamedTuple):
    """A layout in which a tensor is wanted, and by which classes, unless by its whole mesh."""

    layout: Layout
    classes: tuple[int, ...] | None


class Wants:
    """What all ranks want."""

    def __init__(
        self, wishes: Sequence[Wish], class_of: Mapping[int, int], shapes: Sequence[tuple[int, ...]]
    ) -> None:
        """`class_of` says whose wish each rank has."""
        self.size = len(class_of)
        self._wishes = wishes
        self._class_of = class_of
        self._shapes = shapes
        self._wholes: dict[tuple[tuple[int, ...], tuple[int, ...]], Layout] = {}
        self._complete: dict[tuple[Mesh, tuple[int, ...]], bool] = {}
        self._ranks: dict[frozenset[RanksWanting], tuple[int, ...]] = {}
        self._layouts = functools.cache(self._layouts_of)
        # By the identity of layouts, which many tensors share, and which live as long as this.
        self._spans: dict[tuple[int, Box], tuple[MeshRange, ...]] = {}
        self._held: dict[tuple[int, int], tuple[Box, ...]] = {}

    def tensors(self, rank: int) -> list[int]:
        """The tensors of which a rank wants something."""
        return list(self._wishes[self._class_of[rank]])

    def boxes(self, rank: int, tensor: int) -> tuple[Box, ...]:
        """What a rank wants of a tensor."""
        wish = self._wishes[self._class_of[rank]]
        if tensor not in wish:
            return ()
        layout = wish[tensor]
        return (whole(self._shapes[tensor]),) if layout is None else self._held_by(layout, rank)

    def by_all(self, tensor: int) -> bool:
        """Whether every rank wants all of a tensor."""
        wanted = self._layouts(tensor)
        return (
            len(wanted) == 1
            and wanted[0].classes is None
            and not wanted[0].layout.cutting
            and math.prod(wanted[0].layout.mesh.sizes) == self.size
        )

    def whole(self, tensor: int) -> bool:
        """Whether all who want something of a tensor want all of it."""
        return not any(wanted.layout.cutting for wanted in self._layouts(tensor))

    def of_box(self, tensor: int, box: Box) -> frozenset[RanksWanting]:
        """Who wants something of a box."""
        return frozenset(
            RanksWanting(span, wanted.classes)
            for wanted in self._layouts(tensor)
            for span in self._holders(wanted.layout, box)
        )

    def ranks(self, wanting: frozenset[RanksWanting]) -> tuple[int, ...]:
        """All ranks of these, in order."""
        if wanting not in self._ranks:
            every: set[int] = set()
            for span, classes in wanting:
                ranks = span.ranks()
                if classes is not None:
                    ranks = filter(lambda rank: self._class_of.get(rank) in classes, ranks)
                every.update(ranks)
            self._ranks[wanting] = tuple(sorted(every))
        return self._ranks[wanting]

    def alike(
        self, tensor: int, ranks: tuple[int, ...]
    ) -> list[tuple[tuple[Box, ...], tuple[int, ...]]]:
        """What these ranks want of a tensor; those who want the same, together."""
        by_boxes: dict[tuple[Box, ...], list[int]] = {}
        for layout, classes in self._layouts(tensor):
            for group in _standing_alike(layout.mesh, layout.cutting, ranks):
                members = group
                if classes is not None:
                    members = tuple(rank for rank in group if self._class_of[rank] in classes)
                if members and (boxes := self._held_by(layout, members[0])):
                    by_boxes.setdefault(boxes, []).extend(members)
        return [(boxes, tuple(members)) for boxes, members in by_boxes.items()]

    def _held_by(self, layout: Layout, rank: int) -> tuple[Box, ...]:
        case = (id(layout), rank)
        if case not in self._held:
            self._held[case] = layout.held(rank)
        return self._held[case]

    def _holders(self, layout: Layout, box: Box) -> tuple[MeshRange, ...]:
        case = (id(layout), box)
        if case not in self._spans:
            self._spans[case] = layout.holders(box)
        return self._spans[case]

    def _layouts_of(self, tensor: int) -> tuple[_WantedLayout, ...]:
        wishing: dict[Layout | None, list[int]] = {}
        for number, wish in enumerate(self._wishes):
            if tensor in wish:
                wishing.setdefault(wish[tensor], []).append(number)
        wanted = []
        for layout, numbers in wishing.items():
            classes = tuple(numbers)
            if layout is None:
                wanted.append(_WantedLayout(self._whole_on(classes, self._shapes[tensor]), None))
            else:
                complete = self._is_complete(layout.mesh, classes)
                wanted.append(_WantedLayout(layout, None if complete else classes))
        return tuple(wanted)

    def _whole_on(self, classes: tuple[int, ...], shape: tuple[int, ...]) -> Layout:
        """A tensor that all ranks of some classes hold."""
        case = (classes, shape)
        if case not in self._wholes:
            ranks = sorted(rank for rank, number in self._class_of.items() if number in classes)
            self._wholes[case] = held_whole(shape, ranks)
        return self._wholes[case]

    def _is_complete(self, mesh: Mesh, classes: tuple[int, ...]) -> bool:
        case = (mesh, classes)
        if case not in self._complete:
            self._complete[case] = all(self._class_of.get(r) in classes for r in mesh.ranks())
        return self._complete[case]


@functools.lru_cache(maxsize=1024)
def _standing_alike(
    mesh: Mesh, cutting: tuple[int, ...], ranks: tuple[int, ...]
) -> list[tuple[int, ...]]:
    """The ranks, by where they stand along these dimensions of a mesh."""
    standing: dict[tuple[int, ...], list[int]] = {}
    for rank in ranks:
        at = mesh.coordinate(rank)
        if at is not None:
            standing.setdefault(tuple(at[axis] for axis in cutting), []).append(rank)
    return [tuple(alike) for alike in standing.values()]


def union(parts: Iterable[frozenset[RanksWanting]]) -> frozenset[RanksWanting]:
    """Whoever wants something of any."""
    return frozenset(itertools.chain.from_iterable(parts))
