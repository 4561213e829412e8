"""What a checkpoint holds, as its indexes say: data files, and the tensors that lie in them.

Reads no data. An index or a file that cannot be read is noted as such, and hides nothing of the
others.
"""

from __future__ import annotations

import math
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from laststep.catalog import decision
from laststep.catalog.indexes import read_index
from laststep.errors import CorruptError
from laststep.format.index import RAW, Index
from laststep.read.files import OpenIndex, stored_in
from laststep.terms import DTYPES

if TYPE_CHECKING:
    from laststep.format.index import StoredFile, StoredLayout
    from laststep.format.manifest import Commit
    from laststep.read.blocks import Damage
    from laststep.state.boxes import Box
    from laststep.state.tree import TensorSpec
    from laststep.storage.store import Store


class ShownPart(NamedTuple):
    """A box of a tensor, and the data file that it belongs to."""

    box: Box
    size_bytes: int
    file: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownTensor:
    """A whole tensor, in all the parts of it that are known."""

    name: str
    rank: int | None
    """Whose it is, if each rank has its own."""
    spec: TensorSpec
    lossy: str | None = None
    """How it was rounded."""
    parts: list[ShownPart] = field(default_factory=list)

    @property
    def size_bytes(self) -> int:
        return math.prod(self.spec.shape) * DTYPES[self.spec.dtype].size_bytes

    @property
    def missing_bytes(self) -> int:
        """What belongs to ranks whose indexes cannot be read."""
        return self.size_bytes - sum(part.size_bytes for part in self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownFile:
    """A data file of a checkpoint."""

    file: StoredFile
    rank: int
    used_by: tuple[str, ...]
    """The layouts whose blocks lie in it."""
    codecs: tuple[str, ...]
    """By which blocks in it are encoded."""
    damage: tuple[Damage, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Holdings:
    """What could be read of a checkpoint."""

    commit: Commit
    indexes: tuple[Index, ...]
    files: tuple[ShownFile, ...]
    unreadable: tuple[CorruptError, ...]
    """The indexes that cannot be read."""


def read_holdings(store: Store, folder: str, commit: Commit) -> Holdings:
    """Read the indexes of a checkpoint, and look at the sizes of its files; `NotFoundError` where
    all of it was deleted."""
    indexes, files, unreadable = list[Index](), list[ShownFile](), list[CorruptError]()
    for rank in range(commit.index_count):
        try:
            index = read_index(store, folder, commit, rank)
        except CorruptError as error:
            unreadable.append(error)
            continue
        indexes.append(index)
        with closing(OpenIndex(store, folder, index, cached=True)) as opened:
            files += _shown_files(index, opened.damage)
    if unreadable or any(file.damage for file in files):
        gone = decision.deleted(store, folder)
        if gone is not None:
            raise gone
    return Holdings(
        commit=commit, indexes=tuple(indexes), files=tuple(files), unreadable=tuple(unreadable)
    )


def _shown_files(index: Index, damage: tuple[Damage, ...]) -> list[ShownFile]:
    used_by: list[dict[str, None]] = [{} for _ in index.files]
    codecs: list[set[str]] = [set() for _ in index.files]
    for stored in index.layouts:
        for number in files_of(stored, index):
            used_by[number][stored.layout.name] = None
        for run in stored.runs:
            for part in (run, *run.bases):
                if part.encoding != RAW:
                    codecs[part.file].add(index.encodings[part.encoding - 1].codec)
    return [
        ShownFile(
            file=file,
            rank=index.rank,
            used_by=tuple(used_by[number]),
            codecs=tuple(sorted(codecs[number])),
            damage=tuple(wrong for wrong in damage if wrong.file == file.name),
        )
        for number, file in enumerate(index.files)
    ]


def files_of(stored: StoredLayout, index: Index) -> list[int]:
    """The numbers of the files that blocks of a layout lie in, or its file without any."""
    used = {part.file for run in stored.runs for part in (run, *run.bases)}
    used |= {n for n, file in enumerate(index.files) if file.name == stored.layout.name}
    return sorted(used)


def tensors_of(held: Holdings) -> list[ShownTensor]:
    """The tensors, by item; those of different ranks under one name follow each other."""
    commit = held.commit
    per_rank = {item.name for item in commit.items if item.per_rank and commit.ranks > 1}
    found: dict[tuple[str, str, int | None, TensorSpec], ShownTensor] = {}
    items = {item.name: at for at, item in enumerate(commit.items)}
    seen: dict[tuple[str, str], int] = {}
    for index in held.indexes:
        for layout in index.layouts:
            for entry in layout.layout.tensors:
                stored = stored_in(layout.layout, entry)
                if stored.item in commit.left_out:
                    continue
                rank = index.rank if stored.item in per_rank else None
                seen.setdefault((stored.item, stored.tensor), len(seen))
                tensor = found.setdefault(
                    (stored.item, stored.tensor, rank, stored.spec),
                    ShownTensor(
                        name=stored.name,
                        rank=rank,
                        spec=stored.spec,
                        lossy=layout.lossy.get(entry.name),
                    ),
                )
                part = ShownPart(stored.box, entry.stop - entry.start, layout.layout.name)
                tensor.parts.append(part)
    keys = sorted(found, key=lambda key: (items.get(key[0], len(items)), seen[key[:2]]))
    return [found[key] for key in keys]


def files_by_item(held: Holdings) -> dict[str, list[str]]:
    """The names of the files that hold tensors of each item."""
    found: dict[str, dict[str, None]] = {item.name: {} for item in held.commit.items}
    for index in held.indexes:
        for layout in index.layouts:
            items = {stored_in(layout.layout, entry).item for entry in layout.layout.tensors}
            names = [index.files[number].name for number in files_of(layout, index)]
            for item in items & found.keys():
                found[item].update(dict.fromkeys(names))
    return {item: list(names) for item, names in found.items()}
