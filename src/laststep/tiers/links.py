"""Which files of the target are those that a checkpoint needs: they are linked, not copied again.

A file is known by what manifests say (`catalog.sharing`), and only committed checkpoints count:
what they hold was verified when it came. Owned by one `Copier`.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from laststep.catalog import decision
from laststep.catalog.indexes import read_indexes
from laststep.catalog.listing import Scanner
from laststep.catalog.sharing import FileId, file_id
from laststep.errors import Corrupt, LaststepError, NotFound
from laststep.format.manifest import Commit

if TYPE_CHECKING:
    from collections.abc import Iterable

    from laststep.format.index import StoredFile
    from laststep.storage.store import Store


class Links:
    """The files of the checkpoints at the target that others may share."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._places: dict[FileId, str] = {}
        self._looked_into: set[str] = set()
        self._looked = False
        self._works = True

    def link(self, file: StoredFile, folder: str) -> bool:
        """Give a file that is there a name in this folder too; False where there is none, or the
        store has no links."""
        self._look(file)
        place = self._places.get(file_id(file, folder))
        if place is None or not self._works:
            return False
        try:
            self._works = self._store.link(place, f"{folder}/{file.name}")
        except NotFound:  # deleted meanwhile
            return False
        return self._works

    def add(self, folder: str, files: Iterable[StoredFile]) -> None:
        """Note the files of a checkpoint that is committed."""
        self._looked_into.add(folder)
        for file in files:
            self._places.setdefault(file_id(file, folder), f"{folder}/{file.name}")

    def _look(self, file: StoredFile) -> None:
        """Look once through the checkpoints that share anything; and into that for which the file
        was written, which may share nothing that it knows of."""
        if not self._looked:
            self._looked = True
            for name in Scanner(self._store).names():
                self._add_stored(name.folder, only_sharing=True)
        if file.origin and file.origin not in self._looked_into:
            self._add_stored(file.origin, only_sharing=False)

    def _add_stored(self, folder: str, *, only_sharing: bool) -> None:
        with contextlib.suppress(LaststepError):  # what cannot be read shares nothing
            decided = decision.read(self._store, folder)
            if isinstance(decided, Commit) and (decided.shared_bytes or not only_sharing):
                with contextlib.suppress(Corrupt, NotFound):
                    for index in read_indexes(self._store, folder, decided):
                        self.add(folder, index.files)
