"""The last checkpoint as the base of a save: blocks that did not change are not written again.

Decides which of its files may still be used. A file that few blocks are needed of, or that many
checkpoints share, is *retired*: what lies in it is written again. Knows nothing of how blocks are
written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

from laststep.catalog import decision
from laststep.catalog.lineage import parse_folder
from laststep.codecs.digests import DIGEST_BYTES
from laststep.errors import LaststepError
from laststep.format.manifest import Commit
from laststep.terms import BLOCK_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from laststep.format.index import BlockRef, Index, StoredFile, StoredLayout
    from laststep.format.layout import FileLayout
    from laststep.storage.store import Store

MOST_FILES = 16
"""An index draws on at most so many files of earlier checkpoints: a restore opens them all."""
MAX_SHARERS = 16
"""So many checkpoints at most share a file before its blocks are written anew: what one damaged
file can take with it. See docs/guides/smaller.md."""
LEAST_LIVE = 0.25
"""A file of which a smaller share is still needed costs more room than it saves."""
MOST_HELD = 1.75
"""All files together may take at most so many times what is needed of them."""
MOST_CHANGED = 0.75
"""A layout of which more has changed is written whole: it then stands alone."""
LEAST_BYTES = 64 << 10
"""A smaller layout is always written: a shared file is a name, and a file to open, too."""


class BaseLayout:
    """A layout of the last checkpoint, of which a save may use blocks again."""

    def __init__(
        self, stored: StoredLayout, index: Index, changed: frozenset[int] | None, *, overdue: bool
    ) -> None:
        """`changed` are the blocks that had changed when it was written; None: nobody knows.
        `overdue`: a save that changed blocks has put compaction off."""
        self.stored = stored
        self.changed_blocks = changed
        self.overdue = overdue
        self.refs = stored.refs()
        self.derived = (
            frozenset(n for n, ref in enumerate(self.refs) if index.is_derived(ref))
            if stored.derived
            else frozenset()
        )

    @property
    def changed(self) -> float | None:
        """The share of its stored blocks that had changed when it was written, where known."""
        if self.changed_blocks is None:
            return None
        return len(self.changed_blocks - self.derived) / max(len(self.refs) - len(self.derived), 1)

    def is_usable(self) -> bool:
        """Return whether a save may use blocks of it again."""
        return self.stored.layout.tensor_bytes >= LEAST_BYTES and len(self.derived) < len(self.refs)

    def needs(self, number: int) -> set[int]:
        """The files that a block lies in, and its base."""
        ref = self.refs[number]
        return {ref.file} if ref.base is None else {ref.file, ref.base.block.file}

    def same(self, first: int, digests: bytes) -> list[bool]:
        """Return of each block from that one on whether it is the one that there was."""
        at = first * DIGEST_BYTES
        known = self.stored.digests[at : at + len(digests)]
        return [
            known[at : at + DIGEST_BYTES] == digests[at : at + DIGEST_BYTES]
            for at in range(0, len(digests), DIGEST_BYTES)
        ]

    def likely_change(self, first: int, same: Sequence[bool]) -> float:
        """Estimate the share of the layout that has changed, by some of its blocks from `first` on.

        Elsewhere, as many of the blocks that changed the last time are taken to change again as did
        here. After a save of nothing new, these blocks are all that is known.
        """
        here = {n: known for n, known in enumerate(same, first) if n not in self.derived}
        recent = (self.changed_blocks or frozenset()) - self.derived
        changed = list(here.values()).count(False)
        if not recent:
            return changed / max(len(here), 1)
        again = [known for number, known in here.items() if number in recent]
        share = again.count(False) / len(again) if again else 1.0
        elsewhere = len(recent - here.keys())
        return (changed + share * elsewhere) / max(len(self.refs) - len(self.derived), 1)

    def seems_same(self, first: int, same: Sequence[bool]) -> bool:
        """Return whether nothing seems to have changed, by some blocks, from `first` on."""
        recent = self.changed_blocks or frozenset()
        return all(same) and (
            not self.overdue or not recent.isdisjoint(range(first, first + len(same)))
        )


class LayoutHistory(NamedTuple):
    """How a layout was written: see `BaseLayout`."""

    changed: frozenset[int] | None = None
    overdue: bool = False


class Base:
    """The index of the last checkpoint, and how its layouts were written."""

    def __init__(
        self, index: Index, folder: str, history: dict[str, LayoutHistory] | None = None
    ) -> None:
        self.index = index
        self.folder = folder
        self._history = history or {}
        self._layouts: dict[str, BaseLayout] = {}

    def layout(self, layout: FileLayout) -> BaseLayout | None:
        """The same layout in the last checkpoint; None where that had none, or another."""
        stored = self.index.layout(layout.name)
        if stored is None or stored.layout != layout:
            return None
        if layout.name not in self._layouts:
            changed, overdue = self._history.get(layout.name, LayoutHistory())
            self._layouts[layout.name] = BaseLayout(stored, self.index, changed, overdue=overdue)
        return self._layouts[layout.name]

    def name_elsewhere(self, file: StoredFile) -> str | None:
        """The name of a file of it in the folder of a checkpoint that shares it; None where its
        folder is not one of an attempt."""
        at = parse_folder(file.origin or self.folder)
        return None if at is None else file.shared_name(at.epoch, at.attempt)

    def shared_too_often(self) -> frozenset[int]:
        """The files that even a save of nothing new may not share any more."""
        return frozenset(
            number for number, file in enumerate(self.index.files) if file.sharers + 1 > MAX_SHARERS
        )

    def retired(self, layouts: Sequence[BaseLayout]) -> frozenset[int]:
        """The files of which these layouts use no blocks any more: what they need is written
        again."""
        live = [0] * len(self.index.files)
        for layout in layouts:
            for number, ref in enumerate(layout.refs):
                if number not in layout.derived:
                    live[ref.file] += ref.size_bytes
                    if ref.base is not None:
                        live[ref.base.block.file] += ref.base.block.size_bytes
        sizes = [file.size_bytes for file in self.index.files]
        out = set(self.shared_too_often())
        out.update(number for number, size in enumerate(sizes) if live[number] < LEAST_LIVE * size)
        used = sorted(
            set(range(len(sizes))) - out, key=lambda number: live[number] / max(sizes[number], 1)
        )
        while len(used) > MOST_FILES:
            out.add(used.pop(0))
        # The least used go, until what is left and what comes anew is little enough. What changed
        # the last time, and lies in the files of that save, is taken for what changes now.
        needed = sum(live)
        changed = sum(
            BLOCK_BYTES * len((layout.changed_blocks or frozenset()) - layout.derived)
            for layout in layouts
        )
        while used:
            held = sum(sizes[number] for number in used)
            again = sum(sizes[number] for number in used if not self.index.files[number].origin)
            anew = max(changed - again, 0) + sum(live[number] for number in out)
            if held + anew <= MOST_HELD * needed:
                break
            out.add(used.pop(0))
        return frozenset(out)


def of_checkpoint(store: Store, folder: str, rank: int) -> Base | None:
    """A committed checkpoint as the base of this rank's next save; None where its index cannot be
    read: the save then writes everything."""
    from laststep.catalog.indexes import read_index  # many flushers never need it

    try:
        commit = decision.read(store, folder)
        if not isinstance(commit, Commit) or rank >= commit.ranks:
            return None
        return Base(read_index(store, folder, commit, rank), folder)
    except LaststepError:
        return None


def renumbered(ref: BlockRef, numbers: dict[int, int]) -> BlockRef:
    """The same block, in other numbers of files."""
    base = ref.base
    if base is not None:
        block = base.block._replace(file=numbers[base.block.file])
        base = base._replace(block=block)
    return ref._replace(file=numbers[ref.file], base=base)


def shared(file: StoredFile, name: str, folder: str) -> StoredFile:
    """A file of the checkpoint in `folder`, as another one shares it under that name."""
    return msgspec.structs.replace(
        file, name=name, origin=file.origin or folder, sharers=file.sharers + 1
    )
