"""New folders that appear complete and durable or not at all, and reading the tensors to export.

Files are written to a hidden folder next to the target, which is renamed to the target once all of
them are durable. If writing ends early, also by an interrupt, nothing remains; only a kill leaves
the hidden folder.

`ItemTensors` reads the tensors of one stored item through the catalog, which verifies every byte. A
piece is as many rows as fit into `PIECE_BYTES`, and at least one.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from laststep.constants import DTYPES
from laststep.errors import AlreadyExistsError
from laststep.process import signals
from laststep.storage.directory import TEMPORARY
from laststep.storage.files import UNSUPPORTED, Disk, absolute, failed

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from laststep.browse import Checkpoint
    from laststep.state.tree import Shape, TensorSpec, View


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    files: dict[str, int]
    """The sizes of the files that hold state, by name."""
    tensors: int
    values: int = 0
    """The number of written entries that are not tensors."""
    dropped: dict[str, str] = field(default_factory=dict)
    """Tied tensors that are not written, and the name under which each one is stored."""
    omitted_values: tuple[str, ...] = ()
    """Values that are not written because they are not tensors."""

    @property
    def size_bytes(self) -> int:
        return sum(self.files.values())


def check_absent(target: str | os.PathLike[str]) -> None:
    """Raise AlreadyExistsError if anything exists under this name."""
    if os.path.lexists(absolute(target)):
        raise _taken(absolute(target))


@contextlib.contextmanager
def new_folder(target: str | os.PathLike[str], *, replace: bool = False) -> Iterator[Path]:
    """Yield a hidden folder that becomes `target` at the end of the block. With `replace`, an
    existing folder stays until then and is replaced; without, AlreadyExistsError is raised."""
    with published(target, replace=replace) as staging:
        staging.mkdir()
        yield staging
        Disk().sync_folder(str(staging))


@contextlib.contextmanager
def published(target: str | os.PathLike[str], *, replace: bool = False) -> Iterator[Path]:
    """Yield a hidden path beside `target`, at which the block makes a durable file or folder, and
    then rename it to `target`. With `replace`, an existing folder is replaced; without,
    AlreadyExistsError is raised."""
    if not replace:
        check_absent(target)
    path = Path(absolute(target))
    above = [folder for folder in path.parents if not folder.exists()]
    staging = path.parent / f".{path.name}{TEMPORARY}{os.getpid()}-{time.monotonic_ns()}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield staging
        if replace and path.is_dir():
            _exchange(staging, path)
        else:
            _publish(staging, path)
    except BaseException as error:
        with signals.defer_signals():
            shutil.rmtree(staging, ignore_errors=True)
            with contextlib.suppress(OSError):
                staging.unlink()  # a file
            with contextlib.suppress(OSError):
                for folder in above:
                    folder.rmdir()
        if isinstance(error, OSError):
            raise failed("write", str(path), error) from error
        raise


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """Yield a new file to write sequentially; it is durable at the end of the block."""
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
    """Publish in place of an existing folder, and delete that one."""
    disk = Disk()
    old = staging
    try:
        disk.exchange(str(staging), str(path))
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        old = staging.with_name(f"{staging.name}-old")
        disk.rename(str(path), str(old))  # `path` is briefly missing: no atomic exchange here
        disk.rename(str(staging), str(path))
    disk.sync_folder(str(path.parent))
    shutil.rmtree(old, ignore_errors=True)


def _taken(path: str) -> AlreadyExistsError:
    return AlreadyExistsError(
        "the path already exists", where=path, remedy="name another, or remove it"
    )


PIECE_BYTES = 16 << 20


class ItemTensors:
    """The tree of an item and its tensors, by the names that the tree uses."""

    def __init__(self, checkpoint: Checkpoint, item: str) -> None:
        """Raise NotFoundError if the checkpoint has no such item."""
        self._checkpoint = checkpoint
        self._item = checkpoint.content().item(item)
        self.item = item
        self.where = checkpoint.folder
        self.tree = self._item.tree

    def source_of(self, name: str) -> str:
        """Return the name under which a tensor is stored: its own, unless it is tied."""
        return self._item.ties.get(name, name)

    def spec(self, name: str) -> TensorSpec:
        return self._item.spec_of(name)

    def pieces(
        self, name: str, *, limit_bytes: int | None = None
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield at least one piece of a tensor, in order, each with the number of its first row."""
        dtype, shape = self.spec(name)
        row_bytes = size_bytes(dtype, shape[1:])
        count = max((limit_bytes or PIECE_BYTES) // max(row_bytes, 1), 1)
        view = self._item.view_of(name)
        for start in range(0, max(shape[0], 1) if shape else 1, count):
            rows = range(start, min(start + count, shape[0])) if shape else None
            if view is not None:
                yield start, self._window(view, rows)
                continue
            stored = self._checkpoint.tensor(f"{self.item}/{name}")
            yield start, stored[()] if rows is None else stored[rows.start : rows.stop]

    def whole(self, name: str) -> torch.Tensor:
        [(_, tensor)] = self.pieces(name, limit_bytes=sys.maxsize)
        return tensor

    def _window(self, view: View, rows: range | None) -> torch.Tensor:
        """Return rows of a tensor that shares bytes with its base, of which only those are read."""
        from laststep.state.tensors import open_view  # late: the command line starts without torch

        shape: Shape = () if rows is None else (len(rows), *view.shape[1:])
        size = DTYPES[view.dtype].size_bytes
        start = view.offset_bytes
        if rows is not None:
            start += rows.start * view.stride[0] * size
        reach = sum((n - 1) * step for n, step in zip(shape, view.stride, strict=True))
        stop = start + (0 if 0 in shape else (reach + 1) * size)
        base = self._checkpoint.tensor(f"{self.item}/{view.base}")[start:stop]
        # Cloned, so that the window starts at an aligned address.
        return open_view(base.clone(), view._replace(shape=shape, offset_bytes=0)).contiguous()


def size_bytes(dtype: str, shape: Shape) -> int:
    return math.prod(shape) * DTYPES[dtype].size_bytes
