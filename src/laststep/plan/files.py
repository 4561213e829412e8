"""Decide the file and the offset of every tensor of a save.

Pure. Offsets are fixed before anything is copied, and the captured image is the file. Tensors are
packed without gaps in order of descending element size (so that each is aligned), then by device
and dtype, so that copies cover long ranges. Also decides what a partial checkpoint needs.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec import structs

from laststep.constants import DTYPES, MAX_HEADER_BYTES
from laststep.errors import NotFoundError
from laststep.format.index import folder_of, renumbered
from laststep.format.layout import FileLayout, Part, TensorEntry, header_bytes_of
from laststep.format.manifest import ItemRecord

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from laststep.format.index import Index, StoredLayout
    from laststep.format.manifest import Commit, WrittenIndexes
    from laststep.state.tree import Piece  # noqa: TC004 (nothing decodes these structs)


_KIND: Final = operator.attrgetter("device", "dtype", "trained")
_DTYPE: Final = operator.attrgetter("dtype")
_SHAPE: Final = operator.attrgetter("shape")
_NAME: Final = operator.attrgetter("name")
_PART: Final = operator.attrgetter("part")
_SIZE_BYTES: Final = operator.attrgetter("size_bytes")
_TENSOR_BYTES: Final = operator.attrgetter("layout.tensor_bytes")

SHARED_FILE = "shared"
OWN_FILE_BYTES = 1 << 20
"""An item at least this large gets a data file of its own."""
LAYOUT_NAME = "~layout"
"""The name of the plain value that holds the local layout (`plan.layouts`)."""
_ENTRY_BYTES = 160
"""An upper bound of one header entry without its name; only decides where files are split."""


class ItemSpec(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    kind: str
    standalone: bool
    pieces: tuple[Piece, ...]
    per_rank: bool = False

    @property
    def size_bytes(self) -> int:
        return sum(map(_SIZE_BYTES, self.pieces))


class FilePlan(msgspec.Struct, frozen=True, kw_only=True):
    """One data file and the pieces in it, in the order of its entries."""

    layout: FileLayout
    pieces: tuple[int, ...]


class SavePlan(msgspec.Struct, frozen=True, kw_only=True):
    items: tuple[ItemSpec, ...]
    files: tuple[FilePlan, ...]
    pieces: tuple[Piece, ...]
    values: tuple[str, ...]
    """The names of the plain values in the index: the trees of items, and the local layout."""

    @property
    def tensor_bytes(self) -> int:
        return sum(map(_TENSOR_BYTES, self.files))

    @property
    def item_records(self) -> tuple[ItemRecord, ...]:
        return tuple(
            ItemRecord(
                name=item.name,
                kind=item.kind,
                per_rank=item.per_rank,
                tensors=len(item.pieces),
                size_bytes=item.size_bytes,
            )
            for item in self.items
        )


def plan_save(
    items: tuple[ItemSpec, ...],
    *,
    rank: tuple[int, int] | None = None,
    values: tuple[str, ...] | None = None,
) -> SavePlan:
    """Place every piece of every item into files. `values` are the names of the plain values (None:
    the trees of all items). `rank` is (number, count) and makes file names unique in a job."""
    of_rank = "" if rank is None else f"-r{rank[0]:05d}"
    where = "" if rank is None else folder_of(*rank)
    pieces: list[Piece] = []
    names: list[str] = []  # of all pieces, as in their files
    own: list[tuple[str, str | None, Sequence[int]]] = []
    shared: list[int] = []
    for item in items:
        numbers = range(len(pieces), len(pieces) + len(item.pieces))
        pieces += item.pieces
        if (item.standalone and numbers) or item.size_bytes >= OWN_FILE_BYTES:
            own.append((item.name, item.name, numbers))
            names += map(_NAME, item.pieces)
        else:
            shared += numbers
            names += map(f"{item.name}/".__add__, map(_NAME, item.pieces))
    files: list[FilePlan] = []
    for stem, owner, together in (*own, (SHARED_FILE, None, shared)):
        groups = _split(together, names)
        for number, group in enumerate(groups):
            is_numbered = number or (owner is not None and len(groups) > 1)
            suffix = f"-{number + 1:05d}" if is_numbered else ""
            name = f"{where}{stem}{of_rank}{suffix}.safetensors"
            files.append(_place(name, owner, group, pieces, names))
    return SavePlan(
        items=items,
        files=tuple(files),
        pieces=tuple(pieces),
        values=tuple(map(_NAME, items)) if values is None else values,
    )


def _split(numbers: Sequence[int], names: Sequence[str]) -> list[list[int]]:
    """Cut a list of pieces so that no header exceeds its bound."""
    lengths = list(map(len, map(names.__getitem__, numbers)))
    if numbers and 6 * sum(lengths) + _ENTRY_BYTES * len(lengths) <= MAX_HEADER_BYTES // 2:
        return [list(numbers)]
    groups: list[list[int]] = []
    room = 0
    for number, length in zip(numbers, lengths, strict=True):
        need = 6 * length + _ENTRY_BYTES
        if need > room:
            groups.append([])
            room = MAX_HEADER_BYTES // 2
        groups[-1].append(number)
        room -= need
    return groups


def _place(
    name: str, item: str | None, numbers: list[int], pieces: Sequence[Piece], names: Sequence[str]
) -> FilePlan:
    alike: dict[tuple[str, str, bool], list[int]] = defaultdict(list)
    for number in numbers:
        alike[_KIND(pieces[number])].append(number)
    kinds = sorted(alike, key=lambda kind: (-DTYPES[kind[1]].size_bytes, *kind))
    order = list(chain.from_iterable(map(alike.__getitem__, kinds)))
    # Process columns from here on: there may be 100,000 pieces, and training waits.
    specs = list(map(pieces.__getitem__, order))
    own = list(map(names.__getitem__, order))
    bounds = list(accumulate(map(_SIZE_BYTES, specs), initial=0))
    dtypes, shapes = map(_DTYPE, specs), map(_SHAPE, specs)
    columns = zip(own, dtypes, shapes, bounds[:-1], bounds[1:], strict=True)
    entries = tuple(map(TensorEntry._make, columns))
    parts: dict[str, Part] = {}
    for entry, part in zip(own, map(_PART, specs), strict=True):
        if part is not None:
            parts[entry] = Part(*part)
    layout = FileLayout(
        name=name,
        item=item,
        header_bytes=header_bytes_of(entries),
        tensor_bytes=bounds[-1],
        tensors=entries,
        parts=parts,
    )
    return FilePlan(layout=layout, pieces=tuple(order))


_SAME = ("run", "step", "term", "attempt", "created_s", "ranks", "metrics", "continues")


def omitted_items_of(commit: Commit, items: Collection[str]) -> tuple[str, ...]:
    """Return the items that a copy of `items` omits; raise `NotFoundError` for a missing one."""
    here = [record.name for record in commit.items]
    if lacking := [item for item in items if item not in here]:
        omitted = ", ".join(commit.omitted_items)
        raise NotFoundError(
            f"step {commit.step} has no item {', '.join(map(repr, lacking))}",
            found=", ".join(here) + (f" (partial, without {omitted})" if omitted else ""),
            remedy="name items that it has; `laststep show` lists them",
        )
    return tuple(sorted({*commit.omitted_items, *here} - {*items}))


def only_items(index: Index, items: Collection[str]) -> Index:
    """Return the part of an index that these items need."""
    layouts = [stored for stored in index.layouts if not _items_in(stored).isdisjoint(items)]
    names = {stored.layout.name for stored in layouts}
    used = {part.file for stored in layouts for run in stored.runs for part in (run, *run.bases)}
    # A layout without tensor bytes has no runs, but it has a file.
    used |= {number for number, file in enumerate(index.files) if file.name in names}
    number_of = {old: new for new, old in enumerate(sorted(used))}
    return structs.replace(
        index,
        files=tuple(index.files[number] for number in sorted(used)),
        layouts=tuple(
            structs.replace(stored, runs=renumbered(stored.runs, number_of)) for stored in layouts
        ),
        values={name: data for name, data in index.values.items() if name in items},
    )


def _items_in(stored: StoredLayout) -> set[str]:
    layout = stored.layout
    if layout.item is not None:
        return {layout.item}
    return {entry.name.partition("/")[0] for entry in layout.tensors}


def partial_of(commit: Commit, items: Collection[str], written: WrittenIndexes) -> Commit:
    """Return a partial checkpoint's manifest, without layout groups: those describe all items."""
    return structs.replace(
        commit,
        items=tuple(record for record in commit.items if record.name in items),
        written=written,
        layout_groups=(),
        omitted_items=omitted_items_of(commit, items),
    )


def is_partial(partial: Commit, of: Commit, omitted_items: tuple[str, ...]) -> bool:
    """Return True if `there` is the partial checkpoint of `of` that omits exactly these items."""
    return partial.omitted_items == omitted_items and all(
        getattr(partial, name) == getattr(of, name) for name in _SAME
    )
