"""`laststep export`: write a checkpoint as other tools read it, verified, in little memory.

`--format hf` writes the tensors of one item as Hugging Face has its models, `--format dcp` all
items as a folder of torch.distributed.checkpoint. The target is whole or absent: an error, Ctrl-C,
SIGTERM or SIGHUP leaves nothing. torch is loaded once there is something to write.

With --json: `step`, `folder` (of the checkpoint), `target`, `format`, `items` (names), `per_rank`
(those of which each rank had its own), `rank` (whose was written of these; null where there are
none), `tensors` and `values` (how many), `size_bytes`, `files` (`name`, `tensors`, `size_bytes`),
`dropped` (the names of tied tensors that are not written → the names under which they are) and
`left_out` (values that are no tensors, which hf has no place for).
"""

from __future__ import annotations

import contextlib
import re
import signal
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from laststep.adapters.export.folder import Exported, check_absent
from laststep.browse import open_folder
from laststep.cli import output, places

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import FrameType

    from laststep.adapters.export.hf import Choices
    from laststep.browse import Checkpoint

_MODEL = "model"
_SHARD = "5GB"
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?(?:([kmgt]?)(i?)b)?", re.IGNORECASE)
_DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}
_SHOWN_TIED = 20


def export(  # noqa: PLR0913 (one parameter for each option)
    path: places.RunOrCheckpoint,
    target: Annotated[
        str, typer.Argument(metavar="TARGET", help="The folder to make.", show_default=False)
    ],
    *,
    format_: Annotated[
        Literal["hf", "dcp"],
        typer.Option(
            "--format",
            help="Hugging Face's safetensors, or torch.distributed.checkpoint.",
            show_default=False,
        ),
    ],
    step: places.StepOption = None,
    item: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Which item.", show_default=f"hf: {_MODEL}, dcp: all"),
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
    keep_tied: Annotated[
        bool, typer.Option("--keep-tied", help="Write tied tensors under each of their names.")
    ] = False,
    as_json: output.AsJson = False,
) -> None:
    """Write a checkpoint as other tools read it.

    The newest of a run, or that of --step.
    """
    if format_ == "dcp" and (shard_bytes or dtype or rename or keep_tied):
        raise typer.BadParameter(
            "--shard-bytes, --dtype, --rename and --keep-tied belong to --format hf"
        )

    def write(place: places.CheckpointPath) -> tuple[Checkpoint, list[str], Exported]:
        check_absent(target)
        opened = open_folder(f"{place.store.url}/{place.folder}")
        with _ended_by_signals(), opened.of_rank(rank or 0) as checkpoint:
            if format_ == "hf":
                from laststep.adapters.export.hf import export_hf

                name = item or _MODEL
                choices = _choices(
                    shard_bytes or _SHARD, dtype or (), rename or (), keep_tied=keep_tied
                )
                return checkpoint, [name], export_hf(checkpoint, target, item=name, choices=choices)
            from laststep.adapters.export.dcp import export_dcp

            items = checkpoint.items() if item is None else [item]
            return checkpoint, items, export_dcp(checkpoint, target, items=items)

    checkpoint, items, exported = places.read(path, step, write)
    own = [name for name in checkpoint.per_rank() if name in items]
    if as_json:
        facts = output.fields(checkpoint, "step", "folder")
        facts |= {"target": target, "format": format_, "items": items, "per_rank": own}
        output.print_json(facts | {"rank": (rank or 0) if own else None} | _document(exported))
        return
    _print(exported, f"exported {', '.join(items)} of step {checkpoint.step} to {target}")
    if own:
        whose = f"each of {checkpoint.ranks:,} ranks has its own; this is rank {rank or 0}'s"
        other = "" if rank is not None else ": --rank N takes another's"
        output.console().print(f"{', '.join(own)}: {whose}{other}")


def _choices(
    shard_bytes: str, dtypes: Sequence[str], renames: Sequence[str], *, keep_tied: bool
) -> Choices:
    from laststep.adapters.export.hf import Cast, Choices, Rename

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
        rules.append(Rename(pattern=_pattern(regex, "--rename"), replacement=replacement))
    return Choices(
        shard_bytes=_size(shard_bytes),
        casts=tuple(casts),
        renames=tuple(rules),
        keep_tied=keep_tied,
    )


def _pattern(regex: str, option: str) -> re.Pattern[str]:
    try:
        return re.compile(regex)
    except re.error as error:
        raise _misused(f"{regex!r} is no regular expression: {error}", option) from None


def _size(text: str) -> int:
    """`5GB`, `512 MiB` or `1000`, in bytes."""
    match = _SIZE.fullmatch(text.strip())
    if match is None or float(match[1]) == 0:
        raise _misused(f"{text!r} is no size such as 5GB or 512MiB", "--shard-bytes")
    unit = 1024 if match[3] else 1000
    return int(float(match[1]) * unit ** ("kmgt".find((match[2] or " ").lower()) + 1))


def _misused(text: str, option: str) -> typer.BadParameter:
    return typer.BadParameter(text, param_hint=option)


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Let what would kill the command at once end it in order, so that it can clean up."""

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


def _document(exported: Exported) -> dict[str, object]:
    return {
        **output.fields(exported, "tensors", "size_bytes", "values", "dropped", "left_out"),
        "files": [asdict(file) for file in exported.files],
    }


def _print(exported: Exported, what: str) -> None:
    console = output.console()
    table = output.table("file", "tensors", "size", right=("tensors", "size"))
    for file in exported.files:
        table.add_row(file.name, f"{file.tensors:,}", output.size_text(file.size_bytes))
    console.print(table)
    for name, kept in list(exported.dropped.items())[:_SHOWN_TIED]:
        console.print(f"tied, not written again: {name} is {kept}")
    if len(exported.dropped) > _SHOWN_TIED:
        console.print(f"… and {len(exported.dropped) - _SHOWN_TIED:,} more (see --json)")
    if exported.left_out:
        count = output.count_text(len(exported.left_out), "value")
        console.print(f"left out, no tensors: {count} (see --json)")
    written = output.count_text(exported.tensors, "tensor")
    if exported.values:
        written += f", {output.count_text(exported.values, 'value')}"
    console.print(f"{what}: {written}, {output.size_text(exported.size_bytes)}")
