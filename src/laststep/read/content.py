"""Open a committed checkpoint: read and verify its indexes, and locate the bytes of each tensor.

Opens data files when they are needed but reads no tensors, and does not import torch.
`NotFoundError` is raised only if the whole checkpoint has been deleted since its manifest was read.
A rank of a job opens only the files it needs of a checkpoint that many ranks wrote: the local
layouts of those ranks describe all tensors, and which rank wrote each part.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
from typing import TYPE_CHECKING, NamedTuple

from laststep.catalog.attempt import deleted, read_index
from laststep.codecs.digests import digest
from laststep.errors import CorruptError, NotFoundError
from laststep.plan.files import LAYOUT_NAME
from laststep.plan.layouts import GlobalLayout, Key, global_layout_of
from laststep.read.blocks import MANY_LAYOUTS, BlockReader, LayoutBlocks, close_files
from laststep.state.boxes import Box, covers_once, whole
from laststep.state.tree import StoredItem, TensorSpec, decode_item

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from laststep.format.index import Index
    from laststep.format.layout import FileLayout, TensorEntry
    from laststep.format.manifest import Commit, ItemRecord, LayoutGroupRecord
    from laststep.storage.store import Store


class StoredBox(NamedTuple):
    """The box of a tensor that one entry holds; usually the whole tensor, which has `spec`."""

    item: str
    tensor: str
    spec: TensorSpec
    box: Box

    @property
    def name(self) -> str:
        return f"{self.item}/{self.tensor}"

    @property
    def text(self) -> str:
        """Full name of the tensor, with the box if it is only a part."""
        if self.box == whole(self.spec.shape):
            return self.name
        return f"{self.name}[{self.box.text}]"


def stored_in(layout: FileLayout, entry: TensorEntry) -> StoredBox:
    item, name = layout.item, entry.name
    if item is None:
        item, _, name = entry.name.partition("/")
    part = layout.parts.get(entry.name)
    if part is None:
        return StoredBox(item, name, TensorSpec(entry.dtype, entry.shape), whole(entry.shape))
    stop = tuple(map(operator.add, part.start, entry.shape))
    return StoredBox(item, part.tensor, TensorSpec(entry.dtype, part.shape), Box(part.start, stop))


class Place(NamedTuple):
    """A box of a stored tensor, at bytes [start, stop) of a file's tensor area."""

    file: int
    start: int
    stop: int
    box: Box


_BOX = operator.attrgetter("box")


class Content:
    """The contents of one checkpoint. Close it when done."""

    def __init__(
        self, store: Store, folder: str, commit: Commit, *, rank: int = 0, by_rank: bool = False
    ) -> None:
        """See per-rank items as of `rank`, or rank 0 if it has no such rank. `by_rank`: read other
        ranks' indexes on demand, if the checkpoint has layout groups."""
        self.folder = folder
        self.where = f"{store.url}/{folder}"
        self.commit = commit
        self.per_rank: set[str] = set()
        self.items: dict[str, StoredItem] = {}
        self.files: list[LayoutBlocks] = []
        self.global_layout: GlobalLayout | None = None
        """Layouts of the ranks that wrote it, if known and not all indexes have been read."""
        self._store = store
        self._rank = rank if rank < commit.ranks else 0
        self._specs: dict[str, dict[str, TensorSpec]] = {}
        """Specs of all tensors, by item."""
        self._indexes: dict[int, Index] = {}
        self._known_files: dict[int, range] = {}
        """Numbers of the files of each rank whose index is in use."""
        self._places: dict[Key, tuple[Place, ...]] = {}
        """Places of all tensors; only of per-rank items while there is a global layout."""
        for record in commit.items:
            self._specs[record.name] = {}
            if record.per_rank:
                self.per_rank.add(record.name)
        try:
            with self._seen_whole():
                if by_rank and commit.layout_groups:
                    self._read_local_layouts()
                else:
                    self._read_all()
                for record in commit.items:
                    self.items[record.name] = self._item(record)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        close_files(self.files)

    def of_rank(self, rank: int) -> Content:
        """Return the same checkpoint as seen by another rank; the caller closes it."""
        return Content(self._store, self.folder, self.commit, rank=rank, by_rank=True)

    def item(self, name: str) -> StoredItem:
        if name not in self.items:
            known = ", ".join(sorted(self.items)) or "none"
            raise NotFoundError(
                f"the checkpoint has no item {name!r}", where=self.folder, found=known
            )
        return self.items[name]

    def places(self, item: str, name: str) -> tuple[Place, ...]:
        """Return the locations of a tensor's bytes: boxes that cover it exactly once."""
        if self.global_layout is not None and item not in self.per_rank:
            with self._seen_whole():
                self._read_all()
        return self._places[item, name]

    def keys(self) -> list[Key]:
        """Return the tensors of all shared items, in the same order on every rank."""
        if self.global_layout is not None:
            return list(self.global_layout.keys)
        shared = self._specs.keys() - self.per_rank
        return sorted((item, name) for item in shared for name in self._specs[item])

    def open_files(self, numbers: Iterable[int]) -> None:
        with self._seen_whole():
            for number in numbers:
                self.files[number].open()
                if len(self.files) > MANY_LAYOUTS:
                    self.files[number].reader.release()

    def places_of_rank(self, rank: int) -> Iterator[tuple[Key, Place]]:
        """Yield the shared tensors in the files of a rank. Opens no data file."""
        with self._seen_whole():
            numbers = self._known(rank)
        return ((key, place) for key, place in self._placed(numbers) if key[0] not in self.per_rank)

    @contextlib.contextmanager
    def _seen_whole(self) -> Iterator[None]:
        """Raise `NotFoundError` instead if the whole checkpoint was deleted meanwhile."""
        try:
            yield
        except CorruptError as error:
            gone = deleted(self._store, self.folder)
            if gone is not None:
                raise gone from error
            raise

    def _index(self, rank: int) -> Index:
        if rank not in self._indexes:
            self._indexes[rank] = read_index(self._store, self.folder, self.commit, rank)
        return self._indexes[rank]

    def _known(self, rank: int) -> range:
        """Read the index of a rank if needed, and return the numbers of its files."""
        if rank not in self._known_files:
            reader = BlockReader(self._store, self.folder, self._index(rank))
            first = len(self.files)
            self.files += reader.layouts
            self._known_files[rank] = range(first, len(self.files))
        return self._known_files[rank]

    def _read_all(self) -> None:
        """Read all indexes and check that their boxes cover every tensor exactly once."""
        numbers = itertools.chain.from_iterable(map(self._known, range(self.commit.index_count)))
        by_tensor: dict[Key, list[Place]] = {}
        for key, place in self._placed(numbers):
            by_tensor.setdefault(key, []).append(place)
        self.global_layout = None
        for key, places in by_tensor.items():
            shape = self._specs[key[0]][key[1]].shape
            boxes = list(map(_BOX, places))
            if boxes != [whole(shape)] and not covers_once(shape, boxes):
                raise CorruptError(
                    "the shards of a tensor do not cover it",
                    where=self.folder,
                    expected=f"every element of {key[0]}/{key[1]} {list(shape)} once",
                    found=f"{len(places)} parts",
                )
            self._places[key] = tuple(places)

    def _read_local_layouts(self) -> None:
        """Read the local layouts, and this rank's index if it has tensors of per-rank items."""
        groups = self.commit.layout_groups
        known = list(filter(None, map(self._local_layout, groups)))
        if len(known) < len(groups):  # written by a version with another form of description
            self._read_all()
            return
        self.global_layout = global_layout_of(known, groups, self.commit.ranks, self.folder)
        for key, spread in zip(self.global_layout.keys, self.global_layout.spreads, strict=True):
            item, tensor = key
            if item not in self._specs:
                raise _of_unknown_item(self.folder, tensor)
            spec = TensorSpec(self.global_layout.dtypes[key], spread.layouts[0].shape)
            self._specs[item][tensor] = spec
        if self.per_rank:
            for key, place in self._placed(self._known(self._rank)):
                if key[0] in self.per_rank:
                    self._places[key] = (place,)

    def _local_layout(self, of: LayoutGroupRecord) -> bytes | None:
        """Return the local layout of a group; None if this version does not know its form."""
        first = min(span.first for span in of.spans)
        self._index(first)
        for data, where in self.values(LAYOUT_NAME, first):
            if digest(data).hex() != of.local_layout:
                raise CorruptError(
                    "the local layout of a rank differs from the agreed one",
                    where=where,
                    expected=of.local_layout,
                    found=digest(data).hex(),
                )
            return data
        return None

    def _placed(self, numbers: Iterable[int]) -> Iterator[tuple[Key, Place]]:
        """Yield the tensors in these files; of per-rank items only those of this rank."""
        for number in numbers:
            file = self.files[number]
            for entry in file.layout.tensors:
                stored = stored_in(file.layout, entry)
                if stored.item in self.commit.omitted_items:
                    continue  # omitted, but in the same file as an item that is not
                if stored.item not in self._specs:
                    raise _of_unknown_item(file.where, entry.name)
                if stored.item in self.per_rank and file.reader.index.rank != self._rank:
                    continue
                spec = stored.spec
                if (known := self._specs[stored.item].setdefault(stored.tensor, spec)) != spec:
                    raise CorruptError(
                        "the shards of a tensor differ",
                        where=file.where,
                        expected=f"{known} for {stored.name}",
                        found=str(spec),
                    )
                place = Place(number, entry.start, entry.stop, stored.box)
                yield (stored.item, stored.tensor), place

    def _item(self, record: ItemRecord) -> StoredItem:
        name, rank = record.name, self._rank if record.per_rank else None
        if rank is not None:
            self._index(rank)
        trees = list(self.values(name, rank))
        if not trees:
            raise CorruptError("the tree of an item is missing", where=self.folder, expected=name)
        return decode_item(trees, name=name, kind=record.kind, tensors=self._specs[name])

    def values(self, name: str, rank: int | None = None) -> Iterator[tuple[bytes, str]]:
        """Yield these plain values and their places, of `rank` or of all indexes in use."""
        for number, index in self._indexes.items():
            if name in index.values and rank in (None, number):
                yield index.values[name], f"{self.folder}, rank {number}, value {name}"


def _of_unknown_item(where: str, tensor: str) -> CorruptError:
    return CorruptError("a tensor of an unknown item", where=where, found=repr(tensor))
