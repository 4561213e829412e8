"""Write the images of one save, and choose how: whole or what has changed, encoded or not.

Knows nothing of who commits, of other saves or of torch. Chunks may arrive in any order and be
written by several threads at once. The first error is kept, and after it nothing more is written or
published.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

from laststep.codecs.digests import block_digests
from laststep.errors import Exists, LaststepError, StorageFailed, drop_tracebacks
from laststep.flush.deriving import Deriving, DerivingCoder, Misses
from laststep.flush.images import WholeImage, WrittenImage
from laststep.flush.lending import MOST_CHANGED
from laststep.flush.packed import CannotBorrow, PackedImage
from laststep.flush.throughput import TimedWriting
from laststep.settings import Compression
from laststep.terms import BLOCK_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from laststep.flush.coder import Compressor, FileCoder
    from laststep.flush.held import BlockCoder
    from laststep.flush.lending import Lender
    from laststep.flush.protocol import CodingReport, FileBegin
    from laststep.flush.rounding import Rounding
    from laststep.format.manifest import FileRecord
    from laststep.storage.store import FileWriting, Store


_NOTHING = memoryview(b"")


class _File:
    """One data file of a save, and how much of it has been written."""

    def __init__(self, number: int, plan: FileBegin, before: Lender | None) -> None:
        self.number = number
        self.plan = plan
        self.before = before
        self.choosing = threading.Lock()
        self.image: WrittenImage | None = None
        self.rounding: Rounding | None = None
        self.coder: FileCoder | None = None
        """Chosen with the image; None where compression was not asked for."""
        self.deriving: DerivingCoder | None = None
        """Chosen with the image; None where nothing of it follows from others."""
        self.written_bytes = 0
        self.records: tuple[FileRecord, ...] = ()

    def likely_change(self) -> float:
        """The share of it that is to be written, as far as can be told."""
        if self.before is None:
            return 1.0
        return MOST_CHANGED if self.before.changed is None else self.before.changed


class SaveFlush:
    """The files of one save in their attempt's folder."""

    def __init__(
        self,
        store: Store,
        folder: str,
        files: tuple[FileBegin, ...],
        lenders: Mapping[str, Lender] | None = None,
        compressor: Compressor | None = None,
        misses: Misses | None = None,
    ) -> None:
        """`lenders` are the files of the last checkpoint, by name; without a compressor nothing
        is encoded. `misses` are of earlier saves."""
        self.folder = folder
        self.written_bytes = 0
        self._store = store
        self._compressor = compressor
        self._lock = threading.Lock()
        self._error: LaststepError | None = None
        self._files: list[_File] = []
        self._folders = {f"{folder}/{plan.name}".rpartition("/")[0]: None for plan in files}
        """In which the files lie: the attempt's own, or one within it."""
        self._deriving = (
            Deriving(files, Misses() if misses is None else misses, lambda: self.error is not None)
            if any(plan.derived for plan in files)
            else None
        )
        try:
            for place in self._folders:
                if place != folder:
                    self._make(place)
            for number, plan in enumerate(files):
                before = (lenders or {}).get(plan.name)
                if before is not None and not before.has_the_image_of(plan):
                    before = None
                self._files.append(_File(number, plan, before))
                if compressor is not None:
                    self._files[-1].rounding = compressor.rounding(plan) or None
            self._roomy = self._is_roomy()
            for file in self._files:
                undecided = self._lends(file) or self._compresses(file) or file.plan.derived
                if not undecided:
                    file.image = WholeImage(self._open, folder, file.plan, file.before)
            if compressor is not None:
                compressor.begin_save()
        except LaststepError as error:
            self.fail(error)

    def _open(self, path: str, expected_bytes: int) -> FileWriting:
        writer = self._store.open_writer(path, expected_bytes=expected_bytes)
        if self._compressor is None:
            return writer
        return TimedWriting(writer, self._compressor.throughput)

    def _compresses(self, file: _File) -> bool:
        """Whether that was asked for."""
        return (
            self._compressor is not None
            and file.plan.tensor_bytes > 0
            and (file.rounding is not None or self._compressor.mode(file.plan) != Compression.NONE)
        )

    def _lends(self, file: _File) -> bool:
        """Whether something may be borrowed for it, if only where nothing has changed."""
        before = file.before
        return before is not None and self._roomy and before.lends(before.shared_too_often())

    def _is_roomy(self) -> bool:
        """Whether there is room to write everything anew another time, after this save. What is
        borrowed keeps old files: where room is short, they go with the checkpoints they are of."""
        if all(file.before is None for file in self._files):
            return True
        free_bytes = self._store.free_bytes()
        whole = sum(file.plan.tensor_bytes for file in self._files)
        changed = sum(file.plan.tensor_bytes * file.likely_change() for file in self._files)
        return free_bytes is None or free_bytes >= whole + changed

    @property
    def error(self) -> LaststepError | None:
        with self._lock:
            return self._error

    def fail(self, error: LaststepError) -> None:
        """Keep the first error."""
        with self._lock:
            self._error = self._error or error
        drop_tracebacks(error)

    def expect(self, file: int, start: int) -> None:
        """These bytes are on their way to `write`; told in the order in which they get there."""
        if self._deriving is not None:
            self._deriving.expect(file, start)

    def digests(self, file: int, start: int, data: memoryview) -> bytes:
        """The digests of the blocks of bytes of a file, which are rounded first, where they lie, if
        that was asked for."""
        rounding = self._files[file].rounding
        if rounding is not None:
            rounding.apply(start, data)
        return block_digests(data)

    def rounded(self, file: int) -> dict[str, str]:
        """What of a file is rounded, and how."""
        rounding = self._files[file].rounding
        return {} if rounding is None else rounding.names

    def write(
        self, file: int, start: int, image: memoryview, size_bytes: int, sums: bytes = b""
    ) -> None:
        """Digest and write `size_bytes` of `image`, which starts at byte `start` of the tensor
        area; `sums` are its digests if somebody has made them. `image` MUST reach to the next
        multiple of the alignment. Never raises."""
        if self.error is not None:
            return
        target = self._files[file]
        try:
            self._write(target, start, image, size_bytes, sums)
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

    def _write(
        self, target: _File, start: int, image: memoryview, size_bytes: int, sums: bytes
    ) -> None:
        data = image[:size_bytes]
        sums = sums or self.digests(target.number, start, data)
        if self._deriving is not None:
            self._deriving.take(target.number, start, data)
        self._image(target, start, data, sums).write(start, image, size_bytes, sums)
        with self._lock:
            self.written_bytes += size_bytes
            target.written_bytes += size_bytes
            complete = target.written_bytes == target.plan.tensor_bytes
        if complete and not target.plan.has_objects:
            # Nothing more will come: its sync runs while the other files are still being written.
            target.records = self._finish_file(target, [])

    def borrow(self, chunks: Sequence[tuple[int, int, int]]) -> tuple[tuple[int, int], ...]:
        """Of chunks that are what they were in the last checkpoint, those that need not be written:
        of files most of which is so, where somebody lends. Never raises."""
        by_file: dict[int, list[tuple[int, int]]] = {}
        for number, start, size in chunks:
            by_file.setdefault(number, []).append((start, size))
        granted = []
        for number, parts in by_file.items():
            file = self._files[number]
            same_bytes = sum(size for _, size in parts)
            try:
                if same_bytes < (1 - MOST_CHANGED) * file.plan.tensor_bytes or self.error:
                    continue
                image = self._image(file, is_same=same_bytes == file.plan.tensor_bytes)
            except LaststepError as error:
                self.fail(error)
                continue
            if not isinstance(image, PackedImage):
                continue
            for start, size in parts:
                if self._deriving is not None and self._deriving.needs(number, start, size):
                    continue  # what follows from it is found out as it comes by
                blocks = range(start // BLOCK_BYTES, -(-(start + size) // BLOCK_BYTES))
                if image.can_keep(blocks):
                    granted.append((number, start))
                    with self._lock:
                        file.written_bytes += size
        return tuple(granted)

    def _image(
        self,
        file: _File,
        start: int = 0,
        data: memoryview = _NOTHING,
        sums: bytes = b"",
        *,
        is_same: bool = False,
    ) -> WrittenImage:
        """How a file is written, by the first bytes of it that come: whole where much of it has
        changed the last time or, where nobody knows, in these; and where nobody can lend.
        `is_same`: none of it has changed."""
        with file.choosing:
            if file.image is None:
                plan, before = file.plan, file.before
                if self._compressor is not None and self._compresses(file):
                    file.coder = self._compressor.coder(
                        plan, start, data, known=before is not None,
                        rounded=file.rounding is not None,
                    )  # fmt: skip
                inner = file.coder if file.coder is not None and file.coder.encodes else None
                derived = None if self._deriving is None else self._deriving.of(file.number)
                if derived is not None and not derived.is_refuted(start, data):
                    file.deriving = DerivingCoder(derived, inner)
                coder = file.deriving or inner
                has_anchors = inner is not None and inner.has_anchors
                retired = self._retired(file, start, sums, is_same=is_same, has_anchors=has_anchors)
                if retired is not None:
                    with contextlib.suppress(CannotBorrow):
                        file.image = self._packed(file, coder, retired)
                if file.image is None and coder is not None:
                    with contextlib.suppress(CannotBorrow):
                        file.image = self._packed(file, coder, None)
                if file.image is None:
                    file.image = WholeImage(self._open, self.folder, plan, before)
            return file.image

    def _packed(
        self, file: _File, coder: BlockCoder | None, retired: frozenset[int] | None
    ) -> PackedImage:
        return PackedImage(
            self._store, self._open, self.folder, file.plan, before=file.before, retired=retired,
            coder=coder, lossy=None if file.rounding is None else file.rounding.names,
            derived=None if file.deriving is None else file.deriving.derived,
        )  # fmt: skip

    def _retired(
        self, file: _File, start: int, sums: bytes, *, is_same: bool, has_anchors: bool
    ) -> frozenset[int] | None:
        """The files of the last checkpoint that are not borrowed of; None: none of them is.

        Compaction is put off while nothing seems to have changed: a save of nothing new right after
        one that left files sparsely used would otherwise write blocks again. It is not put off a
        second time if something did change after all.
        """
        before = file.before
        if before is None or not self._lends(file):
            return None
        first = start // BLOCK_BYTES
        same = before.same(first, sums)
        likely = before.likely_change(first, same) if sums else 0.0
        seems_same = likely <= MOST_CHANGED and bool(sums) and before.seems_same(first, same)
        if is_same or seems_same:
            return before.shared_too_often()
        retired = before.retired()
        borrows = likely <= MOST_CHANGED or has_anchors
        return retired if borrows and before.lends(retired) else None

    def finish(self, objects: tuple[tuple[int, str, bytes], ...]) -> tuple[FileRecord, ...]:
        """Append objects, write headers, make every file and the folder durable; all chunks MUST
        have been written. Raises the first error of the save."""
        records: list[FileRecord] = []
        for number, file in enumerate(self._files):
            mine = [(name, data) for where, name, data in objects if where == number]
            records += file.records or self._finish_file(file, mine)
        if self.error is not None:
            raise self.error
        if self._deriving is not None:
            self._deriving.end()
        # The attempt's own too where it holds only folders: the rank that made them may not have
        # got that far yet.
        for place in {**self._folders, self.folder: None}:
            self._store.sync_folder(place)
        return tuple(records)

    def coding(self) -> tuple[CodingReport, ...]:
        """What was chosen for the files for which compression was asked, or in which something may
        follow from others, and what came of it."""
        coded = [file.coder.report() for file in self._files if file.coder is not None]
        derived = [(f.plan.name, f.deriving) for f in self._files if f.deriving is not None]
        return (*coded, *(deriving.report(name) for name, deriving in derived))

    def close(self) -> None:
        """Close what is open; does nothing to finished files."""
        for file in self._files:
            if file.image is not None:
                file.image.close()

    def lenders(self) -> dict[str, Lender]:
        """What the next save may borrow, once this one is finished."""
        images = [(file.plan.name, file.image) for file in self._files]
        return {name: image.lender() for name, image in images if image is not None}

    def _finish_file(self, file: _File, objects: list[tuple[str, bytes]]) -> tuple[FileRecord, ...]:
        error = self.error
        if error is not None:
            raise error
        if file.image is None and (file.before is None or not file.before.has(objects)):
            # There were no tensors to decide it.
            file.image = WholeImage(self._open, self.folder, file.plan, file.before)
        file.records = self._image(file).finish(objects)
        return file.records

    def _make(self, place: str) -> None:
        """A folder within the attempt's; another rank may be first."""
        with contextlib.suppress(Exists):
            self._store.make_folder(place, parents=False)
