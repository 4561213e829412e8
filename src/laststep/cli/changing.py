"""`laststep copy`, `prune`, `pin`, `unpin` and `recover`: commands that modify runs."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from laststep import constants
from laststep.browse import open_run
from laststep.catalog.attempt import read_newest
from laststep.catalog.retention import Keep, RemovalReason, plan_prune, remove
from laststep.cli import output, places
from laststep.cli.output import count_text, fields, print_json, print_table, say, size_text
from laststep.constants import duration_text
from laststep.errors import CorruptError, LaststepError
from laststep.read.verify import verify_checkpoint
from laststep.storage.shared_memory import BASE
from laststep.tiers import recovery
from laststep.tiers.copying import Pacing
from laststep.tiers.runs import plan_copy

if TYPE_CHECKING:
    from collections.abc import Iterator

    from laststep.catalog.listing import Listed
    from laststep.catalog.retention import PrunePlan, Sharing
    from laststep.catalog.run import Run
    from laststep.tiers.recovery import OrphanedSegment, RecoverReport
    from laststep.tiers.runs import CopyOutcome, CopyPlan


def copy(
    source: places.RunOrCheckpoint,
    target: Annotated[
        str, typer.Argument(metavar="TO", help="The folder or URL to copy to.", show_default=False)
    ],
    *,
    step: places.StepOption = None,
    items: Annotated[
        list[str] | None, typer.Option(metavar="ITEM", help="Only this item; may be repeated.")
    ] = None,
    limit: Annotated[
        str | None, typer.Option(metavar="RATE", help="Go no faster than that, as in 200MB/s.")
    ] = None,
    threads: output.Threads = 4,
    dry_run: output.DryRun = False,
    as_json: output.AsJson = False,
) -> None:
    """Copy a run, or one checkpoint, to another location.

    Every block is verified during the copy. Running the command again resumes an interrupted copy.
    """
    rate = None if limit is None else constants.bytes_per_s(limit)
    if limit is not None and rate is None:
        raise typer.BadParameter("write a rate as 200MB/s", param_hint="--limit")
    plan = plan_copy(source, target, step, items)
    where = {"from": plan.source.url, "to": plan.target.url}
    if dry_run:
        _say_plan(plan, where, as_json=as_json)
        return
    report = plan.execute(
        threads=threads,
        pacing=Pacing(bytes_per_s=rate),
        watch=lambda item: output.bar(item.folder),
        ended=(lambda *_: None) if as_json else _say,
    )
    if as_json:
        counts = fields(report, "copied there deleted copied_bytes")
        print_json({**where, **counts, "damaged": [folder for folder, _ in report.damaged]})
    elif not plan.checkpoints:
        say(f"{plan.source.url} has no checkpoint yet")
    else:
        copied = count_text(len(report.copied), "checkpoint")
        say(f"copied {copied} to {plan.target.url}: {size_text(report.copied_bytes)} moved")
    if report.damaged:
        raise typer.Exit(output.DAMAGED)


def _say_plan(plan: CopyPlan, where: dict[str, str], *, as_json: bool) -> None:
    to_come = [item.folder for item in plan.checkpoints if item.folder not in plan.there]
    if as_json:
        document = {"dry_run": True, "copy": to_come, "there": sorted(plan.there)}
        print_json({**where, **document, "size_bytes": plan.size_bytes})
        return
    for folder in to_come:
        say(f"{folder}: would be copied")
    count = count_text(len(to_come), "checkpoint")
    say(f"would copy {count}, {size_text(plan.size_bytes)}; {len(plan.there):,} there already")


def _say(item: Listed, outcome: CopyOutcome) -> None:
    text = "there already"
    if isinstance(outcome, int):
        text = f"{size_text(outcome)} copied"
    elif isinstance(outcome, LaststepError):
        text = f"DAMAGED, and not copied: {outcome}"
    elif outcome is not None:
        text = "deleted in the meantime"
    say(f"{item.folder}: {text}")


def prune(  # noqa: PLR0913 (one parameter for each option)
    run: places.RunPath,
    *,
    last: Annotated[int | None, typer.Option(metavar="K", help="Keep the newest K.", min=1)] = None,
    every: Annotated[
        int | None, typer.Option(metavar="N", help="Keep each step that is a multiple of N.", min=1)
    ] = None,
    best: Annotated[
        int | None, typer.Option(metavar="K", help="Keep the best K by --metric.", min=1)
    ] = None,
    metric: Annotated[
        str | None, typer.Option(metavar="M", help="The metric that --best means.")
    ] = None,
    mode: Annotated[
        Literal["min", "max"], typer.Option(help="Whether small or large is good.")
    ] = "min",
    abandoned: Annotated[
        bool, typer.Option("--abandoned", help="Also delete abandoned and broken ones.")
    ] = False,
    dry_run: output.DryRun = False,
    yes: output.Yes = False,
    as_json: output.AsJson = False,
) -> None:
    """Delete the checkpoints that no rule keeps."""
    if last is None and every is None and best is None and not abandoned:
        raise typer.BadParameter("say what to keep: --last, --every or --best (or --abandoned)")
    if (best is None) != (metric is None):
        raise typer.BadParameter("--best and --metric must be used together")
    opened = open_run(run)
    keep = Keep(
        last=last, every=every, best=best, metric=metric, mode=mode, abandoned=not abandoned
    )
    plan = plan_prune(opened, keep, resumed_from=_resumed_from(opened))
    if plan.lacking is not None:
        typer.echo(f"{plan.lacking}; nothing is deleted until one has it", err=True)
    sharing = plan.sharing()
    freed_bytes = sharing.freed_bytes(plan.deletions)
    if not as_json:
        _print_verdicts(run, plan, sharing)
    deleted: tuple[str, ...] = ()
    if plan.deletions and not dry_run:
        if not yes:
            count = count_text(len(plan.deletions), "checkpoint")
            output.confirm(f"delete {count} ({size_text(freed_bytes)})")
        _check_what_stays(opened)
        deleted = plan.execute()
        freed_bytes = sharing.freed_bytes(deleted)
    copies = [orphan for orphan in opened.orphans() if orphan.why is RemovalReason.STALE_COPY]
    if not dry_run:
        copies = [orphan for orphan in copies if remove(opened.store, orphan)]
    if as_json:
        checkpoints = [
            fields(verdict, "step folder keep reasons")
            | {"size_bytes": sharing.freed_bytes([verdict.folder])}
            for verdict in plan.verdicts
        ]
        print_json(
            {
                "dry_run": dry_run,
                "freed_bytes": freed_bytes,
                "deleted": list(deleted),
                "copies": [orphan.name for orphan in copies],
                "checkpoints": checkpoints,
            }
        )
        return
    would = "would be " if dry_run else ""
    folders = plan.deletions if dry_run else deleted
    say(f"{would}deleted: {count_text(len(folders), 'checkpoint')}, {size_text(freed_bytes)}")
    if copies:
        size = size_text(sum(orphan.size_bytes for orphan in copies))
        count = count_text(len(copies), "interrupted copy", "interrupted copies")
        say(f"{would}deleted: {count}, {size}")


def _resumed_from(run: Run) -> str | None:
    """Return the folder from which the newest writer continued: a running job may still need it."""
    listed = run.checkpoints()
    newest = max((item.term for item in listed), default=0)
    writer = run.live_writer()
    record = run.term(newest if writer is None else writer.term)
    folders = {item.point: item.folder for item in listed}
    return None if record is None or record.continues is None else folders.get(record.continues)


def _print_verdicts(run: str, plan: PrunePlan, sharing: Sharing) -> None:
    if not plan.verdicts:
        say(f"{run} has no checkpoint yet")
        return
    print_table(
        [
            {
                "step": str(verdict.step),
                "": "stays" if verdict.keep else "goes",
                "only here": size_text(sharing.freed_bytes([verdict.folder])),
                "folder": verdict.folder,
                "why": "; ".join(verdict.reasons),
            }
            for verdict in plan.verdicts
        ]
    )


def _check_what_stays(run: Run) -> None:
    """Raise `CorruptError` if the newest is damaged: one to be deleted may be the only good one."""

    def find() -> Listed:
        found = run.newest()
        if found is None:
            raise CorruptError(
                "no checkpoint of this run is whole",
                where=run.store.url,
                remedy="`laststep verify` lists all damage; nothing was deleted",
            )
        return found

    newest, report = read_newest(
        run.store, find, lambda found: (found, verify_checkpoint(run.store, found.folder))
    )
    if report.damage:
        count = count_text(len(report.damage), "place")
        raise CorruptError(
            f"the newest checkpoint, step {newest.step}, is damaged in {count}",
            where=f"{run.store.url}/{newest.folder}",
            remedy="nothing was deleted; move that folder away, and prune again",
        )


Step = Annotated[int, typer.Argument(metavar="STEP", help="Which step.", min=0)]


def pin(run: places.RunPath, step: Step, *, as_json: output.AsJson = False) -> None:
    """Keep the checkpoint of a step, whatever the retention rules are."""
    _set_pinned(run, step, pinned=True, as_json=as_json)


def unpin(run: places.RunPath, step: Step, *, as_json: output.AsJson = False) -> None:
    """Let the retention rules apply to the checkpoint of a step again."""
    _set_pinned(run, step, pinned=False, as_json=as_json)


def _set_pinned(path: str, step: int, *, pinned: bool, as_json: bool) -> None:
    run = open_run(path)
    folder = places.find(run, step)[0].folder
    (run.pin if pinned else run.unpin)(folder)
    if as_json:
        print_json({"step": step, "folder": folder, "pinned": pinned})
    else:
        say(f"step {step} ({folder}) is {'pinned' if pinned else 'not pinned'}")


def recover(
    run: Annotated[
        str | None,
        typer.Argument(metavar="RUN", help="Only of this run; else of all.", show_default=False),
    ] = None,
    *,
    base: Annotated[str, typer.Option(metavar="DIR", help="Where shared memory lies.")] = BASE,
    keep: Annotated[bool, typer.Option("--keep", help="Store, and remove nothing.")] = False,
    dry_run: output.DryRun = False,
    as_json: output.AsJson = False,
) -> None:
    """Store snapshots that dead processes have left in shared memory.

    Snapshots that exist nowhere else are stored in their run; then the memory of the dead processes
    is freed. Memory of living processes is not touched.
    """
    report = recovery.recover(run, base=base, keep=keep, dry_run=dry_run)
    if as_json:
        print_json({"ok": report.ok, "segments": report.segments, "debris": report.debris})
    else:
        _print_recovered(report, base)
    if not report.ok:
        raise typer.Exit(output.FAILED)


def _print_recovered(report: RecoverReport, base: str) -> None:
    if not report.segments:
        say(f"shared memory is empty ({base})")
    parts = Counter(
        (segment.run, segment.ranks, save.folder)
        for segment in report.segments
        for save in segment.saves
    )
    print_table([row for segment in report.segments for row in _rows(segment, parts)])
    for segment in report.segments:
        for save in segment.saves:
            if save.error is not None:
                say(f"step {save.step} in {segment.folder} is not stored: {save.error}")
        if segment.unreadable and not segment.is_alive:
            count = count_text(segment.unreadable, "record")
            say(f"{segment.folder} stays: {count} in it cannot be read by this version")
    removed = [segment for segment in report.segments if segment.is_removed]
    if removed or report.debris:
        count = count_text(len(removed) + len(report.debris), "folder")
        size = size_text(sum(segment.size_bytes for segment in removed))
        say(f"removed {count} of dead processes, {size}")


def _rows(
    segment: OrphanedSegment, parts: Counter[tuple[str, int, str]]
) -> Iterator[dict[str, str]]:
    """Yield a row for each save in a segment, or one for a segment without saves. `parts` counts
    the ranks that have captured each save."""
    ranks = segment.ranks
    for save in segment.saves or (None,):
        sized = segment if save is None else save
        state, captured = "holds no save", ""
        if save is not None:
            present = parts[segment.run, ranks, save.folder]
            captured = f"{present} of {count_text(ranks, 'rank')}"
            state = save.state.value
            if save.state is recovery.SnapshotState.ALONE:
                state = "only in memory" if present == ranks else "incomplete, cannot be stored"
        yield {
            "run": segment.run,
            "step": "" if save is None else str(save.step),
            "rank": str(segment.rank),
            "captured by": captured,
            "size": size_text(sized.size_bytes),
            "owner": f"pid {segment.pid}, {'alive' if segment.is_alive else 'gone'}",
            "age": duration_text(max(time.time() - sized.created_s, 0.0)),
            "save": state + (", removed" if segment.is_removed else ""),
        }
