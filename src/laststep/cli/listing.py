"""`laststep ls`, `du` and `verify`: the checkpoints of a run, its tiers, shared files, damage."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from laststep.browse import open_run
from laststep.catalog.attempt import looks
from laststep.catalog.retention import sharing_of
from laststep.catalog.run import Run
from laststep.cli import output, places
from laststep.cli.output import bar, count_text, fields, print_json, print_table, say, size_text
from laststep.codecs.digests import without_digests
from laststep.constants import duration_text, listed
from laststep.errors import CorruptError, NotFoundError, UsageError
from laststep.read.verify import VerifyReport, verify_checkpoint
from laststep.storage.registry import open_store
from laststep.tiers.replicas import replica_status

if TYPE_CHECKING:
    from collections.abc import Sequence

    from laststep.catalog.listing import Listed, OpenAttempt
    from laststep.tiers.replicas import ReplicaStatus


def ls(
    run: places.RunPath,
    urls: Annotated[
        list[str] | None,
        typer.Argument(metavar="URL", help="With --tiers: further places of the run."),
    ] = None,
    *,
    metrics: Annotated[bool, typer.Option("--metrics", help="Show all metrics.")] = False,
    tiers: Annotated[bool, typer.Option("--tiers", help="How far each tier has come.")] = False,
    as_json: output.AsJson = False,
) -> None:
    """List the checkpoints of a run, newest last.

    The size is that of the data files; `du` counts all files of a checkpoint.

    With --tiers, list the places of the run instead, nearest first.
    """
    if urls and not tiers:
        raise typer.BadParameter("several places are listed by --tiers", param_hint="URL")
    try:
        opened = open_run(run)
    except NotFoundError:
        if not urls:
            raise
        opened = Run(open_store(run), None)  # lost: the replicas may have checkpoints
    if tiers:
        _print_tiers(opened, urls or (), as_json=as_json)
        return
    checkpoints, attempts = opened.look()
    if as_json:
        print_json(
            {
                "run": opened.store.url,
                "checkpoints": [_document(item) for item in checkpoints],
                "attempts": [
                    fields(item, "step folder size_bytes alive is_copy") for item in attempts
                ],
            }
        )
    else:
        _print(run, checkpoints, attempts, all_metrics=metrics)


def lineage_of(listed: Listed) -> str:
    """Return the position of a checkpoint in one word."""
    if listed.on_lineage:
        return "current"
    return "abandoned" if listed.superseded_by is None else "superseded"


def attempt_text(attempt: OpenAttempt) -> str:
    """Describe a folder without a manifest, which may never have had one or have lost it."""
    if attempt.is_copy:
        why = "an unfinished copy, which `laststep copy` resumes"
    elif attempt.alive:
        why = "a save in progress, or a checkpoint that is being deleted"
    else:
        why = "an unfinished save, or a checkpoint whose manifest was deleted or lost"
    return f"no manifest: {why} ({attempt.folder}, {size_text(attempt.size_bytes)})"


def _document(item: Listed) -> dict[str, object]:
    commit = item.commit
    return {
        **fields(item, "step folder created_s size_bytes superseded_by pinned term attempt"),
        "shared_bytes": None if commit is None else commit.written.shared_bytes,
        "lossy": () if commit is None else commit.written.lossy,
        "omitted_items": () if commit is None else commit.omitted_items,
        "metrics": {} if commit is None else commit.metrics,
        "lineage": lineage_of(item),
        "incomplete": item.incomplete,
        "error": None if item.error is None else str(item.error),
    }


def _row(item: Listed, *, share: bool, metric: str | None) -> dict[str, str]:
    """Return the table cells by column; with `share`, also the size of its new files. `metric` is
    the only one to show; None shows all."""
    commit, new_bytes = item.commit, ""
    metrics = {} if commit is None else output.shown_metrics(commit.metrics)
    if metric is not None:
        metrics = {name: value for name, value in metrics.items() if name == metric}
    if commit is not None:
        new_bytes = size_text(commit.written.size_bytes - commit.written.shared_bytes)
    return {
        "step": str(item.step),
        "when": output.time_text(item.created_s),
        "size": size_text(item.size_bytes),
        **({"new": new_bytes} if share else {}),
        "status": _status(item),
        "pinned": "pinned" if item.pinned else "",
        "folder": item.folder,
        "metrics": output.metrics_text(metrics),
    }


def _main_metric(checkpoints: Sequence[Listed]) -> str:
    """Return the name of the one metric to show: a loss if there is one."""
    commits = [item.commit for item in checkpoints if item.commit is not None]
    names = [name for commit in commits for name in output.shown_metrics(commit.metrics)]
    losses = [name for name in ("eval_loss", "val_loss", "loss") if name in names]
    return (losses or names or [""])[0]


def _status(item: Listed) -> str:
    parts = [] if item.on_lineage else [lineage_of(item)]
    if item.commit is None:
        parts.append(_unreadable(item))
    elif item.incomplete is not None:
        parts.append("incomplete")
    elif not parts:
        parts.append("ok")
    if item.commit is not None and item.commit.written.lossy:
        parts.append(f"rounded to {', '.join(item.commit.written.lossy)}")
    if item.commit is not None and item.commit.omitted_items:
        parts.append(f"only {', '.join(record.name for record in item.commit.items)}")
    return ", ".join(parts)


def _unreadable(item: Listed) -> str:
    return "of a later format" if isinstance(item.error, UsageError) else "damaged"


def _print(
    run: str, checkpoints: Sequence[Listed], attempts: Sequence[OpenAttempt], *, all_metrics: bool
) -> None:
    if not checkpoints:
        say(f"{run} has no checkpoint yet")
    share = any(
        item.commit is not None and item.commit.written.shared_bytes for item in checkpoints
    )
    metric = None if all_metrics else _main_metric(checkpoints)
    print_table([_row(item, share=share, metric=metric) for item in checkpoints])
    for item in checkpoints:
        if item.error is not None:
            say(f"step {item.step} is {_unreadable(item)}: {item.error}")
        elif item.incomplete is not None:
            say(f"step {item.step} is incomplete: {item.incomplete}")
    for attempt in attempts:
        say(f"step {attempt.step} has {attempt_text(attempt)}")


def _print_tiers(run: Run, urls: Sequence[str], *, as_json: bool) -> None:
    found, now_s = replica_status(run, urls), time.time()
    if as_json:
        print_json({"run": run.store.url, "tiers": [_tier_document(tier, now_s) for tier in found]})
    else:
        print_table([_tier_row(tier, now_s) for tier in found])
        for tier in found:
            if tier.error is not None:
                say(f"cannot read {tier.tier}: {tier.error}")
    if any(tier.error is not None for tier in found):
        raise typer.Exit(output.FAILED)


def _tier_document(tier: ReplicaStatus, now_s: float) -> dict[str, object]:
    newest = tier.newest
    return {
        **fields(tier, "tier checkpoints behind_steps behind_s error"),
        "omitted_items": list(_omitted_items(tier)),
        "step": None if newest is None else newest.step,
        "folder": None if newest is None else newest.folder,
        "created_s": None if newest is None else newest.created_s,
        "age_s": None if newest is None else now_s - newest.created_s,
    }


def _tier_row(tier: ReplicaStatus, now_s: float) -> dict[str, str]:
    newest = tier.newest
    return {
        "tier": tier.tier,
        "step": "" if newest is None else str(newest.step),
        "age": "" if newest is None else duration_text(max(now_s - newest.created_s, 0.0)),
        "checkpoints": "?" if tier.error else f"{tier.checkpoints:,}",
        "at risk": _at_risk(tier),
    }


def _at_risk(tier: ReplicaStatus) -> str:
    """Describe the saved work that is lost if all nearer tiers are lost."""
    if tier.newest is None:
        return "unknown" if tier.error else "everything"
    text = ""
    if tier.behind_s or tier.behind_steps:
        steps = count_text(tier.behind_steps or 0, "step")
        text = f"{steps}, {duration_text(tier.behind_s or 0)}"
    if omitted := _omitted_items(tier):  # the replica has partial checkpoints
        return f"all of {', '.join(omitted)}" + (f"; of the rest {text}" if text else "")
    return text or "nothing"


def _omitted_items(tier: ReplicaStatus) -> tuple[str, ...]:
    commit = None if tier.newest is None else tier.newest.commit
    return () if commit is None else commit.omitted_items


def du(run: places.RunPath, *, as_json: output.AsJson = False) -> None:
    """Show the disk space of checkpoints, and what they share.

    The size is that of all files in the folder: the data files, which `ls` counts, and the indexes
    and the manifest.
    """
    opened = open_run(run)
    checkpoints = opened.checkpoints()
    sharing = sharing_of(opened.store, checkpoints)
    stored_bytes = sharing.stored_bytes()
    apart_bytes = sum(item.stored_bytes for item in checkpoints)
    documents = [
        {
            **fields(item, "step folder"),
            "size_bytes": item.stored_bytes,
            "alone_bytes": sharing.freed_bytes([item.folder]),
            "shared_with": sharing.sharers(item.folder),
            "error": None if item.error is None else str(item.error),
        }
        for item in checkpoints
    ]
    if as_json:
        totals = {"apart_bytes": apart_bytes, "stored_bytes": stored_bytes}
        print_json({"run": opened.store.url, "checkpoints": documents, **totals})
        return
    if not checkpoints:
        say(f"{run} has no checkpoint yet")
        return
    print_table(
        [
            {
                "step": str(item.step),
                "size": size_text(item.stored_bytes),
                "only here": size_text(sharing.freed_bytes([item.folder])),
                "folder": item.folder,
                "shared with": ", ".join(sharing.sharers(item.folder)[:3]),
            }
            for item in checkpoints
        ]
    )
    total = f"{count_text(len(checkpoints), 'checkpoint')}: "
    if apart_bytes > stored_bytes:
        total += f"{size_text(apart_bytes)} if each stood alone, "
    say(f"{total}{size_text(stored_bytes)} on the disk")


def verify(
    path: places.RunOrCheckpoint,
    *,
    step: places.StepOption = None,
    threads: output.Threads = 4,
    as_json: output.AsJson = False,
) -> None:
    """Check every byte against its digest.

    Checks all checkpoints of a run, or one. The digests of damaged places are shown by --json.
    """
    named = step is not None or places.is_checkpoint(path)
    checked: dict[str, VerifyReport | None] = {}  # None: deleted in the meantime
    documents: list[dict[str, object]] = []
    for _ in looks():
        # Retention deletes a checkpoint only after a newer commit: then check the new one too.
        found, was_deleted = _find(path, step, named=named), False
        for place in found.places:
            folder = place.folder
            if folder in checked:
                continue
            report = None
            try:
                with bar(folder) as show:
                    report = verify_checkpoint(place.store, folder, threads=threads, progress=show)
            except NotFoundError:
                if named:  # The requested checkpoint itself is gone: nothing was checked.
                    raise
                was_deleted = True
            checked[folder] = report
            if report is not None:
                documents.append(_report_document(place, report))
            if not as_json:
                _print_report(folder, report)
        if not was_deleted:
            break
    is_damaged = any(report is not None and report.damage for report in checked.values())
    sound = found.error is None and not is_damaged
    if as_json:
        print_json(
            {
                "sound": sound,
                "checkpoints": documents,
                "deleted_meanwhile": [folder for folder, report in checked.items() if not report],
                "no_manifest": [attempt.folder for attempt in found.attempts],
                "run_error": None if found.error is None else str(found.error),
            }
        )
    else:
        for attempt in found.attempts:
            say(f"{attempt.folder}: not checked, it has {attempt_text(attempt)}")
        if found.error is not None:
            say(f"the run is DAMAGED: {found.error}")
        elif not found.places:
            say(f"{path} has no checkpoint yet")
        else:
            _print_total(checked)
    if not sound:
        raise typer.Exit(output.DAMAGED)


class _ToVerify(NamedTuple):
    """Checkpoints, other folders without a manifest, and damage to the records of the run."""

    places: list[places.CheckpointPath]
    attempts: list[OpenAttempt]
    error: CorruptError | None


def _find(path: str, step: int | None, *, named: bool) -> _ToVerify:
    """Return the named checkpoint, or all of a run, also if the run's record is damaged."""
    damage: CorruptError | None = None
    try:
        if named:
            return _ToVerify([places.resolve(path, step)], [], None)
        try:
            run = open_run(path)
        except CorruptError as error:
            damage = error
            run = Run(open_store(path), None)
        checkpoints, attempts = run.look()
    except CorruptError as error:  # in the record of a term
        return _ToVerify([], [], damage or error)
    found = [places.CheckpointPath(run.store, item.folder, item) for item in checkpoints]
    return _ToVerify(found, [attempt for attempt in attempts if attempt.size_bytes], damage)


def _report_document(place: places.CheckpointPath, report: VerifyReport) -> dict[str, object]:
    return {
        "step": None if place.listed is None else place.listed.step,
        "folder": place.folder,
        **fields(report, "files blocks bytes unchecked_bytes"),
        "damage": [
            fields(damage, "file what start stop expected found touches")
            for damage in report.damage
        ],
    }


def _print_total(checked: dict[str, VerifyReport | None]) -> None:
    reports = [report for report in checked.values() if report is not None]
    damaged = sum(bool(report.damage) for report in reports)
    total = count_text(len(reports), "checkpoint")
    say(f"{damaged:,} of {total} DAMAGED" if damaged else f"{total} ok")


def _print_report(folder: str, report: VerifyReport | None) -> None:
    if report is None:
        say(f"{folder}: deleted in the meantime")
        return
    checked = (
        f"{count_text(report.files, 'file')}, {count_text(report.blocks, 'block')}, "
        f"{size_text(report.bytes)}"
    )
    if not report.damage:
        say(f"{folder}: ok ({checked})")
        return
    say(f"{folder}: DAMAGED in {count_text(len(report.damage), 'place')} ({checked} checked)")
    for damage in report.damage:
        error = without_digests(damage.error)
        text = error.found or "changed"
        if error.found is not None and error.expected is not None:
            text += f", expected {error.expected}"
        touched = f" ({listed(damage.touches, 1)})" if damage.touches else ""
        say(f"  {damage.file}: {damage.what}, {text}{touched}")
    if report.unchecked_bytes:
        size = size_text(report.unchecked_bytes)
        say(f"  {size} could not be checked: the digests that vouch for them are lost")
