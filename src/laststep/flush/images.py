"""One data file of a save as it is written: whole, or only what has changed since the last one.

Digests are made on the way, objects come behind, the header last. Chunks may arrive in any order
and be written by several threads at once. Knows nothing of other files, of commits or of torch.
"""

from __future__ import annotations

import itertools
import mmap
import threading
from typing import TYPE_CHECKING, Protocol

import msgspec

from laststep.codecs.digests import DIGEST_BYTES, digest, digest_text
from laststep.errors import LaststepError
from laststep.flush.lending import Lender, LentFile
from laststep.format.borrowing import BlockPlace, stretches_of
from laststep.format.header import Header, ObjectEntry, encode_header, reserve_borrowing_bytes
from laststep.format.manifest import FileRecord
from laststep.terms import ALIGN_BYTES, BLOCK_BYTES, align_up

if TYPE_CHECKING:
    from laststep.flush.protocol import FileBegin
    from laststep.storage.store import FileWriting, Store

Objects = list[tuple[str, bytes]]


class WrittenImage(Protocol):
    """A file that is being written."""

    def write(self, start: int, image: memoryview, size_bytes: int, sums: bytes) -> None:
        """Write bytes of the tensor area from `start` on, of whose blocks these are the digests.
        `image` MUST reach to the next multiple of the alignment."""

    def finish(self, objects: Objects) -> tuple[FileRecord, ...]:
        """Append objects, write the header, make it durable. What lies in the folder now: the file
        itself, first, and those that are lent to it. All chunks MUST have been written."""

    def lender(self) -> Lender:
        """What the next save may borrow of it; known once it is finished."""

    def close(self) -> None:
        """Close what is open; does nothing to a finished file."""


class WholeImage:
    """A file that holds all of its image: every block has its place."""

    def __init__(
        self, store: Store, folder: str, plan: FileBegin, before: Lender | None = None
    ) -> None:
        """`before` is a file of the same image, to tell how much has changed."""
        self._folder = folder
        self._plan = plan
        self._before = before
        self._sums = bytearray(-(-plan.tensor_bytes // BLOCK_BYTES) * DIGEST_BYTES)
        self._tail = b""
        expected = plan.region_bytes + plan.tensor_bytes
        self._writer = store.open_writer(f"{folder}/{plan.name}", expected_bytes=expected)

    def write(self, start: int, image: memoryview, size_bytes: int, sums: bytes) -> None:
        first = start // BLOCK_BYTES * DIGEST_BYTES
        self._sums[first : first + len(sums)] = sums
        whole = align_up(size_bytes, self._writer.alignment_bytes)
        self._writer.write_at(self._plan.region_bytes + start, image[:whole])
        if start + size_bytes == self._plan.tensor_bytes:
            self._tail = bytes(image[size_bytes // ALIGN_BYTES * ALIGN_BYTES : size_bytes])

    def finish(self, objects: Objects) -> tuple[FileRecord, ...]:
        plan = self._plan
        self._entries = _entries(objects, plan.tensor_bytes)
        if objects:
            at = plan.tensor_bytes // ALIGN_BYTES * ALIGN_BYTES
            joined = self._tail + b"".join(data for _, data in objects)
            _write_aligned(self._writer, plan.region_bytes + at, joined)
        header = Header(
            item=plan.item, tensors=plan.entries, objects=self._entries,
            tensor_bytes=plan.tensor_bytes, blocks=bytes(self._sums), parts=plan.parts,
        )  # fmt: skip
        self._record = _sealed(self._writer, plan.name, header, plan.region_bytes)
        return (self._record,)

    def lender(self) -> Lender:
        plan, sums = self._plan, bytes(self._sums)
        blocks = len(sums) // DIGEST_BYTES
        own = LentFile(self._folder, self._record, blocks)
        same = self._before.same(0, sums) if self._before is not None else []
        return Lender(
            item=plan.item, entries=plan.entries, parts=plan.parts, digests=sums,
            places=tuple(BlockPlace(0, number) for number in range(blocks)),
            files=(own,), top=own, objects={entry.name: entry for entry in self._entries},
            changed=same.count(False) / len(same) if same else None,
        )  # fmt: skip

    def close(self) -> None:
        self._writer.close()


class CannotBorrow(Exception):
    """What was to be borrowed of is gone, or cannot be linked: the image is written whole."""


class BorrowingImage:
    """A file that holds only what differs from the last one; the rest it borrows. Where nothing
    differs, there is no file: the last one is linked under its name."""

    def __init__(self, store: Store, folder: str, plan: FileBegin, before: Lender) -> None:
        self._store = store
        self._folder = folder
        self._plan = plan
        self._before = before
        self._retired = before.retired()
        self._links: dict[int, FileRecord] = {}
        try:  # once this is done, nobody can take away what is borrowed of
            for number, file in enumerate(before.files):
                if number not in self._retired:
                    self._links[number] = self._linked(file)
        except CannotBorrow:
            self._let_go(set(self._links))
            raise
        self._region = reserve_borrowing_bytes(
            item=plan.item, object_names={*before.objects, *plan.object_names},
            tensor_bytes=plan.tensor_bytes,
            lent=[record.name for record in self._links.values()],
        )  # fmt: skip
        self._lock = threading.Lock()
        self._writer: FileWriting | None = None
        self._slots: dict[int, int] = {}
        """The blocks of the image that are held here, and as which."""
        self._sums = bytearray(before.digests)
        self._tail: bytes | None = None
        """The last block, if it is short and held here: it goes behind all others."""
        self._changed = 0

    def write(self, start: int, image: memoryview, size_bytes: int, sums: bytes) -> None:
        first = start // BLOCK_BYTES
        same = self._before.same(first, sums)
        kept = [
            known and self._before.places[number].file not in self._retired
            for number, known in enumerate(same, first)
        ]
        with self._lock:
            self._changed += same.count(False)
            self._sums[first * DIGEST_BYTES : first * DIGEST_BYTES + len(sums)] = sums
        at = 0
        for is_kept, run in itertools.groupby(kept):
            count = sum(1 for _ in run)
            if not is_kept:
                low, high = at * BLOCK_BYTES, min((at + count) * BLOCK_BYTES, size_bytes)
                self._hold(range(first + at, first + at + count), image[low:high])
            at += count

    def can_keep(self, blocks: range) -> bool:
        """Whether these blocks, which are said to be the same, are all borrowed."""
        return all(self._before.places[block].file not in self._retired for block in blocks)

    def _hold(self, blocks: range, data: memoryview) -> None:
        """Write blocks that follow each other in the image, behind all others so far."""
        if len(data) % BLOCK_BYTES:
            blocks, whole = blocks[:-1], len(blocks[:-1]) * BLOCK_BYTES
            data, self._tail = data[:whole], bytes(data[whole:])
        if not data:
            return
        with self._lock:
            slot = len(self._slots)
            self._slots.update(zip(blocks, range(slot, slot + len(blocks)), strict=True))
            writer = self._opened()
        writer.write_at(self._region + slot * BLOCK_BYTES, data)

    def _opened(self) -> FileWriting:
        if self._writer is None:
            self._writer = self._store.open_writer(
                f"{self._folder}/{self._plan.name}", expected_bytes=self._region
            )
        return self._writer

    def finish(self, objects: Objects) -> tuple[FileRecord, ...]:
        before, plan = self._before, self._plan
        if self._tail is not None:
            self._slots[len(before.places) - 1] = len(self._slots)
        known = {
            name: entry for name, entry in before.objects.items() if entry.file not in self._retired
        }
        own = [
            (name, data)
            for name, data in objects
            if name not in known or known[name].digest != digest(data)
        ]
        names = [name for name, _ in own]
        borrowed = [known[name] for name, _ in objects if name not in names]
        if not self._slots and not own and len(objects) == len(before.objects):
            records = self._link_top()
            if records:
                return records
        used = {0} | {entry.file for entry in borrowed}
        used |= {
            place.file for number, place in enumerate(before.places) if number not in self._slots
        }
        self._let_go(set(self._links) - used)
        number_of = {file: number for number, file in enumerate(sorted(used), 1)}
        held = {slot: number for number, slot in self._slots.items()}
        writer, tail = self._opened(), self._tail or b""
        whole = (len(held) - bool(tail)) * BLOCK_BYTES
        header = Header(
            item=plan.item, tensors=(), tensor_bytes=plan.tensor_bytes,
            objects=(
                *_entries(own, whole + len(tail)),
                *(msgspec.structs.replace(e, file=number_of[e.file]) for e in borrowed),
            ),
            blocks=b"".join(_sum(self._sums, held[slot]) for slot in range(len(held))),
            lent=tuple(self._links[file].name for file in sorted(used)),
            stretches=stretches_of(
                BlockPlace(0, self._slots[number])
                if number in self._slots
                else BlockPlace(number_of[place.file], place.block)
                for number, place in enumerate(before.places)
            ),
        )  # fmt: skip
        if tail or own:
            behind = tail + b"".join(data for _, data in own)
            _write_aligned(writer, self._region + whole, behind)
        record = _sealed(writer, plan.name, header, self._region)
        lent = tuple(self._links[file] for file in sorted(used))
        self._lender = self._lender_of(record, lent, header, number_of)
        return (record, *lent)

    def _lender_of(
        self,
        record: FileRecord,
        lent: tuple[FileRecord, ...],
        header: Header,
        number_of: dict[int, int],
    ) -> Lender:
        """In the numbers of a lender, the file itself is the last."""
        before, last = self._before, len(lent)
        files = [
            LentFile(self._folder, record, before.files[file].blocks)
            for file, record in zip(sorted(number_of), lent, strict=True)
        ]
        own = LentFile(self._folder, record, len(self._slots))
        return msgspec.structs.replace(
            before,
            digests=bytes(self._sums),
            places=tuple(
                BlockPlace(last, self._slots[number])
                if number in self._slots
                else BlockPlace(number_of[place.file] - 1, place.block)
                for number, place in enumerate(before.places)
            ),
            files=(*files, own),
            top=own,
            objects={
                entry.name: msgspec.structs.replace(entry, file=(entry.file or last + 1) - 1)
                for entry in header.objects
            },
            changed=self._share(),
        )

    def _share(self) -> float:
        return self._changed / max(len(self._before.places), 1)

    def _link_top(self) -> tuple[FileRecord, ...]:
        """Nothing is new: the last file stands here under its own name as well. Out of this folder,
        for the one that it came from may be gone by now. Nothing where that cannot be."""
        before, folder, name = self._before, self._folder, self._plan.name
        top = before.files.index(before.top)
        if name != before.top.record.name or top not in self._links:
            return ()
        try:
            if not self._store.link(f"{folder}/{self._links[top].name}", f"{folder}/{name}"):
                return ()
        except LaststepError:
            return ()  # a file that holds nothing of its own says the same
        self._let_go({top})
        record = _shared(before.top, name, lent=False)
        records = {**self._links, top: record}
        files = tuple(
            LentFile(folder, records[number], file.blocks)
            for number, file in enumerate(before.files)
        )
        self._lender = msgspec.structs.replace(
            before, files=files, top=files[top], changed=self._share()
        )
        return (record, *(self._links[n] for n in sorted(self._links)))

    def lender(self) -> Lender:
        return self._lender

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _linked(self, file: LentFile) -> FileRecord:
        """Link a file into this folder, and see that it has the size that it was written with."""
        name = file.name_elsewhere()
        if name is None:
            raise CannotBorrow
        path = f"{self._folder}/{name}"
        try:
            if not self._store.link(file.path, path):
                raise CannotBorrow
        except LaststepError as error:
            raise CannotBorrow from error
        try:
            reader = self._store.open_reader(path, cached=True)
            there_bytes = reader.size_bytes
            reader.close()
        except LaststepError:
            there_bytes = -1
        if there_bytes != file.record.size_bytes:
            self._store.delete(path)
            raise CannotBorrow
        return _shared(file, name, lent=True)

    def _let_go(self, numbers: set[int]) -> None:
        """Take the names of files away that nothing is borrowed of after all."""
        for number in numbers & set(self._links):
            self._store.delete(f"{self._folder}/{self._links.pop(number).name}")


def _shared(file: LentFile, name: str, *, lent: bool) -> FileRecord:
    return msgspec.structs.replace(
        file.record, name=name, origin=file.origin, lent=lent, sharers=file.record.sharers + 1
    )


def _sum(sums: bytearray, number: int) -> bytes:
    return bytes(sums[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES])


def _entries(objects: Objects, start: int) -> tuple[ObjectEntry, ...]:
    """Where these lie, one after the other."""
    entries = []
    for name, data in objects:
        stop = start + len(data)
        entries.append(ObjectEntry(name=name, start=start, stop=stop, digest=digest(data)))
        start = stop
    return tuple(entries)


def _sealed(writer: FileWriting, name: str, header: Header, region_bytes: int) -> FileRecord:
    """Write the header of a file of which all else is written, and make it durable."""
    region = encode_header(header, region_bytes=region_bytes)
    _write_aligned(writer, 0, region)
    own = [entry.stop for entry in header.objects if entry.file == 0]
    size = region_bytes + (own[-1] if own else header.held_bytes)
    writer.finish(size)
    return FileRecord(
        name=name, size_bytes=size, header_bytes=region_bytes, header_digest=digest_text(region)
    )


def _write_aligned(writer: FileWriting, offset: int, data: bytes) -> None:
    """Write bytes from ordinary memory through a page-aligned copy."""
    with mmap.mmap(-1, align_up(max(len(data), 1), ALIGN_BYTES)) as buffer:
        buffer[: len(data)] = data
        whole = align_up(len(data), writer.alignment_bytes)
        with memoryview(buffer) as view, view[:whole] as used:
            writer.write_at(offset, used)
