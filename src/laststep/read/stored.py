"""The bytes of data files as they are stored, with what verifies them: for those who copy files.

Whoever uses a checkpoint reads layouts (`read.files`); a copy takes files as they lie, and still
proves each block on the way. All that the checkpoint uses is in some range; what lies between
ranges (blocks of a shared file that nobody needs) has no digest that could be compared, and is
nobody's loss. Knows nothing of torch, and writes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

from laststep.format.index import RAW
from laststep.read.blocks import Extent
from laststep.read.encoded import EncodedExtent
from laststep.terms import BLOCK_BYTES, CHUNK_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from laststep.format.index import BlockRef, StoredFile
    from laststep.read.blocks import Damage
    from laststep.read.files import DataFile, OpenIndex
    from laststep.storage.store import FileReading

_CHUNK_BLOCKS = CHUNK_BYTES // BLOCK_BYTES


class StoredRange(Protocol):
    """Bytes [start, stop) of a data file that are verified together."""

    @property
    def start(self) -> int: ...

    @property
    def stop(self) -> int: ...

    def verify(self, view: memoryview, reader: FileReading) -> list[Damage]:
        """What is wrong with these bytes, also after `view` was filled from `reader` again."""


class _Plain(NamedTuple):
    """A header, or blocks as they are."""

    extent: Extent

    @property
    def start(self) -> int:
        return self.extent.start

    @property
    def stop(self) -> int:
        return self.extent.stop

    def verify(self, view: memoryview, reader: FileReading) -> list[Damage]:
        return self.extent._replace(reader=reader).verify(view, len(view))


class _Encoded(NamedTuple):
    """An encoded block. What its digest covers is decoded from the very bytes that are copied; what
    it was encoded against is read where it lies."""

    file: DataFile
    number: int
    ref: BlockRef
    digest: bytes

    @property
    def start(self) -> int:
        return self.ref.offset

    @property
    def stop(self) -> int:
        return self.ref.offset + self.ref.size_bytes

    def verify(self, view: memoryview, reader: FileReading) -> list[Damage]:
        wrong = self._decoded(view)
        if wrong and reader.read_into(self.start, view) == len(view):
            wrong = self._decoded(view)
        return wrong

    def _decoded(self, view: memoryview) -> list[Damage]:
        block = EncodedExtent(
            self.file, [self.ref], self.digest, self.number, reader=_InMemory(self.start, view)
        )
        return block.read(memoryview(bytearray(block.size_bytes)))


class _InMemory:
    """A file of which only some bytes are at hand; what lies before them reads as zeros."""

    alignment_bytes = 1

    def __init__(self, start: int, view: memoryview) -> None:
        self._start = start
        self._view = view
        self.size_bytes = start + len(view)

    def read_into(self, offset: int, into: memoryview) -> int:
        count = max(0, min(len(into), self.size_bytes - offset))
        skipped = min(count, max(0, self._start - offset))
        into[:skipped] = bytes(skipped)
        at = offset + skipped - self._start
        into[skipped:count] = self._view[at : at + count - skipped]
        return count

    def close(self) -> None:
        pass


@dataclass(frozen=True, slots=True, kw_only=True)
class FileToCopy:
    """A data file as it lies, open for reading, and all that can be verified of it."""

    file: StoredFile
    header_bytes: int
    """Of a plain data file: chunks begin behind it."""
    reader: FileReading
    where: str
    ranges: dict[tuple[int, int], StoredRange] = field(default_factory=dict)
    """By where they lie; a block that is used twice is verified once."""

    def is_covered(self) -> bool:
        """Return whether every byte of the file is verified."""
        at = 0
        for start, stop in sorted(self.ranges):
            if start > at:
                return False
            at = max(at, stop)
        return at == self.file.size_bytes


def files_to_copy(opened: OpenIndex) -> list[FileToCopy]:
    """The files of an index."""
    plain = {
        number: layout.layout.header_bytes
        for layout in opened.layouts
        for number, file in enumerate(opened.index.files)
        if layout.is_plain(file)
    }
    found = [
        FileToCopy(
            file=there.file, header_bytes=plain.get(n, 0), reader=there.reader, where=there.where
        )
        for n, there in enumerate(opened.files)
    ]
    by_name = {file.file.name: file for file in found}
    for layout in opened.layouts:
        for header in layout.headers():
            by_name[header.file].ranges[header.start, header.stop] = _Plain(header)
        for number, part in _ranges(layout):
            found[number].ranges[part.start, part.stop] = part
    return found


def _ranges(file: DataFile) -> Iterator[tuple[int, StoredRange]]:
    """The blocks of a layout: in which file, and the range."""
    at = 0
    refs = file.stored.refs() if any(run.encoding != RAW for run in file.stored.runs) else []
    for run in file.stored.runs:
        first, last = at, at + run.blocks
        while first < last:
            if run.encoding != RAW:
                count, ref = 1, refs[first]
                yield run.file, _Encoded(file, first, ref, file.stored.digest(first))
                if ref.base is not None:
                    block, base = ref.base.block, file.base(first)
                    if isinstance(base, Extent):
                        yield block.file, _Plain(base)
                    else:
                        yield block.file, _Encoded(file, first, block, ref.base.digest)
            else:
                # As many as lie in one chunk of the layout.
                count = min(last - first, _CHUNK_BLOCKS - first % _CHUNK_BLOCKS)
                stop = min((first + count) * BLOCK_BYTES, file.layout.tensor_bytes)
                extent = file.blocks(first * BLOCK_BYTES, stop)
                assert isinstance(extent, Extent)  # noqa: S101 (these blocks are one run)
                yield run.file, _Plain(extent)
            first += count
        at += run.blocks
