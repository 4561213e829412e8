"""A store in a bucket of an object store: `s3://`, `gs://` and `az://`.

Objects have no folders, and a run needs them: a folder that is deleted must be gone for everybody
at once, for who is still writing into it too. So a folder is there if and only if its *marker* is,
an object beside it: `.step-1.folder` for `step-1/`. Who creates a file looks at the markers above
it once more when the file is there, and takes it away again if one has gone or is another
(docs/decisions/0035). A folder under deletion has a second marker, under a temporary name, so that
somebody else can end what its deleter has begun.

Knows nothing of checkpoints. Safe to use from several threads.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import threading
from typing import TYPE_CHECKING

from laststep.errors import Exists, NotFound, Usage
from laststep.process.workers import Workers
from laststep.storage import s3
from laststep.storage.bucket import Bucket, Found, Missing
from laststep.storage.leases import Lease, Leases
from laststep.storage.probe import PROBE, probe
from laststep.storage.retrying import Patience
from laststep.storage.store import FileReading, FileWriting, Store, StoreEntry, check_name
from laststep.storage.transfers import ObjectReader, PartsWriter, SpooledWriter, taken

if TYPE_CHECKING:
    from laststep.storage.s3 import Uploads

_MARKER = re.compile(r"\.(.+)\.folder")
_TEMPORARY = ".tmp-"
_AT_ONCE = 16
"""Requests of one store for parts of files, beside those that callers make by themselves."""
_MARKER_BYTES = 1 << 12

_probed: set[str] = set()
"""The URLs that this process has probed."""


class ObjectStore(Store):
    """The objects below one prefix of a bucket, as folders and files."""

    has_marks = False
    same_everywhere = True

    def locks_tell(self) -> bool:
        return True

    def __init__(self, url: str, patience: Patience | None = None) -> None:
        self._bucket = Bucket(url, patience or Patience())
        self._leases = Leases(self._bucket)
        self._mutex = threading.Lock()
        self._made: dict[str, Found] = {}
        """The markers of folders that this store has seen, by the folder."""
        self._pool_made: Workers | None = None
        self._uploads_found: list[Uploads | None] = []

    @property
    def url(self) -> str:
        return self._bucket.where(self._bucket.prefix).rstrip("/")

    # Looking and reading

    def list(self, folder: str) -> list[StoreEntry]:
        prefix = self._key(folder) if folder else self._bucket.prefix
        if not all(self._bucket.head(self._marker(above)) for above in _upwards(folder)):
            return []
        entries = []
        for meta in self._bucket.names(prefix):
            name = meta["path"].rpartition("/")[2]
            marked = _MARKER.fullmatch(name)
            if not name.startswith(PROBE):
                entries.append(
                    StoreEntry(
                        name=name if marked is None else marked[1],
                        is_folder=marked is not None,
                        size_bytes=meta["size"] if marked is None else 0,
                        modified_s=meta["last_modified"].timestamp(),
                    )
                )
        return sorted(entries, key=lambda entry: entry.name)

    def read(self, name: str, *, limit_bytes: int) -> bytes:
        try:
            return self._bucket.read(self._key(name), limit_bytes=limit_bytes)[0]
        except Missing:
            raise self._absent(name) from None

    def open_reader(self, name: str, *, cached: bool = False) -> FileReading:
        found = self._bucket.head(self._key(name))
        if found is None:
            raise self._absent(name)
        return ObjectReader(self._bucket, self._key(name), found.size_bytes, self._pool())

    # Small files and folders

    def create(self, name: str, data: bytes) -> None:
        key = self._key(name)
        if "/" not in name:
            self._probe()
        self._prepare(name)
        if self._bucket.create(key, data) is None:
            raise taken(self._bucket, key)
        self._settle(name)

    def make_folder(self, name: str, *, parents: bool = True) -> None:
        check_name(name)
        self._probe()
        above = name.rpartition("/")[0]
        if above and self._seen(above) is None:
            if not parents:
                raise self._absent(above)
            with contextlib.suppress(Exists):  # by somebody else, just now
                self.make_folder(above)
        if self._bucket.head(self._key(name)) is not None:
            raise taken(self._bucket, self._key(name))
        # Who died before it could look again may have left a file in a folder of that name that was
        # deleted. Whoever sees the marker may write here at once: those are not to be deleted.
        left = self._bucket.below(self._key(name))
        made = self._bucket.create(self._marker(name), secrets.token_bytes(8))
        if made is None:
            raise taken(self._bucket, self._key(name))
        self._made[name] = made
        self._bucket.delete(left)
        if above:
            self._settle(name, of_folder=True)

    def delete(self, name: str) -> None:
        self._bucket.delete([self._key(name)])

    def delete_folder(self, name: str, *, first: str | None = None) -> None:
        key, marker = self._key(name), self._marker(name)
        if first is not None:
            self._bucket.delete([self._key(f"{name}/{first}")])
        try:
            content = self._bucket.read(marker, limit_bytes=_MARKER_BYTES)[0]
        except Missing:
            return
        self._made.pop(name, None)
        if _TEMPORARY in name and content.startswith(b"of "):
            self._empty(content[3:].decode(errors="replace"))
            self._bucket.delete([marker])
            return
        dying = self._marker(f"{name}{_TEMPORARY}{secrets.token_hex(6)}")
        self._bucket.create(dying, b"of " + key.encode())
        self._bucket.delete([marker])  # from here on there is no such folder
        self._empty(key)
        self._bucket.delete([dying])

    def _empty(self, key: str) -> None:
        """Delete all below a folder that has no marker any more, and uploads that lead there. All
        is listed before the look at the marker: what a folder has that was made again stays."""
        parent, _, last = key.rpartition("/")
        uploads, left = self._uploads(), self._bucket.below(key)
        begun = [] if uploads is None else uploads.pending(key)
        if self._bucket.head(f"{parent}/.{last}.folder".lstrip("/")) is not None:
            return  # somebody has made it again
        for below, upload in begun:
            uploads.abort(below, upload)  # type: ignore[union-attr]
        self._bucket.delete(left)

    # Large files

    def open_writer(self, name: str, *, expected_bytes: int) -> FileWriting:
        key = self._key(name)
        self._prepare(name)
        if self._bucket.head(key) is not None:
            raise taken(self._bucket, key)
        uploads = self._uploads()
        if uploads is None:
            return SpooledWriter(
                self._bucket, key, expected_bytes=expected_bytes,
                settle=lambda: self._settle(name),
            )  # fmt: skip
        return PartsWriter(
            self._bucket, uploads, key, expected_bytes=expected_bytes, pool=self._pool(),
            settle=lambda: self._settle(name),
        )  # fmt: skip

    # Locks

    def lock(self, name: str) -> Lease:
        key = self._key(name)
        self._prepare(name)
        return self._leases.take(key)

    def is_locked(self, name: str) -> bool:
        return self._leases.is_held(self._key(name))

    # What the others are made of

    def _prepare(self, name: str) -> None:
        """Before a file is made: its folder MUST be there, and no folder of its own name."""
        for above in _upwards(name.rpartition("/")[0]):
            if self._made.get(above) is None and self._seen(above) is None:
                raise self._absent(above)
        if self._bucket.head(self._marker(name)) is not None:
            raise taken(self._bucket, self._key(name))

    def _settle(self, name: str, *, of_folder: bool = False) -> None:
        """After something was made: where a folder above it has gone meanwhile, or is another, it
        goes too. Whoever made it may have slept while all was deleted."""
        for above in _upwards(name.rpartition("/")[0]):
            known, found = self._made.get(above), self._bucket.head(self._marker(above))
            if known is None or found is None or found.token != known.token:
                self._made.pop(above, None)
                self._bucket.delete([self._marker(name) if of_folder else self._key(name)])
                raise self._absent(above)

    def _seen(self, folder: str) -> Found | None:
        """The marker of a folder, asked for and remembered."""
        found = self._bucket.head(self._marker(folder))
        if found is not None:
            self._made[folder] = found
        return found

    def _probe(self) -> None:
        """Prove what the server can, once: whoever begins a run, or a folder, does so. Others only
        write into folders that are there."""
        with self._mutex:
            if self.url not in _probed:
                probe(self._bucket)
                _probed.add(self.url)

    def _uploads(self) -> Uploads | None:
        with self._mutex:
            if not self._uploads_found:
                self._uploads_found.append(s3.of_bucket(self._bucket))
            return self._uploads_found[0]

    def _pool(self) -> Workers:
        with self._mutex:
            if self._pool_made is None:
                self._pool_made = Workers(_AT_ONCE, "laststep-object")
            return self._pool_made

    def _key(self, name: str) -> str:
        if _MARKER.fullmatch(check_name(name).rpartition("/")[2]):
            raise Usage(
                "refused a name that means a folder here", where=self.url, found=repr(name),
                expected="a name that is not of the form .….folder",
            )  # fmt: skip
        return f"{self._bucket.prefix}/{name}".lstrip("/")

    def _marker(self, folder: str) -> str:
        above, _, last = self._key(folder).rpartition("/")
        return f"{above}/.{last}.folder".lstrip("/")

    def _absent(self, name: str) -> NotFound:
        return NotFound(
            "there is no such file or folder", where=f"{self.url}/{name}",
            remedy="somebody has deleted it, or it was never there",
        )  # fmt: skip


def _upwards(folder: str) -> list[str]:
    """A folder and those that it is in, from the outermost on; none for the root."""
    parts = folder.split("/") if folder else []
    return ["/".join(parts[: count + 1]) for count in range(len(parts))]
