"""Local layouts of the ranks of a job, and the global layout that each rank computes from them.

Pure. A rank describes its state in a local layout: every tensor with its full shape and its layout.
Ranks with equal local layouts form a layout group, so a job of any size is a few local layouts and
their ranks. Contradictions, and bytes that no rank holds, are found once per global layout.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from laststep.codecs.digests import digest
from laststep.constants import DTYPES
from laststep.errors import CorruptError, MismatchError, Problems, UsageError
from laststep.plan.who_writes import Assignment, Spread, assignments_of
from laststep.state.boxes import counts, whole
from laststep.state.layouts import Layout, Mesh, from_plain, held_whole, of_one_replica, to_plain

if TYPE_CHECKING:
    from collections.abc import Sequence

    from laststep.format.manifest import LayoutGroupRecord
    from laststep.state.tree import Shape


class Replicas(enum.IntEnum):
    """Equality of the copies of a tensor part that several ranks hold."""

    EQUAL = 0
    """The holders share the work of writing it."""
    UNPROVEN = 1
    """They should be equal: the lowest holder writes all of it."""
    CHANGING = 2
    """A forward pass changes it on each rank: the lowest holder writes all of it."""


class LocalTensor(NamedTuple):
    """A tensor in a local layout; without a layout, the rank holds all of it."""

    name: str
    dtype: str
    shape: Shape
    layout: Layout | None
    replicas: Replicas = Replicas.EQUAL


class LocalItem(NamedTuple):
    """An item in a local layout. Every rank writes its own `per_rank` items."""

    name: str
    kind: str
    per_rank: bool
    tensors: tuple[LocalTensor, ...]
    ties: tuple[tuple[str, str], ...] = ()
    """Tied names and the tensors that they stand for, where tensors are sharded: a rank cannot see
    that two tensors are one if it holds nothing of them."""


LocalLayout = tuple[LocalItem, ...]
Key = tuple[str, str]
"""An item and the name of one of its tensors."""


def encode_local_layout(local_layout: LocalLayout) -> bytes:
    """Encode a local layout, its distinct layouts once; equal ones give equal bytes."""
    layouts: dict[Layout, int] = {}

    def plain(tensor: LocalTensor) -> tuple[object, ...]:
        name, dtype, shape, layout, replicas = tensor
        number = None if layout is None else layouts.setdefault(layout, len(layouts))
        return name, dtype, shape, number, *((int(replicas),) if replicas else ())

    items = [
        (item.name, item.kind, item.per_rank, list(map(plain, item.tensors)), item.ties)
        for item in local_layout
    ]
    return msgspec.msgpack.encode((items, [to_plain(layout) for layout in layouts]))


def decode_local_layout(data: bytes) -> LocalLayout:
    items, plain = msgspec.msgpack.decode(data)
    layouts = [from_plain(layout) for layout in plain]
    return tuple(
        LocalItem(
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
) -> LocalTensor:
    layout = None if number is None else layouts[number]
    tensor = LocalTensor(name, dtype, counts(shape), layout, Replicas(replicas))
    if layout is not None and layout.shape != tensor.shape:
        raise ValueError(f"{name} does not have the shape of its layout")
    return tensor


def digest_of(local_layout: bytes) -> bytes:
    """Return the digest by which ranks compare their local layouts."""
    return digest(local_layout)


class LayoutGroup(NamedTuple):
    """Ranks with equal local layouts."""

    local_layout: LocalLayout
    ranks: tuple[int, ...]
    digest: bytes


@dataclass(frozen=True, slots=True)
class GlobalLayout:
    """The state of a whole job; equal on all its ranks."""

    digest: bytes
    layout_groups: tuple[LayoutGroup, ...]
    keys: tuple[Key, ...]
    """The tensors whose writing is shared, in the order of `spreads`."""
    spreads: tuple[Spread, ...]
    layout_group_of: dict[int, int]
    dtypes: dict[Key, str]
    empty: dict[int, int]
    """Tensors without elements, by number, and the rank that writes each."""

    def assignments(self, rank: int) -> list[tuple[Key, Assignment]]:
        assignments = assignments_of(rank, self.spreads)
        for number, writer in self.empty.items():
            if writer == rank:
                box = whole(self.spreads[number].layouts[0].shape)
                assignments.append(Assignment(number, box, box))
        return [(self.keys[assignment.tensor], assignment) for assignment in assignments]

    def is_first(self, rank: int) -> bool:
        return self.layout_groups[self.layout_group_of[rank]].ranks[0] == rank


_Described = dict[Key, list[tuple[LocalTensor, int]]]
"""Each tensor of the job → its descriptions, with the number of the layout group that gave each."""


def agree(digests: Sequence[bytes], local_layouts: dict[bytes, LocalLayout]) -> GlobalLayout:
    """Combine local layouts into the global one; `MismatchError` if ranks contradict each other."""
    members: dict[bytes, list[int]] = {}
    for rank, local_layout in enumerate(digests):
        members.setdefault(local_layout, []).append(rank)
    layout_groups = tuple(
        LayoutGroup(local_layouts[local_layout], tuple(ranks), local_layout)
        for local_layout, ranks in members.items()
    )
    layout_group_of = {
        rank: number for number, alike in enumerate(layout_groups) for rank in alike.ranks
    }
    described = _described(layout_groups)
    problems = _contradictions(described, layout_groups)
    spreads: list[Spread] = []
    empty: dict[int, int] = {}
    wholes: dict[tuple[tuple[int, ...], Shape, bool], Layout] = {}
    for by_group in described.values():
        tensor, number = by_group[0]
        if 0 in tensor.shape:
            empty[len(spreads)] = layout_groups[number].ranks[0]
        layouts = _layouts(by_group, layout_groups, wholes)
        spreads.append(Spread(DTYPES[tensor.dtype].size_bytes, layouts))
    problems += _gaps(described, layout_groups)
    if problems:
        raise MismatchError.of(
            Problems(mismatched=tuple(problems)),
            what="the states of the ranks do not match: they differ",
            where="save()",
            remedy=(
                "make them equal, wrap per-rank state in laststep.PerRank, or let every rank of a "
                "mesh hold its shard"
            ),
        )
    dtypes = {key: by_group[0][0].dtype for key, by_group in described.items()}
    return GlobalLayout(
        digest(b"".join(digests)),
        layout_groups,
        tuple(described),
        tuple(spreads),
        layout_group_of,
        dtypes,
        empty,
    )


def _described(layout_groups: Sequence[LayoutGroup]) -> _Described:
    """Return every tensor that ranks share, except those that are tied on some ranks and that no
    rank which describes them as separate holds."""
    described: _Described = {}
    for number, alike in enumerate(layout_groups):
        for item in alike.local_layout:
            for tensor in () if item.per_rank else item.tensors:
                described.setdefault((item.name, tensor.name), []).append((tensor, number))
    ties = {
        (item.name, name)
        for alike in layout_groups
        for item in alike.local_layout
        for name, _ in item.ties
    }
    for key in ties.intersection(described):
        if not any(
            tensor.layout is None or tensor.layout.held(rank)
            for tensor, number in described[key]
            for rank in layout_groups[number].ranks
        ):
            del described[key]
    return described


def _contradictions(described: _Described, layout_groups: Sequence[LayoutGroup]) -> list[str]:
    """Name the items and tensors that ranks describe differently, with one rank per description."""
    said: dict[str, dict[str, int]] = {}
    for alike in layout_groups:
        for item in alike.local_layout:
            form = f"a {item.kind}" + (" of each rank's own" if item.per_rank else "")
            said.setdefault(item.name, {}).setdefault(form, alike.ranks[0])
    for key, by_group in described.items():
        if len({(tensor.dtype, tensor.shape) for tensor, _ in by_group}) > 1:
            forms = said.setdefault("/".join(key), {})
            for tensor, number in by_group:
                form = f"{tensor.dtype}{list(tensor.shape)}"
                forms.setdefault(form, layout_groups[number].ranks[0])
    return [
        f"{what}: " + ", ".join(f"{form} on rank {rank}" for form, rank in forms.items())
        for what, forms in said.items()
        if len(forms) > 1
    ]


def _layouts(
    by_group: list[tuple[LocalTensor, int]],
    layout_groups: Sequence[LayoutGroup],
    wholes: dict[tuple[tuple[int, ...], Shape, bool], Layout],
) -> tuple[Layout, ...]:
    """Return the layouts in which a tensor is written. All ranks that hold it whole form one,
    cached in `wholes`. If replicas are not known to be equal, one of them stands for all."""
    laid = [tensor for tensor, _ in by_group if tensor.layout is not None]
    layouts = dict.fromkeys(tensor.layout for tensor in laid if tensor.layout is not None)
    if any(tensor.replicas for tensor in laid):
        return (of_one_replica(next(iter(layouts))),)
    plain = [(tensor, number) for tensor, number in by_group if tensor.layout is None]
    alone = any(tensor.replicas for tensor, _ in plain)
    if plain and not (alone and layouts):
        case = (tuple(number for _, number in plain), plain[0][0].shape, alone)
        if case not in wholes:
            ranks = sorted(rank for _, number in plain for rank in layout_groups[number].ranks)
            layout = held_whole(plain[0][0].shape, ranks)
            wholes[case] = of_one_replica(layout) if alone else layout
        layouts[wholes[case]] = None
    return tuple(layouts)


def _gaps(described: _Described, layout_groups: Sequence[LayoutGroup]) -> list[str]:
    """Find ranks of a mesh that do not describe a tensor laid out on it."""
    meshes: dict[tuple[Mesh, tuple[int, ...]], int | None] = {}
    problems = []
    for key, by_group in described.items():
        by_layout: dict[Layout, list[int]] = {}
        for tensor, number in by_group:
            if tensor.layout is not None:
                by_layout.setdefault(tensor.layout, []).append(number)
        for layout, numbers in by_layout.items():
            case = (layout.mesh, tuple(numbers))
            if case not in meshes:
                members = {rank for number in numbers for rank in layout_groups[number].ranks}
                gone = (rank for rank in layout.mesh.ranks() if rank not in members)
                meshes[case] = next(gone, None)
            missing = meshes[case]
            if missing is not None:
                problems.append(
                    f"{key[0]}/{key[1]}: sharded over a mesh of {' x '.join(layout.mesh.names)} "
                    f"with rank {missing}, which holds it differently or not at all"
                )
    return problems


def global_layout_of(
    local_layouts: Sequence[bytes],
    layout_groups: Sequence[LayoutGroupRecord],
    ranks: int,
    where: str,
) -> GlobalLayout:
    """Return the global layout of a checkpoint, from its stored local layouts."""
    digests = [b""] * ranks
    known: dict[bytes, LocalLayout] = {}
    try:
        for data, record in zip(local_layouts, layout_groups, strict=True):
            name = digest(data)
            known[name] = decode_local_layout(data)
            for rank in record.ranks:
                digests[rank] = name
        return agree(digests, known)
    except (MismatchError, UsageError, ValueError, TypeError, KeyError, IndexError) as error:
        raise CorruptError(
            "the layouts of the ranks are invalid", where=where, found=str(error)
        ) from error
