"""`laststep ls`: the checkpoints of a run, the last committed at the bottom.

With --json: `run`, `checkpoints` and `attempts`. A checkpoint has `step`, `folder`, `created_s`,
`size_bytes` (of its data files), `shared_bytes` (of those that were written for earlier ones; null
where the manifest cannot be read), `lossy` (how tensors in it were rounded, none where it is
exact), `left_out` (the items that it lacks, if it is an excerpt), `metrics`, `lineage` ("current",
"abandoned" or "superseded"), `superseded_by`, `pinned`, `epoch`, `attempt`, `error` (null, or why
its manifest cannot be read) and `incomplete` (null, or which data file is missing or has the wrong
size). An attempt, a save that is not committed, has `step`, `folder`, `size_bytes`, `alive` and
`is_copy` (whether `laststep copy` brings it). With --tiers, `standings` says what is printed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from laststep.cli import output, places
from laststep.cli.standings import print_tiers
from laststep.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from laststep.catalog.listing import Listed, OpenAttempt


def ls(
    run: places.RunPath,
    urls: Annotated[
        list[str] | None,
        typer.Argument(metavar="URL", help="With --tiers: further places of the run."),
    ] = None,
    *,
    tiers: Annotated[bool, typer.Option("--tiers", help="How far each tier has come.")] = False,
    as_json: output.AsJson = False,
) -> None:
    """List the checkpoints of a run, newest last; or its tiers, nearest first."""
    if tiers:
        opened = places.open_or_lost(run) if urls else places.open_run(run)
        print_tiers(opened, urls or (), as_json=as_json)
        return
    if urls:
        raise typer.BadParameter("several places are listed by --tiers", param_hint="URL")
    opened = places.open_run(run)
    checkpoints, attempts = opened.look()
    if as_json:
        output.print_json(
            {
                "run": opened.store.url,
                "checkpoints": [_document(item) for item in checkpoints],
                "attempts": [
                    output.fields(item, "step", "folder", "size_bytes", "alive", "is_copy")
                    for item in attempts
                ],
            }
        )
        return
    _print(run, checkpoints, attempts)


def lineage_of(listed: Listed) -> str:
    """One word for the place of a checkpoint: current, superseded or abandoned."""
    if listed.on_lineage:
        return "current"
    return "abandoned" if listed.superseded_by is None else "superseded"


def is_in_progress(attempt: OpenAttempt, checkpoints: Sequence[Listed]) -> bool:
    """Whether a writer that is alive may still commit it."""
    return attempt.alive and (attempt.is_copy or not _is_overtaken(attempt, checkpoints))


def why_no_manifest(attempt: OpenAttempt, checkpoints: Sequence[Listed]) -> str:
    """What a folder without a manifest may be, where it is not in progress: the folder alone does
    not tell what never had one from what lost it."""
    if attempt.is_copy:
        return "a copy that was interrupted; `laststep copy` goes on with it if its source has it"
    if _is_overtaken(attempt, checkpoints):
        return "a checkpoint that is partly deleted, or one whose manifest was lost"
    return "an unfinished save, or one whose manifest was lost"


def _is_overtaken(attempt: OpenAttempt, checkpoints: Sequence[Listed]) -> bool:
    """Whether a folder without a manifest had one: it loses that first when it is deleted.

    A writer commits in the order of its attempts, and a new one gives up what the dead left open.
    """
    return any(
        later.attempt > attempt.attempt
        if later.epoch == attempt.epoch
        else later.epoch > attempt.epoch and not attempt.alive
        for later in checkpoints
    )


def _document(item: Listed) -> dict[str, object]:
    return {
        **output.fields(item, "step", "folder", "created_s", "size_bytes"),
        "shared_bytes": None if item.commit is None else item.commit.shared_bytes,
        "lossy": () if item.commit is None else item.commit.lossy,
        "left_out": () if item.commit is None else item.commit.left_out,
        "metrics": {} if item.commit is None else item.commit.metrics,
        "lineage": lineage_of(item),
        **output.fields(item, "superseded_by", "pinned", "epoch", "attempt", "incomplete"),
        "error": None if item.error is None else str(item.error),
    }


_NUMBERS = ("step", "size", "new")


def _row(item: Listed, *, share: bool) -> dict[str, str]:
    """What the table says of it, by column; with `share`, what of it was new."""
    new = {"new": "" if item.commit is None else output.size_text(item.commit.new_bytes)}
    return {
        "step": str(item.step),
        "when": output.time_text(item.created_s),
        "size": output.size_text(item.size_bytes),
        **(new if share else {}),
        "metrics": "" if item.commit is None else output.metrics_text(item.commit.metrics),
        "status": _status(item),
        "pinned": "pinned" if item.pinned else "",
        "folder": item.folder,
    }


def _status(item: Listed) -> str:
    """Its place on the lineage, and what is wrong with it."""
    place = "●" if item.on_lineage else lineage_of(item)
    if item.commit is None:
        return f"{place} {_unreadable(item)}"
    place += f" rounded to {', '.join(item.commit.lossy)}" if item.commit.lossy else ""
    if item.commit.left_out:
        place += f" only {', '.join(record.name for record in item.commit.items)}"
    return place if item.incomplete is None else f"{place} incomplete"


def _unreadable(item: Listed) -> str:
    """Why its manifest cannot be read, in a word or two."""
    return "of a later format" if isinstance(item.error, UsageError) else "damaged"


def _print_table(checkpoints: Sequence[Listed]) -> None:
    share = any(item.commit is not None and item.commit.shared_bytes for item in checkpoints)
    rows = [_row(item, share=share) for item in checkpoints]
    output.print_checkpoints(rows, _NUMBERS, dim=[not item.on_lineage for item in checkpoints])


def _print(run: str, checkpoints: Sequence[Listed], attempts: Sequence[OpenAttempt]) -> None:
    console = output.console()
    if not checkpoints:
        console.print(f"{run} has no checkpoint yet")
    else:
        _print_table(checkpoints)
    for item in checkpoints:
        if item.error is not None:
            console.print(f"step {item.step} is {_unreadable(item)}: {item.error}")
        elif item.incomplete is not None:
            console.print(f"step {item.step} is incomplete: {item.incomplete}")
    for attempt in attempts:
        size = output.size_text(attempt.size_bytes)
        if is_in_progress(attempt, checkpoints):
            text = f"is in progress ({attempt.folder}, {size} so far)"
        else:
            text = f"has no manifest: {why_no_manifest(attempt, checkpoints)}"
            text += f" ({attempt.folder}, {size})"
        console.print(f"step {attempt.step} {text}")
