"""What a save may borrow of the last checkpoint: its blocks, their digests, and where they lie.

A block that has the digest of the one at the same place in the last image is not written again: the
file that holds it is linked into the new folder. Which files may still be borrowed of is decided
here, before anything is written. Knows nothing of threads, nor of how bytes come.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

from laststep.catalog import decision
from laststep.catalog.groups import files_of
from laststep.catalog.names import parse_folder
from laststep.codecs.digests import DIGEST_BYTES, digest
from laststep.errors import LaststepError
from laststep.format.borrowing import BlockPlace, places_of
from laststep.format.deriving import ROUNDED
from laststep.format.header import ObjectEntry, PartEntry
from laststep.format.manifest import Commit
from laststep.format.safetensors import TensorEntry
from laststep.terms import BLOCK_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from laststep.flush.protocol import FileBegin
    from laststep.format.manifest import FileRecord
    from laststep.read.files import DataFile, HeldFile
    from laststep.storage.store import Store

MAX_FILES = 8
"""So many files at most hold the blocks of one image: a restore opens them all."""
MAX_SHARERS = 16
"""So many checkpoints at most share a file before its blocks are written anew: what one damaged
file can take with it. See docs/guides/smaller.md."""
LEAST_LIVE = 0.25
"""A file of whose blocks a smaller share is still needed costs more room than it saves."""
MOST_HELD = 1.75
"""The files that an image draws on are to hold at most so many times what the image does."""
MOST_CHANGED = 0.75
"""An image of which more has changed is written whole: it then stands alone."""
LEAST_BYTES = 64 << 10
"""A smaller file is written again: a link is a name, and a file to open, too."""


class LentFile(NamedTuple):
    """A file that lies in a committed checkpoint."""

    folder: str
    record: FileRecord
    blocks: int
    """How many it holds, but for those that follow from others."""

    def worth(self) -> float:
        """How many blocks it takes the room of: encoded ones take less than they are."""
        data_bytes = self.record.size_bytes - self.record.header_bytes
        return min(self.blocks, data_bytes / BLOCK_BYTES)

    @property
    def path(self) -> str:
        return f"{self.folder}/{self.record.name}"

    @property
    def origin(self) -> str:
        """The folder that it was written for."""
        return self.record.origin or self.folder

    def name_elsewhere(self) -> str | None:
        """Its name in the folder of a checkpoint that borrows of it: that which it was written
        under, and the attempt. None where its folder is not one of an attempt."""
        if self.record.lent:
            return self.record.name
        at = parse_folder(self.origin)
        if at is None:
            return None
        stem = self.record.name.removesuffix(".safetensors")
        return f"{stem}~{at.epoch}-{at.attempt}.safetensors"


class Anchor(NamedTuple):
    """A block that others may be coded against: it has no anchor itself."""

    place: BlockPlace
    digest: bytes


class Lender(msgspec.Struct, frozen=True, kw_only=True):
    """A data file of the last checkpoint, with the files that its blocks lie in."""

    item: str | None
    entries: tuple[TensorEntry, ...]
    parts: dict[str, PartEntry]
    digests: bytes
    """Of every block of the image."""
    places: tuple[BlockPlace, ...]
    """Where each of them lies, as numbers of `files`."""
    files: tuple[LentFile, ...]
    """The first one says what tensors there are."""
    top: int
    """Which of them is the file of the checkpoint itself: the only one, or that which borrows."""
    objects: dict[str, ObjectEntry]
    """By name; they lie in the file of that number."""
    changed_blocks: frozenset[int] | None = None
    """The blocks that had changed when it was written; None where nobody knows."""
    overdue: bool = False
    """Whether blocks changed in a save that put compaction off: the next one may not, or the files
    would grow without bound."""
    anchors: dict[int, Anchor] = {}
    """Of the blocks that are coded against another: that one."""
    derived: frozenset[int] = frozenset()
    """The blocks that follow from other files of that checkpoint, and are not stored: another one
    says anew whether they do."""

    @property
    def changed(self) -> float | None:
        """The share of its stored blocks that had changed when it was written, where known."""
        if self.changed_blocks is None:
            return None
        stored = len(self.places) - len(self.derived)
        return len(self.changed_blocks - self.derived) / max(stored, 1)

    def anchor(self, number: int) -> Anchor:
        """What a block of the image is, or is coded against."""
        at = number * DIGEST_BYTES
        return self.anchors.get(number) or Anchor(
            self.places[number], self.digests[at : at + DIGEST_BYTES]
        )

    def has_the_image_of(self, plan: FileBegin) -> bool:
        """Whether the tensors of a planned file lie just as in this one."""
        return (self.item, self.entries, self.parts) == (plan.item, plan.entries, plan.parts)

    def lends(self, retired: frozenset[int]) -> bool:
        """Whether another save may borrow of it, though not of the files that are retired."""
        return (
            self.files[0].record.size_bytes >= LEAST_BYTES
            and (not self.derived or len(self.derived) < len(self.places))
            and 0 not in retired
        )

    def shared_too_often(self) -> frozenset[int]:
        """The files that even a save of nothing new may not share any more."""
        return frozenset(
            number
            for number, file in enumerate(self.files)
            if file.record.sharers + 1 > MAX_SHARERS
        )

    def retired(self) -> frozenset[int]:
        """The files that no more is borrowed of: what still lies in them is written anew."""
        live = [0] * len(self.files)
        stored = (p for number, p in enumerate(self.places) if number not in self.derived)
        for place in (*stored, *(anchor.place for anchor in self.anchors.values())):
            live[place.file] += 1
        out = set(self.shared_too_often())
        out.update(n for n, file in enumerate(self.files) if live[n] < LEAST_LIVE * file.blocks)
        left = sorted(set(range(1, len(self.files))) - out, key=lambda number: live[number])
        too_many = len(self.files) - len(out) + 1 - MAX_FILES
        out.update(left[: max(too_many, 0)])
        # The least used go, until all that is left and what comes anew is little enough. What has
        # changed the last time, and lies in the newest, is taken for what changes now.
        blocks, newest = len(self.places) - len(self.derived), len(self.files) - 1
        changed = 0.0 if self.changed is None else self.changed * blocks
        used = sorted(
            set(range(len(self.files))) - out,
            key=lambda number: live[number] / max(self.files[number].blocks, 1),
        )
        while used:
            held = sum(self.files[number].worth() for number in used)
            again = self.files[newest].worth() if newest > 0 and newest in used else 0
            anew = max(changed - again, 0) + sum(live[number] for number in out)
            if held + anew <= MOST_HELD * blocks:
                break
            out.add(used.pop(0))
        return frozenset(out)

    def likely_change(self, first: int, same: Sequence[bool]) -> float:
        """Estimate the share of the image that has changed, by some of its blocks, from `first` on.

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
        return (changed + share * elsewhere) / max(len(self.places) - len(self.derived), 1)

    def seems_same(self, first: int, same: Sequence[bool]) -> bool:
        """Whether nothing seems to have changed, by some blocks of the image, from `first` on."""
        recent = self.changed_blocks or frozenset()
        return all(same) and (
            not self.overdue or not recent.isdisjoint(range(first, first + len(same)))
        )

    def has(self, objects: Sequence[tuple[str, bytes]]) -> bool:
        """Whether it has just these objects."""
        known = {name: entry.digest for name, entry in self.objects.items()}
        return known == {name: digest(data) for name, data in objects}

    def same(self, number: int, sums: bytes) -> list[bool]:
        """Of blocks from that one on, with these digests: whether each is the one that there is."""
        known = self.digests[number * DIGEST_BYTES : number * DIGEST_BYTES + len(sums)]
        return [
            known[at : at + DIGEST_BYTES] == sums[at : at + DIGEST_BYTES]
            for at in range(0, len(sums), DIGEST_BYTES)
        ]


def of_checkpoint(store: Store, folder: str, names: Iterable[str]) -> dict[str, Lender]:
    """What can be borrowed of the files of these names in a committed checkpoint; of what is not
    there as it was written, nothing."""
    from laststep.read.files import open_file  # many flushers never need it

    try:
        commit = decision.read(store, folder)
        records = files_of(store, folder, commit) if isinstance(commit, Commit) else ()
    except LaststepError:
        records = ()
    among = {record.name: record for record in records}
    lenders: dict[str, Lender] = {}
    for name in names:
        record = among.get(name)
        if record is None:
            continue
        try:
            file = open_file(store, folder, record, among, cached=True).sound()
        except LaststepError:
            continue  # the save then writes all of it
        try:
            lenders[name] = _lender_of(folder, file)
        finally:
            file.close()
    return lenders


def _lender_of(folder: str, file: DataFile) -> Lender:
    header = file.header
    held = [
        LentFile(folder, part.record, len(part.header.blocks) // DIGEST_BYTES - len(_derived(part)))
        for part in file.files
    ]
    own, *lent = held
    blocks = len(header.blocks) // DIGEST_BYTES
    # A file that borrows is the last of its files here, and the first in its own numbers.
    number_of = [len(lent), *range(len(lent))] if lent else [0]
    places = tuple(
        places_of(header.stretches) if lent else (BlockPlace(0, n) for n in range(blocks))
    )
    rounded = _derived(file.files[0])
    return Lender(
        item=header.item, entries=header.tensors, parts=header.parts, digests=header.blocks,
        places=tuple(BlockPlace(number_of[place.file], place.block) for place in places),
        files=(*lent, own), top=len(lent), anchors=_anchors(file, number_of),
        derived=frozenset(
            n for n, (where, block) in enumerate(places) if where == 0 and block in rounded
        ),
        objects={
            entry.name: msgspec.structs.replace(entry, file=number_of[entry.file])
            for entry in header.objects
        },
    )  # fmt: skip


def _derived(file: HeldFile) -> set[int]:
    """The blocks of a file that follow from others."""
    return {n for n, block in enumerate(file.header.coded or ()) if block.way == ROUNDED}


def _anchors(file: DataFile, number_of: Sequence[int]) -> dict[int, Anchor]:
    """What blocks of the image are coded against, wherever these lie."""
    by_name = {there.record.name: number for number, there in enumerate(file.files)}
    found: dict[int, Anchor] = {}
    for number, (where, block) in enumerate(places_of(file.header.stretches)):
        held = file.files[where].header
        anchor = None if held.coded is None else held.coded[block].anchor
        if anchor is not None:
            there = by_name[held.lent[anchor.file - 1]]
            digests, at = file.files[there].header.blocks, anchor.block * DIGEST_BYTES
            place = BlockPlace(number_of[there], anchor.block)
            found[number] = Anchor(place, digests[at : at + DIGEST_BYTES])
    return found
