"""Safetensors files of any library are read, and lengths that cannot be are refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from laststep.errors import CorruptError
from laststep.format.layout import decode_plain, region_bytes_of

names = st.text(st.characters(exclude_categories=["Cs"]), max_size=6).filter(
    lambda name: name != "__metadata__"
)
shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(names, shapes, max_size=5))
def test_files_of_the_safetensors_library_are_read(
    shapes_by_name: dict[str, tuple[int, ...]],
) -> None:
    tensors = {name: torch.zeros(shape) for name, shape in shapes_by_name.items()}
    data = save(tensors, metadata={"format": "pt"})
    size = region_bytes_of(data[:8], size_bytes=len(data), where="here")
    entries = decode_plain(memoryview(data)[:size], data_bytes=len(data) - size, where="here")
    assert {entry.name: entry.shape for entry in entries} == shapes_by_name
    assert all(entry.dtype == "float32" for entry in entries)


def test_a_file_without_metadata_in_any_order_is_read() -> None:
    text = (
        b'{"b":{"dtype":"I8","shape":[1],"data_offsets":[2,3]},'
        b'"a":{"dtype":"I16","shape":[],"data_offsets":[0,2]}}'
    )
    region = len(text).to_bytes(8, "little") + text
    found = decode_plain(region, data_bytes=3, where="here")
    assert [(entry.name, entry.dtype) for entry in found] == [("a", "int16"), ("b", "int8")]


@pytest.mark.parametrize(
    "prefix", [b"", b"1234567", (200_000_000).to_bytes(8, "little"), b"\xff" * 8]
)
def test_a_length_that_cannot_be_is_corrupt(prefix: bytes) -> None:
    with pytest.raises(CorruptError):
        region_bytes_of(prefix, size_bytes=1 << 40, where="here")
