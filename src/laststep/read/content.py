"""Open a committed checkpoint: its indexes, verified; where each tensor's bytes lie.

Reads no tensor data and imports no torch. Whatever cannot be read as it was written is
`CorruptError`, after a second look past every cache; `NotFoundError` only where the whole
checkpoint has been deleted since its manifest was read.

A rank of a job opens only what it needs of a checkpoint that many ranks wrote: the tables, in which
those ranks described their state, say what there is and who wrote what of it.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, NamedTuple, Self

from laststep.catalog import decision
from laststep.catalog.indexes import read_index
from laststep.codecs.digests import digest
from laststep.errors import CorruptError, MismatchError, NotFoundError, UsageError
from laststep.format.manifest import DAMAGE_REMEDY
from laststep.plan.files import TABLE_NAME
from laststep.plan.tables import Agreement, Table, agree, decode_table
from laststep.read.files import DataFile, OpenIndex, StoredBox, close_files, stored_in
from laststep.state.boxes import Box, covers_once, whole
from laststep.state.tree import StoredItem, TensorSpec, decode_item

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from types import TracebackType

    from laststep.format.index import Index
    from laststep.format.manifest import ClassRecord, Commit
    from laststep.storage.store import Store


class Place(NamedTuple):
    """Where a box of a stored tensor lies: bytes [start, stop) of a file's tensor area, in
    row-major order of the box."""

    file: int
    start: int
    stop: int
    box: Box


Key = tuple[str, str]
"""An item and the name of a tensor of it."""


class Content:
    """The content of one checkpoint; close it when done."""

    def __init__(
        self, store: Store, folder: str, commit: Commit, *, rank: int = 0, by_rank: bool = False
    ) -> None:
        """Of items that every rank has for itself, this is that rank's view; of a rank that the
        checkpoint does not have, the first one's. `by_rank`: open the files of other ranks when
        they are asked for, if the checkpoint says what lies there."""
        self.folder = folder
        self.commit = commit
        self.per_rank = {record.name for record in commit.items if record.per_rank}
        self.files: list[DataFile] = []
        self.agreement: Agreement | None = None
        """What the ranks held that wrote it, if they have said so and not all files are open."""
        self._store = store
        self._rank = rank if rank < commit.ranks else 0
        self._specs: dict[Key, TensorSpec] = {}
        self._indexes: dict[int, Index] = {}
        """Those that have been read, by rank."""
        self._known_files: dict[int, range] = {}
        """The ranks whose files are known, and the numbers of these."""
        self._own: dict[Key, tuple[Place, ...]] = {}
        self._shared: dict[Key, tuple[Place, ...]] | None = None
        try:
            with self._seen_whole():
                if by_rank and commit.classes:
                    self._open_tables()
                else:
                    self._open_all()
                self.items = {item.name: self._item(item.name, item.kind) for item in commit.items}
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        close_files(self.files)

    def of_rank(self, rank: int) -> Content:
        """The same checkpoint in the view of another rank, which is to be closed too."""
        return Content(self._store, self.folder, self.commit, rank=rank, by_rank=True)

    def item(self, name: str) -> StoredItem:
        try:
            return self.items[name]
        except KeyError:
            known = ", ".join(sorted(self.items)) or "none"
            raise NotFoundError(
                f"the checkpoint has no item {name!r}", where=self.folder, found=known
            ) from None

    def places(self, item: str, name: str) -> tuple[Place, ...]:
        """Where the bytes of a tensor lie: boxes that cover it once."""
        if item in self.per_rank:
            return self._own[item, name]
        if self._shared is None:
            with self._seen_whole():
                self._open_all()
        assert self._shared is not None  # noqa: S101 (all files are open now)
        return self._shared[item, name]

    def keys(self) -> list[Key]:
        """The tensors that ranks share, in an order that is the same for everybody."""
        if self.agreement is not None:
            return list(self.agreement.keys)
        return sorted(key for key in self._specs if key[0] not in self.per_rank)

    def open_files(self, numbers: Iterable[int]) -> None:
        """Open these files, and those that lie in the same index, if they are not open."""
        with self._seen_whole():
            for number in numbers:
                self.files[number].open()

    def places_of_rank(self, rank: int) -> Iterator[tuple[Key, Place]]:
        """What lies in the files of a rank, of that which ranks share. Opens none of them."""
        with self._seen_whole():
            numbers = self._known(rank)
        return ((key, place) for key, place in self._placed(numbers) if key[0] not in self.per_rank)

    @contextlib.contextmanager
    def _seen_whole(self) -> Iterator[None]:
        """`NotFoundError` for what is damaged because all of it was deleted meanwhile."""
        try:
            yield
        except CorruptError as error:
            gone = decision.deleted(self._store, self.folder)
            if gone is not None:
                raise gone from error
            raise

    def _index(self, rank: int) -> Index:
        if rank not in self._indexes:
            index = read_index(self._store, self.folder, self.commit, rank)
            self._indexes[rank] = index
        return self._indexes[rank]

    def _known(self, rank: int) -> range:
        """Read the index of a rank, if it has not been read; the numbers of its files."""
        if rank not in self._known_files:
            index = OpenIndex(self._store, self.folder, self._index(rank), later=True)
            first = len(self.files)
            self.files += index.layouts
            self._known_files[rank] = range(first, len(self.files))
        return self._known_files[rank]

    def _open(self, rank: int) -> range:
        """Open the files of a rank, if they are not open yet; their numbers."""
        numbers = self._known(rank)
        self.open_files(numbers)
        return numbers

    def _open_all(self) -> None:
        """Open all files, and see that what lies in them makes up every tensor."""
        numbers = [n for rank in range(self.commit.index_count) for n in self._open(rank)]
        by_tensor: dict[Key, list[Place]] = {}
        for key, place in self._placed(numbers):
            by_tensor.setdefault(key, []).append(place)
        self._shared, self.agreement = {}, None
        for key, places in by_tensor.items():
            shape = self._specs[key].shape
            boxes = [place.box for place in places]
            if boxes != [whole(shape)] and not covers_once(shape, boxes):
                raise CorruptError(
                    "the parts of a tensor do not make it up",
                    where=self.folder,
                    expected=f"every element of {key[0]}/{key[1]} {list(shape)} once",
                    found=f"{len(places)} parts",
                    remedy=DAMAGE_REMEDY,
                )
            (self._own if key[0] in self.per_rank else self._shared)[key] = tuple(places)

    def _open_tables(self) -> None:
        """Read the tables that say what all ranks held, and open the files of this one, if it has
        any for itself."""
        tables = [self._table(record) for record in self.commit.classes]
        known = [table for table in tables if table is not None]
        if len(known) < len(tables):  # by a version that describes it in another way
            self._open_all()
            return
        self.agreement = agreement_of(known, self.commit.classes, self.commit.ranks, self.folder)
        for key, spread in zip(self.agreement.keys, self.agreement.spreads, strict=True):
            self._specs[key] = TensorSpec(self.agreement.dtypes[key], spread.layouts[0].shape)
        if self._has_own_tensors():
            for key, place in self._placed(self._open(self._rank)):
                if key[0] in self.per_rank:
                    self._own[key] = (place,)

    def _has_own_tensors(self) -> bool:
        """Whether this rank's files hold tensors that it has for itself: others it may not need."""
        return bool(self.per_rank) and any(
            stored_in(stored.layout, entry).item in self.per_rank
            for stored in self._index(self._rank).layouts
            for entry in stored.layout.tensors
        )

    def _table(self, of: ClassRecord) -> bytes | None:
        """How the ranks of a class described what they held."""
        self._index(of.ranks[0])
        for data, where in self.values(TABLE_NAME, of.ranks[0]):
            if digest(data).hex() != of.table:
                raise CorruptError(
                    "the table of a rank is not the one that was agreed on",
                    where=where,
                    expected=of.table,
                    found=digest(data).hex(),
                    remedy=DAMAGE_REMEDY,
                )
            return data
        return None

    def _placed(self, numbers: Iterable[int]) -> Iterator[tuple[Key, Place]]:
        """What lies in these files; of items that every rank has for itself, this one's."""
        names = {record.name for record in self.commit.items}
        for number in numbers:
            file = self.files[number]
            for entry in file.layout.tensors:
                stored = stored_in(file.layout, entry)
                if stored.item in self.commit.left_out:
                    continue  # it shares a file with those that were not
                if stored.item not in names:
                    raise CorruptError(
                        "a tensor of an unknown item", where=file.where, found=repr(entry.name)
                    )
                if stored.item not in self.per_rank or file.rank == self._rank:
                    self._check_spec(stored, file.where)
                    place = Place(number, entry.start, entry.stop, stored.box)
                    yield (stored.item, stored.tensor), place

    def _check_spec(self, stored: StoredBox, where: str) -> None:
        """Note what a tensor is, and see that all its parts say the same of it."""
        spec = stored.spec
        known = self._specs.setdefault((stored.item, stored.tensor), spec)
        if known != spec:
            raise CorruptError(
                "the parts of a tensor differ",
                where=where,
                expected=f"{known} for {stored.name}",
                found=str(spec),
                remedy=DAMAGE_REMEDY,
            )

    def _item(self, name: str, kind: str) -> StoredItem:
        tensors = {tensor: spec for (item, tensor), spec in self._specs.items() if item == name}
        rank = self._rank if name in self.per_rank else None
        if rank is not None:
            self._index(rank)
        trees = list(self.values(name, rank))
        if not trees:
            raise CorruptError("the tree of an item is missing", where=self.folder, expected=name)
        return decode_item(trees, name=name, kind=kind, tensors=tensors)

    def values(self, name: str, rank: int | None = None) -> Iterator[tuple[bytes, str]]:
        """The plain values of that name of a rank, or of all whose indexes have been read, and
        where they lie."""
        for number, index in self._indexes.items():
            if name in index.values and rank in (None, number):
                yield index.values[name], f"{self.folder}, rank {number}, value {name}"


def agreement_of(
    tables: Sequence[bytes], classes: Sequence[ClassRecord], ranks: int, where: str
) -> Agreement:
    """What the ranks of a checkpoint had agreed on, from the tables that they left."""
    digests = [b""] * ranks
    known: dict[bytes, Table] = {}
    try:
        for data, record in zip(tables, classes, strict=True):
            name = digest(data)
            known[name] = decode_table(data)
            for rank in record.ranks:
                digests[rank] = name
        return agree(digests, known)
    except (MismatchError, UsageError, ValueError, TypeError, KeyError, IndexError) as error:
        raise CorruptError(
            "the tables of the ranks make no sense",
            where=where,
            found=str(error),
            remedy=DAMAGE_REMEDY,
        ) from error
