"""Resolve the paths on the command line: a run, or the folder of one checkpoint."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple, TypeVar

import typer

from laststep.browse import open_run
from laststep.catalog import attempt
from laststep.catalog.attempt import parse_folder, read_newest
from laststep.catalog.retention import no_step
from laststep.catalog.run import Run
from laststep.cli.output import count_text
from laststep.constants import ADAPTERS_RUN
from laststep.errors import NotFoundError
from laststep.storage.registry import local_path, open_parent, open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from laststep.catalog.listing import Listed
    from laststep.storage.store import Store


def _run_within(path: str) -> str:
    """Return the run that an adapter keeps in an output folder, if that folder is none itself."""
    local = local_path(path)
    if local is None:
        return path
    inside = Path(local, ADAPTERS_RUN)
    with contextlib.suppress(OSError):  # the command reports it
        if not Path(local, attempt.RUN_NAME).exists() and (inside / attempt.RUN_NAME).exists():
            return str(inside)
    return path


RunPath = Annotated[
    str,
    typer.Argument(
        metavar="RUN", help="The folder or URL of a run.", show_default=False, callback=_run_within
    ),
]
RunOrCheckpoint = Annotated[
    str,
    typer.Argument(
        metavar="RUN|FOLDER",
        help="The folder or URL of a run, or of one checkpoint.",
        show_default=False,
        callback=_run_within,
    ),
]
_Result = TypeVar("_Result")

StepOption = Annotated[
    int | None, typer.Option("--step", metavar="N", help="Which step.", min=0, show_default=False)
]


class CheckpointPath(NamedTuple):
    """A checkpoint's folder, and its entry in the listing of its run, if it is in one."""

    store: Store
    folder: str
    listed: Listed | None = None
    among: Sequence[Listed] = ()
    """All checkpoints of that run."""


def is_checkpoint(path: str) -> bool:
    """Return True if the path is the folder of one checkpoint, in a run or on its own."""
    return attempt.is_checkpoint(open_store(path))


def find(run: Run, step: int | None) -> tuple[Listed, Sequence[Listed]]:
    """Return the checkpoint of that step, or the newest of the lineage, and all checkpoints. Of
    several with the same step, prefer the one on the lineage, else the last committed."""
    listed = run.checkpoints()
    choice = [item for item in listed if step in (None, item.step)]
    choice = [item for item in choice if item.on_lineage] or choice
    if not choice:
        if listed and step is not None:
            raise no_step(run, listed, step)
        saves = run.attempts()
        raise NotFoundError(
            f"there is no checkpoint{'' if step is None else f' of step {step}'}",
            where=run.store.url,
            found=f"{count_text(len(saves), 'save')} without a manifest" if saves else None,
            remedy="`laststep ls` lists what there is",
        )
    return choice[-1], listed


def read(path: str, step: int | None, use: Callable[[CheckpointPath], _Result]) -> _Result:
    """Call `use` with the one checkpoint that a path and a step refer to. If the newest of a run is
    deleted meanwhile, call it again with the new newest, so it may print only after it has read."""
    if step is not None or is_checkpoint(path):
        return use(resolve(path, step))
    return read_newest(open_run(path).store, lambda: resolve(path, None), use)


def resolve(path: str, step: int | None) -> CheckpointPath:
    if not is_checkpoint(path):
        run = open_run(path)
        listed, among = find(run, step)
        return CheckpointPath(run.store, listed.folder, listed, among)
    if step is not None:
        raise typer.BadParameter(
            "the folder of a checkpoint holds a single step", param_hint="--step"
        )
    local = local_path(path)
    store, folder = open_parent(path if local is None else Path(local).resolve())
    if parse_folder(folder) is not None:
        among = Run.open(store).checkpoints()
        for listed in among:
            if listed.folder == folder:
                return CheckpointPath(store, folder, listed, among)
    return CheckpointPath(store, folder)
