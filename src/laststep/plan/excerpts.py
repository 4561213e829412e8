"""Decide what of a checkpoint goes where only some of its items are kept: an excerpt of it.

Pure. Layouts go whole or not at all, so the digests of their blocks stay. What small items share
therefore comes along; the manifest of an excerpt says which items do not count.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import structs

from laststep.errors import NotFound

if TYPE_CHECKING:
    from collections.abc import Collection

    from laststep.format.index import Index, Run, StoredLayout
    from laststep.format.manifest import Commit, Written

_SAME = ("run", "step", "epoch", "attempt", "created_s", "ranks", "metrics", "continues")


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


def only_items(index: Index, items: Collection[str], where: str) -> Index:
    """The part of an index that these items need. `NotFound` where tensors are derived from a
    layout that has nothing of these items."""
    layouts = [stored for stored in index.layouts if not _items_in(stored).isdisjoint(items)]
    names = {stored.layout.name for stored in layouts}
    for stored in layouts:
        if others := {file for file, _ in stored.derived.values()} - names:
            raise NotFound(
                f"tensors in {stored.layout.name} are derived from what is left out", where=where,
                expected=f"what {', '.join(sorted(others))} holds among the items",
                found=f"items={tuple(items)}",
                remedy="take the item of the masters too; or save with derived=False, which "
                "stores them both",
            )  # fmt: skip
    used = {part.file for stored in layouts for run in stored.runs for part in (run, *run.bases)}
    # A layout without bytes has a file too.
    used |= {number for number, file in enumerate(index.files) if file.name in names}
    number_of = {old: new for new, old in enumerate(sorted(used))}
    return structs.replace(
        index,
        files=tuple(index.files[number] for number in sorted(used)),
        layouts=tuple(
            structs.replace(stored, runs=tuple(_moved(run, number_of) for run in stored.runs))
            for stored in layouts
        ),
        values={name: data for name, data in index.values.items() if name in items},
    )


def _items_in(stored: StoredLayout) -> set[str]:
    layout = stored.layout
    if layout.item is not None:
        return {layout.item}
    return {entry.name.partition("/")[0] for entry in layout.tensors}


def _moved(run: Run, number_of: dict[int, int]) -> Run:
    bases = tuple(_moved(base, number_of) for base in run.bases)
    return structs.replace(run, file=number_of[run.file], bases=bases)


def excerpt_of(commit: Commit, items: Collection[str], written: Written) -> Commit:
    """The manifest of an excerpt of which that was written. What its original says of classes of
    ranks would tell of all items, and goes."""
    return structs.replace(
        commit,
        items=tuple(record for record in commit.items if record.name in items),
        written=written,
        classes=(),
        left_out=left_out_of(commit, items),
    )


def is_excerpt(there: Commit, of: Commit, left_out: tuple[str, ...]) -> bool:
    """Whether a checkpoint is the excerpt of another one that lacks just these items."""
    return there.left_out == left_out and all(
        getattr(there, name) == getattr(of, name) for name in _SAME
    )
