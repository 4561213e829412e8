"""`laststep rm` and `rollback`: delete chosen checkpoints, whatever the retention rules are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from laststep.browse import open_run
from laststep.catalog.retention import plan_removal, plan_rollback, refuse_writer
from laststep.cli import output, places
from laststep.cli.output import count_text, print_json, say, size_text
from laststep.constants import listed
from laststep.errors import CorruptError, UsageError
from laststep.memory import segments
from laststep.read.verify import verify_checkpoint
from laststep.storage.registry import real_place
from laststep.storage.shared_memory import BASE
from laststep.tiers.snapshots import records_in

if TYPE_CHECKING:
    from laststep.catalog.retention import PrunePlan
    from laststep.catalog.run import Run

Step = Annotated[int, typer.Argument(metavar="STEP", help="Which step.", min=0)]


def rm(
    run: places.RunPath,
    step: Step,
    *,
    dry_run: output.DryRun = False,
    yes: output.Yes = False,
    as_json: output.AsJson = False,
) -> None:
    """Delete all checkpoints of a step, also those that were saved again or abandoned."""
    opened = open_run(run)
    _carry_out(opened, plan_removal(opened, step), dry_run=dry_run, yes=yes, as_json=as_json)


def rollback(
    run: places.RunPath,
    step: Step,
    *,
    dry_run: output.DryRun = False,
    yes: output.Yes = False,
    as_json: output.AsJson = False,
) -> None:
    """Delete all checkpoints that were committed after a step.

    The next restore() then continues from that step. Its checkpoint is verified first. Replicas
    are not changed: run the command on each of them too.
    """
    opened = open_run(run)
    plan = plan_rollback(opened, step)
    _carry_out(opened, plan, dry_run=dry_run, yes=yes, as_json=as_json)


def _carry_out(run: Run, plan: PrunePlan, *, dry_run: bool, yes: bool, as_json: bool) -> None:
    """Delete what the plan names, after verifying the checkpoint that is the newest then."""
    _refuse_snapshots(run)
    gone, seen = set(plan.deletions), run.newest_point()
    stays = run.would_descend(item for item in plan.listed if item.folder not in gone)
    newest = stays[-1] if stays else None
    lineage = {item.folder for item in plan.listed if item.on_lineage}
    if newest is not None and newest.folder not in lineage:
        raise UsageError(
            f"an abandoned branch would become the lineage, with step {newest.step} as its newest",
            where=run.store.url,
            remedy="`laststep rollback` goes back to a step of the lineage and deletes the branch",
        )
    freed_bytes = plan.sharing().freed_bytes(plan.deletions)
    would = "would be " if dry_run else ""
    deleted = plan.deletions
    if plan.deletions and not dry_run:
        if not yes:
            left = "none is left" if newest is None else f"step {newest.step} is the newest then"
            output.confirm(f"delete {_named(plan)} ({size_text(freed_bytes)}; {left})")
        if newest is not None:
            _check_sound(run, newest.folder, newest.step)

        def check() -> None:
            """Nobody may have saved while the user was asked and the bytes were read."""
            refuse_writer(run)
            if run.newest_point().term != seen.term:
                raise UsageError(
                    "another job has saved to the run meanwhile",
                    where=run.store.url,
                    remedy="`laststep ls` lists what there is now; call the command again",
                )

        deleted = plan.execute(before=check)
    if as_json:
        print_json(
            {
                "dry_run": dry_run,
                "freed_bytes": freed_bytes,
                "deleted": [] if dry_run else list(deleted),
                "to_delete": list(plan.deletions),
                "newest": None if newest is None else newest.step,
            }
        )
        return
    for folder in deleted:
        say(f"{folder}: {would}deleted")
    say(f"{would}deleted: {count_text(len(deleted), 'checkpoint')}, {size_text(freed_bytes)}")
    left = "no checkpoint" if newest is None else f"step {newest.step}"
    say(f"{'then the newest is' if dry_run else 'the newest is now'}: {left}")


def _named(plan: PrunePlan) -> str:
    """Name what is deleted: `1 checkpoint of step 25: step-00000025.2-1`."""
    steps = sorted({item.step for item in plan.listed if item.folder in plan.deletions})
    count = count_text(len(plan.deletions), "checkpoint")
    of = f"step{'s' if len(steps) > 1 else ''} {listed(steps, 6)}"
    return f"{count} of {of}: {listed(plan.deletions)}"


def _refuse_snapshots(run: Run) -> None:
    """Raise `UsageError` if memory of this machine holds checkpoints of the run that a restart
    would bring back."""
    place = real_place(run.store.url)
    left = [segment for segment in segments.of_dead_processes(BASE, place) if records_in(segment)]
    if left:
        raise UsageError(
            "shared memory holds checkpoints of this run, which the next job would store again",
            where=left[0].folder,
            remedy="call `laststep recover` for this run first, then this command again",
        )


def _check_sound(run: Run, folder: str, step: int) -> None:
    """Raise `CorruptError` if a checkpoint is damaged that restores would depend on."""
    report = verify_checkpoint(run.store, folder)
    if report.damage:
        raise CorruptError(
            f"step {step}, which would be the newest checkpoint, is damaged",
            where=f"{run.store.url}/{folder}",
            found=count_text(len(report.damage), "place"),
            remedy="nothing was deleted; `laststep verify` lists the damage",
        )
