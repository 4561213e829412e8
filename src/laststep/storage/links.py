"""Links between objects, so that checkpoints in a bucket can share files.

A link is a small object next to the name that it provides: `.NAME.SIZE.link` holds the relative
path from its folder to the object with the bytes, the *target*. Next to the target,
`.TARGET.HASH.linked`, the back link, holds the path back. A target whose folder is deleted stays as
long as a link to it is alive, which means that both the link and its folder exist.

Every operation changes first and checks afterwards. Linking writes both objects and then checks
that the source file's folder still exists. Deleting a folder removes its marker and then looks for
links. So of two concurrent operations at least one sees the other, and no crash loses a file that a
link needs or leaves one behind for good: an interrupted deletion is repeated from its start.

Paths are relative, so a run that is copied with all its objects stays intact. This module knows
nothing about checkpoints. Safe to use from several threads.
"""

from __future__ import annotations

import hashlib
import posixpath
import re
from typing import TYPE_CHECKING, NamedTuple

from laststep.errors import CorruptError
from laststep.storage.bucket import Missing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from laststep.storage.bucket import Bucket

_LINK = re.compile(r"\.(.+)\.(\d{1,19})\.link")
_BACK = re.compile(r"\.(.+)\.[0-9a-f]{16}\.linked")
_WAY_BYTES = 4096


class ObjectLink(NamedTuple):
    """A link: the key of the object that holds it, and the size of the file."""

    key: str
    size_bytes: int


def parse(name: str) -> tuple[str, int] | None:
    """Return the linked file's name and size if this names a link object, else None."""
    found = _LINK.fullmatch(name)
    return None if found is None else (found[1], int(found[2]))


def is_hidden(name: str) -> bool:
    """Return whether this names a link or back link, which listings do not show."""
    return bool(_LINK.fullmatch(name) or _BACK.fullmatch(name))


class ObjectLinks:
    def __init__(self, bucket: Bucket, is_there: Callable[[str], bool]) -> None:
        """`is_there` returns whether the folder of a key exists."""
        self._bucket = bucket
        self._is_there = is_there
        self._found: dict[str, ObjectLink] = {}
        """Known links by the key that they provide; other processes may have removed some."""

    def note(self, key: str) -> None:
        """Remember a listed object if it is a link."""
        folder, _, name = key.rpartition("/")
        if (parsed := parse(name)) is not None:
            self._found[f"{folder}/{parsed[0]}"] = ObjectLink(key, parsed[1])

    def find(self, key: str) -> ObjectLink | None:
        """Return the link that provides a name, if there is one."""
        if key not in self._found:
            for meta in self._bucket.names(key.rpartition("/")[0]):
                self.note(meta["path"])
        return self._found.get(key)

    def create(self, key: str, target: str, size_bytes: int) -> ObjectLink | None:
        """Create a link and its back link; return None if the name is already linked."""
        folder, _, name = key.rpartition("/")
        link = ObjectLink(f"{folder}/.{name}.{size_bytes}.link", size_bytes)
        if self._bucket.create(link.key, _way(link.key, target)) is None:
            return None
        self._bucket.create(_back_key(link.key, target), _way(target, link.key))
        self._found[key] = link
        return link

    def remove(self, key: str) -> None:
        """Remove the link for a name, if any, and a target that nothing else keeps."""
        link = self.find(key)
        if link is not None:
            self._release(link.key)
            self._bucket.delete([link.key])
            self._found.pop(key, None)

    def is_shared(self, key: str) -> bool:
        """Return whether a live link needs that object."""
        return any(map(self._is_alive, self._backs(key)))

    def unneeded(self, keys: Iterable[str]) -> list[str]:
        """Return those keys below a deleted folder that can be deleted. Targets elsewhere that only
        the folder's links have kept are deleted here, because nothing names them afterwards."""
        listed = list(keys)
        kept: set[str] = set()
        for key in listed:
            above, _, name = key.rpartition("/")
            if (link := parse(name)) is not None:
                self._release(key)
                self._found.pop(f"{above}/{link[0]}", None)
            elif (back := _BACK.fullmatch(name)) is not None and self._is_alive(key):
                kept |= {key, f"{above}/{back[1]}"}
        return [key for key in listed if key not in kept]

    def _release(self, link: str) -> None:
        """Delete a removed link's target if nothing else keeps it, else its back link."""
        target = self.follow(link)
        if target is None or not target.startswith(self._bucket.prefix):
            return
        own = _back_key(link, target)
        if not self._is_there(target):
            backs = self._backs(target)
            # Only a target with a back link to this link: a damaged link must not delete anything.
            if own in backs and not any(self._is_alive(key) for key in backs if key != own):
                self._bucket.delete([target])
                self._bucket.delete(backs)
                return
        self._bucket.delete([own])

    def _backs(self, target: str) -> list[str]:
        folder, _, name = target.rpartition("/")
        listed = [meta["path"] for meta in self._bucket.names(folder)]
        found = [(key, _BACK.fullmatch(key.rpartition("/")[2])) for key in listed]
        return [key for key, back in found if back is not None and back[1] == name]

    def _is_alive(self, back: str) -> bool:
        """Return whether the link that a back link names still exists, in a folder that exists."""
        link = self.follow(back)
        return link is not None and self._is_there(link) and self._bucket.head(link) is not None

    def follow(self, key: str) -> str | None:
        """Return the key that a link or back link names; None if it is missing or invalid."""
        try:
            way = self._bucket.read(key, limit_bytes=_WAY_BYTES)[0].decode()
        except (Missing, CorruptError, UnicodeDecodeError):
            return None
        found = posixpath.normpath(posixpath.join(posixpath.dirname(key), way))
        return None if found.startswith(("..", "/")) else found


def _way(start: str, end: str) -> bytes:
    return posixpath.relpath(end, posixpath.dirname(start)).encode()


def _back_key(link: str, target: str) -> str:
    folder, _, name = target.rpartition("/")
    which = hashlib.sha256(_way(target, link)).hexdigest()[:16]
    return f"{folder}/.{name}.{which}.linked"
