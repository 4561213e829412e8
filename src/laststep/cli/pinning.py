"""`laststep pin` and `unpin`: keep a checkpoint whatever retention says, and no longer.

With --json: `step`, `folder` and `pinned`.
"""

from __future__ import annotations

from typing import Annotated

import typer

from laststep.cli import output, places

Step = Annotated[int, typer.Argument(metavar="STEP", help="Which step.", min=0)]


def pin(run: places.RunPath, step: Step, *, as_json: output.AsJson = False) -> None:
    """Keep the checkpoint of a step, whatever the retention rules say."""
    opened = places.open_run(run)
    listed = places.find(opened, step)
    opened.pin(listed.folder)
    _tell(step, listed.folder, pinned=True, as_json=as_json)


def unpin(run: places.RunPath, step: Step, *, as_json: output.AsJson = False) -> None:
    """Leave the checkpoint of a step to the retention rules again."""
    opened = places.open_run(run)
    listed = places.find(opened, step)
    if not listed.pinned and not as_json:
        output.console().print(f"step {step} ({listed.folder}) was not pinned")
        return
    opened.unpin(listed.folder)
    _tell(step, listed.folder, pinned=False, as_json=as_json)


def _tell(step: int, folder: str, *, pinned: bool, as_json: bool) -> None:
    if as_json:
        output.print_json({"step": step, "folder": folder, "pinned": pinned})
    else:
        text = "is pinned" if pinned else "is no longer pinned"
        output.console().print(f"step {step} ({folder}) {text}")
