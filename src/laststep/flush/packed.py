"""One data file of a save that holds blocks: only those that changed, or all of them, encoded.

What did not change is borrowed of files of the last checkpoint, which are linked into the folder.
Knows nothing of commits or of torch, nor of how blocks become shorter.
"""

from __future__ import annotations

import itertools
import threading
from typing import TYPE_CHECKING

import msgspec

from laststep.codecs.digests import DIGEST_BYTES, digest
from laststep.errors import LaststepError
from laststep.flush.files import sealed
from laststep.flush.held import EncodedBlocks, PlainBlocks
from laststep.flush.lending import Anchor, Lender, LentFile
from laststep.format.borrowing import BlockPlace, stretches_of
from laststep.format.deriving import ROUNDED
from laststep.format.header import Header, ObjectEntry, reserve_packed_bytes
from laststep.terms import BLOCK_BYTES, MAX_HEADER_BYTES

if TYPE_CHECKING:
    from laststep.flush.deriving import DerivedFile
    from laststep.flush.files import Objects, OpenWriter
    from laststep.flush.held import BlockCoder
    from laststep.flush.protocol import FileBegin
    from laststep.format.coding import CodedBlock
    from laststep.format.manifest import FileRecord
    from laststep.storage.store import FileWriting, Store


_NAMES_SHARE = 1024
"""The header of a file that borrows takes no more of the image than that for names of tensors."""


class CannotBorrow(Exception):
    """What was to be borrowed of is gone, or cannot be linked, or there is too much to say of all
    blocks: the image is written whole."""


class PackedImage:
    """A file that holds only what differs from the last one, and borrows the rest; or all blocks,
    encoded. Where nothing differs, there is no file: the last one is linked under its name."""

    def __init__(  # noqa: PLR0913 (what is known of a file, each by its name)
        self,
        store: Store,
        open_writer: OpenWriter,
        folder: str,
        plan: FileBegin,
        *,
        before: Lender | None,
        retired: frozenset[int] | None,
        coder: BlockCoder | None,
        lossy: dict[str, str] | None = None,
        derived: DerivedFile | None = None,
    ) -> None:
        """`before` is a file of the same image, to tell what has changed, and to borrow of, but not
        of the files that are `retired`; None: of none. Who does not borrow needs a coder; `derived`
        is what that coder may leave out."""
        self._store = store
        self._folder = folder
        self._plan = plan
        self._lossy = lossy or {}
        self._compared = before
        self._derived = derived
        self._before = before if before is not None and retired is not None else _nothing(plan)
        self._retired = retired or frozenset()
        self._links: dict[int, FileRecord] = {}
        try:  # once this is done, nobody can take away what is borrowed of
            for number, file in enumerate(self._before.files):
                if number not in self._retired:
                    self._links[number] = self._linked(file)
            self._region = self._reserve(coder)
        except CannotBorrow:
            self._let_go(set(self._links))
            raise
        self._writer: FileWriting | None = None

        def opened() -> FileWriting:
            self._writer = open_writer(f"{folder}/{plan.name}", self._region)
            return self._writer

        self._coded = (
            None if coder is None else EncodedBlocks(opened, self._region, coder, self._anchor)
        )
        self._held = self._coded or PlainBlocks(opened, self._region)
        self._lock = threading.Lock()
        self._sums = bytearray(-(-plan.tensor_bytes // BLOCK_BYTES) * DIGEST_BYTES)
        self._sums[:] = self._before.digests or self._sums
        self._changed: set[int] = set()

    def _reserve(self, coder: BlockCoder | None) -> int:
        """Room for the header, whether something is borrowed in the end or, encoded, nothing: that
        takes the names of all tensors, for which room is left where they are few."""
        plan, lent = self._plan, tuple(record.name for record in self._links.values())
        names = {*self._before.objects, *plan.object_names}
        alone = Header(
            item=plan.item, tensors=plan.entries, tensor_bytes=plan.tensor_bytes, blocks=b"",
            parts=plan.parts, lossy=self._lossy,
            derived={} if self._derived is None else self._derived.widest(),
            objects=tuple(
                ObjectEntry(name=name, start=0, stop=0, digest=b"") for name in sorted(names)
            ),
        )  # fmt: skip
        codecs = () if coder is None else coder.codecs
        region = reserve_packed_bytes(
            msgspec.structs.replace(alone, tensors=(), parts={}, lent=lent) if lent else alone,
            codecs=codecs,
        )
        self._may_stand_alone = coder is not None
        if lent and coder is not None:
            wider = reserve_packed_bytes(alone, codecs=codecs)
            self._may_stand_alone = wider <= max(region, plan.tensor_bytes // _NAMES_SHARE)
            region = max(region, wider) if self._may_stand_alone else region
        if region > MAX_HEADER_BYTES:
            raise CannotBorrow
        return region

    def write(self, start: int, image: memoryview, size_bytes: int, sums: bytes) -> None:
        first = start // BLOCK_BYTES
        same = (self._compared or self._before).same(first, sums)
        kept = [known and self._keeps(number) for number, known in enumerate(same, first)]
        with self._lock:
            self._changed.update(number for number, known in enumerate(same, first) if not known)
            self._sums[first * DIGEST_BYTES : first * DIGEST_BYTES + len(sums)] = sums
        at = 0
        for is_kept, run in itertools.groupby(kept):
            count = sum(1 for _ in run)
            if not is_kept:
                low, high = at * BLOCK_BYTES, min((at + count) * BLOCK_BYTES, size_bytes)
                mine = sums[at * DIGEST_BYTES : (at + count) * DIGEST_BYTES]
                self._held.hold(first + at, image[low:high], mine)
            at += count

    def can_keep(self, blocks: range) -> bool:
        """Whether these blocks, which are said to be the same, are all borrowed."""
        return all(map(self._keeps, blocks))

    def _keeps(self, number: int) -> bool:
        """Whether a block that is the same is borrowed: nothing that it needs is retired."""
        if not self._links or number in self._before.derived:
            return False
        files = {self._before.places[number].file, self._before.anchor(number).place.file}
        return not files & self._retired

    def _anchor(self, number: int) -> Anchor | None:
        """The block that one of the image may be coded against."""
        if not self._links or number in self._before.derived:
            return None
        anchor = self._before.anchor(number)
        return None if anchor.place.file in self._retired else anchor

    def finish(self, objects: Objects) -> tuple[FileRecord, ...]:
        before, plan = self._before, self._plan
        numbers = self._held.numbers()
        needed = self._needed(set(numbers))
        alone = self._may_stand_alone and not needed
        known = {
            name: entry
            for name, entry in before.objects.items()
            if not alone and entry.file not in self._retired
        }
        own = [
            (name, data)
            for name, data in objects
            if name not in known or known[name].digest != digest(data)
        ]
        names = {name for name, _ in own}
        borrowed = [known[name] for name, _ in objects if name not in names]
        if self._links and not numbers and not own and len(objects) == len(before.objects):
            records = self._link_top()
            if records:
                return records
        # The first says what tensors there are.
        used = [] if alone else sorted({0} | needed | {entry.file for entry in borrowed})
        self._let_go(set(self._links) - set(used))
        number_of = {file: number for number, file in enumerate(used, 1)}
        slots = {number: slot for slot, number in enumerate(numbers)}
        writer, entries = self._held.finish(own)
        header = Header(
            item=plan.item, tensors=() if used else plan.entries, tensor_bytes=plan.tensor_bytes,
            parts={} if used else plan.parts,
            objects=(
                *entries,
                *(msgspec.structs.replace(e, file=number_of[e.file]) for e in borrowed),
            ),
            blocks=b"".join(_sum(self._sums, number) for number in numbers),
            lent=tuple(self._links[file].name for file in used),
            stretches=()
            if not used
            else stretches_of(
                BlockPlace(0, slots[number])
                if number in slots
                else BlockPlace(number_of[place.file], place.block)
                for number, place in enumerate(before.places)
            ),
            coded=self._coding(numbers, number_of), lossy=self._lossy,
            derived=self._derived.used() if self._derived and self._left_out() else {},
        )  # fmt: skip
        record = sealed(writer, plan.name, header, self._region)
        lent = tuple(self._links[file] for file in used)
        self._lender = self._lender_of(record, lent, header, number_of, slots)
        return (record, *lent)

    def _needed(self, held: set[int]) -> set[int]:
        """The files that blocks are needed of, now that all are known."""
        before, needed = self._before, set[int]()
        for number, place in enumerate(before.places):
            if number not in held:
                needed |= {place.file, before.anchor(number).place.file}
        coded = {} if self._coded is None else self._coded.coded()
        needed |= {block.anchor.file for block in coded.values() if block.anchor is not None}
        return needed

    def _coding(
        self, numbers: list[int], number_of: dict[int, int]
    ) -> tuple[CodedBlock, ...] | None:
        """How the blocks are coded, in the numbers of this file."""
        if self._coded is None:
            return None
        coded = self._coded.coded()
        return tuple(
            block
            if block.anchor is None
            else block._replace(anchor=BlockPlace(number_of[block.anchor.file], block.anchor.block))
            for block in map(coded.__getitem__, numbers)
        )

    def _lender_of(
        self,
        record: FileRecord,
        lent: tuple[FileRecord, ...],
        header: Header,
        number_of: dict[int, int],
        slots: dict[int, int],
    ) -> Lender:
        """In the numbers of a lender, the file itself is the last."""
        before, last = self._before, len(lent)
        files = [
            LentFile(self._folder, there, before.files[file].blocks)
            for file, there in zip(sorted(number_of), lent, strict=True)
        ]
        coded = {} if self._coded is None else self._coded.coded()
        derived = self._left_out()
        own = LentFile(self._folder, record, len(slots) - len(derived))
        places: list[BlockPlace] = []
        anchors: dict[int, Anchor] = {}

        def moved(place: BlockPlace) -> BlockPlace:
            return BlockPlace(number_of[place.file] - 1, place.block)

        for number in range(len(self._sums) // DIGEST_BYTES):
            anchor = before.anchors.get(number)
            if number in slots:
                places.append(BlockPlace(last, slots[number]))
                is_anchored = number in coded and coded[number].anchor is not None
                anchor = before.anchor(number) if is_anchored else None
            else:
                places.append(moved(before.places[number]))
            if anchor is not None:
                anchors[number] = Anchor(moved(anchor.place), anchor.digest)
        return msgspec.structs.replace(
            before, digests=bytes(self._sums), places=tuple(places), anchors=anchors,
            files=(*files, own), top=last, derived=derived,
            changed_blocks=None if self._compared is None else frozenset(self._changed),
            overdue=bool(self._changed and before.files and before.retired() - self._retired),
            objects={
                entry.name: msgspec.structs.replace(entry, file=(entry.file or last + 1) - 1)
                for entry in header.objects
            },
        )  # fmt: skip

    def _left_out(self) -> frozenset[int]:
        """The blocks that follow from others."""
        coded = {} if self._coded is None else self._coded.coded()
        return frozenset(number for number, block in coded.items() if block.way == ROUNDED)

    def _link_top(self) -> tuple[FileRecord, ...]:
        """Nothing is new: the last file stands here under its own name as well. Out of this folder,
        for the one that it came from may be gone by now. Nothing where that cannot be."""
        before, folder, name = self._before, self._folder, self._plan.name
        top = before.top
        if name != before.files[top].record.name or top not in self._links:
            return ()
        try:
            if not self._store.link(f"{folder}/{self._links[top].name}", f"{folder}/{name}"):
                return ()
        except LaststepError:
            return ()  # a file that holds nothing of its own says the same
        self._let_go({top})
        record = _shared(before.files[top], name, lent=False)
        records = {**self._links, top: record}
        files = tuple(
            LentFile(folder, records[number], file.blocks)
            for number, file in enumerate(before.files)
        )
        self._lender = msgspec.structs.replace(before, files=files, changed_blocks=frozenset())
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


def _nothing(plan: FileBegin) -> Lender:
    """What an image borrows of that stands alone."""
    return Lender(
        item=plan.item, entries=plan.entries, parts=plan.parts, digests=b"", places=(), files=(),
        top=0, objects={},
    )  # fmt: skip


def _shared(file: LentFile, name: str, *, lent: bool) -> FileRecord:
    return msgspec.structs.replace(
        file.record, name=name, origin=file.origin, lent=lent, sharers=file.record.sharers + 1
    )


def _sum(sums: bytearray, number: int) -> bytes:
    return bytes(sums[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES])
