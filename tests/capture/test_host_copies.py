"""Host state lands in slots bit by bit, however its elements lie in memory."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from hypothesis import given
from hypothesis import strategies as st

import laststep
from laststep.capture.gather import bits, fill
from laststep.capture.layout import ElementRange, StagingGroup
from laststep.state.tensors import TORCH_DTYPES

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

NAMES = [name for name, dtype in TORCH_DTYPES.items() if dtype.itemsize <= 16]


def random_bits(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    raw = torch.randint(256, (math.prod(shape) * dtype.itemsize,), dtype=torch.uint8)
    if dtype is torch.bool:
        raw %= 2
    return raw.view(dtype).view(shape)


@given(
    name=st.sampled_from(NAMES),
    shape=st.lists(st.integers(1, 5), min_size=2, max_size=4),
    data=st.data(),
)
def test_any_stretch_of_a_strided_tensor_is_copied_in_row_major_order(
    name: str, shape: list[int], data: st.DataObject
) -> None:
    dtype = TORCH_DTYPES[name]
    order = data.draw(st.permutations(range(len(shape))))
    step = data.draw(st.integers(1, 3))
    source = random_bits(dtype, *shape).permute(order)[::step]
    first = data.draw(st.integers(0, source.numel()))
    last = data.draw(st.integers(first, source.numel()))
    size = (last - first) * dtype.itemsize
    span = ElementRange(0, first, last, first == 0 and last == source.numel())
    group = StagingGroup(dtype=name, device="cpu", start=16, stop=16 + size, spans=(span,))
    buffer = torch.full((16 + size + 8,), 0xEE, dtype=torch.uint8)
    fill(buffer, [group], [source])
    whole = [0, *(slice(None) for _ in source.shape[1:])]
    rows = []
    for number in range(len(source)):
        whole[0] = number
        rows.append(bits(source)[tuple(whole)].reshape(-1))
    wanted = torch.cat(rows).view(torch.uint8)
    start = first * dtype.itemsize
    assert torch.equal(buffer[16 : 16 + size], wanted[start : start + size])
    assert bool((buffer[:16] == 0xEE).all())
    assert bool((buffer[16 + size :] == 0xEE).all())


def test_large_strided_state_goes_through_a_small_pool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    empty = torch.empty

    def note(*args: object, **options: object) -> torch.Tensor:
        tensor = empty(*args, **options)
        made.append(tensor.nbytes)
        return tensor

    state = {
        "t": torch.randn(5000, 3001).t(),
        "image": torch.randn(64, 3, 128, 130).to(memory_format=torch.channels_last),
        "even": torch.randn(9_000_000)[::2],
    }
    with laststep.Checkpointer(tmp_path, state=state, host_memory_bytes=64 << 20) as ckpt:
        monkeypatch.setattr(torch, "empty", note)
        ckpt.save(0)
        monkeypatch.undo()
        ckpt.wait()
    assert max(made, default=0) <= 16 << 20  # nothing is copied whole beside the pool
    loaded = laststep.load(tmp_path)["state"]
    assert all(torch.equal(loaded[name], state[name]) for name in state)
