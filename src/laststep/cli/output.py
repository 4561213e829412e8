"""How the commands speak: tables and lines for people, one JSON document for programs.

Knows nothing of checkpoints. For people through rich, without colour or cut-off columns where
stdout is no terminal. A JSON document is the only thing on stdout; numbers that JSON does not know
are the strings "nan", "inf" and "-inf", and a value that it cannot express is its `repr`.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from laststep.errors import UsageError
from laststep.watching import human

SCHEMA = 1
"""Grows when a document changes in a way that could break its readers; new fields may come."""

_WIDE = 10_000

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]


def console(*, stderr: bool = False) -> Console:
    """Where people read; a pipe is never wrapped or cut."""
    stream = sys.stderr if stderr else sys.stdout
    watched = stream.isatty()
    return Console(
        file=stream,
        highlight=False,
        markup=False,
        soft_wrap=not watched,
        width=None if watched else _WIDE,
    )


def confirm(what: str, how: str, size_bytes: int) -> None:
    """Ask whether something is to go that does not come back, such as "delete" "9 checkpoints";
    `UsageError` where nobody can be asked."""
    if not sys.stdin.isatty():
        raise UsageError(
            f"refused to {what} {how} unasked",
            expected="--yes where nobody can be asked",
            remedy="add --yes, or --dry-run to only look",
        )
    typer.confirm(f"{what.capitalize()} {how} ({size_text(size_bytes)})?", abort=True, err=True)


@contextmanager
def bar(title: str) -> Iterator[Callable[[int, int], None] | None]:
    """A progress bar on stderr, of bytes done and all bytes, where a person watches it."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn(title), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console(stderr=True), transient=True) as shown:
        task = shown.add_task(title)
        yield lambda done, total: shown.update(task, completed=done, total=total)


def table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    """An empty table; the columns named in `right` hold numbers."""
    made = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        made.add_column(column, justify="right" if column in right else "left", no_wrap=True)
    return made


MANY_ROWS = 500
"""A table for a person has fewer. More are for a search, and rich takes 0.5 ms for each."""


def print_rows(
    columns: tuple[str, ...], rows: list[tuple[str, ...]], right: tuple[str, ...]
) -> None:
    """The same table of very many rows, as plain text."""
    lines = [columns, *rows]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    aligned = [str.rjust if column in right else str.ljust for column in columns]
    for line in lines:
        cells = (put(cell, width) for put, cell, width in zip(aligned, line, widths, strict=True))
        sys.stdout.write("  ".join(cells).rstrip() + "\n")


def print_checkpoints(
    rows: list[dict[str, str]], right: tuple[str, ...], *, dim: list[bool]
) -> None:
    """A table of rows that have the same columns, at least one; some of them matter less."""
    columns = tuple(rows[0])
    if len(rows) > MANY_ROWS:
        print_rows(columns, [tuple(row.values()) for row in rows], right)
        return
    made = table(*columns, right=right)
    for row, is_dim in zip(rows, dim, strict=True):
        made.add_row(*row.values(), style="dim" if is_dim else None)
    console().print(made)


def print_json(document: Mapping[str, object]) -> None:
    """The document, with the number of its schema first."""
    text = json.dumps(plain({"schema": SCHEMA, **document}), indent=2, ensure_ascii=False)
    sys.stdout.write(text + "\n")


def fields(record: object, *names: str) -> dict[str, object]:
    """What a document says of a record that has these attributes."""
    return {name: getattr(record, name) for name in names}


def plain(value: object) -> object:
    """`value` as JSON can hold it."""
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else str(value)
        case Mapping():
            return {str(key): plain(inner) for key, inner in value.items()}
        case list() | tuple() | set() | frozenset():
            return [plain(inner) for inner in value]
    return repr(value)


size_text = human
"""A size as a person reads it, as the log writes it: `28.20 MB`."""


def time_text(seconds: float) -> str:
    """A moment in local time, to the second."""
    moment = datetime.fromtimestamp(seconds).astimezone()
    return moment.strftime("%Y-%m-%d %H:%M:%S")


def duration_text(seconds: float | None) -> str:
    """A duration to three digits: `4.21 ms`, `1.50 s`."""
    if seconds is None:
        return "-"
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def metrics_text(metrics: Mapping[str, object]) -> str:
    """Metrics in a line: `loss=2.31 epoch=4`."""
    return " ".join(f"{name}={_metric_text(value)}" for name, value in metrics.items())


def _metric_text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, int) and value.bit_length() > _LONG_BITS:  # Python writes no 4,300 digits
        return f"{'-' if value < 0 else ''}2^{value.bit_length() - 1}…"
    return str(value)


_LONG_BITS = 128


def count_text(count: int, one: str, many: str | None = None) -> str:
    """A number with its noun: `1 file`, `3 files`."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"
