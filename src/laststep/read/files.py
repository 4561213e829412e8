"""Open what an index lists: its data files, their sizes, and where the bytes of each layout lie.

This is the one place where data files are opened. Whatever is wrong with one is a value: `show`
notes it, `verify` lists it, and everybody else raises it (`OpenIndex.sound`). An entry of a layout
is a tensor of an item, or a box of one (`stored_in`). Knows nothing of torch.
"""

from __future__ import annotations

import operator
from bisect import bisect_right
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple, Self

from laststep.codecs.digests import DIGEST_BYTES, digest
from laststep.errors import CorruptError, NotFoundError
from laststep.format.deriving import DerivedRuns
from laststep.format.index import RAW
from laststep.format.manifest import DAMAGE_REMEDY
from laststep.read.blocks import Extent, Extents, damage_of, refuse
from laststep.read.derived import Masters
from laststep.read.encoded import EncodedExtent
from laststep.state.boxes import Box, whole
from laststep.state.tree import TensorSpec
from laststep.storage.store import InPlace, PrefersCached
from laststep.terms import BLOCK_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from laststep.format.index import BlockRef, Index, StoredFile, StoredLayout
    from laststep.format.layout import FileLayout, TensorEntry
    from laststep.read.blocks import Damage, Readable
    from laststep.storage.store import FileReading, Store


class StoredBox(NamedTuple):
    """What one entry holds: a box of a tensor of an item, mostly all of it."""

    item: str
    tensor: str
    spec: TensorSpec
    """Of the whole tensor."""
    box: Box

    @property
    def name(self) -> str:
        """The full name of the tensor."""
        return f"{self.item}/{self.tensor}"

    @property
    def text(self) -> str:
        """The tensor and, of a part, which: as one would index it."""
        if self.box == whole(self.spec.shape):
            return self.name
        return f"{self.name}[{box_text(self.box)}]"


def stored_in(layout: FileLayout, entry: TensorEntry) -> StoredBox:
    """Return which box of which tensor an entry holds; names in a file of one item do not repeat
    the item's name."""
    item, name = layout.item, entry.name
    if item is None:
        item, _, name = entry.name.partition("/")
    part = layout.parts.get(entry.name)
    if part is None:
        return StoredBox(item, name, TensorSpec(entry.dtype, entry.shape), whole(entry.shape))
    stop = tuple(map(operator.add, part.start, entry.shape))
    return StoredBox(item, part.tensor, TensorSpec(entry.dtype, part.shape), Box(part.start, stop))


def box_text(box: Box) -> str:
    """A box as an index: `0:320, 0:300`."""
    return ", ".join(f"{a}:{b}" for a, b in zip(box.start, box.stop, strict=True))


class OpenFile(NamedTuple):
    """A data file of an index, open for reading."""

    file: StoredFile
    reader: FileReading
    where: str

    @property
    def name(self) -> str:
        return self.file.name


class _NoFile:
    """A file that is missing: nothing can be read of it."""

    alignment_bytes = 1
    size_bytes = 0

    def read_into(self, offset: int, into: memoryview) -> int:
        return 0

    def close(self) -> None:
        pass


class OpenIndex:
    """The data files of one rank of a checkpoint, open for reading."""

    def __init__(
        self, store: Store, folder: str, index: Index, *, cached: bool = False, later: bool = False
    ) -> None:
        """Open all of them and look at their sizes, or do so `later`; `damage` is what is wrong.
        `cached`: bytes may come out of a cache of the system."""
        self.index = index
        self.rank = index.rank
        self.where = f"{store.url}/{folder}"
        self.damage: tuple[Damage, ...] = ()
        self.files: list[OpenFile] = []
        self.layouts = [DataFile(self, number) for number in range(len(index.layouts))]
        self._store, self._folder, self._cached = store, folder, cached
        self._is_closed = False
        if not later:
            self.open()

    def open(self) -> Self:
        """Open the files that are not open."""
        try:
            for file in self.index.files[len(self.files) :]:
                self._open(file)
        except BaseException:
            self.close()
            raise
        return self

    def _open(self, file: StoredFile) -> None:
        where, path = f"{self.where}/{file.name}", f"{self._folder}/{file.name}"
        try:
            reader = self._store.open_reader(path, cached=self._cached)
        except NotFoundError:
            error = CorruptError(
                "a data file is missing",
                where=where,
                expected=f"{file.size_bytes} bytes",
                found="no such file",
                remedy=DAMAGE_REMEDY,
            ).lacking(path)
            self.damage += (damage_of(error, file=file.name, what="missing file"),)
            self.files.append(OpenFile(file, _NoFile(), where))
            return
        self.files.append(OpenFile(file, reader, where))
        self.damage += _wrong_size(reader.size_bytes, file, where)

    def sound(self) -> Self:
        """The same, if nothing is wrong so far; raises what is, and closes the files then."""
        if self.damage:
            self.close()
        refuse(self.damage)
        return self

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            for file in self.files:
                file.reader.close()


class DataFile:
    """One layout of a checkpoint: what it holds, and its blocks, wherever these lie."""

    def __init__(self, owner: OpenIndex, number: int) -> None:
        self._owner = owner
        self.stored: StoredLayout = owner.index.layouts[number]
        self.layout: FileLayout = self.stored.layout
        self.rank = owner.rank
        self.where = f"{owner.where}/{self.layout.name}"

    @property
    def index(self) -> Index:
        return self._owner.index

    def open(self) -> None:
        """Open the files of its index, if they are not open; raises what is wrong with any."""
        self._owner.open().sound()

    @property
    def files(self) -> list[OpenFile]:
        """The files that its blocks lie in."""
        return [self._owner.files[number] for number in self._file_numbers]

    @cached_property
    def _file_numbers(self) -> list[int]:
        numbers: dict[int, None] = {}
        for run in self.stored.runs:
            for part in (run, *run.bases):
                numbers[part.file] = None
        for number, file in enumerate(self._owner.index.files):
            if self.is_plain(file):
                numbers[number] = None
        return sorted(numbers)

    def is_plain(self, file: StoredFile) -> bool:
        """Return whether a file is this layout as a plain data file, of whatever checkpoint."""
        return file.own_name == self.layout.name

    def open_file(self, number: int) -> OpenFile:
        """A file of the index."""
        return self._owner.files[number]

    @property
    def in_memory(self) -> bool:
        """Whether nobody waits who reads it."""
        return all(isinstance(f.reader, InPlace) and f.reader.at_hand for f in self.files)

    def prefer_cached(self) -> bool:
        """For those who want bytes, and not to know whether the disk has them: take what the system
        has in memory from there. False where a file knows no such thing."""
        readers = [file.reader for file in self.files]
        known = [reader for reader in readers if isinstance(reader, PrefersCached)]
        for reader in known:
            reader.prefer_cached()
        return len(known) == len(readers)

    # Blocks

    @cached_property
    def _starts(self) -> list[int]:
        return list(accumulate((run.blocks for run in self.stored.runs), initial=0))

    @cached_property
    def _refs(self) -> list[BlockRef]:
        return self.stored.refs()

    def blocks(self, start: int, stop: int) -> Readable:
        """The whole blocks that hold bytes [start, stop) of its tensors."""
        first, last = start // BLOCK_BYTES, -(-stop // BLOCK_BYTES)
        parts = list(self._parts(first, last))
        return parts[0] if len(parts) == 1 else Extents(parts)

    def _parts(self, first: int, last: int) -> Iterator[Readable]:
        at = bisect_right(self._starts, first) - 1
        while first < last:
            run, begins = self.stored.runs[at], self._starts[at]
            stop = min(begins + run.blocks, last)
            if run.encoding == RAW:
                offset = run.offset + (first - begins) * BLOCK_BYTES
                yield self._raw(run.file, offset, first, stop)
            else:
                yield EncodedExtent(self, self._refs[first:stop], self._digests(first, stop), first)
            first, at = stop, at + 1

    def _raw(self, file: int, offset: int, first: int, last: int) -> Extent:
        image_at = first * BLOCK_BYTES
        size = min(last * BLOCK_BYTES, self.layout.tensor_bytes) - image_at
        there = self._owner.files[file]
        return Extent(
            there.reader,
            there.name,
            there.where,
            offset,
            offset + size,
            self._digests(first, last),
            None,
            first,
            image_at,
        )

    def _digests(self, first: int, last: int) -> bytes:
        return self.stored.digests[first * DIGEST_BYTES : last * DIGEST_BYTES]

    def base(self, number: int) -> Extent | EncodedExtent:
        """The block that one is encoded against."""
        base = self._refs[number].base
        assert base is not None  # noqa: S101 (the caller knows it)
        if base.block.encoding != RAW:
            return EncodedExtent(self, [base.block], base.digest, number, as_base=True)
        there, offset = self._owner.files[base.block.file], base.block.offset
        stop = offset + base.block.size_bytes
        image_at = number * BLOCK_BYTES
        return Extent(
            there.reader, there.name, there.where, offset, stop, base.digest, None, number, image_at
        )

    def headers(self) -> list[Extent]:
        """The headers of the plain data files that its blocks lie in."""
        files = [file for file in self.files if self.is_plain(file.file)]
        expected = digest(self.layout.header()) if files else b""
        stop = self.layout.header_bytes
        return [
            Extent(there.reader, there.name, there.where, 0, stop, expected, "header")
            for there in files
        ]

    @cached_property
    def masters(self) -> Masters | None:
        """What some of its tensors are derived from."""
        derived = self.stored.derived
        if not derived:
            return None
        by_name = {file.layout.name: file for file in self._owner.layouts}
        starts = {
            file: {entry.name: entry.start for entry in by_name[file].layout.tensors}
            for file in {file for file, _ in derived.values()}
        }
        places = {
            name: (by_name[file], starts[file][tensor]) for name, (file, tensor) in derived.items()
        }
        return Masters(DerivedRuns(self.layout.tensors, derived), places)

    def close(self) -> None:
        """Close the files of its index."""
        self._owner.close()


def close_files(files: Iterable[DataFile]) -> None:
    for file in files:
        file.close()


def _wrong_size(there_bytes: int, file: StoredFile, where: str) -> tuple[Damage, ...]:
    if there_bytes == file.size_bytes:
        return ()
    how = "short" if there_bytes < file.size_bytes else "long"
    found = f"{there_bytes} bytes"
    error = CorruptError(
        f"a data file is too {how}",
        where=where,
        expected=f"{file.size_bytes} bytes",
        found=found,
        remedy=DAMAGE_REMEDY,
    )
    damage = damage_of(
        error,
        file=file.name,
        what="size",
        start=min(there_bytes, file.size_bytes),
        stop=there_bytes,
        found=f"{found}: the file is too {how}",
    )
    return (damage,)
