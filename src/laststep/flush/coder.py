"""Choose how the blocks of a save are encoded: not at all, or by the codec that serves best.

Compression pays where encoding and writing less takes less time than writing all: the choice for a
file follows from a sample of it, from how fast the store has taken bytes so far, and from how many
cores are idle. Block by block, what was written before is tried as a base where it is still in
memory. Knows nothing of files and of threads but that there are some.
"""

from __future__ import annotations

import os
import threading
import time
from bisect import bisect_right
from typing import TYPE_CHECKING, NamedTuple, Protocol

from laststep.codecs.blocks.registry import codec_named
from laststep.errors import Usage
from laststep.flush.earlier import Earlier
from laststep.flush.protocol import CodingReport
from laststep.flush.rounding import Rounding
from laststep.flush.throughput import IdleCores, Throughput
from laststep.format.index import Encoding
from laststep.settings import Compression, compression_of
from laststep.terms import BLOCK_BYTES, DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable

    from laststep.codecs.blocks.codec import BlockCodec
    from laststep.flush.protocol import Orders
    from laststep.format.index import BaseRef
    from laststep.format.layout import FileLayout

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
        except Usage as error:
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
                file=self._layout.name, mode=self._mode,
                picked=", ".join(used) or "raw", why=self._why, raw_bytes=self._raw_bytes,
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
