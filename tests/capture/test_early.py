"""What was staged at the last save is found again only if each tensor is alive and in place."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from laststep.capture.copies import Remembered
from laststep.capture.gather import gather
from laststep.capture.layout import ElementRange, Layout, StagingGroup, Way
from laststep.state.tensors import TORCH_DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable

BYTES = 48


def layout() -> Layout:
    """As if two of three tensors were staged on a device."""
    spans = (ElementRange(2, 0, 12, True), ElementRange(0, 0, 12, True))
    group = StagingGroup(dtype="float32", device="cuda:0", start=0, stop=2 * BYTES, spans=spans)
    return Layout(
        ways=(Way.STAGED,) * 3,
        staging_bytes={"cuda:0": 2 * BYTES},
        gathers={"cuda:0": (group,)},
        chunks=(),
        direct={},
    )


def test_tensors_in_place_are_held_in_the_order_in_which_they_are_staged() -> None:
    sources = tuple(torch.randn(3, 4) for _ in range(3))
    remembered = Remembered(layout(), sources)
    held = remembered.in_place()
    assert held is not None
    assert [id(one) for one in held] == [id(sources[2]), id(sources[0])]
    assert remembered.are_among(sources, held)
    assert remembered.are_among((sources[0], torch.ones(1), sources[2]), held)
    assert not remembered.are_among((sources[0], sources[1], sources[2].clone()), held)


@pytest.mark.parametrize(
    "change",
    [
        lambda t: setattr(t, "data", t.data.clone()),
        lambda t: setattr(t, "data", t.data[1:]),
        lambda t: setattr(t, "data", t.data[:2]),
        lambda t: t.resize_(2, 2),
        lambda t: t.set_(torch.randn(3, 4)),
        lambda t: setattr(t, "data", t.data.half()),
        lambda t: t.as_strided_((3, 4), (1, 3)),
    ],
)
def test_a_tensor_that_moved_or_shrank_is_not_in_place(
    change: Callable[[torch.Tensor], None],
) -> None:
    sources = tuple(torch.randn(3, 4) for _ in range(3))
    remembered = Remembered(layout(), sources)
    change(sources[1])  # not staged on a device
    assert remembered.in_place() is not None
    change(sources[0])
    assert remembered.in_place() is None


def test_a_tensor_that_is_gone_is_not_held_and_not_in_place() -> None:
    sources = [torch.randn(3, 4) for _ in range(3)]
    remembered = Remembered(layout(), sources)
    sources[2] = torch.randn(3, 4)
    assert remembered.in_place() is None


@pytest.mark.parametrize("name", TORCH_DTYPES)
@pytest.mark.parametrize("shapes", [[(), (), ()], [(), (1,), (1, 1)], [()]])
def test_tensors_without_dimensions_are_gathered_bit_by_bit(
    name: str, shapes: list[tuple[int, ...]]
) -> None:
    dtype = TORCH_DTYPES[name]
    raw = torch.randint(2, (len(shapes), dtype.itemsize), dtype=torch.uint8)
    sources = [one.view(dtype).view(shape) for one, shape in zip(raw, shapes, strict=True)]
    spans = tuple(ElementRange(piece, 0, 1, True) for piece in range(len(shapes)))
    size = len(shapes) * dtype.itemsize
    buffer = torch.full((size + 32,), 77, dtype=torch.uint8)
    group = StagingGroup(dtype=name, device="cpu", start=16, stop=16 + size, spans=spans)
    gather(buffer, [group], sources)
    assert buffer[16 : 16 + size].tolist() == raw.flatten().tolist()
    assert set(buffer[:16].tolist() + buffer[16 + size :].tolist()) == {77}
