"""Open the data files of a checkpoint: their sizes, their headers, and where their bytes lie.

This is the one place where data files are opened. Whatever is wrong with one is a value: `show`
notes it, `verify` lists it, and everybody else raises it (`Opened.sound`). Knows nothing of torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from msgspec import structs

from laststep.codecs.digests import DIGEST_BYTES, digest_text
from laststep.errors import Corrupt, NotFound, StorageFailed
from laststep.format import borrowing, deriving
from laststep.format.deriving import ROUNDED
from laststep.format.header import Header, decode_header
from laststep.format.manifest import DAMAGE_REMEDY, FileRecord
from laststep.format.safetensors import region_bytes_of
from laststep.read.blocks import OBJECT, Damage, Extent, Extents, damage_of, refuse
from laststep.read.coded import CodedExtent
from laststep.read.derived import Masters
from laststep.storage.store import InPlace, PrefersCached
from laststep.terms import BLOCK_BYTES, MAX_HEADER_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from laststep.format.borrowing import Stretch
    from laststep.format.header import ObjectEntry
    from laststep.read.blocks import Readable
    from laststep.storage.store import FileReading, Store


class HeldFile(NamedTuple):
    """A file as far as it holds bytes: blocks one after the other, then objects."""

    record: FileRecord
    header: Header
    reader: FileReading
    where: str
    lenders: Mapping[str, HeldFile] = {}
    """The files that its blocks may be coded against, by name."""
    masters: Masters | None = None
    """What some of its tensors follow from."""

    def blocks(
        self, first: int, count: int, image_first: int, end: int, *, as_anchor: bool = False
    ) -> Extent | CodedExtent:
        """So many of its blocks from that one on; they are those of the image from `image_first`
        on, which has `end` bytes."""
        if self.header.coded is not None:
            coded = list(self.header.coded[first : first + count])
            return CodedExtent(
                self, coded, first=first, image_first=image_first, end=end, as_anchor=as_anchor
            )
        image_at = image_first * BLOCK_BYTES
        size = min((image_first + count) * BLOCK_BYTES, end) - image_at
        digests = self.header.blocks[first * DIGEST_BYTES : (first + count) * DIGEST_BYTES]
        at = self.record.header_bytes + first * BLOCK_BYTES
        return Extent(
            self.reader, self.record.name, self.where, at, at + size, digests, None, first, image_at
        )

    def header_extent(self) -> Extent:
        return _header_extent(self.reader, self.record, self.where)

    def object(self, entry: ObjectEntry) -> Extent:
        at = self.record.header_bytes
        return Extent(
            self.reader, self.record.name, self.where, at + entry.start, at + entry.stop,
            entry.digest, OBJECT + entry.name, 0, entry.start,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFile:
    """A data file of a checkpoint, open for reading, with those that it borrows blocks of."""

    record: FileRecord
    header: Header
    """What it holds, wherever its blocks lie."""
    files: tuple[HeldFile, ...]
    """Itself, and the files that are lent to it."""
    lies: borrowing.BlockMap | None = None
    """Where its blocks lie, if not all in it, one after the other."""
    masters: tuple[DataFile, ...] = ()
    """Other files that its tensors follow from."""

    @property
    def where(self) -> str:
        return self.files[0].where

    @property
    def reader(self) -> FileReading:
        """Of the file itself."""
        return self.files[0].reader

    @property
    def in_memory(self) -> bool:
        """Whether nobody waits who reads it."""
        return isinstance(self.reader, InPlace) and self.reader.at_hand

    def prefer_cached(self) -> bool:
        """For those who want bytes, and not to know whether the disk has them: take what the system
        has in memory from there. False where its own file knows no such thing."""
        for file in self.files:
            if isinstance(file.reader, PrefersCached):
                file.reader.prefer_cached()
        return isinstance(self.reader, PrefersCached)

    def blocks(self, start: int, stop: int) -> Readable:
        """The whole blocks that hold bytes [start, stop) of its tensors."""
        first, last = start // BLOCK_BYTES, -(-stop // BLOCK_BYTES)
        end = self.header.tensor_bytes
        if self.lies is None:
            return self.files[0].blocks(first, last - first, first, end)
        parts = [
            self.files[there.file].blocks(there.first, there.blocks, at, end)
            for at, there in self.lies.cut(first, last)
        ]
        return parts[0] if len(parts) == 1 else Extents(parts)

    def object(self, entry: ObjectEntry) -> Extent:
        """The bytes of one of its objects."""
        return self.files[entry.file].object(entry)

    def read_object(self, entry: ObjectEntry) -> bytes:
        """One of its objects, verified."""
        return _read_whole(self.object(entry))

    def is_derived(self, start: int, stop: int) -> bool:
        """Whether any block of these bytes of its tensors is put together from others."""
        first, last = start // BLOCK_BYTES, -(-stop // BLOCK_BYTES)
        parts = [(first, borrowing.Stretch(last - first, 0, first))]
        return any(
            block.way == ROUNDED
            for _, part in (parts if self.lies is None else self.lies.cut(first, last))
            for block in (self.files[part.file].header.coded or ())[
                part.first : part.first + part.blocks
            ]
        )

    def close(self) -> None:
        for file in self.files:
            file.reader.close()
        for master in self.masters:
            master.close()


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
            self.file.close()


def open_file(
    store: Store,
    folder: str,
    record: FileRecord,
    among: Mapping[str, FileRecord] | None = None,
    *,
    cached: bool = False,
) -> Opened:
    """Open a data file of the checkpoint in `folder`, and those that it borrows of or its tensors
    follow from, which are `among` its files; verify sizes and headers. Where a record has no
    digest, because the manifest is lost, the header has to speak for itself."""
    opened = _open_image(store, folder, record, among, cached=cached)
    file = opened.file
    if file is None or not file.header.derived:
        return opened
    damage, others = list(opened.damage), dict[str, Opened]()
    whole: DataFile | None = None
    try:
        for name in dict.fromkeys(master.file for master in file.header.derived.values()):
            if name != record.name:
                there = _named(name, among, file.where)
                others[name] = _open_image(store, folder, there, among, cached=cached)
                damage += others[name].damage
        masters = {name: other.file for name, other in others.items() if other.file is not None}
        if len(masters) == len(others):
            whole = _with_masters(file, masters)
    except Corrupt as error:
        damage.append(damage_of(error, file=record.name, what="header", stop=record.header_bytes))
    finally:
        if whole is None:
            for every in (opened, *others.values()):
                every.close()
    return replace(opened, damage=tuple(damage), file=whole)


def _open_image(
    store: Store,
    folder: str,
    record: FileRecord,
    among: Mapping[str, FileRecord] | None,
    *,
    cached: bool,
) -> Opened:
    """A data file with those that it borrows of."""
    opened = open_alone(store, folder, record, cached=cached)
    file = opened.file
    if file is None or not file.header.lent:
        return opened
    damage, others = list(opened.damage), list[Opened]()
    whole: DataFile | None = None
    try:
        for name in file.header.lent:
            others.append(open_alone(store, folder, _named(name, among, file.where), cached=cached))
            damage += others[-1].damage
        lent = [other.file for other in others if other.file is not None]
        if len(lent) == len(others):
            whole = _put_together(file, lent)
    except Corrupt as error:
        damage.append(damage_of(error, file=record.name, what="header", stop=record.header_bytes))
    finally:
        if whole is None:
            for every in (opened, *others):
                every.close()
    return replace(opened, damage=tuple(damage), file=whole)


def _named(name: str, among: Mapping[str, FileRecord] | None, where: str) -> FileRecord:
    if among is None or name not in among:
        raise _lends_nothing(where, f"{name!r}, which is none of the checkpoint's files")
    return among[name]


def _put_together(file: DataFile, lent: Sequence[DataFile]) -> DataFile:
    """A file with the blocks that it borrows. The first of the others says what tensors there are;
    that all have the blocks which they are said to lend is checked here."""
    files = (*file.files, *(other.files[0] for other in lent))
    image, header = files[1].header, file.header
    problem = None
    if image.lent or image.tensor_bytes != header.tensor_bytes or image.item != header.item:
        problem = f"{files[1].record.name}, which has other tensors"
    for stretch in header.stretches:
        there = files[stretch.file].header
        count, last = len(there.blocks) // DIGEST_BYTES, stretch.first + stretch.blocks
        if last > count:
            problem = f"block {last - 1} of {count}"
        elif stretch.file and any(
            b.way == ROUNDED for b in (there.coded or ())[stretch.first : last]
        ):
            problem = f"a block of {files[stretch.file].record.name} that follows from others"
    for entry in header.objects:
        held = files[entry.file]
        if entry.stop > held.record.size_bytes - held.record.header_bytes:
            problem = f"{entry.name} behind the end of {held.record.name}"
    if problem is not None:
        raise _lends_nothing(file.where, problem)
    by_name = {there.record.name: there for there in files}
    for stretch in header.stretches:
        _check_anchors(files[stretch.file], stretch, by_name)
    files = tuple(there._replace(lenders=by_name) for there in files)
    blocks = b"".join(
        files[s.file].header.blocks[s.first * DIGEST_BYTES : (s.first + s.blocks) * DIGEST_BYTES]
        for s in header.stretches
    )
    whole = structs.replace(header, tensors=image.tensors, parts=image.parts, blocks=blocks)
    return DataFile(
        record=file.record, header=whole, files=files, lies=borrowing.BlockMap(header.stretches)
    )


def _check_anchors(file: HeldFile, used: Stretch, by_name: Mapping[str, HeldFile]) -> None:
    """That all is there which blocks of a file are coded against, those of them that are used: what
    others need may be gone. An anchor has none itself, so a block takes one other at the most."""
    for block in (file.header.coded or ())[used.first : used.first + used.blocks]:
        if block.anchor is None:
            continue
        name, number = file.header.lent[block.anchor.file - 1], block.anchor.block
        there = by_name.get(name)
        count = 0 if there is None else len(there.header.blocks) // DIGEST_BYTES
        if there is None or number >= count:
            raise _lends_nothing(file.where, f"block {number} of {count} of {name} as an anchor")
        anchor = None if there.header.coded is None else there.header.coded[number]
        if anchor is not None and (anchor.anchor is not None or anchor.way == ROUNDED):
            raise _lends_nothing(file.where, f"block {number} of {name}, which needs another")


def _with_masters(file: DataFile, others: Mapping[str, DataFile]) -> DataFile:
    """A file with the tensors that its own follow from. Those have to be what they are rounded
    from, and to lie in blocks that need no others."""
    header, places = file.header, dict[str, tuple[DataFile, int]]()
    problem = deriving.problem(header.tensors, header.derived)
    entries = {entry.name: entry for entry in header.tensors}
    by_file = {
        name: {entry.name: entry for entry in other.header.tensors}
        for name, other in {**others, file.record.name: file}.items()
    }
    for name, (there, tensor) in header.derived.items():
        found, own = by_file[there].get(tensor), entries.get(name)
        if problem is not None or found is None or own is None:
            problem = problem or f"{tensor!r} of {there}, which is not there"
            break
        master = others.get(there, file)
        if found.dtype != deriving.MASTER_DTYPE or found.shape != own.shape:
            problem = f"{found.dtype} {list(found.shape)} for {name!r} {list(own.shape)}"
        elif found.start < found.stop and master.is_derived(found.start, found.stop):
            problem = f"{tensor!r} of {there}, which follows from another"
        places[name] = master, found.start
    if problem is not None:
        raise Corrupt(
            "a tensor follows from what there is not", where=file.where, found=problem,
            remedy=DAMAGE_REMEDY,
        )  # fmt: skip
    runs = deriving.DerivedRuns(header.tensors, header.derived)
    own_file = file.files[0]._replace(masters=Masters(runs, places))
    return replace(file, files=(own_file, *file.files[1:]), masters=tuple(others.values()))


def _lends_nothing(where: str, found: str) -> Corrupt:
    return Corrupt(
        "a data file borrows what there is not", where=where, found=found, remedy=DAMAGE_REMEDY
    )


def open_alone(store: Store, folder: str, record: FileRecord, *, cached: bool) -> Opened:
    """One file alone, with what it holds itself, whether or not there is what it needs."""
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
        held = HeldFile(record, header, reader, where)
        file = DataFile(record=record, header=header, files=(held,))
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
        file.close()


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
    region = _read_whole(_header_extent(reader, record, where))
    return decode_header(region, data_bytes=record.size_bytes - size, where=where)


def _header_extent(reader: FileReading, record: FileRecord, where: str) -> Extent:
    expected = bytes.fromhex(record.header_digest.rpartition(":")[2])
    return Extent(reader, record.name, where, 0, record.header_bytes, expected, "header")


def _read_whole(extent: Extent) -> bytes:
    buffer = bytearray(extent.size_bytes)
    refuse(extent.read(memoryview(buffer)))
    return bytes(buffer)
