"""Choose how the blocks of a save are encoded: not at all, or by the most suitable codec.

Compression pays if encoding and writing fewer bytes takes less time than writing all of them. The
choice for a file is based on a sample of it, on the measured speed of the store, and on the number
of idle cores. Each block is also tried as a difference to an earlier version of it that is still in
memory. Knows nothing about files or threads, except that several threads may call it.

Earlier blocks are kept in memory up to a limit. Rounding, where the user allows it, changes numbers
in their slot before they are digested.
"""

from __future__ import annotations

import os
import threading
import time
from bisect import bisect_right
from collections import Counter
from contextlib import contextmanager
from fnmatch import fnmatchcase
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

from laststep.codecs.blocks import codec_named
from laststep.constants import BLOCK_BYTES, DTYPES
from laststep.errors import UsageError
from laststep.flush.protocol import CodingReport
from laststep.format.index import Encoding
from laststep.settings import Compression, compression_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from numpy import float32, uint16
    from numpy.typing import NDArray

    from laststep.codecs.blocks import BlockCodec
    from laststep.flush.protocol import Orders
    from laststep.format.index import BaseRef
    from laststep.format.layout import FileLayout
    from laststep.storage.store import FileWriting


_LEAST_BYTES = 32 << 20
"""Minimum bytes for a measurement: fewer show the latency of a store, not its throughput."""
_FORGET = 0.5
"""Weight of earlier saves relative to the newest."""


class Throughput:
    """Bytes written, and the time during which at least one write or sync was in progress."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._under_way = 0
        self._since = 0.0
        self._busy_s = 0.0
        self._bytes = 0.0

    @contextmanager
    def busy(self, size_bytes: int) -> Iterator[None]:
        """Count the time inside as spent on writing that number of bytes."""
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
        with self._lock:
            if self._bytes * _FORGET >= _LEAST_BYTES:
                self._bytes *= _FORGET
                self._busy_s *= _FORGET

    @property
    def bytes_per_s(self) -> float | None:
        """Measured write speed; None if too little has been written."""
        with self._lock:
            if self._bytes < _LEAST_BYTES or self._busy_s <= 0:
                return None
            return self._bytes / self._busy_s


class TimedWriting:
    """Pass writes on to another file writer and time them."""

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
    """The number of cores available to this process that were idle since the last call."""

    def __init__(self, read: Callable[[], tuple[int, int]] | None = None) -> None:
        self._read = read or _ticks
        self._last = self._read()
        self._idle = 0.0

    def look(self) -> float:
        """Return the idle cores since the last call, or its result if the counters stand still."""
        idle, every = self._read()
        past = every - self._last[1]
        if past > 0:
            cores = len(os.sched_getaffinity(0))
            self._idle = cores * (idle - self._last[0]) / past
            self._last = idle, every
        return self._idle


def _ticks() -> tuple[int, int]:
    """Return the ticks of all cores that were idle or waiting for a disk, and the total ticks."""
    try:
        with open("/proc/stat", "rb") as file:  # noqa: PTH123 (pathlib takes long to import)
            ticks = [int(word) for word in file.readline().split()[1:9]]
    except (OSError, ValueError):
        return 0, 0
    return ticks[3] + ticks[4], sum(ticks)


_TRIED_BLOCKS = 64
"""Number of tries after which it is decided whether keeping the blocks of a file pays."""
_LEAST_PAID = 0.25


class Earlier:
    """Earlier blocks that one flusher keeps in memory as bases."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._bytes = 0
        self._lock = threading.Lock()
        self._kept: dict[str, dict[int, tuple[bytes, bytes]]] = {}
        """Digest and bytes of each block, by file and number."""
        self._tried: Counter[str] = Counter()
        self._paid: Counter[str] = Counter()

    def find(self, file: str, number: int, digest: bytes) -> memoryview | None:
        """Return that block of a file if it is in memory with this digest."""
        known, data = self._kept.get(file, {}).get(number, (b"", b""))
        return memoryview(data) if known == digest else None

    def has(self, file: str) -> bool:
        return bool(self._kept.get(file))

    def keep(self, file: str, number: int, digest: bytes, data: memoryview) -> None:
        """Keep this version of a block instead, unless there is no room or keeping does not pay."""
        with self._lock:
            blocks = self._kept.setdefault(file, {})
            _, before = blocks.pop(number, (b"", b""))
            self._bytes -= len(before)
            if self._bytes + len(data) > self._most_bytes or not self._pays(file):
                return
            self._bytes += len(data)
            blocks[number] = digest, bytes(data)

    def tried(self, file: str, *, paid: bool) -> None:
        """Record whether encoding a block against the kept one made it smaller."""
        with self._lock:
            self._tried[file] += 1
            self._paid[file] += paid
            if not self._pays(file):
                self._drop(file)

    def forget(self, file: str) -> None:
        """Forget a file, because its tensors have changed."""
        with self._lock:
            self._drop(file)
            self._tried.pop(file, None)
            self._paid.pop(file, None)

    def _pays(self, file: str) -> bool:
        tried = self._tried[file]
        return tried < _TRIED_BLOCKS or self._paid[file] >= _LEAST_PAID * tried

    def _drop(self, file: str) -> None:
        self._bytes -= sum(len(data) for _, data in self._kept.pop(file, {}).values())


_DTYPE = "float32"
_GROUP = 64
"""Number of values that share a scale."""
_GROUP_BYTES = 4 * _GROUP
_LEVELS = 127
_INFINITE = 0x7F80
"""The exponent of infinity, in the upper half of a number."""
_TOO_LARGE = 2.0**127
"""Larger numbers may be rounded to infinity."""


class Rounding:
    """The rounding to apply in one file."""

    def __init__(self, layout: FileLayout, lossy: Mapping[str, str]) -> None:
        """`lossy` maps patterns of `item/tensor` to a rounding; the first match wins. Scalars are
        never rounded: optimizers count their steps in them."""
        self.names: dict[str, str] = {}
        self.patterns: set[str] = set()
        """Patterns that match a tensor here."""
        self._ranges: list[tuple[int, int, Callable[[memoryview, int], None]]] = []
        """Start and stop of each rounded byte range, and its rounding."""
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
            self._ranges.append((entry.start, entry.stop, ROUNDERS[lossy[pattern]]))

    def __bool__(self) -> bool:
        return bool(self._ranges)

    def apply(self, start: int, data: memoryview) -> None:
        """Round in place the lossy part of `data`, which starts at byte `start` of the layout."""
        first = bisect_right(self._ranges, start, key=itemgetter(1))
        for begin, stop, round_in_place in self._ranges[first:]:
            if begin >= start + len(data):
                break
            low, high = max(begin, start), min(stop, start + len(data))
            round_in_place(data[low - start : high - start], low)


def _fits(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name.partition("/")[0], pattern)


def to_bf16(data: memoryview, at: int) -> None:  # noqa: ARG001 (numbers are rounded one by one)
    """Round each number in place to the nearest bfloat16, ties to even, but never to infinity."""
    import numpy as np

    from laststep.codecs.rounding import rounded

    halves: NDArray[uint16] = np.frombuffer(data, "<u2")
    upper = np.array(np.frombuffer(rounded(data, "bfloat16"), "<u2"))
    was_finite = (halves[1::2] & 0x7F80) != _INFINITE
    upper[((upper & 0x7FFF) == _INFINITE) & was_finite] -= 1  # the largest finite number
    halves[1::2] = upper
    halves[::2] = 0


def to_int8(data: memoryview, at: int) -> None:
    """Round numbers in place, in groups of 64 by position in the layout, to multiples of a power of
    two, with 7 bits. Groups with NaN or nearly infinite numbers are left unchanged."""
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
    # The smallest power of two whose 127-fold reaches the largest number, but at least 2**-149,
    # the smallest positive float32.
    fractions, exponents = np.frexp(np.where(ok, largest, 1).astype(np.float64) / _LEVELS)
    exponents -= fractions == 0.5
    scales = np.ldexp(np.float64(1), np.maximum(exponents, -149))[:, None]
    with np.errstate(invalid="ignore"):  # from groups that are left unchanged
        rounded = np.rint(groups / scales)
        rounded *= scales
    groups[ok] = rounded[ok]


ROUNDERS: dict[str, Callable[[memoryview, int], None]] = {"bf16": to_bf16, "int8": to_int8}
"""The available roundings by name."""


_CODEC = "planes"
_SAMPLE_BYTES = 64 << 10
"""Sample size, from the middle of a block: enough to predict the ratio of all of it."""
_SAMPLES = 4
_TAKEN_SHARE = 0.02
"""Fraction of all cores that encoding may take from training if none is idle."""
_LEAST_GAIN = 1.03
"""Minimum compression ratio. With less, decoding would cost more than it saves."""
_MOST_OF_RAW = 0.9
"""Encoding must be expected to take less than this fraction of the time of writing raw."""
_ANCHORED_GAIN = 0.8
"""A difference must be smaller by this factor than the block alone: it needs its base as well."""
_NARROW_BYTES = 2
"""Maximum element size of blocks that are kept as bases in modes other than `max`: with low
learning rates, differences between such narrow elements are few and small."""


class EncodedBlock(NamedTuple):
    """A block in the form in which it is stored."""

    data: bytes | memoryview
    encoding: Encoding | None = None
    """None if it is stored raw."""
    base: BaseRef | None = None
    """The block that it is encoded against."""


class Estimate(NamedTuple):
    """Properties of a file, estimated from a sample."""

    ratio: float
    bytes_per_s: float
    """Encoding speed of one core."""


class Compressor:
    """The measurements on which a flusher's choice of encodings is based, over all its saves."""

    def __init__(self, orders: Orders, *, memory_bytes: int) -> None:
        self._orders = orders
        self.throughput = Throughput()
        self.earlier = Earlier(memory_bytes)
        self._idle = IdleCores()
        self._idle_cores = 0.0

    def mode(self, layout: FileLayout) -> str:
        return compression_of(layout.item, self._orders.compression)

    def rounding(self, layout: FileLayout) -> Rounding:
        return Rounding(layout, self._orders.lossy)

    def begin_save(self) -> None:
        self.throughput.begin_save()
        self._idle_cores = self._idle.look() + _TAKEN_SHARE * (os.cpu_count() or 1)

    def encoder(
        self,
        layout: FileLayout,
        start: int,
        image: memoryview,
        *,
        known: bool,
        rounded: bool = False,
    ) -> LayoutEncoder:
        """Choose how a file is encoded, from the first bytes of it that arrive, which start at
        `start`. `known`: the last save had the same tensors in it."""
        if not known:
            self.earlier.forget(layout.name)
        mode, why = self.mode(layout), "it was asked for"
        codec: BlockCodec | None = None
        if rounded and mode in (Compression.NONE, Compression.ADAPTIVE):
            codec = codec_named(_CODEC)
            why = "tensors in it are rounded, which is for nothing if they are not encoded"
        elif mode != Compression.ADAPTIVE:
            codec = codec_named(_CODEC if mode == Compression.MAX else mode)
        else:
            try:
                codec, why = self._judged(codec_named(_CODEC), layout, start, image)
            except UsageError as error:
                why = f"{error.what}: {error.remedy}"
        return LayoutEncoder(layout, mode, codec, self.earlier, why, known=known)

    def _judged(
        self, codec: BlockCodec, layout: FileLayout, start: int, image: memoryview
    ) -> tuple[BlockCodec | None, str]:
        """Return the codec if it makes a file durable sooner, else None; and the reason."""
        writes = self.throughput.bytes_per_s
        if writes is None:
            return None, "not enough has been written to measure the store's speed"
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


class LayoutEncoder:
    """Encodes the blocks of one layout of one save: as a difference to an earlier block, alone, or
    not at all, whichever is smallest for the block."""

    def __init__(
        self,
        layout: FileLayout,
        mode: str,
        codec: BlockCodec | None,
        earlier: Earlier,
        why: str,
        *,
        known: bool,
    ) -> None:
        """`mode` is the setting; `known`: the last save had the same tensors."""
        self._layout = layout
        self._known = known
        self._mode = mode
        self._codec = codec
        self._earlier = earlier
        self._why = why
        self._width_of = _widths(layout)
        self._differences = True
        try:
            codec_named("patches"), codec_named("subtract")
        except UsageError:  # not installed
            self._differences = False
        self._lock = threading.Lock()
        self._blocks: Counter[str] = Counter()
        """By codec."""
        self._raw_bytes = self._stored_bytes = 0
        self._encode_s = 0.0

    @property
    def encodes(self) -> bool:
        """Return True if any block may become smaller."""
        return self._codec is not None

    @property
    def has_bases(self) -> bool:
        """True if blocks can be encoded as differences to earlier ones."""
        return self._codec is not None and self._earlier.has(self._layout.name)

    def encode(
        self, number: int, data: memoryview, digest: bytes, base: BaseRef | None
    ) -> EncodedBlock:
        """Encode a block, against its base if that is still in memory and makes it smaller."""
        began, found = time.thread_time(), EncodedBlock(data)
        if self._codec is not None:
            found = self._by_codec(self._codec, number, data, digest, base) or found
        codec = "raw" if found.encoding is None else found.encoding.codec
        with self._lock:
            self._blocks[codec] += 1
            self._raw_bytes += len(data)
            self._stored_bytes += len(found.data)
            self._encode_s += time.thread_time() - began
        return found

    def _by_codec(
        self, codec: BlockCodec, number: int, data: memoryview, digest: bytes, base: BaseRef | None
    ) -> EncodedBlock | None:
        """Encode a block as a difference to its base or alone; None if neither pays."""
        width = self._width_of(number * BLOCK_BYTES + len(data) // 2)
        found = self._against(number, data, width, base)
        if found is not None:
            return found
        # Later blocks may be encoded against this one. Wide elements gain less and may never change
        # again, so they are kept only under `max`, from their second save on.
        wide = self._mode == Compression.MAX and self._known
        if self._differences and (wide or width <= _NARROW_BYTES):
            self._earlier.keep(self._layout.name, number, digest, data)
        part = sample_of(data, width)
        tried = codec.encode(part, width, None)
        if tried is None or len(tried) * _LEAST_GAIN > len(part):
            return None
        stored = codec.encode(data, width, None)
        if stored is None:
            return None
        return EncodedBlock(stored, Encoding(codec.name, width))

    def _against(
        self, number: int, data: memoryview, width: int, base: BaseRef | None
    ) -> EncodedBlock | None:
        """Encode a block as a difference to its base; None if that does not pay."""
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
        return EncodedBlock(stored, Encoding(codec, width), base)

    def _subtracting_pays(self, data: memoryview, width: int, before: memoryview) -> bool:
        part = sample_of(data, width)
        anchored = codec_named("subtract").encode(part, width, sample_of(before, width))
        alone = codec_named(_CODEC).encode(part, width, None)
        alone_bytes = len(part) if alone is None else len(alone)
        return anchored is not None and len(anchored) <= _ANCHORED_GAIN * alone_bytes

    def report(self) -> CodingReport:
        """Return a report on all blocks seen so far."""
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


def sample_of(data: memoryview, width: int) -> memoryview:
    """Return whole elements from the middle."""
    if len(data) <= _SAMPLE_BYTES:
        return data
    at = (len(data) - _SAMPLE_BYTES) // 2 // width * width
    return data[at : at + _SAMPLE_BYTES]


def estimate(codec: BlockCodec, layout: FileLayout, start: int, image: memoryview) -> Estimate:
    """Estimate ratio and speed by encoding samples of `image`, which starts at byte `start`."""
    width_of = _widths(layout)
    taken = stored = 0
    codec.encode(image[:_SAMPLE_BYTES], width_of(start), None)  # warm-up: the first call is slower
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
    """Return a function from a byte of the layout to the element size there."""
    starts, widths = [0], [1]
    for entry in layout.tensors:
        width = DTYPES[entry.dtype].size_bytes
        if width != widths[-1] and entry.stop > entry.start:
            starts.append(entry.start)
            widths.append(width)
    return lambda at: widths[bisect_right(starts, at) - 1]
