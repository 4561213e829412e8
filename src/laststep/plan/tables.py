"""Tables of what the ranks of a job hold, and the agreement that each rank makes of all of them.

Pure. A rank describes its state in a table: every tensor with its whole shape and its layout. Ranks
with equal tables form a class, so a job of any size is a few tables and, for each, who has it. From
these follows what each rank writes (`plan.who_writes`). Whether the tables contradict each other,
and whether every byte is held by somebody, is checked here, once per agreement.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from laststep.codecs.digests import digest
from laststep.errors import MismatchError, Problems
from laststep.plan.who_writes import Share, Spread, shares_of
from laststep.state.boxes import counts, whole
from laststep.state.layouts import Layout, Mesh, from_plain, held_whole, of_one_replica, to_plain
from laststep.terms import DTYPES, listed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from laststep.state.provider import Shape


class Replicas(enum.IntEnum):
    """What is known of the ranks that hold the same part of a tensor."""

    EQUAL = 0
    """They hold the same bytes, so they share the work of writing them."""
    UNPROVEN = 1
    """They should, but nothing says so: all of it is the lowest holder's."""
    CHANGING = 2
    """A forward pass changes it on each of them: likewise, and they need not be equal."""


class TableTensor(NamedTuple):
    """A tensor as a rank describes it; without a layout, the rank holds all of it."""

    name: str
    dtype: str
    shape: Shape
    layout: Layout | None
    replicas: Replicas = Replicas.EQUAL


class TableItem(NamedTuple):
    """An item as a rank describes it. What is `per_rank` is written by every rank for itself."""

    name: str
    kind: str
    per_rank: bool
    tensors: tuple[TableTensor, ...]
    ties: tuple[tuple[str, str], ...] = ()
    """Names of tensors that are others by another name, and of which. Told where tensors lie in
    parts: a rank cannot see that two of which it holds nothing are one."""


Table = tuple[TableItem, ...]
Key = tuple[str, str]
"""An item and the name of a tensor of it."""


def encode_table(table: Table) -> bytes:
    """A table as bytes; equal tables give equal bytes. Layouts, of which there are few, are listed
    once."""
    layouts: dict[Layout, int] = {}

    def plain(tensor: TableTensor) -> tuple[object, ...]:
        name, dtype, shape, layout, replicas = tensor
        number = None if layout is None else layouts.setdefault(layout, len(layouts))
        return name, dtype, shape, number, *((int(replicas),) if replicas else ())

    items = [
        (item.name, item.kind, item.per_rank, list(map(plain, item.tensors)), item.ties)
        for item in table
    ]
    return msgspec.msgpack.encode((items, [to_plain(layout) for layout in layouts]))


def decode_table(data: bytes) -> Table:
    """The table again; on something else a `ValueError`, `TypeError`, `IndexError` or
    `UsageError`."""
    items, plain = msgspec.msgpack.decode(data)
    layouts = [from_plain(layout) for layout in plain]
    return tuple(
        TableItem(
            name,
            kind,
            per_rank,
            tuple(_tensor(layouts, *tensor) for tensor in tensors),
            tuple((name, first) for name, first in ties),
        )
        for name, kind, per_rank, tensors, ties in items
    )


def _tensor(
    layouts: Sequence[Layout],
    name: str,
    dtype: str,
    shape: Sequence[int],
    number: int | None,
    replicas: int = 0,
) -> TableTensor:
    layout = None if number is None else layouts[number]
    tensor = TableTensor(name, dtype, counts(shape), layout, Replicas(replicas))
    if layout is not None and layout.shape != tensor.shape:
        raise ValueError(f"{name} has not the shape of its layout")
    return tensor


def digest_of(table: bytes) -> bytes:
    """The digest by which ranks compare their tables."""
    return digest(table)


class RankClass(NamedTuple):
    """Ranks that describe the same."""

    table: Table
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Agreement:
    """What a job holds, as all its ranks see it."""

    digest: bytes
    classes: tuple[RankClass, ...]
    keys: tuple[Key, ...]
    """The tensors that ranks share the work of writing, in the order of `spreads`."""
    spreads: tuple[Spread, ...]
    class_of: dict[int, int]
    dtypes: dict[Key, str]
    empty: dict[int, int]
    """Tensors without elements, by their numbers, and the one rank that writes each of them."""

    def shares(self, rank: int) -> list[tuple[Key, Share]]:
        """What a rank writes of what the job holds in common."""
        shares = shares_of(rank, self.spreads)
        for number, writer in self.empty.items():
            if writer == rank:
                box = whole(self.spreads[number].layouts[0].shape)
                shares.append(Share(number, box, box))
        return [(self.keys[share.tensor], share) for share in shares]

    def is_first(self, rank: int) -> bool:
        """Whether a rank speaks for its class."""
        return self.classes[self.class_of[rank]].ranks[0] == rank


_Described = dict[Key, list[tuple[TableTensor, int]]]
"""A tensor of the job → how classes of ranks describe it, and the numbers of these classes."""


def agree(digests: Sequence[bytes], tables: dict[bytes, Table]) -> Agreement:
    """Put the tables together; `MismatchError` where ranks contradict each other."""
    members: dict[bytes, list[int]] = {}
    for rank, table in enumerate(digests):
        members.setdefault(table, []).append(rank)
    classes = tuple(RankClass(tables[table], tuple(ranks)) for table, ranks in members.items())
    class_of = {rank: number for number, alike in enumerate(classes) for rank in alike.ranks}
    described = _described(classes)
    problems = _item_problems(classes)
    spreads: list[Spread] = []
    empty: dict[int, int] = {}
    wholes: dict[tuple[tuple[int, ...], Shape, bool], Layout] = {}
    for key, by_class in described.items():
        problems += _tensor_problems(key, by_class, classes)
        tensor, number = by_class[0]
        if 0 in tensor.shape:
            empty[len(spreads)] = classes[number].ranks[0]
        layouts = _layouts(by_class, classes, wholes)
        spreads.append(Spread(DTYPES[tensor.dtype].size_bytes, layouts))
    problems += _gaps(described, classes)
    if problems:
        raise MismatchError.of(
            Problems(mismatched=tuple(problems)),
            what="the ranks of this job do not describe one state: they differ",
            where="save()",
            remedy="make them alike; what each rank has for itself goes into laststep.PerRank, and "
            "every rank of a mesh must hold its part of what lies on it",
        )
    dtypes = {key: by_class[0][0].dtype for key, by_class in described.items()}
    return Agreement(
        digest(b"".join(digests)),
        classes,
        tuple(described),
        tuple(spreads),
        class_of,
        dtypes,
        empty,
    )


def _described(classes: Sequence[RankClass]) -> _Described:
    """Every tensor that ranks share. What ranks that hold nothing of a tensor take for one of its
    own, and others know to be tied, is tied, and left out."""
    described: _Described = {}
    for number, alike in enumerate(classes):
        for item in alike.table:
            for tensor in () if item.per_rank else item.tensors:
                described.setdefault((item.name, tensor.name), []).append((tensor, number))
    ties = {(item.name, name) for alike in classes for item in alike.table for name, _ in item.ties}
    for key in ties.intersection(described):
        if not any(
            tensor.layout is None or tensor.layout.held(rank)
            for tensor, number in described[key]
            for rank in classes[number].ranks
        ):
            del described[key]
    return described


def _item_problems(classes: Sequence[RankClass]) -> list[str]:
    kinds: dict[str, dict[str, list[int]]] = {}
    for alike in classes:
        for item in alike.table:
            form = f"a {item.kind}" + (" of each rank's own" if item.per_rank else "")
            kinds.setdefault(item.name, {}).setdefault(form, []).extend(alike.ranks)
    return [_who_says_what(name, forms) for name, forms in kinds.items() if len(forms) > 1]


def _tensor_problems(
    key: Key, by_class: list[tuple[TableTensor, int]], classes: Sequence[RankClass]
) -> list[str]:
    forms: dict[str, list[int]] = {}
    for tensor, number in by_class:
        form = f"{tensor.dtype}{list(tensor.shape)}"
        forms.setdefault(form, []).extend(classes[number].ranks)
    return [_who_says_what("/".join(key), forms)] if len(forms) > 1 else []


def _who_says_what(what: str, forms: dict[str, list[int]]) -> str:
    """Who says what of it. What most ranks say comes last: it is the others that have changed."""
    rarest = sorted(forms.items(), key=lambda form: (len(form[1]), min(form[1])))
    return f"{what}: " + ", ".join(f"{form} on {_ranks(sorted(ranks))}" for form, ranks in rarest)


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {listed(ranks)}"


def _layouts(
    by_class: list[tuple[TableTensor, int]],
    classes: Sequence[RankClass],
    wholes: dict[tuple[tuple[int, ...], Shape, bool], Layout],
) -> tuple[Layout, ...]:
    """The layouts in which a tensor is written, one for each way in which it lies; all who hold it
    whole are one, and `wholes` keeps who that is for the next tensor of that shape. Where replicas
    are not known to be equal, one of them stands for all: what comes back is what a rank held."""
    laid = [tensor for tensor, _ in by_class if tensor.layout is not None]
    layouts = dict.fromkeys(tensor.layout for tensor in laid if tensor.layout is not None)
    if any(tensor.replicas for tensor in laid):
        return (of_one_replica(next(iter(layouts))),)
    plain = [(tensor, number) for tensor, number in by_class if tensor.layout is None]
    alone = any(tensor.replicas for tensor, _ in plain)
    if plain and not (alone and layouts):
        case = (tuple(number for _, number in plain), plain[0][0].shape, alone)
        if case not in wholes:
            ranks = sorted(rank for _, number in plain for rank in classes[number].ranks)
            layout = held_whole(plain[0][0].shape, ranks)
            wholes[case] = of_one_replica(layout) if alone else layout
        layouts[wholes[case]] = None
    return tuple(layouts)


def _gaps(described: _Described, classes: Sequence[RankClass]) -> list[str]:
    """Ranks of a mesh that do not describe a tensor that is laid out on it: their part of it would
    be written by nobody."""
    meshes: dict[tuple[Mesh, tuple[int, ...]], int | None] = {}
    problems = []
    for key, by_class in described.items():
        by_layout: dict[Layout, list[int]] = {}
        for tensor, number in by_class:
            if tensor.layout is not None:
                by_layout.setdefault(tensor.layout, []).append(number)
        for layout, numbers in by_layout.items():
            case = (layout.mesh, tuple(numbers))
            if case not in meshes:
                there = {rank for number in numbers for rank in classes[number].ranks}
                gone = (rank for rank in layout.mesh.ranks() if rank not in there)
                meshes[case] = next(gone, None)
            missing = meshes[case]
            if missing is not None:
                problems.append(
                    f"{key[0]}/{key[1]}: laid out over a mesh of {' x '.join(layout.mesh.names)} "
                    f"with rank {missing}, which does not hold it so"
                )
    return problems
