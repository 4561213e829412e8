"""`laststep rescue`: store what dead processes have left in shared memory, and clean up there.

With --json: `ok` (whether everything of the dead is stored), `debris` (half-made folders that were
removed) and `segments`, each with `folder`, `run`, `rank`, `ranks`, `pid`, `host`, `created_s`,
`size_bytes` (memory that it takes), `is_alive`, `is_removed`, `unreadable` (how many records make
no sense) and `saves`: `step`, `folder` (of the checkpoint), `created_s`, `size_bytes`, `fate`
("stored", "rescued": just now, "alone": in memory alone, "left behind": by a later start of the
job, "not stored", or "given up": with --discard) and `error`. Ends with status 1 where something
could not be stored, and stays.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from laststep.cli import output
from laststep.cli.status import FAILED
from laststep.storage.shared_memory import BASE
from laststep.terms import duration_text, listed
from laststep.tiers.leftovers import SaveFate
from laststep.tiers.leftovers import rescue as rescue_all

if TYPE_CHECKING:
    from collections.abc import Sequence

    from laststep.tiers.leftovers import Leftover, LeftoverSave, RescueReport

_COLUMNS = ("run", "step", "rank", "size", "owner", "age", "what became of it")


def rescue(
    run: Annotated[
        str | None,
        typer.Argument(metavar="RUN", help="Only of this run; else of all.", show_default=False),
    ] = None,
    *,
    base: Annotated[str, typer.Option(metavar="DIR", help="Where shared memory lies.")] = BASE,
    keep: Annotated[bool, typer.Option("--keep", help="Store, and remove nothing.")] = False,
    discard: Annotated[
        bool, typer.Option("--discard", help="Give up what cannot be stored, of RUN.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what there is.")] = False,
    as_json: output.AsJson = False,
) -> None:
    """Store what dead processes have left in shared memory.

    What is nowhere else goes to its run; then the memory of the dead is given back. Nothing of a
    living process is touched.
    """
    if discard and (run is None or keep):
        raise typer.BadParameter("--discard needs RUN, whose memory is given up, and no --keep")
    report = rescue_all(run, base=base, keep=keep, dry_run=dry_run)
    if not as_json:
        _print(report, base, dry_run=dry_run)
    if discard and report.stays and not dry_run:
        report = _discarded(report, ask=not yes, told=not as_json)
    if as_json:
        output.print_json(_document(report))
    if not report.ok:
        raise typer.Exit(FAILED)


def _discarded(report: RescueReport, *, ask: bool, told: bool) -> RescueReport:
    """Give up what stays, which has been shown."""
    saves = [save for one in report.stays for save in one.saves if save.fate is SaveFate.NOT_STORED]
    unreadable = sum(one.unreadable for one in report.stays)
    steps = listed(sorted({f"step {save.step}" for save in saves}))
    what = steps or output.count_text(unreadable, "record")
    size_bytes = sum(one.size_bytes for one in report.stays)
    if ask:
        output.confirm("give up", f"{what} in shared memory, for good", size_bytes)
    after = report.discard()
    if told:
        output.console().print(f"gave up {what}: {output.size_text(size_bytes)} of memory are free")
    return after


def _document(report: RescueReport) -> dict[str, object]:
    segments = [
        {
            **output.fields(
                one,
                "folder",
                "run",
                "rank",
                "ranks",
                "pid",
                "host",
                "created_s",
                "size_bytes",
                "is_alive",
                "is_removed",
                "unreadable",
            ),
            "saves": [
                output.fields(save, "step", "folder", "created_s", "size_bytes", "fate", "error")
                for save in one.saves
            ],
        }
        for one in report.segments
    ]
    return {"ok": report.ok, "segments": segments, "debris": report.debris}


def _print(report: RescueReport, base: str, *, dry_run: bool) -> None:
    console = output.console()
    if not report.segments:
        console.print(f"nothing lies in shared memory ({base})")
    else:
        table = output.table(*_COLUMNS, right=("step", "rank", "size", "age"))
        for one in report.segments:
            for row in _rows(one, dry_run=dry_run):
                table.add_row(*row)
        console.print(table)
    for one in report.segments:
        for save in one.saves:
            if save.error is not None:
                console.print(f"step {save.step} in {one.folder} is not stored: {save.error}")
        if one.unreadable and not one.is_alive:
            count = output.count_text(one.unreadable, "record")
            console.print(f"{one.folder} stays: {count} in it cannot be read by this version")
    removed = [one for one in report.segments if one.is_removed]
    if removed or report.debris:
        count = output.count_text(len(removed) + len(report.debris), "folder")
        size = output.size_text(sum(one.size_bytes for one in removed))
        console.print(f"removed {count} of dead processes, {size}")


def _rows(one: Leftover, *, dry_run: bool) -> Sequence[tuple[str, ...]]:
    owner = f"pid {one.pid}, {'alive' if one.is_alive else 'gone'}"
    rank = f"{one.rank}" if one.ranks == 1 else f"{one.rank} of {one.ranks}"
    rows = [
        (
            one.run,
            str(save.step),
            rank,
            output.size_text(save.size_bytes),
            owner,
            _age(save.created_s),
            _became(save, one, dry_run=dry_run),
        )
        for save in one.saves
    ]
    size = output.size_text(one.size_bytes)
    became = "holds no save" + ("" if one.is_alive or dry_run else _gone(one))
    return rows or [(one.run, "", rank, size, owner, _age(one.created_s), became)]


def _became(save: LeftoverSave, one: Leftover, *, dry_run: bool) -> str:
    if one.is_alive:
        return "left alone" if save.fate is SaveFate.ALONE else "left alone, stored"
    if dry_run and save.fate is SaveFate.ALONE:
        return "would be stored"
    if save.fate is SaveFate.LEFT_BEHIND:
        return "left behind by a later start" + _gone(one)
    if save.fate is SaveFate.NOT_STORED:
        return "NOT STORED"
    return ("stored now" if save.fate is SaveFate.RESCUED else "stored already") + _gone(one)


def _gone(one: Leftover) -> str:
    return ", removed" if one.is_removed else ""


def _age(created_s: float) -> str:
    return duration_text(max(time.time() - created_s, 0.0))
