"""`laststep verify`: read all stored bytes, compare them with their digests, list all damage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer

from laststep.catalog.attempt import looks
from laststep.catalog.run import Run
from laststep.cli import listing, places
from laststep.cli.output import (
    DAMAGED,
    AsJson,
    Threads,
    bar,
    count_text,
    fields,
    print_json,
    say,
    size_text,
)
from laststep.constants import listed
from laststep.errors import CorruptError, NotFoundError
from laststep.read.verify import VerifyReport, verify_checkpoint
from laststep.storage.registry import open_store

if TYPE_CHECKING:
    from laststep.catalog.listing import OpenAttempt
    from laststep.read.blocks import Damage

_SHOWN_NAMES = 3
_DAMAGE_FIELDS = ("file", "what", "start", "stop", "expected", "found", "touches")
"""Fields of a damage in the --json output."""
_HIDING = ("missing file", "index")
"""Kinds of damage that hide which tensors are affected."""


def verify(
    path: places.RunOrCheckpoint,
    *,
    step: places.StepOption = None,
    threads: Threads = 4,
    as_json: AsJson = False,
) -> None:
    """Check every byte against its digest.

    Checks all checkpoints of a run, or one.
    """
    named = step is not None or places.is_checkpoint(path)
    wanted = _one(path, step) if named else _all(path)
    reports: list[tuple[places.CheckpointPath, VerifyReport]] = []
    deleted: list[str] = []
    pending = wanted.places
    for _ in looks():
        gone_before = len(deleted)
        for place in pending:
            try:
                with bar(place.folder) as show:
                    report = verify_checkpoint(
                        place.store, place.folder, threads=threads, progress=show
                    )
            except NotFoundError:
                if named:  # The requested checkpoint itself is gone: nothing was checked.
                    raise
                deleted.append(place.folder)
                if not as_json:
                    say(f"{place.folder}: deleted in the meantime")
                continue
            reports.append((place, report))
            if not as_json:
                _print(place, report)
        if len(deleted) == gone_before:
            break
        # Retention deleted a checkpoint after a newer commit: check the new one too.
        wanted = _all(path)
        known = {*deleted, *(checked.folder for checked, _ in reports)}
        pending = tuple(found for found in wanted.places if found.folder not in known)
    sound = wanted.error is None and not any(report.damage for _, report in reports)
    if as_json:
        print_json(
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
    """Checkpoints to check, other folders without a manifest, and damage to the records of the
    run."""

    places: tuple[places.CheckpointPath, ...] = ()
    attempts: tuple[OpenAttempt, ...] = ()
    error: CorruptError | None = None


def _one(path: str, step: int | None) -> _ToVerify:
    try:
        return _ToVerify(places=(places.resolve(path, step),))
    except CorruptError as error:  # in a record of the run
        return _ToVerify(error=error)


def _all(path: str) -> _ToVerify:
    """Return all checkpoints of a run; if the run's record is damaged, they are found without
    it."""
    damage: CorruptError | None = None
    try:
        run = places.open_run(path)
    except CorruptError as error:
        damage = error
        run = Run(open_store(path), None)
    try:
        checkpoints, attempts = run.look()
    except CorruptError as error:  # in the record of a term
        return _ToVerify(error=damage or error)
    return _ToVerify(
        places=tuple(places.CheckpointPath(run.store, item.folder, item) for item in checkpoints),
        attempts=tuple(attempt for attempt in attempts if attempt.size_bytes),
        error=damage,
    )


def _print_rest(path: str, wanted: _ToVerify) -> None:
    checkpoints = [place.listed for place in wanted.places if place.listed is not None]
    for attempt in wanted.attempts:
        why = "a save in progress"
        if not listing.is_in_progress(attempt, checkpoints):
            why = listing.why_no_manifest(attempt, checkpoints)
        size = size_text(attempt.size_bytes)
        say(f"{attempt.folder}: no manifest: {why} ({size}, not checked)")
    if wanted.error is not None:
        say(f"the run is DAMAGED: {wanted.error}")
    elif not wanted.places:
        say(f"{path} has no checkpoint yet")


def _document(place: places.CheckpointPath, report: VerifyReport) -> dict[str, object]:
    return {
        "step": None if place.listed is None else place.listed.step,
        "folder": place.folder,
        **fields(report, "files", "blocks", "bytes", "unchecked_bytes"),
        "damage": [fields(damage, *_DAMAGE_FIELDS) for damage in report.damage],
    }


def _print(place: places.CheckpointPath, report: VerifyReport) -> None:
    checked = (
        f"{count_text(report.files, 'file')}, {count_text(report.blocks, 'block')}, "
        f"{size_text(report.bytes)}"
    )
    if not report.damage:
        say(f"{place.folder}: sound ({checked})")
        return
    say(f"{place.folder}: DAMAGED in {count_text(len(report.damage), 'place')} ({checked} checked)")
    for damage in report.damage:
        say(f"  {_line(damage)}")
    if report.unchecked_bytes:
        size = size_text(report.unchecked_bytes)
        say(f"  {size} could not be checked: the digests that vouch for them are lost")
    if any(damage.what in _HIDING for damage in report.damage):
        say(f"  `laststep show {place.store.url}/{place.folder}` lists what is left of it")


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
