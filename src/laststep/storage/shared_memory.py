"""Stores in shared memory: the folder of this user, and the runs in it, `shm://name`.

On an in-memory filesystem, /dev/shm by default, each user has one folder that no other user can
read. Runs are stored in its subfolder `runs`, by name; other modules own everything else in it. All
of it is lost when the machine restarts.
"""

from __future__ import annotations

import contextlib
import os
import stat

from laststep.errors import StorageError, UsageError
from laststep.storage.directory import DirectoryStore
from laststep.storage.files import failed
from laststep.storage.store import check_name

BASE = "/dev/shm"  # noqa: S108 (files are created only in this user's own folder)
RUNS = "runs"


class SharedMemoryStore(DirectoryStore):
    """A run in shared memory: `shm://name`, or `shm://team/name`."""

    def __init__(self, url: str) -> None:
        name = url.partition("://")[2]
        try:
            self._named = f"shm://{check_name(name)}"
        except UsageError:
            raise UsageError(
                "invalid name of a run in shared memory",
                found=repr(url),
                expected="shm://name, with plain parts and no slash in front",
                remedy=(
                    "pass shm://name; for a memory tier at a path, pass "
                    "tiers=['shm:///path/of/a/tmpfs', …]"
                ),
            ) from None
        with contextlib.suppress(FileNotFoundError):
            own_folder(BASE)
        super().__init__(f"{_own(BASE)}/{RUNS}/{name}")

    @property
    def url(self) -> str:
        return self._named

    def _make_root(self) -> None:
        if not self._rooted:
            made_own_folder(BASE)
        super()._make_root()


def made_own_folder(base: str) -> str:
    """Return `own_folder`, creating it if needed; raise `StorageError` if that fails."""
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(_own(base), 0o700)
        return own_folder(base)
    except FileNotFoundError:
        raise StorageError(
            "no shared memory is available that outlives this process",
            where=base,
            remedy="mount a tmpfs there, or name one: Tier('shm:///path/of/it')",
        ) from None
    except OSError as error:
        raise failed("use shared memory", base, error) from error


def own_folder(base: str) -> str:
    """Return this user's folder below `base`. Raise `FileNotFoundError` if it does not exist, and
    `StorageError` if other users can access it."""
    place = _own(base)
    status = os.lstat(place)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise StorageError(
            "the folder in shared memory is readable by other users",
            where=place,
            expected="a folder of this user's, with mode 700",
            found=f"{stat.filemode(status.st_mode)} of user {status.st_uid}",
            remedy="have it removed: another user may have created it",
        )
    return place


def _own(base: str) -> str:
    return f"{base}/laststep-{os.getuid()}"
