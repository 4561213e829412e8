"""`laststep show`: what one checkpoint holds.

With --json: `step`, `epoch`, `attempt`, `folder`, `run`, `created_s`, `size_bytes` (of its data
files, as its manifest lists them), `format`, `laststep` (the version that wrote it), `metrics`,
`metadata`, `lineage` (as in `ls`; null outside a run), `pinned`, `continues`, `references`,
`self_contained`, `items` (`name`, `kind`, `file`, `tensors`, `size_bytes`), `files` (`name`,
`size_bytes`, `header_bytes`, `header_digest`, `error`), and `tensors` and `objects`, each with
`name` (item/name), `file`, `size_bytes`, the tensors also with `dtype` and `shape`. Reads manifest
and headers, never data; `verify` does that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from laststep.catalog import decision
from laststep.catalog.groups import files_of
from laststep.cli import output, places
from laststep.cli.listing import lineage_of
from laststep.codecs.digests import digest_text
from laststep.errors import Corrupt, LaststepError, NotFound
from laststep.format import manifest
from laststep.format.header import Header, decode_header
from laststep.terms import MANIFEST_NAME

if TYPE_CHECKING:
    from rich.console import Console

    from laststep.format.manifest import Commit, FileRecord
    from laststep.storage.store import Reader, Store

_SHOWN_TENSORS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    """A data file, its header if that can be read, and what is wrong with the file."""

    record: FileRecord
    header: Header | None
    error: LaststepError | None


def show(
    path: places.RunOrCheckpoint,
    *,
    step: places.StepOption = None,
    all_tensors: Annotated[
        bool, typer.Option("--all", help=f"List all tensors, not only {_SHOWN_TENSORS}.")
    ] = False,
    as_json: output.AsJson = False,
) -> None:
    """Show what a checkpoint holds: the newest of a run, or that of --step."""
    place = places.resolve(path, step)
    commit = _commit(place)
    records = files_of(place.store, place.folder, commit)
    files = [_file(place.store, place.folder, record) for record in records]
    if any(file.error is not None for file in files):
        gone = decision.deleted(place.store, place.folder)
        if gone is not None:
            raise gone
    if as_json:
        output.print_json(_document(place, commit, files))
        return
    console = output.console()
    _print_facts(console, place, commit)
    _print_items(console, commit)
    _print_files(console, files)
    _print_tensors(console, files, limit=None if all_tensors else _SHOWN_TENSORS)


def _commit(place: places.Place) -> Commit:
    name = f"{place.folder}/{MANIFEST_NAME}"
    try:
        data = place.store.read(name, limit_bytes=decision.MANIFEST_LIMIT_BYTES)
    except NotFound as error:
        raise decision.deleted(place.store, place.folder) or error from error
    decided = manifest.decode(data, where=f"{place.store.url}/{name}")
    if isinstance(decided, manifest.Abort):
        raise NotFound(
            "there is no checkpoint: the attempt was given up",
            where=f"{place.store.url}/{place.folder}",
            found=decided.reason,
        )
    return decided


def _file(store: Store, folder: str, record: FileRecord) -> _File:
    name = f"{folder}/{record.name}"
    error: LaststepError | None = None
    try:
        reader = store.open_reader(name, cached=True)
    except NotFound as missing:
        return _File(record=record, header=None, error=missing)
    try:
        if reader.size_bytes != record.size_bytes:
            how = "short" if reader.size_bytes < record.size_bytes else "long"
            error = Corrupt(
                f"a data file is too {how}",
                expected=f"{record.size_bytes} bytes",
                found=f"{reader.size_bytes} bytes",
            )
        header = _header(reader, name, record)
    except Corrupt as damage:
        return _File(record=record, header=None, error=error or damage)
    finally:
        reader.close()
    return _File(record=record, header=header, error=error)


def _header(reader: Reader, name: str, record: FileRecord) -> Header:
    region = bytearray(record.header_bytes)
    region = region[: reader.read_into(0, memoryview(region))]
    found = digest_text(bytes(region))
    if found != record.header_digest:
        expected = record.header_digest
        raise Corrupt("a header is damaged", where=name, expected=expected, found=found)
    data_bytes = record.size_bytes - record.header_bytes
    return decode_header(bytes(region), data_bytes=data_bytes, where=name)


def _full_name(header: Header, name: str) -> str:
    """Names in a file of one item do not repeat the item's name."""
    return name if header.item is None else f"{header.item}/{name}"


def _tensors(files: list[_File]) -> list[dict[str, object]]:
    return [
        {
            "name": _full_name(file.header, entry.name),
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "size_bytes": entry.stop - entry.start,
            "file": file.record.name,
        }
        for file in files
        if file.header is not None
        for entry in file.header.tensors
    ]


def _document(place: places.Place, commit: Commit, files: list[_File]) -> dict[str, object]:
    listed = place.listed
    return {
        "step": commit.step,
        "epoch": commit.epoch,
        "attempt": commit.attempt,
        "folder": place.folder,
        "run": commit.run,
        "created_s": commit.created_s,
        "size_bytes": commit.size_bytes,
        "format": commit.format,
        "laststep": commit.laststep,
        "metrics": commit.metrics,
        "metadata": commit.metadata,
        "lineage": None if listed is None else lineage_of(listed),
        "pinned": False if listed is None else listed.pinned,
        "continues": commit.continues,
        "references": list(commit.references),
        "self_contained": not commit.references,
        "items": [
            {
                "name": item.name,
                "kind": item.kind,
                "file": item.file,
                "tensors": item.tensors,
                "size_bytes": item.size_bytes,
            }
            for item in commit.items
        ],
        "files": [
            {
                "name": file.record.name,
                "size_bytes": file.record.size_bytes,
                "header_bytes": file.record.header_bytes,
                "header_digest": file.record.header_digest,
                "error": None if file.error is None else str(file.error),
            }
            for file in files
        ],
        "tensors": _tensors(files),
        "objects": [
            {
                "name": _full_name(file.header, entry.name),
                "size_bytes": entry.stop - entry.start,
                "file": file.record.name,
            }
            for file in files
            if file.header is not None
            for entry in file.header.objects
        ],
    }


def _print_facts(console: Console, place: places.Place, commit: Commit) -> None:
    size = output.size_text(commit.size_bytes)
    size += f" in {output.count_text(commit.file_count, 'data file')}"
    listed = place.listed
    lineage = "not in a run" if listed is None else lineage_of(listed)
    if listed is not None and listed.superseded_by is not None:
        lineage += f" by {listed.superseded_by}"
    facts = {
        "step": f"{commit.step} (epoch {commit.epoch}, attempt {commit.attempt})",
        "folder": f"{place.store.url}/{place.folder}",
        "saved": f"{output.time_text(commit.created_s)} by laststep {commit.laststep}, "
        f"format {commit.format}",
        "size": size,
        "metrics": output.metrics_text(commit.metrics) or "none",
        "metadata": "none" if commit.metadata is None else str(output.plain(commit.metadata)),
        "lineage": lineage + (", pinned" if listed is not None and listed.pinned else ""),
        "continues": commit.continues or "nothing, it is the first",
        "self-contained": "yes: a copy of the folder opens on its own"
        if not commit.references
        else f"no: it needs {', '.join(commit.references)}",
    }
    table = output.table("", "")
    table.show_header = False
    for name, value in facts.items():
        table.add_row(name, value)
    console.print(table)


def _print_items(console: Console, commit: Commit) -> None:
    columns = ("item", "kind", "tensors", "size", "file")
    table = output.table(*columns, right=("tensors", "size"))
    for item in commit.items:
        size = output.size_text(item.size_bytes)
        table.add_row(item.name, item.kind, f"{item.tensors:,}", size, item.file)
    console.print()
    console.print(table)


def _print_files(console: Console, files: list[_File]) -> None:
    table = output.table("file", "size", "header", "", right=("size", "header"))
    for file in files:
        table.add_row(
            file.record.name,
            output.size_text(file.record.size_bytes),
            output.size_text(file.record.header_bytes),
            "" if file.error is None else f"damaged: {file.error}",
        )
    console.print()
    console.print(table)


def _print_tensors(console: Console, files: list[_File], *, limit: int | None) -> None:
    rows = [
        (
            _full_name(file.header, entry.name),
            entry.dtype,
            "×".join(map(str, entry.shape)) or "scalar",  # noqa: RUF001 (the sign for sizes)
            f"{entry.stop - entry.start:,}",
        )
        for file in files
        if file.header is not None
        for entry in file.header.tensors
    ]
    table = output.table("tensor", "dtype", "shape", "bytes", right=("bytes",))
    for row in rows[:limit]:
        table.add_row(*row)
    console.print()
    console.print(table)
    left = len(rows) - len(rows[:limit])
    if left:
        console.print(f"… and {output.count_text(left, 'more tensor')}; --all lists them")
