"""A checkpoint as it is to be brought elsewhere: all of it, or an excerpt of some items.

Owned by one `Copier`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from laststep.catalog import decision
from laststep.catalog.indexes import read_bytes
from laststep.errors import Exists, NotFound
from laststep.format import index as index_format
from laststep.format import manifest
from laststep.format.manifest import Commit, Written
from laststep.plan.excerpts import excerpt_of, is_excerpt, left_out_of, only_items
from laststep.terms import MANIFEST_NAME

if TYPE_CHECKING:
    from collections.abc import Sequence

    from laststep.format.index import Index
    from laststep.storage.store import Store


class Originals:
    """The checkpoints of a store, with all their items or with these."""

    def __init__(self, store: Store, items: Sequence[str] | None) -> None:
        self._store = store
        self._items = items

    def commit(self, folder: str) -> Commit:
        """What the manifest of the original says."""
        commit = decision.read(self._store, folder)
        if not isinstance(commit, Commit):
            raise NotFound("there is no such checkpoint", where=f"{self._store.url}/{folder}")
        return commit

    def index(self, folder: str, commit: Commit, rank: int) -> tuple[Index, bytes]:
        """The index of a rank as it is to be there, and its bytes."""
        data, where = read_bytes(self._store, folder, commit, rank)
        index = index_format.decode(data, where=where)
        if self._is_whole(commit):
            return index, data
        index = only_items(index, self._items or (), f"{self._store.url}/{folder}")
        return index, index_format.encode(index)

    def dropped(self, folder: str, commit: Commit, rank: int) -> frozenset[str]:
        """The files of a rank that are left out."""
        if self._is_whole(commit):
            return frozenset()
        data, where = read_bytes(self._store, folder, commit, rank)
        every = {file.name for file in index_format.decode(data, where=where).files}
        kept = {file.name for file in self.index(folder, commit, rank)[0].files}
        return frozenset(every - kept)

    def manifest(self, folder: str) -> tuple[Commit, bytes]:
        """The commit as it is to be there, and the bytes of its manifest."""
        commit = self.commit(folder)
        if self._is_whole(commit):
            return commit, self._manifest(self._store, folder)
        written = Written()
        for rank in range(commit.index_count):
            written = written.plus(index_format.written_of(*self.index(folder, commit, rank)))
        excerpt = excerpt_of(commit, self._items or (), written)
        return excerpt, manifest.encode(excerpt)

    def is_at(self, target: Store, folder: str) -> bool:
        """Whether the target has just that; `Exists` where it has something else of that name."""
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
            raise Exists(
                "another checkpoint has this name", where=f"{target.url}/{folder}",
                expected=f"a copy of {self._store.url}/{folder}{_without(left_out)}",
                found=f"another manifest{_without(there.left_out)}", remedy="copy to another place",
            )  # fmt: skip
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
