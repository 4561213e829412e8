"""`laststep prune`: delete what no rule keeps, and say for each checkpoint why it stays or goes.

With --json: `dry_run`, `freed_bytes`, `deleted` (folders), and `checkpoints`, each with `step`,
`folder`, `keep`, `reasons` and `size_bytes` (what deleting it frees). The newest good checkpoint,
the one that the current job resumed from and pinned ones stay whatever is asked for.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from laststep.catalog.retention import Keep
from laststep.catalog.run import plan_prune
from laststep.cli import output, places
from laststep.errors import Corrupt, Usage
from laststep.read.verify import verify_checkpoint

if TYPE_CHECKING:
    from laststep.catalog.prune import PrunePlan
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
    if not as_json:
        _print(run, plan)
    deleted: tuple[str, ...] = ()
    if plan.deletions and not dry_run:
        if not yes:
            _ask(plan)
        _check_what_stays(opened)
        deleted = plan.execute()
    if as_json:
        output.print_json(_document(plan, deleted, dry_run=dry_run))
    else:
        _print_end(plan, deleted, dry_run=dry_run)


def _resumed_from(run: Run) -> str | None:
    """The folder from which the newest writer continued: a job that runs may still need it."""
    listed = run.checkpoints()
    newest = max((item.epoch for item in listed), default=0)
    writer = run.live_writer()
    record = run.epoch(newest if writer is None else writer.epoch)
    if record is None or record.continues is None:
        return None
    return {item.point: item.folder for item in listed}.get(record.continues)


def _ask(plan: PrunePlan) -> None:
    count = output.count_text(len(plan.deletions), "checkpoint")
    if not sys.stdin.isatty():
        raise Usage(
            f"refused to delete {count} unasked",
            expected="--yes where nobody can be asked",
            remedy="add --yes, or --dry-run to only look",
        )
    size = output.size_text(plan.freed_bytes)
    typer.confirm(f"Delete {count} ({size})?", abort=True, err=True)


def _document(plan: PrunePlan, deleted: tuple[str, ...], *, dry_run: bool) -> dict[str, object]:
    return {
        "dry_run": dry_run,
        "freed_bytes": plan.freed_bytes if dry_run else _freed_bytes(plan, deleted),
        "deleted": list(deleted),
        "checkpoints": [
            output.fields(verdict, "step", "folder", "keep", "reasons", "size_bytes")
            for verdict in plan.verdicts
        ],
    }


def _freed_bytes(plan: PrunePlan, deleted: tuple[str, ...]) -> int:
    return sum(verdict.size_bytes for verdict in plan.verdicts if verdict.folder in deleted)


def _print(run: str, plan: PrunePlan) -> None:
    if not plan.verdicts:
        output.console().print(f"{run} has no checkpoint yet")
        return
    table = output.table("step", "", "on disk", "why", "folder", right=("step", "on disk"))
    for verdict in plan.verdicts:
        table.add_row(
            str(verdict.step),
            "stays" if verdict.keep else "goes",
            output.size_text(verdict.size_bytes),
            "; ".join(verdict.reasons),
            verdict.folder,
            style=None if verdict.keep else "red",
        )
    output.console().print(table)


def _print_end(plan: PrunePlan, deleted: tuple[str, ...], *, dry_run: bool) -> None:
    console = output.console()
    if not plan.deletions:
        console.print("nothing to delete")
    elif dry_run:
        count = output.count_text(len(plan.deletions), "checkpoint")
        console.print(f"would delete {count}, {output.size_text(plan.freed_bytes)}")
    else:
        count = output.count_text(len(deleted), "checkpoint")
        console.print(f"deleted {count}, {output.size_text(_freed_bytes(plan, deleted))}")


def _check_what_stays(run: Run) -> None:
    """Before anything goes, the newest checkpoint, which stays, is read through: it may be damaged,
    and an older one that is about to go the only good one."""
    newest = run.newest()
    if newest is None:
        raise Corrupt("no checkpoint of this run is whole", where=run.store.url,
                      remedy="`laststep verify` lists all damage; nothing was deleted")  # fmt: skip
    report = verify_checkpoint(run.store, newest.folder)
    if report.damage:
        count = output.count_text(len(report.damage), "place")
        raise Corrupt(
            f"the newest checkpoint, step {newest.step}, is damaged in {count}",
            where=f"{run.store.url}/{newest.folder}",
            remedy="nothing was deleted; move that folder away, and prune again",
        )
