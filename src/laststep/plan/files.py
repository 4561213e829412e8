"""Decide where every tensor of a save lies: in which file, at which offset.

Pure. The image is the file: offsets are fixed before anything moves, tensors are packed without
holes in order of descending element size (so each is aligned to its element), and inside that by
device and dtype, so that copies run over long stretches. The same description always gives the same
plan.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Final

from laststep.format.header import PartEntry, reserve_bytes
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
TREE_NAME = "~6tree"
"""The object that holds an item's tree; `~6` cannot begin the name of a tensor's path."""
TABLE_NAME = "~6table"
"""The object in which ranks of a job say what they hold (`plan.tables`)."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePlan:
    """One data file: who lies where, and how much room its header gets."""

    name: str
    item: str | None
    pieces: tuple[int, ...]
    """Which of the plan's pieces lie in it."""
    entries: tuple[TensorEntry, ...]
    """Where each of them lies, and its name."""
    object_names: tuple[str, ...]
    tensor_bytes: int
    region_bytes: int
    parts: dict[str, PartEntry] = field(default_factory=dict)
    derived: tuple[tuple[int, int, int], ...] = ()
    """Entries that may follow from others (`plan.deriving`): own entry, file, entry there."""
    is_declared: bool = False
    """Whether the user has said that they do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavePlan:
    """Every file of a save."""

    items: tuple[ItemSpec, ...]
    files: tuple[FilePlan, ...]
    file_of: dict[str, str]
    """The (first) data file of each item."""
    pieces: tuple[Piece, ...]
    """Those of all items, in order."""

    @property
    def tensor_bytes(self) -> int:
        return sum(file.tensor_bytes for file in self.files)


def tree_name(item: str) -> str:
    """The name of the object that holds an item's tree."""
    return f"{item}/{TREE_NAME}"


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
    objects: tuple[str, ...] | None = None,
) -> SavePlan:
    """Place every piece of every item, and room for objects of these names (None: the trees of all
    items), into files.
    In a job of several ranks, `rank`, which of how many, tells the files of each from the
    others'."""
    mine = "" if rank is None else f"-r{rank[0]:05d}"
    where = "" if rank is None else folder_of(*rank)
    pieces = tuple(chain.from_iterable(item.pieces for item in items))
    names: list[str] = []  # of all pieces, as their files have them
    files: list[FilePlan] = []
    file_of: dict[str, str] = {}
    shared: list[int] = []
    for item in items:
        numbers = range(len(names), len(names) + len(item.pieces))
        if not (item.standalone and numbers) and item.size_bytes < OWN_FILE_BYTES:
            shared += numbers
            names += [f"{item.name}/{piece.name}" for piece in item.pieces]
            file_of[item.name] = f"{where}{SHARED_FILE}{mine}.safetensors"
            continue
        names += [piece.name for piece in item.pieces]
        groups = _split(numbers, pieces)
        for number, group in enumerate(groups):
            suffix = f"-{number + 1:05d}" if len(groups) > 1 else ""
            name = f"{where}{item.name}{mine}{suffix}.safetensors"
            file = _place(name, item.name, group, pieces, names, ())
            files.append(file)
            file_of.setdefault(item.name, file.name)
    trees = tuple(tree_name(item.name) for item in items) if objects is None else objects
    groups = _split(shared, pieces) or ([[]] if trees else [])
    for number, group in enumerate(groups):
        suffix = f"-{number + 1:05d}" if number else ""
        name = f"{where}{SHARED_FILE}{mine}{suffix}.safetensors"
        files.append(_place(name, None, group, pieces, names, trees if number == 0 else ()))
    return SavePlan(items=items, files=tuple(files), file_of=file_of, pieces=pieces)


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
    object_names: tuple[str, ...],
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
        name: PartEntry(*spec.part)
        for name, spec in zip(own, specs, strict=True)
        if spec.part is not None
    }
    region = reserve_bytes(
        item=item, tensors=entries, object_names=object_names, tensor_bytes=bounds[-1], parts=parts
    )
    return FilePlan(
        name=name, item=item, pieces=tuple(order), entries=entries, object_names=object_names,
        tensor_bytes=bounds[-1], region_bytes=region, parts=parts,
    )  # fmt: skip
