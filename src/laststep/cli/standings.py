"""`laststep ls --tiers`: how far each tier of a run has come, and so what is at risk.

With --json: `run` and `tiers`, nearest first, each with `tier` (its URL), `step`, `folder` and
`created_s` of its newest checkpoint (null: none), `age_s`, `checkpoints` (how many), `behind_steps`
and `behind_s` (how much older that is than the newest of all tiers: the work at risk; null: all of
it), `left_out` (the items that the newest lacks, being an excerpt: these are at risk too) and
`error` (null, or why it could not be looked at). Ends with status 1 where one could not.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import typer

from laststep.cli import output
from laststep.cli.status import FAILED
from laststep.terms import duration_text
from laststep.tiers.further import standings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from laststep.catalog.run import Run
    from laststep.tiers.further import Standing


def print_tiers(run: Run, urls: Sequence[str], *, as_json: bool) -> None:
    """Say how far each tier has come; the further ones are those that the run knows, and these."""
    found, now_s = standings(run, urls), time.time()
    if as_json:
        documents = [_document(one, now_s) for one in found]
        output.print_json({"run": run.store.url, "tiers": documents})
    else:
        table = output.table(
            "tier", "step", "age", "checkpoints", "at risk", right=("step", "age", "checkpoints")
        )
        for one in found:
            table.add_row(*_row(one, now_s))
        output.console().print(table)
        for one in found:
            if one.error is not None:
                output.console().print(f"{one.tier} could not be looked at: {one.error}")
    if any(one.error is not None for one in found):
        raise typer.Exit(FAILED)


def _document(one: Standing, now_s: float) -> dict[str, object]:
    newest = one.newest
    return {
        "tier": one.tier,
        "step": None if newest is None else newest.name.step,
        "folder": None if newest is None else newest.name.folder,
        "created_s": None if newest is None else newest.created_s,
        "age_s": None if newest is None else now_s - newest.created_s,
        **output.fields(one, "checkpoints", "behind_steps", "behind_s", "left_out", "error"),
    }


def _row(one: Standing, now_s: float) -> tuple[str, ...]:
    if one.newest is None:
        return one.tier, "", "", "?" if one.error else "0", "unknown" if one.error else "everything"
    age = duration_text(max(now_s - one.newest.created_s, 0.0))
    return one.tier, str(one.newest.name.step), age, f"{one.checkpoints:,}", _at_risk(one)


def _at_risk(one: Standing) -> str:
    """What is lost with everything nearer, beside what was trained since."""
    text = ""
    if one.behind_s or one.behind_steps:
        steps = output.count_text(one.behind_steps or 0, "step")
        text = f"{steps}, {duration_text(one.behind_s or 0)}"
    if one.left_out:  # an excerpt
        rest = f"; of {', '.join(one.items)} {text}" if text else ""
        return f"all of {', '.join(one.left_out)}{rest}"
    return text or "nothing"
