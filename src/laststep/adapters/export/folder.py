"""A new folder that appears whole and durable, or not at all; and what an export put into it.

Knows nothing of what is written into it. The files are written to a hidden folder beside the
target, which takes the target's name once all of them are durable. Whatever ends the writing before
that, an interrupt too, nothing is left; only a kill leaves the hidden folder.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from laststep.errors import AlreadyExistsError
from laststep.process import signals
from laststep.storage.directory import TEMPORARY
from laststep.storage.files import UNSUPPORTED, Disk, absolute, failed

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenFile:
    """A file of an export."""

    name: str
    tensors: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What an export wrote, and what not."""

    files: tuple[WrittenFile, ...]
    """The files that hold state."""
    values: int = 0
    """Entries that are no tensors."""
    dropped: dict[str, str] = field(default_factory=dict)
    """Tied tensors that are not written, and the name under which each is."""
    left_out: tuple[str, ...] = ()
    """Values that are no tensors, and are not written."""

    @property
    def tensors(self) -> int:
        return sum(file.tensors for file in self.files)

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)


def check_absent(target: str | os.PathLike[str]) -> None:
    """`AlreadyExistsError` where the name is taken, by whatever it is."""
    if os.path.lexists(absolute(target)):
        raise _taken(absolute(target))


@contextlib.contextmanager
def new_folder(target: str | os.PathLike[str], *, replace: bool = False) -> Iterator[Path]:
    """Give a hidden folder to write to, which becomes the folder `target` at the end; `replace`:
    also where there is one, which is there until then."""
    if not replace:
        check_absent(target)
    path = Path(absolute(target))
    above = [folder for folder in path.parents if not folder.exists()]
    staging = path.parent / f".{path.name}{TEMPORARY}{os.getpid()}-{time.monotonic_ns()}"
    try:
        staging.mkdir(parents=True)
        yield staging
        Disk().sync_folder(str(staging))
        if replace and path.is_dir():
            _exchange(staging, path)
        else:
            _publish(staging, path)
    except BaseException as error:
        with signals.held():
            _remove(staging, above)
        if isinstance(error, OSError):
            raise failed("write", str(path), error) from error
        raise


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """A new file to write to in order, durable at the end."""
    with path.open("xb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def _publish(staging: Path, path: Path) -> None:
    disk = Disk()
    try:
        disk.rename_new(str(staging), str(path))
    except FileExistsError:
        raise _taken(str(path)) from None
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        check_absent(path)
        disk.rename(str(staging), str(path))
    disk.sync_folder(str(path.parent))


def _exchange(staging: Path, path: Path) -> None:
    """Publish in the place of a folder, and delete that."""
    disk = Disk()
    old = staging
    try:
        disk.exchange(str(staging), str(path))
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        old = staging.with_name(f"{staging.name}-old")
        disk.rename(str(path), str(old))  # a moment without: this filesystem has no better way
        disk.rename(str(staging), str(path))
    disk.sync_folder(str(path.parent))
    shutil.rmtree(old, ignore_errors=True)


def _remove(staging: Path, above: list[Path]) -> None:
    shutil.rmtree(staging, ignore_errors=True)
    for folder in above:
        with contextlib.suppress(OSError):
            folder.rmdir()


def _taken(path: str) -> AlreadyExistsError:
    return AlreadyExistsError(
        "there is something already", where=path, remedy="name another, or remove it"
    )
