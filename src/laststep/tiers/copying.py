"""Copy committed checkpoints of a run from one store to another, verified, in bounded memory.

A copy has the name and the bytes of its original: data files, indexes, and last, by create-only,
`manifest.json`. Until then its folder is an attempt with a file `copying.lock` in it,
which no reader takes for a checkpoint and no writer cleans up; whoever copies again keeps the files
there that are right. Of some items alone a copy is an excerpt, with indexes and a manifest of its own. Knows
nothing of torch, lineage or retention. One thread calls a `Copier`.
"""

from __future__ import annotations

import contextlib
import logging
from contextlib import closing
from typing import TYPE_CHECKING

from laststep.catalog import decision
from laststep.catalog.indexes import name_of, read_index
from laststep.catalog.names import PIN_NAME, copying_name, is_copying_name
from laststep.errors import Corrupt, Exists, NotFound, StorageFailed
from laststep.format.manifest import Abort, Commit
from laststep.tiers.bringing import Bringing, Moved
from laststep.tiers.links import Links
from laststep.tiers.originals import Originals
from laststep.tiers.records import Records

if TYPE_CHECKING:
    from collections.abc import Sequence

    from laststep.format.index import Index
    from laststep.storage.store import Lock
    from laststep.tiers.bringing import CopyRoute

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

        `NotFound` where it was deleted meanwhile and `Corrupt` where it is damaged: then nothing of
        it stays at the target. After any other error, and where it is stopped (`Aborted`), what was
        copied stays for the next time. `Exists` where another checkpoint has its name, or somebody
        else is copying it; `Usage` where the target is another run.
        """
        if self.is_there(folder):
            return None
        try:
            moved = self.bring(folder)
            self.commit(folder)
        except (Corrupt, NotFound) as error:
            # Somebody else may have copied it meanwhile: what is committed stays.
            if isinstance(decision.abort(self._target, folder, error.what), Abort):
                self._target.delete_folder(folder)
            gone = decision.deleted(self._source, folder)
            if gone is not None:
                raise gone from error
            raise
        return moved

    def is_there(self, folder: str) -> bool:
        """Whether the target has that very checkpoint; `Exists` where it has another."""
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
                with contextlib.suppress(Exists):
                    self._target.make_folder(f"{folder}/{inner}")
            there = self._sizes(folder, names)
            for rank in wanted:  # of a copy with other items, that was interrupted
                for name in self._originals.dropped(folder, commit, rank) & there.keys():
                    self._target.delete(f"{folder}/{name}")
            moved = Bringing(self._route, self._links, folder, parsed, there).all()
            for rank, (_, data) in indexes.items():
                name = name_of(commit, rank)
                if name in there:
                    self._target.delete(f"{folder}/{name}")
                self._target.create(f"{folder}/{name}", data)
            return moved

    def is_under_way(self, folder: str) -> bool:
        """Whether somebody brings files of it to the target now."""
        return bool(self._under_way(folder))

    def commit(self, folder: str) -> None:
        """Make a checkpoint visible at the target whose data files have all been brought."""
        commit, data = self._originals.manifest(folder)
        indexes = [
            read_index(self._target, folder, commit, rank) for rank in range(commit.index_count)
        ]
        self._check_all_there(folder, commit, indexes)
        self._records.check()
        decision.publish(self._target, folder, data)
        for index in indexes:
            self._links.add(folder, index.files)
        if PIN_NAME in self._source.file_names(folder):
            with contextlib.suppress(Exists):
                self._target.create(f"{folder}/{PIN_NAME}", b"")
        for name in filter(is_copying_name, self._target.file_names(folder)):
            self._target.delete(f"{folder}/{name}")
        _log.info(
            "copied %s from %s to %s (%d bytes)", folder, self._source.url, self._target.url,
            commit.size_bytes,
        )  # fmt: skip

    # Steps of the above

    def _begin(self, folder: str, first_rank: int | None) -> Lock:
        """Make the folder, or take up that of an interrupted copy; nobody else copies meanwhile
        what this does: whoever copies all of it needs all ranks to be done."""
        if isinstance(decision.read_manifest(self._target, folder), Abort):
            self._target.delete_folder(folder)
        with contextlib.suppress(Exists):
            self._target.make_folder(folder)
        mine, whole = copying_name(first_rank), copying_name(None)
        try:
            lock = self._target.lock(f"{folder}/{mine}")
        except Exists:
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

    def _busy(self, folder: str, name: str) -> Exists:
        return Exists(
            "somebody else is copying this checkpoint", where=f"{self._target.url}/{folder}",
            found=f"{name} is locked", remedy="wait for that copy to end",
        )  # fmt: skip

    def _check_all_there(self, folder: str, commit: Commit, indexes: Sequence[Index]) -> None:
        names = _names(commit, indexes)
        sizes = self._sizes(folder, names)
        for file in (file for index in indexes for file in index.files):
            if sizes.get(file.name) != file.size_bytes:
                raise StorageFailed(
                    "cannot commit a copy that is not whole",
                    where=f"{self._target.url}/{folder}/{file.name}",
                    expected=f"{file.size_bytes} bytes", found=f"{sizes.get(file.name, 'no file')}",
                    remedy="copy again: it goes on from there",
                )  # fmt: skip
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
