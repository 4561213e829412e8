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
from laststep.constants import DTYPES, listed
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

_SHOWN = 20
_COMMIT_FIELDS = (
    "step term attempt run ranks created_s size_bytes shared_bytes lossy omitted_items format "
    "laststep metrics metadata continues"
)


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
    shown = places.read(path, step, read_checkpoint)
    sharing = sharing_of(shown.place.store, shown.place.among)
    if as_json:
        print_json(_document(shown, sharing))
        return
    limit = None if all_ else _SHOWN
    _print_facts(shown.place, shown.commit, sharing)
    _print_items(shown)
    _print_files(shown.files, limit=limit)
    _print_tensors(shown.tensors(), limit=limit, parts=parts)
    for error in shown.unreadable:
        say(f"damaged, so the tensors of its rank are not listed: {error}")


def _document(shown: ShownCheckpoint, sharing: Sharing) -> dict[str, object]:
    entry, files_of_item = shown.place.listed, shown.files_by_item()
    return {
        **fields(shown.commit, _COMMIT_FIELDS),
        "folder": shown.place.folder,
        "shared_with": () if entry is None else sharing.sharers(shown.place.folder),
        "lineage": None if entry is None else lineage_of(entry),
        "pinned": False if entry is None else entry.pinned,
        "items": [
            fields(item, "name kind per_rank tensors size_bytes")
            | {"files": files_of_item[item.name]}
            for item in shown.commit.items
        ],
        "files": [
            fields(file.file, "name size_bytes sharers")
            | fields(file, "rank used_by codecs")
            | {
                "origin": file.file.origin or None,
                "error": str(file.damage[0].error) if file.damage else None,
            }
            for file in shown.files
        ],
        "tensors": [
            fields(tensor, "name rank size_bytes missing_bytes lossy")
            | fields(tensor.spec, "dtype shape")
            | {
                "parts": [
                    fields(part.box, "start shape") | fields(part, "size_bytes file")
                    for part in tensor.parts
                ]
            }
            for tensor in shown.tensors()
        ],
        "values": [
            {"name": name, "rank": index.rank, "size_bytes": len(data)}
            for index in shown.indexes
            for name, data in index.values.items()
        ],
    }


def _size_text(place: places.CheckpointPath, commit: Commit, sharing: Sharing) -> str:
    """Return the size, and how much of it is or was shared with other checkpoints."""
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
    lineage = "not in a run"
    if (entry := place.listed) is not None:
        lineage = lineage_of(entry)
        lineage += f" by {entry.superseded_by}" if entry.superseded_by is not None else ""
        lineage += ", pinned" if entry.pinned else ""
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
        "lineage": lineage,
        "continues": commit.continues or "nothing, it is the first",
    }
    if commit.omitted_items:
        facts["partial checkpoint"] = (
            f"of the run {commit.run}, without {', '.join(commit.omitted_items)}"
        )
    width = max(map(len, facts))
    for name, text in facts.items():
        say(f"{name.ljust(width)}  {text}")


def _print_items(shown: ShownCheckpoint) -> None:
    commit, files_of_item = shown.commit, shown.files_by_item()
    own = f"each of {commit.ranks:,} ranks has its own, all are counted"
    say()
    print_table(
        [
            {
                "item": item.name,
                "kind": item.kind,
                "tensors": f"{item.tensors:,}",
                "size": size_text(item.size_bytes),
                "files": f"{len(files_of_item[item.name]):,}",
                "": own if item.per_rank and commit.ranks > 1 else "",
            }
            for item in commit.items
        ]
    )


def _print_files(files: Sequence[ShownFile], *, limit: int | None) -> None:
    """Print up to `limit` files; damaged ones are always listed."""
    chosen = [file for at, file in enumerate(files) if limit is None or at < limit or file.damage]
    say()
    print_table(
        [
            {
                "file": file.file.name,
                "size": size_text(file.file.size_bytes),
                "": "; ".join(_notes(file)),
            }
            for file in chosen
        ]
    )
    _print_rest(len(files) - len(chosen), "file")


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
    alike: dict[object, list[ShownTensor]] = {}
    for number, tensor in enumerate(tensors):
        # A line stands for all tensors that differ only in the rank that has them. With --parts,
        # files are named, so each gets a line.
        look = (tensor.name, tensor.spec, len(tensor.parts), tensor.missing_bytes)
        alike.setdefault(number if parts else look, []).append(tensor)
    columns = ("tensor", "dtype", "shape", "bytes", "parts", "file" if parts else "")
    rows: list[tuple[str, ...]] = []
    for same in list(alike.values())[:limit]:
        tensor, boxes = same[0], len(same[0].parts)
        notes = [part.file for part in tensor.parts if parts and boxes == 1]
        if tensor.rank is not None:
            own = listed(each.rank for each in same)
            notes.append(f"of rank {own}" if len(same) == 1 else f"each of ranks {own}")
        if tensor.lossy is not None:
            notes.append(f"rounded to {tensor.lossy}")
        if tensor.missing_bytes:
            notes.append(f"{tensor.missing_bytes:,} bytes of it lie in damaged files")
        size = f"{tensor.size_bytes:,}"
        text = ", ".join(notes)
        rows.append(
            (tensor.name, tensor.spec.dtype, _shape(tensor.spec.shape), size, f"{boxes:,}", text)
        )
        for part in tensor.parts if parts and boxes > 1 else ():
            size = f"{part.size_bytes:,}"
            rows.append((f"  [{part.box.text}]", "", _shape(part.box.shape), size, "", part.file))
    say()
    print_table([dict(zip(columns, row, strict=True)) for row in rows])
    _print_rest(sum(map(len, list(alike.values())[limit:] if limit else ())), "tensor")


def _print_rest(left: int, what: str) -> None:
    if left:
        say(f"… and {count_text(left, f'more {what}')}; --all lists them")


def _shape(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape)) or "scalar"  # noqa: RUF001 (the sign for sizes)


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
class ShownCheckpoint:
    """The readable part of a checkpoint's indexes."""

    place: places.CheckpointPath
    commit: Commit
    indexes: list[Index] = field(default_factory=list)
    files: list[ShownFile] = field(default_factory=list)
    unreadable: list[CorruptError] = field(default_factory=list)
    """Errors of the indexes that cannot be read."""

    def tensors(self) -> list[ShownTensor]:
        """Return the tensors, ordered by item; those of one name are adjacent."""
        commit = self.commit
        found: dict[tuple[str, str], dict[object, ShownTensor]] = {}
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
                        (rank, stored.spec),
                        ShownTensor(name=stored.name, rank=rank, spec=stored.spec, lossy=lossy),
                    )
                    part = ShownPart(stored.box, entry.stop - entry.start, layout.layout.name)
                    tensor.parts.append(part)
        items = {item.name: at for at, item in enumerate(commit.items)}
        keys = sorted(found, key=lambda key: items.get(key[0], len(items)))
        return [tensor for key in keys for tensor in found[key].values()]

    def files_by_item(self) -> dict[str, list[str]]:
        found: dict[str, dict[str, None]] = {item.name: {} for item in self.commit.items}
        for index in self.indexes:
            for layout in index.layouts:
                items = {stored_in(layout.layout, entry).item for entry in layout.layout.tensors}
                names = [index.files[number].name for number in _files_of(layout, index)]
                for item in items & found.keys():
                    found[item].update(dict.fromkeys(names))
        return {item: list(names) for item, names in found.items()}


def read_checkpoint(place: places.CheckpointPath) -> ShownCheckpoint:
    """Read the indexes of a checkpoint and check the sizes of its files."""
    store, folder = place.store, place.folder
    shown = ShownCheckpoint(place=place, commit=read_commit(store, folder))
    for rank in range(shown.commit.index_count):
        try:
            index = read_index(store, folder, shown.commit, rank)
        except CorruptError as error:
            shown.unreadable.append(error)
            continue
        shown.indexes.append(index)
        with closing(BlockReader(store, folder, index, cached=True)) as reader:
            damage = tuple(damage for file in reader.files() for damage in file.damage)
        shown.files.extend(_shown_files(index, damage))
    if shown.unreadable or any(file.damage for file in shown.files):
        gone = deleted(store, folder)
        if gone is not None:
            raise gone
    return shown


def _shown_files(index: Index, damage: tuple[Damage, ...]) -> list[ShownFile]:
    used_by: list[list[str]] = [[] for _ in index.files]
    codecs: list[set[str]] = [set() for _ in index.files]
    for stored in index.layouts:
        for number in _files_of(stored, index):
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


def _files_of(stored: StoredLayout, index: Index) -> list[int]:
    """Return the numbers of the files that hold blocks of a layout, and of its own data file."""
    used = {part.file for run in stored.runs for part in (run, *run.bases)}
    used |= {n for n, file in enumerate(index.files) if file.name == stored.layout.name}
    return sorted(used)
