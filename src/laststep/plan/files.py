"""Decide where every tensor of a save lies: in which file, at which offset.

Pure. The image is the file: offsets are fixed before anything moves, tensors are packed without
holes in order of descending element size (so each is aligned to its element), and inside that by
device and dtype, so that copies run over long stretches. The same description always gives the same
plan.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Final, NamedTuple

from laststep.format.layout import FileLayout, Part, header_bytes_of
from laststep.format.safetensors import TensorEntry
from laststep.terms import DTYPES, MAX_HEADER_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from laststep.state.pieces import Piece

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemSpec:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePlan:
    """One data file, and which of the plan's pieces lie in it, in the order of its entries."""

    layout: FileLayout
    pieces: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SavePlan:
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
    name: str,
    item: str | None,
    numbers: list[int],
    pieces: tuple[Piece, ...],
    names: list[str],
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
