"""`laststep show`: what one checkpoint holds.

With --json: `step`, `epoch`, `attempt`, `folder`, `run`, `ranks` (how many wrote it), `created_s`,
`size_bytes` (of its data files), `shared_bytes` (of those that were written for earlier
checkpoints), `shared_with` (the folders of this run that have a file of it), `lossy` (how tensors
in it were rounded, none where it is exact), `left_out` (the items of its original that it lacks, if
it is an excerpt), `format`, `laststep` (the version that wrote it), `metrics`, `metadata`,
`lineage` (as in `ls`; null outside a run), `pinned`, `continues`; `items` (`name`, `kind`,
`per_rank`, `tensors`, `size_bytes`, `files`, the names of those that hold tensors of it); `files`
(`name`, `rank`, `size_bytes`, `origin`, the folder that it was written for, null for this one,
`sharers`, how many checkpoints had it before, `used_by`, the data files whose blocks lie in it,
`codecs`, by which blocks in it are encoded, `error`); `tensors` (`name`, as `Checkpoint.tensor`
takes it; `rank`, whose it is, null where it is no rank's own; `dtype`, `shape`, `size_bytes`;
`missing_bytes`, of ranks whose indexes are damaged; `lossy`, how it was rounded, or null; `parts`,
each with `start`, an index, `shape`, `size_bytes`, `file`); and `values` (`name`, `rank`,
`size_bytes`). Reads manifest and indexes, never data; `verify` does that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from laststep.catalog import decision
from laststep.catalog.indexes import sharing_of
from laststep.cli import holdings, output, places
from laststep.cli.listing import lineage_of
from laststep.errors import NotFoundError
from laststep.format import manifest
from laststep.read.files import box_text
from laststep.terms import MANIFEST_NAME

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import Console

    from laststep.catalog.indexes import Sharing
    from laststep.cli.holdings import Holdings, ShownFile, ShownTensor
    from laststep.format.manifest import Commit

_SHOWN = 20
_SHOWN_SPANS = 3
_COMMIT_FIELDS = (
    "step",
    "epoch",
    "attempt",
    "run",
    "ranks",
    "created_s",
    "size_bytes",
    "shared_bytes",
    "lossy",
    "left_out",
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
    as_json: output.AsJson = False,
) -> None:
    """Show what a checkpoint holds.

    The newest of a run, or that of --step.
    """
    place, held = places.read(path, step, _read)
    commit = held.commit
    sharing = sharing_of(place.store, place.among)
    if as_json:
        output.print_json(_document(place, held, sharing))
        return
    console = output.console()
    limit = None if all_ else _SHOWN
    _print_facts(console, place, commit, sharing)
    _print_items(console, held)
    _print_files(console, held.files, limit=limit)
    _print_tensors(console, holdings.tensors_of(held), limit=limit, parts=parts)
    for error in held.unreadable:
        console.print(f"damaged, and what its rank wrote is not listed: {error}")


def _read(place: places.CheckpointPath) -> tuple[places.CheckpointPath, Holdings]:
    return place, holdings.read_holdings(place.store, place.folder, _commit(place))


def _commit(place: places.CheckpointPath) -> Commit:
    name = f"{place.folder}/{MANIFEST_NAME}"
    try:
        data = place.store.read(name, limit_bytes=decision.MANIFEST_LIMIT_BYTES)
    except NotFoundError as error:
        raise decision.deleted(place.store, place.folder) or error from error
    decided = manifest.decode(data, where=f"{place.store.url}/{name}")
    if isinstance(decided, manifest.Abort):
        raise NotFoundError(
            "there is no checkpoint: the attempt was given up",
            where=f"{place.store.url}/{place.folder}",
            found=decided.reason,
        )
    return decided


def _document(place: places.CheckpointPath, held: Holdings, sharing: Sharing) -> dict[str, object]:
    listed, commit = place.listed, held.commit
    held_by = holdings.files_by_item(held)
    return {
        **output.fields(commit, *_COMMIT_FIELDS),
        "folder": place.folder,
        "shared_with": () if listed is None else sharing.sharers(place.folder),
        "lineage": None if listed is None else lineage_of(listed),
        "pinned": False if listed is None else listed.pinned,
        "items": [
            output.fields(item, *_ITEM_FIELDS) | {"files": held_by[item.name]}
            for item in commit.items
        ],
        "files": [
            output.fields(file.file, "name", "size_bytes", "sharers")
            | output.fields(file, "rank", "used_by", "codecs")
            | {
                "origin": file.file.origin or None,
                "error": str(file.damage[0].error) if file.damage else None,
            }
            for file in held.files
        ],
        "tensors": [_tensor_document(tensor) for tensor in holdings.tensors_of(held)],
        "values": [
            {"name": name, "rank": index.rank, "size_bytes": len(data)}
            for index in held.indexes
            for name, data in index.values.items()
        ],
    }


def _tensor_document(tensor: ShownTensor) -> dict[str, object]:
    return {
        **output.fields(tensor, "name", "rank", "size_bytes", "missing_bytes", "lossy"),
        **output.fields(tensor.spec, "dtype", "shape"),
        "parts": [
            output.fields(part.box, "start", "shape") | output.fields(part, "size_bytes", "file")
            for part in tensor.parts
        ],
    }


def _size_text(place: places.CheckpointPath, commit: Commit, sharing: Sharing) -> str:
    """How much there is, and how much of it others have too; or had, if they are gone by now."""
    count = output.count_text(commit.file_count, "data file")
    text = f"{output.size_text(commit.size_bytes)} in {count}"
    others = () if place.listed is None else sharing.sharers(place.folder)
    if others:
        shared = output.size_text(sharing.shared_bytes(place.folder))
        return f"{text}, {shared} of it shared with " + output.count_text(
            len(others), "other checkpoint"
        )
    if commit.shared_bytes:
        text += f", {output.size_text(commit.shared_bytes)} of it written for earlier checkpoints"
    return text


def _print_facts(
    console: Console, place: places.CheckpointPath, commit: Commit, sharing: Sharing
) -> None:
    listed = place.listed
    lineage = "not in a run" if listed is None else lineage_of(listed)
    if listed is not None and listed.superseded_by is not None:
        lineage += f" by {listed.superseded_by}"
    facts = {
        "step": f"{commit.step} (epoch {commit.epoch}, attempt {commit.attempt})",
        "folder": f"{place.store.url}/{place.folder}",
        "saved": f"{output.time_text(commit.created_s)} by "
        f"{output.count_text(commit.ranks, 'rank')} with laststep {commit.laststep}, "
        f"format {commit.format}",
        "size": _size_text(place, commit, sharing),
        "exact": f"no: tensors are rounded to {', '.join(commit.lossy)}" if commit.lossy else "yes",
        "metrics": output.metrics_text(commit.metrics) or "none",
        "metadata": "none" if commit.metadata is None else str(output.plain(commit.metadata)),
        "lineage": lineage + (", pinned" if listed is not None and listed.pinned else ""),
        "continues": commit.continues or "nothing, it is the first",
    }
    if commit.left_out:
        facts["excerpt"] = f"of the run {commit.run}, without {', '.join(commit.left_out)}"
    table = output.table("", "")
    table.show_header = False
    for name, value in facts.items():
        table.add_row(name, value)
    console.print(table)


def _print_items(console: Console, held: Holdings) -> None:
    commit = held.commit
    columns = ("item", "kind", "tensors", "size", "files", "")
    table = output.table(*columns, right=("tensors", "size", "files"))
    held_by = holdings.files_by_item(held)
    for item in commit.items:
        own = item.per_rank and commit.ranks > 1
        table.add_row(
            item.name,
            item.kind,
            f"{item.tensors:,}",
            output.size_text(item.size_bytes),
            f"{len(held_by[item.name]):,}",
            f"each of {commit.ranks:,} ranks has its own, all are counted" if own else "",
        )
    console.print()
    console.print(table)


def _print_files(console: Console, files: tuple[ShownFile, ...], *, limit: int | None) -> None:
    """Those that are damaged are always listed."""
    shown = [file for at, file in enumerate(files) if limit is None or at < limit or file.damage]
    table = output.table("file", "size", "", right=("size",))
    for file in shown:
        table.add_row(
            file.file.name, output.size_text(file.file.size_bytes), "; ".join(_notes(file))
        )
    console.print()
    console.print(table)
    _print_rest(console, len(files) - len(shown), "file")


def _notes(file: ShownFile) -> Iterator[str]:
    """What is to be said of a file: whose it was first, for whom it is here, what is wrong."""
    if file.used_by != (file.file.name,):
        yield f"has blocks of {', '.join(file.used_by)}"
    if file.file.origin:
        yield f"written for {file.file.origin}"
    if file.codecs:
        yield f"encoded by {', '.join(file.codecs)}"
    if file.damage:
        first = file.damage[0]
        yield f"damaged: {first.error.what}: expected {first.expected}, found {first.found}"


def _print_tensors(
    console: Console, tensors: list[ShownTensor], *, limit: int | None, parts: bool
) -> None:
    # Where files are named, what ranks have alike is not one line.
    alike = [[tensor] for tensor in tensors] if parts else _alike(tensors)
    columns = ("tensor", "dtype", "shape", "bytes", "parts", "file" if parts else "")
    table = output.table(*columns, right=("bytes", "parts"))
    for same in alike[:limit]:
        table.add_row(*_row(same, parts=parts))
        for part in same[0].parts if parts and len(same[0].parts) > 1 else ():
            box = f"  [{box_text(part.box)}]"
            table.add_row(box, "", _shape(part.box.shape), f"{part.size_bytes:,}", "", part.file)
    console.print()
    console.print(table)
    _print_rest(console, sum(map(len, alike)) - sum(map(len, alike[:limit])), "tensor")


def _print_rest(console: Console, left: int, what: str) -> None:
    if left:
        console.print(f"… and {output.count_text(left, f'more {what}')}; --all lists them")


def _alike(tensors: list[ShownTensor]) -> list[list[ShownTensor]]:
    """Tensors that differ only in the rank that has them, together."""
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
    """Ranks in ascending order: `of rank 3`, `each of ranks 0-3, 8`, `each of 512 ranks`."""
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
