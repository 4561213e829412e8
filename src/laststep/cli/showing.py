"""`laststep show`: the contents of one checkpoint, from its manifest and indexes; reads no data.

An index or a file that cannot be read is marked as such; the others are still shown.
"""

from __future__ import annotations

import math
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from laststep.browse import read_commit
from laststep.catalog.attempt import deleted, read_index
from laststep.catalog.retention import sharing_of
from laststep.cli import places
from laststep.cli.listing import lineage_of
from laststep.cli.output import (
    AsJson,
    count_text,
    fields,
    metrics_text,
    plain,
    print_json,
    print_table,
    say,
    size_text,
    time_text,
)
from laststep.constants import DTYPES
from laststep.errors import CorruptError
from laststep.format.index import RAW, Index
from laststep.read.blocks import BlockReader
from laststep.read.content import stored_in

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from laststep.catalog.retention import Sharing
    from laststep.format.index import StoredFile, StoredLayout
    from laststep.format.manifest import Commit
    from laststep.read.blocks import Damage
    from laststep.state.boxes import Box
    from laststep.state.tree import TensorSpec
    from laststep.storage.store import Store

_SHOWN = 20
_SHOWN_SPANS = 3
_COMMIT_FIELDS = (
    "step",
    "term",
    "attempt",
    "run",
    "ranks",
    "created_s",
    "size_bytes",
    "shared_bytes",
    "lossy",
    "omitted_items",
    "format",
    "laststep",
    "metrics",
    "metadata",
    "continues",
)
_ITEM_FIELDS = ("name", "kind", "per_rank", "tensors", "size_bytes")


def show(
    path: places.RunOrCheckpoint,
    *,
    step: places.StepOption = None,
    all_: Annotated[
        bool, typer.Option("--all", help=f"List all tensors and files, not only {_SHOWN} of each.")
    ] = False,
    parts: Annotated[
        bool, typer.Option("--parts", help="Say which part of a tensor lies in which file.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show the contents of a checkpoint.

    Takes the newest checkpoint of a run, or that of --step.
    """
    place, held = places.read(path, step, _read)
    commit = held.commit
    sharing = sharing_of(place.store, place.among)
    if as_json:
        print_json(_document(place, held, sharing))
        return
    limit = None if all_ else _SHOWN
    _print_facts(place, commit, sharing)
    _print_items(held)
    _print_files(held.files, limit=limit)
    _print_tensors(tensors_of(held), limit=limit, parts=parts)
    for error in held.unreadable:
        say(f"damaged, so the tensors of its rank are not listed: {error}")


def _read(place: places.CheckpointPath) -> tuple[places.CheckpointPath, Holdings]:
    commit = read_commit(place.store, place.folder)
    return place, read_holdings(place.store, place.folder, commit)


def _document(place: places.CheckpointPath, held: Holdings, sharing: Sharing) -> dict[str, object]:
    listed, commit = place.listed, held.commit
    held_by = files_by_item(held)
    return {
        **fields(commit, *_COMMIT_FIELDS),
        "folder": place.folder,
        "shared_with": () if listed is None else sharing.sharers(place.folder),
        "lineage": None if listed is None else lineage_of(listed),
        "pinned": False if listed is None else listed.pinned,
        "items": [
            fields(item, *_ITEM_FIELDS) | {"files": held_by[item.name]} for item in commit.items
        ],
        "files": [
            fields(file.file, "name", "size_bytes", "sharers")
            | fields(file, "rank", "used_by", "codecs")
            | {
                "origin": file.file.origin or None,
                "error": str(file.damage[0].error) if file.damage else None,
            }
            for file in held.files
        ],
        "tensors": [_tensor_document(tensor) for tensor in tensors_of(held)],
        "values": [
            {"name": name, "rank": index.rank, "size_bytes": len(data)}
            for index in held.indexes
            for name, data in index.values.items()
        ],
    }


def _tensor_document(tensor: ShownTensor) -> dict[str, object]:
    return {
        **fields(tensor, "name", "rank", "size_bytes", "missing_bytes", "lossy"),
        **fields(tensor.spec, "dtype", "shape"),
        "parts": [
            fields(part.box, "start", "shape") | fields(part, "size_bytes", "file")
            for part in tensor.parts
        ],
    }


def _size_text(place: places.CheckpointPath, commit: Commit, sharing: Sharing) -> str:
    """Return the size, and how much of it is shared with other checkpoints or, if those are gone,
    was."""
    count = count_text(commit.written.files, "data file")
    text = f"{size_text(commit.size_bytes)} in {count}"
    others = () if place.listed is None else sharing.sharers(place.folder)
    if others:
        shared = size_text(sharing.shared_bytes(place.folder))
        return f"{text}, {shared} of it shared with " + count_text(len(others), "other checkpoint")
    if commit.shared_bytes:
        text += f", {size_text(commit.shared_bytes)} of it written for earlier checkpoints"
    return text


def _print_facts(place: places.CheckpointPath, commit: Commit, sharing: Sharing) -> None:
    listed = place.listed
    lineage = "not in a run" if listed is None else lineage_of(listed)
    if listed is not None and listed.superseded_by is not None:
        lineage += f" by {listed.superseded_by}"
    facts = {
        "step": f"{commit.step} (term {commit.term}, attempt {commit.attempt})",
        "folder": f"{place.store.url}/{place.folder}",
        "saved": f"{time_text(commit.created_s)} by "
        f"{count_text(commit.ranks, 'rank')} with laststep {commit.laststep}, "
        f"format {commit.format}",
        "size": _size_text(place, commit, sharing),
        "exact": f"no: tensors are rounded to {', '.join(commit.lossy)}" if commit.lossy else "yes",
        "metrics": metrics_text(commit.metrics) or "none",
        "metadata": "none" if commit.metadata is None else str(plain(commit.metadata)),
        "lineage": lineage + (", pinned" if listed is not None and listed.pinned else ""),
        "continues": commit.continues or "nothing, it is the first",
    }
    if commit.omitted_items:
        facts["partial checkpoint"] = (
            f"of the run {commit.run}, without {', '.join(commit.omitted_items)}"
        )
    width = max(map(len, facts))
    for name, text in facts.items():
        say(f"{name.ljust(width)}  {text}")


def _print_items(held: Holdings) -> None:
    commit = held.commit
    held_by = files_by_item(held)
    own = f"each of {commit.ranks:,} ranks has its own, all are counted"
    say()
    print_table(
        [
            {
                "item": item.name,
                "kind": item.kind,
                "tensors": f"{item.tensors:,}",
                "size": size_text(item.size_bytes),
                "files": f"{len(held_by[item.name]):,}",
                "": own if item.per_rank and commit.ranks > 1 else "",
            }
            for item in commit.items
        ]
    )


def _print_files(files: tuple[ShownFile, ...], *, limit: int | None) -> None:
    """Print up to `limit` files; damaged ones are always listed."""
    shown = [file for at, file in enumerate(files) if limit is None or at < limit or file.damage]
    say()
    print_table(
        [
            {
                "file": file.file.name,
                "size": size_text(file.file.size_bytes),
                "": "; ".join(_notes(file)),
            }
            for file in shown
        ]
    )
    _print_rest(len(files) - len(shown), "file")


def _notes(file: ShownFile) -> Iterator[str]:
    if file.used_by != (file.file.name,):
        yield f"has blocks of {', '.join(file.used_by)}"
    if file.file.origin:
        yield f"written for {file.file.origin}"
    if file.codecs:
        yield f"encoded by {', '.join(file.codecs)}"
    if file.damage:
        first = file.damage[0]
        yield f"damaged: {first.error.what}: expected {first.expected}, found {first.found}"


def _print_tensors(tensors: list[ShownTensor], *, limit: int | None, parts: bool) -> None:
    # With --parts, files are named, so equal tensors of several ranks get a line each.
    alike = [[tensor] for tensor in tensors] if parts else _alike(tensors)
    columns = ("tensor", "dtype", "shape", "bytes", "parts", "file" if parts else "")
    rows: list[tuple[str, ...]] = []
    for same in alike[:limit]:
        rows.append(_row(same, parts=parts))
        for part in same[0].parts if parts and len(same[0].parts) > 1 else ():
            box = f"  [{part.box.text}]"
            size = f"{part.size_bytes:,}"
            rows.append((box, "", _shape(part.box.shape), size, "", part.file))
    say()
    print_table([dict(zip(columns, row, strict=True)) for row in rows])
    _print_rest(sum(map(len, alike)) - sum(map(len, alike[:limit])), "tensor")


def _print_rest(left: int, what: str) -> None:
    if left:
        say(f"… and {count_text(left, f'more {what}')}; --all lists them")


def _alike(tensors: list[ShownTensor]) -> list[list[ShownTensor]]:
    """Group tensors that differ only in the rank that has them."""
    by_look: dict[object, list[ShownTensor]] = {}
    for tensor in tensors:
        look = (tensor.name, tensor.spec, len(tensor.parts), tensor.missing_bytes)
        by_look.setdefault(look, []).append(tensor)
    return list(by_look.values())


def _row(alike: list[ShownTensor], *, parts: bool) -> tuple[str, ...]:
    tensor = alike[0]
    notes = []
    if parts and len(tensor.parts) == 1:
        notes.append(tensor.parts[0].file)
    if tensor.rank is not None:
        notes.append(_ranks_text([each.rank for each in alike if each.rank is not None]))
    if tensor.lossy is not None:
        notes.append(f"rounded to {tensor.lossy}")
    if tensor.missing_bytes:
        notes.append(f"{tensor.missing_bytes:,} bytes of it lie in damaged files")
    return (
        tensor.name,
        tensor.spec.dtype,
        _shape(tensor.spec.shape),
        f"{tensor.size_bytes:,}",
        f"{len(tensor.parts):,}",
        ", ".join(notes),
    )


def _shape(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape)) or "scalar"  # noqa: RUF001 (the sign for sizes)


def _ranks_text(ranks: list[int]) -> str:
    """Format ranks: `of rank 3`, `each of ranks 0-3, 8`, `each of 512 ranks`."""
    if len(ranks) == 1:
        return f"of rank {ranks[0]}"
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    if len(spans) > _SHOWN_SPANS:
        return f"each of {len(ranks):,} ranks"
    texts = (str(first) if first == last else f"{first}-{last}" for first, last in spans)
    return f"each of ranks {', '.join(texts)}"


class ShownPart(NamedTuple):
    """A box of a tensor, and the data file that it belongs to."""

    box: Box
    size_bytes: int
    file: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownTensor:
    """A whole tensor, with all of its known parts."""

    name: str
    rank: int | None
    """The rank that it belongs to, for per-rank items."""
    spec: TensorSpec
    lossy: str | None = None
    """The rounding applied to it."""
    parts: list[ShownPart] = field(default_factory=list)

    @property
    def size_bytes(self) -> int:
        return math.prod(self.spec.shape) * DTYPES[self.spec.dtype].size_bytes

    @property
    def missing_bytes(self) -> int:
        """Bytes of ranks whose indexes cannot be read."""
        return self.size_bytes - sum(part.size_bytes for part in self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownFile:
    """A data file of a checkpoint."""

    file: StoredFile
    rank: int
    used_by: tuple[str, ...]
    """Layouts with blocks in it."""
    codecs: tuple[str, ...]
    """Codecs of the encoded blocks in it."""
    damage: tuple[Damage, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Holdings:
    """The readable part of a checkpoint's indexes."""

    commit: Commit
    indexes: tuple[Index, ...]
    files: tuple[ShownFile, ...]
    unreadable: tuple[CorruptError, ...]
    """Errors of the indexes that cannot be read."""


def read_holdings(store: Store, folder: str, commit: Commit) -> Holdings:
    """Read the indexes of a checkpoint and check the sizes of its files. Raise `NotFoundError` if
    all of it was deleted."""
    indexes, files, unreadable = list[Index](), list[ShownFile](), list[CorruptError]()
    for rank in range(commit.index_count):
        try:
            index = read_index(store, folder, commit, rank)
        except CorruptError as error:
            unreadable.append(error)
            continue
        indexes.append(index)
        with closing(BlockReader(store, folder, index, cached=True)) as reader:
            damage = tuple(damage for file in reader.files() for damage in file.damage)
        files += _shown_files(index, damage)
    if unreadable or any(file.damage for file in files):
        gone = deleted(store, folder)
        if gone is not None:
            raise gone
    return Holdings(
        commit=commit, indexes=tuple(indexes), files=tuple(files), unreadable=tuple(unreadable)
    )


def _shown_files(index: Index, damage: tuple[Damage, ...]) -> list[ShownFile]:
    used_by: list[list[str]] = [[] for _ in index.files]
    codecs: list[set[str]] = [set() for _ in index.files]
    for stored in index.layouts:
        for number in files_of(stored, index):
            used_by[number].append(stored.layout.name)
        for run in stored.runs:
            for part in (run, *run.bases):
                if part.encoding != RAW:
                    codecs[part.file].add(index.encodings[part.encoding - 1].codec)
    return [
        ShownFile(
            file=file,
            rank=index.rank,
            used_by=tuple(used_by[number]),
            codecs=tuple(sorted(codecs[number])),
            damage=tuple(wrong for wrong in damage if wrong.file == file.name),
        )
        for number, file in enumerate(index.files)
    ]


def files_of(stored: StoredLayout, index: Index) -> list[int]:
    """Return the numbers of the files that hold blocks of a layout, and of its own data file."""
    used = {part.file for run in stored.runs for part in (run, *run.bases)}
    used |= {n for n, file in enumerate(index.files) if file.name == stored.layout.name}
    return sorted(used)


def tensors_of(held: Holdings) -> list[ShownTensor]:
    """Return the tensors, ordered by item; those of several ranks under one name are adjacent."""
    commit = held.commit
    per_rank = {item.name for item in commit.items if item.per_rank and commit.ranks > 1}
    found: dict[tuple[str, str, int | None, TensorSpec], ShownTensor] = {}
    items = {item.name: at for at, item in enumerate(commit.items)}
    seen: dict[tuple[str, str], int] = {}
    for index in held.indexes:
        for layout in index.layouts:
            for entry in layout.layout.tensors:
                stored = stored_in(layout.layout, entry)
                if stored.item in commit.omitted_items:
                    continue
                rank = index.rank if stored.item in per_rank else None
                seen.setdefault((stored.item, stored.tensor), len(seen))
                tensor = found.setdefault(
                    (stored.item, stored.tensor, rank, stored.spec),
                    ShownTensor(
                        name=stored.name,
                        rank=rank,
                        spec=stored.spec,
                        lossy=layout.lossy.get(entry.name),
                    ),
                )
                part = ShownPart(stored.box, entry.stop - entry.start, layout.layout.name)
                tensor.parts.append(part)
    keys = sorted(found, key=lambda key: (items.get(key[0], len(items)), seen[key[:2]]))
    return [found[key] for key in keys]


def files_by_item(held: Holdings) -> dict[str, list[str]]:
    found: dict[str, dict[str, None]] = {item.name: {} for item in held.commit.items}
    for index in held.indexes:
        for layout in index.layouts:
            items = {stored_in(layout.layout, entry).item for entry in layout.layout.tensors}
            names = [index.files[number].name for number in files_of(layout, index)]
            for item in items & found.keys():
                found[item].update(dict.fromkeys(names))
    return {item: list(names) for item, names in found.items()}
