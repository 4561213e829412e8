"""Runs of derived tensors, and what is stored of their blocks. Indexes that name masters are in
test_index.py."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laststep.constants import BLOCK_BYTES
from laststep.format.deriving import DerivedRun, DerivedRuns, pack, problem, unpack
from laststep.format.layout import TensorEntry

ENTRIES = (
    TensorEntry("norm", "float32", (2,), 0, 8),
    TensorEntry("w", "bfloat16", (BLOCK_BYTES,), 8, 8 + 2 * BLOCK_BYTES),
    TensorEntry("none", "bfloat16", (0,), 8 + 2 * BLOCK_BYTES, 8 + 2 * BLOCK_BYTES),
    TensorEntry("b", "float16", (3,), 8 + 2 * BLOCK_BYTES, 14 + 2 * BLOCK_BYTES),
)


def test_runs_are_cut_at_blocks_and_leave_out_what_is_empty() -> None:
    runs = DerivedRuns(ENTRIES, ["w", "b", "none"])
    assert runs.of_block(0) == [DerivedRun("w", "bfloat16", 8, BLOCK_BYTES, 0)]
    assert runs.of_block(1) == [
        DerivedRun("w", "bfloat16", BLOCK_BYTES, 2 * BLOCK_BYTES, BLOCK_BYTES - 8)
    ]
    end = 2 * BLOCK_BYTES
    assert runs.of_block(2) == [
        DerivedRun("w", "bfloat16", end, end + 8, end - 8),
        DerivedRun("b", "float16", end + 8, end + 14, 0),
    ]
    assert list(runs.blocks()) == [0, 1, 2, 2]


def test_a_run_is_the_rounding_of_twice_as_many_bytes_of_its_master() -> None:
    assert DerivedRun("w", "bfloat16", 100, 110, 6).of_master(1000) == (1012, 1032)


@given(st.data())
def test_what_is_packed_is_unpacked(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 60))
    cuts = sorted(data.draw(st.lists(st.integers(0, size), max_size=40)))
    runs = [
        DerivedRun("t", "bfloat16", 500 + a, 500 + b, 0)
        for a, b in zip(cuts[::2], cuts[1::2], strict=False)
    ]
    rounded = [data.draw(st.booleans()) for _ in runs]
    block = data.draw(st.binary(min_size=size, max_size=size))
    stored = pack(memoryview(block), 500, runs, rounded)
    into = memoryview(bytearray(size))
    left = unpack(memoryview(stored), into, 500, runs)
    assert left == [run for run, is_so in zip(runs, rounded, strict=True) if is_so]
    for run in left:
        into[run.start - 500 : run.stop - 500] = block[run.start - 500 : run.stop - 500]
    assert bytes(into) == block
    assert len(stored) == -(-len(runs) // 8) + size - sum(run.stop - run.start for run in left)


@pytest.mark.parametrize(
    "stored", [b"", b"\x00", b"\x01", b"\x00" * 12, b"\x03" + bytes(8), b"\x04" + bytes(10)]
)
def test_what_was_never_packed_is_refused(stored: bytes) -> None:
    runs = [DerivedRun("t", "bfloat16", 2, 4, 0), DerivedRun("u", "bfloat16", 6, 10, 0)]
    with pytest.raises(ValueError, match=f"^{len(stored)} "):
        unpack(memoryview(stored), memoryview(bytearray(10)), 0, runs)


@pytest.mark.parametrize(
    ("derived", "is_sound"),
    [(["w", "b", "none"], True), ([], True), (["w", "norm"], False), (["x"], False)],
    ids=["low precision", "nothing", "a tensor of fp32", "a tensor that is not there"],
)
def test_only_tensors_of_low_precision_are_derived(derived: list[str], is_sound: bool) -> None:
    assert (problem(ENTRIES, derived) is None) == is_sound


def test_a_tensor_at_an_odd_byte_is_not_derived() -> None:
    assert problem([TensorEntry("w", "bfloat16", (4,), 2, 10)], ["w"]) is None
    assert problem([TensorEntry("w", "bfloat16", (4,), 1, 9)], ["w"]) is not None
