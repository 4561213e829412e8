"""`laststep ls` and `du`: the checkpoints of a run, the status of its tiers, and shared files."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from laststep.catalog.retention import sharing_of
from laststep.catalog.run import Run
from laststep.cli import places
from laststep.cli.output import (
    FAILED,
    AsJson,
    count_text,
    fields,
    metrics_text,
    print_json,
    print_table,
    say,
    size_text,
    time_text,
)
from laststep.constants import duration_text
from laststep.errors import NotFoundError, UsageError
from laststep.storage.registry import open_store
from laststep.tiers.replicas import replica_status

if TYPE_CHECKING:
    from collections.abc import Sequence

    from laststep.catalog.listing import Listed, OpenAttempt
    from laststep.catalog.retention import Sharing
    from laststep.tiers.replicas import ReplicaStatus


def ls(
    run: places.RunPath,
    urls: Annotated[
        list[str] | None,
        typer.Argument(metavar="URL", help="With --tiers: further places of the run."),
    ] = None,
    *,
    tiers: Annotated[bool, typer.Option("--tiers", help="How far each tier has come.")] = False,
    as_json: AsJson = False,
) -> None:
    """List the checkpoints of a run, newest last; or its tiers, nearest first."""
    if tiers:
        try:
            opened = places.open_run(run)
        except NotFoundError:
            if not urls:
                raise
            opened = Run(open_store(run), None)  # lost: the replicas may have checkpoints
        _print_tiers(opened, urls or (), as_json=as_json)
        return
    if urls:
        raise typer.BadParameter("several places are listed by --tiers", param_hint="URL")
    opened = places.open_run(run)
    checkpoints, attempts = opened.look()
    if as_json:
        print_json(
            {
                "run": opened.store.url,
                "checkpoints": [_document(item) for item in checkpoints],
                "attempts": [
                    fields(item, "step", "folder", "size_bytes", "alive", "is_copy")
                    for item in attempts
                ],
            }
        )
        return
    _print(run, checkpoints, attempts)


def lineage_of(listed: Listed) -> str:
    """Return the position of a checkpoint in one word."""
    if listed.on_lineage:
        return "current"
    return "abandoned" if listed.superseded_by is None else "superseded"


def is_in_progress(attempt: OpenAttempt, checkpoints: Sequence[Listed]) -> bool:
    """Return True if a living writer may still commit the attempt."""
    return attempt.alive and (attempt.is_copy or not _is_overtaken(attempt, checkpoints))


def why_no_manifest(attempt: OpenAttempt, checkpoints: Sequence[Listed]) -> str:
    """Explain a folder without a manifest that is not in progress. The folder alone does not show
    whether it never had a manifest or has lost it."""
    if attempt.is_copy:
        return "an interrupted copy; `laststep copy` resumes it if the source still has it"
    if _is_overtaken(attempt, checkpoints):
        return "a checkpoint that is partly deleted, or one whose manifest was lost"
    return "an unfinished save, or one whose manifest was lost"


def _is_overtaken(attempt: OpenAttempt, checkpoints: Sequence[Listed]) -> bool:
    """Return True if a folder without a manifest once had one: deletion removes the manifest first.

    A writer commits in the order of its attempts, and a new writer aborts the open attempts of dead
    ones. So the attempt is overtaken if there is a later commit.
    """
    return any(
        later.attempt > attempt.attempt
        if later.term == attempt.term
        else later.term > attempt.term and not attempt.alive
        for later in checkpoints
    )


def _document(item: Listed) -> dict[str, object]:
    told: dict[str, object] = {
        "shared_bytes": None,
        "lossy": (),
        "omitted_items": (),
        "metrics": {},
    }
    return {
        **fields(item, "step", "folder", "created_s", "size_bytes"),
        **(told if item.commit is None else fields(item.commit, *told)),
        "lineage": lineage_of(item),
        **fields(item, "superseded_by", "pinned", "term", "attempt", "incomplete"),
        "error": None if item.error is None else str(item.error),
    }


def _row(item: Listed, *, share: bool) -> dict[str, str]:
    """Return the table cells by column; with `share`, also the size of its new files."""
    new = {"new": ""}
    if item.commit is not None:
        new["new"] = size_text(item.commit.size_bytes - item.commit.shared_bytes)
    return {
        "step": str(item.step),
        "when": time_text(item.created_s),
        "size": size_text(item.size_bytes),
        **(new if share else {}),
        "metrics": "" if item.commit is None else metrics_text(item.commit.metrics),
        "status": _status(item),
        "pinned": "pinned" if item.pinned else "",
        "folder": item.folder,
    }


def _status(item: Listed) -> str:
    place = "●" if item.on_lineage else lineage_of(item)
    if item.commit is None:
        return f"{place} {_unreadable(item)}"
    place += f" rounded to {', '.join(item.commit.lossy)}" if item.commit.lossy else ""
    if item.commit.omitted_items:
        place += f" only {', '.join(record.name for record in item.commit.items)}"
    return place if item.incomplete is None else f"{place} incomplete"


def _unreadable(item: Listed) -> str:
    return "of a later format" if isinstance(item.error, UsageError) else "damaged"


def _dimmed(checkpoints: Sequence[Listed]) -> list[str | None]:
    """Return the styles of rows: checkpoints off the lineage are dimmed."""
    return [None if item.on_lineage else "dim" for item in checkpoints]


def _print(run: str, checkpoints: Sequence[Listed], attempts: Sequence[OpenAttempt]) -> None:
    if not checkpoints:
        say(f"{run} has no checkpoint yet")
    share = any(item.commit is not None and item.commit.shared_bytes for item in checkpoints)
    print_table([_row(item, share=share) for item in checkpoints], _dimmed(checkpoints))
    for item in checkpoints:
        if item.error is not None:
            say(f"step {item.step} is {_unreadable(item)}: {item.error}")
        elif item.incomplete is not None:
            say(f"step {item.step} is incomplete: {item.incomplete}")
    for attempt in attempts:
        size = size_text(attempt.size_bytes)
        if is_in_progress(attempt, checkpoints):
            text = f"is in progress ({attempt.folder}, {size} so far)"
        else:
            text = f"has no manifest: {why_no_manifest(attempt, checkpoints)}"
            text += f" ({attempt.folder}, {size})"
        say(f"step {attempt.step} {text}")


def _print_tiers(run: Run, urls: Sequence[str], *, as_json: bool) -> None:
    found, now_s = replica_status(run, urls), time.time()
    if as_json:
        documents = [_tier_document(one, now_s) for one in found]
        print_json({"run": run.store.url, "tiers": documents})
    else:
        print_table([_tier_row(one, now_s) for one in found])
        for one in found:
            if one.error is not None:
                say(f"cannot read {one.tier}: {one.error}")
    if any(one.error is not None for one in found):
        raise typer.Exit(FAILED)


def _tier_document(one: ReplicaStatus, now_s: float) -> dict[str, object]:
    newest = one.newest
    return {
        "tier": one.tier,
        "step": None if newest is None else newest.name.step,
        "folder": None if newest is None else newest.name.folder,
        "created_s": None if newest is None else newest.created_s,
        "age_s": None if newest is None else now_s - newest.created_s,
        **fields(one, "checkpoints", "behind_steps", "behind_s", "omitted_items", "error"),
    }


def _tier_row(one: ReplicaStatus, now_s: float) -> dict[str, str]:
    step = age = ""
    count, risk = ("?", "unknown") if one.error else ("0", "everything")
    if one.newest is not None:
        step, age = str(one.newest.name.step), duration_text(max(now_s - one.newest.created_s, 0.0))
        count, risk = f"{one.checkpoints:,}", _at_risk(one)
    return {"tier": one.tier, "step": step, "age": age, "checkpoints": count, "at risk": risk}


def _at_risk(one: ReplicaStatus) -> str:
    """Describe the work that is lost if all nearer tiers are lost, apart from training since the
    last save."""
    text = ""
    if one.behind_s or one.behind_steps:
        steps = count_text(one.behind_steps or 0, "step")
        text = f"{steps}, {duration_text(one.behind_s or 0)}"
    if one.omitted_items:  # the replica has partial checkpoints
        rest = f"; of {', '.join(one.items)} {text}" if text else ""
        return f"all of {', '.join(one.omitted_items)}{rest}"
    return text or "nothing"


def du(run: places.RunPath, *, as_json: AsJson = False) -> None:
    """Show the disk space that checkpoints take, and how much of it they share."""
    opened = places.open_run(run)
    checkpoints = opened.checkpoints()
    sharing = sharing_of(opened.store, checkpoints)
    apart_bytes = sum(item.stored_bytes for item in checkpoints)
    stored_bytes = sharing.stored_bytes()
    saved_bytes = apart_bytes - stored_bytes
    if as_json:
        print_json(
            {
                "run": opened.store.url,
                "checkpoints": [_usage_document(item, sharing) for item in checkpoints],
                "apart_bytes": apart_bytes,
                "stored_bytes": stored_bytes,
                "saved_bytes": saved_bytes,
            }
        )
        return
    if not checkpoints:
        say(f"{run} has no checkpoint yet")
        return
    print_table([_usage_row(item, sharing) for item in checkpoints], _dimmed(checkpoints))
    total = f"{count_text(len(checkpoints), 'checkpoint')}: "
    if saved_bytes:
        apart = size_text(apart_bytes)
        total += f"{apart} if each stood alone, {size_text(saved_bytes)} saved, "
    say(f"{total}{size_text(stored_bytes)} on the disk")


def _new_bytes(item: Listed) -> int:
    return item.stored_bytes - (0 if item.commit is None else item.commit.shared_bytes)


def _usage_document(item: Listed, sharing: Sharing) -> dict[str, object]:
    return {
        **fields(item, "step", "folder"),
        "size_bytes": item.stored_bytes,
        "new_bytes": _new_bytes(item),
        "alone_bytes": sharing.freed_bytes([item.folder]),
        "shared_with": sharing.sharers(item.folder),
        "files": None if item.commit is None else item.commit.written.files,
        "error": None if item.error is None else str(item.error),
    }


def _usage_row(item: Listed, sharing: Sharing) -> dict[str, str]:
    others = sharing.sharers(item.folder)
    return {
        "step": str(item.step),
        "size": size_text(item.stored_bytes),
        "new": size_text(_new_bytes(item)),
        "only here": size_text(sharing.freed_bytes([item.folder])),
        "files": "" if item.commit is None else f"{item.commit.written.files:,}",
        "shared with": count_text(len(others), "checkpoint") if others else "",
        "folder": item.folder,
    }
