"""Decide where every tensor of a save lies: in which file, at which offset.

Pure. The image is the file: offsets are fixed before anything moves, tensors are packed without
holes in order of descending element size (so each is aligned to its element), and inside that by
device and dtype, so that copies run over long stretches. The same description always gives the same
plan.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from laststep.format.header import PartEntry, TensorEntry, reserve_bytes
from laststep.terms import DTYPES, MAX_HEADER_BYTES

if TYPE_CHECKING:
    from laststep.state.pieces import Piece

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
        return sum(piece.size_bytes for piece in self.pieces)


class PlacedPiece(NamedTuple):
    """A piece (by item and index) and the byte at which it starts in its file's data."""

    item: int
    piece: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePlan:
    """One data file: who lies where, and how much room its header gets."""

    name: str
    item: str | None
    placed: tuple[PlacedPiece, ...]
    entries: tuple[TensorEntry, ...]
    object_names: tuple[str, ...]
    tensor_bytes: int
    region_bytes: int
    parts: dict[str, PartEntry] = field(default_factory=dict)


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
    files: list[FilePlan] = []
    file_of: dict[str, str] = {}
    shared: list[tuple[int, int]] = []
    for index, item in enumerate(items):
        refs = [(index, piece) for piece in range(len(item.pieces))]
        if not (item.standalone and refs) and item.size_bytes < OWN_FILE_BYTES:
            shared += refs
            file_of[item.name] = f"{where}{SHARED_FILE}{mine}.safetensors"
            continue
        groups = _split(refs, items)
        for number, group in enumerate(groups):
            suffix = f"-{number + 1:05d}" if len(groups) > 1 else ""
            name = f"{where}{item.name}{mine}{suffix}.safetensors"
            file = _place(name, item.name, group, items, ())
            files.append(file)
            file_of.setdefault(item.name, file.name)
    names = tuple(tree_name(item.name) for item in items) if objects is None else objects
    groups = _split(shared, items) or ([[]] if names else [])
    for number, group in enumerate(groups):
        suffix = f"-{number + 1:05d}" if number else ""
        name = f"{where}{SHARED_FILE}{mine}{suffix}.safetensors"
        files.append(_place(name, None, group, items, names if number == 0 else ()))
    pieces = tuple(piece for item in items for piece in item.pieces)
    return SavePlan(items=items, files=tuple(files), file_of=file_of, pieces=pieces)


def _split(refs: list[tuple[int, int]], items: tuple[ItemSpec, ...]) -> list[list[tuple[int, int]]]:
    """Cut a list of pieces so that no file's header grows past its bound."""
    names = [items[item].pieces[piece].name for item, piece in refs]
    if refs and 6 * sum(map(len, names)) + _ENTRY_BYTES * len(refs) <= MAX_HEADER_BYTES // 2:
        return [refs]
    groups: list[list[tuple[int, int]]] = []
    room = 0
    for ref, name in zip(refs, names, strict=True):
        need = 6 * len(name) + _ENTRY_BYTES
        if need > room:
            groups.append([])
            room = MAX_HEADER_BYTES // 2
        groups[-1].append(ref)
        room -= need
    return groups


def _place(
    name: str,
    item: str | None,
    refs: list[tuple[int, int]],
    items: tuple[ItemSpec, ...],
    object_names: tuple[str, ...],
) -> FilePlan:
    alike: dict[tuple[str, str], list[tuple[int, int, Piece]]] = {}
    for index, number in refs:
        spec = items[index].pieces[number]
        alike.setdefault((spec.device, spec.dtype), []).append((index, number, spec))
    placed: list[PlacedPiece] = []
    entries: list[TensorEntry] = []
    parts: dict[str, PartEntry] = {}
    offset = 0
    for key in sorted(alike, key=lambda key: (-DTYPES[key[1]].size_bytes, *key)):
        for index, number, spec in alike[key]:
            stop = offset + spec.size_bytes
            name_in_file = spec.name if item is not None else f"{items[index].name}/{spec.name}"
            placed.append(PlacedPiece(index, number, offset, stop))
            entries.append(TensorEntry(name_in_file, key[1], spec.shape, offset, stop))
            if spec.part is not None:
                parts[name_in_file] = PartEntry(*spec.part)
            offset = stop
    fixed = tuple(entries)
    region = reserve_bytes(
        item=item, tensors=fixed, object_names=object_names, tensor_bytes=offset, parts=parts
    )
    return FilePlan(
        name=name, item=item, placed=tuple(placed), entries=fixed, object_names=object_names,
        tensor_bytes=offset, region_bytes=region, parts=parts,
    )  # fmt: skip
