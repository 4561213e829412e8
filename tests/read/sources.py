"""Blocks of one layout over a reader of the test's own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from laststep.codecs.digests import block_digests
from laststep.format.index import BlockRun, Index, StoredFile, StoredLayout
from laststep.plan.reads import FileBox, Wanted
from laststep.read.blocks import BlockReader, LayoutBlocks
from laststep.state.boxes import whole
from saves_of import bytes_layout

if TYPE_CHECKING:
    from laststep.storage.store import FileReading


class Source:
    """Opens readers by the names of files."""

    url = "here"

    def __init__(self, **readers: FileReading) -> None:
        self._readers = readers

    def open_reader(self, name: str, *, cached: bool = False) -> FileReading:
        return self._readers[name.rpartition("/")[2].partition(".")[0]]


def blocks_over(
    data: bytes, *runs: BlockRun, digests: bytes | None = None, **readers: FileReading
) -> LayoutBlocks:
    """A layout of these bytes, raw, whose runs lie in the files that these readers read; without
    runs, all of it lies at the beginning of the only one."""
    files = tuple(
        StoredFile(name=f"{name}.pack", size_bytes=reader.size_bytes)
        for name, reader in readers.items()
    )
    layout = bytes_layout(len(data))
    lies = runs or (BlockRun(layout.block_count, 0, 0),)
    sums = block_digests(memoryview(data)) if digests is None else digests
    stored = StoredLayout(layout=layout, digests=sums, runs=lies)
    return BlockReader(Source(**readers), "x", Index(files=files, layouts=(stored,))).layouts[0]


def bytes_wanted(start: int, stop: int, number: int = 0) -> Wanted:
    """Bytes of file 0, as a tensor of bytes with this number."""
    return start, stop, FileBox(number, 1, 0, start, stop, whole((stop - start,)))
