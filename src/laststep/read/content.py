"""Open a committed checkpoint: its headers and objects, verified; where each tensor's bytes lie.

Reads no tensor data and imports no torch. Whatever cannot be read as it was written is `Corrupt`,
after a second look past every cache; `NotFound` only where the whole checkpoint has been deleted
since its manifest was read.

A rank of a job opens only what it needs of a checkpoint that many ranks wrote: the tables, in which
those ranks described their state, say what there is and who wrote what of it.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, NamedTuple, Self

from laststep.catalog import decision
from laststep.catalog.groups import files_of
from laststep.codecs.digests import digest
from laststep.errors import Corrupt, Mismatch, NotFound, Usage
from laststep.format.manifest import DAMAGE_REMEDY
from laststep.plan.files import SHARED_FILE, TABLE_NAME, tree_name
from laststep.plan.tables import Agreement, Table, agree, decode_table
from laststep.read.entries import StoredBox, stored_in
from laststep.read.files import DataFile, close_files, open_file
from laststep.state.boxes import Box, covers_once, whole
from laststep.state.stored_items import StoredItem, TensorSpec, decode_item

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from types import TracebackType

    from laststep.format.manifest import ClassRecord, Commit, FileRecord
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
        self._opened: dict[str, int] = {}
        """The files that are open, by name, and their numbers."""
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
            raise NotFound(
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

    def places_of_rank(self, rank: int) -> Iterator[tuple[Key, Place]]:
        """What lies in the files of a rank, of that which ranks share."""
        with self._seen_whole():
            numbers = self._open(files_of(self._store, self.folder, self.commit, [rank]))
        return ((key, place) for key, place in self._placed(numbers) if key[0] not in self.per_rank)

    @contextlib.contextmanager
    def _seen_whole(self) -> Iterator[None]:
        """`NotFound` for what is damaged because all of it was deleted meanwhile."""
        try:
            yield
        except Corrupt as error:
            gone = decision.deleted(self._store, self.folder)
            if gone is not None:
                raise gone from error
            raise

    def _open(
        self, records: Sequence[FileRecord], among: Sequence[FileRecord] | None = None
    ) -> list[int]:
        """Open files that are not open yet; the numbers of all of these. Files that are only lent
        are opened with those that borrow of them; what tensors follow from is `among` others."""
        numbers = []
        known = {record.name: record for record in among or records}
        for record in records:
            if record.lent:
                continue
            if record.name not in self._opened:
                self._opened[record.name] = len(self.files)
                self.files.append(open_file(self._store, self.folder, record, known).sound())
            numbers.append(self._opened[record.name])
        return numbers

    def _open_all(self) -> None:
        """Open all files, and see that what lies in them makes up every tensor."""
        numbers = self._open(files_of(self._store, self.folder, self.commit))
        by_tensor: dict[Key, list[Place]] = {}
        for key, place in self._placed(numbers):
            by_tensor.setdefault(key, []).append(place)
        self._shared, self.agreement = {}, None
        for key, places in by_tensor.items():
            shape = self._specs[key].shape
            boxes = [place.box for place in places]
            if boxes != [whole(shape)] and not covers_once(shape, boxes):
                raise Corrupt(
                    "the parts of a tensor do not make it up", where=self.folder,
                    expected=f"every element of {key[0]}/{key[1]} {list(shape)} once",
                    found=f"{len(places)} parts", remedy=DAMAGE_REMEDY,
                )  # fmt: skip
            (self._own if key[0] in self.per_rank else self._shared)[key] = tuple(places)

    def _open_tables(self) -> None:
        """Open the files that say what all ranks held, and those of this one."""
        firsts = [record.ranks[0] for record in self.commit.classes]
        records = files_of(self._store, self.folder, self.commit, {*firsts, self._rank})
        shared = [record for record in records if _is_shared(record) or record.lent]
        own = [record for record in records if record.rank == self._rank] if self.per_rank else []
        self._open(shared, records)
        tables = [self._table(record) for record in self.commit.classes]
        known = [table for table in tables if table is not None]
        if len(known) < len(tables):  # by a version that describes it in another way
            self._open_all()
            return
        self.agreement = agreement_of(known, self.commit.classes, self.commit.ranks, self.folder)
        for key, spread in zip(self.agreement.keys, self.agreement.spreads, strict=True):
            self._specs[key] = TensorSpec(self.agreement.dtypes[key], spread.layouts[0].shape)
        for key, place in self._placed(self._open(own)):
            if key[0] in self.per_rank:
                self._own[key] = (place,)

    def _table(self, of: ClassRecord) -> bytes | None:
        """How the ranks of a class described what they held."""
        for data, where in self.objects(TABLE_NAME, of.ranks[0]):
            if digest(data).hex() != of.table:
                raise Corrupt(
                    "the table of a rank is not the one that was agreed on", where=where,
                    expected=of.table, found=digest(data).hex(), remedy=DAMAGE_REMEDY,
                )  # fmt: skip
            return data
        return None

    def _placed(self, numbers: Iterable[int]) -> Iterator[tuple[Key, Place]]:
        """What lies in these files; of items that every rank has for itself, this one's."""
        names = {record.name for record in self.commit.items}
        for number in numbers:
            file = self.files[number]
            for entry in file.header.tensors:
                stored = stored_in(file.header, entry)
                if stored.item in self.commit.left_out:
                    continue  # it shares a file with those that were not
                if stored.item not in names:
                    raise Corrupt(
                        "a tensor of an unknown item", where=file.where, found=repr(entry.name)
                    )
                if stored.item not in self.per_rank or file.record.rank == self._rank:
                    self._check_spec(stored, file.where)
                    place = Place(number, entry.start, entry.stop, stored.box)
                    yield (stored.item, stored.tensor), place

    def _check_spec(self, stored: StoredBox, where: str) -> None:
        """Note what a tensor is, and see that all its parts say the same of it."""
        spec = stored.spec
        known = self._specs.setdefault((stored.item, stored.tensor), spec)
        if known != spec:
            raise Corrupt(
                "the parts of a tensor differ", where=where,
                expected=f"{known} for {stored.name}", found=str(spec), remedy=DAMAGE_REMEDY,
            )  # fmt: skip

    def _item(self, name: str, kind: str) -> StoredItem:
        tensors = {tensor: spec for (item, tensor), spec in self._specs.items() if item == name}
        rank = self._rank if name in self.per_rank else None
        trees = list(self.objects(tree_name(name), rank))
        if not trees:
            raise Corrupt(
                "the tree of an item is missing", where=self.folder, expected=tree_name(name)
            )
        return decode_item(trees, name=name, kind=kind, tensors=tensors)

    def objects(self, name: str, rank: int | None = None) -> Iterator[tuple[bytes, str]]:
        """The objects of that name in the open files of a rank, or of all, and where they lie."""
        for file in self.files:
            for entry in file.header.objects:
                if entry.name == name and rank in (None, file.record.rank):
                    yield file.read_object(entry), f"{file.where}, object {name}"


def _is_shared(record: FileRecord) -> bool:
    """Whether a file is one of those in which objects lie."""
    return record.name.rpartition("/")[2].startswith(f"{SHARED_FILE}-r")


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
    except (Mismatch, Usage, ValueError, TypeError, KeyError, IndexError) as error:
        raise Corrupt(
            "the tables of the ranks make no sense", where=where, found=str(error),
            remedy=DAMAGE_REMEDY,
        ) from error  # fmt: skip
