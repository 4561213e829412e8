"""The command line: `laststep ls | show | du | verify | copy | prune | pin | recover | export | …`.

No command imports torch before it runs, and only `import` and `export` need it at all. Errors of
the library are printed as one message on stderr, with the exit statuses of `output`; any other
exception is a bug and shows its traceback.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

import laststep
from laststep.cli.changing import copy, pin, prune, recover, unpin
from laststep.cli.foreign import export, import_
from laststep.cli.listing import du, ls
from laststep.cli.output import FAILED, MISUSED
from laststep.cli.showing import show
from laststep.cli.verifying import verify
from laststep.errors import LaststepError, NotFoundError, UsageError
from laststep.version import VERSION

__all__ = ["app", "main"]


def bench(
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[ARGUMENTS]...", help="Passed on to it.")
    ] = None,
) -> None:
    """Run the benchmarks of the source tree on this machine."""
    root = _source_tree()
    if root is None:
        raise NotFoundError(
            "the benchmarks are not installed",
            where=str(Path.cwd()),
            expected="the folder `bench` of laststep's sources",
            remedy="get the sources of this version and run `make bench` in them",
        )
    done = subprocess.run(
        [sys.executable, "-m", "bench", *(arguments or ())], cwd=root, check=False
    )
    raise typer.Exit(done.returncode)


def _source_tree() -> Path | None:
    """Return the source tree of an editable install, or the working folder if it is one."""
    package = Path(laststep.__path__[0])
    for folder in (package.parent.parent, Path.cwd()):
        if (folder / "bench" / "__init__.py").is_file() and (folder / "pyproject.toml").is_file():
            return folder
    return None


app = typer.Typer(
    name="laststep",
    help="Look after the checkpoints of PyTorch training runs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (ls, show, du, verify, copy, prune, pin, unpin, recover, export):
    app.command()(command)
app.command("import")(import_)
# All arguments after `bench`, options too, are passed to the benchmarks.
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
    """Run the command line; print errors as one message instead of a traceback."""
    try:
        app()
    except LaststepError as error:
        print(f"laststep: {error}", file=sys.stderr)
        sys.exit(MISUSED if isinstance(error, UsageError) else FAILED)
