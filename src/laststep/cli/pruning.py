"""`laststep prune`: delete what no rule keeps, and say for each checkpoint why it stays or goes.

With --json: `dry_run`, `freed_bytes`, `deleted` (folders), `copies` (folders that interrupted ones
have left, and nobody goes on with), and `checkpoints`, each with `step`, `folder`, `keep`,
`reasons` and `size_bytes` (what it alone holds: deleting only this one frees it). Of files that
several checkpoints share, `freed_bytes` counts those that go with the last of them. The newest good
checkpoint, the one that the current job resumed from and pinned ones stay whatever is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from laststep.catalog import cleaning, decision
from laststep.catalog.cleaning import RemovalReason
from laststep.catalog.retention import Keep, plan_prune
from laststep.cli import output, places
from laststep.errors import CorruptError
from laststep.read.verify import verify_checkpoint

if TYPE_CHECKING:
    from laststep.catalog.indexes import Sharing
    from laststep.catalog.listing import Listed
    from laststep.catalog.retention import PrunePlan, Verdict
    from laststep.catalog.run import Run


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
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: output.AsJson = False,
) -> None:
    """Delete the checkpoints that no rule keeps."""
    if last is None and every is None and best is None and not abandoned:
        raise typer.BadParameter("say what to keep: --last, --every or --best (or --abandoned)")
    if (best is None) != (metric is None):
        raise typer.BadParameter("--best and --metric belong together")
    opened = places.open_run(run)
    keep = Keep(
        last=last, every=every, best=best, metric=metric, mode=mode, abandoned=not abandoned
    )
    plan = plan_prune(opened, keep, resumed_from=_resumed_from(opened))
    if plan.lacking is not None:
        output.console(stderr=True).print(f"{plan.lacking}; until one has it, all are kept")
    sharing = plan.sharing()
    freed_bytes = sharing.freed_bytes(plan.deletions)
    if not as_json:
        _print(run, plan, sharing)
    deleted: tuple[str, ...] = ()
    if plan.deletions and not dry_run:
        if not yes:
            count = output.count_text(len(plan.deletions), "checkpoint")
            output.confirm("delete", count, freed_bytes)
        _check_what_stays(opened)
        deleted = plan.execute()
        freed_bytes = sharing.freed_bytes(deleted)
    copies = [orphan for orphan in opened.orphans() if orphan.why is RemovalReason.STALE_COPY]
    if not dry_run:
        copies = [orphan for orphan in copies if cleaning.remove(opened.store, orphan)]
    if as_json:
        checkpoints = [_document(verdict, sharing) for verdict in plan.verdicts]
        output.print_json(
            {
                "dry_run": dry_run,
                "freed_bytes": freed_bytes,
                "deleted": list(deleted),
                "copies": [orphan.name for orphan in copies],
                "checkpoints": checkpoints,
            }
        )
    elif not plan.deletions:
        output.console().print("nothing to delete")
    else:
        done, folders = ("would delete", plan.deletions) if dry_run else ("deleted", deleted)
        count = output.count_text(len(folders), "checkpoint")
        output.console().print(f"{done} {count}, {output.size_text(freed_bytes)}")
    if copies and not as_json:
        count = output.count_text(len(copies), "copy", "copies")
        size = output.size_text(sum(orphan.size_bytes for orphan in copies))
        done = "would remove" if dry_run else "removed"
        output.console().print(f"{done} {count} that nobody goes on with, {size}")


def _resumed_from(run: Run) -> str | None:
    """The folder from which the newest writer continued: a job that runs may still need it."""
    listed = run.checkpoints()
    newest = max((item.epoch for item in listed), default=0)
    writer = run.live_writer()
    record = run.epoch(newest if writer is None else writer.epoch)
    if record is None or record.continues is None:
        return None
    return {item.point: item.folder for item in listed}.get(record.continues)


def _document(verdict: Verdict, sharing: Sharing) -> dict[str, object]:
    return {
        **output.fields(verdict, "step", "folder", "keep", "reasons"),
        "size_bytes": sharing.freed_bytes([verdict.folder]),
    }


def _print(run: str, plan: PrunePlan, sharing: Sharing) -> None:
    if not plan.verdicts:
        output.console().print(f"{run} has no checkpoint yet")
        return
    table = output.table("step", "", "only here", "why", "folder", right=("step", "only here"))
    for verdict in plan.verdicts:
        table.add_row(
            str(verdict.step),
            "stays" if verdict.keep else "goes",
            output.size_text(sharing.freed_bytes([verdict.folder])),
            "; ".join(verdict.reasons),
            verdict.folder,
            style=None if verdict.keep else "red",
        )
    output.console().print(table)


def _check_what_stays(run: Run) -> None:
    """Before anything goes, the newest checkpoint, which stays, is read through: it may be damaged,
    and an older one that is about to go the only good one."""

    def find() -> Listed:
        found = run.newest()
        if found is None:
            raise CorruptError(
                "no checkpoint of this run is whole",
                where=run.store.url,
                remedy="`laststep verify` lists all damage; nothing was deleted",
            )
        return found

    newest, report = decision.read_newest(
        run.store, find, lambda found: (found, verify_checkpoint(run.store, found.folder))
    )
    if report.damage:
        count = output.count_text(len(report.damage), "place")
        raise CorruptError(
            f"the newest checkpoint, step {newest.step}, is damaged in {count}",
            where=f"{run.store.url}/{newest.folder}",
            remedy="nothing was deleted; move that folder away, and prune again",
        )
