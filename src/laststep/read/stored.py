"""The bytes of data files as they are stored, with what verifies them: for those who copy files.

Whoever uses a checkpoint reads images (`files`); a copy takes files as they lie, and still proves
each block on the way. All that the checkpoint uses is in some range; what lies between ranges (the
blocks of a lent file that nobody needs) has no digest that could be compared, and is nobody's loss.
Knows nothing of torch, and writes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from laststep.format.borrowing import Stretch
from laststep.read.blocks import Extent
from laststep.terms import BLOCK_BYTES, CHUNK_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from laststep.format.manifest import FileRecord
    from laststep.read.blocks import Damage
    from laststep.read.files import DataFile, HeldFile
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
    """A header, an object, or blocks as they are."""

    extent: Extent

    @property
    def start(self) -> int:
        return self.extent.start

    @property
    def stop(self) -> int:
        return self.extent.stop

    def verify(self, view: memoryview, reader: FileReading) -> list[Damage]:
        return self.extent._replace(reader=reader).verify(view, len(view))


class _Coded(NamedTuple):
    """An encoded block. What its digest covers is decoded from the very bytes that are copied;
    what it was coded against is read where it lies."""

    file: HeldFile
    number: int
    image_number: int
    end: int
    start: int
    stop: int

    def verify(self, view: memoryview, reader: FileReading) -> list[Damage]:
        wrong = self._decoded(view)
        if wrong and reader.read_into(self.start, view) == len(view):
            wrong = self._decoded(view)
        return wrong

    def _decoded(self, view: memoryview) -> list[Damage]:
        file = self.file._replace(reader=_InMemory(self.start, view))
        block = file.blocks(self.number, 1, self.image_number, self.end)
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
class StoredFile:
    """A data file as it lies, open for reading, and all that can be verified of it."""

    record: FileRecord
    reader: FileReading
    where: str
    ranges: dict[tuple[int, int, int], StoredRange]
    """By where they lie; a block that two images use is verified once."""


def stored_files(files: Iterable[DataFile]) -> dict[str, StoredFile]:
    """These files and all that are lent to them, by name."""
    found: dict[str, StoredFile] = {}
    for file in files:
        for held in file.files:
            if held.record.name not in found:
                found[held.record.name] = stored_header(held)
        for name, number, part in _ranges(file):
            found[name].ranges[part.start, part.stop, number] = part
    return found


def stored_header(held: HeldFile) -> StoredFile:
    """A file of which nothing is used but its header."""
    header = held.header_extent()
    ranges: dict[tuple[int, int, int], StoredRange] = {(0, header.stop, -1): _Plain(header)}
    return StoredFile(record=held.record, reader=held.reader, where=held.where, ranges=ranges)


def _ranges(file: DataFile) -> Iterator[tuple[str, int, StoredRange]]:
    """The data that an image and its objects use: in which file, the number of the first block
    there, and the range."""
    end = file.header.tensor_bytes
    blocks = -(-end // BLOCK_BYTES)
    whole = [(0, Stretch(blocks, 0, 0))] if blocks else []
    for at, stretch in whole if file.lies is None else file.lies.cut(0, blocks):
        held = file.files[stretch.file]
        first, last = stretch.first, stretch.first + stretch.blocks
        while first < last:
            image_first = at + first - stretch.first
            # As many as lie in one chunk of the file; of coded blocks each is on its own.
            count = min(last - first, _CHUNK_BLOCKS - first % _CHUNK_BLOCKS)
            if held.header.coded is not None:
                count, block = 1, held.header.coded[first]
                start = held.record.header_bytes + block.start
                part: StoredRange = _Coded(
                    held, first, image_first, end, start, start + block.size_bytes
                )
            else:
                extent = held.blocks(first, count, image_first, end)
                assert isinstance(extent, Extent)  # noqa: S101 (nothing in this file is coded)
                part = _Plain(extent)
            yield held.record.name, first, part
            first += count
    for number, entry in enumerate(file.header.objects):
        extent = file.object(entry)
        yield extent.file, -2 - number, _Plain(extent)
