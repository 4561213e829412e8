"""A store in a bucket of an object store: `s3://`, `gs://` and `az://`.

Object stores have no folders, but a run needs them: a deleted folder must disappear for all
processes at once, including those that are still writing into it. So a folder exists if and only if
its *marker* does, an object next to it: `.step-1.folder` for `step-1/`. After creating a file, a
writer checks the markers of its folders again, and deletes the file if one is gone or was replaced
(docs/decisions/0035). A folder under deletion has a second marker, with a temporary name, so that
another process can complete an interrupted deletion.

Locks are leases, which their holders renew and which expire by the server's clock. Before the first
write, a probe verifies that the server honours conditional requests: otherwise two writers could
both believe that they have committed.
"""

from __future__ import annotations

import contextlib
import email.utils
import http.client
import logging
import os
import re
import secrets
import threading
import time
import urllib.error
import urllib.request
from typing import TYPE_CHECKING

import msgspec

from laststep.errors import AlreadyExistsError, LaststepError, StorageError, UsageError
from laststep.process import system
from laststep.process.threads import Worker, WorkerPool, ready
from laststep.storage import links
from laststep.storage.bucket import Bucket, Found, Missing, Patience, Trouble, persist
from laststep.storage.links import ObjectLinks
from laststep.storage.store import Lock, Store, StoreEntry, check_name
from laststep.storage.transfers import ObjectReader, ObjectWriter

if TYPE_CHECKING:
    from collections.abc import Callable

    from laststep.errors import NotFoundError


_log = logging.getLogger(__name__)

PROBE = ".probe-"
"""Prefix of the names of probe objects, which listings leave out."""
_CONTENT = b"what a server keeps is what was put there"


def probe(bucket: Bucket) -> None:
    """Raise `StorageError` if the server lacks a required feature; leaves no object behind."""
    prefix = f"{bucket.prefix}/" if bucket.prefix else ""
    key = f"{prefix}{PROBE}{secrets.token_hex(6)}"
    # In this order: the first object is there for the others.
    checks: dict[str, Callable[[], bool]] = {
        "names that are free where nothing was put": (
            lambda: bucket.create(key, _CONTENT) is not None
        ),
        "conditional puts on a free name (If-None-Match)": (
            lambda: bucket.create(key, b"") is None
        ),
        "conditional puts on a version (If-Match)": (
            lambda: bucket.replace(key, b"", (f'"{32 * "0"}"', "1")) is None
        ),
        "reads of ranges (Range)": lambda: bucket.read_range(key, 5, 3) == _CONTENT[5:8],
        "listings that include every earlier put": (
            lambda: key in [meta["path"] for meta in bucket.names(bucket.prefix)]
        ),
    }
    try:
        for expected, holds in checks.items():
            try:
                found = None if holds() else "it is ignored"
            except StorageError as error:
                if error.transient:
                    raise
                found = error.found
            if found is not None:
                raise StorageError(
                    "this object store cannot keep a run",
                    where=bucket.where(bucket.prefix),
                    expected=expected,
                    found=found,
                    remedy=(
                        "use another server or version, or save to a folder; "
                        "docs/guides/object-storage.md lists those that were tested"
                    ),
                )
    finally:
        with contextlib.suppress(LaststepError):
            bucket.delete([key])


RENEWED_S = 10.0
DEAD_S = 45.0
_LIMIT_BYTES = 4096
_CLOCK_KEPT_S = 30.0


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a lease: the process that holds it."""

    token: str
    """Random and different for each holder; "" if the lease is free."""
    boot: str = ""
    pids: str = ""
    pid: int = 0
    started: str = ""
    turn: int = 0
    """Incremented by each renewal. Many servers give equal bytes the same ETag, and a process that
    read the lease before a renewal must not be able to replace it afterwards."""

    @property
    def is_gone(self) -> bool:
        """True if the process is known to be dead; False where that cannot be checked."""
        same_boot = self.boot != "" and self.boot == system.boot()
        return same_boot and system.has_died(self.pid, f"{self.started}@{self.pids}")


class Lease(Lock):
    """A lease that this process holds; its own thread renews it."""

    def __init__(self, bucket: Bucket, key: str, holder: Holder, found: Found) -> None:
        self._bucket, self._key, self._holder, self._found = bucket, key, holder, found
        self._pid = os.getpid()
        self._mutex = threading.Lock()
        self._over = threading.Event()
        Worker("lease", self._renew).start()

    def close(self) -> None:
        """Release the lease. Does nothing in a forked child, which does not hold it."""
        if os.getpid() != self._pid or self._over.is_set():
            return
        self._over.set()
        with self._mutex, contextlib.suppress(LaststepError):  # on failure the lease expires
            free = msgspec.json.encode(Holder(token=""))
            self._bucket.replace(self._key, free, self._found.version)

    def _renew(self) -> None:
        while not self._over.wait(RENEWED_S):
            try:
                self._renew_now()
            except LaststepError as error:
                _log.warning("could not renew a lease: %s", error)

    def _renew_now(self) -> None:
        with self._mutex:
            if self._over.is_set():
                return
            self._holder = msgspec.structs.replace(self._holder, turn=self._holder.turn + 1)
            content = msgspec.json.encode(self._holder)
            found = self._bucket.replace(self._key, content, self._found.version)
            if found is None:  # changed by another process, or by a renewal that seemed to fail
                lease = read_lease(self._bucket, self._key)
                found = lease[1] if lease and lease[0].token == self._holder.token else None
            if found is not None:
                self._found = found
                return
            self._over.set()
        _log.warning(
            "lost the lease %s: another process has taken or removed it",
            self._bucket.where(self._key),
        )


class Leases:
    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._ahead_s = 0.0
        """The server's time, minus the monotonic clock of this machine."""
        self._asked_s = -_CLOCK_KEPT_S

    def take(self, key: str) -> Lease:
        pid = os.getpid()
        holder = Holder(
            token=secrets.token_hex(8),
            boot=system.boot(),
            pids=system.pid_namespace(),
            pid=pid,
            started=system.process_started(pid),
        )
        content = msgspec.json.encode(holder)
        while True:
            lease = read_lease(self._bucket, key)
            if lease is None:
                found = self._bucket.create(key, content)
            elif self._is_held(*lease):
                raise AlreadyExistsError(
                    "cannot take a lock that is held",
                    where=self._bucket.where(key),
                    found="held by a live process",
                    remedy="wait for that writer or end it: a lease ends 45 s after its holder",
                )
            else:
                found = self._bucket.replace(key, content, lease[1].version)
            if found is not None:
                return Lease(self._bucket, key, holder, found)

    def is_held(self, key: str) -> bool:
        lease = read_lease(self._bucket, key)
        return lease is not None and self._is_held(*lease)

    def _is_held(self, holder: Holder, found: Found) -> bool:
        if not holder.token or holder.is_gone:
            return False
        return self.now_s() - found.modified_s < DEAD_S

    def now_s(self) -> float:
        """Return the server's time, which all responses carry, also refusals."""
        if time.monotonic() - self._asked_s >= _CLOCK_KEPT_S:
            bucket = self._bucket
            told = persist(
                self._ask,
                what="ask for the time",
                where=bucket.where(bucket.prefix),
                patience=Patience(deadline_s=min(30.0, bucket.patience.deadline_s)),
            )
            now = time.monotonic()
            self._ahead_s = told - now  # set first: another thread may read both
            self._asked_s = now
        return time.monotonic() + self._ahead_s

    def _ask(self) -> float:
        request = urllib.request.Request(self._bucket.front(), method="HEAD")  # noqa: S310 (ours)
        try:
            with urllib.request.urlopen(request, timeout=5.0) as answer:  # noqa: S310
                date = answer.headers["Date"]
        except urllib.error.HTTPError as error:  # the usual response without credentials
            with error:
                date = error.headers["Date"]
        except (OSError, http.client.HTTPException) as error:
            raise Trouble(f"no answer: {type(error).__name__}", transient=True) from None
        except ValueError:
            raise Trouble("settings that name no server", transient=False) from None
        try:
            return email.utils.parsedate_to_datetime(date).timestamp()
        except (TypeError, ValueError):
            raise Trouble("an answer without a date", transient=False) from None


def read_lease(bucket: Bucket, key: str) -> tuple[Holder, Found] | None:
    """Return the holder of a lease and the object's metadata; None if it does not exist."""
    try:
        data, found = bucket.read(key, limit_bytes=_LIMIT_BYTES)
    except Missing:
        return None
    try:
        return msgspec.json.decode(data, type=ready(Holder)), found
    except (msgspec.MsgspecError, UnicodeDecodeError):
        # Unknown holder: the lease counts as held until it expires.
        return Holder(token="?"), found  # noqa: S106


_MARKER = re.compile(r"\.(.+)\.folder")
_TEMPORARY = ".tmp-"
_AT_ONCE = 16
"""Concurrent requests of one store for parts of files, in addition to those on callers' threads."""

_probed: set[str] = set()
"""URLs that this process has probed."""


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
        self._links = ObjectLinks(self._bucket, self._has_folder)
        self._made: dict[str, Found] = {}
        """Markers of the folders that this store has seen, by folder."""
        self._pool = WorkerPool("object", _AT_ONCE)

    @property
    def url(self) -> str:
        return self._bucket.where(self._bucket.prefix).rstrip("/")

    # Listing and reading

    def list(self, folder: str) -> list[StoreEntry]:
        prefix = self._key(folder) if folder else self._bucket.prefix
        if not all(self._bucket.head(self._marker(above)) for above in _upwards(folder)):
            return []
        entries = []
        for meta in self._bucket.names(prefix):
            self._links.note(meta["path"])
            name, size = meta["path"].rpartition("/")[2], meta["size"]
            marked, link = _MARKER.fullmatch(name), links.parse(name)
            if marked is not None:
                name, size = marked[1], 0
            elif link is not None:
                name, size = link
            elif name.startswith(PROBE) or links.is_hidden(name):
                continue
            entries.append(
                StoreEntry(
                    name=name,
                    is_folder=marked is not None,
                    size_bytes=size,
                    modified_s=meta["last_modified"].timestamp(),
                )
            )
        return sorted(entries, key=lambda entry: entry.name)

    def read(self, name: str, *, limit_bytes: int) -> bytes:
        try:
            return self._bucket.read(self._key(name), limit_bytes=limit_bytes)[0]
        except Missing:
            raise self._absent(name) from None

    def open_reader(self, name: str, *, cached: bool = False) -> ObjectReader:
        key, size_bytes = self._target(name)
        return ObjectReader(self._bucket, key, size_bytes, self._pool)

    def _target(self, name: str) -> tuple[str, int]:
        """Return the key and size of the object with a file's bytes."""
        key = self._key(name)
        if (found := self._bucket.head(key)) is not None:
            return key, found.size_bytes
        link = self._links.find(key) if "/" in name else None
        target = None if link is None else self._links.follow(link.key)
        found = None if target is None else self._bucket.head(target)
        if link is None or target is None or found is None or found.size_bytes != link.size_bytes:
            raise self._absent(name)
        return target, found.size_bytes

    # Small files and folders

    def create(self, name: str, data: bytes) -> None:
        if "/" not in name:
            self._probe()
        key = self._prepare(name)
        if self._bucket.create(key, data) is None:
            raise self._bucket.taken(key)
        self._settle(name, key)

    def make_folder(self, name: str, *, parents: bool = True) -> None:
        check_name(name)
        self._probe()
        above = name.rpartition("/")[0]
        if above and self._seen(above) is None:
            if not parents:
                raise self._absent(above)
            with contextlib.suppress(AlreadyExistsError):  # another process just made it
                self.make_folder(above)
        if self._bucket.head(self._key(name)) is not None:
            raise self._bucket.taken(self._key(name))
        # A writer that died before its second check may have left a file in a deleted folder of
        # that name. List such files before creating the marker: later ones must not be deleted.
        left = self._bucket.below(self._key(name))
        made = self._bucket.create(self._marker(name), secrets.token_bytes(8))
        if made is None:
            raise self._bucket.taken(self._key(name))
        self._made[name] = made
        self._bucket.delete(self._links.unneeded(left))
        if above:
            self._settle(name, self._marker(name))

    def delete(self, name: str) -> None:
        """Delete a file or a link. A file that others link to stays under its name, because no
        other name could keep its bytes here."""
        key = self._key(name)
        if "/" not in name:
            self._bucket.delete([key])
            return
        if not self._links.is_shared(key):
            self._bucket.delete([key])
        self._links.remove(key)

    def delete_folder(self, name: str, *, first: str | None = None) -> None:
        key, marker = self._key(name), self._marker(name)
        if first is not None:
            self._bucket.delete([self._key(f"{name}/{first}")])
        try:
            content = self._bucket.read(marker, limit_bytes=_LIMIT_BYTES)[0]
        except Missing:
            return
        self._made.pop(name, None)
        if _TEMPORARY in name and content.startswith(b"of "):
            # By its name, not by what it holds: in a copy of a run, that is a key of the original.
            self._empty(self._key(name.rpartition(_TEMPORARY)[0]))
            self._bucket.delete([marker])
            return
        dying = self._marker(f"{name}{_TEMPORARY}{secrets.token_hex(6)}")
        self._bucket.create(dying, b"of " + key.encode())
        self._bucket.delete([marker])  # from here on the folder does not exist
        self._empty(key)
        self._bucket.delete([dying])

    def _empty(self, key: str) -> None:
        """Delete everything below a folder without a marker, except targets of links. Objects are
        listed before the marker is checked, so that those of a folder made again stay."""
        parent, _, last = key.rpartition("/")
        left = self._bucket.below(key)
        if self._bucket.head(f"{parent}/.{last}.folder".lstrip("/")) is not None:
            return  # the folder was made again
        self._bucket.delete(self._links.unneeded(left))

    # Large files

    def open_writer(self, name: str, *, expected_bytes: int) -> ObjectWriter:
        key = self._prepare(name)
        if self._bucket.head(key) is not None:
            raise self._bucket.taken(key)
        return ObjectWriter(
            self._bucket, key, expected_bytes=expected_bytes, settle=lambda: self._settle(name, key)
        )

    def link(self, name: str, new: str) -> bool:
        folder = name.rpartition("/")[0]
        if not folder or "/" not in new:
            return False
        versions, target = self._versions(folder), self._target(name)
        key = self._prepare(new)
        if self._bucket.head(key) is not None:
            raise self._bucket.taken(key)
        link = self._links.create(key, *target)
        if link is None:
            raise self._bucket.taken(key)
        self._settle(new, link.key)
        is_same = None not in versions and self._versions(folder) == versions
        if not is_same or self._bucket.head(target[0]) is None:
            self._links.remove(key)
            raise self._absent(name)
        return True

    # Locks

    def lock(self, name: str) -> Lease:
        return self._leases.take(self._prepare(name))

    def is_locked(self, name: str) -> bool:
        return self._leases.is_held(self._key(name))

    # Helpers

    def _prepare(self, name: str) -> str:
        """Check that a new file's folders exist and no folder has its name; return its key."""
        key = self._key(name)
        for above in _upwards(name.rpartition("/")[0]):
            if self._made.get(above) is None and self._seen(above) is None:
                raise self._absent(above)
        if self._bucket.head(self._marker(name)) is not None:
            raise self._bucket.taken(key)
        return key

    def _settle(self, name: str, made: str) -> None:
        """Check after creating an object that its folders are still the same; else delete it and
        raise `NotFoundError`. Its writer may have been suspended while the folder was deleted."""
        for above in _upwards(name.rpartition("/")[0]):
            known, found = self._made.get(above), self._bucket.head(self._marker(above))
            if known is None or found is None or found.token != known.token:
                self._made.pop(above, None)
                self._bucket.delete([made])
                raise self._absent(above)

    def _versions(self, folder: str) -> tuple[tuple[str | None, str | None] | None, ...]:
        """Return the marker versions of a folder and its parents, which identify them; None for one
        that does not exist. Not tokens: tools that copy objects may drop their metadata."""
        found = [self._bucket.head(self._marker(above)) for above in _upwards(folder)]
        return tuple(None if marker is None else marker.version for marker in found)

    def _has_folder(self, key: str) -> bool:
        name = key.removeprefix(self._bucket.prefix).lstrip("/")
        return None not in self._versions(name.rpartition("/")[0])

    def _seen(self, folder: str) -> Found | None:
        """Return the current marker of a folder and remember it; None if it does not exist."""
        found = self._bucket.head(self._marker(folder))
        if found is not None:
            self._made[folder] = found
        return found

    def _probe(self) -> None:
        """Probe the server once per URL and process. Only calls that create a run or a folder need
        this: all others write into folders that exist."""
        with self._mutex:
            if self.url not in _probed:
                probe(self._bucket)
                _probed.add(self.url)

    def _key(self, name: str) -> str:
        last = check_name(name).rpartition("/")[2]
        if _MARKER.fullmatch(last) or links.is_hidden(last):
            raise UsageError(
                "refused a name that means a folder or a link here",
                where=self.url,
                found=repr(name),
                expected="a name that is not of the form .….folder, .….link or .….linked",
            )
        return f"{self._bucket.prefix}/{name}".lstrip("/")

    def _marker(self, folder: str) -> str:
        above, _, last = self._key(folder).rpartition("/")
        return f"{above}/.{last}.folder".lstrip("/")

    def _absent(self, name: str) -> NotFoundError:
        return self._bucket.absent(f"{self._bucket.prefix}/{name}".lstrip("/"))


def _upwards(folder: str) -> list[str]:
    """Return a folder and its parents, outermost first; empty for the root."""
    parts = folder.split("/") if folder else []
    return ["/".join(parts[: count + 1]) for count in range(len(parts))]
