"""The command line: `laststep ls | show | du | verify | copy | prune | pin | recover | export | …`.

No command imports torch before it runs, and only `import` and `export` need it at all. Errors of
the library are printed as one message on stderr, with the exit statuses of `output`; any other
exception is a bug and shows its traceback.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer
from typer.core import TyperGroup

from laststep.cli.changing import copy, pin, prune, recover, unpin
from laststep.cli.deleting import rm, rollback
from laststep.cli.foreign import export, import_
from laststep.cli.listing import du, ls, verify
from laststep.cli.output import FAILED, MISUSED
from laststep.cli.showing import show
from laststep.errors import LaststepError, UsageError
from laststep.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["app", "main"]


class _Commands(TyperGroup):
    def invoke(self, ctx: typer.Context) -> object:  # type: ignore[override]  # a private type
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            # typer prefixes the text about a wrong choice with the name of the exception.
            error.message = error.message.removeprefix("Value error, ")
            raise


app = typer.Typer(
    name="laststep",
    cls=_Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
COMMANDS: dict[str, Callable[..., None]] = {
    **{command.__name__: command for command in (ls, show, verify, du, copy, export)},
    "import": import_,
    **{command.__name__: command for command in (pin, unpin, prune, rm, rollback, recover)},
}
for name, command in COMMANDS.items():
    app.command(name)(command)


@app.command()
def version() -> None:
    """Print the version."""
    print(f"laststep {VERSION}")


def _print_version(wanted: bool) -> None:  # noqa: FBT001 (typer calls it by position)
    if wanted:
        version()
        raise typer.Exit


@app.callback()
def _laststep(
    *,
    wanted: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Look after the checkpoints of PyTorch training runs."""


def main() -> None:
    """Run the command line; print errors as one message instead of a traceback."""
    try:
        app()
    except LaststepError as error:
        print(f"laststep: {error}", file=sys.stderr)
        sys.exit(MISUSED if isinstance(error, UsageError) else FAILED)
