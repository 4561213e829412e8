"""A store in a bucket of an object store: `s3://`, `gs://` and `az://`.

Objects have no folders, and a run needs them: a folder that is deleted must be gone for everybody
at once, for who is still writing into it too. So a folder is there if and only if its *marker* is,
an object beside it: `.step-1.folder` for `step-1/`. Who creates a file looks at the markers above
it once more when the file is there, and takes it away again if one has gone or is another
(docs/decisions/0035). A folder under deletion has a second marker, under a temporary name, so that
somebody else can end what its deleter has begun.

Knows nothing of checkpoints. Safe to use from several threads.

Locks are leases, which their holders renew and which end by the server's clock. Before anything is
written, a probe proves that the server honours conditions: otherwise two writers could both believe
that they have committed.
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

from laststep.errors import (
    AlreadyExistsError,
    LaststepError,
    NotFoundError,
    StorageError,
    UsageError,
)
from laststep.process import threads
from laststep.process.system import boot, pid_namespace, process_started
from laststep.process.threads import Workers
from laststep.storage import s3
from laststep.storage.bucket import Bucket, Found, Missing, Patience, Trouble, persist
from laststep.storage.store import FileReading, FileWriting, Lock, Store, StoreEntry, check_name
from laststep.storage.transfers import ObjectReader, PartsWriter, SpooledWriter, taken

if TYPE_CHECKING:
    from laststep.storage.bucket import Found
    from laststep.storage.s3 import Uploads


PROBE = ".probe-"
"""How the names of such objects begin; no list has them."""
_CONTENT = b"what a server keeps is what was put there"
_RANGE = (5, 8)
_NO_VERSION = '"0123456789abcdef0123456789abcdef"', "1"


def probe(bucket: Bucket) -> None:
    """`StorageError` where the server lacks something; leaves nothing behind."""
    prefix = f"{bucket.prefix}/" if bucket.prefix else ""
    key = f"{prefix}{PROBE}{secrets.token_hex(6)}"
    try:
        lacks = _lacks(bucket, key)
    finally:
        with contextlib.suppress(LaststepError):
            bucket.delete([key])
    if lacks is not None:
        what, found = lacks
        raise StorageError(
            "this object store cannot keep a run",
            where=bucket.where(bucket.prefix),
            expected=what,
            found=found,
            remedy="use a server, or a version of it, that can; or save to a folder. "
            "docs/guides/object-storage.md lists what has been tried",
        )


def _lacks(bucket: Bucket, key: str) -> tuple[str, str] | None:
    """What was expected and what was found, at the first that is not as it must be."""
    if bucket.create(key, _CONTENT) is None:
        return "names that are free where nothing was put", "a random name that is taken"
    for expected, holds in (
        ("puts that fail where the name is taken (If-None-Match)", _refuses_second),
        ("puts that fail where another version is there (If-Match)", _refuses_other_version),
        ("reads of ranges (Range)", _reads_range),
        ("lists that have what was put before", _lists),
    ):
        try:
            found = None if holds(bucket, key) else "it is ignored"
        except StorageError as error:
            if error.transient:
                raise
            found = error.found
        if found is not None:
            return expected, found
    return None


def _refuses_second(bucket: Bucket, key: str) -> bool:
    return bucket.create(key, b"") is None


def _refuses_other_version(bucket: Bucket, key: str) -> bool:
    return bucket.replace(key, b"", _NO_VERSION) is None


def _reads_range(bucket: Bucket, key: str) -> bool:
    first, last = _RANGE
    return bucket.read_range(key, first, last - first) == _CONTENT[first:last]


def _lists(bucket: Bucket, key: str) -> bool:
    return key in [meta["path"] for meta in bucket.names(bucket.prefix)]


_log = logging.getLogger(__name__)

RENEWED_S = 10.0
DEAD_S = 45.0
_LIMIT_BYTES = 4096
_CLOCK_KEPT_S = 30.0


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """What a lease says: whose it is."""

    token: str
    """Random, another one for each holder; "" where nobody holds it."""
    boot: str = ""
    pids: str = ""
    pid: int = 0
    started: str = ""
    turn: int = 0
    """Grows with each renewal: many servers call equal bytes by the same tag, and whoever looked
    before a renewal must not replace what is there after it."""

    @classmethod
    def here(cls) -> Holder:
        """This process, as a new holder."""
        pid = os.getpid()
        return cls(
            token=secrets.token_hex(8),
            boot=boot(),
            pids=pid_namespace(),
            pid=pid,
            started=process_started(pid),
        )

    @property
    def is_gone(self) -> bool:
        """Whether it is known that the process is dead; of those elsewhere nothing is known."""
        known = self.boot and self.pids and self.started
        same = (self.boot, self.pids) == (boot(), pid_namespace())
        return bool(known) and same and process_started(self.pid) != self.started


class Lease(Lock):
    """A lease that this process holds; a thread of its own renews it."""

    def __init__(self, bucket: Bucket, key: str, holder: Holder, found: Found) -> None:
        self._bucket, self._key, self._holder, self._found = bucket, key, holder, found
        self._pid = os.getpid()
        self._mutex = threading.Lock()
        self._over = threading.Event()
        self.is_lost = False
        self._thread = threading.Thread(target=self._renew, name="laststep-lease", daemon=True)
        threads.start(self._thread)

    def mark(self, place: int) -> None:
        """Does nothing: see `Store.has_marks`."""

    def clear(self, place: int) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Let go of it. A forked child, which has no part in it, does nothing."""
        if os.getpid() != self._pid or self._over.is_set():
            return
        self._over.set()
        with self._mutex, contextlib.suppress(LaststepError):  # then it ends by itself
            free = msgspec.json.encode(Holder(token=""))
            self._bucket.replace(self._key, free, self._found.version)

    def _renew(self) -> None:
        while not self._over.wait(RENEWED_S):
            try:
                self._renew_now()
            except LaststepError as error:
                _log.warning("a lease could not be renewed: %s", error)

    def _renew_now(self) -> None:
        with self._mutex:
            if self._over.is_set():
                return
            self._holder = msgspec.structs.replace(self._holder, turn=self._holder.turn + 1)
            content = msgspec.json.encode(self._holder)
            found = self._bucket.replace(self._key, content, self._found.version)
            if found is None:  # by others, or by an earlier renewal that seemed to have failed
                there = read_lease(self._bucket, self._key)
                found = there[1] if there and there[0].token == self._holder.token else None
            if found is not None:
                self._found = found
                return
            self.is_lost = True
            self._over.set()
        _log.warning(
            "the lease %s is lost: another process has taken or removed it",
            self._bucket.where(self._key),
        )


class Leases:
    """The leases of one bucket."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._clock = ServerClock(bucket)

    def take(self, key: str) -> Lease:
        """The lease `key`; `AlreadyExistsError` where somebody holds it."""
        holder = Holder.here()
        content = msgspec.json.encode(holder)
        while True:
            there = read_lease(self._bucket, key)
            if there is None:
                found = self._bucket.create(key, content)
            elif self._is_held(*there):
                raise _held(self._bucket.where(key))
            else:
                found = self._bucket.replace(key, content, there[1].version)
            if found is not None:
                return Lease(self._bucket, key, holder, found)

    def is_held(self, key: str) -> bool:
        """Whether a live process holds that lease."""
        there = read_lease(self._bucket, key)
        return there is not None and self._is_held(*there)

    def _is_held(self, holder: Holder, found: Found) -> bool:
        if not holder.token or holder.is_gone:
            return False
        return self._clock.now_s() - found.modified_s < DEAD_S


def read_lease(bucket: Bucket, key: str) -> tuple[Holder, Found] | None:
    """Who holds a lease, and the version that says so; None where there is none."""
    try:
        data, found = bucket.read(key, limit_bytes=_LIMIT_BYTES)
    except Missing:
        return None
    try:
        return msgspec.json.decode(data, type=Holder), found
    except msgspec.MsgspecError:
        # Of nobody that is known: it is held until it is old.
        return Holder(token="?"), found  # noqa: S106


class ServerClock:
    """The time as a server tells it with every answer, a refusal too; asked again now and then."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._ahead_s = 0.0
        self._asked_s = -_CLOCK_KEPT_S

    def now_s(self) -> float:
        """Seconds since 1970 there."""
        if time.monotonic() - self._asked_s >= _CLOCK_KEPT_S:
            bucket = self._bucket
            told = persist(
                self._ask,
                what="ask for the time",
                where=bucket.where(bucket.prefix),
                patience=Patience(deadline_s=min(30.0, bucket.patience.deadline_s)),
            )
            now = time.monotonic()
            self._ahead_s = told - now  # first: another thread may look at both
            self._asked_s = now
        return time.monotonic() + self._ahead_s

    def _ask(self) -> float:
        request = urllib.request.Request(self._bucket.front(), method="HEAD")  # noqa: S310 (ours)
        try:
            with urllib.request.urlopen(request, timeout=5.0) as answer:  # noqa: S310
                date = answer.headers["Date"]
        except urllib.error.HTTPError as error:  # without credentials that is the usual answer
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


def _held(where: str) -> AlreadyExistsError:
    return AlreadyExistsError(
        "cannot take a lock that is held",
        where=where,
        found="held by a live process",
        remedy="wait for that writer or end it: a lease ends 45 s after its holder",
    )


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
            with contextlib.suppress(AlreadyExistsError):  # by somebody else, just now
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
                self._bucket, key, expected_bytes=expected_bytes, settle=lambda: self._settle(name)
            )
        return PartsWriter(
            self._bucket,
            uploads,
            key,
            expected_bytes=expected_bytes,
            pool=self._pool(),
            settle=lambda: self._settle(name),
        )

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
            raise UsageError(
                "refused a name that means a folder here",
                where=self.url,
                found=repr(name),
                expected="a name that is not of the form .….folder",
            )
        return f"{self._bucket.prefix}/{name}".lstrip("/")

    def _marker(self, folder: str) -> str:
        above, _, last = self._key(folder).rpartition("/")
        return f"{above}/.{last}.folder".lstrip("/")

    def _absent(self, name: str) -> NotFoundError:
        return NotFoundError(
            "there is no such file or folder",
            where=f"{self.url}/{name}",
            remedy="somebody has deleted it, or it was never there",
        )


def _upwards(folder: str) -> list[str]:
    """A folder and those that it is in, from the outermost on; none for the root."""
    parts = folder.split("/") if folder else []
    return ["/".join(parts[: count + 1]) for count in range(len(parts))]
