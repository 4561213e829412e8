"""Output of the commands: tables and lines for people, one JSON document for programs.

Knows nothing about checkpoints. With --json, the document is the only output on stdout; numbers
that JSON cannot express become the strings "nan", "inf" and "-inf", and other such values become
their `repr`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Annotated

import typer

from laststep.errors import UsageError
from laststep.events import human

SCHEMA = 1
"""Incremented when a document changes in a way that could break its readers."""

FAILED = 1
"""Exit status: the command failed; one line on stderr gives the reason."""
MISUSED = 2
"""Exit status: wrong usage."""
DAMAGED = 3
"""Exit status: `verify` or `copy` completed and found damage."""

_LARGE_BITS = 128
"""Larger integers are shown as a power of two."""
_DECIMAL_BITS = 10_000
"""Larger integers are hexadecimal in JSON: Python refuses to write more than 4,300 digits."""
_VALUE_CHARACTERS = 60

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say what would be done.")]
Threads = Annotated[int, typer.Option(help="How many threads work at once.", min=1, max=64)]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


say = typer.echo


def confirm(what: str) -> None:
    """Ask before something irreversible. Abort on no; raise `UsageError` without a terminal."""
    if not sys.stdin.isatty():
        raise UsageError(
            f"refused to {what} without confirmation",
            expected="--yes, because there is no terminal to ask on",
            remedy="add --yes, or --dry-run to only look",
        )
    typer.confirm(f"{what[0].upper()}{what[1:]}?", abort=True, err=True)


@contextmanager
def bar(title: str) -> Iterator[Callable[[int, int], None] | None]:
    """Show a progress bar on stderr if it is a terminal; yield a callback for (done, total)."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn(title), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task(title)
        yield lambda done, total: shown.update(task, completed=done, total=total)


_NUMBERS = (
    *("age", "bytes", "checkpoints", "files", "new", "only here"),
    *("parts", "rank", "size", "step", "tensors"),
)
"""Columns that are aligned to the right."""


def print_table(rows: Sequence[Mapping[str, str]]) -> None:
    """Print rows, which map columns to cells, without columns that are empty. On a terminal, lines
    are cut to its width, so names come before texts of any length."""
    columns = [column for column in (rows[0] if rows else ()) if any(row[column] for row in rows)]
    if not columns:
        return
    lines = [columns, *([row[column] for column in columns] for row in rows)]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    limit = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for line in lines:
        cells = [
            cell.rjust(width) if column in _NUMBERS else cell.ljust(width)
            for column, cell, width in zip(lines[0], line, widths, strict=True)
        ]
        text = "  ".join(cells).rstrip()
        if limit is not None and len(text) > limit:
            text = f"{text[: limit - 1]}…"
        sys.stdout.write(text + "\n")
    sys.stdout.flush()


def print_json(document: Mapping[str, object]) -> None:
    text = json.dumps(plain({"schema": SCHEMA, **document}), indent=2, ensure_ascii=False)
    # A lone surrogate becomes its JSON escape.
    sys.stdout.write(text.encode(errors="backslashreplace").decode() + "\n")


def fields(record: object, names: str) -> dict[str, object]:
    """Return the attributes with these names, which are separated by spaces."""
    return {name: getattr(record, name) for name in names.split()}


def plain(value: object) -> object:
    """Convert a value to types that JSON can express."""
    match value:
        case int() if value.bit_length() > _DECIMAL_BITS:
            return hex(value)
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else str(value)
        case Mapping():
            return {str(key): plain(inner) for key, inner in value.items()}
        case list() | tuple() | set() | frozenset() | deque():
            return [plain(inner) for inner in value]
    if dataclasses.is_dataclass(value):
        return {
            field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)
        }
    return _repr(value)


def value_text(value: object) -> str:
    """Format a value in at most `_VALUE_CHARACTERS`, with control characters escaped."""
    if isinstance(value, list | tuple) and len(value) > _VALUE_CHARACTERS:
        value = value[:_VALUE_CHARACTERS]
    text = _repr(value)
    return text if len(text) <= _VALUE_CHARACTERS else f"{text[: _VALUE_CHARACTERS - 1]}…"


def printable(text: str) -> str:
    """Escape what a terminal would interpret."""
    return text if text.isprintable() else repr(text)[1:-1]


def _repr(value: object) -> str:
    if isinstance(value, int) and value.bit_length() > _LARGE_BITS:
        return f"{'-' if value < 0 else ''}2^{value.bit_length() - 1}…"
    try:
        return repr(value)
    except ValueError:  # a large integer within it
        return f"<{type(value).__name__}>"


size_text = human
"""Format a size as in the log: `28.20 MB`."""


def time_text(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def shown_metrics(metrics: Mapping[str, object]) -> dict[str, object]:
    """Return the metrics of the user: names with `_` in front are those of adapters."""
    return {name: value for name, value in metrics.items() if not name.startswith("_")}


def metrics_text(metrics: Mapping[str, object]) -> str:
    """Format metrics in one line: `loss=2.31 epoch=4`."""

    def text(value: object) -> str:
        if isinstance(value, float):
            return f"{value:.4g}"
        return printable(value) if isinstance(value, str) else _repr(value)

    return " ".join(f"{printable(name)}={text(value)}" for name, value in metrics.items())


def count_text(count: int, noun: str, plural: str | None = None) -> str:
    """Format a number with its noun: `1 file`, `3 files`."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"
