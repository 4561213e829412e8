"""Open the data files of a checkpoint: their sizes, their headers, and where their bytes lie.

This is the one place where data files are opened. Whatever is wrong with one is a value: `show`
notes it, `verify` lists it, and everybody else raises it (`Opened.sound`). Knows nothing of torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from laststep.codecs.digests import DIGEST_BYTES, digest_text
from laststep.errors import Corrupt, NotFound, StorageFailed
from laststep.format.header import Header, decode_header, region_bytes_of
from laststep.format.manifest import DAMAGE_REMEDY, FileRecord
from laststep.read.blocks import Damage, Extent, damage_of, refuse
from laststep.terms import BLOCK_BYTES, MAX_HEADER_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable

    from laststep.format.header import ObjectEntry
    from laststep.storage.store import FileReading, Store


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFile:
    """A data file of a checkpoint, open for reading."""

    record: FileRecord
    header: Header
    reader: FileReading
    where: str

    def blocks(self, start: int, stop: int) -> Extent:
        """The whole blocks that hold bytes [start, stop) of its tensors."""
        first, last = start // BLOCK_BYTES, -(-stop // BLOCK_BYTES)
        end = min(last * BLOCK_BYTES, self.header.tensor_bytes)
        digests = self.header.blocks[first * DIGEST_BYTES : last * DIGEST_BYTES]
        return self._extent(first * BLOCK_BYTES, end, digests, first=first)

    def object(self, entry: ObjectEntry) -> Extent:
        """The bytes of one of its objects."""
        return self._extent(entry.start, entry.stop, entry.digest, f"object {entry.name}")

    def read_object(self, entry: ObjectEntry) -> bytes:
        """One of its objects, verified."""
        return _read_whole(self.object(entry))

    def _extent(
        self, start: int, stop: int, digests: bytes, what: str | None = None, first: int = 0
    ) -> Extent:
        at = self.record.header_bytes
        return Extent(
            self.reader, self.record.name, self.where, at + start, at + stop, digests, what, first
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """What came of opening a data file."""

    record: FileRecord
    damage: tuple[Damage, ...]
    there_bytes: int | None = None
    """How large it is; None where it is missing."""
    file: DataFile | None = None
    """None, and closed, where its header cannot be believed."""

    @property
    def header(self) -> Header | None:
        """Its header, if that can be believed."""
        return None if self.file is None else self.file.header

    def sound(self) -> DataFile:
        """The file, of which nothing is wrong so far; raises what is."""
        if self.damage:
            self.close()
        refuse(self.damage)
        assert self.file is not None  # noqa: S101 (else there is damage)
        return self.file

    def close(self) -> None:
        if self.file is not None:
            self.file.reader.close()


def open_file(store: Store, folder: str, record: FileRecord, *, cached: bool = False) -> Opened:
    """Open a data file of the checkpoint in `folder`, and verify its size and its header. Where a
    record has no digest, because the manifest is lost, the header has to speak for itself."""
    path = f"{folder}/{record.name}"
    where = f"{store.url}/{path}"
    try:
        reader = store.open_reader(path, cached=cached)
    except NotFound:
        error = Corrupt(
            "a data file is missing", where=where, expected=f"{record.size_bytes} bytes",
            found="no such file", remedy=DAMAGE_REMEDY,
        ).lacking(path)  # fmt: skip
        missing = damage_of(error, file=record.name, what="missing file")
        return Opened(record=record, damage=(missing,))
    there_bytes = reader.size_bytes
    damage = _wrong_size(there_bytes, record, where)
    file: DataFile | None = None
    try:
        record = record if record.header_digest else _own_record(reader, record.name, where)
        header = _header(reader, record, where)
        file = DataFile(record=record, header=header, reader=reader, where=where)
    except (Corrupt, StorageFailed) as error:
        # Of one whose length is not known, the bytes that should say it.
        stop = min(record.header_bytes or 8, there_bytes)
        damage.append(damage_of(error, file=record.name, what="header", stop=stop))
    finally:
        if file is None:
            reader.close()
    return Opened(record=record, damage=tuple(damage), there_bytes=there_bytes, file=file)


def close_files(files: Iterable[DataFile]) -> None:
    for file in files:
        file.reader.close()


def _wrong_size(there_bytes: int, record: FileRecord, where: str) -> list[Damage]:
    if there_bytes == record.size_bytes:
        return []
    how = "short" if there_bytes < record.size_bytes else "long"
    found = f"{there_bytes} bytes"
    error = Corrupt(
        f"a data file is too {how}", where=where, expected=f"{record.size_bytes} bytes",
        found=found, remedy=DAMAGE_REMEDY,
    )  # fmt: skip
    damage = damage_of(
        error, file=record.name, what="size", start=min(there_bytes, record.size_bytes),
        stop=there_bytes, found=f"{found}: the file is too {how}",
    )  # fmt: skip
    return [damage]


def _own_record(reader: FileReading, name: str, where: str) -> FileRecord:
    """What a manifest would say of a file, had its header been right."""
    prefix = bytearray(8)
    got = reader.read_into(0, memoryview(prefix))
    size = region_bytes_of(bytes(prefix[:got]), size_bytes=reader.size_bytes, where=where)
    region = bytearray(size)
    reader.read_into(0, memoryview(region))
    return FileRecord(
        name=name, size_bytes=reader.size_bytes, header_bytes=size,
        header_digest=digest_text(region),
    )  # fmt: skip


def _header(reader: FileReading, record: FileRecord, where: str) -> Header:
    size = record.header_bytes
    if size > 2 * MAX_HEADER_BYTES:
        raise Corrupt("a header is too large", where=where, found=f"{size} bytes")
    expected = bytes.fromhex(record.header_digest.rpartition(":")[2])
    region = _read_whole(Extent(reader, record.name, where, 0, size, expected, "header"))
    return decode_header(region, data_bytes=record.size_bytes - size, where=where)


def _read_whole(extent: Extent) -> bytes:
    buffer = bytearray(extent.stop - extent.start)
    refuse(extent.read(memoryview(buffer)))
    return bytes(buffer)
