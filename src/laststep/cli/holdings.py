"""What a checkpoint holds, as its headers say: data files, and the tensors that lie in them.

Reads no data. A file that cannot be read is noted as such, and hides nothing of the others.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from laststep.catalog import decision
from laststep.read.entries import item_of_object, stored_in
from laststep.read.files import open_file
from laststep.terms import DTYPES

if TYPE_CHECKING:
    from collections.abc import Iterable

    from laststep.format.manifest import Commit, FileRecord
    from laststep.read.blocks import Damage
    from laststep.read.files import Opened
    from laststep.state.boxes import Box
    from laststep.state.stored_items import TensorSpec
    from laststep.storage.store import Store


class ShownPart(NamedTuple):
    """A box of a tensor, and the file that it lies in."""

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
        """What lies in files whose headers cannot be read."""
        return self.size_bytes - sum(part.size_bytes for part in self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownFile:
    """A data file, whether it holds an image or is lent to those that do."""

    record: FileRecord
    lent_to: tuple[str, ...]
    """The files that borrow blocks of it, as far as their headers can be read."""
    follows_from: tuple[str, ...]
    """The other files with masters of its tensors, likewise."""
    damage: tuple[Damage, ...]
    codecs: tuple[str, ...] = ()
    """By which blocks that it holds are encoded."""


def read_files(store: Store, folder: str, records: Iterable[FileRecord]) -> list[Opened]:
    """Those data files of a checkpoint that are not only lent to others, closed again; `NotFound`
    where all of it was deleted."""
    files = []
    records = tuple(records)
    among = {record.name: record for record in records}
    for record in records:
        if not record.lent:
            files.append(open_file(store, folder, record, among, cached=True))
            files[-1].close()
    if any(file.damage for file in files):
        gone = decision.deleted(store, folder)
        if gone is not None:
            raise gone
    return files


def shown_files(records: Iterable[FileRecord], files: list[Opened]) -> list[ShownFile]:
    """All data files of a checkpoint; what is wrong with a lent one shows where it is opened for
    another."""
    lent_to: dict[str, list[str]] = {}
    follows: dict[str, tuple[str, ...]] = {}
    damage: dict[str, list[Damage]] = {}
    codecs: dict[str, tuple[str, ...]] = {}
    for file in files:
        for held in () if file.file is None else file.file.files:
            ways = {block.way.codec for block in held.header.coded or ()}
            codecs[held.record.name] = tuple(sorted(ways))
        for name in () if file.header is None else file.header.lent:
            lent_to.setdefault(name, []).append(file.record.name)
        follows[file.record.name] = _masters(file)
        for wrong in file.damage:
            damage.setdefault(wrong.file, []).append(wrong)
    return [
        ShownFile(
            record=record,
            lent_to=tuple(lent_to.get(record.name, ())),
            follows_from=follows.get(record.name, ()),
            damage=tuple(damage.get(record.name, ())),
            codecs=codecs.get(record.name, ()),
        )
        for record in records
    ]


def _masters(file: Opened) -> tuple[str, ...]:
    """The other files that tensors of one follow from."""
    derived = {} if file.header is None else file.header.derived
    return tuple(dict.fromkeys(m.file for m in derived.values() if m.file != file.record.name))


def tensors_of(commit: Commit, files: list[Opened]) -> list[ShownTensor]:
    """The tensors, by item; those of different ranks under one name follow each other."""
    per_rank = {item.name for item in commit.items if item.per_rank and commit.ranks > 1}
    found: dict[tuple[str, str, int | None, TensorSpec], ShownTensor] = {}
    items = {item.name: at for at, item in enumerate(commit.items)}
    seen: dict[tuple[str, str], int] = {}
    for file in files:
        if file.header is None:
            continue
        for entry in file.header.tensors:
            stored = stored_in(file.header, entry)
            if stored.item in commit.left_out:
                continue
            rank = file.record.rank if stored.item in per_rank else None
            seen.setdefault((stored.item, stored.tensor), len(seen))
            tensor = found.setdefault(
                (stored.item, stored.tensor, rank, stored.spec),
                ShownTensor(
                    name=stored.name,
                    rank=rank,
                    spec=stored.spec,
                    lossy=file.header.lossy.get(entry.name),
                ),
            )
            tensor.parts.append(ShownPart(stored.box, entry.stop - entry.start, file.record.name))
    keys = sorted(found, key=lambda key: (items.get(key[0], len(items)), seen[key[:2]]))
    return [found[key] for key in keys]


def files_by_item(commit: Commit, files: list[Opened]) -> dict[str, list[str]]:
    """The names of the files that hold something of each item: tensors, or its tree; with those
    that are lent to them, or that its tensors follow from."""
    found: dict[str, list[str]] = {item.name: [] for item in commit.items}
    for file in files:
        if file.header is None:
            continue
        items = {stored_in(file.header, entry).item for entry in file.header.tensors}
        items.update(item_of_object(entry.name) or "" for entry in file.header.objects)
        for item in items & found.keys():
            found[item] += [file.record.name, *file.header.lent, *_masters(file)]
    return found
