"""The last checkpoint as the base of a save: unchanged blocks are not written again.

Decides which files of the base may still be used. A file that few blocks are needed from, or that
many checkpoints share, is *retired*: the blocks still needed from it are written again. The others
become *shared files*, which also get a name in the folder of the save (`SharedFiles`). Does not
know how blocks are written.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import msgspec

from laststep.catalog.attempt import parse_folder, read_decision, read_index
from laststep.codecs.digests import DIGEST_BYTES
from laststep.errors import LaststepError
from laststep.format.index import Index
from laststep.format.manifest import Commit

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from laststep.format.index import BlockRef, StoredFile, StoredLayout
    from laststep.format.layout import FileLayout
    from laststep.storage.store import Store

MOST_FILES = 16
"""Maximum number of earlier files that an index refers to: a restore opens them all."""
MAX_SHARERS = 16
"""Maximum number of checkpoints that share a file before its blocks are written again: this limits
the loss from one damaged file. See docs/guides/smaller.md."""
LEAST_LIVE = 0.25
"""A file that is needed less than this costs more space than it saves."""
MOST_HELD = 1.75
"""Maximum size of all files together, as a multiple of the bytes needed from them."""
MOST_CHANGED = 0.75
"""A layout with a larger changed fraction is written whole and depends on no other checkpoint."""
LEAST_BYTES = 64 << 10
"""A smaller layout is always written: a shared file also costs a name, and a file to open."""


class BaseLayout:
    """A layout of the last checkpoint whose blocks a save may reuse."""

    def __init__(self, stored: StoredLayout, changed: frozenset[int] | None) -> None:
        """`changed` are the blocks that had changed when it was written; None if unknown."""
        self.stored = stored
        self._changed = changed
        self.refs = stored.refs()

    def reusable(self, retired: frozenset[int]) -> dict[int, BlockRef]:
        """Return the blocks that need no `retired` file."""
        return {
            number: ref
            for number, ref in enumerate(self.refs)
            if ref.file not in retired and (ref.base is None or ref.base.block.file not in retired)
        }

    def same(self, first: int, digests: bytes) -> list[bool]:
        """Compare the digests of blocks, starting at block `first`, with the stored ones."""
        at = first * DIGEST_BYTES
        known = self.stored.digests[at : at + len(digests)]
        return [
            known[at : at + DIGEST_BYTES] == digests[at : at + DIGEST_BYTES]
            for at in range(0, len(digests), DIGEST_BYTES)
        ]

    def likely_change(self, first: int, digests: bytes) -> float:
        """Estimate the changed fraction of the layout from the digests of some of its blocks,
        starting at `first`; 0 without any. Blocks elsewhere that changed recently are assumed to
        change again at the rate observed here; if none did, these are the only evidence."""
        here = dict(enumerate(self.same(first, digests), first))
        if not here:
            return 0.0
        changed, recent = list(here.values()).count(False), self._changed
        if not recent:
            return changed / len(here)
        again = [known for number, known in here.items() if number in recent]
        share = again.count(False) / len(again) if again else 1.0
        return (changed + share * len(recent - here.keys())) / len(self.refs)


class Base(msgspec.Struct, frozen=True):
    """Index of the last checkpoint, and the blocks that had changed in it."""

    index: Index
    folder: str
    changed: dict[str, frozenset[int]] = {}
    """The blocks that had changed when it was written, by layout, where known."""

    def layout(self, layout: FileLayout) -> BaseLayout | None:
        """Return the same layout in the last checkpoint; None if absent, different or too small."""
        stored = self.index.layout(layout.name)
        if stored is None or stored.layout != layout or layout.tensor_bytes < LEAST_BYTES:
            return None
        return BaseLayout(stored, self.changed.get(layout.name))

    def name_elsewhere(self, file: StoredFile) -> str | None:
        """Return the name of a file in folders that share it; None if no attempt wrote it."""
        at = parse_folder(file.origin or self.folder)
        return None if at is None else file.shared_name(at.term, at.attempt)

    def shared_too_often(self) -> frozenset[int]:
        """Files that have reached `MAX_SHARERS`: even a save without changes may not share them."""
        return frozenset(
            number for number, file in enumerate(self.index.files) if file.sharers + 1 > MAX_SHARERS
        )

    def retired(self, layouts: Sequence[BaseLayout]) -> frozenset[int]:
        """Return the files whose blocks these layouts must not reuse but write again."""
        live = [0] * len(self.index.files)
        for layout in layouts:
            for ref in layout.refs:
                live[ref.file] += ref.size_bytes
                if ref.base is not None:
                    live[ref.base.block.file] += ref.base.block.size_bytes
        sizes = [file.size_bytes for file in self.index.files]
        out = set(self.shared_too_often())
        out.update(number for number, size in enumerate(sizes) if live[number] < LEAST_LIVE * size)
        used = sorted(
            set(range(len(sizes))) - out, key=lambda number: live[number] / max(sizes[number], 1)
        )
        while len(used) > MOST_FILES or sum(sizes[n] for n in used) > MOST_HELD * sum(live):
            out.add(used.pop(0))  # the least used file
        return frozenset(out)


class SharedFiles:
    """Links to the files of a base in the folder of a save: once linked there, they survive the
    deletion of the base. Thread-safe."""

    def __init__(self, store: Store, folder: str, base: Base) -> None:
        self._store = store
        self._folder = folder
        self._base = base
        self._lock = threading.Lock()
        self._names: dict[int, str] | None = None
        """Names of the links by file number; None before `link`, empty if a link failed."""

    def link(self) -> bool:
        """Link all files that may still be shared, once; return False if that is impossible."""
        with self._lock:
            if self._names is None:
                self._names = self._link_all()
            return bool(self._names)

    def _link_all(self) -> dict[int, str]:
        base, names = self._base, dict[int, str]()
        often = base.shared_too_often()
        for number, file in enumerate(base.index.files):
            if number in often:
                continue
            name = base.name_elsewhere(file)
            if name is None or not self._link(f"{base.folder}/{file.name}", name, file.size_bytes):
                for linked in names.values():
                    self._store.delete(f"{self._folder}/{linked}")
                return {}
            names[number] = name
        return names

    def settle(self, needed: Mapping[int, str | None]) -> dict[int, StoredFile]:
        """Unlink the files that are not `needed`; return the others by their numbers in the base.
        One that is exactly the data file of a layout gets its name, which other tools know."""
        found: dict[int, StoredFile] = {}
        for number, name in (self._names or {}).items():
            file, last = self._base.index.files[number], name
            if number in needed:
                own, source = needed[number], f"{self._folder}/{name}"
                if own == file.own_name and self._link(source, own, file.size_bytes):
                    last = own
                found[number] = msgspec.structs.replace(
                    file,
                    name=last,
                    origin=file.origin or self._base.folder,
                    sharers=file.sharers + 1,
                )
            if number not in needed or last != name:
                self._store.delete(f"{self._folder}/{name}")
        return found

    def _link(self, source: str, name: str, size_bytes: int) -> bool:
        """Link a file and check that it has its original size."""
        path = f"{self._folder}/{name}"
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
        return there_bytes == size_bytes


def of_checkpoint(store: Store, folder: str, rank: int) -> Base | None:
    """Return a checkpoint as the base of this rank's next save; None if its index is unreadable."""
    try:
        commit = read_decision(store, folder)
        if not isinstance(commit, Commit) or rank >= commit.ranks:
            return None
        return Base(read_index(store, folder, commit, rank), folder)
    except LaststepError:
        return None
