"""`laststep verify`: read everything that is stored, compare it with its digests, list all damage.

With --json: `sound`, and `checkpoints`, each with `step` (null for a folder outside a run whose
manifest is damaged), `folder`, `files`, `blocks`, `bytes`, `unchecked_bytes` and `damage`: a list
of `file`, `what`, `start`, `stop`, `expected`, `found` and `touches` (what lies in those bytes);
and `deleted_meanwhile`, the folders of a run that retention took before their turn came, which is
no damage. Ends with status 3 where there is damage.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from laststep.catalog.verify import VerifyReport, verify_checkpoint
from laststep.cli import output, places
from laststep.cli.status import DAMAGED
from laststep.errors import NotFound

if TYPE_CHECKING:
    from collections.abc import Iterator

    from laststep.catalog.verify import Damage, Progress

_SHOWN_NAMES = 3


def verify(
    path: places.RunOrCheckpoint,
    *,
    step: places.StepOption = None,
    threads: Annotated[int, typer.Option(help="How many read at once.", min=1, max=64)] = 4,
    as_json: output.AsJson = False,
) -> None:
    """Check every byte of a run's checkpoints, or of one, against its digests."""
    named = step is not None or places.is_checkpoint(path)
    chosen = [places.resolve(path, step)] if named else _all(path)
    reports: list[tuple[places.Place, VerifyReport]] = []
    deleted: list[str] = []
    console = output.console()
    for place in chosen:
        try:
            with _bar(place.folder) as progress:
                report = verify_checkpoint(
                    place.store, place.folder, threads=threads, progress=progress
                )
        except NotFound:
            if named:  # That very one was asked for, and nothing was checked.
                raise
            deleted.append(place.folder)
            if not as_json:
                console.print(f"{place.folder}: deleted meanwhile")
            continue
        reports.append((place, report))
        if not as_json:
            _print(place, report)
    sound = not any(report.damage for _, report in reports)
    if as_json:
        documents = [_document(place, report) for place, report in reports]
        output.print_json({"sound": sound, "checkpoints": documents, "deleted_meanwhile": deleted})
    elif not chosen:
        console.print(f"{path} has no checkpoint yet")
    if not sound:
        raise typer.Exit(DAMAGED)


def _all(path: str) -> list[places.Place]:
    """All checkpoints of a run."""
    run = places.open_run(path)
    return [
        places.Place(store=run.store, folder=listed.folder, listed=listed)
        for listed in run.checkpoints()
    ]


def _step_of(place: places.Place) -> int | None:
    return None if place.listed is None else place.listed.step


def _document(place: places.Place, report: VerifyReport) -> dict[str, object]:
    return {
        "step": _step_of(place),
        "folder": place.folder,
        "files": report.files,
        "blocks": report.blocks,
        "bytes": report.bytes,
        "unchecked_bytes": report.unchecked_bytes,
        "damage": [asdict(damage) for damage in report.damage],
    }


def _print(place: places.Place, report: VerifyReport) -> None:
    console = output.console()
    checked = (
        f"{output.count_text(report.files, 'file')}, {output.count_text(report.blocks, 'block')}, "
        f"{output.size_text(report.bytes)}"
    )
    if not report.damage:
        console.print(f"{place.folder}: sound ({checked})")
        return
    console.print(
        f"{place.folder}: DAMAGED in {output.count_text(len(report.damage), 'place')} "
        f"({checked} checked)"
    )
    for damage in report.damage:
        console.print(f"  {_line(damage)}")
    if report.unchecked_bytes:
        size = output.size_text(report.unchecked_bytes)
        console.print(f"  {size} could not be checked: the digests that vouch for them are lost")


def _line(damage: Damage) -> str:
    names = ", ".join(damage.touches[:_SHOWN_NAMES])
    more = len(damage.touches) - _SHOWN_NAMES
    touched = f" (holds {names}{f' and {more} more' if more > 0 else ''})" if names else ""
    place = ""
    if damage.stop > damage.start:
        place = f", bytes {damage.start} to {damage.stop}"
    elif damage.start:
        place = f", from byte {damage.start} on"
    return (
        f"{damage.file}: {damage.what}{place}{touched}: "
        f"expected {damage.expected}, found {damage.found}"
    )


@contextmanager
def _bar(title: str) -> Iterator[Progress | None]:
    """A progress bar on stderr where a person watches it."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn(title), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=output.console(stderr=True), transient=True) as bar:
        task = bar.add_task(title)
        yield lambda done, total: bar.update(task, completed=done, total=total)
