"""A checkpoint as it is to be brought elsewhere: all of it, or an excerpt of some items.

Of an excerpt the headers of data files say what is needed. Owned by one `Copier`.
"""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, NamedTuple

from laststep.catalog import decision, groups
from laststep.errors import Exists, NotFound
from laststep.format import manifest
from laststep.format.manifest import Commit
from laststep.plan.excerpts import HeldItems, is_excerpt, left_out_of, needed_files, only_items
from laststep.read.entries import item_of_object, stored_in
from laststep.read.files import open_file
from laststep.terms import MANIFEST_NAME

if TYPE_CHECKING:
    from collections.abc import Sequence

    from laststep.format.manifest import FileRecord
    from laststep.storage.store import Store


class Cargo(NamedTuple):
    """What is to be brought of a checkpoint."""

    commit: Commit
    """As it is stored, with all its items."""
    files: tuple[FileRecord, ...]
    dropped: frozenset[str] = frozenset()
    """Files of it that are left out."""


class Originals:
    """The checkpoints of a store, with all their items or with these."""

    def __init__(self, store: Store, items: Sequence[str] | None) -> None:
        self._store = store
        self._items = items
        self._needed: dict[tuple[str, Sequence[int] | None], frozenset[str]] = {}
        """The files that were found to be needed, by folder and ranks: who commits asks often."""

    def read(self, folder: str, ranks: Sequence[int] | None = None) -> Cargo:
        """What there is to bring, of all ranks or of these."""
        commit = self._commit(folder)
        files = groups.files_of(self._store, folder, commit, ranks)
        if self._left_out(commit) == commit.left_out:
            return Cargo(commit, files)
        key = folder, None if ranks is None else tuple(ranks)
        if key not in self._needed:
            self._needed[key] = needed_files(
                commit, self._held(folder, files), self._items or (), f"{self._store.url}/{folder}"
            )
        needed = self._needed[key]
        return Cargo(
            commit,
            tuple(file for file in files if file.name in needed),
            frozenset(file.name for file in files) - needed,
        )

    def documents(self, folder: str, cargo: Cargo) -> tuple[Commit, dict[str, bytes], bytes]:
        """The commit as it is there, the manifests of its groups by name, and its manifest."""
        commit = cargo.commit
        if self._left_out(commit) != commit.left_out:
            commit, of_groups = only_items(commit, cargo.files, self._items or ())
            return commit, of_groups, manifest.encode(commit)
        of_groups = {
            record.name: self._store.read(
                f"{folder}/{record.name}", limit_bytes=groups.GROUP_LIMIT_BYTES
            )
            for record in commit.groups
        }
        return commit, of_groups, self._manifest(self._store, folder)

    def is_at(self, target: Store, folder: str) -> bool:
        """Whether the target has just that; `Exists` where it has something else of that name."""
        there = decision.read_manifest(target, folder)
        if not isinstance(there, Commit):
            return False
        commit = None if self._items is None else self._commit(folder)
        left_out = () if commit is None else self._left_out(commit)
        if commit is not None and left_out != commit.left_out:
            same = is_excerpt(there, commit, left_out)
        else:
            same = self._manifest(self._store, folder) == self._manifest(target, folder)
        if not same:
            raise Exists(
                "another checkpoint has this name", where=f"{target.url}/{folder}",
                expected=f"a copy of {self._store.url}/{folder}{_without(left_out)}",
                found=f"another manifest{_without(there.left_out)}", remedy="copy to another place",
            )  # fmt: skip
        return True

    def _left_out(self, commit: Commit) -> tuple[str, ...]:
        return commit.left_out if self._items is None else left_out_of(commit, self._items)

    def _commit(self, folder: str) -> Commit:
        commit = decision.read(self._store, folder)
        if not isinstance(commit, Commit):
            raise NotFound("there is no such checkpoint", where=f"{self._store.url}/{folder}")
        return commit

    @staticmethod
    def _manifest(store: Store, folder: str) -> bytes:
        return store.read(f"{folder}/{MANIFEST_NAME}", limit_bytes=decision.MANIFEST_LIMIT_BYTES)

    def _held(self, folder: str, files: Sequence[FileRecord]) -> list[HeldItems]:
        """What each file holds that is not only lent to others."""
        held, among = [], {record.name: record for record in files}
        for record in files:
            if record.lent:
                continue
            with closing(open_file(self._store, folder, record, among).sound()) as file:
                items = {stored_in(file.header, entry).item for entry in file.header.tensors}
                items.update(item_of_object(entry.name) or "" for entry in file.header.objects)
                masters = (m.record.name for m in file.masters)
                lent = (one.record.name for one in file.files[1:])
                held.append(HeldItems(record.name, frozenset(items), tuple(lent), tuple(masters)))
        return held


def _without(items: Sequence[str]) -> str:
    return f" without {', '.join(items)}" if items else ""
