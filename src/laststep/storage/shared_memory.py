"""Shared memory as a place for files: the folder of this user, and the runs in it, `shm://name`.

On a filesystem in memory, /dev/shm if nobody says otherwise, each user has one folder, into which
nobody else can look. Runs lie in `runs` there, by their names; whatever else lies beside that is
somebody else's business. All of it is gone when the machine starts again.
"""

from __future__ import annotations

import contextlib
import os
import stat

from laststep.errors import StorageError, UsageError
from laststep.storage.directory import DirectoryStore
from laststep.storage.files import failed
from laststep.storage.store import check_name

BASE = "/dev/shm"  # noqa: S108 (a folder of this user's own is made in it)
RUNS = "runs"


class SharedMemoryStore(DirectoryStore):
    """A run in shared memory: `shm://name`, or `shm://team/name`."""

    def __init__(self, url: str) -> None:
        name = url.partition("://")[2]
        try:
            self._named = f"shm://{check_name(name)}"
        except UsageError:
            raise UsageError(
                "this names no run in shared memory",
                found=repr(url),
                expected="shm://name, with plain parts and no slash in front",
                remedy="name it; where shared memory is a tier before others, "
                "tiers=['shm:///path/of/a/tmpfs', …] says where it lies",
            ) from None
        with contextlib.suppress(FileNotFoundError):
            own_folder(BASE)
        super().__init__(f"{_own(BASE)}/{RUNS}/{name}")

    @property
    def url(self) -> str:
        """As it was opened."""
        return self._named

    def _make_root(self) -> None:
        if not self._rooted:
            made_own_folder(BASE)
        super()._make_root()


def made_own_folder(base: str) -> str:
    """The same as `own_folder`, made where there is none yet."""
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(_own(base), 0o700)
        return own_folder(base)
    except FileNotFoundError:
        raise StorageError(
            "there is no shared memory that could outlive this process",
            where=base,
            remedy="mount a tmpfs there, or name one: Tier('shm:///path/of/it')",
        ) from None
    except OSError as error:
        raise failed("use shared memory", base, error) from error


def own_folder(base: str) -> str:
    """The folder of this user below that, into which nobody else may look; `FileNotFoundError`
    where there is none."""
    place = _own(base)
    status = os.lstat(place)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise StorageError(
            "refused a folder in shared memory into which others can look",
            where=place,
            expected="a folder of this user's, with mode 700",
            found=f"{stat.filemode(status.st_mode)} of user {status.st_uid}",
            remedy="have it removed; somebody else may have made it",
        )
    return place


def _own(base: str) -> str:
    return f"{base}/laststep-{os.getuid()}"
