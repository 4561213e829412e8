"""Locks in an object store: a lease, which is an object that its holder renews while it lives.

A holder is dead when its lease is 45 s old by the *server's* clock (what the server stamps on the
object against what it says the time is), and at once where its process is known here and gone.
Every change is a replacement of the version that was read, so of several who want a lease one gets
it, and a holder that has lost it knows at its next renewal. A process that sleeps for a minute may
believe for up to ten seconds that it holds what it has lost: nothing may depend on a lease alone,
and nothing does, since epochs and create-only names decide.
"""

from __future__ import annotations

import contextlib
import email.utils
import http.client
import logging
import os
import secrets
import threading
import time
import urllib.error
import urllib.request
from typing import TYPE_CHECKING

import msgspec

from laststep.errors import Exists, LaststepError
from laststep.process import threads
from laststep.process.identity import boot, pid_namespace, process_started
from laststep.storage.bucket import Missing
from laststep.storage.retrying import Patience, Trouble, persist
from laststep.storage.store import Lock

if TYPE_CHECKING:
    from laststep.storage.bucket import Bucket, Found

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
            token=secrets.token_hex(8), boot=boot(), pids=pid_namespace(), pid=pid,
            started=process_started(pid),
        )  # fmt: skip

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
        """The lease `key`; `Exists` where somebody holds it."""
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
                self._ask, what="ask for the time", where=bucket.where(bucket.prefix),
                patience=Patience(deadline_s=min(30.0, bucket.patience.deadline_s)),
            )  # fmt: skip
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


def _held(where: str) -> Exists:
    return Exists(
        "cannot take a lock that is held", where=where, found="held by a live process",
        remedy="wait for that writer or end it: a lease ends 45 s after its holder",
    )  # fmt: skip
