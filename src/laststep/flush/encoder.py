"""Choose how the blocks of a save are encoded: not at all, or by the most suitable codec.

Compression pays if encoding and writing fewer bytes takes less time than writing all of them. The
choice for a file is based on a sample of it, on the measured speed of the store, and on the number
of idle cores. Each block is also tried as a difference to an earlier version of it; these are kept
in memory up to a limit. Knows nothing about files or threads, except that several may call it.
"""

from __future__ import annotations

import os
import threading
import time
from bisect import bisect_right
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from msgspec import structs

from laststep.codecs.blocks import codec_named
from laststep.constants import BLOCK_BYTES, DTYPES
from laststep.errors import UsageError
from laststep.flush.protocol import CodingReport
from laststep.format.index import Encoding
from laststep.settings import Compression, compression_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

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
    data: bytes | memoryview
    encoding: Encoding | None = None
    """None if it is stored raw."""
    base: BaseRef | None = None
    """The block that it is encoded against."""


class Estimate(NamedTuple):
    ratio: float
    bytes_per_s: float
    """Encoding speed of one core."""


class Compressor:
    """The measurements on which a flusher's choice of encodings is based, over all its saves."""

    def __init__(self, orders: Orders, *, memory_bytes: int) -> None:
        self._orders = orders
        self.lossy = orders.lossy
        self.throughput = Throughput()
        self.earlier = Earlier(memory_bytes)
        self._idle = IdleCores()
        self._idle_cores = 0.0

    def mode(self, layout: FileLayout) -> str:
        return compression_of(layout.item, self._orders.compression)

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
        mode, encodes, why = self.mode(layout), True, "it was asked for"
        if rounded and mode in (Compression.NONE, Compression.ADAPTIVE):
            why = "tensors in it are rounded, which is for nothing if they are not encoded"
        elif mode == Compression.ADAPTIVE:
            try:
                encodes, why = self._judged(layout, start, image)
            except UsageError as error:
                encodes, why = False, f"{error.what}: {error.remedy}"
        return LayoutEncoder(layout, mode, self.earlier, why, encodes=encodes, known=known)

    def _judged(self, layout: FileLayout, start: int, image: memoryview) -> tuple[bool, str]:
        """Return True if encoding makes a file durable sooner, and the reason."""
        codec, writes = codec_named(_CODEC), self.throughput.bytes_per_s
        if writes is None:
            return False, "not enough has been written to measure the store's speed"
        if self.earlier.has(layout.name):
            return True, "the last save is in memory, and differences to it are small"
        cores = min(self._orders.writers, self._idle_cores)
        found = estimate(codec, layout, start, image)
        encodes = cores * found.bytes_per_s
        coded = min(encodes, found.ratio * writes)
        facts = (
            f"{found.ratio:.2f} times smaller at {encodes / 1e9:.2f} GB/s on {cores:.1f} cores "
            f"that are idle, where the store takes {writes / 1e9:.2f} GB/s"
        )
        return found.ratio >= _LEAST_GAIN and writes < _MOST_OF_RAW * coded, facts


class LayoutEncoder:
    """Encodes each block of a layout of one save in its smallest form: difference, alone or raw."""

    def __init__(
        self,
        layout: FileLayout,
        mode: str,
        earlier: Earlier,
        why: str,
        *,
        encodes: bool = True,
        known: bool,
    ) -> None:
        """`encodes` is False if no block may be encoded, because of `why`; `known`: the last save
        had the same tensors."""
        self.encodes = encodes
        self._layout = layout
        self._earlier = earlier
        self._report = CodingReport(file=layout.name, mode=mode, picked="raw", why=why)
        if encodes:
            self._planes, self._subtract, self._patches = map(
                codec_named, (_CODEC, "subtract", "patches")
            )
        # Wide elements gain less and may never change again, so they are kept only under `max`,
        # from their second save on.
        self._keeps_wide = known and mode == Compression.MAX
        self._width_of = _widths(layout)
        self._lock = threading.Lock()
        self._blocks: Counter[str] = Counter()
        """By codec."""
        self._raw_bytes = self._stored_bytes = 0
        self._encode_s = 0.0

    @property
    def has_bases(self) -> bool:
        """True if blocks can be encoded as differences to earlier ones."""
        return self.encodes and self._earlier.has(self._layout.name)

    def encode(
        self, number: int, data: memoryview, digest: bytes, base: BaseRef | None
    ) -> EncodedBlock:
        """Encode a block, against its base if that is still in memory and makes it smaller."""
        began = time.thread_time()
        width = self._width_of(number * BLOCK_BYTES + len(data) // 2)
        found = self._against(number, data, width, base)
        if found is None:
            # Later blocks may be encoded against this one.
            if self._keeps_wide or width <= _NARROW_BYTES:
                self._earlier.keep(self._layout.name, number, digest, data)
            found = self._alone(data, width)
        with self._lock:
            self._blocks["raw" if found.encoding is None else found.encoding.codec] += 1
            self._raw_bytes += len(data)
            self._stored_bytes += len(found.data)
            self._encode_s += time.thread_time() - began
        return found

    def _alone(self, data: memoryview, width: int) -> EncodedBlock:
        part, stored = sample_of(data, width), None
        tried = self._planes.encode(part, width, None)
        if tried is not None and len(tried) * _LEAST_GAIN <= len(part):
            stored = self._planes.encode(data, width, None)
        if stored is None:
            return EncodedBlock(data)
        return EncodedBlock(stored, Encoding(_CODEC, width))

    def _against(
        self, number: int, data: memoryview, width: int, base: BaseRef | None
    ) -> EncodedBlock | None:
        """Encode a block as a difference to its base; None if that does not pay."""
        if base is None:
            return None
        before = self._earlier.find(self._layout.name, number, base.digest)
        if before is None:
            return None
        codec, stored = self._patches, self._patches.encode(data, width, before)
        if stored is None and self._subtracting_pays(data, width, before):
            codec, stored = self._subtract, self._subtract.encode(data, width, before)
        self._earlier.tried(self._layout.name, paid=stored is not None)
        return None if stored is None else EncodedBlock(stored, Encoding(codec.name, width), base)

    def _subtracting_pays(self, data: memoryview, width: int, before: memoryview) -> bool:
        part = sample_of(data, width)
        anchored = self._subtract.encode(part, width, sample_of(before, width))
        alone = self._planes.encode(part, width, None)
        alone_bytes = len(part) if alone is None else len(alone)
        return anchored is not None and len(anchored) <= _ANCHORED_GAIN * alone_bytes

    def report(self) -> CodingReport:
        with self._lock:
            used = sorted(self._blocks, key=lambda name: (-self._blocks[name], name))
            return structs.replace(
                self._report,
                picked=", ".join(used) or "raw",
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
