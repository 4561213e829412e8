"""Rounding to bf16 and fp16 is bit for bit that of torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from laststep.codecs.rounding import rounded

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def by_torch(bits: np.ndarray, dtype: str) -> bytes:
    low = torch.from_numpy(bits.view(np.float32).copy()).to(DTYPES[dtype])
    return low.view(torch.int16).numpy().tobytes()


ODD = [
    0x00000000,
    0x80000000,  # zeros
    0x00000001,
    0x807FFFFF,
    0x00008000,
    0x00018000,  # denormals, and ties among them
    0x7F800000,
    0xFF800000,
    0x7F7FFFFF,
    0xFF7FFFFF,  # infinite, and the largest
    0x3F808000,
    0x3F818000,
    0x3F807FFF,
    0x3F808001,  # ties of bf16, and beside them
    0x3F801000,
    0x3F803000,
    0x477FEFFF,
    0x477FF000,
    0x33000000,
    0x33000001,  # the same of fp16
    0x7F800001,
    0x7FC00000,
    0x7FFFFFFF,
    0xFFFFFFFF,
    0xFF800001,
    0x7FA12345,  # NaN
]


@pytest.mark.parametrize("dtype", DTYPES)
def test_odd_values_are_rounded_as_torch_does(dtype: str) -> None:
    bits = np.array(ODD, np.uint32)
    assert bytes(rounded(bits.tobytes(), dtype)) == by_torch(bits, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_many_values_of_any_bits_are_rounded_as_torch_does(dtype: str) -> None:
    bits = np.random.default_rng(7).integers(0, 1 << 32, 300_001, np.uint32)
    assert bytes(rounded(bits.tobytes(), dtype)) == by_torch(bits, dtype)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, (1 << 32) - 1), max_size=40), st.sampled_from(sorted(DTYPES)))
def test_any_values_are_rounded_as_torch_does(values: list[int], dtype: str) -> None:
    bits = np.array(values, np.uint32)
    assert bytes(rounded(bits.tobytes(), dtype)) == by_torch(bits, dtype)


def test_no_values_come_to_no_bytes() -> None:
    assert bytes(rounded(b"", "float16")) == b""
