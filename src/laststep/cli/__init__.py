"""The command line: `laststep ls | show | du | verify | copy | prune | pin | rescue | export | …`.

Each command is a module of its own, imported here; none of them imports torch before it runs, and
only `import`, `export` (in this process) and `demo` (in others) run it at all. Errors of the
library become one message on stderr and the statuses of `status`; anything else is a bug and shows
its traceback.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from laststep.cli import status
from laststep.cli.benching import bench
from laststep.cli.copying import copy
from laststep.cli.demo import demo
from laststep.cli.exporting import export
from laststep.cli.importing import import_
from laststep.cli.listing import ls
from laststep.cli.pinning import pin, unpin
from laststep.cli.pruning import prune
from laststep.cli.rescuing import rescue
from laststep.cli.showing import show
from laststep.cli.using import du
from laststep.cli.verifying import verify
from laststep.errors import LaststepError, UsageError
from laststep.version import VERSION

__all__ = ["app", "main"]

app = typer.Typer(
    name="laststep",
    help="Look after the checkpoints of PyTorch training runs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (ls, show, du, verify, copy, prune, pin, unpin, rescue, export, demo):
    app.command()(command)
app.command("import")(import_)
# Whatever is typed after `bench` belongs to the benchmarks, options too.
app.command(context_settings={"ignore_unknown_options": True, "help_option_names": []})(bench)


def _print_version(wanted: bool) -> None:  # noqa: FBT001 (typer calls it by position)
    if wanted:
        print(f"laststep {VERSION}")
        raise typer.Exit


@app.callback()
def _laststep(
    *,
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Look after the checkpoints of PyTorch training runs."""


def main() -> None:
    """Run the command line; what goes wrong is one message, not a traceback."""
    try:
        app()
    except LaststepError as error:
        print(f"laststep: {error}", file=sys.stderr)
        sys.exit(status.MISUSED if isinstance(error, UsageError) else status.FAILED)
