"""Write the images of one save to a store: digests on the way, objects behind, header last.

Knows nothing of who commits, of other saves or of torch. Chunks may arrive in any order and be
written by several threads at once; each file's digests have one place per block, so no two threads
touch the same bytes. The first error is kept, and after it nothing more is written or published.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
from typing import TYPE_CHECKING

import msgspec

from laststep.codecs.digests import DIGEST_BYTES, block_digests, digest, digest_text
from laststep.errors import Exists, LaststepError, StorageFailed
from laststep.flush.protocol import FileBegin
from laststep.format.header import Header, ObjectEntry, encode_header
from laststep.format.manifest import FileRecord
from laststep.storage.store import FileWriting
from laststep.terms import ALIGN_BYTES, BLOCK_BYTES, align_up

if TYPE_CHECKING:
    from laststep.storage.store import Store


class _ImageFile(msgspec.Struct):
    """One data file being written; `digests` and `tail` are filled by whoever writes the chunk."""

    plan: FileBegin
    writer: FileWriting
    digests: bytearray
    tail: bytes = b""
    written_bytes: int = 0
    record: FileRecord | None = None


class SaveFlush:
    """The files of one save in their attempt's folder."""

    def __init__(self, store: Store, folder: str, files: tuple[FileBegin, ...]) -> None:
        self.folder = folder
        self.written_bytes = 0
        self._store = store
        self._lock = threading.Lock()
        self._error: LaststepError | None = None
        self._files: list[_ImageFile] = []
        self._folders = {f"{folder}/{plan.name}".rpartition("/")[0]: None for plan in files}
        """In which the files lie: the attempt's own, or one within it."""
        try:
            for place in self._folders:
                if place != folder:
                    self._make(place)
            for plan in files:
                expected = plan.region_bytes + plan.tensor_bytes
                writer = store.open_writer(f"{folder}/{plan.name}", expected_bytes=expected)
                blocks = -(-plan.tensor_bytes // BLOCK_BYTES)
                self._files.append(_ImageFile(plan, writer, bytearray(blocks * DIGEST_BYTES)))
        except LaststepError as error:
            self.fail(error)

    @property
    def error(self) -> LaststepError | None:
        with self._lock:
            return self._error

    def fail(self, error: LaststepError) -> None:
        """Keep the first error."""
        with self._lock:
            self._error = self._error or error

    def write(self, file: int, start: int, image: memoryview, size_bytes: int) -> None:
        """Digest and write `size_bytes` of `image`, which starts at byte `start` of the tensor
        area. `image` MUST reach to the next multiple of the alignment. Never raises."""
        if self.error is not None:
            return
        target = self._files[file]
        try:
            self._write(target, start, image, size_bytes)
        except LaststepError as error:
            self.fail(error)
        except Exception as error:  # noqa: BLE001 (kept, and raised by `finish`)
            self.fail(
                StorageFailed(
                    "a writer failed",
                    where=target.plan.name,
                    found=repr(error),
                    remedy="look at the log; the next save tries again",
                )
            )

    def _write(self, target: _ImageFile, start: int, image: memoryview, size_bytes: int) -> None:
        sums = block_digests(image[:size_bytes])
        first = start // BLOCK_BYTES * DIGEST_BYTES
        target.digests[first : first + len(sums)] = sums
        whole = align_up(size_bytes, target.writer.alignment_bytes)
        target.writer.write_at(target.plan.region_bytes + start, image[:whole])
        if start + size_bytes == target.plan.tensor_bytes:
            target.tail = bytes(image[size_bytes // ALIGN_BYTES * ALIGN_BYTES : size_bytes])
        with self._lock:
            self.written_bytes += size_bytes
            target.written_bytes += size_bytes
            complete = target.written_bytes == target.plan.tensor_bytes
        if complete and not target.plan.has_objects:
            # Nothing more will come: its sync runs while the other files are still being written.
            target.record = self._finish_file(target, [])

    def finish(self, objects: tuple[tuple[int, str, bytes], ...]) -> tuple[FileRecord, ...]:
        """Append objects, write headers, make every file and the folder durable; all chunks MUST
        have been written. Raises the first error of the save."""
        records = []
        for number, file in enumerate(self._files):
            mine = [(name, data) for where, name, data in objects if where == number]
            records.append(file.record or self._finish_file(file, mine))
        if self.error is not None:
            raise self.error
        # The attempt's own too where it holds only folders: the rank that made them may not have
        # got that far yet.
        for place in {**self._folders, self.folder: None}:
            self._store.sync_folder(place)
        return tuple(records)

    def close(self) -> None:
        """Close what is open; does nothing to finished files."""
        for file in self._files:
            file.writer.close()

    def _finish_file(self, file: _ImageFile, objects: list[tuple[str, bytes]]) -> FileRecord:
        error = self.error
        if error is not None:
            raise error
        plan = file.plan
        entries, end = [], plan.tensor_bytes
        for name, data in objects:
            entries.append(
                ObjectEntry(name=name, start=end, stop=end + len(data), digest=digest(data))
            )
            end += len(data)
        if objects:
            at = plan.tensor_bytes // ALIGN_BYTES * ALIGN_BYTES
            joined = file.tail + b"".join(data for _, data in objects)
            self._write_aligned(file.writer, plan.region_bytes + at, joined)
        header = Header(
            item=plan.item, tensors=plan.entries, objects=tuple(entries),
            tensor_bytes=plan.tensor_bytes, blocks=bytes(file.digests), parts=plan.parts,
        )  # fmt: skip
        region = encode_header(header, region_bytes=plan.region_bytes)
        self._write_aligned(file.writer, 0, region)
        size = plan.region_bytes + end
        file.writer.finish(size)
        return FileRecord(
            name=plan.name, size_bytes=size, header_bytes=plan.region_bytes,
            header_digest=digest_text(region),
        )  # fmt: skip

    def _make(self, place: str) -> None:
        """A folder within the attempt's; another rank may be first."""
        with contextlib.suppress(Exists):
            self._store.make_folder(place, parents=False)

    @staticmethod
    def _write_aligned(writer: FileWriting, offset: int, data: bytes) -> None:
        """Write bytes from ordinary memory through a page-aligned copy."""
        with mmap.mmap(-1, align_up(max(len(data), 1), ALIGN_BYTES)) as buffer:
            buffer[: len(data)] = data
            whole = align_up(len(data), writer.alignment_bytes)
            with memoryview(buffer) as view, view[:whole] as used:
                writer.write_at(offset, used)
