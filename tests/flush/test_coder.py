"""The way blocks are encoded: chosen by the store's pace, idle cores and a sample, given here."""

from __future__ import annotations

import os
import random
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest

from laststep.codecs.blocks import codec_named
from laststep.codecs.digests import digest
from laststep.constants import BLOCK_BYTES
from laststep.errors import UsageError
from laststep.flush import encoder
from laststep.flush.encoder import Compressor, Earlier, Estimate, LayoutEncoder, estimate, sample_of
from laststep.flush.protocol import Orders
from laststep.format.index import BaseRef, BlockRef, Encoding
from saves_of import layout_of

if TYPE_CHECKING:
    from laststep.flush.encoder import EncodedBlock
    from laststep.format.layout import FileLayout

MIB = 1 << 20


def layout(*tensors: tuple[str, int], item: str | None = "model") -> FileLayout:
    """A file of tensors of these dtypes and bytes, one after the other."""
    return layout_of(*((f"t{number}", *one) for number, one in enumerate(tensors)), item=item)


BF16 = layout(("bfloat16", 4 * MIB))


def weights(size: int = 4 * MIB, seed: int = 0) -> memoryview:
    """Numbers as bf16: the upper halves of floats."""
    drawn = np.random.default_rng(seed).standard_normal(size // 2, np.float32)
    return memoryview((drawn.view(np.uint32) >> 16).astype(np.uint16).tobytes())


def noise(size: int = 4 * MIB) -> memoryview:
    return memoryview(random.Random(1).randbytes(size))


def compressor(
    asked: str | dict[str, str] = "adaptive",
    *,
    store_mb_s: float | None = 100,
    idle: float = 8.0,
    threads: int = 4,
) -> Compressor:
    made = Compressor(Orders(writers=threads, compression=asked), memory_bytes=64 * MIB)
    made._idle_cores = idle
    if store_mb_s is not None:
        made.throughput._bytes, made.throughput._busy_s = store_mb_s * 1e9, 1000.0
    return made


@pytest.fixture
def fast_codec(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all that is judged by, only how fast this machine encodes is not given."""

    def found(*arguments: object) -> Estimate:
        return Estimate(estimate(*arguments).ratio, 1e9)  # type: ignore[arg-type]

    monkeypatch.setattr(encoder, "estimate", found)


@pytest.mark.usefixtures("fast_codec")
class TestAdaptive:
    """What is picked, and why."""

    def judged(self, made: Compressor, image: memoryview | None = None) -> LayoutEncoder:
        return made.encoder(BF16, 0, weights() if image is None else image, known=True)

    def test_a_slow_store_gets_planes(self) -> None:
        found = self.judged(compressor(store_mb_s=100))
        assert found.encodes
        assert "1.5" in found.report().why
        assert "4.0 cores" in found.report().why
        assert "0.10 GB/s" in found.report().why

    @pytest.mark.parametrize(("store_mb_s", "encodes"), [(3500, True), (3700, False)])
    def test_a_store_that_is_faster_than_the_cores_gets_what_is_there(
        self, store_mb_s: float, *, encodes: bool
    ) -> None:
        # Four threads encode 4 GB/s, and nine tenths of that is worth it.
        assert self.judged(compressor(store_mb_s=store_mb_s)).encodes == encodes

    def test_no_more_cores_are_counted_than_threads_encode_or_are_idle(self) -> None:
        assert not self.judged(compressor(store_mb_s=2000, threads=1)).encodes
        assert not self.judged(compressor(store_mb_s=2000, idle=1.0)).encodes
        assert self.judged(compressor(store_mb_s=2000, idle=3.0)).encodes

    def test_where_no_core_is_idle_nothing_is_encoded(self) -> None:
        found = self.judged(compressor(store_mb_s=100, idle=0.04))
        assert not found.encodes
        assert found.report().picked == "raw"

    def test_what_does_not_become_smaller_is_left_as_it_is(self) -> None:
        assert not self.judged(compressor(store_mb_s=1), noise()).encodes

    def test_the_first_save_is_as_it_is(self) -> None:
        found = self.judged(compressor(store_mb_s=None))
        assert not found.encodes

    def test_without_zstandard_nothing_is_encoded_and_the_reason_is_told(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "laststep.codecs.planes", None)
        found = self.judged(compressor())
        assert not found.encodes
        assert "pip install 'laststep[compress]'" in found.report().why

    def test_what_is_in_memory_is_used_however_fast_the_store_is(self) -> None:
        made = compressor(store_mb_s=100_000, idle=0.0)
        made.earlier.keep(BF16.name, 0, b"", memoryview(b"1"))
        assert self.judged(made).has_bases

    def test_nothing_to_look_at_is_no_reason_to_encode(self) -> None:
        # Where all that did not change stays on its device.
        assert not self.judged(compressor(), memoryview(b"")).encodes


def test_a_save_looks_at_idle_cores_and_counts_a_few_more() -> None:
    made = compressor()
    ticks = iter([(50, 1100)])
    made._idle._read, made._idle._last = lambda: next(ticks), (0, 1000)
    made.begin_save()
    cores = len(os.sched_getaffinity(0))
    assert made._idle_cores == pytest.approx(0.5 * cores + 0.02 * (os.cpu_count() or 1))


def test_each_item_is_encoded_as_it_is_asked() -> None:
    made = compressor({"model": "max", "other": "none", "*": "adaptive"})
    assert made.mode(BF16) == "max"
    assert made.mode(layout(item="other")) == "none"
    assert made.mode(layout(item="third")) == "adaptive"
    assert made.mode(layout(item=None)) == "adaptive"
    assert compressor({"model": "max"}).mode(layout(item="other")) == "none"


def test_a_codec_that_cannot_be_had_is_an_error_where_it_was_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "laststep.codecs.planes", None)
    with pytest.raises(UsageError, match="zstandard"):
        compressor("max").encoder(BF16, 0, weights(), known=True)


def test_what_was_kept_is_forgotten_when_the_tensors_are_others() -> None:
    made = compressor("max")
    made.earlier.keep(BF16.name, 0, b"", memoryview(b"1"))
    assert made.encoder(BF16, 0, weights(), known=True).has_bases
    assert not made.encoder(BF16, 0, weights(), known=False).has_bases


def encoded(
    made: LayoutEncoder, data: memoryview, base: memoryview | None = None, number: int = 0
) -> EncodedBlock:
    """Encode a block, and see that it can be decoded."""
    ref = None if base is None else BaseRef(BlockRef(0, 0, len(base)), digest(base))
    found = made.encode(number, data, digest(data), ref)
    if found.encoding is None:
        assert found.data == data
        assert found.base is None
        return found
    codec, before = codec_named(found.encoding.codec), base if found.base is not None else None
    stored = memoryview(found.data)
    assert codec.decode(stored, len(data), found.encoding.element_bytes, before) == data
    return found


def way(found: EncodedBlock) -> tuple[str, int, bool]:
    """By which codec, for elements of which size, and whether against a base."""
    assert found.encoding is not None
    return *found.encoding, found.base is not None


def codec_of(found: EncodedBlock) -> str:
    return way(found)[0]


def max_coder(file: FileLayout = BF16) -> LayoutEncoder:
    return compressor("max").encoder(file, 0, memoryview(b""), known=True)


def changed(data: memoryview, *, every: int) -> memoryview:
    numbers = np.frombuffer(data, np.uint16).copy()
    numbers[::every] += 1
    return memoryview(numbers.tobytes())


def test_a_block_is_encoded_the_way_that_suits_it() -> None:
    made, block = max_coder(), weights(BLOCK_BYTES)
    assert way(encoded(made, block)) == ("planes", 2, False)
    few, many = changed(block, every=100), changed(block, every=2)
    assert way(encoded(made, few, block)) == ("patches", 2, True)
    assert way(encoded(made, many, block)) == ("subtract", 2, True)
    other = weights(BLOCK_BYTES, seed=9)
    assert way(encoded(made, other, block)) == ("planes", 2, False)
    assert encoded(made, noise(BLOCK_BYTES), other).encoding is None
    report = made.report()
    assert report.picked == "planes, patches, raw, subtract"
    assert report.raw_bytes == 5 * BLOCK_BYTES
    assert BLOCK_BYTES < report.stored_bytes < 3.2 * BLOCK_BYTES


def test_a_base_is_a_block_in_memory_with_that_very_content() -> None:
    made, block = max_coder(), weights(BLOCK_BYTES)
    near = changed(block, every=100)
    assert codec_of(encoded(made, near, block)) == "planes"  # it has not seen `block` yet
    assert codec_of(encoded(made, block, near)) == "patches"
    assert codec_of(encoded(made, near, block, number=1)) == "planes"


def test_a_block_that_has_a_base_is_none_itself() -> None:
    made, block = max_coder(), weights(BLOCK_BYTES)
    encoded(made, block)
    near = changed(block, every=100)
    encoded(made, near, block)
    assert codec_of(encoded(made, changed(near, every=90), near)) == "planes"


def test_without_a_base_a_block_stands_alone() -> None:
    made, block = max_coder(), weights(BLOCK_BYTES)
    encoded(made, block)
    assert way(encoded(made, changed(block, every=100))) == ("planes", 2, False)


@pytest.mark.parametrize(
    ("mode", "dtype", "keeps"),
    [("max", "float32", True), ("planes", "float32", False), ("planes", "bfloat16", True)],
)
def test_wide_elements_are_kept_only_where_all_is_asked_for(
    mode: str, dtype: str, *, keeps: bool
) -> None:
    file = layout((dtype, 4 * MIB))
    made = compressor(mode)
    encoded(made.encoder(file, 0, memoryview(b""), known=True), weights(BLOCK_BYTES))
    assert made.earlier.has(file.name) == keeps


def test_the_width_of_elements_is_that_of_the_middle_of_a_block() -> None:
    file = layout(("float32", MIB // 4), ("bfloat16", MIB), ("uint8", 3 * MIB), ("float64", MIB))
    at = encoder._widths(file)
    assert [at(byte) for byte in (0, MIB // 4 - 1, MIB // 4, MIB, 2 * MIB, 5 * MIB)] == [
        4,
        4,
        2,
        2,
        1,
        8,
    ]
    assert encoded(max_coder(file), weights(BLOCK_BYTES)).encoding == Encoding("planes", 2)


def test_empty_tensors_have_no_width() -> None:
    at = encoder._widths(layout(("float64", 0), ("float32", 0), ("bfloat16", 8)))
    assert at(0) == 2


@pytest.mark.parametrize("size", [1, 2, 3, 17, 65_536, 65_537, BLOCK_BYTES - 1, BLOCK_BYTES])
@pytest.mark.parametrize("width", [1, 2, 4, 8, 16])
def test_a_sample_is_of_whole_elements(size: int, width: int) -> None:
    data = memoryview(bytes(range(256)) * (BLOCK_BYTES // 256))[:size]
    part = sample_of(data, width)
    assert len(part) == min(size, 65_536)
    at = bytes(data).find(bytes(part[:64]))
    assert at % width == 0 or size <= 65_536


@pytest.mark.parametrize("size", [1, 2, 5, 100, 4097])
def test_odd_blocks_of_any_elements_come_back(size: int) -> None:
    for dtype in ("bool", "float8_e5m2", "bfloat16", "float32", "complex64", "complex128"):
        made = max_coder(layout((dtype, 16 * MIB)))
        block = weights(2 * size)[:size]
        encoded(made, block)
        near = bytearray(block)
        near[size // 2] ^= 1
        encoded(made, memoryview(bytes(near)), block)


def test_the_memory_is_bounded_by_what_was_given() -> None:
    earlier = Earlier(3 * BLOCK_BYTES + 5)
    made = LayoutEncoder(BF16, "max", earlier, "a test", known=True)
    for number in range(6):
        encoded(made, weights(BLOCK_BYTES, seed=number), number=number)
    assert earlier._bytes == 3 * BLOCK_BYTES
