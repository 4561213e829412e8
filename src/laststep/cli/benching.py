"""`laststep bench`: run the benchmarks of the source tree, which are not part of the package."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

import laststep
from laststep.errors import NotFoundError


def bench(
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[ARGUMENTS]...", help="Passed on to it.")
    ] = None,
) -> None:
    """Measure on this machine, with the benchmarks of the source tree."""
    root = _source_tree()
    if root is None:
        raise NotFoundError(
            "there are no benchmarks here",
            where=str(Path.cwd()),
            expected="the folder `bench` of laststep's sources",
            remedy="get the sources of this version and run `make bench` in them",
        )
    done = subprocess.run(
        [sys.executable, "-m", "bench", *(arguments or ())], cwd=root, check=False
    )
    raise typer.Exit(done.returncode)


def _source_tree() -> Path | None:
    """The sources that this package was installed from in place, or the working folder."""
    package = Path(laststep.__path__[0])
    for folder in (package.parent.parent, Path.cwd()):
        if (folder / "bench" / "__init__.py").is_file() and (folder / "pyproject.toml").is_file():
            return folder
    return None
