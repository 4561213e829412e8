"""Write the files of one save: data files in place, changed or encoded blocks in a pack, an index.

The first bytes of a layout to arrive decide how it is written: *in place*, as a plain data file; or
*by block*, where blocks of the last checkpoint are reused (`base`) and the others are appended to
the pack, encoded or not. Knows nothing about commits, other saves or torch. Chunks may arrive in
any order and be written by several threads at once. The first error is kept, and nothing more is
written or published after it.
"""

from __future__ import annotations

import itertools
import mmap
import threading
from operator import attrgetter
from typing import TYPE_CHECKING

import msgspec

from laststep.codecs.digests import DIGEST_BYTES, block_digests
from laststep.constants import BLOCK_BYTES, align_up
from laststep.errors import LaststepError, StorageError, drop_tracebacks
from laststep.flush.base import MOST_CHANGED, Base, BaseLayout, SharedFiles
from laststep.flush.encoder import LayoutEncoder, TimedWriting
from laststep.flush.rounding import Rounding
from laststep.format import index as index_format
from laststep.format.index import (
    RAW,
    BaseRef,
    BlockRef,
    Index,
    StoredFile,
    StoredLayout,
    in_place,
    index_name,
    pack_name,
    renumbered,
    runs_of,
)
from laststep.format.layout import FileLayout
from laststep.settings import Compression
from laststep.storage.store import FileWriting, write_aligned

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from laststep.catalog.attempt import Attempt
    from laststep.flush.encoder import Compressor
    from laststep.flush.protocol import CodingReport
    from laststep.format.index import BlockRun
    from laststep.format.manifest import WrittenIndexes

_NOTHING = memoryview(b"")
_PIECE_BYTES = 4 << 20


class PackWriter:
    """The pack file of a save, written in aligned pieces, each by the thread that filled it."""

    def __init__(self, writer: FileWriting) -> None:
        self._writer = writer
        self._lock = threading.Lock()
        self._spare: list[mmap.mmap] = []
        self._piece: mmap.mmap | None = None
        self._filled = 0
        self.size_bytes = 0

    def append(self, data: bytes | memoryview, *, is_aligned: bool = False) -> int:
        """Append all of `data` and return its offset in the file. `is_aligned`: its memory is, so
        it can be written from there. A copy costs new memory: 8 ms for 4 MiB on a virtual CPU."""
        full: list[tuple[int, mmap.mmap]] = []
        with self._lock:
            start, left = self.size_bytes, memoryview(data)
            as_it_is = left[:0]
            if is_aligned and self._piece is None:
                whole = len(left) // self._writer.alignment_bytes * self._writer.alignment_bytes
                as_it_is, left = left[:whole], left[whole:]
                self.size_bytes += whole
            while left:
                if self._piece is None:
                    self._piece = self._spare.pop() if self._spare else mmap.mmap(-1, _PIECE_BYTES)
                    self._filled = 0
                count = min(len(left), _PIECE_BYTES - self._filled)
                self._piece[self._filled : self._filled + count] = left[:count]
                left = left[count:]
                self._filled += count
                self.size_bytes += count
                if self._filled == _PIECE_BYTES:
                    full.append((self.size_bytes - _PIECE_BYTES, self._piece))
                    self._piece = None
        if as_it_is:
            self._writer.write_at(start, as_it_is)
        for offset, piece in full:
            self._write(offset, piece, _PIECE_BYTES)
            with self._lock:
                self._spare.append(piece)
        return start

    def finish(self) -> None:
        """Write the last piece and make the file durable."""
        self._spare.clear()
        if self._piece is not None:
            size = align_up(self._filled, self._writer.alignment_bytes)
            self._write(self.size_bytes - self._filled, self._piece, size)
        self._writer.finish(self.size_bytes)

    def _write(self, offset: int, piece: mmap.mmap, size: int) -> None:
        with memoryview(piece) as view, view[:size] as used:
            self._writer.write_at(offset, used)

    def close(self) -> None:
        """Close the file; does nothing to a finished one."""
        self._writer.close()


class _LayoutWriter(msgspec.Struct, eq=False):
    """One layout of a save: how it is written, and how much of it has arrived."""

    layout: FileLayout
    base: BaseLayout | None
    """The same layout in the last checkpoint, if blocks of it may be reused."""
    rounding: Rounding | None
    """None if nothing is rounded."""
    encodes: bool
    """True if compression or rounding was requested for it."""
    digests: bytearray
    choosing: threading.Lock
    is_chosen: bool = False
    """True once it is known how it is written: to `file`, or by block as `refs`."""
    file: FileWriting | None = None
    """The plain data file, if it is written in place."""
    reuses: bool = False
    """True if unchanged blocks of the base are reused."""
    refs: dict[int, BlockRef] = {}
    """Block references, if written by block; at first the base's, for blocks that do not change."""
    encoder: LayoutEncoder | None = None
    """None if compression was not requested."""
    written_bytes: int = 0
    is_finished: bool = False

    def runs(self, number: int) -> tuple[BlockRun, ...]:
        """Return where its blocks are; `number` is that of its data file, if it has one."""
        if self.file is not None:
            return in_place(self.layout, number)
        return runs_of([self.refs[block] for block in range(self.layout.block_count)])


class SaveWriter:
    def __init__(
        self,
        attempt: Attempt,
        layouts: Sequence[FileLayout],
        *,
        rank: tuple[int, int] = (0, 1),
        base: Base | None = None,
        compressor: Compressor | None = None,
    ) -> None:
        """`rank` is (rank, ranks). Blocks of `base`, the last checkpoint, may be reused."""
        self.folder = attempt.folder
        self.written_bytes = 0
        self.error: LaststepError | None = None
        """The first error; set by `fail`."""
        self._attempt = attempt
        self._rank = rank
        self._compressor = compressor
        self._lock = threading.Lock()
        self._index: Index | None = None
        # Reused blocks keep the numbers of their encodings.
        encodings = () if base is None else base.index.encodings
        self._encodings = dict(zip(encodings, itertools.count(1), strict=False))
        self._shared = None if base is None else SharedFiles(attempt.store, attempt.folder, base)
        # File numbers while the save is written: the base's files, then the pack, then data files.
        self._pack_number = 0 if base is None else len(base.index.files)
        self._pack: PackWriter | None = None
        """Created with the first block."""
        self._names = [*map(attrgetter("name"), layouts), pack_name(*rank), index_name(*rank)]
        self._layouts = [self._target(layout, base) for layout in layouts]
        known = [target.base for target in self._layouts if target.base is not None]
        self._retired = frozenset[int]() if base is None else base.retired(known)
        try:
            self._attempt.make_folders(self._names)
            for target in self._layouts:
                if target.base is None and not target.encodes:
                    self._open_in_place(target)
        except LaststepError as error:
            self.fail(error)
        if compressor is not None:
            compressor.begin_save()

    def _target(self, layout: FileLayout, base: Base | None) -> _LayoutWriter:
        rounding, encodes = None, False
        if self._compressor is not None:
            if self._compressor.lossy:
                rounding = Rounding.of(layout, self._compressor.lossy)
            mode = self._compressor.mode(layout)
            encodes = rounding is not None or mode != Compression.NONE
        last = None if base is None else base.layout(layout)
        known = layout.block_count * DIGEST_BYTES if last is None else last.stored.digests
        encodes = encodes and layout.tensor_bytes > 0
        return _LayoutWriter(layout, last, rounding, encodes, bytearray(known), threading.Lock())

    # How a layout is written

    def _open(self, name: str, expected_bytes: int) -> FileWriting:
        writer = self._attempt.open_writer(name, expected_bytes=expected_bytes)
        if self._compressor is None:
            return writer
        return TimedWriting(writer, self._compressor.throughput)

    def _open_in_place(self, target: _LayoutWriter) -> None:
        target.file = self._open(target.layout.name, target.layout.size_bytes)
        target.is_chosen = True
        write_aligned(target.file, 0, target.layout.header())

    def _choose(
        self, target: _LayoutWriter, start: int = 0, data: memoryview = _NOTHING, sums: bytes = b""
    ) -> None:
        """Decide how a layout is written, once its first bytes arrive or none will."""
        with target.choosing:
            if target.is_chosen:
                return
            base, encoder = target.base, None
            if self._compressor is not None and target.encodes:
                encoder = target.encoder = self._compressor.encoder(
                    target.layout,
                    start,
                    data,
                    known=base is not None,
                    rounded=target.rounding is not None,
                )
            if base is not None and self._shared is not None:
                likely = base.likely_change(start // BLOCK_BYTES, sums)
                if likely <= MOST_CHANGED or (encoder is not None and encoder.has_bases):
                    target.reuses = self._shared.link()
            if not target.reuses and (encoder is None or not encoder.encodes):
                self._open_in_place(target)
                return
            if base is not None and target.reuses:
                target.refs = base.reusable(self._retired)
            target.is_chosen = True

    def lossy(self, file: int) -> dict[str, str]:
        """Return the rounded tensors of a layout, with the rounding of each."""
        rounding = self._layouts[file].rounding
        return {} if rounding is None else rounding.names

    # Arriving chunks

    def fail(self, error: LaststepError) -> None:
        """Keep the error, unless there is one already."""
        with self._lock:
            self.error = self.error or error
        drop_tracebacks(error)

    def digests(self, file: int, start: int, data: memoryview) -> bytes:
        """Return the digests of the blocks in `data`, after rounding it in place if requested; b""
        if that fails. Earlier errors change nothing: memory can hold what a full disk cannot."""
        try:
            if (rounding := self._layouts[file].rounding) is not None:
                rounding.apply(start, data)
            return block_digests(data)
        except Exception as error:  # noqa: BLE001 (kept, and raised by `finish`)
            self.fail(StorageError("a chunk cannot be digested", found=repr(error)))
            return b""

    def write(self, file: int, start: int, image: memoryview, size_bytes: int, sums: bytes) -> None:
        """Write `size_bytes` of `image`, from byte `start` of a layout's tensors; `sums` are its
        digests. `image` MUST extend to the next multiple of the alignment. Never raises."""
        if self.error is not None:
            return
        target, data = self._layouts[file], image[:size_bytes]
        try:
            if not target.is_chosen:
                self._choose(target, start, data, sums)
            if target.file is not None:
                whole = align_up(size_bytes, target.file.alignment_bytes)
                target.file.write_at(target.layout.header_bytes + start, image[:whole])
            else:
                self._write_blocks(target, start, data, sums)
            first = start // BLOCK_BYTES * DIGEST_BYTES
            with self._lock:
                target.digests[first : first + len(sums)] = sums
                self.written_bytes += size_bytes
                target.written_bytes += size_bytes
                is_complete = target.written_bytes == target.layout.tensor_bytes
            if is_complete:  # sync it while the other files are still being written
                self._finish_layout(target)
        except LaststepError as error:
            self.fail(error)
        except Exception as error:  # noqa: BLE001 (kept, and raised by `finish`)
            self.fail(StorageError("a writer failed", where=target.layout.name, found=repr(error)))

    def _write_blocks(
        self, target: _LayoutWriter, start: int, data: memoryview, sums: bytes
    ) -> None:
        """Append the blocks that are not reused from the last checkpoint to the pack."""
        first, same = start // BLOCK_BYTES, [False] * (len(sums) // DIGEST_BYTES)
        if target.base is not None and target.reuses:
            same = target.base.same(first, sums)
        changed = [
            n for n, is_same in enumerate(same) if not is_same or first + n not in target.refs
        ]
        if target.encoder is None or not target.encoder.encodes:
            # Neighbours are written together, from the memory where they are.
            for _, run in itertools.groupby(enumerate(changed), lambda pair: pair[1] - pair[0]):
                nths = [nth for _, nth in run]
                raw = data[nths[0] * BLOCK_BYTES : (nths[-1] + 1) * BLOCK_BYTES]
                offset = self._opened_pack().append(raw, is_aligned=True)
                for n, nth in enumerate(nths):
                    size = min(BLOCK_BYTES, len(raw) - n * BLOCK_BYTES)
                    target.refs[first + nth] = BlockRef(
                        self._pack_number, offset + n * BLOCK_BYTES, size
                    )
            return
        for nth in changed:
            number, raw = first + nth, data[nth * BLOCK_BYTES : (nth + 1) * BLOCK_BYTES]
            digest = sums[nth * DIGEST_BYTES : (nth + 1) * DIGEST_BYTES]
            block = target.encoder.encode(number, raw, digest, self._base_of(target, number))
            encoding = RAW
            if block.encoding is not None:
                with self._lock:
                    encoding = self._encodings.setdefault(block.encoding, len(self._encodings) + 1)
            offset = self._opened_pack().append(block.data)
            target.refs[number] = BlockRef(
                self._pack_number, offset, len(block.data), encoding, block.base
            )

    def _opened_pack(self) -> PackWriter:
        with self._lock:
            if self._pack is None:
                self._pack = PackWriter(self._open(pack_name(*self._rank), BLOCK_BYTES))
            return self._pack

    def _base_of(self, target: _LayoutWriter, number: int) -> BaseRef | None:
        """Return the block to encode this one against: the last one, or the base of that."""
        base = target.base
        if base is None or not target.reuses:
            return None
        ref = base.refs[number]
        found = ref.base or BaseRef(ref, base.stored.digest(number))
        return None if found.block.file in self._retired else found

    def reuse(self, chunks: Sequence[tuple[int, int, int]]) -> tuple[tuple[int, int, int], ...]:
        """Return the reusable chunks of mostly unchanged layouts, not to be sent. Never raises."""
        by_file: dict[int, list[tuple[int, int]]] = {}
        for number, start, size in chunks:
            by_file.setdefault(number, []).append((start, size))
        granted = []
        for number, parts in by_file.items():
            target = self._layouts[number]
            same_bytes = sum(size for _, size in parts)
            try:
                if same_bytes < (1 - MOST_CHANGED) * target.layout.tensor_bytes or self.error:
                    continue
                self._choose(target)
            except LaststepError as error:
                self.fail(error)
                continue
            for start, size in parts:
                blocks = range(start // BLOCK_BYTES, -(-(start + size) // BLOCK_BYTES))
                if target.refs.keys() >= {*blocks}:
                    granted.append((number, start, size))
                    with self._lock:
                        target.written_bytes += size
        return tuple(granted)

    # The end

    def _finish_layout(self, target: _LayoutWriter) -> None:
        if target.written_bytes != target.layout.tensor_bytes:
            raise StorageError(
                "some bytes of a save are missing",
                where=f"{self.folder}/{target.layout.name}",
                expected=f"{target.layout.tensor_bytes} bytes",
                found=f"{target.written_bytes} bytes",
            )
        if not target.is_finished:
            if not target.is_chosen:
                self._choose(target)
            if target.file is not None:
                target.file.finish(target.layout.size_bytes)
            target.is_finished = True

    def finish(self, values: Mapping[str, bytes]) -> WrittenIndexes:
        """Make every file durable, write the index and make the folder durable. All chunks MUST
        have been written. Raises the first error of the save."""
        if self.error is not None:
            raise self.error
        for target in self._layouts:
            self._finish_layout(target)
        if self._pack is not None:
            self._pack.finish()
        self._index = self._make_index(values)
        data = index_format.encode(self._index)
        self._attempt.put(index_name(*self._rank), data)
        # Also sync the attempt's own folder if it holds only folders: the rank that made them may
        # not have done so yet.
        self._attempt.sync(self._names)
        return index_format.written_of(self._index, data)

    def _make_index(self, values: Mapping[str, bytes]) -> Index:
        """Number the files that are needed, and unlink the others."""
        files: dict[int, StoredFile] = {}
        needed: dict[int, str | None] = {}
        """Files that hold blocks, each with the name of the layout that it equals, if any."""
        runs: list[tuple[BlockRun, ...]] = []
        for number, target in enumerate(self._layouts, self._pack_number + 1):
            layout, own = target.layout, target.runs(number)
            runs.append(own)
            if target.file is not None:
                files[number] = StoredFile(name=layout.name, size_bytes=layout.size_bytes)
                continue
            for run in own:
                for part in (run, *run.bases):
                    needed.setdefault(part.file)
            if own and own == in_place(layout, own[0].file):
                needed[own[0].file] = layout.name
        if self._pack is not None:
            name = pack_name(*self._rank)
            files[self._pack_number] = StoredFile(name=name, size_bytes=self._pack.size_bytes)
        if self._shared is not None:
            files |= self._shared.settle(needed)
        numbers = dict(zip(files, range(len(files)), strict=True))
        layouts = [
            StoredLayout(
                layout=target.layout,
                digests=bytes(target.digests),
                runs=renumbered(own, numbers),
                lossy={} if target.rounding is None else target.rounding.names,
            )
            for target, own in zip(self._layouts, runs, strict=True)
        ]
        return Index(
            rank=self._rank[0],
            files=tuple(files.values()),
            encodings=tuple(self._encodings),
            layouts=tuple(layouts),
            values=dict(values),
        )

    def coding(self) -> tuple[CodingReport, ...]:
        """Return reports on layouts with compression."""
        if self._compressor is None:
            return ()
        encoders = (target.encoder for target in self._layouts)
        return tuple(encoder.report() for encoder in encoders if encoder is not None)

    def close(self) -> None:
        """Close open files; does nothing to finished files."""
        for target in self._layouts:
            if target.file is not None:
                target.file.close()
        if self._pack is not None:
            self._pack.close()

    def as_base(self) -> Base | None:
        """Return this save as the base of the next; None unless it is finished."""
        if self._index is None:
            return None
        changed = {}
        for target in self._layouts:
            if target.base is not None:
                same = target.base.same(0, bytes(target.digests))
                changed[target.layout.name] = frozenset(
                    n for n, known in enumerate(same) if not known
                )
        return Base(self._index, self.folder, changed)
