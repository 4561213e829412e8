"""What is rounded on request: which tensors, to which numbers, wherever chunks begin and end."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from laststep.codecs.rounding import to_bf16, to_int8
from laststep.flush.rounding import Rounding
from laststep.format.layout import FileLayout, Part, TensorEntry

floats = arrays.arrays(np.float32, st.integers(0, 300), elements=st.floats(width=32))


def plan(*tensors: tuple[str, str, int], item: str | None = "o", **more: object) -> FileLayout:
    entries, at = [], 0
    for name, dtype, size in tensors:
        count = size // (4 if dtype in ("float32", "int32") else 1)
        entries.append(TensorEntry(name, dtype, (count,), at, at + size))
        at += size
    return FileLayout(
        name="f", item=item, header_bytes=4096, tensor_bytes=at, tensors=tuple(entries), **more
    )


@given(floats)
def test_bf16_is_what_torch_rounds_to(numbers: np.ndarray) -> None:
    data = bytearray(numbers.tobytes())
    to_bf16(memoryview(data), 0)
    found = np.frombuffer(data, np.float32)
    wanted = torch.from_numpy(numbers.copy()).bfloat16().float().numpy()
    is_number = ~np.isnan(numbers) & (np.isfinite(wanted) | np.isinf(numbers))
    assert (found.view(np.uint32) & 0xFFFF == 0).all()
    assert (found.view(np.uint32) == wanted.view(np.uint32))[is_number].all()
    assert (np.isnan(found) == np.isnan(numbers)).all()


def test_many_numbers_of_any_bits_are_rounded_alike() -> None:
    bits = np.random.default_rng(7).integers(0, 1 << 32, 300_001, np.uint32)
    found = bits.copy()
    to_bf16(memoryview(found).cast("B"), 0)
    wanted = torch.from_numpy(bits.view(np.float32)).bfloat16().float().numpy().view(np.uint32)
    is_finite = (wanted & 0x7FFFFFFF) < 0x7F800000
    assert (found == wanted)[is_finite].all()
    assert (np.isinf(bits.view(np.float32)) == np.isinf(found.view(np.float32))).all()


@given(floats)
def test_int8_is_the_nearest_of_255_multiples_in_each_group(numbers: np.ndarray) -> None:
    data = bytearray(numbers.tobytes())
    to_int8(memoryview(data), 0)
    found = np.frombuffer(data, np.float32)
    for at in range(0, len(numbers), 64):
        old, new = numbers[at : at + 64].astype(np.float64), found[at : at + 64].astype(np.float64)
        largest = np.abs(old).max()
        if not largest < 2.0**127:
            assert new.tobytes() == old.tobytes()
        elif largest:
            # The scale is a power of two of which between 63.5 and 127 come to the largest.
            assert np.abs(new - old).max() <= max(largest / 127, 2.0**-149)
            assert len(np.unique(new)) <= 255


@given(numbers=floats, cut=st.integers(0, 300), at=st.integers(0, 200))
@settings(max_examples=50)
def test_it_does_not_matter_where_chunks_begin(numbers: np.ndarray, cut: int, at: int) -> None:
    cut = min(cut, len(numbers)) // 64 * 64 - at % 64
    if cut <= 0:
        return
    whole, parts = bytearray(numbers.tobytes()), bytearray(numbers.tobytes())
    to_int8(memoryview(whole), 4 * at)
    to_int8(memoryview(parts)[: 4 * cut], 4 * at)
    to_int8(memoryview(parts)[4 * cut :], 4 * (at + cut))
    assert whole == parts


def test_only_floats_of_32_bits_that_a_pattern_names_are_rounded() -> None:
    asked = plan(("a/exp_avg", "float32", 8), ("b/exp_avg", "int32", 8), ("c", "float32", 8))
    rounding = Rounding.of(asked, {"o/*exp_avg": "bf16"})
    assert rounding.names == {"a/exp_avg": "bf16"}
    numbers = np.full(6, 1.001, np.float32)
    data = bytearray(numbers.tobytes())
    rounding.apply(0, memoryview(data))
    assert np.frombuffer(data, np.float32).tolist() == [1.0, 1.0, *numbers[2:].tolist()]


def test_patterns_name_items_parts_and_what_lies_in_shared_files() -> None:
    assert Rounding.of(plan(("w", "float32", 4)), {"o": "int8"}).names == {"w": "int8"}
    assert Rounding.of(plan(("w", "float32", 4)), {"p": "int8"}) is None
    shared = plan(("p/w", "float32", 4), item=None)
    assert Rounding.of(shared, {"p/w": "int8"}).names == {"p/w": "int8"}
    part = plan(("w~6at4", "float32", 4), parts={"w~6at4": Part("w", (8,), (4,))})
    assert Rounding.of(part, {"o/w": "bf16"}).names == {"w~6at4": "bf16"}
    first = Rounding.of(plan(("w", "float32", 4)), {"o/w": "bf16", "o/*": "int8"})
    assert first.names == {"w": "bf16"}


@pytest.mark.parametrize("start", [0, 4, 8, 12, 16])
def test_chunks_that_begin_anywhere_round_what_they_have(start: int) -> None:
    rounding = Rounding.of(plan(("a", "float32", 8), ("b", "float32", 8)), {"o/b": "bf16"})
    whole = np.full(4, 1.001, np.float32)
    data = bytearray(whole.tobytes()[start:])
    rounding.apply(start, memoryview(data))
    wanted = np.array([1.001, 1.001, 1.0, 1.0], np.float32)
    assert data == wanted.tobytes()[start:]


def test_scalars_are_left_alone() -> None:
    asked = plan(("w", "float32", 8))
    step = TensorEntry("step", "float32", (), 8, 12)
    asked = msgspec.structs.replace(asked, tensors=(*asked.tensors, step), tensor_bytes=12)
    assert Rounding.of(asked, {"o": "bf16"}).names == {"w": "bf16"}


def test_nothing_becomes_infinite() -> None:
    largest = np.finfo(np.float32).max
    data = bytearray(np.array([largest, -largest, np.inf, 3.4e38], np.float32).tobytes())
    to_bf16(memoryview(data), 0)
    found = np.frombuffer(data, np.float32)
    assert np.isfinite(found).tolist() == [True, True, False, True]


@given(floats)
def test_what_was_rounded_stays_as_it_is(numbers: np.ndarray) -> None:
    for way in (to_bf16, to_int8):
        once = bytearray(numbers.tobytes())
        way(memoryview(once), 0)
        twice = bytearray(once)
        way(memoryview(twice), 0)
        assert once == twice


def test_a_group_is_as_fine_as_its_largest_number_allows() -> None:
    data = bytearray(np.array([127, 1, 3, 5, *[0] * 60], np.float32).tobytes())
    to_int8(memoryview(data), 0)
    assert np.frombuffer(data, np.float32)[:4].tolist() == [127, 1, 3, 5]
