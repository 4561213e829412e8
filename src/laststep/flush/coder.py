"""Choose how the blocks of a save are encoded: not at all, or by the codec that serves best.

Compression pays where encoding and writing less takes less time than writing all: the choice for a
file follows from a sample of it, from how fast the store has taken bytes so far, and from how many
cores are idle. Block by block, what was written before is tried as an anchor where it is still in
memory. Knows nothing of files and of threads but that there are some.
"""

from __future__ import annotations

import os
import threading
import time
from bisect import bisect_right
from typing import TYPE_CHECKING, NamedTuple

from laststep.codecs.blocks.registry import codec_named
from laststep.errors import Usage
from laststep.flush.earlier import Earlier
from laststep.flush.protocol import CodingReport
from laststep.flush.rounding import Rounding
from laststep.flush.throughput import IdleCores, Throughput
from laststep.format.coding import RAW, CodedBy
from laststep.settings import Compression, compression_of
from laststep.terms import BLOCK_BYTES, DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable

    from laststep.codecs.blocks.codec import BlockCodec
    from laststep.flush.lending import Anchor
    from laststep.flush.protocol import FileBegin, Orders

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

    def mode(self, plan: FileBegin) -> str:
        """What is asked for a file."""
        return compression_of(plan.item, self._orders.compression)

    def rounding(self, plan: FileBegin) -> Rounding:
        """What is rounded in a file."""
        return Rounding(plan, self._orders.lossy)

    def begin_save(self) -> None:
        """Look around before a save is written."""
        self.throughput.begin_save()
        self._idle_cores = self._idle.look() + _TAKEN_SHARE * (os.cpu_count() or 1)

    def coder(
        self, plan: FileBegin, start: int, image: memoryview, *, known: bool, rounded: bool = False
    ) -> FileCoder:
        """How a file is encoded, by the first bytes of it that come, which lie at `start`; `known`:
        the last save had the same tensors in it."""
        if not known:
            self.earlier.forget(plan.name)
        mode = self.mode(plan)
        if rounded and mode in (Compression.NONE, Compression.ADAPTIVE):
            why = "tensors in it are rounded, which is for nothing if they are not encoded"
            return FileCoder(plan, mode, codec_named(_CODEC), self.earlier, why, known=known)
        if mode != Compression.ADAPTIVE:
            codec = codec_named(_CODEC if mode == Compression.MAX else mode)
            return FileCoder(plan, mode, codec, self.earlier, "it was asked for", known=known)
        try:
            pays, why = self._judged(codec_named(_CODEC), plan, start, image)
        except Usage as error:
            pays, why = None, f"{error.what}: {error.remedy}"
        return FileCoder(plan, mode, pays, self.earlier, why, known=known)

    def _judged(
        self, codec: BlockCodec, plan: FileBegin, start: int, image: memoryview
    ) -> tuple[BlockCodec | None, str]:
        """Whether that codec makes a file durable sooner, and why."""
        writes = self.throughput.bytes_per_s
        if writes is None:
            return None, "too little was written so far to tell how fast the store is"
        if self.earlier.has(plan.name):
            return codec, "the last save is in memory, and differences to it are small"
        cores = min(self._orders.writers, self._idle_cores)
        found = estimate(codec, plan, start, image)
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
        plan: FileBegin,
        mode: str,
        codec: BlockCodec | None,
        earlier: Earlier,
        why: str,
        *,
        known: bool = True,
    ) -> None:
        """`known`: the last save had the same tensors."""
        self._plan = plan
        self._known = known
        self._mode = mode
        self._codec = codec
        self._earlier = earlier
        self._why = why
        self._width_of = _widths(plan)
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
    def has_anchors(self) -> bool:
        """Whether blocks can be told by how they differ from earlier ones."""
        return self.encodes and self._earlier.has(self._plan.name)

    @property
    def codecs(self) -> tuple[str, ...]:
        """All that may be used."""
        return ("raw", "patches", "subtract", "" if self._codec is None else self._codec.name)

    def encode(
        self, number: int, data: memoryview, digest: bytes, anchor: Anchor | None
    ) -> tuple[bytes | memoryview, CodedBy]:
        """A block as it is to be stored, and how that was made; `anchor` is what it may be coded
        against, if that is still here."""
        began = time.thread_time()
        width = self._width_of(number * BLOCK_BYTES + len(data) // 2)
        found = self._anchored(number, data, width, anchor) or self._alone(data, width)
        stored, way = found or (data, RAW)
        if not way.anchored and self._keeps(width):
            self._earlier.keep(self._plan.name, number, digest, data)
        with self._lock:
            self._blocks[way.codec] = self._blocks.get(way.codec, 0) + 1
            self._raw_bytes += len(data)
            self._stored_bytes += len(stored)
            self._encode_s += time.thread_time() - began
        return stored, way

    def _keeps(self, width: int) -> bool:
        """Whether later blocks may be told against this one. Wide elements gain less, and may never
        change again: of these, what has been written a second time."""
        wide = self._mode == Compression.MAX and self._known
        return self._differences and (wide or width <= _NARROW_BYTES)

    def _anchored(
        self, number: int, data: memoryview, width: int, anchor: Anchor | None
    ) -> tuple[bytes, CodedBy] | None:
        """A block by how it differs from its anchor; None where that does not pay."""
        if anchor is None:
            return None
        before = self._earlier.find(self._plan.name, number, anchor.digest)
        if before is None:
            return None
        found = codec_named("patches").encode(data, width, before), "patches"
        if found[0] is None and self._subtracting_pays(data, width, before):
            found = codec_named("subtract").encode(data, width, before), "subtract"
        self._earlier.tried(self._plan.name, paid=found[0] is not None)
        return None if found[0] is None else (found[0], CodedBy(found[1], width, anchored=True))

    def _subtracting_pays(self, data: memoryview, width: int, before: memoryview) -> bool:
        part = sample_of(data, width)
        anchored = codec_named("subtract").encode(part, width, sample_of(before, width))
        alone = codec_named(_CODEC).encode(part, width, None)
        alone_bytes = len(part) if alone is None else len(alone)
        return anchored is not None and len(anchored) <= _ANCHORED_GAIN * alone_bytes

    def _alone(self, data: memoryview, width: int) -> tuple[bytes, CodedBy] | None:
        assert self._codec is not None  # noqa: S101 (who encodes has one)
        part = sample_of(data, width)
        tried = self._codec.encode(part, width, None)
        if tried is None or len(tried) * _LEAST_GAIN > len(part):
            return None
        stored = self._codec.encode(data, width, None)
        return (
            None if stored is None else (stored, CodedBy(self._codec.name, width, anchored=False))
        )

    def report(self) -> CodingReport:
        """What has become of all blocks that came."""
        with self._lock:
            used = sorted(self._blocks, key=lambda name: (-self._blocks[name], name))
            return CodingReport(
                file=self._plan.name, mode=self._mode,
                picked=", ".join(used) or RAW.codec, why=self._why, raw_bytes=self._raw_bytes,
                stored_bytes=self._stored_bytes, encode_s=self._encode_s,
            )  # fmt: skip


def _can_be_had(name: str) -> bool:
    try:
        codec_named(name)
    except Usage:
        return False
    return True


def sample_of(data: memoryview, width: int) -> memoryview:
    """Some whole elements out of the middle."""
    if len(data) <= _SAMPLE_BYTES:
        return data
    at = (len(data) - _SAMPLE_BYTES) // 2 // width * width
    return data[at : at + _SAMPLE_BYTES]


def estimate(codec: BlockCodec, plan: FileBegin, start: int, image: memoryview) -> Estimate:
    """Encode samples of bytes of a file that lie at `start`."""
    width_of = _widths(plan)
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


def _widths(plan: FileBegin) -> Callable[[int], int]:
    """The size of the elements at a byte of the image."""
    starts, widths = [0], [1]
    for entry in plan.entries:
        width = DTYPES[entry.dtype].size_bytes
        if width != widths[-1] and entry.stop > entry.start:
            starts.append(entry.start)
            widths.append(width)
    return lambda at: widths[bisect_right(starts, at) - 1]
