"""What every measurement does to files: make durable, make cold, delete without a trace.

Knows nothing of torch or of who wrote the files.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path


def files_under(path: Path) -> list[Path]:
    """All regular files at or below `path`."""
    if path.is_file():
        return [path]
    return [Path(root) / name for root, _, names in os.walk(path) for name in names]


def size_bytes(path: Path) -> int:
    """Bytes of all files at or below `path`."""
    return sum(file.stat().st_size for file in files_under(path))


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def fsync_tree(path: Path) -> None:
    """Make every file and folder at or below `path`, and the name of `path` itself, durable."""
    for file in files_under(path):
        _fsync(file)
    if path.is_dir():
        for root, _, _ in os.walk(path):
            _fsync(Path(root))
    _fsync(path.parent)


def make_cold(path: Path, *, whole_machine: bool = True) -> str:
    """Put the files at or below `path` out of the page cache; says by which means.

    They must be durable: dirty pages stay where they are.
    """
    fsync_tree(path)
    for file in files_under(path):
        fd = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
    if whole_machine:
        with contextlib.suppress(OSError):
            Path("/proc/sys/vm/drop_caches").write_text("3\n")
            return "fadvise and drop_caches"
    return "fadvise"


def remove(path: Path) -> None:
    """Delete `path` and wait until the filesystem has digested that.

    ext4 mounted with discard trims the freed blocks at the next journal commit; without the sync
    that trim would run into, and slow down, whatever is timed next.
    """
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
    os.sync()


def free_bytes(path: Path) -> int:
    """Bytes that may still be written beside `path`."""
    return shutil.disk_usage(path).free
