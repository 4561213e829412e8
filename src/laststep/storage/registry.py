"""The only place that opens stores, by the path of a folder or by a URL.

A folder is given as a path or `file://…`. `s3://`, `gs://` and `az://` are object stores,
`shm://name` is a folder in shared memory.
Any other scheme belongs to a third-party store: register its opener, or install it under the entry
point `laststep.stores`. An opener given by its import path works in every process, including the
flusher; a callable works only in this process. This module knows nothing about the stored data.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable

from laststep.errors import UsageError
from laststep.storage.directory import DirectoryStore
from laststep.storage.files import absolute, scheme_of
from laststep.storage.store import Store

Opener = Callable[[str], Store]

_ENTRY_POINTS = "laststep.stores"
_OF_FOLDERS = (None, "file")
"""Schemes of folders on this machine; None: a path."""
_BUILT_IN = {
    **dict.fromkeys(("az", "gs", "s3"), "laststep.storage.objects:ObjectStore"),
    "shm": "laststep.storage.shared_memory:SharedMemoryStore",
}
"""Openers for schemes without a registered or installed one."""
_openers: dict[str, Opener | str] = {}


def register_store(scheme: str, opener: Opener | str) -> None:
    """Open the URLs of a scheme with `opener`, which is called with a URL and returns a `Store`.

    `"package.module:function"` is imported by each process that needs it. A callable works in this
    process only: with `flush="thread"`, in a job of one rank.
    """
    module, _, name = opener.partition(":") if isinstance(opener, str) else ("", "", "")
    # Another process has a different `__main__`.
    can_open = callable(opener) or (module and module != "__main__" and name)
    if scheme_of(f"{scheme}://") in _OF_FOLDERS or not can_open:
        raise UsageError(
            "cannot register a store",
            found=f"{scheme!r}, {opener!r}",
            expected='a scheme other than "file", and what opens a URL, or its name as '
            '"package.module:function"',
        )
    _openers[scheme.lower()] = opener


def open_store(place: str | os.PathLike[str], *, shared: bool = False) -> Store:
    """Open the store at a path or URL. Raise `UsageError` if its scheme is not registered, or if
    `shared` is set and other processes cannot open it."""
    if scheme_of(place) in _OF_FOLDERS:
        return DirectoryStore(place)
    url = str(place).rstrip("/")
    opener = _opener(str(place))
    if not isinstance(opener, str):
        if shared:
            raise UsageError(
                "other processes cannot open this store",
                where=url,
                expected="a store that the flusher, and every rank, can open by its URL",
                found="its opener is an object of this process",
                remedy="pass options=laststep.Options(flush='thread') in a job of one rank, or "
                "register it by its name, as "
                '"package.module:function"',
            )
        return opener(url)
    module, _, name = opener.partition(":")
    try:
        imported: Opener = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        if getattr(error, "name", None) == "obstore":
            extra = f"{scheme_of(url)}:// needs: pip install 'laststep[cloud]'"
            raise UsageError(extra).amended(remedy=None) from None
        raise UsageError(
            "cannot import the opener of this store",
            where=f"{scheme_of(url)}://",
            expected=opener,
            found=str(error),
            remedy="install the package that has it, or register another",
        ) from error
    return imported(url)


def open_parent(place: str | os.PathLike[str]) -> tuple[Store, str]:
    """Open the store that contains a folder; return it and the folder's name in it."""
    full = local_path(place)
    parent, _, name = (str(place).rstrip("/") if full is None else full).rpartition("/")
    if full is None and parent.endswith(":/"):
        raise UsageError("this is the root of a store, not a folder in it", where=str(place))
    return open_store(parent or "/"), name


def local_path(place: str | os.PathLike[str]) -> str | None:
    """Return the absolute path of a folder on this machine; None for any other URL."""
    return absolute(place) if scheme_of(place) in _OF_FOLDERS else None


def real_place(place: str | os.PathLike[str]) -> str:
    """Return the same text for every path to a folder, also by links, and spelling of a URL."""
    full = local_path(place)
    if full is not None:
        return os.path.realpath(full)
    return f"{scheme_of(place)}://{str(place).partition('://')[2].rstrip('/')}"


def import_path(url: str) -> str | None:
    """Return the import path that opens a URL elsewhere; None for folders and callables."""
    opener = None if local_path(url) is not None else _opener(url)
    return opener if isinstance(opener, str) else None


def _opener(url: str) -> Opener | str:
    scheme = scheme_of(url) or ""
    if scheme not in _openers:
        installed = {**_BUILT_IN, **_installed()}
        if scheme not in installed:
            known = ", ".join(f"{name}://" for name in sorted({"file", *_openers, *installed}))
            raise UsageError(
                f"no store is registered for {scheme}://",
                where=url,
                expected=f"the path of a folder, or a URL of {known}",
                found=repr(url),
                remedy="install the package that has such a store, or call "
                f"laststep.register_store({scheme!r}, …); or mount it, and pass the path of a "
                "folder in it",
            )
        _openers[scheme] = installed[scheme]
    return _openers[scheme]


def _installed() -> dict[str, str]:
    """Return the openers of installed packages, by scheme."""
    from importlib.metadata import entry_points  # slow and rarely needed

    return {point.name.lower(): point.value for point in entry_points(group=_ENTRY_POINTS)}
