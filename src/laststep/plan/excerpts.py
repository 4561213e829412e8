"""Decide what of a checkpoint goes where only some of its items are kept: an excerpt of it.

Pure. Files go whole or not at all, so the digests of a file are those of the original's. What small
items share therefore comes along; the manifest of an excerpt says which items do not count.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, NamedTuple

from msgspec import structs

from laststep.errors import NotFound
from laststep.format import group
from laststep.format.group import GroupManifest

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from laststep.format.manifest import Commit, FileRecord

_SAME = ("run", "step", "epoch", "attempt", "created_s", "ranks")


class HeldItems(NamedTuple):
    """What a data file holds, and which others it needs."""

    file: str
    items: frozenset[str]
    lent: tuple[str, ...] = ()
    masters: tuple[str, ...] = ()
    """Those that its tensors follow from."""


def left_out_of(commit: Commit, items: Collection[str]) -> tuple[str, ...]:
    """The items of a checkpoint's original that are not among these: where it lacks no others, it
    is brought as it is. `NotFound` where it lacks one of these."""
    here = [record.name for record in commit.items]
    if lacking := [item for item in items if item not in here]:
        raise NotFound(
            f"step {commit.step} has no item {', '.join(map(repr, lacking))}",
            found=", ".join(here) + _without(commit),
            remedy="name items that it has; `laststep show` lists them",
        )
    return tuple(sorted({*commit.left_out, *here} - {*items}))


def _without(commit: Commit) -> str:
    return f" (an excerpt without {', '.join(commit.left_out)})" if commit.left_out else ""


def needed_files(
    commit: Commit, held: Iterable[HeldItems], items: Collection[str], where: str
) -> frozenset[str]:
    """The names of the files that these items need, of some ranks or of all. `NotFound` where
    tensors follow from a file that has nothing of these items."""
    needed = {record.file for record in commit.items if record.name in items}
    wanted = [file for file in held if file.file in needed or not file.items.isdisjoint(items)]
    needed.update(file.file for file in wanted)
    for file in wanted:
        if others := [name for name in file.masters if name not in needed]:
            raise NotFound(
                f"tensors in {file.file} follow from what is left out", where=where,
                expected=f"what {', '.join(others)} holds among the items",
                found=f"items={tuple(items)}",
                remedy="take the item of the masters too; or save with derived=False, which "
                "stores them both",
            )  # fmt: skip
        needed.update(file.lent)
    return frozenset(needed)


def only_items(
    commit: Commit, files: Sequence[FileRecord], items: Collection[str]
) -> tuple[Commit, dict[str, bytes]]:
    """The manifest of an excerpt that has these files, and the bytes of the manifests of groups of
    ranks, by name. What it says of classes of ranks would tell of all items, and goes."""
    documents, records = {}, []
    firsts = [old.first for old in commit.groups]
    of_groups: list[list[FileRecord]] = [[] for _ in firsts]
    for file in files if firsts else ():
        of_groups[bisect_right(firsts, file.rank) - 1].append(file)
    for old, kept in zip(commit.groups, of_groups, strict=True):
        record, data = group.encode(
            GroupManifest(
                step=commit.step, epoch=commit.epoch, attempt=commit.attempt, first=old.first,
                ranks=old.ranks, files=tuple(kept),
            )
        )  # fmt: skip
        records.append(record)
        documents[record.name] = data
    excerpt = structs.replace(
        commit, items=tuple(record for record in commit.items if record.name in items),
        files=() if records else tuple(files), groups=tuple(records), classes=(),
        left_out=left_out_of(commit, items),
    )  # fmt: skip
    return excerpt, documents


def is_excerpt(there: Commit, of: Commit, left_out: tuple[str, ...]) -> bool:
    """Whether a checkpoint is the excerpt of another one that lacks just these items."""
    return (
        there.left_out == left_out
        and all(getattr(there, name) == getattr(of, name) for name in _SAME)
        and set(there.files) <= set(of.files)
    )
