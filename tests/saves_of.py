"""Save images of data files one after the other, without a trainer, and read them back."""

from __future__ import annotations

import mmap
import random
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING

import attempts
from laststep.catalog.attempt import AttemptName
from laststep.catalog.run import Run
from laststep.constants import ALIGN_BYTES, BLOCK_BYTES, DTYPES, align_up
from laststep.events import Bus
from laststep.flush.encoder import Compressor
from laststep.flush.protocol import CaptureDone, Flushed, Orders
from laststep.flush.saves import Save
from laststep.flush.writer import SaveWriter
from laststep.format import index as index_format
from laststep.format.index import Index, StoredLayout, index_name, plain_index
from laststep.format.layout import FileLayout, TensorEntry, header_bytes_of
from laststep.format.manifest import Commit, ItemRecord, WrittenIndexes
from laststep.plan.files import plan_save
from laststep.read.blocks import BlockReader
from laststep.storage.directory import DirectoryStore

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from laststep.flush.base import Base
    from laststep.storage.store import Store

MODEL = "model.safetensors"


def lone_save(step: int, **client: object) -> Save:
    """A save without a flusher; `client` are functions that do something in its place."""
    nothing = dict.fromkeys(("send", "announce", "release", "save_ends"), lambda *_: None)
    save = Save(SimpleNamespace(last_committed=0, bus=Bus(), **{**nothing, **client}), step)  # type: ignore[arg-type]
    save.plan, save.seal = plan_save(()), capture_done
    return save


def capture_done(number: int) -> CaptureDone:
    """What is captured of a save without any values."""
    return CaptureDone(save=number, values={}, items=(), metrics=b"", metadata=b"")


def flush(save: Save, written: WrittenIndexes | None = None) -> None:
    """Have a save made durable."""
    save.hear(Flushed(save=save.number, written=written or WrittenIndexes()))


def commit(save: Save) -> None:
    """Have a save committed."""
    save.decided(AttemptName(step=save.step, term=1, attempt=1))


def layout_of(
    *tensors: tuple[str, str, int], name: str = MODEL, item: str | None = "model"
) -> FileLayout:
    """A file of tensors, each with its name, dtype and bytes, one after the other."""
    entries, at = [], 0
    for tensor, dtype, size in tensors:
        shape = (size // DTYPES[dtype].size_bytes,)
        entries.append(TensorEntry(tensor, dtype, shape, at, at + size))
        at += size
    return FileLayout(
        name=name,
        item=item,
        header_bytes=header_bytes_of(entries),
        tensor_bytes=at,
        tensors=tuple(entries),
    )


def bytes_layout(size: int, name: str = MODEL) -> FileLayout:
    """A file of one tensor of bytes."""
    return layout_of(("t", "uint8", size), name=name)


def chunks_of(size: int, step: int = BLOCK_BYTES) -> list[tuple[int, int]]:
    return [(start, min(step, size - start)) for start in range(0, size, step)]


def write(writer: SaveWriter, file: int, image: bytes, start: int, size: int) -> None:
    """Hand over a chunk as the flusher does, in page-aligned memory."""
    slot = mmap.mmap(-1, align_up(size, ALIGN_BYTES))
    slot[:size] = image[start : start + size]
    view = memoryview(slot)
    writer.write(file, start, view, size, writer.digests(file, start, view[:size]))


class History:
    """Saves of the same files in one run; each may use what the last committed one holds."""

    def __init__(
        self,
        path: Path,
        *layouts: FileLayout,
        compression: str = "none",
        store: Store | None = None,
    ) -> None:
        self.path = path
        self.store = DirectoryStore(path) if store is None else store
        self.run = Run.open_or_create(self.store)
        self.term = self.run.claim_term(None)
        self.layouts = layouts
        self.compressor: Compressor | None = None
        self.compress(compression)
        self.base: Base | None = None
        self.step = 0
        self.folder = ""

    def compress(self, how: str, memory_bytes: int = 64 << 20) -> None:
        """Encode later saves so."""
        orders = Orders(writers=4, compression=how)
        self.compressor = Compressor(orders, memory_bytes=memory_bytes) if orders.encodes else None

    def begin(self) -> SaveWriter:
        self.step += 1
        attempt = self.run.begin(step=self.step, term=self.term, attempt=self.step)
        self.folder = attempt.folder
        return SaveWriter(attempt, self.layouts, base=self.base, compressor=self.compressor)

    def write(
        self, *images: bytes, seed: int | None = None, chunk_bytes: int = BLOCK_BYTES
    ) -> SaveWriter:
        """Write chunks in their order; with a seed, chunks of a block or two, by three threads in
        any order."""
        writer = self.begin()
        step = chunk_bytes if seed is None else BLOCK_BYTES * (1 + seed % 2)
        chunks = [
            (file, *chunk)
            for file, image in enumerate(images)
            for chunk in chunks_of(len(image), step)
        ]

        def write_some(some: list[tuple[int, int, int]]) -> None:
            for file, start, size in some:
                write(writer, file, images[file], start, size)

        if seed is None:
            write_some(chunks)
            return writer
        random.Random(seed).shuffle(chunks)
        threads = [threading.Thread(target=write_some, args=(chunks[n::3],)) for n in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return writer

    def save(
        self, *images: bytes, seed: int | None = None, chunk_bytes: int = BLOCK_BYTES
    ) -> Index:
        """Write and commit; returns the index."""
        return self.commit(self.write(*images, seed=seed, chunk_bytes=chunk_bytes))

    def commit(self, writer: SaveWriter, values: dict[str, bytes] | None = None) -> Index:
        """Finish a save and commit it: the next may use it again."""
        written = self.finish(writer, values)
        attempts.commit(self.run, self.folder, self.manifest(written))
        self.base = writer.as_base()
        return self.index()

    def finish(self, writer: SaveWriter, values: dict[str, bytes] | None = None) -> WrittenIndexes:
        written = writer.finish({} if values is None else values)
        writer.close()
        return written

    def manifest(self, written: WrittenIndexes) -> Commit:
        item = ItemRecord(name="model", kind="value", tensors=1, size_bytes=1)
        return Commit(
            run=self.run.id,
            step=self.step,
            term=self.term,
            attempt=self.step,
            created_s=1.0,
            laststep="test",
            items=(item,),
            written=written,
        )

    def index(self) -> Index:
        """The index of the last save, as it is stored."""
        where = f"{self.folder}/{index_name(0)}"
        return index_format.decode(self.store.read(where, limit_bytes=1 << 30), where=where)

    def names(self) -> set[str]:
        """The files of the last save, without its manifest."""
        return {path.name for path in (self.path / self.folder).iterdir()} - {"manifest.json"}

    def read(self) -> list[bytes]:
        """The images of the last save, all verified."""
        return images_in(self.store, self.folder, self.index())


def images_in(store: Store, folder: str, index: Index) -> list[bytes]:
    """The tensor bytes of each layout, all verified."""
    opened = BlockReader(store, folder, index).sound()
    images = []
    for file in opened.layouts:
        size = file.layout.tensor_bytes
        image = memoryview(mmap.mmap(-1, align_up(max(size, 1), ALIGN_BYTES)))
        assert file.blocks(0, size).read(image) == []
        images.append(bytes(image[:size]))
    opened.close()
    return images


def whole_index(
    rank: int,
    layouts: Sequence[FileLayout],
    digests: Sequence[bytes],
    values: Mapping[str, bytes],
    lossy: Sequence[dict[str, str]],
) -> Index:
    """The index of a save that has every layout in place."""
    stored = [
        StoredLayout(layout=layout, digests=sums, runs=(), lossy=rounded)
        for layout, sums, rounded in zip(layouts, digests, lossy, strict=True)
    ]
    return plain_index(Index(rank=rank, layouts=tuple(stored), values=dict(values)))
