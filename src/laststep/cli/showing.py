"""`laststep show`: the contents of one checkpoint, from its manifest and indexes; reads no data.

An index that cannot be read is named; what the others tell is still shown.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from laststep.browse import read_commit
from laststep.catalog.attempt import deleted, read_index
from laststep.catalog.retention import sharing_of
from laststep.cli import output, places
from laststep.cli.listing import lineage_of
from laststep.cli.output import count_text, fields, say, size_text
from laststep.codecs import objects
from laststep.codecs.objects import Tagged, TensorRef
from laststep.constants import DTYPES, listed
from laststep.errors import CorruptError
from laststep.read.content import stored_in
from laststep.state.tree import OWNED, owned, tensor_names

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from laststep.format.index import Index, StoredFile
    from laststep.format.manifest import Commit
    from laststep.state.tree import Shape, TensorSpec

_SHOWN = 20
_COMMIT_FIELDS = (
    "step term attempt run ranks created_s omitted_items format laststep metrics metadata continues"
)


def show(
    path: places.RunOrCheckpoint,
    *,
    step: places.StepOption = None,
    all_: Annotated[
        bool, typer.Option("--all", help=f"List all values, files and tensors, not only {_SHOWN}.")
    ] = False,
    as_json: output.AsJson = False,
) -> None:
    """Show the contents of a checkpoint.

    Takes the newest checkpoint of a run, or that of --step.
    """
    shown = places.read(path, step, _read)
    if as_json:
        output.print_json(_document(shown))
        return
    _print_facts(shown)
    say()
    own = f"each of {shown.commit.ranks:,} ranks has its own, all are counted"
    output.print_table(
        [
            {
                "item": item.name,
                "kind": item.kind,
                "tensors": f"{item.tensors:,}",
                "size": size_text(item.size_bytes),
                "": own if item.per_rank and shown.commit.ranks > 1 else "",
            }
            for item in shown.commit.items
        ]
    )
    files = [
        {
            "file": file.name,
            "size": size_text(file.size_bytes),
            "": f"written for {file.origin}" if file.origin else "",
        }
        for _, file in shown.files()
    ]
    limit = None if all_ else _SHOWN
    _print_some([_value_row(value) for value in shown.values()], "value", limit)
    _print_some(files, "file", limit)
    _print_some([_row(tensor) for tensor in shown.tensors()], "tensor", limit)
    for error in shown.unreadable:
        say(f"damaged, so the tensors of its rank are not listed: {error}")


@dataclass(frozen=True, slots=True)
class ShownPart:
    start: Shape
    shape: Shape
    size_bytes: int
    file: str


@dataclass(frozen=True, slots=True)
class ShownTensor:
    name: str
    rank: int | None
    """The rank that it belongs to, for per-rank items."""
    dtype: str
    shape: Shape
    lossy: str | None
    """The rounding applied to it."""
    parts: list[ShownPart] = field(default_factory=list)

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].size_bytes

    @property
    def missing_bytes(self) -> int:
        """Bytes of ranks whose indexes cannot be read."""
        return self.size_bytes - sum(part.size_bytes for part in self.parts)


class ShownValue(NamedTuple):
    """A plain value of an item, or a container of them that is short enough for one line."""

    name: str
    rank: int | None
    """The rank that it belongs to, for per-rank items."""
    value: object


class ShownCheckpoint(NamedTuple):
    """A checkpoint with its readable indexes, and the errors of the others."""

    place: places.CheckpointPath
    commit: Commit
    indexes: list[Index]
    unreadable: list[CorruptError]

    def shared(self) -> tuple[int, Sequence[str]]:
        """Return the bytes that it shares with other checkpoints of its run, and their folders."""
        if self.place.listed is None:
            return 0, ()
        sharing = sharing_of(self.place.store, self.place.among)
        return sharing.shared_bytes(self.place.folder), sharing.sharers(self.place.folder)

    def files(self) -> Iterator[tuple[int, StoredFile]]:
        for index in self.indexes:
            for file in index.files:
                yield index.rank, file

    def tensors(self) -> list[ShownTensor]:
        """Return the tensors, ordered by item; those of one name are adjacent."""
        commit = self.commit
        found: dict[tuple[str, str], dict[tuple[int | None, TensorSpec], ShownTensor]] = {}
        per_rank = {item.name for item in commit.items if item.per_rank and commit.ranks > 1}
        for index in self.indexes:
            for layout in index.layouts:
                for entry in layout.layout.tensors:
                    stored = stored_in(layout.layout, entry)
                    if stored.item in commit.omitted_items:
                        continue
                    rank = index.rank if stored.item in per_rank else None
                    lossy = layout.lossy.get(entry.name)
                    tensor = found.setdefault((stored.item, stored.tensor), {}).setdefault(
                        (rank, stored.spec), ShownTensor(stored.name, rank, *stored.spec, lossy)
                    )
                    box, size_bytes = stored.box, entry.stop - entry.start
                    part = ShownPart(box.start, box.shape, size_bytes, layout.layout.name)
                    tensor.parts.append(part)
        items = {item.name: at for at, item in enumerate(commit.items)}
        keys = sorted(found, key=lambda key: items.get(key[0], len(items)))
        return [tensor for key in keys for tensor in found[key].values()]

    def values(self) -> list[ShownValue]:
        """Return the plain values, ordered by item. A value of several ranks is listed once, unless
        each of them has its own."""
        found: dict[tuple[str, int | None], ShownValue] = {}
        for item in self.commit.items:
            is_own = item.per_rank and self.commit.ranks > 1
            for index in self.indexes:
                rank = index.rank if is_own else None
                where = f"{self.place.folder}, rank {index.rank}, value {item.name}"
                for name, value in _leaves(item.name, _tree(index.values.get(item.name), where)):
                    found.setdefault((name, rank), ShownValue(name, rank, value))
        return list(found.values())


def _tree(data: bytes | None, where: str) -> object:
    """Return the tree of an item, or the error that says why it cannot be read."""
    try:
        document = {} if data is None else objects.decode(data, where=where)
    except CorruptError as error:
        return error
    return document.get("tree", {}) if isinstance(document, dict) else document


def _leaves(name: str, node: object) -> Iterator[tuple[str, object]]:
    """Yield the plain values in a tree: single ones, and containers that fit into one line or have
    no containers in them."""
    if isinstance(node, Tagged) and node.tag == OWNED:
        node = owned(node).state
    if isinstance(node, TensorRef) or (isinstance(node, Tagged) and tensor_names(node)):
        return  # listed as a tensor
    inner: list[tuple[object, object]] = []
    if isinstance(node, dict):
        inner = list(node.items())
    elif isinstance(node, list | tuple | deque) and any(isinstance(e, _NESTED) for e in node):
        inner = list(enumerate(node))
    if not inner or (_is_plain(node) and not output.value_text(node).endswith("…")):
        if node != {}:
            yield name, node
        return
    for key, value in inner:
        yield from _leaves(
            f"{name}/{key if isinstance(key, str) else output.value_text(key)}", value
        )


_NESTED = (dict, list, tuple, deque, Tagged, TensorRef)


def _is_plain(tree: object) -> bool:
    """Return True if a tree has neither tensors nor values of other types in it."""
    stack = [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, Tagged | TensorRef):
            return False
        if isinstance(node, dict):
            stack += node.values()
        elif isinstance(node, list | tuple | deque):
            stack += node
    return True


def _read(place: places.CheckpointPath) -> ShownCheckpoint:
    shown = ShownCheckpoint(place, read_commit(place.store, place.folder), [], [])
    for rank in range(shown.commit.index_count):
        try:
            shown.indexes.append(read_index(place.store, place.folder, shown.commit, rank))
        except CorruptError as error:
            shown.unreadable.append(error)
    if shown.unreadable and (gone := deleted(place.store, place.folder)) is not None:
        raise gone
    return shown


def _document(shown: ShownCheckpoint) -> dict[str, object]:
    entry = shown.place.listed
    _, shared_with = shown.shared()
    return {
        **fields(shown.commit, _COMMIT_FIELDS),
        **fields(shown.commit.written, "size_bytes shared_bytes lossy"),
        "folder": shown.place.folder,
        "shared_with": shared_with,
        "lineage": None if entry is None else lineage_of(entry),
        "pinned": False if entry is None else entry.pinned,
        "incomplete": None if entry is None else entry.incomplete,
        "items": [
            fields(item, "name kind per_rank tensors size_bytes") for item in shown.commit.items
        ],
        "files": [
            {**fields(file, "name size_bytes sharers"), "rank": rank, "origin": file.origin or None}
            for rank, file in shown.files()
        ],
        "tensors": [
            fields(tensor, "name rank dtype shape size_bytes missing_bytes lossy parts")
            for tensor in shown.tensors()
        ],
        "values": [
            {"name": name, "rank": index.rank, "size_bytes": len(data)}
            for index in shown.indexes
            for name, data in index.values.items()
        ],
        "plain_values": [
            {**fields(entry, "name rank"), "value": _plain(entry.value)} for entry in shown.values()
        ],
    }


def _plain(value: object) -> object:
    return {value.tag: output.plain(value.value)} if isinstance(value, Tagged) else value


def _print_facts(shown: ShownCheckpoint) -> None:
    place, commit, lineage = shown.place, shown.commit, "not in a run"
    if (entry := place.listed) is not None:
        lineage = lineage_of(entry)
        lineage += f" by {entry.superseded_by}" if entry.superseded_by is not None else ""
        lineage += ", pinned" if entry.pinned else ""
    size = (
        f"{size_text(commit.written.size_bytes)} in {count_text(commit.written.files, 'data file')}"
    )
    shared_bytes, sharers = shown.shared()
    if sharers:
        count = count_text(len(sharers), "other checkpoint")
        size += f", {size_text(shared_bytes)} of it shared with {count}"
    elif commit.written.shared_bytes:
        size += f", {size_text(commit.written.shared_bytes)} of it written for earlier checkpoints"
    facts = {
        "step": f"{commit.step} (term {commit.term}, attempt {commit.attempt})",
        "folder": f"{place.store.url}/{place.folder}",
        "saved": f"{output.time_text(commit.created_s)} by {count_text(commit.ranks, 'rank')} "
        f"with laststep {commit.laststep}, format {commit.format}",
        "size": size,
        "exact": f"no: tensors are rounded to {', '.join(commit.written.lossy)}"
        if commit.written.lossy
        else "yes",
        "metrics": output.metrics_text(commit.metrics) or "none",
        "metadata": "none" if commit.metadata is None else str(output.plain(commit.metadata)),
        "lineage": lineage,
        "continues": commit.continues or "nothing, it is the first",
    }
    if entry is not None and entry.incomplete is not None:
        facts["incomplete"] = entry.incomplete
    if commit.omitted_items:
        without = listed(commit.omitted_items)
        facts["partial checkpoint"] = f"of the run {commit.run}, without {without}"
    width = max(map(len, facts))
    for name, text in facts.items():
        say(f"{name.ljust(width)}  {output.printable(text)}")


def _row(tensor: ShownTensor) -> dict[str, str]:
    notes = []
    if tensor.rank is not None:
        notes.append(f"of rank {tensor.rank}")
    if tensor.lossy is not None:
        notes.append(f"rounded to {tensor.lossy}")
    if tensor.missing_bytes:
        notes.append(f"{tensor.missing_bytes:,} bytes of it are of a damaged index")
    return {
        "tensor": tensor.name,
        "dtype": tensor.dtype,
        "shape": "×".join(map(str, tensor.shape)) or "scalar",  # noqa: RUF001 (for sizes)
        "bytes": f"{tensor.size_bytes:,}",
        "parts": f"{len(tensor.parts):,}",
        "": ", ".join(notes),
    }


def _value_row(shown: ShownValue) -> dict[str, str]:
    value = shown.value
    if isinstance(value, Tagged):
        text = f"{value.tag} {output.value_text(value.value)}"
    else:
        text = output.value_text(value)
    return {
        "value": output.printable(shown.name),
        "content": output.printable(text),
        "": "" if shown.rank is None else f"of rank {shown.rank}",
    }


def _print_some(rows: Sequence[dict[str, str]], what: str, limit: int | None) -> None:
    say()
    output.print_table(rows[:limit])
    if left := len(rows) - len(rows[:limit]):
        say(f"… and {count_text(left, f'more {what}')}; --all lists them")
