"""Headers: identity, a bound that holds, and files that the safetensors library takes."""

from __future__ import annotations

import contextlib
import tempfile
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from safetensors import safe_open
from safetensors.torch import load_file, save

from laststep.codecs.digests import block_digests, digest
from laststep.errors import Corrupt, Usage
from laststep.format.header import (
    Header,
    ObjectEntry,
    decode_header,
    encode_header,
    reserve_bytes,
)
from laststep.format.safetensors import TensorEntry, decode_plain, region_bytes_of
from laststep.terms import BLOCK_BYTES, DTYPES

if TYPE_CHECKING:
    from pathlib import Path

names = st.text(st.characters(exclude_categories=["Cs"]), max_size=6).filter(
    lambda name: name != "__metadata__"
)
shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)


def laid_out(
    tensors: list[tuple[str, str, tuple[int, ...]]],
    objects: list[tuple[str, bytes]],
    item: str | None = None,
) -> tuple[Header, bytes]:
    """A header and the data that it describes, with the tensors in the order given."""
    entries: list[TensorEntry] = []
    at = 0
    for name, dtype, shape in tensors:
        size = DTYPES[dtype].size_bytes
        for side in shape:
            size *= side
        entry = TensorEntry(name=name, dtype=dtype, shape=shape, start=at, stop=at + size)
        entries.append(entry)
        at += size
    data = bytes(i % 251 for i in range(at))
    stored: list[ObjectEntry] = []
    for name, content in objects:
        start = len(data)
        data += content
        stored.append(ObjectEntry(name=name, start=start, stop=len(data), digest=digest(content)))
    header = Header(
        item=item,
        tensors=tuple(entries),
        objects=tuple(stored),
        tensor_bytes=at,
        blocks=block_digests(memoryview(data)[:at]),
    )
    return header, data


def encoded(header: Header) -> bytes:
    region_bytes = reserve_bytes(
        item=header.item,
        tensors=header.tensors,
        object_names=[stored.name for stored in header.objects],
        tensor_bytes=header.tensor_bytes,
    )
    return encode_header(header, region_bytes=region_bytes)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Header, bytes]:
    all_names = draw(st.lists(names, max_size=6, unique=True))
    cut = draw(st.integers(0, len(all_names)))
    dtypes = st.sampled_from(sorted(DTYPES))
    tensors = [(name, draw(dtypes), draw(shapes)) for name in all_names[:cut]]
    objects = [(name, draw(st.binary(max_size=20))) for name in all_names[cut:]]
    return laid_out(tensors, objects, draw(st.none() | names))


@settings(max_examples=200, deadline=None)
@given(layouts())
def test_a_header_survives_and_safetensors_takes_the_file(layout: tuple[Header, bytes]) -> None:
    header, data = layout
    region = encoded(header)
    assert len(region) % 4096 == 0
    assert decode_header(region, data_bytes=len(data), where="here") == header
    with tempfile.NamedTemporaryFile(suffix=".safetensors") as file:
        file.write(region + data)
        file.flush()
        loaded = load_file(file.name)
    assert set(loaded) == {t.name for t in header.tensors} | {o.name for o in header.objects}
    for tensor in header.tensors:
        found = loaded[tensor.name]
        stored = found.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        assert stored == data[tensor.start : tensor.stop]
        if DTYPES[tensor.dtype].code is not None:
            assert str(found.dtype) == f"torch.{tensor.dtype}"
            assert tuple(found.shape) == tensor.shape


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_safetensors_opens_a_file_of_every_dtype(dtype: str, tmp_path: Path) -> None:
    header, data = laid_out([("w", dtype, (2, 3))], [("$tree", b"{}")], "model")
    path = tmp_path / "model.safetensors"
    path.write_bytes(encoded(header) + data)
    with safe_open(path, framework="pt") as file:
        assert set(file.keys()) == {"w", "$tree"}
        assert file.metadata()["format"] == "pt"
        known = DTYPES[dtype].code is not None
        assert list(file.get_slice("w").get_shape()) == ([2, 3] if known else [len(data) - 2])


def test_the_reserved_region_suffices_for_the_largest_objects() -> None:
    header, _ = laid_out([("w", "float32", (BLOCK_BYTES // 2,))], [])
    for count in range(60):
        object_names = [f"item{i}/$tree" for i in range(count)]
        at, huge = header.tensor_bytes, (1 << 63) // (count + 1)
        objects = tuple(
            ObjectEntry(
                name=name, start=at + i * huge, stop=at + (i + 1) * huge, digest=b"\xff" * 16
            )
            for i, name in enumerate(object_names)
        )
        region_bytes = reserve_bytes(
            item=None, tensors=header.tensors, object_names=object_names, tensor_bytes=at
        )
        if count == 0 or objects[-1].stop < 1 << 63:
            encode_header(replace(header, objects=objects), region_bytes=region_bytes)


def test_a_region_that_is_too_small_is_refused() -> None:
    header, _ = laid_out([(f"tensor{i}", "int8", (1,)) for i in range(100)], [])
    with pytest.raises(Usage, match="were reserved"):
        encode_header(header, region_bytes=4096)


@pytest.mark.parametrize("region_bytes", [0, -4096, 4095, 1 << 40])
def test_a_region_of_unsound_size_is_refused(region_bytes: int) -> None:
    with pytest.raises(Usage, match="multiple of 4096"):
        encode_header(laid_out([], [])[0], region_bytes=region_bytes)


def test_a_header_beyond_the_limit_is_refused_before_anything_is_written() -> None:
    header, _ = laid_out([("x" * (65 << 20), "int8", (1,))], [])
    with pytest.raises(Usage, match="split the item"):
        encoded(header)


def unsound() -> list[tuple[str, Header]]:
    header, _ = laid_out([("a", "int8", (2,)), ("b", "int8", (3,))], [("o", b"xy")])
    a, b = header.tensors
    o = header.objects[0]
    return [
        ("a hole", replace(header, tensors=(a, b._replace(start=3, stop=6)), tensor_bytes=6)),
        ("a name twice", replace(header, tensors=(a, b._replace(name="a")))),
        ("an object's name twice", replace(header, objects=(replace(o, name="a"),))),
        ("the reserved name", replace(header, tensors=(a, b._replace(name="__metadata__")))),
        ("a wrong shape", replace(header, tensors=(a, b._replace(shape=(4,))))),
        ("negative sides", replace(header, tensors=(a, b._replace(shape=(-3, -1))))),
        ("too few blocks", replace(header, blocks=b"")),
        ("a short digest", replace(header, objects=(replace(o, digest=b""),))),
        ("a wrong tensor area", replace(header, tensor_bytes=4)),
        ("no Unicode", replace(header, tensors=(a, b._replace(name="\ud800")))),
        ("an unknown dtype", replace(header, tensors=(a, b._replace(dtype="int7")))),
    ]


@pytest.mark.parametrize(("what", "header"), unsound(), ids=lambda value: str(value)[:20])
def test_an_unsound_header_is_never_written(what: str, header: Header) -> None:
    with pytest.raises(Usage, match="cannot write a header"):
        encode_header(header, region_bytes=4096)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_flipped_bit_is_corrupt_or_harmless_but_never_another_error(data: st.DataObject) -> None:
    header, content = laid_out([("a", "complex128", (2,)), ("b", "int8", (3,))], [("o", b"xy")])
    region = bytearray(encoded(header))
    length = len(region.rstrip(b" "))
    bit = data.draw(st.integers(0, 8 * length - 1))
    region[bit // 8] ^= 1 << bit % 8
    with contextlib.suppress(Corrupt, Usage):  # Usage: a version that reads as a later one
        decode_header(bytes(region), data_bytes=len(content), where="here")


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
    with pytest.raises(Corrupt):
        region_bytes_of(prefix, size_bytes=1 << 40, where="here")


def test_a_hundred_thousand_tensors_survive() -> None:
    header, data = laid_out(
        [(f"layers.{i}.weight", "bfloat16", (2, 2)) for i in range(100_000)], []
    )
    assert decode_header(encoded(header), data_bytes=len(data), where="here") == header
