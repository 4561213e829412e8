"""New tensors that a restore makes: large ones lie in huge pages, which are touched in no time."""

from __future__ import annotations

from pathlib import Path

import pytest

from laststep.process.system import HUGE_PAGE_BYTES
from laststep.state.tensors import allocate
from smaps import flags_at


def test_a_large_new_tensor_lies_in_huge_pages_as_far_as_it_fills_them() -> None:
    allowed = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not allowed.exists() or "[never]" in allowed.read_text():
        pytest.skip("this system has none")
    made = allocate("float32", (64 << 20,), "cpu")
    first = -(-made.data_ptr() // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    last = made.data_ptr() + made.nbytes - HUGE_PAGE_BYTES
    assert "hg" in flags_at(first)
    assert "hg" in flags_at(last)
    assert "hg" not in flags_at(made.data_ptr() - 1)


@pytest.mark.parametrize("shape", [(), (0,), (3,)])
def test_a_small_new_tensor_is_one_like_any_other(shape: tuple[int, ...]) -> None:
    made = allocate("int64", shape, "cpu")
    made.fill_(5)
    assert made.shape == shape
    assert bool((made == 5).all())
