"""What a checkpoint holds, as its headers say: data files, and the tensors that lie in them.

Reads no data. A file that cannot be read is noted as such, and hides nothing of the others.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from laststep.catalog import decision
from laststep.catalog.groups import files_of
from laststep.errors import Corrupt, LaststepError, NotFound
from laststep.read.content import read_header
from laststep.read.entries import item_of_object, stored_in
from laststep.terms import DTYPES

if TYPE_CHECKING:
    from laststep.format.header import Header
    from laststep.format.manifest import Commit, FileRecord
    from laststep.state.boxes import Box
    from laststep.state.stored import TensorSpec
    from laststep.storage.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """A data file, its header if that can be read, and what is wrong with the file."""

    record: FileRecord
    header: Header | None
    error: LaststepError | None


class Part(NamedTuple):
    """A box of a tensor, and the file that it lies in."""

    box: Box
    size_bytes: int
    file: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A whole tensor, in all the parts of it that are known."""

    name: str
    rank: int | None
    """Whose it is, if each rank has its own."""
    spec: TensorSpec
    parts: list[Part] = field(default_factory=list)

    @property
    def size_bytes(self) -> int:
        return math.prod(self.spec.shape) * DTYPES[self.spec.dtype].size_bytes

    @property
    def missing_bytes(self) -> int:
        """What lies in files whose headers cannot be read."""
        return self.size_bytes - sum(part.size_bytes for part in self.parts)


def read_files(store: Store, folder: str, commit: Commit) -> list[File]:
    """The data files of a checkpoint; `NotFound` where all of it was deleted meanwhile."""
    files = [_file(store, folder, record) for record in files_of(store, folder, commit)]
    if any(file.error is not None for file in files):
        gone = decision.deleted(store, folder)
        if gone is not None:
            raise gone
    return files


def tensors_of(commit: Commit, files: list[File]) -> list[Tensor]:
    """The tensors, by item; those of different ranks under one name follow each other."""
    per_rank = {item.name for item in commit.items if item.per_rank and commit.ranks > 1}
    found: dict[tuple[str, str, int | None, TensorSpec], Tensor] = {}
    items = {item.name: at for at, item in enumerate(commit.items)}
    seen: dict[tuple[str, str], int] = {}
    for file in files:
        if file.header is None:
            continue
        for entry in file.header.tensors:
            stored = stored_in(file.header, entry)
            rank = file.record.rank if stored.item in per_rank else None
            seen.setdefault((stored.item, stored.tensor), len(seen))
            tensor = found.setdefault(
                (stored.item, stored.tensor, rank, stored.spec),
                Tensor(name=stored.name, rank=rank, spec=stored.spec),
            )
            tensor.parts.append(Part(stored.box, entry.stop - entry.start, file.record.name))
    keys = sorted(found, key=lambda key: (items.get(key[0], len(items)), seen[key[:2]]))
    return [found[key] for key in keys]


def files_by_item(commit: Commit, files: list[File]) -> dict[str, list[str]]:
    """The names of the files that hold something of each item: tensors, or its tree."""
    found: dict[str, list[str]] = {item.name: [] for item in commit.items}
    for file in files:
        if file.header is None:
            continue
        items = {stored_in(file.header, entry).item for entry in file.header.tensors}
        items.update(item_of_object(entry.name) or "" for entry in file.header.objects)
        for item in items & found.keys():
            found[item].append(file.record.name)
    return found


def _file(store: Store, folder: str, record: FileRecord) -> File:
    name = f"{folder}/{record.name}"
    error: LaststepError | None = None
    try:
        reader = store.open_reader(name, cached=True)
    except NotFound as missing:
        return File(record=record, header=None, error=missing)
    try:
        if reader.size_bytes != record.size_bytes:
            how = "short" if reader.size_bytes < record.size_bytes else "long"
            error = Corrupt(
                f"a data file is too {how}",
                expected=f"{record.size_bytes} bytes",
                found=f"{reader.size_bytes} bytes",
            )
        header = read_header(reader, record, name)
    except Corrupt as damage:
        return File(record=record, header=None, error=error or damage)
    finally:
        reader.close()
    return File(record=record, header=header, error=error)
