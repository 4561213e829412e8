"""`laststep copy`: copy a run, or one step of it, to another place, verified.

With --json: `from` and `to`; `copied`, `there` (already), `deleted` (at the source, meanwhile) and
`damaged`, lists of folders; `copied_bytes`, `linked_bytes` (of files that the target had in another
checkpoint) and `kept_bytes` (of files that an interrupted copy had left). With --dry-run: `from`,
`to`, `dry_run`, `copy` and `there`, lists of folders, and `size_bytes`, what is to come: of data
files, or with --items of the tensors of these items. Ends with status 3 where a checkpoint is
damaged: it is not copied, all others are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from laststep import terms
from laststep.cli import output, places
from laststep.cli.status import DAMAGED
from laststep.errors import LaststepError
from laststep.tiers.bringing import Moved, Pacing
from laststep.tiers.runs import plan_copy

if TYPE_CHECKING:
    from laststep.catalog.listing import Listed
    from laststep.tiers.runs import CopyPlan, CopyReport, Fate


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
    threads: Annotated[int, typer.Option(help="How many copy at once.", min=1, max=64)] = 4,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would come.")] = False,
    as_json: output.AsJson = False,
) -> None:
    """Copy a run, or one checkpoint, to another place.

    Every block is verified on the way. Copying again goes on where a copy was interrupted.
    """
    rate = None if limit is None else terms.bytes_per_s(limit)
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
        names = ("copied", "there", "deleted", "copied_bytes", "linked_bytes", "kept_bytes")
        damaged = [folder for folder, _ in report.damaged]
        output.print_json({**where, **output.fields(report, *names), "damaged": damaged})
    else:
        _say_all(plan, report)
    if report.damaged:
        raise typer.Exit(DAMAGED)


def _say_plan(plan: CopyPlan, where: dict[str, str], *, as_json: bool) -> None:
    to_come = [item.folder for item in plan.checkpoints if item.folder not in plan.there]
    if as_json:
        there = sorted(plan.there)
        document = {"dry_run": True, "copy": to_come, "there": there, "size_bytes": plan.size_bytes}
        output.print_json({**where, **document})
        return
    for folder in to_come:
        output.console().print(f"{folder}: would be copied")
    count, size = output.count_text(len(to_come), "checkpoint"), output.size_text(plan.size_bytes)
    output.console().print(f"would copy {count}, {size}; {len(plan.there):,} there already")


def _say(item: Listed, fate: Fate) -> None:
    """What became of one checkpoint."""
    text = "there already"
    if isinstance(fate, Moved):
        parts = (
            (fate.copied_bytes, "copied"),
            (fate.linked_bytes, "linked"),
            (fate.kept_bytes, "kept of an interrupted copy"),
        )
        text = ", ".join(f"{output.size_text(size)} {how}" for size, how in parts if size)
    elif isinstance(fate, LaststepError):
        text = f"DAMAGED, and not copied: {fate}"
    elif fate is not None:
        text = "deleted meanwhile"
    output.console().print(f"{item.folder}: {text}")


def _say_all(plan: CopyPlan, report: CopyReport) -> None:
    console = output.console()
    if not plan.checkpoints:
        console.print(f"{plan.source.url} has no checkpoint yet")
        return
    console.print(
        f"copied {output.count_text(len(report.copied), 'checkpoint')} to {plan.target.url}: "
        f"{output.size_text(report.copied_bytes)} moved"
    )
