"""Choose how the blocks of a save are encoded: not at all, or by the codec that serves best.

Compression pays where encoding and writing less takes less time than writing all: the choice for a
file follows from a sample of it, from how fast the store has taken bytes so far, and from how many
cores are idle. Block by block, what was written before is tried as a base where it is still in
memory. Knows nothing of files and of threads but that there are some.

Earlier blocks are kept in memory within a bound. Rounding, where the user allows it, changes
numbers in their slot before anything is digested.
"""

from __future__ import annotations

import os
import threading
import time
from bisect import bisect_right
from collections import Counter
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, NamedTuple, Protocol

from laststep.codecs.blocks.registry import codec_named
from laststep.errors import UsageError
from laststep.flush.protocol import CodingReport
from laststep.format.index import Encoding
from laststep.settings import Compression, compression_of
from laststep.terms import BLOCK_BYTES, DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from numpy import float32, uint16
    from numpy.typing import NDArray

    from laststep.codecs.blocks.codec import BlockCodec
    from laststep.flush.protocol import Orders
    from laststep.format.index import BaseRef
    from laststep.format.layout import FileLayout
    from laststep.storage.store import FileWriting


_LEAST_BYTES = 32 << 20
"""Less tells of a store how long it takes to answer, not how fast it is."""
_FORGET = 0.5
"""What earlier saves count beside the newest."""


class Throughput:
    """Bytes, and the time in which at least one write or sync was under way."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._under_way = 0
        self._since = 0.0
        self._busy_s = 0.0
        self._bytes = 0.0

    @contextmanager
    def busy(self, size_bytes: int) -> Iterator[None]:
        """While so many bytes are written."""
        with self._lock:
            if not self._under_way:
                self._since = self._clock()
            self._under_way += 1
        try:
            yield
        finally:
            with self._lock:
                self._under_way -= 1
                self._bytes += size_bytes
                if not self._under_way:
                    self._busy_s += self._clock() - self._since

    def begin_save(self) -> None:
        """What was measured before counts less from now on, if enough is left to tell."""
        with self._lock:
            if self._bytes * _FORGET >= _LEAST_BYTES:
                self._bytes *= _FORGET
                self._busy_s *= _FORGET

    @property
    def bytes_per_s(self) -> float | None:
        """None while too little was written to tell."""
        with self._lock:
            if self._bytes < _LEAST_BYTES or self._busy_s <= 0:
                return None
            return self._bytes / self._busy_s


class TimedWriting:
    """A file that is written as another is, and timed."""

    def __init__(self, writer: FileWriting, throughput: Throughput) -> None:
        self._writer = writer
        self._throughput = throughput
        self.alignment_bytes = writer.alignment_bytes

    def write_at(self, offset: int, data: memoryview) -> None:
        with self._throughput.busy(len(data)):
            self._writer.write_at(offset, data)

    def finish(self, size_bytes: int) -> None:
        with self._throughput.busy(0):
            self._writer.finish(size_bytes)

    def close(self) -> None:
        self._writer.close()


class IdleCores:
    """How many of the cores that this process may use had nothing to do since the last look."""

    def __init__(self, read: Callable[[], tuple[int, int]] | None = None) -> None:
        self._read = read or _ticks
        self._last = self._read()
        self._idle = 0.0

    def look(self) -> float:
        """Between the two last looks that were far enough apart."""
        idle, every = self._read()
        past = every - self._last[1]
        if past > 0:
            cores = len(os.sched_getaffinity(0))
            self._idle = cores * (idle - self._last[0]) / past
            self._last = idle, every
        return self._idle


def _ticks() -> tuple[int, int]:
    """The ticks of all cores in which they were idle or waited for a disk, and all of them."""
    try:
        with open("/proc/stat", "rb") as file:  # noqa: PTH123 (pathlib takes long to import)
            ticks = [int(word) for word in file.readline().split()[1:9]]
    except (OSError, ValueError):
        return 0, 0
    return ticks[3] + ticks[4], sum(ticks)


_TRIED_BLOCKS = 64
"""After so many tries it is known whether keeping the blocks of a file pays."""
_LEAST_PAID = 0.25


class KeptBlock(NamedTuple):
    """A block, and the digest by which it is known again."""

    digest: bytes
    data: bytes


class Earlier:
    """The memory of one flusher."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._bytes = 0
        self._lock = threading.Lock()
        self._kept: dict[str, dict[int, KeptBlock]] = {}
        self._tried: Counter[str] = Counter()
        self._paid: Counter[str] = Counter()

    def find(self, file: str, number: int, digest: bytes) -> memoryview | None:
        """That block of a file, if it is here with just that content."""
        kept = self._kept.get(file, {}).get(number)
        return None if kept is None or kept.digest != digest else memoryview(kept.data)

    def has(self, file: str) -> bool:
        """Whether any block of that file is here."""
        return bool(self._kept.get(file))

    def keep(self, file: str, number: int, digest: bytes, data: memoryview) -> None:
        """Keep a block in place of what was here of it; or not, where there is no room for it."""
        with self._lock:
            blocks = self._kept.setdefault(file, {})
            before = blocks.pop(number, None)
            self._bytes -= 0 if before is None else len(before.data)
            if self._bytes + len(data) > self._most_bytes or not self._pays(file):
                return
            self._bytes += len(data)
            blocks[number] = KeptBlock(digest, bytes(data))

    def tried(self, file: str, *, paid: bool) -> None:
        """A block was, or was not, smaller for the one that was kept."""
        with self._lock:
            self._tried[file] += 1
            self._paid[file] += paid
            if not self._pays(file):
                self._drop(file)

    def forget(self, file: str) -> None:
        """Its tensors are others now."""
        with self._lock:
            self._drop(file)
            self._tried.pop(file, None)
            self._paid.pop(file, None)

    def _pays(self, file: str) -> bool:
        tried = self._tried[file]
        return tried < _TRIED_BLOCKS or self._paid[file] >= _LEAST_PAID * tried

    def _drop(self, file: str) -> None:
        self._bytes -= sum(len(kept.data) for kept in self._kept.pop(file, {}).values())


_DTYPE = "float32"
_GROUP = 64
"""So many numbers share a scale."""
_GROUP_BYTES = 4 * _GROUP
_LEVELS = 127
_INFINITE = 0x7F80
"""The exponent of infinity, in the upper half of a number."""
_TOO_LARGE = 2.0**127
"""What is larger may be rounded to infinity."""


class RoundedRange(NamedTuple):
    """Bytes of an image that are rounded."""

    start: int
    stop: int
    how: str


class Rounding:
    """What is rounded in one file."""

    def __init__(self, layout: FileLayout, lossy: Mapping[str, str]) -> None:
        """`lossy` says how, by patterns of `item/tensor`; the first that fits holds. A scalar is
        no tensor to be rounded: optimizers count their steps in such."""
        self.names: dict[str, str] = {}
        self.patterns: set[str] = set()
        """Those that name something here."""
        self._ranges: list[RoundedRange] = []
        for entry in layout.tensors if lossy else ():
            item, name = layout.item, entry.name
            if item is None:
                item, _, name = entry.name.partition("/")
            part = layout.parts.get(entry.name)
            full = f"{item}/{name if part is None else part.tensor}"
            pattern = next((pattern for pattern in lossy if _fits(full, pattern)), None)
            is_scalar = not (entry.shape if part is None else part.shape)
            if pattern is None or entry.dtype != _DTYPE or is_scalar or entry.start == entry.stop:
                continue
            self.patterns.add(pattern)
            self.names[entry.name] = lossy[pattern]
            self._ranges.append(RoundedRange(entry.start, entry.stop, lossy[pattern]))

    def __bool__(self) -> bool:
        return bool(self._ranges)

    def apply(self, start: int, data: memoryview) -> None:
        """Round what of `data`, which lies at `start` of the image, is to be."""
        first = bisect_right(self._ranges, start, key=lambda a_range: a_range.stop)
        for a_range in self._ranges[first:]:
            if a_range.start >= start + len(data):
                break
            low, high = max(a_range.start, start), min(a_range.stop, start + len(data))
            ROUNDERS[a_range.how](data[low - start : high - start], low)


def _fits(name: str, pattern: str) -> bool:
    """Whether a pattern names a tensor, or the item that it is of."""
    return fnmatchcase(name, pattern) or fnmatchcase(name.partition("/")[0], pattern)


def to_bf16(data: memoryview, at: int) -> None:  # noqa: ARG001 (each number by itself)
    """Each number to the nearest that bfloat16 has, to the even one of two; none to infinity."""
    import numpy as np

    from laststep.codecs.rounding import rounded

    halves: NDArray[uint16] = np.frombuffer(data, "<u2")
    upper = np.array(np.frombuffer(rounded(data, "bfloat16"), "<u2"))
    was_finite = (halves[1::2] & 0x7F80) != _INFINITE
    upper[((upper & 0x7FFF) == _INFINITE) & was_finite] -= 1  # the largest number there is
    halves[1::2] = upper
    halves[::2] = 0


def to_int8(data: memoryview, at: int) -> None:
    """Numbers in groups of 64, by their place in the image, to one of 255 multiples of a power of
    two, which is chosen for the largest of them. Groups with what is no number, or nearly infinite,
    are left alone."""
    import numpy as np

    numbers: NDArray[float32] = np.frombuffer(data, np.float32)
    head = min(-at % _GROUP_BYTES // 4, len(numbers))
    whole = (len(numbers) - head) // _GROUP * _GROUP
    _quantize(numbers[:head].reshape(1, -1))
    _quantize(numbers[head : head + whole].reshape(-1, _GROUP))
    _quantize(numbers[head + whole :].reshape(1, -1))


def _quantize(groups: NDArray[float32]) -> None:
    import numpy as np

    if not groups.size:
        return
    largest = np.abs(groups).max(axis=1)
    ok = (largest > 0) & (largest < _TOO_LARGE)
    # The least power of two of which 127 reach the largest number; the smallest that floats have.
    fractions, exponents = np.frexp(np.where(ok, largest, 1).astype(np.float64) / _LEVELS)
    exponents -= fractions == 0.5
    scales = np.ldexp(np.float64(1), np.maximum(exponents, -149))[:, None]
    with np.errstate(invalid="ignore"):  # of groups that are left alone
        rounded = np.rint(groups / scales)
        rounded *= scales
    groups[ok] = rounded[ok]


ROUNDERS: dict[str, Callable[[memoryview, int], None]] = {"bf16": to_bf16, "int8": to_int8}
"""What can be asked for."""


_CODEC = "planes"
_SAMPLE_BYTES = 64 << 10
"""Out of the middle of a block: enough to tell what all of it comes to, for a sixteenth of the
time."""
_SAMPLES = 4
_TAKEN_SHARE = 0.02
"""So much of all cores may be taken from training, should none be idle."""
_LEAST_GAIN = 1.03
"""What becomes smaller by less is stored as it is: decoding it would cost more than it saves."""
_MOST_OF_RAW = 0.9
"""Encoding has to be expected to take less than so much of the time that writing all takes."""
_ANCHORED_GAIN = 0.8
"""A difference has to come to so little of what the block itself comes to: who reads it has to read
its anchor as well."""
_NARROW_BYTES = 2
"""In elements of so few bytes, differences of low learning rates are few and small."""


class EncodedBlock(NamedTuple):
    """A block as it is to be stored."""

    data: bytes | memoryview
    encoding: Encoding | None
    """None: it is stored as it is."""
    against_base: bool


class BlockCoder(Protocol):
    """What makes blocks shorter."""

    def encode(
        self, number: int, data: memoryview, digest: bytes, base: BaseRef | None
    ) -> EncodedBlock:
        """Encode a block of a layout, perhaps against `base`."""


class Estimate(NamedTuple):
    """What a sample of a file says of all of it."""

    ratio: float
    bytes_per_s: float
    """Of one core, as it encodes."""


class Compressor:
    """What a flusher knows that matters for the choice; shared by all of its saves."""

    def __init__(self, orders: Orders, *, memory_bytes: int) -> None:
        self._orders = orders
        self.throughput = Throughput()
        self.earlier = Earlier(memory_bytes)
        self._idle = IdleCores()
        self._idle_cores = 0.0

    def mode(self, layout: FileLayout) -> str:
        """What is asked for a file."""
        return compression_of(layout.item, self._orders.compression)

    def rounding(self, layout: FileLayout) -> Rounding:
        """What is rounded in a file."""
        return Rounding(layout, self._orders.lossy)

    def begin_save(self) -> None:
        """Look around before a save is written."""
        self.throughput.begin_save()
        self._idle_cores = self._idle.look() + _TAKEN_SHARE * (os.cpu_count() or 1)

    def coder(
        self,
        layout: FileLayout,
        start: int,
        image: memoryview,
        *,
        known: bool,
        rounded: bool = False,
    ) -> FileCoder:
        """How a file is encoded, by the first bytes of it that come, which lie at `start`; `known`:
        the last save had the same tensors in it."""
        if not known:
            self.earlier.forget(layout.name)
        mode = self.mode(layout)
        if rounded and mode in (Compression.NONE, Compression.ADAPTIVE):
            why = "tensors in it are rounded, which is for nothing if they are not encoded"
            return FileCoder(layout, mode, codec_named(_CODEC), self.earlier, why, known=known)
        if mode != Compression.ADAPTIVE:
            codec = codec_named(_CODEC if mode == Compression.MAX else mode)
            return FileCoder(layout, mode, codec, self.earlier, "it was asked for", known=known)
        try:
            pays, why = self._judged(codec_named(_CODEC), layout, start, image)
        except UsageError as error:
            pays, why = None, f"{error.what}: {error.remedy}"
        return FileCoder(layout, mode, pays, self.earlier, why, known=known)

    def _judged(
        self, codec: BlockCodec, layout: FileLayout, start: int, image: memoryview
    ) -> tuple[BlockCodec | None, str]:
        """Whether that codec makes a file durable sooner, and why."""
        writes = self.throughput.bytes_per_s
        if writes is None:
            return None, "too little was written so far to tell how fast the store is"
        if self.earlier.has(layout.name):
            return codec, "the last save is in memory, and differences to it are small"
        cores = min(self._orders.writers, self._idle_cores)
        found = estimate(codec, layout, start, image)
        encodes = cores * found.bytes_per_s
        coded = min(encodes, found.ratio * writes)
        facts = (
            f"{found.ratio:.2f} times smaller at {encodes / 1e9:.2f} GB/s on {cores:.1f} cores "
            f"that are idle, where the store takes {writes / 1e9:.2f} GB/s"
        )
        if found.ratio >= _LEAST_GAIN and writes < _MOST_OF_RAW * coded:
            return codec, facts
        return None, facts


class FileCoder:
    """Encodes the blocks of one file of one save."""

    def __init__(
        self,
        layout: FileLayout,
        mode: str,
        codec: BlockCodec | None,
        earlier: Earlier,
        why: str,
        *,
        known: bool = True,
    ) -> None:
        """`known`: the last save had the same tensors."""
        self._layout = layout
        self._known = known
        self._mode = mode
        self._codec = codec
        self._earlier = earlier
        self._why = why
        self._width_of = _widths(layout)
        self._differences = _can_be_had("patches") and _can_be_had("subtract")
        self._lock = threading.Lock()
        self._blocks: dict[str, int] = {}
        self._raw_bytes = self._stored_bytes = 0
        self._encode_s = 0.0

    @property
    def encodes(self) -> bool:
        """Whether anything is encoded at all."""
        return self._codec is not None

    @property
    def has_bases(self) -> bool:
        """Whether blocks can be told by how they differ from earlier ones."""
        return self.encodes and self._earlier.has(self._layout.name)

    def encode(
        self, number: int, data: memoryview, digest: bytes, base: BaseRef | None
    ) -> EncodedBlock:
        """Encode a block, against its base if that is still in memory and makes it smaller."""
        began = time.thread_time()
        width = self._width_of(number * BLOCK_BYTES + len(data) // 2)
        found = self._against(number, data, width, base) or self._alone(data, width)
        found = found or EncodedBlock(data, None, against_base=False)
        stored, codec = found.data, "raw" if found.encoding is None else found.encoding.codec
        if not found.against_base and self._keeps(width):
            self._earlier.keep(self._layout.name, number, digest, data)
        with self._lock:
            self._blocks[codec] = self._blocks.get(codec, 0) + 1
            self._raw_bytes += len(data)
            self._stored_bytes += len(stored)
            self._encode_s += time.thread_time() - began
        return found

    def _keeps(self, width: int) -> bool:
        """Whether later blocks may be told against this one. Wide elements gain less, and may never
        change again: of these, what has been written a second time."""
        wide = self._mode == Compression.MAX and self._known
        return self._differences and (wide or width <= _NARROW_BYTES)

    def _against(
        self, number: int, data: memoryview, width: int, base: BaseRef | None
    ) -> EncodedBlock | None:
        """A block by how it differs from its base; None where that does not pay."""
        if base is None:
            return None
        before = self._earlier.find(self._layout.name, number, base.digest)
        if before is None:
            return None
        stored, codec = codec_named("patches").encode(data, width, before), "patches"
        if stored is None and self._subtracting_pays(data, width, before):
            stored, codec = codec_named("subtract").encode(data, width, before), "subtract"
        self._earlier.tried(self._layout.name, paid=stored is not None)
        if stored is None:
            return None
        return EncodedBlock(stored, Encoding(codec, width), against_base=True)

    def _subtracting_pays(self, data: memoryview, width: int, before: memoryview) -> bool:
        part = sample_of(data, width)
        anchored = codec_named("subtract").encode(part, width, sample_of(before, width))
        alone = codec_named(_CODEC).encode(part, width, None)
        alone_bytes = len(part) if alone is None else len(alone)
        return anchored is not None and len(anchored) <= _ANCHORED_GAIN * alone_bytes

    def _alone(self, data: memoryview, width: int) -> EncodedBlock | None:
        assert self._codec is not None  # noqa: S101 (who encodes has one)
        part = sample_of(data, width)
        tried = self._codec.encode(part, width, None)
        if tried is None or len(tried) * _LEAST_GAIN > len(part):
            return None
        stored = self._codec.encode(data, width, None)
        if stored is None:
            return None
        return EncodedBlock(stored, Encoding(self._codec.name, width), against_base=False)

    def report(self) -> CodingReport:
        """What has become of all blocks that came."""
        with self._lock:
            used = sorted(self._blocks, key=lambda name: (-self._blocks[name], name))
            return CodingReport(
                file=self._layout.name,
                mode=self._mode,
                picked=", ".join(used) or "raw",
                why=self._why,
                raw_bytes=self._raw_bytes,
                stored_bytes=self._stored_bytes,
                encode_s=self._encode_s,
            )


def _can_be_had(name: str) -> bool:
    try:
        codec_named(name)
    except UsageError:
        return False
    return True


def sample_of(data: memoryview, width: int) -> memoryview:
    """Some whole elements out of the middle."""
    if len(data) <= _SAMPLE_BYTES:
        return data
    at = (len(data) - _SAMPLE_BYTES) // 2 // width * width
    return data[at : at + _SAMPLE_BYTES]


def estimate(codec: BlockCodec, layout: FileLayout, start: int, image: memoryview) -> Estimate:
    """Encode samples of bytes of a file that lie at `start`."""
    width_of = _widths(layout)
    taken = stored = 0
    codec.encode(image[:_SAMPLE_BYTES], width_of(start), None)  # the first time it takes longer
    began = time.thread_time()
    step = max(len(image) // _SAMPLES, _SAMPLE_BYTES)
    for at in range(0, len(image), step):
        part = sample_of(image[at : at + step], 16)
        encoded = codec.encode(part, width_of(start + at), None)
        taken += len(part)
        stored += len(part) if encoded is None else len(encoded)
    seconds = max(time.thread_time() - began, 1e-6)
    return Estimate(taken / max(stored, 1), taken / seconds)


def _widths(layout: FileLayout) -> Callable[[int], int]:
    """The size of the elements at a byte of the image."""
    starts, widths = [0], [1]
    for entry in layout.tensors:
        width = DTYPES[entry.dtype].size_bytes
        if width != widths[-1] and entry.stop > entry.start:
            starts.append(entry.start)
            widths.append(width)
    return lambda at: widths[bisect_right(starts, at) - 1]
