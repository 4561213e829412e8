"""A table of addresses is used again only for what it was made from."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from laststep.capture import gather as gathering
from laststep.capture.gather import Gatherer
from laststep.capture.layout import ElementRange, StagingGroup
from laststep.errors import TornCaptureError

if TYPE_CHECKING:
    from collections.abc import Callable


class Rows:
    """In the place of the kernel: copies by addresses of the host."""

    def __init__(self, _kernels: object, rows: list[tuple[int, int, int]], _stream: object) -> None:
        self.rows = rows

    def run(self, buffer: torch.Tensor) -> None:
        for address, at, size in self.rows:
            ctypes.memmove(buffer.data_ptr() + at, address, size)


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(gathering, "kernels_on", lambda _device: object())
    monkeypatch.setattr(gathering, "CopyTable", Rows)
    return SimpleNamespace(device="cuda:0")


def gatherer() -> Gatherer:
    spans = (ElementRange(0, 0, 12, True), ElementRange(1, 0, 12, True))
    return Gatherer([StagingGroup(dtype="float32", device="cuda:0", start=0, stop=96, spans=spans)])


def test_a_tensor_of_other_strides_at_the_same_address_is_copied_as_it_lies(stream: Any) -> None:
    memory, other = torch.arange(12.0), torch.ones(12)
    gathers, buffer = gatherer(), torch.zeros(96, dtype=torch.uint8)
    for strides in ((4, 1), (1, 3), (4, 1)):
        tensor = memory.as_strided((3, 4), strides)
        gathers.run(buffer, [tensor, other], stream)
        assert torch.equal(buffer.view(torch.float32)[:12], tensor.reshape(-1))
        assert gathers.can_run_again() is tensor.is_contiguous()


def test_what_is_strided_throughout_is_prepared_once(
    stream: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    tabulate: Callable[..., None] = Gatherer._tabulate
    monkeypatch.setattr(
        Gatherer, "_tabulate", lambda self, *given: (made.append(1), tabulate(self, *given))
    )
    tensors = [torch.randn(4, 3).T, torch.randn(4, 3).T]
    gathers = gatherer()
    assert gathers.prepare(tensors, stream)
    assert gathers.prepare(tensors, stream)
    assert made == [1]


def test_a_tensor_that_is_smaller_than_planned_is_never_read_past_its_end(stream: Any) -> None:
    memory = torch.arange(24.0)
    gathers = gatherer()
    assert gathers.prepare([memory[:12], memory[12:]], stream)
    for _ in range(2):
        with pytest.raises(TornCaptureError):
            gathers.prepare([memory[:12], memory[12:20]], stream)
    assert gathers.prepare([memory[:12], memory[12:]], stream)
