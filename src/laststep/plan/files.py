"""Decide where every tensor of a save lies: in which file, at which offset.

Pure. The image is the file: offsets are fixed before anything moves, tensors are packed without
holes in order of descending element size (so each is aligned to its element), and inside that by
device and dtype, so that copies run over long stretches. The same description always gives the same
plan.

An excerpt, a copy with only some items, has the layouts that these items need.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
from msgspec import structs

from laststep.errors import NotFoundError
from laststep.format.layout import FileLayout, Part, TensorEntry, header_bytes_of
from laststep.terms import DTYPES, MAX_HEADER_BYTES

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from laststep.format.index import BlockRun, Index, StoredLayout
    from laststep.format.manifest import Commit, WrittenIndexes
    from laststep.state.provider import Piece  # noqa: TC004 (nothing decodes these structs)


_KIND: Final = operator.attrgetter("device", "dtype", "trained")
_DTYPE: Final = operator.attrgetter("dtype")
_SHAPE: Final = operator.attrgetter("shape")
_SIZE_BYTES: Final = operator.attrgetter("size_bytes")

SHARED_FILE = "shared"
FLAT_RANKS = 256
"""In a job of more ranks, files lie in folders within the checkpoint's, each for some ranks. A rank
has a few files, mostly three: no folder is to have more than about 1,024 entries."""
_RANKS_PER_FOLDER, _FOLDERS = 128, 1024
OWN_FILE_BYTES = 1 << 20
"""An item at least this large gets a data file of its own."""
TABLE_NAME = "~table"
"""The value in which ranks of a job say what they hold (`plan.tables`)."""
_ENTRY_BYTES = 160
"""Generous bound of one header entry without its name; only decides where files are split."""


class ItemSpec(msgspec.Struct, frozen=True, kw_only=True):
    """An item as the planner sees it."""

    name: str
    kind: str
    standalone: bool
    pieces: tuple[Piece, ...]
    per_rank: bool = False
    mixed: bool = False
    """Whether some of it is each rank's own and some is not."""

    @property
    def size_bytes(self) -> int:
        return sum(map(_SIZE_BYTES, self.pieces))


class MasterPair(NamedTuple):
    """An entry of a file that may be the rounding of an entry of a file."""

    file: int
    entry: int
    master_file: int
    master_entry: int


class FilePlan(msgspec.Struct, frozen=True, kw_only=True):
    """One data file, and which of the plan's pieces lie in it, in the order of its entries."""

    layout: FileLayout
    pieces: tuple[int, ...]


class SavePlan(msgspec.Struct, frozen=True, kw_only=True):
    """Every file of a save."""

    items: tuple[ItemSpec, ...]
    files: tuple[FilePlan, ...]
    pieces: tuple[Piece, ...]
    """Those of all items, in order."""
    values: tuple[str, ...]
    """The names of the plain values that go into the index: the trees of items, and the table."""
    derived: tuple[MasterPair, ...] = ()
    """What may be stored as the rounding of something else (`plan.deriving`)."""
    is_declared: bool = False
    """Whether the user has said that it is."""

    @property
    def tensor_bytes(self) -> int:
        return sum(file.layout.tensor_bytes for file in self.files)


def folder_of(rank: int, ranks: int) -> str:
    """The folder within that of the checkpoint in which the files of a rank lie; "" for none."""
    if ranks <= FLAT_RANKS:
        return ""
    each = max(_RANKS_PER_FOLDER, -(-ranks // _FOLDERS))
    return f"r{rank - rank % each:05d}/"


def plan_save(
    items: tuple[ItemSpec, ...],
    *,
    rank: tuple[int, int] | None = None,
    values: tuple[str, ...] | None = None,
) -> SavePlan:
    """Place every piece of every item into files. `values` are the names of the plain values that
    are stored with them; None: the trees of all items. In a job of several ranks, `rank`, which of
    how many, tells the files of each from the others'."""
    mine = "" if rank is None else f"-r{rank[0]:05d}"
    where = "" if rank is None else folder_of(*rank)
    pieces = tuple(chain.from_iterable(item.pieces for item in items))
    names: list[str] = []  # of all pieces, as their files have them
    files: list[FilePlan] = []
    shared: list[int] = []
    for item in items:
        numbers = range(len(names), len(names) + len(item.pieces))
        if not (item.standalone and numbers) and item.size_bytes < OWN_FILE_BYTES:
            shared += numbers
            names += [f"{item.name}/{piece.name}" for piece in item.pieces]
            continue
        names += [piece.name for piece in item.pieces]
        groups = _split(numbers, pieces)
        for number, group in enumerate(groups):
            suffix = f"-{number + 1:05d}" if len(groups) > 1 else ""
            name = f"{where}{item.name}{mine}{suffix}.safetensors"
            files.append(_place(name, item.name, group, pieces, names))
    for number, group in enumerate(_split(shared, pieces)):
        suffix = f"-{number + 1:05d}" if number else ""
        name = f"{where}{SHARED_FILE}{mine}{suffix}.safetensors"
        files.append(_place(name, None, group, pieces, names))
    stored = tuple(item.name for item in items) if values is None else values
    return SavePlan(items=items, files=tuple(files), pieces=pieces, values=stored)


def index_name(rank: int, ranks: int = 1) -> str:
    """The file that says what a rank wrote."""
    return f"{folder_of(rank, ranks)}index-r{rank:05d}"


def pack_name(rank: int, ranks: int = 1) -> str:
    """The file for blocks of a rank that do not lie in their place in a data file."""
    return f"{folder_of(rank, ranks)}blocks-r{rank:05d}.pack"


def _split(numbers: Sequence[int], pieces: tuple[Piece, ...]) -> list[list[int]]:
    """Cut a list of pieces so that no file's header grows past its bound."""
    lengths = [len(pieces[number].name) for number in numbers]
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
    name: str, item: str | None, numbers: list[int], pieces: tuple[Piece, ...], names: list[str]
) -> FilePlan:
    alike: dict[tuple[str, str, bool], list[int]] = defaultdict(list)
    for number in numbers:
        alike[_KIND(pieces[number])].append(number)
    kinds = sorted(alike, key=lambda kind: (-DTYPES[kind[1]].size_bytes, *kind))
    order = [number for kind in kinds for number in alike[kind]]
    # From here on column by column: there may be 100,000 pieces, and training waits.
    specs = [pieces[number] for number in order]
    own = [names[number] for number in order]
    bounds = list(accumulate(map(_SIZE_BYTES, specs), initial=0))
    dtypes, shapes = map(_DTYPE, specs), map(_SHAPE, specs)
    columns = zip(own, dtypes, shapes, bounds[:-1], bounds[1:], strict=True)
    entries = tuple(map(TensorEntry._make, columns))
    parts = {
        name: Part(*spec.part)
        for name, spec in zip(own, specs, strict=True)
        if spec.part is not None
    }
    layout = FileLayout(
        name=name,
        item=item,
        header_bytes=header_bytes_of(entries),
        tensor_bytes=bounds[-1],
        tensors=entries,
        parts=parts,
    )
    return FilePlan(layout=layout, pieces=tuple(order))


_SAME = ("run", "step", "epoch", "attempt", "created_s", "ranks", "metrics", "continues")


def left_out_of(commit: Commit, items: Collection[str]) -> tuple[str, ...]:
    """The items of a checkpoint's original that are not among these: where it lacks no others, it
    is brought as it is. `NotFoundError` where it lacks one of these."""
    here = [record.name for record in commit.items]
    if lacking := [item for item in items if item not in here]:
        raise NotFoundError(
            f"step {commit.step} has no item {', '.join(map(repr, lacking))}",
            found=", ".join(here) + _without(commit),
            remedy="name items that it has; `laststep show` lists them",
        )
    return tuple(sorted({*commit.left_out, *here} - {*items}))


def _without(commit: Commit) -> str:
    return f" (an excerpt without {', '.join(commit.left_out)})" if commit.left_out else ""


def only_items(index: Index, items: Collection[str], where: str) -> Index:
    """The part of an index that these items need. `NotFoundError` where tensors are derived from
    the layout of another item."""
    names = _needed_layouts(index, items, where)
    layouts = [stored for stored in index.layouts if stored.layout.name in names]
    used = {part.file for stored in layouts for run in stored.runs for part in (run, *run.bases)}
    # A layout without bytes has a file too.
    used |= {number for number, file in enumerate(index.files) if file.name in names}
    number_of = {old: new for new, old in enumerate(sorted(used))}
    return structs.replace(
        index,
        files=tuple(index.files[number] for number in sorted(used)),
        layouts=tuple(
            structs.replace(stored, runs=tuple(_moved(run, number_of) for run in stored.runs))
            for stored in layouts
        ),
        values={name: data for name, data in index.values.items() if name in items},
    )


def _needed_layouts(index: Index, items: Collection[str], where: str) -> set[str]:
    """The names of the layouts of these items, and of those that they are derived from."""
    by_name = {stored.layout.name: stored for stored in index.layouts}
    needed = {name for name, stored in by_name.items() if not _items_in(stored).isdisjoint(items)}
    waiting = sorted(needed)
    while waiting:
        stored = by_name[waiting.pop()]
        masters = {file for file, _ in stored.derived.values()} - needed
        # Tensors of small items come along, as they do where these share a layout.
        if others := [name for name in masters if by_name[name].layout.item is not None]:
            raise NotFoundError(
                f"tensors in {stored.layout.name} are derived from what is left out",
                where=where,
                expected=f"what {', '.join(sorted(others))} holds among the items",
                found=f"items={tuple(items)}",
                remedy="take the item of the masters too; or save with derived=False, which "
                "stores them both",
            )
        needed |= masters
        waiting += masters
    return needed


def _items_in(stored: StoredLayout) -> set[str]:
    layout = stored.layout
    if layout.item is not None:
        return {layout.item}
    return {entry.name.partition("/")[0] for entry in layout.tensors}


def _moved(run: BlockRun, number_of: dict[int, int]) -> BlockRun:
    bases = tuple(_moved(base, number_of) for base in run.bases)
    return structs.replace(run, file=number_of[run.file], bases=bases)


def excerpt_of(commit: Commit, items: Collection[str], written: WrittenIndexes) -> Commit:
    """The manifest of an excerpt of which that was written. What its original says of classes of
    ranks would tell of all items, and goes."""
    return structs.replace(
        commit,
        items=tuple(record for record in commit.items if record.name in items),
        written=written,
        classes=(),
        left_out=left_out_of(commit, items),
    )


def is_excerpt(there: Commit, of: Commit, left_out: tuple[str, ...]) -> bool:
    """Whether a checkpoint is the excerpt of another one that lacks just these items."""
    return there.left_out == left_out and all(
        getattr(there, name) == getattr(of, name) for name in _SAME
    )
