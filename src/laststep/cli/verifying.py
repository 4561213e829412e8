"""`laststep verify`: read everything that is stored, compare it with its digests, list all damage.

With --json: `sound`, and `checkpoints`, each with `step` (null for a folder outside a run whose
manifest is damaged), `folder`, `files`, `blocks`, `bytes`, `unchecked_bytes` and `damage`: a list
of `file`, `what`, `start`, `stop`, `expected`, `found` and `touches` (what lies in those bytes);
`deleted_meanwhile`, the folders of a run that retention took before their turn came, and
`no_manifest`, the folders that hold files but no checkpoint, neither of which is damage; and
`run_error`, null or what is wrong with the records of the run. Ends with status 3 where there is
damage.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from laststep.catalog import decision
from laststep.catalog.run import Run
from laststep.cli import listing, output, places
from laststep.cli.status import DAMAGED
from laststep.errors import CorruptError, NotFoundError
from laststep.read.verify import VerifyReport, verify_checkpoint
from laststep.storage.registry import open_store
from laststep.terms import listed

if TYPE_CHECKING:
    from laststep.catalog.listing import OpenAttempt
    from laststep.read.blocks import Damage

_SHOWN_NAMES = 3
_DAMAGE_FIELDS = ("file", "what", "start", "stop", "expected", "found", "touches")
"""What --json says of damage."""
_HIDING = ("missing file", "index")
"""Damage after which nobody knows which tensors it touches."""


def verify(
    path: places.RunOrCheckpoint,
    *,
    step: places.StepOption = None,
    threads: Annotated[int, typer.Option(help="How many read at once.", min=1, max=64)] = 4,
    as_json: output.AsJson = False,
) -> None:
    """Check every byte against its digest.

    Of all checkpoints of a run, or of one.
    """
    named = step is not None or places.is_checkpoint(path)
    wanted = _one(path, step) if named else _all(path)
    reports: list[tuple[places.CheckpointPath, VerifyReport]] = []
    deleted: list[str] = []
    pending = list(wanted.places)
    while pending:
        place = pending.pop(0)
        try:
            with output.bar(place.folder) as show:
                report = verify_checkpoint(
                    place.store, place.folder, threads=threads, progress=show
                )
        except NotFoundError:
            if named:  # That very one was asked for, and nothing was checked.
                raise
            deleted.append(place.folder)
            if not as_json:
                output.console().print(f"{place.folder}: deleted meanwhile")
            if not pending and len(deleted) < decision.MOST_TRIES:
                # A newer commit made retention delete it: check that one too.
                wanted = _all(path)
                known = {*deleted, *(checked.folder for checked, _ in reports)}
                pending = [found for found in wanted.places if found.folder not in known]
            continue
        reports.append((place, report))
        if not as_json:
            _print(place, report)
    sound = wanted.error is None and not any(report.damage for _, report in reports)
    if as_json:
        output.print_json(
            {
                "sound": sound,
                "checkpoints": [_document(place, report) for place, report in reports],
                "deleted_meanwhile": deleted,
                "no_manifest": [attempt.folder for attempt in wanted.attempts],
                "run_error": None if wanted.error is None else str(wanted.error),
            }
        )
    else:
        _print_rest(path, wanted)
    if not sound:
        raise typer.Exit(DAMAGED)


@dataclass(frozen=True, slots=True, kw_only=True)
class _ToVerify:
    """What there is to check, what there is besides, and damage to the records of the run."""

    places: tuple[places.CheckpointPath, ...] = ()
    attempts: tuple[OpenAttempt, ...] = ()
    error: CorruptError | None = None


def _one(path: str, step: int | None) -> _ToVerify:
    """The checkpoint that was asked for."""
    try:
        return _ToVerify(places=(places.resolve(path, step),))
    except CorruptError as error:  # a record of the run
        return _ToVerify(error=error)


def _all(path: str) -> _ToVerify:
    """All checkpoints of a run; they are found without the run's record, if that is damaged."""
    damage: CorruptError | None = None
    try:
        run = places.open_run(path)
    except CorruptError as error:
        damage = error
        run = Run(open_store(path), None)
    try:
        checkpoints, attempts = run.look()
    except CorruptError as error:  # the record of an epoch
        return _ToVerify(error=damage or error)
    return _ToVerify(
        places=tuple(
            places.CheckpointPath(store=run.store, folder=item.folder, listed=item)
            for item in checkpoints
        ),
        attempts=tuple(attempt for attempt in attempts if attempt.size_bytes),
        error=damage,
    )


def _print_rest(path: str, wanted: _ToVerify) -> None:
    console = output.console()
    checkpoints = [place.listed for place in wanted.places if place.listed is not None]
    for attempt in wanted.attempts:
        why = "a save in progress"
        if not listing.is_in_progress(attempt, checkpoints):
            why = listing.why_no_manifest(attempt, checkpoints)
        size = output.size_text(attempt.size_bytes)
        console.print(f"{attempt.folder}: no manifest: {why} ({size}, not checked)")
    if wanted.error is not None:
        console.print(f"the run is DAMAGED: {wanted.error}")
    elif not wanted.places:
        console.print(f"{path} has no checkpoint yet")


def _document(place: places.CheckpointPath, report: VerifyReport) -> dict[str, object]:
    return {
        "step": None if place.listed is None else place.listed.step,
        "folder": place.folder,
        **output.fields(report, "files", "blocks", "bytes", "unchecked_bytes"),
        "damage": [output.fields(damage, *_DAMAGE_FIELDS) for damage in report.damage],
    }


def _print(place: places.CheckpointPath, report: VerifyReport) -> None:
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
    if any(damage.what in _HIDING for damage in report.damage):
        console.print(
            f"  `laststep show {place.store.url}/{place.folder}` lists what is left of it"
        )


def _line(damage: Damage) -> str:
    touched = f" (holds {listed(damage.touches, _SHOWN_NAMES)})" if damage.touches else ""
    place = ""
    if damage.stop > damage.start:
        place = f", bytes {damage.start} to {damage.stop}"
    elif damage.start:
        place = f", from byte {damage.start} on"
    return (
        f"{damage.file}: {damage.what}{place}{touched}: "
        f"expected {damage.expected}, found {damage.found}"
    )
