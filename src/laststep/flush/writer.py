"""Write the files of one save: data files in place, changed or encoded blocks in a pack, an index.

For each layout the first bytes that come decide how it is written: *in place*, as a plain data
file; or *by block*, where blocks that the last checkpoint has are used again and the others go into
the pack, encoded or not. Knows nothing of who commits, of other saves or of torch. Chunks may
arrive in any order and be written by several threads at once. The first error is kept, and after it
nothing more is written or published.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

from laststep.codecs.digests import DIGEST_BYTES, block_digests
from laststep.errors import AlreadyExistsError, LaststepError, StorageError, drop_tracebacks
from laststep.flush.base import MOST_CHANGED, Base, LayoutHistory, renumbered, shared
from laststep.flush.deriving import Deriving, DerivingCoder, Misses
from laststep.flush.encoder import TimedWriting
from laststep.flush.pack import PackWriter, write_aligned
from laststep.format import index as index_format
from laststep.format.deriving import ROUNDED, Master
from laststep.format.index import (
    RAW,
    BaseRef,
    BlockRef,
    BlockRun,
    Encoding,
    Index,
    StoredFile,
    StoredLayout,
    in_place,
    runs_of,
)
from laststep.plan.files import index_name, pack_name
from laststep.settings import Compression
from laststep.terms import BLOCK_BYTES, align_up

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from laststep.flush.base import BaseLayout
    from laststep.flush.encoder import BlockCoder, Compressor, FileCoder, Rounding
    from laststep.flush.protocol import CodingReport
    from laststep.format.layout import FileLayout
    from laststep.format.manifest import WrittenIndexes
    from laststep.plan.files import MasterPair
    from laststep.storage.store import FileWriting, Store

_NOTHING = memoryview(b"")


class PlainFileWriter:
    """A layout that is written as a plain data file: every block has its place."""

    def __init__(self, writer: FileWriting, layout: FileLayout) -> None:
        self._writer = writer
        self._layout = layout
        try:
            write_aligned(writer, 0, layout.header())
        except BaseException:
            writer.close()
            raise

    def write(self, start: int, image: memoryview, size_bytes: int, sums: bytes) -> None:
        """Write bytes of the tensors from `start` on; `image` MUST reach to the next multiple of
        the alignment."""
        whole = align_up(size_bytes, self._writer.alignment_bytes)
        self._writer.write_at(self._layout.header_bytes + start, image[:whole])

    def finish(self) -> None:
        self._writer.finish(self._layout.size_bytes)

    def close(self) -> None:
        self._writer.close()


class BlockWriter:
    """A layout whose blocks are used again, or go into the pack."""

    def __init__(
        self,
        save: SaveWriter,
        layout: FileLayout,
        base: BaseLayout | None,
        retired: frozenset[int] | None,
        coder: BlockCoder | None,
    ) -> None:
        """`base` is the same layout in the last checkpoint, of which blocks may be used again, but
        not those in `retired` files; None: none of them."""
        self._save = save
        self._layout = layout
        self._base = base if retired is not None else None
        self._coder = coder
        self.retired = retired or frozenset()
        self.refs: dict[int, BlockRef] = {}
        """Where each block lies that has come."""
        if self._base is not None:
            self.refs = {
                n: renumbered(ref, save.base_numbers)
                for n, ref in enumerate(self._base.refs)
                if self.keeps(n)
            }

    def keeps(self, number: int) -> bool:
        """Return whether a block that is the same is used again: nothing it needs is retired."""
        base = self._base
        return (
            base is not None
            and number not in base.derived
            and not base.needs(number) & self.retired
        )

    def write(self, start: int, image: memoryview, size_bytes: int, sums: bytes) -> None:
        first = start // BLOCK_BYTES
        count = len(sums) // DIGEST_BYTES
        same = [False] * count if self._base is None else self._base.same(first, sums)
        for number, is_same in enumerate(same, first):
            if is_same and self.keeps(number):
                continue
            at = (number - first) * BLOCK_BYTES
            data = image[at : min(at + BLOCK_BYTES, size_bytes)]
            digest = sums[(number - first) * DIGEST_BYTES : (number - first + 1) * DIGEST_BYTES]
            self.refs[number] = self._put(number, data, digest)

    def _put(self, number: int, data: memoryview, digest: bytes) -> BlockRef:
        if self._coder is None:
            return BlockRef(self._save.pack_number, self._save.pack.append(data), len(data))
        base = self._base_of(number)
        stored, encoding, is_against_base = self._coder.encode(number, data, digest, base)
        return BlockRef(
            self._save.pack_number,
            self._save.pack.append(stored),
            len(stored),
            self._save.encoding_number(encoding),
            base if is_against_base else None,
        )

    def _base_of(self, number: int) -> BaseRef | None:
        """The block that one may be encoded against, in the numbers of this save: that of the last
        checkpoint, or what that one was encoded against."""
        base = self._base
        if base is None or number in base.derived:
            return None
        ref = base.refs[number]
        found = ref.base or BaseRef(ref, base.stored.digest(number))
        if found.block.file in self.retired:
            return None
        return found._replace(block=renumbered(found.block, self._save.base_numbers))

    def finish(self) -> None:
        """The pack is finished for all layouts together."""

    def close(self) -> None:
        """See `finish`."""


class _Target:
    """One layout of a save, and how much of it has been written."""

    def __init__(self, number: int, layout: FileLayout, base: BaseLayout | None) -> None:
        self.number = number
        self.layout = layout
        self.base = base
        self.choosing = threading.Lock()
        self.way: PlainFileWriter | BlockWriter | None = None
        self.rounding: Rounding | None = None
        self.coder: FileCoder | None = None
        """Chosen with the way; None where compression was not asked for."""
        self.deriving: DerivingCoder | None = None
        """Chosen with the way; None where nothing of it is derived."""
        self.digests = bytearray(layout.block_count * DIGEST_BYTES)
        self.written_bytes = 0
        self.is_finished = False
        if base is not None:
            self.digests[:] = base.stored.digests

    def likely_change(self) -> float:
        """The share of it that is to be written, as far as can be told."""
        if self.base is None:
            return 1.0
        return MOST_CHANGED if self.base.changed is None else self.base.changed

    def history(self, retirable: frozenset[int]) -> LayoutHistory:
        """What the next save wants to know of this one."""
        if self.base is None:
            return LayoutHistory()
        same = self.base.same(0, bytes(self.digests))
        changed = frozenset(number for number, known in enumerate(same) if not known)
        put_off = isinstance(self.way, BlockWriter) and bool(retirable - self.way.retired)
        return LayoutHistory(changed, bool(changed) and put_off)


class SaveWriter:
    """The files of one rank's save in their attempt's folder."""

    def __init__(  # noqa: PLR0913 (what is known of a save, each by its name)
        self,
        store: Store,
        folder: str,
        layouts: Sequence[FileLayout],
        *,
        rank: tuple[int, int] = (0, 1),
        base: Base | None = None,
        compressor: Compressor | None = None,
        derived: Sequence[MasterPair] = (),
        is_declared: bool = False,
        misses: Misses | None = None,
    ) -> None:
        """`rank` is which of how many; `base` the last checkpoint, of which blocks may be used
        again. Without a compressor nothing is encoded. `derived` are entries that may be stored as
        the rounding of others; `misses` are of earlier saves."""
        self.folder = folder
        self.written_bytes = 0
        self._store = store
        self._rank = rank
        self._base = base
        self._compressor = compressor
        self._lock = threading.Lock()
        self._error: LaststepError | None = None
        self._index: Index | None = None
        # Blocks that are used again keep the numbers of their encodings.
        encodings = () if base is None else base.index.encodings
        self._encodings = {encoding: number for number, encoding in enumerate(encodings, 1)}
        self._links: dict[int, str] | None = None
        """The files of the base by the names that they have here; None: nobody has asked."""
        self._targets: list[_Target] = []
        count = len(layouts)
        # The numbers of files while the save is written: data files, the pack, those of the base.
        self.pack_number = count
        self.base_numbers = (
            {} if base is None else {n: count + 1 + n for n in range(len(base.index.files))}
        )
        name = pack_name(*rank)
        self.pack = PackWriter(lambda: self._open(name, BLOCK_BYTES))
        places = [layout.name for layout in layouts] + [name, index_name(*rank)]
        self._folders = {f"{folder}/{place}".rpartition("/")[0]: None for place in places}
        """In which the files lie: the attempt's own, or one within it."""
        self._deriving = (
            Deriving(
                layouts,
                derived,
                Misses() if misses is None else misses,
                lambda: self.error is not None,
                is_declared=is_declared,
            )
            if derived
            else None
        )
        try:
            for place in self._folders:
                if place != folder:
                    with contextlib.suppress(AlreadyExistsError):  # another rank may be first
                        self._store.make_folder(place, parents=False)
            for number, layout in enumerate(layouts):
                known = None if base is None else base.layout(layout)
                self._targets.append(_Target(number, layout, known))
                if compressor is not None:
                    self._targets[-1].rounding = compressor.rounding(layout) or None
            usable = [target.base for target in self._targets if target.base is not None]
            self._shared_too_often = frozenset() if base is None else base.shared_too_often()
            self._retired = frozenset() if base is None else base.retired(usable)
            self._is_roomy = self._has_room()
            may_derive = {pair.file for pair in derived}
            for target in self._targets:
                if not (
                    self._may_reuse(target)
                    or self._compresses(target)
                    or target.number in may_derive
                ):
                    target.way = self._in_place(target)
            if compressor is not None:
                compressor.begin_save()
        except LaststepError as error:
            self.fail(error)

    # How a layout is written

    def _open(self, name: str, expected_bytes: int) -> FileWriting:
        writer = self._store.open_writer(f"{self.folder}/{name}", expected_bytes=expected_bytes)
        if self._compressor is None:
            return writer
        return TimedWriting(writer, self._compressor.throughput)

    def _in_place(self, target: _Target) -> PlainFileWriter:
        layout = target.layout
        return PlainFileWriter(self._open(layout.name, layout.size_bytes), layout)

    def _compresses(self, target: _Target) -> bool:
        """Return whether encoding was asked for."""
        return (
            self._compressor is not None
            and target.layout.tensor_bytes > 0
            and (
                target.rounding is not None
                or self._compressor.mode(target.layout) != Compression.NONE
            )
        )

    def _may_reuse(self, target: _Target) -> bool:
        """Return whether blocks of the last checkpoint may be used again, if only where nothing has
        changed."""
        return target.base is not None and self._is_roomy and target.base.is_usable()

    def _has_room(self) -> bool:
        """Return whether there is room to write everything another time, after this save. Blocks
        that are used again keep old files: where room is short, those go with their checkpoints."""
        if all(target.base is None for target in self._targets):
            return True
        free_bytes = self._store.free_bytes()
        whole = sum(target.layout.tensor_bytes for target in self._targets)
        changed = sum(t.layout.tensor_bytes * t.likely_change() for t in self._targets)
        return free_bytes is None or free_bytes >= whole + changed

    def _way(
        self,
        target: _Target,
        start: int = 0,
        data: memoryview = _NOTHING,
        sums: bytes = b"",
        *,
        is_same: bool = False,
    ) -> PlainFileWriter | BlockWriter:
        """How a layout is written, by the first bytes of it that come. `is_same`: none of it has
        changed."""
        with target.choosing:
            if target.way is None:
                layout, base = target.layout, target.base
                if self._compressor is not None and self._compresses(target):
                    target.coder = self._compressor.coder(
                        layout,
                        start,
                        data,
                        known=base is not None,
                        rounded=target.rounding is not None,
                    )
                inner = target.coder if target.coder is not None and target.coder.encodes else None
                derived = None if self._deriving is None else self._deriving.of(target.number)
                if derived is not None and not derived.is_refuted(start, data):
                    target.deriving = DerivingCoder(derived, inner)
                coder = target.deriving or inner
                has_bases = inner is not None and inner.has_bases
                retired = self._retired_for(
                    target, start, sums, is_same=is_same, has_bases=has_bases
                )
                if retired is not None and not self._linked():
                    retired = None
                if retired is None and coder is None:
                    target.way = self._in_place(target)
                else:
                    target.way = BlockWriter(self, layout, base, retired, coder)
            return target.way

    def _retired_for(
        self, target: _Target, start: int, sums: bytes, *, is_same: bool, has_bases: bool
    ) -> frozenset[int] | None:
        """The files of the last checkpoint whose blocks are not used again; None: none are.

        Compaction is put off while nothing seems to have changed: a save of nothing new right after
        one that left files sparsely used would otherwise write blocks again. It is not put off a
        second time if something did change after all.
        """
        base = target.base
        if base is None or not self._may_reuse(target):
            return None
        first = start // BLOCK_BYTES
        same = base.same(first, sums)
        likely = base.likely_change(first, same) if sums else 0.0
        seems_same = likely <= MOST_CHANGED and bool(sums) and base.seems_same(first, same)
        if is_same or seems_same:
            return self._shared_too_often
        return self._retired if likely <= MOST_CHANGED or has_bases else None

    def _linked(self) -> bool:
        """Link the files of the base into this folder, once: from then on nobody can take them
        away. False where that cannot be."""
        with self._lock:
            if self._links is None:
                self._links = self._link_all()
            return bool(self._links)

    def _link_all(self) -> dict[int, str]:
        base, links = self._base, dict[int, str]()
        if base is None:
            return links
        for number, file in enumerate(base.index.files):
            if number in self._shared_too_often:
                continue
            name = base.name_elsewhere(file)
            if name is None or not self._link(f"{base.folder}/{file.name}", name, file.size_bytes):
                self._unlink(links.values())
                return {}
            links[number] = name
        return links

    def _link(self, source: str, name: str, size_bytes: int) -> bool:
        """Link a file, and see that it has the size that it was written with."""
        path = f"{self.folder}/{name}"
        try:
            if not self._store.link(source, path):
                return False
        except LaststepError:
            return False
        try:
            reader = self._store.open_reader(path, cached=True)
            there_bytes = reader.size_bytes
            reader.close()
        except LaststepError:
            there_bytes = -1
        if there_bytes != size_bytes:
            self._store.delete(path)
            return False
        return True

    def _unlink(self, names: Iterable[str]) -> None:
        for name in names:
            self._store.delete(f"{self.folder}/{name}")

    def encoding_number(self, encoding: Encoding | None) -> int:
        """The number that an encoding has in the index."""
        if encoding is None:
            return RAW
        with self._lock:
            return self._encodings.setdefault(encoding, len(self._encodings) + 1)

    # What comes

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
        """The digests of the blocks of bytes of a layout, which are rounded first, where they lie,
        if that was asked for."""
        rounding = self._targets[file].rounding
        if rounding is not None:
            rounding.apply(start, data)
        return block_digests(data)

    def rounded(self, file: int) -> dict[str, str]:
        """What of a layout is rounded, and how."""
        rounding = self._targets[file].rounding
        return {} if rounding is None else rounding.names

    def write(
        self, file: int, start: int, image: memoryview, size_bytes: int, sums: bytes = b""
    ) -> None:
        """Digest and write `size_bytes` of `image`, which starts at byte `start` of the tensors of
        a layout; `sums` are its digests if somebody has made them. `image` MUST reach to the next
        multiple of the alignment. Never raises."""
        if self.error is not None:
            return
        target = self._targets[file]
        try:
            self._write(target, start, image, size_bytes, sums)
        except LaststepError as error:
            self.fail(error)
        except Exception as error:  # noqa: BLE001 (kept, and raised by `finish`)
            self.fail(
                StorageError(
                    "a writer failed",
                    where=target.layout.name,
                    found=repr(error),
                    remedy="look at the log; the next save tries again",
                )
            )

    def _write(
        self, target: _Target, start: int, image: memoryview, size_bytes: int, sums: bytes
    ) -> None:
        data = image[:size_bytes]
        sums = sums or self.digests(target.number, start, data)
        if self._deriving is not None:
            self._deriving.take(target.number, start, data)
        self._way(target, start, data, sums).write(start, image, size_bytes, sums)
        first = start // BLOCK_BYTES * DIGEST_BYTES
        with self._lock:
            target.digests[first : first + len(sums)] = sums
            self.written_bytes += size_bytes
            target.written_bytes += size_bytes
            complete = target.written_bytes == target.layout.tensor_bytes
        if complete:
            # Nothing more will come: its sync runs while the other files are still being written.
            self._finish_target(target)

    def reuse(self, chunks: Sequence[tuple[int, int, int]]) -> tuple[tuple[int, int], ...]:
        """Of chunks that are what they were in the last checkpoint, those that need not come: of
        layouts most of which is so, where its blocks can be used again. Never raises."""
        by_file: dict[int, list[tuple[int, int]]] = {}
        for number, start, size in chunks:
            by_file.setdefault(number, []).append((start, size))
        granted = []
        for number, parts in by_file.items():
            target = self._targets[number]
            same_bytes = sum(size for _, size in parts)
            try:
                if same_bytes < (1 - MOST_CHANGED) * target.layout.tensor_bytes or self.error:
                    continue
                way = self._way(target, is_same=same_bytes == target.layout.tensor_bytes)
            except LaststepError as error:
                self.fail(error)
                continue
            if not isinstance(way, BlockWriter):
                continue
            for start, size in parts:
                if self._deriving is not None and self._deriving.needs(number, start, size):
                    continue  # what is derived from it is found out as it comes by
                blocks = range(start // BLOCK_BYTES, -(-(start + size) // BLOCK_BYTES))
                if all(map(way.keeps, blocks)):
                    granted.append((number, start))
                    with self._lock:
                        target.written_bytes += size
        return tuple(granted)

    # The end

    def _finish_target(self, target: _Target) -> None:
        if self.error is not None:
            raise self.error
        if target.written_bytes != target.layout.tensor_bytes:
            raise StorageError(
                "not all bytes of a save have come",
                where=f"{self.folder}/{target.layout.name}",
                expected=f"{target.layout.tensor_bytes} bytes",
                found=f"{target.written_bytes} bytes",
                remedy="the next save tries again",
            )
        if not target.is_finished:
            self._way(target, is_same=True).finish()
            target.is_finished = True

    def finish(self, values: Mapping[str, bytes]) -> WrittenIndexes:
        """Make every file durable, write the index and make the folder durable; all chunks MUST
        have been written. Raises the first error of the save."""
        for target in self._targets:
            self._finish_target(target)
        if self.error is not None:
            raise self.error
        self.pack.finish()
        if self._deriving is not None:
            self._deriving.end()
        self._index = self._make_index(values)
        data = index_format.encode(self._index)
        name = index_name(*self._rank)
        writer = self._store.open_writer(f"{self.folder}/{name}", expected_bytes=len(data))
        with contextlib.closing(writer):
            write_aligned(writer, 0, data)
            writer.finish(len(data))
        # The attempt's own too where it holds only folders: the rank that made them may not have
        # got that far yet.
        for place in {**self._folders, self.folder: None}:
            self._store.sync_folder(place)
        return index_format.written_of(self._index, data)

    def _make_index(self, values: Mapping[str, bytes]) -> Index:
        """Number the files that are needed, and let go of the others."""
        files: dict[int, StoredFile] = {}
        refs = [
            [target.way.refs[n] for n in range(target.layout.block_count)]
            if isinstance(target.way, BlockWriter)
            else []
            for target in self._targets
        ]
        for target in self._targets:
            if isinstance(target.way, PlainFileWriter):
                layout = target.layout
                files[target.number] = StoredFile(name=layout.name, size_bytes=layout.size_bytes)
        if self.pack.size_bytes:
            name = pack_name(*self._rank)
            files[self.pack_number] = StoredFile(name=name, size_bytes=self.pack.size_bytes)
        files |= self._reused(refs)
        numbers = {number: at for at, number in enumerate(files)}
        layouts = []
        for target, some in zip(self._targets, refs, strict=True):
            layout = target.layout
            runs = runs_of([renumbered(ref, numbers) for ref in some])
            if isinstance(target.way, PlainFileWriter):
                runs = in_place(layout, numbers[target.number])
            layouts.append(
                StoredLayout(
                    layout=layout,
                    digests=bytes(target.digests),
                    runs=runs,
                    lossy=self.rounded(target.number),
                    derived=self._masters(target, some),
                )
            )
        return Index(
            rank=self._rank[0],
            files=tuple(files.values()),
            encodings=tuple(self._encodings),
            layouts=tuple(layouts),
            values=dict(values),
        )

    def _masters(self, target: _Target, refs: Sequence[BlockRef]) -> dict[str, Master]:
        rounded = self._encodings.get(Encoding(*ROUNDED))
        if target.deriving is None or all(ref.encoding != rounded for ref in refs):
            return {}
        return target.deriving.derived.used()

    def _reused(self, refs: Sequence[Sequence[BlockRef]]) -> dict[int, StoredFile]:
        """The files of the base that are needed; the links to others go. A data file of which all
        is needed, in place, has its own name here too."""
        base, links = self._base, self._links or {}
        if base is None:
            return {}
        needed: set[int] = set()
        for ref in (ref for some in refs for ref in some):
            needed.add(ref.file)
            needed |= set() if ref.base is None else {ref.base.block.file}
        found: dict[int, StoredFile] = {}
        for number, name in links.items():
            here, file = self.base_numbers[number], base.index.files[number]
            if here in needed:
                own = self._own_name(here, name, file, refs)
                found[here] = shared(file, own or name, base.folder)
            if here not in needed or found[here].name != name:
                self._unlink([name])
        return found

    def _own_name(
        self, here: int, name: str, file: StoredFile, refs: Sequence[Sequence[BlockRef]]
    ) -> str | None:
        """Link a data file under its own name, if a layout is just that file."""
        for target, some in zip(self._targets, refs, strict=True):
            layout = target.layout
            if (
                some
                and layout.size_bytes == file.size_bytes
                and layout.name == file.own_name
                and runs_of(some) == (BlockRun(len(some), here, layout.header_bytes),)
            ):
                source = f"{self.folder}/{name}"
                return layout.name if self._link(source, layout.name, file.size_bytes) else None
        return None

    def coding(self) -> tuple[CodingReport, ...]:
        """What was chosen for the layouts for which compression was asked, or in which something
        may be derived, and what came of it."""
        coded = [target.coder.report() for target in self._targets if target.coder is not None]
        derived = [(t.layout.name, t.deriving) for t in self._targets if t.deriving is not None]
        return (*coded, *(deriving.report(name) for name, deriving in derived))

    def close(self) -> None:
        """Close what is open; does nothing to finished files."""
        for target in self._targets:
            if target.way is not None:
                target.way.close()
        self.pack.close()

    def as_base(self) -> Base | None:
        """This save as the base of the next, once it is finished."""
        if self._index is None:
            return None
        history = {t.layout.name: t.history(self._retired) for t in self._targets}
        return Base(self._index, self.folder, history)
