"""Copy committed checkpoints of a run from one store to another, verified, in bounded memory.

A copy has the name and the bytes of its original: data files, indexes, and last, by create-only,
`manifest.json`. Until then its folder is an attempt with a file `copying.lock` in it, which no
reader takes for a checkpoint and no writer cleans up; whoever copies again keeps the files there
that are right. Of some items alone a copy is an excerpt, with indexes and a manifest of its own.
Knows nothing of torch, lineage or retention. One thread calls a `Copier`.
"""

from __future__ import annotations

import contextlib
import logging
from contextlib import closing
from typing import TYPE_CHECKING

from laststep.catalog import decision
from laststep.catalog.indexes import name_of, read_bytes, read_indexes
from laststep.catalog.lineage import PIN_NAME, copying_name, is_copying_name
from laststep.errors import AlreadyExistsError, CorruptError, NotFoundError, StorageError
from laststep.format import index as index_format
from laststep.format import manifest
from laststep.format.index import Index
from laststep.format.manifest import Abort, Commit, WrittenIndexes
from laststep.plan.files import excerpt_of, is_excerpt, left_out_of, only_items
from laststep.terms import MANIFEST_NAME
from laststep.tiers.bringing import Bringing, Links, Moved
from laststep.tiers.records import Records

if TYPE_CHECKING:
    from collections.abc import Sequence

    from laststep.storage.store import Lock, Store
    from laststep.tiers.bringing import CopyRoute


class Originals:
    """The checkpoints of a store, with all their items or with these."""

    def __init__(self, store: Store, items: Sequence[str] | None) -> None:
        self._store = store
        self._items = items
        self._last = "", -1, Index(), b""
        """The index that was read last, its folder and rank: an excerpt needs each twice."""

    def commit(self, folder: str) -> Commit:
        """What the manifest of the original says."""
        commit = decision.read(self._store, folder)
        if not isinstance(commit, Commit):
            raise NotFoundError("there is no such checkpoint", where=f"{self._store.url}/{folder}")
        return commit

    def index(self, folder: str, commit: Commit, rank: int) -> tuple[Index, bytes]:
        """The index of a rank as it is to be there, and its bytes."""
        index, data = self._original(folder, commit, rank)
        if self._is_whole(commit):
            return index, data
        index = only_items(index, self._items or (), f"{self._store.url}/{folder}")
        return index, index_format.encode(index)

    def dropped(self, folder: str, commit: Commit, rank: int) -> frozenset[str]:
        """The files of a rank that are left out."""
        if self._is_whole(commit):
            return frozenset()
        every = {file.name for file in self._original(folder, commit, rank)[0].files}
        kept = {file.name for file in self.index(folder, commit, rank)[0].files}
        return frozenset(every - kept)

    def _original(self, folder: str, commit: Commit, rank: int) -> tuple[Index, bytes]:
        """The index of a rank as it is stored, and its bytes."""
        if self._last[:2] != (folder, rank):
            data, where = read_bytes(self._store, folder, commit, rank)
            self._last = folder, rank, index_format.decode(data, where=where), data
        return self._last[2:]

    def manifest(self, folder: str) -> tuple[Commit, bytes]:
        """The commit as it is to be there, and the bytes of its manifest."""
        commit = self.commit(folder)
        if self._is_whole(commit):
            return commit, self._manifest(self._store, folder)
        written = WrittenIndexes()
        for rank in range(commit.index_count):
            written = written.plus(index_format.written_of(*self.index(folder, commit, rank)))
        excerpt = excerpt_of(commit, self._items or (), written)
        return excerpt, manifest.encode(excerpt)

    def is_at(self, target: Store, folder: str) -> bool:
        """Whether the target has just that; `AlreadyExistsError` where it has something else of
        that name."""
        there = decision.read_manifest(target, folder)
        if not isinstance(there, Commit):
            return False
        commit = None if self._items is None else self.commit(folder)
        left_out = () if commit is None else self._left_out(commit)
        if commit is not None and left_out != commit.left_out:
            same = is_excerpt(there, commit, left_out)
        else:
            same = self._manifest(self._store, folder) == self._manifest(target, folder)
        if not same:
            raise AlreadyExistsError(
                "another checkpoint has this name",
                where=f"{target.url}/{folder}",
                expected=f"a copy of {self._store.url}/{folder}{_without(left_out)}",
                found=f"another manifest{_without(there.left_out)}",
                remedy="copy to another place",
            )
        return True

    def _is_whole(self, commit: Commit) -> bool:
        """Whether all that a checkpoint has is to be brought."""
        return self._left_out(commit) == commit.left_out

    def _left_out(self, commit: Commit) -> tuple[str, ...]:
        return commit.left_out if self._items is None else left_out_of(commit, self._items)

    @staticmethod
    def _manifest(store: Store, folder: str) -> bytes:
        return store.read(f"{folder}/{MANIFEST_NAME}", limit_bytes=decision.MANIFEST_LIMIT_BYTES)


def _without(items: Sequence[str]) -> str:
    return f" without {', '.join(items)}" if items else ""


_log = logging.getLogger(__name__)


class Copier:
    """Copies checkpoints of one run, one after the other: with all their items, or with these."""

    def __init__(self, route: CopyRoute, items: Sequence[str] | None = None) -> None:
        self._route = route
        self._source = route.source
        self._target = route.target
        self._originals = Originals(route.source, items)
        self._records = Records(route.source, route.target)
        self._links = Links(route.target)

    def copy(self, folder: str) -> Moved | None:
        """Copy one checkpoint; None where it is there already.

        `NotFoundError` where it was deleted meanwhile and `CorruptError` where it is damaged: then
        nothing of it stays at the target. After any other error, and where it is stopped
        (`AbortedError`), what was copied stays for the next time. `AlreadyExistsError` where
        another checkpoint has its name, or somebody else is copying it; `UsageError` where the
        target is another run."""
        if self.is_there(folder):
            return None
        try:
            moved = self.bring(folder)
            self.commit(folder)
        except (CorruptError, NotFoundError) as error:
            # Somebody else may have copied it meanwhile: what is committed stays.
            if isinstance(decision.abort(self._target, folder, error.what), Abort):
                self._target.delete_folder(folder)
            gone = decision.deleted(self._source, folder)
            if gone is not None:
                raise gone from error
            raise
        return moved

    def is_there(self, folder: str) -> bool:
        """Whether the target has that very checkpoint; `AlreadyExistsError` where it has
        another."""
        return self._originals.is_at(self._target, folder)

    def bring(self, folder: str, ranks: Sequence[int] | None = None) -> Moved:
        """Copy the data files, of all ranks or of these, without a commit. Several processes may
        bring those of different ranks at once; one of them commits when all are done."""
        commit = self._originals.commit(folder)
        # Who commits also brings what a coordinator has written, which is of no rank.
        wanted = list(range(commit.index_count) if ranks is None else ranks)
        if ranks is not None and 0 in ranks:
            wanted += range(commit.ranks, commit.index_count)
        indexes = {rank: self._originals.index(folder, commit, rank) for rank in wanted}
        self._records.bring(commit.epoch)
        with closing(self._begin(folder, None if ranks is None else min(ranks))):
            if isinstance(decision.read_manifest(self._target, folder), Commit):
                return Moved()  # somebody else was faster
            parsed = [index for index, _ in indexes.values()]
            names = _names(commit, parsed)
            for inner in _inner_folders(names):
                with contextlib.suppress(AlreadyExistsError):
                    self._target.make_folder(f"{folder}/{inner}")
            there = self._sizes(folder, names)
            for rank in wanted:  # of a copy with other items, that was interrupted
                for name in self._originals.dropped(folder, commit, rank) & there.keys():
                    self._target.delete(f"{folder}/{name}")
            moved = Bringing(self._route, self._links, folder, parsed, there).all()
            for rank, (_, data) in indexes.items():
                name = name_of(commit, rank)
                self._bring_index(f"{folder}/{name}", data, there.get(name))
            return moved

    def _bring_index(self, path: str, data: bytes, there_bytes: int | None) -> None:
        """Put an index there; the same one stays, which somebody may be reading."""
        if there_bytes == len(data) and self._target.read(path, limit_bytes=len(data)) == data:
            return
        if there_bytes is not None:
            self._target.delete(path)
        self._target.create(path, data)

    def is_under_way(self, folder: str) -> bool:
        """Whether somebody brings files of it to the target now."""
        return bool(self._under_way(folder))

    def commit(self, folder: str) -> None:
        """Make a checkpoint visible at the target whose data files have all been brought."""
        commit, data = self._originals.manifest(folder)
        indexes = self._indexes_there(folder, commit)
        self._check_all_there(folder, commit, indexes)
        self._records.check()
        decision.publish(self._target, folder, data)
        for index in indexes:
            self._links.add(folder, index.files)
        if PIN_NAME in self._source.file_names(folder):
            with contextlib.suppress(AlreadyExistsError):
                self._target.create(f"{folder}/{PIN_NAME}", b"")
        for name in filter(is_copying_name, self._target.file_names(folder)):
            self._target.delete(f"{folder}/{name}")
        _log.info(
            "copied %s from %s to %s (%d bytes)",
            folder,
            self._source.url,
            self._target.url,
            commit.size_bytes,
        )

    # Steps of the above

    def _begin(self, folder: str, first_rank: int | None) -> Lock:
        """Make the folder, or take up that of an interrupted copy; nobody else copies meanwhile
        what this does: whoever copies all of it needs all ranks to be done."""
        if isinstance(decision.read_manifest(self._target, folder), Abort):
            self._target.delete_folder(folder)
        with contextlib.suppress(AlreadyExistsError):
            self._target.make_folder(folder)
        mine, whole = copying_name(first_rank), copying_name(None)
        try:
            lock = self._target.lock(f"{folder}/{mine}")
        except AlreadyExistsError:
            raise self._busy(folder, mine) from None
        for name in self._under_way(folder):
            if name != mine and whole in (name, mine):
                lock.close()
                raise self._busy(folder, name)
        return lock

    def _under_way(self, folder: str) -> list[str]:
        """The locks of those who copy that checkpoint now."""
        names = filter(is_copying_name, self._target.file_names(folder))
        return [name for name in names if self._target.is_locked(f"{folder}/{name}")]

    def _busy(self, folder: str, name: str) -> AlreadyExistsError:
        return AlreadyExistsError(
            "somebody else is copying this checkpoint",
            where=f"{self._target.url}/{folder}",
            found=f"{name} is locked",
            remedy="wait for that copy to end",
        )

    def _indexes_there(self, folder: str, commit: Commit) -> list[Index]:
        """The indexes of a checkpoint that have been brought: all of them."""
        names = [name_of(commit, rank) for rank in range(commit.index_count)]
        sizes = self._sizes(folder, names)
        for name in names:
            if name not in sizes:
                raise self._not_whole(folder, name, "an index", "no file")
        return read_indexes(self._target, folder, commit)

    def _not_whole(self, folder: str, name: str, expected: str, found: str) -> StorageError:
        return StorageError(
            "cannot commit a copy that is not whole",
            where=f"{self._target.url}/{folder}/{name}",
            expected=expected,
            found=found,
            remedy="copy again: it goes on from there",
        )

    def _check_all_there(self, folder: str, commit: Commit, indexes: Sequence[Index]) -> None:
        names = _names(commit, indexes)
        sizes = self._sizes(folder, names)
        for file in (file for index in indexes for file in index.files):
            if sizes.get(file.name) != file.size_bytes:
                found = str(sizes.get(file.name, "no file"))
                raise self._not_whole(folder, file.name, f"{file.size_bytes} bytes", found)
        for inner in _inner_folders(names):
            self._target.sync_folder(f"{folder}/{inner}")

    def _sizes(self, folder: str, names: Sequence[str]) -> dict[str, int]:
        """The files in the folder at the target, and in those within it that these lie in."""
        listed = {"": self._target.list(folder)}
        for inner in _inner_folders(names):
            listed[f"{inner}/"] = self._target.list(f"{folder}/{inner}")
        return {
            place + entry.name: entry.size_bytes
            for place, entries in listed.items()
            for entry in entries
            if not entry.is_folder
        }


def _names(commit: Commit, indexes: Sequence[Index]) -> list[str]:
    """The names of some indexes, and of their data files."""
    files = [file.name for index in indexes for file in index.files]
    return [*files, *(name_of(commit, index.rank) for index in indexes)]


def _inner_folders(names: Sequence[str]) -> list[str]:
    """The folders within that of a checkpoint that these files lie in."""
    return sorted({name.rpartition("/")[0] for name in names} - {""})
