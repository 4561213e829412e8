"""Layouts: headers that every safetensors library takes, and unsound layouts that are refused."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from msgspec.structs import replace
from safetensors import safe_open
from safetensors.torch import load, load_file

from expect import raises
from laststep.constants import BLOCK_BYTES, DTYPES, MAX_HEADER_BYTES
from laststep.errors import UsageError
from laststep.format.layout import FileLayout, Part, TensorEntry, decode_plain, header_bytes_of

sys.path.insert(0, str(Path(__file__).parent))

from layouts import layout_of, layouts


def some_bytes(size: int) -> bytes:
    return bytes(number % 251 for number in range(size))


@settings(max_examples=50, deadline=None)
@given(layouts())
def test_safetensors_loads_every_data_file(layout: FileLayout) -> None:
    header, data = layout.header(), some_bytes(layout.tensor_bytes)
    assert layout.problem() is None
    assert len(header) == layout.header_bytes
    assert len(header) % 4096 == 0
    with tempfile.NamedTemporaryFile(suffix=".safetensors") as file:
        file.write(header + data)
        file.flush()
        loaded = load_file(file.name)
    assert set(loaded) == {entry.name for entry in layout.tensors}
    for entry in layout.tensors:
        found = loaded[entry.name]
        stored = found.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        assert stored == data[entry.start : entry.stop]
        if DTYPES[entry.dtype].code is not None:
            assert (str(found.dtype), tuple(found.shape)) == (f"torch.{entry.dtype}", entry.shape)


@settings(max_examples=50, deadline=None)
@given(layouts())
def test_a_header_says_what_the_layout_says(layout: FileLayout) -> None:
    parsed = json.loads(layout.header()[8:])
    assert parsed.pop("__metadata__") == {"format": "pt"}
    assert list(parsed) == [entry.name for entry in layout.tensors]
    found = decode_plain(layout.header(), data_bytes=layout.tensor_bytes, where="here")
    known = [entry for entry in layout.tensors if DTYPES[entry.dtype].code is not None]
    assert [entry for entry in found if entry.name in {one.name for one in known}] == sorted(
        known, key=lambda entry: (entry.start, entry.stop)
    )


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_torch_opens_a_file_of_every_dtype(dtype: str, tmp_path: Path) -> None:
    layout = layout_of(("w", dtype, (2, 3)))
    path = tmp_path / layout.name
    path.write_bytes(layout.header() + some_bytes(layout.tensor_bytes))
    is_known = DTYPES[dtype].code is not None
    shape = [2, 3] if is_known else [layout.tensor_bytes]
    with safe_open(path, framework="pt") as file:
        assert list(file.keys()) == ["w"]
        assert file.metadata() == {"format": "pt"}
        assert list(file.get_slice("w").get_shape()) == shape
    loaded = load_file(path)["w"]
    assert str(loaded.dtype) == (f"torch.{dtype}" if is_known else "torch.uint8")


def test_a_file_without_tensors_has_a_header() -> None:
    layout = layout_of()
    assert (layout.size_bytes, layout.block_count) == (4096, 0)
    assert load(layout.header()) == {}


@pytest.mark.parametrize(
    ("size", "blocks"),
    [
        (1, [1]),
        (BLOCK_BYTES, [BLOCK_BYTES]),
        (BLOCK_BYTES + 1, [BLOCK_BYTES, 1]),
        (2 * BLOCK_BYTES, [BLOCK_BYTES, BLOCK_BYTES]),
    ],
)
def test_only_the_last_block_is_short(size: int, blocks: list[int]) -> None:
    layout = layout_of(("w", "uint8", (size,)))
    assert [layout.block_size(number) for number in range(layout.block_count)] == blocks


def test_a_header_grows_by_pages() -> None:
    """The name of a tensor makes the header longer, byte by byte."""
    sizes = set()
    for length in range(3_900, 4_100):
        layout = layout_of(("x" * length, "uint8", (1,)))
        used = len(layout.header().rstrip(b" "))
        assert 0 <= layout.header_bytes - used < 4096
        sizes.add(layout.header_bytes)
    assert sizes == {4096, 8192}


def test_a_header_beyond_the_limit_is_refused() -> None:
    with raises(UsageError, expected="67108864", found="67112960"):
        layout_of(("x" * (MAX_HEADER_BYTES + 1), "int8", (1,)))


def test_a_name_that_is_no_unicode_is_refused() -> None:
    with raises(UsageError, found="surrogates"):
        header_bytes_of([TensorEntry("\ud800", "int8", (1,), 0, 1)])


def test_an_unknown_dtype_is_refused() -> None:
    with raises(UsageError, where="w", found="'int7'"):
        header_bytes_of([TensorEntry("w", "int7", (1,), 0, 1)])


SOUND = layout_of(("a", "int8", (2,)), ("b", "int8", (3,)))
A, B = SOUND.tensors
UNSOUND = {
    "a hole": {"tensors": (A, B._replace(start=3, stop=6)), "tensor_bytes": 6},
    "an overlap": {"tensors": (A, B._replace(start=1, stop=4)), "tensor_bytes": 4},
    "a name twice": {"tensors": (A, B._replace(name="a"))},
    "the reserved name": {"tensors": (A, B._replace(name="__metadata__"))},
    "a wrong shape": {"tensors": (A, B._replace(shape=(4,)))},
    "negative sides": {"tensors": (A, B._replace(shape=(-3, -1)))},
    "an unknown dtype": {"tensors": (A, B._replace(dtype="int7"))},
    "an unmentioned byte": {"tensor_bytes": 6},
    "a byte too few": {"tensor_bytes": 4},
    "no header": {"header_bytes": 0},
    "a header of half a page": {"header_bytes": 2048},
    "a header beyond the limit": {"header_bytes": MAX_HEADER_BYTES + 4096},
    "a part of nothing": {"parts": {"c": Part("c", (4,), (0,))}},
    "a part beyond its tensor": {"parts": {"a": Part("c", (4,), (3,))}},
    "a part before its tensor": {"parts": {"a": Part("c", (4,), (-1,))}},
    "a part of other dimensions": {"parts": {"a": Part("c", (4, 1), (0, 0))}},
    "a part without a name": {"parts": {"a": Part("", (4,), (0,))}},
    "a part of a tensor beyond 63 bits": {"parts": {"a": Part("c", (1 << 63,), (0,))}},
}


@pytest.mark.parametrize("changes", UNSOUND.values(), ids=UNSOUND)
def test_an_unsound_layout_has_a_problem(changes: dict[str, object]) -> None:
    assert SOUND.problem() is None
    assert replace(SOUND, **changes).problem()
