"""`laststep export` and `import`: convert checkpoints to and from the formats of other tools.

An export is verified and takes little memory. Its target is complete or absent: after an error,
Ctrl-C, SIGTERM or SIGHUP nothing is left behind. An import runs no code from the file. torch is
imported only when one of the commands runs.
"""

from __future__ import annotations

import contextlib
import re
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from laststep.adapters.export.folder import Exported, check_absent
from laststep.browse import open_folder
from laststep.catalog.run import Run
from laststep.cli import places
from laststep.cli.output import AsJson, count_text, fields, print_json, print_table, say, size_text
from laststep.constants import bytes_per_s, is_item_name, listed
from laststep.errors import AbortedError, AlreadyExistsError, NotFoundError, StorageError
from laststep.process import system
from laststep.storage.registry import local_path, open_store

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import FrameType

    from laststep.adapters.export.hf import Choices
    from laststep.browse import Checkpoint

_MODEL = "model"
_SHARD = "5GB"
_DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}


def export(  # noqa: PLR0913 (one parameter for each option)
    path: places.RunOrCheckpoint,
    target: Annotated[
        str,
        typer.Argument(metavar="TARGET", help="The folder or file to make.", show_default=False),
    ],
    *,
    format_: Annotated[
        Literal["hf", "hf-trainer", "safetensors", "dcp", "torch"],
        typer.Option(
            "--format",
            help="Hugging Face's weights or Trainer, one safetensors file, torch's DCP, or a file "
            "for torch.load.",
            show_default=False,
        ),
    ],
    step: places.StepOption = None,
    item: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Which item.", show_default=f"hf, safetensors: {_MODEL}; else all"
        ),
    ] = None,
    rank: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Of items that each rank has for itself: which rank's to write.",
            min=0,
            show_default="0",
        ),
    ] = None,
    shard_bytes: Annotated[
        str | None, typer.Option(metavar="SIZE", help="The most in one file.", show_default=_SHARD)
    ] = None,
    dtype: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[REGEX=]DTYPE",
            help="Write floating tensors, all or by their new names, as bf16, f16 or f32.",
        ),
    ] = None,
    rename: Annotated[
        list[str] | None,
        typer.Option(metavar="REGEX=REPLACEMENT", help="Change names; one after the other."),
    ] = None,
    drop_tied: Annotated[
        bool, typer.Option("--drop-tied", help="Write only the first of several tied tensors.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint in a format that other tools read.

    Takes the newest checkpoint of a run, or that of --step.
    """
    if format_ == "hf-trainer" and item:
        raise typer.BadParameter("--item belongs to the other formats")
    if format_ != "hf" and shard_bytes:
        raise typer.BadParameter("--shard-bytes belongs to --format hf")
    if format_ not in ("hf", "safetensors") and (dtype or rename or drop_tied):
        raise typer.BadParameter(
            "--dtype, --rename and --drop-tied belong to --format hf and safetensors"
        )

    def write(place: places.CheckpointPath) -> tuple[Checkpoint, list[str], Exported]:
        if format_ != "hf-trainer":  # which replaces a folder that laststep made
            check_absent(target)
        opened = open_folder(f"{place.store.url}/{place.folder}")
        with _ended_by_signals(), opened.of_rank(rank or 0) as checkpoint:
            if format_ in ("hf", "safetensors"):
                from laststep.adapters.export.hf import export_hf, export_safetensors

                into = export_hf if format_ == "hf" else export_safetensors
                name = item or _MODEL
                choices = _choices(shard_bytes or _SHARD, dtype or (), rename or ())._replace(
                    drop_tied=drop_tied
                )
                return checkpoint, [name], into(checkpoint, target, item=name, choices=choices)
            items = checkpoint.items() if item is None else [item]
            if format_ == "hf-trainer":
                from laststep.adapters.export.trainer import export_trainer

                local = local_path(place.store.url)
                run = None if local is None else Path(local)
                return checkpoint, items, export_trainer(checkpoint, target, run=run)
            if format_ == "torch":
                from laststep.adapters.export.torch_file import export_torch

                alone = item is not None
                return checkpoint, items, export_torch(checkpoint, target, items=items, alone=alone)
            from laststep.adapters.export.dcp import export_dcp

            return checkpoint, items, export_dcp(checkpoint, target, items=items)

    checkpoint, items, exported = places.read(path, step, write)
    own = [name for name in checkpoint.per_rank() if name in items]
    if as_json:
        print_json(
            {
                **fields(checkpoint, "step folder"),
                "target": target,
                "format": format_,
                "items": items,
                "per_rank": own,
                "rank": (rank or 0) if own else None,
                **fields(exported, "tensors size_bytes values dropped omitted_values files"),
            }
        )
        return
    _print(exported, f"exported {', '.join(items)} of step {checkpoint.step} to {target}")
    if own:
        whose = f"each of {checkpoint.ranks:,} ranks has its own; this is rank {rank or 0}'s"
        other = "" if rank is not None else ": --rank N takes another's"
        say(f"{', '.join(own)}: {whose}{other}")


def _choices(shard_bytes: str, dtypes: Sequence[str], renames: Sequence[str]) -> Choices:
    from laststep.adapters.export.hf import Cast, Choices

    casts = []
    for text in dtypes:
        regex, given, name = text.rpartition("=")
        if name not in _DTYPES:
            raise _misused(f"{name!r} is not bf16, f16 or f32", "--dtype")
        pattern = _pattern(regex, "--dtype") if given else None
        casts.append(Cast(pattern=pattern, dtype=_DTYPES[name]))
    rules = []
    for text in renames:
        regex, given, replacement = text.rpartition("=")
        if not given:
            raise _misused(f"{text!r} is not REGEX=REPLACEMENT", "--rename")
        rules.append((_pattern(regex, "--rename"), replacement))
    size = float(shard_bytes) if shard_bytes.isdecimal() else bytes_per_s(shard_bytes)
    if not size:
        raise _misused(f"{shard_bytes!r} is not a size such as 5GB or 512MiB", "--shard-bytes")
    return Choices(shard_bytes=int(size), casts=tuple(casts), renames=tuple(rules))


def _pattern(regex: str, option: str) -> re.Pattern[str]:
    try:
        return re.compile(regex)
    except re.error as error:
        raise _misused(f"{regex!r} is not a regular expression: {error}", option) from None


def _misused(text: str, option: str) -> typer.BadParameter:
    return typer.BadParameter(text, param_hint=option)


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Convert SIGTERM and SIGHUP to `SystemExit`, so that the command can clean up."""

    def end(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    wanted = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is signal.SIG_DFL]
    for number in wanted:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in wanted:
            signal.signal(number, signal.SIG_DFL)


def _print(exported: Exported, what: str) -> None:
    print_table([{"file": name, "size": size_text(size)} for name, size in exported.files.items()])
    if exported.dropped:
        tied = (f"{name} is {kept}" for name, kept in exported.dropped.items())
        say(f"tied, not written again: {listed(tied, 20)}")
    if exported.omitted_values:
        count = count_text(len(exported.omitted_values), "value")
        say(f"omitted, not tensors: {count} (see --json)")
    written = count_text(exported.tensors, "tensor")
    if exported.values:
        written += f", {count_text(exported.values, 'value')}"
    say(f"{what}: {written}, {size_text(exported.size_bytes)}")


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
    as_json: AsJson = False,
) -> None:
    """Make a checkpoint from the files of another tool.

    Reads a torch.save or safetensors file, or a folder of torch.distributed.checkpoint, without
    running any code in it.
    """
    _check_run(run, step, force=force)
    items = items_of(read_state(source))
    from laststep.oneoff import import_state

    import_state(items, run, step, metadata={"imported_from": Path(source).absolute().name})
    if as_json:
        print_json({"source": source, "run": run, "step": step, "items": list(items)})
        return
    say(f"imported {source} into {run} as step {step}: {', '.join(items)}")


def _check_run(path: str, step: int, *, force: bool) -> None:
    """Reject an import that would fail, or disturb a running job, before the file is read."""
    try:
        run = Run.open(open_store(path))
    except NotFoundError:
        return
    writer = None if force else run.live_writer()
    if writer is not None:
        raise AbortedError(
            "refused to import into a run that is in use",
            where=run.store.url,
            found=f"a live writer: {writer.who}",
            remedy=(
                "wait until it has finished, or take over the run with --force: its next save "
                "then fails"
            ),
        )
    try:
        run.check_step_free(step)
    except AlreadyExistsError as error:
        error.remedy = "name another with --step"
        raise


@system.translate_oom("import all of it")
def read_state(source: str) -> object:
    from laststep.adapters.importing import dcp_folder, tensor_files

    path = Path(source).expanduser()
    try:
        if path.is_dir():
            return dcp_folder.read_folder(path)
        if not path.is_file():
            raise NotFoundError(
                "cannot import", where=source, found="no such file", remedy="check the path"
            )
        return tensor_files.read_file(path)
    except OSError as error:
        raise StorageError("cannot import", where=source, found=str(error.strerror)) from error


def items_of(state: object) -> dict[str, object]:
    """Split a state into items: one for each part that is itself a mapping, else a single `model`.

    {"model": {…}, "optimizer": {…}, "epoch": 3} has two such parts; the remainder, here the epoch,
    becomes the item `rest`. A plain state dict, name → tensor, is one item.
    """
    if not isinstance(state, Mapping) or not state:
        return {_MODEL: {"value": state}}
    parts = {key: value for key, value in state.items() if isinstance(value, Mapping)}
    if not parts or not all(map(is_item_name, parts)):
        return {_MODEL: dict(state)}
    rest = {key: value for key, value in state.items() if key not in parts}
    items: dict[str, object] = dict(parts)
    if rest:
        name = "rest"
        while name in items:
            name += "_"
        items[name] = rest
    return items
