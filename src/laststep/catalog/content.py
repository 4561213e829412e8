"""Open a committed checkpoint: its headers and objects, verified; where each tensor's bytes lie.

Reads no tensor data and imports no torch. Whatever cannot be read as it was written is `Corrupt`,
after a second look past every cache; `NotFound` only where the whole checkpoint has been deleted
since its manifest was read.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Self

from laststep.catalog import decision
from laststep.codecs.digests import digest, digest_text
from laststep.errors import Corrupt, NotFound
from laststep.format.header import Header, PartEntry, TensorEntry, decode_header
from laststep.format.manifest import DAMAGE_REMEDY
from laststep.state.layouts import Box, covers_once, whole
from laststep.state.stored import StoredItem, TensorSpec, decode_item
from laststep.terms import MAX_HEADER_BYTES

if TYPE_CHECKING:
    from types import TracebackType

    from laststep.format.manifest import Commit, FileRecord
    from laststep.storage.store import Reader, Store

TREE_SUFFIX = "/~6tree"


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFile:
    """A data file of a checkpoint, open for reading."""

    record: FileRecord
    header: Header
    reader: Reader
    where: str


class Place(NamedTuple):
    """Where a box of a stored tensor lies: bytes [start, stop) of a file's tensor area, in
    row-major order of the box."""

    file: int
    start: int
    stop: int
    box: Box


class Content:
    """The content of one checkpoint; close it when done."""

    def __init__(self, store: Store, folder: str, commit: Commit, *, rank: int = 0) -> None:
        """Of items that every rank has for itself, this is that rank's view; of a rank that the
        checkpoint does not have, the first one's."""
        self.folder = folder
        self._rank = rank if rank < commit.ranks else 0
        self.per_rank = {record.name for record in commit.items if record.per_rank}
        self.commit = commit
        self.files: list[DataFile] = []
        self.places: dict[tuple[str, str], tuple[Place, ...]] = {}
        """Where the bytes of each tensor lie, by item and name: boxes that cover it once."""
        self._specs: dict[tuple[str, str], TensorSpec] = {}
        try:
            for record in commit.files:
                self.files.append(_open_file(store, folder, record))
            self._index()
            self.items = {
                record.name: self._item(record.name, record.kind) for record in commit.items
            }
        except Corrupt as error:
            self.close()
            gone = decision.deleted(store, folder)
            if gone is not None:
                raise gone from error
            raise
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        for file in self.files:
            file.reader.close()

    def item(self, name: str) -> StoredItem:
        try:
            return self.items[name]
        except KeyError:
            known = ", ".join(sorted(self.items)) or "none"
            raise NotFound(
                f"the checkpoint has no item {name!r}", where=self.folder, found=known
            ) from None

    def _index(self) -> None:
        names = {record.name for record in self.commit.items}
        for number, file in enumerate(self.files):
            for entry in file.header.tensors:
                if file.header.item is not None:
                    item, name = file.header.item, entry.name
                else:
                    item, _, name = entry.name.partition("/")
                if item not in names:
                    raise Corrupt(
                        "a tensor of an unknown item", where=file.where, found=repr(entry.name)
                    )
                if item in self.per_rank and file.record.rank != self._rank:
                    continue
                part = file.header.parts.get(entry.name)
                self._add(number, item, name, entry, part)
        for (item, name), places in self.places.items():
            shape = self._specs[item, name].shape
            if len(places) == 1 and places[0].box == whole(shape):
                continue
            if not covers_once(shape, [place.box for place in places]):
                raise Corrupt(
                    "the parts of a tensor do not make it up", where=self.folder,
                    expected=f"every element of {item}/{name} {list(shape)} once",
                    found=f"{len(places)} parts", remedy=DAMAGE_REMEDY,
                )  # fmt: skip

    def _add(
        self, file: int, item: str, name: str, entry: TensorEntry, part: PartEntry | None
    ) -> None:
        spec, box = TensorSpec(entry.dtype, entry.shape), whole(entry.shape)
        if part is not None:
            name, spec = part.tensor, TensorSpec(entry.dtype, part.shape)
            stop = tuple(map(operator.add, part.start, entry.shape))
            box = Box(part.start, stop)
        known = self._specs.setdefault((item, name), spec)
        if known != spec:
            raise Corrupt(
                "the parts of a tensor differ", where=self.files[file].where,
                expected=f"{known.dtype}{list(known.shape)} for {item}/{name}",
                found=f"{spec.dtype}{list(spec.shape)}", remedy=DAMAGE_REMEDY,
            )  # fmt: skip
        before = self.places.get((item, name), ())
        self.places[item, name] = (*before, Place(file, entry.start, entry.stop, box))

    def _item(self, name: str, kind: str) -> StoredItem:
        tensors = {tensor: spec for (item, tensor), spec in self._specs.items() if item == name}
        trees = self._trees(name)
        return decode_item(trees, name=name, kind=kind, tensors=tensors)

    def _trees(self, item: str) -> list[tuple[bytes, str]]:
        """The trees of an item, one of each kind of rank that has it, and where they lie."""
        name, found = item + TREE_SUFFIX, []
        for file in self.files:
            if item in self.per_rank and file.record.rank != self._rank:
                continue
            for entry in file.header.objects:
                if entry.name == name:
                    start = file.record.header_bytes + entry.start
                    data = read_verified(
                        file.reader, start, entry.stop - entry.start, entry.digest, file.where
                    )
                    found.append((data, f"{file.where}, object {name}"))
        if not found:
            raise Corrupt("the tree of an item is missing", where=self.folder, expected=name)
        return found


def _open_file(store: Store, folder: str, record: FileRecord) -> DataFile:
    path = f"{folder}/{record.name}"
    where = f"{store.url}/{path}"
    try:
        reader = store.open_reader(path)
    except NotFound as error:
        raise Corrupt(
            "a data file is missing", where=where, expected=f"{record.size_bytes} bytes",
            remedy=DAMAGE_REMEDY,
        ) from error  # fmt: skip
    try:
        _check_sizes(reader, record, where)
        expected = bytes.fromhex(record.header_digest.rpartition(":")[2])
        region = read_verified(reader, 0, record.header_bytes, expected, f"{where}, header")
        header = decode_header(
            region, data_bytes=record.size_bytes - record.header_bytes, where=where
        )
    except BaseException:
        reader.close()
        raise
    return DataFile(record=record, header=header, reader=reader, where=where)


def _check_sizes(reader: Reader, record: FileRecord, where: str) -> None:
    if reader.size_bytes != record.size_bytes:
        how = "short" if reader.size_bytes < record.size_bytes else "long"
        raise Corrupt(
            f"a data file is too {how}", where=where,
            expected=f"{record.size_bytes} bytes", found=f"{reader.size_bytes} bytes",
            remedy=DAMAGE_REMEDY,
        )  # fmt: skip
    if record.header_bytes > 2 * MAX_HEADER_BYTES:
        raise Corrupt("a header is too large", where=where, found=f"{record.header_bytes} bytes")


def read_verified(reader: Reader, start: int, size: int, expected: bytes, where: str) -> bytes:
    """Bytes whose digest is right; a wrong one is read a second time before it counts."""
    buffer = bytearray(size)
    for _ in range(2):
        got = reader.read_into(start, memoryview(buffer)) if size else 0
        if got == size and digest(buffer) == expected:
            return bytes(buffer)
    if got < size:
        raise Corrupt(
            "a data file is too short", where=where, expected=f"at least {start + size} bytes",
            found=f"{start + got} bytes" if got else f"at most {start} bytes",
            remedy=DAMAGE_REMEDY,
        )  # fmt: skip
    raise Corrupt(
        "stored bytes have changed", where=f"{where} (bytes {start}-{start + size})",
        expected=f"digest {expected.hex()}", found=digest_text(bytes(buffer)),
        remedy=DAMAGE_REMEDY,
    )  # fmt: skip
