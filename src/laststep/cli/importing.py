"""`laststep import`: make a checkpoint of what torch.save, safetensors or DCP wrote.

A torch.save file is read as `torch.load(weights_only=True)` reads it: tensors and plain values,
never code; so is a folder of torch.distributed.checkpoint (DCP). A dict whose values are themselves
states becomes one item per key; anything else becomes the item `model`. torch is loaded only once
this command runs; a safetensors file is checked as strictly as our own.

A run that a live job saves to is left alone, unless --force is given.

With --json: `source`, `run`, `step` and `items` (names).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from laststep.catalog.run import Run
from laststep.cli import output
from laststep.errors import (
    AbortedError,
    AlreadyExistsError,
    CorruptError,
    NotFoundError,
    StorageError,
)
from laststep.storage.registry import open_store
from laststep.terms import is_item_name

_SAFETENSORS = ".safetensors"
_WHOLE = "model"


def import_(
    source: Annotated[
        str,
        typer.Argument(metavar="SOURCE", help="A torch.save or safetensors file, or a DCP folder."),
    ],
    run: Annotated[str, typer.Argument(metavar="RUN", help="The run, which may be new.")],
    *,
    step: Annotated[int, typer.Option(metavar="N", help="The step to save as.", min=0)] = 0,
    force: Annotated[
        bool, typer.Option("--force", help="Take the run over from a job that saves to it.")
    ] = False,
    as_json: output.AsJson = False,
) -> None:
    """Make a checkpoint of other tools' files.

    Of a torch.save or safetensors file, or of a folder that torch.distributed.checkpoint wrote,
    without running any code in it.
    """
    _check_run(run, step, force=force)
    items = items_of(read_state(source))
    from laststep.oneoff import import_state

    import_state(items, run, step, metadata={"imported_from": Path(source).absolute().name})
    if as_json:
        output.print_json({"source": source, "run": run, "step": step, "items": list(items)})
        return
    names = ", ".join(items)
    output.console().print(f"imported {source} into {run} as step {step}: {names}")


def _check_run(path: str, step: int, *, force: bool) -> None:
    """Refuse what would fail, or harm somebody, before the file is read."""
    try:
        run = Run.open(open_store(path))
    except NotFoundError:
        return
    writer = None if force else run.live_writer()
    if writer is not None:
        raise AbortedError(
            "refused to import into a run that is being written",
            where=run.store.url,
            found=f"a live writer: process {writer.pid} on {writer.host or 'an unknown host'}",
            remedy="wait until it has ended, or take the run over from it with --force: "
            "its next save then fails",
        )
    try:
        run.check_step_free(step)
    except AlreadyExistsError as error:
        free = max((listed.step for listed in run.lineage()), default=0) + 1
        raise AlreadyExistsError(
            error.what, where=error.where, remedy=f"name another with --step, such as --step {free}"
        ) from None


def read_state(source: str) -> object:
    """What the file or folder holds, as plain nested state."""
    path = Path(source).expanduser()
    try:
        if path.is_dir():
            return _read_folder(path, source)
        if not path.is_file():
            raise NotFoundError(
                "cannot import", where=source, found="no such file", remedy="check the path"
            )
        if path.suffix == _SAFETENSORS or _is_safetensors(path):
            return _read_safetensors(path)
        return _read_torch(path)
    except OSError as error:
        raise StorageError("cannot import", where=source, found=str(error.strerror)) from error
    except MemoryError as error:
        raise StorageError(
            "cannot import",
            where=source,
            found=f"too little memory: {error}",
            remedy="import where all of it fits into memory",
        ) from error


def _read_folder(path: Path, source: str) -> object:
    from laststep.adapters.importing import dcp_folder

    if not dcp_folder.is_one(path):
        raise NotFoundError(
            "cannot import",
            where=source,
            expected="a file of torch.save or safetensors, or a folder of "
            "torch.distributed.checkpoint",
            found="a folder",
            remedy="name a file in it",
        )
    return dcp_folder.read_folder(path)


def _read_torch(path: Path) -> object:
    from laststep.adapters.importing import torch_save

    remedy = "load the file yourself if you trust it, and save its state_dict()"
    return torch_save.load(path, where=str(path), remedy=remedy)


def _read_safetensors(path: Path) -> dict[str, object]:
    from laststep.adapters.importing.safetensors_part import open_part, read_tensor

    where = str(path)
    with path.open("rb") as file:
        part = open_part(file, start=0, stop=path.stat().st_size, where=where)
        return {name: read_tensor(file, part, name, where=where) for name in part.entries}


def items_of(state: object) -> dict[str, object]:
    """The items to save: one for each part that has a state of its own, else `model`.

    {"model": {…}, "optimizer": {…}, "epoch": 3} has two such parts; what is left, here the epoch,
    becomes the item `rest`. A plain state dict, name → tensor, is one item.
    """
    if not isinstance(state, Mapping) or not state:
        return {_WHOLE: {"value": state}}
    parts = {key: value for key, value in state.items() if isinstance(value, Mapping)}
    if not parts or not all(map(is_item_name, parts)):
        return {_WHOLE: dict(state)}
    rest = {key: value for key, value in state.items() if key not in parts}
    items: dict[str, object] = dict(parts)
    if rest:
        name = "rest"
        while name in items:
            name += "_"
        items[name] = rest
    return items


def _is_safetensors(path: Path) -> bool:
    """A header length, then JSON: no file of torch begins like this."""
    with path.open("rb") as file:
        head = file.read(9)
    if not head:
        raise CorruptError("cannot import", where=str(path), found="an empty file")
    return len(head) == 9 and head[8:] == b"{"
