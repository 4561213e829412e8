"""Codecs of blocks: what they keep, how small they make it, and what they refuse."""

from __future__ import annotations

import struct
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from expect import raises
from laststep.codecs.blocks import codec_named
from laststep.codecs.planes import CODECS
from laststep.constants import BLOCK_BYTES
from laststep.errors import CorruptError, UsageError

sys.path.insert(0, str(Path(__file__).parent))

from codec_checks import ELEMENT_BYTES, check_codec

if TYPE_CHECKING:
    from collections.abc import Iterator

    from laststep.codecs.blocks import BlockCodec

PLANES, SUBTRACT, PATCHES = (codec_named(name) for name in ("planes", "subtract", "patches"))
EVERY = pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
widths = st.sampled_from(ELEMENT_BYTES)


def weights(size_bytes: int) -> np.ndarray:
    return (np.random.default_rng(0).standard_normal(size_bytes // 4) * 0.02).astype("<f4")


def bf16(numbers: np.ndarray) -> np.ndarray:
    return (numbers.view("<u4") >> 16).astype("<u2")


def encoded(codec: BlockCodec, data: bytes, width: int, before: bytes | None = None) -> bytes:
    found = codec.encode(memoryview(data), width, None if before is None else memoryview(before))
    assert found is not None
    return found


def decoded(
    codec: BlockCodec, stored: bytes, size: int, width: int, before: bytes | None = None
) -> bytes:
    view = None if before is None else memoryview(before)
    return codec.decode(memoryview(stored), size, width, view)


@EVERY
def test_it_passes_the_checks_for_everybody(codec: BlockCodec) -> None:
    check_codec(codec)


@st.composite
def blocks(draw: st.DrawFn) -> tuple[bytes, int, bytes]:
    """A block that has something to gain, the width of its elements, and an earlier one."""
    width = draw(widths)
    pool = draw(st.lists(st.binary(min_size=width, max_size=width), min_size=1, max_size=4))
    count = draw(st.integers(0, 3000))
    chosen = np.random.default_rng(draw(st.integers(0, 99))).integers(0, len(pool), count)
    data = b"".join(pool[index] for index in chosen) + draw(st.binary(max_size=width - 1))
    before = bytearray(data)
    for at in draw(st.lists(st.integers(0, max(0, len(data) - 1)), max_size=30)):
        before[at : at + 1] = draw(st.binary(min_size=1, max_size=1)) if data else b""
    return data, width, bytes(before)


@EVERY
@given(block=blocks())
def test_what_was_encoded_is_decoded(codec: BlockCodec, block: tuple[bytes, int, bytes]) -> None:
    data, width, before = block
    stored = codec.encode(memoryview(data), width, memoryview(before))
    if stored is not None:
        assert len(stored) <= len(data)
        assert decoded(codec, stored, len(data), width, before) == data


@EVERY
@given(block=blocks(), damage=st.data())
def test_whatever_is_stored_it_is_the_declared_size_or_corrupt(
    codec: BlockCodec, block: tuple[bytes, int, bytes], damage: st.DataObject
) -> None:
    data, width, before = block
    stored = bytearray(codec.encode(memoryview(data), width, memoryview(before)) or b"")
    for _ in range(damage.draw(st.integers(0, 4))):
        at = damage.draw(st.integers(0, len(stored)))
        until = damage.draw(st.integers(at, min(at + 8, len(stored))))
        stored[at:until] = damage.draw(st.binary(max_size=8))
    size = damage.draw(st.sampled_from([len(data), len(data) + 1, 0, BLOCK_BYTES]))
    try:
        found = decoded(codec, bytes(stored), size, width, before)
    except CorruptError:
        return
    assert len(found) == size


@EVERY
@given(noise=st.binary(max_size=200), size=st.integers(0, 400), width=widths)
def test_noise_is_the_declared_size_or_corrupt(
    codec: BlockCodec, noise: bytes, size: int, width: int
) -> None:
    try:
        found = decoded(codec, noise, size, width, bytes(size))
    except CorruptError:
        return
    assert len(found) == size


def test_a_name_that_nobody_has_is_named_with_those_that_there_are() -> None:
    with raises(UsageError, "'zipped'", expected="patches, planes, subtract"):
        codec_named("zipped")


def test_without_zstandard_the_error_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "laststep.codecs.planes", None)
    with raises(UsageError, "'planes'", "zstandard", remedy="'laststep[compress]'"):
        codec_named("planes")


@EVERY
def test_a_view_of_numbers_is_encoded_as_its_bytes(codec: BlockCodec) -> None:
    numbers = np.zeros((30, 50), "<f4")
    data = numbers.tobytes()
    found = codec.encode(memoryview(numbers), 4, memoryview(numbers))
    assert found == encoded(codec, data, 4, data)


@EVERY
def test_memory_that_lies_at_an_odd_address_is_encoded_alike(codec: BlockCodec) -> None:
    data = weights(4096).tobytes() + bytes(4096)
    shifted = memoryview(b"x" + data)[1:]
    assert codec.encode(shifted, 4, shifted) == codec.encode(memoryview(data), 4, memoryview(data))


@pytest.fixture
def no_switching() -> Iterator[None]:
    """Another thread of Python runs only where this one lets go of the GIL by itself."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    yield
    sys.setswitchinterval(usual)


@pytest.mark.parametrize("name", ["planes", "subtract", "patches"])
@pytest.mark.parametrize("way", ["encode", "decode"])
def test_other_threads_run_meanwhile(name: str, way: str, no_switching: None) -> None:
    codec = codec_named(name)
    before = weights(BLOCK_BYTES).tobytes()
    data = bytes([before[0] ^ 1]) + before[1:]
    stored = memoryview(encoded(codec, data, 4, before))
    views = memoryview(data), memoryview(before)
    gate, ran = threading.Lock(), []
    gate.acquire()
    other = threading.Thread(target=lambda: ran.append(gate.acquire()))
    other.start()
    gate.release()
    for _ in range(10_000):  # the system may let the other one wait, however long the GIL is free
        if way == "encode":
            codec.encode(views[0], 4, views[1])
        else:
            codec.decode(stored, len(data), 4, views[1])
        if ran:
            break
    assert ran
    other.join()


# How small


def test_planes_of_floats_are_as_small_as_their_exponents_allow() -> None:
    full = weights(BLOCK_BYTES)
    half = bf16(weights(2 * BLOCK_BYTES)).tobytes()
    assert len(full.tobytes()) / len(encoded(PLANES, full.tobytes(), 4)) > 1.18
    assert len(half) / len(encoded(PLANES, half, 2)) > 1.45


def test_noise_is_left_to_others() -> None:
    noise = memoryview(np.random.default_rng(0).bytes(BLOCK_BYTES))
    assert PLANES.encode(noise, 4, None) is None
    assert SUBTRACT.encode(noise, 4, memoryview(bytes(BLOCK_BYTES))) is None


def test_small_differences_of_either_sign_are_small() -> None:
    old = weights(BLOCK_BYTES).view("<u4")
    steps = np.random.default_rng(1).integers(-100, 101, len(old)).astype("<u4", casting="unsafe")
    data = (old + steps).tobytes()
    assert len(data) / len(encoded(SUBTRACT, data, 4, old.tobytes())) > 3.9


def test_few_elements_that_differ_take_little() -> None:
    old = bf16(weights(2 * BLOCK_BYTES))
    new = old.copy()
    new[::200] += 1
    assert len(old.tobytes()) / len(encoded(PATCHES, new.tobytes(), 2, old.tobytes())) > 100
    assert len(encoded(PATCHES, old.tobytes(), 2, old.tobytes())) < 40


def test_patches_are_for_no_more_than_a_quarter() -> None:
    old = bf16(weights(8000))
    new = old.copy()
    new[: len(new) // 4] += 1
    assert PATCHES.encode(memoryview(new), 2, memoryview(old)) is not None
    new[len(new) // 4] += 1
    assert PATCHES.encode(memoryview(new), 2, memoryview(old)) is None


@pytest.mark.parametrize("codec", [SUBTRACT, PATCHES])
def test_without_a_block_before_there_is_no_difference(codec: BlockCodec) -> None:
    data = memoryview(bytes(1000))
    assert codec.encode(data, 4, None) is None
    assert codec.encode(data, 4, data[1:]) is None
    stored = encoded(codec, bytes(data), 4, bytes(data))
    for before in (None, bytes(999), bytes(1001)):
        with raises(CorruptError, expected="1000"):
            decoded(codec, stored, 1000, 4, before)


@pytest.mark.parametrize("gap", [0, 1, 127, 128, 129, 16383, 16384, 100_000, BLOCK_BYTES - 1])
def test_a_gap_of_any_length_comes_back(gap: int) -> None:
    old = bytes(BLOCK_BYTES)
    new = bytearray(old)
    new[gap] = new[-1] = 7
    assert decoded(PATCHES, encoded(PATCHES, bytes(new), 1, old), len(old), 1, old) == new


# What is stored


def frame(data: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(data)


def test_the_layout_of_planes_stays() -> None:
    packed = frame(bytes(50))
    stored = struct.pack("<2I", 50, len(packed)) + bytes(range(50)) + packed + b"t"
    expected = b"".join(bytes([low, 0]) for low in range(50)) + b"t"
    assert decoded(PLANES, stored, 101, 2) == expected


def test_the_layout_of_differences_stays() -> None:
    # Folded: 0 is 0, -1 is 1, 1 is 2; the tail is stored as it is.
    stored = struct.pack("<1I", 4) + bytes([0, 1, 2, 255])
    assert decoded(SUBTRACT, stored, 4, 1, bytes([9, 0, 255, 0])) == bytes([9, 255, 0, 128])


def patches(count: int, gaps: bytes, folded: bytes, *, gap_bytes: int | None = None) -> bytes:
    """Patches of elements of 1 byte, nothing packed."""
    told = len(gaps) if gap_bytes is None else gap_bytes
    return (
        struct.pack("<4I", count, told, len(gaps), len(folded))[:12]
        + gaps
        + struct.pack("<I", len(folded))
        + folded
    )


def test_the_layout_of_patches_stays() -> None:
    new = decoded(PATCHES, patches(2, b"\x03\x82\x01", b"\x02\x01"), 200, 1, bytes(200))
    expected = bytearray(200)
    expected[3], expected[3 + 130 + 1] = 1, 255
    assert new == expected


@pytest.mark.parametrize(
    ("stored", "found"),
    [
        (b"", "0"),
        (patches(51, bytes(51), bytes(51)), "51"),
        (patches(2, b"\x03", b"\x02\x01"), "2"),
        (patches(1, b"\x83\x80\x80\x00", b"\x02"), "1"),
        (patches(2, b"\x83\x80\x80\x00", b"\x02\x02"), "1"),
        (patches(3, b"\x83\x80\x80\x00\x00\x00", b"\x02\x02\x02"), "3"),
        (patches(2, b"\x03\x83", b"\x02\x02"), "1"),
        (patches(2, b"\x83\x83", b"\x02\x02"), "0"),
        (patches(2, b"\x03\x03\x83", b"\x02\x02"), "2"),
        (patches(1, b"\xc8\x01", b"\x02"), "200"),
        (patches(1, b"\x03", b"\x02", gap_bytes=2), ""),
        (patches(1, b"\x03", b"\x02\x02"), ""),
        (patches(1, b"\x03", b"\x02") + b"x", "1"),
    ],
)
def test_patches_that_do_not_fit_are_corrupt(stored: bytes, found: str) -> None:
    with raises(CorruptError, found=found):
        decoded(PATCHES, stored, 200, 1, bytes(200))


def one_plane(packed: bytes) -> bytes:
    return struct.pack("<I", len(packed)) + packed


def far_window() -> bytes:
    """A frame of 1,000 zeros that asks for a window of 128 MiB: one block of one repeated byte."""
    block = (1000 << 3 | 1 << 1 | 1).to_bytes(3, "little") + b"\0"
    return b"\x28\xb5\x2f\xfd\x40" + bytes([17 << 3]) + struct.pack("<H", 1000 - 256) + block


@pytest.mark.parametrize(
    "packed",
    [
        frame(bytes(1 << 24)),
        frame(bytes(999)),
        frame(bytes(1001)),
        frame(bytes(1000))[:-1],
        frame(bytes(1000)) + b"x",
        frame(bytes(1000)) + frame(b""),
        zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1000)),
        b"\x50\x2a\x4d\x18\x04\x00\x00\x00abcd" + frame(bytes(1000)),
        far_window()[:-1],
        b"noise",
        b"",
    ],
    ids=[
        "bomb",
        "short",
        "long",
        "cut",
        "behind",
        "two",
        "no size",
        "skipped",
        "window",
        "noise",
        "nothing",
    ],
)
def test_a_frame_that_is_not_of_this_plane_is_corrupt(packed: bytes) -> None:
    assert decoded(PLANES, one_plane(frame(bytes(1000))), 1000, 1) == bytes(1000)
    with raises(CorruptError, expected=True):
        decoded(PLANES, one_plane(packed), 1000, 1)


def test_a_window_is_never_made_that_is_larger_than_a_block() -> None:
    assert decoded(PLANES, one_plane(far_window()), 1000, 1) == bytes(1000)  # it needs none
    with pytest.raises(CorruptError):
        decoded(PLANES, one_plane(far_window()[:-1]), 1000, 1)
