"""Device memory for staging is counted right, whatever fails. On stand-ins for a device."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch

from laststep.capture import device
from laststep.capture.capture import Capturer
from laststep.capture.device import DeviceStaging
from laststep.capture.layout import Layout, Way
from laststep.capture.mover import Job
from laststep.errors import LaststepError, StorageError
from laststep.settings import Capture


def test_what_is_taken_together_counts_as_set_aside_and_is_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device, "spare_bytes", lambda _device, margin: max(500 - margin, 0))
    monkeypatch.setattr(torch.cuda, "MemPool", lambda **_: None)
    monkeypatch.setattr(torch.cuda, "use_mem_pool", lambda *_, **__: contextlib.nullcontext())
    made = DeviceStaging("cpu", 100)
    assert made.room() == 400
    assert made.room(with_margin=True) == 500
    buffers = [made.take(300), made.take(50)]
    assert made.room() == 400
    for buffer in buffers:
        made.give_back(buffer.nbytes)
    assert made.room() == 750


class Failing:
    """A gatherer whose copies fail."""

    def run(self, *_: object) -> None:
        raise RuntimeError("the launch failed")


def test_memory_for_staging_that_fails_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a stand-in for a device: what counts is what is taken and given back."""
    tensors = [torch.randn(100)]
    capturer = Capturer.__new__(Capturer)
    taken: list[int] = []

    class Device:
        def take(self, size: int) -> torch.Tensor:
            taken.append(size)
            return torch.empty(size, dtype=torch.uint8)

        def give_back(self, size: int) -> None:
            taken.remove(size)

        def forget(self) -> None: ...

    capturer._staging = {"cuda:0": Device()}  # type: ignore[dict-item]
    copies = SimpleNamespace(gatherers={"cuda:0": Failing()})
    capturer._mode = Capture.DEVICE
    monkeypatch.setattr(torch.cuda, "device", lambda _: _Nothing())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr("laststep.capture.capture.record", lambda *_, **__: None)
    monkeypatch.setattr(capturer, "_streams", _Nothing(), raising=False)
    staged = Layout(
        ways=(Way.STAGED,), staging_bytes={"cuda:0": 400}, gathers={}, chunks=(), direct={}
    )
    job = Job(plan=None, layout=staged, sources=tensors, sink=None, began_s=0.0)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="the launch failed"):
        capturer._stage_or_choose_again(job, copies, None)  # type: ignore[arg-type]
    assert taken == [400]
    capturer._let_go(job)
    assert taken == []


def test_staging_is_given_back_though_a_device_cannot_say_that_its_copies_have_ended() -> None:
    given: list[int] = []
    capturer = Capturer.__new__(Capturer)
    capturer._staging = {"cuda:0": SimpleNamespace(give_back=given.append)}  # type: ignore[dict-item]

    def settle(_: Job) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    capturer._mover = SimpleNamespace(settle=settle)  # type: ignore[assignment]
    told: list[LaststepError] = []
    job = Job(
        plan=None,
        layout=None,
        sources=(),
        began_s=0.0,  # type: ignore[arg-type]
        sink=SimpleNamespace(failed=told.append),
    )
    job.staging["cuda:0"] = torch.empty(400, dtype=torch.uint8)
    job.error = StorageError("a copy failed")
    with pytest.raises(RuntimeError, match="illegal"):  # which its thread logs
        capturer._end(job)
    assert given == [400]
    assert [error.what for error in told] == ["a copy failed"]
    assert job.over.is_set()


class _Nothing:
    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def stream(self, _: str) -> None: ...
