"""One data file of a save as it is written: whole, or only what has changed since the last one.

Digests are made on the way, objects come behind, the header last. Chunks may arrive in any order
and be written by several threads at once. Knows nothing of other files, of commits or of torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from laststep.codecs.digests import DIGEST_BYTES
from laststep.flush.files import sealed, write_aligned
from laststep.flush.lending import Lender, LentFile
from laststep.format.borrowing import BlockPlace
from laststep.format.header import Header, object_entries
from laststep.terms import ALIGN_BYTES, BLOCK_BYTES, align_up

if TYPE_CHECKING:
    from laststep.flush.files import Objects, OpenWriter
    from laststep.flush.protocol import FileBegin
    from laststep.format.manifest import FileRecord


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
        self, open_writer: OpenWriter, folder: str, plan: FileBegin, before: Lender | None = None
    ) -> None:
        """`before` is a file of the same image, to tell how much has changed."""
        self._folder = folder
        self._plan = plan
        self._before = before
        self._sums = bytearray(-(-plan.tensor_bytes // BLOCK_BYTES) * DIGEST_BYTES)
        self._tail = b""
        expected = plan.region_bytes + plan.tensor_bytes
        self._writer = open_writer(f"{folder}/{plan.name}", expected)

    def write(self, start: int, image: memoryview, size_bytes: int, sums: bytes) -> None:
        first = start // BLOCK_BYTES * DIGEST_BYTES
        self._sums[first : first + len(sums)] = sums
        whole = align_up(size_bytes, self._writer.alignment_bytes)
        self._writer.write_at(self._plan.region_bytes + start, image[:whole])
        if start + size_bytes == self._plan.tensor_bytes:
            self._tail = bytes(image[size_bytes // ALIGN_BYTES * ALIGN_BYTES : size_bytes])

    def finish(self, objects: Objects) -> tuple[FileRecord, ...]:
        plan = self._plan
        self._entries = object_entries(objects, plan.tensor_bytes)
        if objects:
            at = plan.tensor_bytes // ALIGN_BYTES * ALIGN_BYTES
            joined = self._tail + b"".join(data for _, data in objects)
            write_aligned(self._writer, plan.region_bytes + at, joined)
        header = Header(
            item=plan.item, tensors=plan.entries, objects=self._entries,
            tensor_bytes=plan.tensor_bytes, blocks=bytes(self._sums), parts=plan.parts,
        )  # fmt: skip
        self._record = sealed(self._writer, plan.name, header, plan.region_bytes)
        return (self._record,)

    def lender(self) -> Lender:
        plan, sums = self._plan, bytes(self._sums)
        blocks = len(sums) // DIGEST_BYTES
        own = LentFile(self._folder, self._record, blocks)
        same = None if self._before is None else self._before.same(0, sums)
        return Lender(
            item=plan.item, entries=plan.entries, parts=plan.parts, digests=sums,
            places=tuple(BlockPlace(0, number) for number in range(blocks)),
            files=(own,), top=0, objects={entry.name: entry for entry in self._entries},
            changed_blocks=None
            if same is None
            else frozenset(number for number, known in enumerate(same) if not known),
        )  # fmt: skip

    def close(self) -> None:
        self._writer.close()
