"""Read bytes of a data file whose digests are known, verify them, and say what is wrong.

This is the one place where stored data are compared with their digests. What is wrong is read a
second time, past every cache that the reader has, before it counts. Damage is a value here: one bad
block hides no other, and each caller decides whether to list it or to raise it.

`read_ahead` reads extents one after the other while threads read the next ones, in bounded memory.
"""

from __future__ import annotations

import itertools
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple, Protocol

from laststep.codecs.digests import DIGEST_BYTES, DIGEST_NAME, block_digests, digest, digest_text
from laststep.errors import CorruptError, LaststepError, StorageError
from laststep.format.manifest import DAMAGE_REMEDY
from laststep.memory.slots import huge_pages
from laststep.storage.store import InPlace
from laststep.terms import ALIGN_BYTES, BLOCK_BYTES, CHUNK_BYTES, align_up

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator, Sequence
    from concurrent.futures import Future

    from laststep.storage.store import FileReading


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """One thing that is not as it was written: where it lies, what its digest says, what is there.

    `start` and `stop` are bytes that the file has: of one that is too short, what is missing behind
    its end is one damage ("size"), which begins and stops there. `touches` names what lies, or
    should lie, there: tensors by their full names, of a part also which (`model/w[0:320, 0:300]`),
    of what each rank has for itself also whose. `error` says the same in a sentence.
    """

    file: str
    what: str
    start: int
    stop: int
    expected: str
    found: str
    touches: tuple[str, ...] = ()
    error: LaststepError = field(repr=False, compare=False)
    data: tuple[int, int] = field(default=(0, 0), repr=False, compare=False)
    """The bytes of the tensor area that it touches: not where they lie."""


class Extent(NamedTuple):
    """Bytes [start, stop) of a data file and their digests: of each block, or one of all of it."""

    reader: FileReading
    file: str
    where: str
    start: int
    stop: int
    digests: bytes
    what: str | None = None
    """What it is, where it has one digest: a header. None: blocks."""
    first: int = 0
    """The number of its first block."""
    image_at: int = 0
    """Where its first byte is in the tensor area."""

    @property
    def size_bytes(self) -> int:
        return self.stop - self.start

    @property
    def stored_bytes(self) -> int:
        """Those of them that the file has."""
        return max(0, min(self.stop, self.reader.size_bytes) - self.start)

    def read(self, into: memoryview) -> list[Damage]:
        """Fill `into`, which may be larger, and say what is wrong: nothing, mostly. A device that
        fails is damage too; any other failure of the store raises `StorageError`."""
        try:
            return self.verify(into, self.fill(into))
        except StorageError as error:
            stop = max(self.start, min(self.stop, self.reader.size_bytes))
            what = self.what or "data"
            damage = damage_of(error, file=self.file, what=what, start=self.start, stop=stop)
            return [self._placed(damage)]

    def _placed(self, damage: Damage) -> Damage:
        ahead = self.image_at - self.start
        return replace(damage, data=(damage.start + ahead, damage.stop + ahead))

    def fill(self, into: memoryview) -> int:
        """Read without a look at the digests; how many of the bytes there were."""
        size = self.stop - self.start
        if not size:
            return 0
        # Up to whole pages, where there is room: a direct read of these is not copied.
        return min(size, self.reader.read_into(self.start, into[: align_up(size, ALIGN_BYTES)]))

    def in_place(self) -> memoryview | None:
        """Its bytes in memory of the reader, where that has them and the file has all of them;
        whether they are right, `is_right` says."""
        if self.stored_bytes < self.size_bytes or not isinstance(self.reader, InPlace):
            return None
        return self.reader.in_place(self.start, self.size_bytes)

    def is_right(self, image: memoryview) -> bool:
        """Whether these are the bytes that were written."""
        return not self._wrong(image, image.nbytes)

    def part(self, first: int, last: int) -> bytes:
        """These of its bytes, without a look at the digests; zeros where the file has ended."""
        into = bytearray(last - first)
        self.reader.read_into(self.start + first, memoryview(into))
        return bytes(into)

    def verify(self, image: memoryview, got: int) -> list[Damage]:
        """What is wrong with the `got` bytes that were filled in, also after a second look."""
        return self._wrong(image, got) and self._wrong(image, self.fill(image))

    def _wrong(self, image: memoryview, got: int) -> list[Damage]:
        size = self.stop - self.start
        there = image[:got]
        digests = block_digests(there) if self.what is None else digest(there)
        if got == size and digests == self.digests:
            return []
        step = BLOCK_BYTES if self.what is None else max(size, 1)
        wrong = []
        for number, at in enumerate(range(0, max(size, 1), step)):
            part = there[at : at + step]
            expected = self.digests[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]
            missing = min(step, size - at) - len(part)
            if missing or digest(part) != expected:
                wrong.append(self._damage(number, at, part, missing, expected, got))
        return wrong

    def _damage(
        self, number: int, at: int, part: memoryview, missing: int, expected: bytes, got: int
    ) -> Damage:
        what = self.what or f"block {self.first + number}"
        start, stop = self.start + at, self.start + at + len(part)
        found: str | None = None
        if missing:
            found = f"only {len(part)} of {len(part) + missing} bytes: the file is too short"
            error = CorruptError(
                "a data file is too short",
                where=self.where,
                expected=f"at least {self.stop} bytes",
                # The length of the file, unless it ends before this begins.
                found=f"{self.start + got} bytes" if got else f"at most {self.start} bytes",
                remedy=DAMAGE_REMEDY,
            )
        else:
            error = CorruptError(
                "stored bytes have changed",
                where=f"{self.where}, {what} (bytes {start}-{stop})",
                expected=f"{DIGEST_NAME}:{expected.hex()}",
                found=digest_text(part),
                remedy=DAMAGE_REMEDY,
            )
        return self._placed(
            damage_of(error, file=self.file, what=what, start=start, stop=stop, found=found)
        )


class Readable(Protocol):
    """Bytes of a checkpoint that are read and verified together: an `Extent`, or what is to be used
    as one."""

    @property
    def what(self) -> str | None: ...

    @property
    def size_bytes(self) -> int:
        """How many they are, decoded."""

    @property
    def stored_bytes(self) -> int:
        """What they take in files."""

    def read(self, into: memoryview) -> list[Damage]: ...

    def fill(self, into: memoryview) -> int: ...

    def verify(self, image: memoryview, got: int) -> list[Damage]: ...


class Extents:
    """Blocks of an image that lie in several files, or not one after the other in one; to be read
    as an `Extent` is."""

    what: None = None

    def __init__(self, parts: Sequence[Readable]) -> None:
        self._parts = parts
        self.size_bytes = sum(part.size_bytes for part in parts)
        self.stored_bytes = sum(part.stored_bytes for part in parts)

    def read(self, into: memoryview) -> list[Damage]:
        return [damage for part, view in self._views(into) for damage in part.read(view)]

    def fill(self, into: memoryview) -> int:
        return sum(part.fill(view) for part, view in self._views(into))

    def verify(self, image: memoryview, got: int) -> list[Damage]:
        """As that of an `Extent`; what is not whole is read again, part by part."""
        if got < self.size_bytes:
            return self.read(image)
        views = self._views(image)
        return [damage for part, view in views for damage in part.verify(view, part.size_bytes)]

    def _views(self, image: memoryview) -> Iterator[tuple[Readable, memoryview]]:
        at = 0
        for part in self._parts:  # each but the last of whole blocks, so all views are aligned
            yield part, image[at : at + part.size_bytes]
            at += part.size_bytes


def damage_of(
    error: LaststepError,
    *,
    file: str,
    what: str,
    start: int = 0,
    stop: int = 0,
    found: str | None = None,
) -> Damage:
    """An error that tells of damage, as a value; `found` where it lacks the words for a list. A
    store that cannot be reached, or denies access, is not damaged: that error is raised."""
    if isinstance(error, StorageError) and not error.device_failed:
        raise error
    return Damage(
        file=file,
        what=what,
        start=start,
        stop=stop,
        expected=error.expected or "what was written",
        found=found or error.found or "something else",
        error=error.with_traceback(None),  # which would keep buffers alive
    )


def refuse(damage: Iterable[Damage]) -> None:
    """Raise the first damage, if there is any."""
    for first in damage:
        raise first.error


def read_ahead(
    extents: Iterable[Readable], *, threads: int, buffer_bytes: int = CHUNK_BYTES
) -> Generator[tuple[memoryview, list[Damage]], None, None]:
    """The bytes of each extent, in order, and what is wrong with them. The bytes are gone when the
    next ones are asked for. An extent of more than `buffer_bytes` gets a buffer of its own."""
    spare: list[memoryview] = []
    ahead: deque[tuple[int, memoryview, Future[list[Damage]]]] = deque()
    with ThreadPoolExecutor(threads, thread_name_prefix="laststep-ahead") as workers:
        try:
            for extent in itertools.chain(extents, itertools.repeat(None, threads)):
                if extent is not None:
                    size = extent.size_bytes
                    room = max(buffer_bytes, align_up(size, ALIGN_BYTES))
                    buffer = spare.pop() if spare and room == buffer_bytes else huge_pages(room)
                    ahead.append((size, buffer, workers.submit(extent.read, buffer)))
                if len(ahead) > threads or (extent is None and ahead):
                    size, buffer, damage = ahead.popleft()
                    yield buffer[:size], damage.result()
                    if len(buffer) == buffer_bytes:
                        spare.append(buffer)
        finally:
            for _, _, damage in ahead:
                damage.cancel()
