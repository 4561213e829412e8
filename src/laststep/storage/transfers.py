"""Data files on their way into an object store, at any offsets and by several threads, and back.

`PartsWriter` cuts a file into parts of one size. A part that a write covers goes up straight from
the memory of that write; what covers a part only by half is gathered until it is whole, so there is
memory for a part at each seam between writes, and for the first one, which holds the header and is
whole last. `SpooledWriter` is for where parts cannot be sent in any order: it keeps the file on the
local disk until it is finished.

Neither writer changes what lies under its name before `finish`. Knows nothing of folders.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
import threading
from abc import abstractmethod
from typing import TYPE_CHECKING, Protocol, TypeVar

from laststep.errors import AlreadyExistsError, LaststepError, NotFoundError, UsageError
from laststep.storage.bucket import Missing
from laststep.storage.files import failed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from laststep.process.threads import Workers
    from laststep.storage.bucket import Bucket
    from laststep.storage.s3 import Uploads

_Item = TypeVar("_Item")

PART_BYTES = 8 << 20
"""Large enough for the overhead of a request, small enough that a slot is several at once."""
_MOST_PARTS = 10_000
_MIB = 1 << 20


def part_bytes_of(expected_bytes: int) -> int:
    """How large parts have to be for a file that may become a quarter larger than expected."""
    needed = -(-expected_bytes * 5 // (4 * _MOST_PARTS * _MIB)) * _MIB
    return max(PART_BYTES, needed)


class _ObjectWriter(Protocol):
    """What both writers have in common: they are open until `finish` or `close`."""

    alignment_bytes: int = 1
    bucket: Bucket
    key: str
    settle: Callable[[], None]
    """Called when the object is there: whether its folder still is."""
    is_open: bool = True

    def finish(self, size_bytes: int) -> None:
        """Make the object, of exactly that size."""
        self.check_open("finish")
        self.is_open = False
        try:
            self.complete(size_bytes)
        finally:
            self.let_go()
        self.settle()

    def close(self) -> None:
        """Give it up, unless it is finished."""
        if self.is_open:
            self.is_open = False
            self.let_go()

    def check_open(self, operation: str) -> None:
        if not self.is_open:
            raise UsageError(
                f"cannot {operation} a file that has been closed", where=self.bucket.where(self.key)
            )

    def create(self, data: bytes | memoryview) -> None:
        """All of a small file in one request."""
        if self.bucket.create(self.key, data) is None:
            raise taken(self.bucket, self.key)

    @abstractmethod
    def complete(self, size_bytes: int) -> None: ...

    @abstractmethod
    def let_go(self) -> None:
        """Free what is held; an upload that is not complete is aborted."""


class PartsWriter(_ObjectWriter):
    """A file that goes up in parts while it is written."""

    def __init__(
        self,
        bucket: Bucket,
        uploads: Uploads,
        key: str,
        *,
        expected_bytes: int,
        pool: Workers,
        settle: Callable[[], None],
    ) -> None:
        self.bucket, self.key, self.settle = bucket, key, settle
        self._uploads, self._pool = uploads, pool
        self._size = part_bytes_of(expected_bytes)
        self._mutex = threading.Lock()
        self._gathered: dict[int, _OpenPart] = {}
        self._tags: dict[int, str | None] = {}
        """By the number of a part, from 0: its tag, or None while it is being sent."""
        self._upload: str | None = None
        self._token = secrets.token_hex(8)

    def write_at(self, offset: int, data: memoryview) -> None:
        """Send the parts that are whole by this, and keep the rest."""
        self.check_open("write")
        sends: list[tuple[int, memoryview]] = []
        # Views are released, not dropped: see `FileWriter.write_at`.
        with contextlib.ExitStack() as views:
            flat = views.enter_context(data.cast("B"))
            done = 0
            while done < flat.nbytes:
                number, within = divmod(offset + done, self._size)
                count = min(self._size - within, flat.nbytes - done)
                piece = views.enter_context(flat[done : done + count])
                whole = self._add(number, within, piece)
                sends += [] if whole is None else [(number, whole)]
                done += count
            self._send(sends)

    def _add(self, number: int, within: int, data: memoryview) -> memoryview | None:
        """Take note of bytes of a part; the whole part, where that is what it is now."""
        with self._mutex:
            if number in self._tags:
                raise UsageError(
                    "refused to write bytes that have been sent",
                    where=self.bucket.where(self.key),
                    expected="ranges that do not overlap",
                    found=f"part {number + 1} again",
                )
            if data.nbytes == self._size:
                self._tags[number] = None
                return data
            if number not in self._gathered:
                self._gathered[number] = _OpenPart(self._size)
            part = self._gathered[number]
            part.add(within, data)
            if part.is_whole:
                self._tags[number] = None
                return memoryview(self._gathered.pop(number).data)
            return None

    def _send(self, parts: list[tuple[int, memoryview]]) -> None:
        """Send parts, all at once."""
        if not parts:
            return
        upload = self._begun()

        def send(part: tuple[int, memoryview]) -> None:
            number, data = part
            self._tags[number] = self._uploads.put(self.key, upload, number + 1, data)

        _at_once(self._pool, send, parts)

    def _begun(self) -> str:
        with self._mutex:
            if self._upload is None:
                self._upload = self._uploads.begin(self.key, self._token)
            return self._upload

    def complete(self, size_bytes: int) -> None:
        count = -(-size_bytes // self._size)
        if not self._tags and count <= 1:
            part = self._gathered.get(0) or _OpenPart(size_bytes)
            with memoryview(part.data) as view, view[:size_bytes] as used:
                self.create(used)
            return
        self._refuse_cut(count, size_bytes)
        rest = [number for number in range(count) if number not in self._tags]
        for number in rest:
            part = self._gathered.get(number) or _OpenPart(self._size)
            used = memoryview(part.data)[: min(self._size, size_bytes - number * self._size)]
            self._send([(number, used)])
        tags = [self._tags[number] or "" for number in range(count)]
        if not self._uploads.complete(self.key, self._begun(), tags, self._token):
            raise taken(self.bucket, self.key)
        self._upload = None

    def _refuse_cut(self, count: int, size_bytes: int) -> None:
        last = count - 1
        if count > _MOST_PARTS or (last in self._tags and size_bytes < count * self._size):
            raise UsageError(
                "cannot make a file of this size",
                where=self.bucket.where(self.key),
                expected=f"at most {_MOST_PARTS} parts of {self._size} bytes, and none cut that "
                "has been sent",
                found=f"{size_bytes} bytes",
            )

    def let_go(self) -> None:
        self._gathered.clear()
        if self._upload is not None:
            with contextlib.suppress(LaststepError):  # the next cleaning finds it
                self._uploads.abort(self.key, self._upload)


class SpooledWriter(_ObjectWriter):
    """A file that lies on the local disk until it is finished, and goes up then."""

    def __init__(
        self, bucket: Bucket, key: str, *, expected_bytes: int, settle: Callable[[], None]
    ) -> None:
        self.bucket, self.key, self.settle = bucket, key, settle
        self._part_bytes = part_bytes_of(expected_bytes)
        self._folder = tempfile.gettempdir()
        try:
            self._file = tempfile.TemporaryFile(prefix="laststep-")  # noqa: SIM115 (by let_go)
        except OSError as error:
            raise failed("keep a file until it is uploaded", self._folder, error) from error

    def write_at(self, offset: int, data: memoryview) -> None:
        """Write to the local file."""
        self.check_open("write")
        with data.cast("B") as flat:
            done = 0
            try:
                while done < flat.nbytes:
                    with flat[done:] as rest:
                        done += os.pwrite(self._file.fileno(), rest, offset + done)
            except OSError as error:
                raise failed("keep a file until it is uploaded", self._folder, error) from error

    def complete(self, size_bytes: int) -> None:
        self._file.truncate(size_bytes)
        if size_bytes <= self._part_bytes:
            self._file.seek(0)
            self.create(self._file.read())
            return
        self.bucket.upload(self.key, self._file, self._part_bytes)

    def let_go(self) -> None:
        self._file.close()


class ObjectReader:
    """A data file; see `store.FileReading`."""

    alignment_bytes = 1
    at_hand = False

    def __init__(self, bucket: Bucket, key: str, size_bytes: int, pool: Workers) -> None:
        self.size_bytes = size_bytes
        self._bucket, self._key, self._pool = bucket, key, pool
        self._is_open = True

    def read_into(self, offset: int, into: memoryview) -> int:
        """Fill `into` from `offset`, by several requests at once where it is large."""
        self._check(offset)
        with into.cast("B") as flat:
            want = max(0, min(flat.nbytes, self.size_bytes - offset))

            def fetch(start: int) -> None:
                size = min(PART_BYTES, want - start)
                with (
                    flat[start : start + size] as piece,
                    self.in_place(offset + start, size) as got,
                ):
                    piece[:] = got

            _at_once(self._pool, fetch, range(0, want, PART_BYTES))
        return want

    def in_place(self, offset: int, size_bytes: int) -> memoryview:
        """What the client has received, by one request: see `store.InPlace`."""
        self._check(offset)
        try:
            return self._bucket.read_range(self._key, offset, size_bytes)
        except Missing:
            raise NotFoundError(
                "a file is gone",
                where=self._bucket.where(self._key),
                remedy="somebody has deleted it since it was opened",
            ) from None

    def close(self) -> None:
        """Close; a second time does nothing."""
        self._is_open = False

    def _check(self, offset: int) -> None:
        if not self._is_open or offset < 0:
            why = "before the start" if self._is_open else "a file that has been closed"
            raise UsageError(f"cannot read {why}", where=self._bucket.where(self._key))


class _OpenPart:
    """A part of which only some bytes have come; others are zeros."""

    def __init__(self, size_bytes: int) -> None:
        self.data = bytearray(size_bytes)
        self._have: list[tuple[int, int]] = []

    def add(self, start: int, data: memoryview) -> None:
        """Take bytes in; the last 4 KiB of tensors come a second time, with what is behind them."""
        self.data[start : start + data.nbytes] = data
        have: list[tuple[int, int]] = []
        for low, high in sorted([*self._have, (start, start + data.nbytes)]):
            if have and low <= have[-1][1]:
                have[-1] = have[-1][0], max(high, have[-1][1])
            else:
                have.append((low, high))
        self._have = have

    @property
    def is_whole(self) -> bool:
        return self._have == [(0, len(self.data))]


def _at_once(pool: Workers, call: Callable[[_Item], None], items: Sequence[_Item]) -> None:
    """Call with all items, the first on this thread. Whatever fails, all calls have ended after
    this: the memory that they use is the caller's."""
    under_way = []
    try:
        for item in items[1:]:
            under_way.append(pool.submit(call, item))  # noqa: PERF401 (what was begun is kept)
    except RuntimeError:
        pass  # the program ends, and no thread takes on more: the rest is done here
    try:
        for item in (*items[:1], *items[1 + len(under_way) :]):
            call(item)
    finally:
        errors = [error for task in under_way if (error := task.exception()) is not None]
    if errors:
        raise errors[0]


def taken(bucket: Bucket, key: str) -> AlreadyExistsError:
    """The error for a name that another object has."""
    return AlreadyExistsError("the name is taken", where=bucket.where(key))
