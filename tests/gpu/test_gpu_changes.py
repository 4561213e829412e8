"""CUDA state that is swapped, replaced or freed under a capture: stored as at save(), or torn."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

import laststep
from laststep.capture import capture, gather, ring
from laststep.capture.kernels import kernels_on, prepare_kernels

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)
ELEMENTS = 64 << 20
"""Of each of four parameters: 1 GiB in all, through a pool of 128 MiB."""
PATIENCE_S = 120


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    torch.manual_seed(0)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()  # what an earlier test needed at its peak is not ours
    yield
    torch.cuda.synchronize()


@pytest.fixture(params=["kernels", "plain"])
def way_of_copying(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With the kernels, and as where there is no compiler."""
    prepare_kernels(CUDA)
    assert kernels_on(CUDA) is not None
    if request.param == "plain":
        for module in (ring, gather):
            monkeypatch.setattr(module, "kernels_on", lambda _: None)
    return str(request.param)


class Training:
    """A module of four large parameters and some small ones, and its optimizer."""

    def __init__(self, elements: int = ELEMENTS) -> None:
        self.model = torch.nn.Module()
        for number in range(4):
            large = torch.nn.Parameter(torch.randn(elements + number, device="cuda"))
            self.model.register_parameter(f"large{number}", large)
            small = torch.nn.Parameter(torch.randn(7 + number, device="cuda").bfloat16())
            self.model.register_parameter(f"small{number}", small)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)

    def step(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = None
        self.model.small0.grad = torch.ones_like(self.model.small0)
        self.optimizer.step()

    def copied(self) -> dict[str, torch.Tensor]:
        return {name: tensor.cpu().clone() for name, tensor in self.model.state_dict().items()}


def opened(run: Path, training: Training, mode: str) -> laststep.Checkpointer:
    return laststep.Checkpointer(
        run,
        model=training.model,
        optimizer=training.optimizer,
        options=laststep.Options(capture=mode),
        host_memory_bytes=128 << 20,
    )


def is_stored(run: Path, step: int, wanted: dict[str, torch.Tensor]) -> bool:
    found = laststep.load(run, step=step)["model"]
    return all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


def test_weights_swapped_for_their_average_and_back_are_never_stored(
    tmp_path: Path, way_of_copying: str
) -> None:
    training = Training()
    training.step()
    checkpointer = opened(tmp_path, training, "lazy")
    training.step()
    wanted = training.copied()
    handle = checkpointer.save(0)
    live = [parameter.data for parameter in training.model.parameters()]
    kept = [one.clone() for one in live]
    for one in live:
        one.mul_(0.5)
    torch.cuda._sleep(200_000_000)  # an evaluation
    for one, was in zip(live, kept, strict=True):
        one.copy_(was)
    training.step()
    try:
        handle.wait(PATIENCE_S)
    except laststep.TornCaptureError:
        assert not handle.committed.done()
    else:
        assert is_stored(tmp_path, 0, wanted)
    wanted = training.copied()
    checkpointer.save(1).wait(PATIENCE_S)
    assert is_stored(tmp_path, 1, wanted)
    checkpointer.close()


def test_a_lazy_save_that_nobody_disturbs_is_exact_through_a_small_pool(
    tmp_path: Path, way_of_copying: str
) -> None:
    training = Training()
    with opened(tmp_path, training, "lazy") as checkpointer:
        for number in range(3):
            training.step()
            wanted = training.copied()
            handle = checkpointer.save(number)
            assert "device direct" in handle.report.capture
            training.step()  # the fence holds it back
            handle.wait(PATIENCE_S)
            assert is_stored(tmp_path, number, wanted)


def replaced(parameter: torch.Tensor) -> None:
    parameter.data = torch.zeros(parameter.numel() + 1000, device="cuda")


def replaced_by_one(parameter: torch.Tensor) -> None:
    parameter.data = torch.zeros(1, device="cuda")


def retyped(parameter: torch.Tensor) -> None:
    parameter.data = parameter.data.half()


def freed(parameter: torch.Tensor) -> None:
    parameter.untyped_storage().resize_(0)


def shrunk(parameter: torch.Tensor) -> None:
    parameter.untyped_storage().resize_(parameter.nbytes // 2)


@pytest.mark.parametrize("change", [replaced, replaced_by_one, retyped, freed, shrunk])
@pytest.mark.parametrize("mode", ["lazy", "device", "auto", "blocking"])
def test_what_becomes_of_a_parameter_after_save_spoils_nothing(
    tmp_path: Path, mode: str, change: Callable[[torch.Tensor], None]
) -> None:
    training = Training(ELEMENTS // 4)
    checkpointer = opened(tmp_path, training, mode)
    training.step()
    checkpointer.save(0).wait(PATIENCE_S)
    training.step()
    wanted = training.copied()
    handle = checkpointer.save(1)
    parameter = training.model.large2
    change(parameter)
    torch.empty(ELEMENTS // 2, device="cuda").fill_(7)  # whoever gets the memory next
    try:
        handle.wait(PATIENCE_S)
    except laststep.TornCaptureError:
        assert mode == "lazy"
        assert change in (freed, shrunk)
    else:
        assert is_stored(tmp_path, 1, wanted)
    parameter.data = wanted["large2"].cuda()
    training.step()
    wanted = training.copied()
    checkpointer.save(2).wait(PATIENCE_S)
    assert is_stored(tmp_path, 2, wanted)
    checkpointer.close()


@pytest.mark.parametrize("loss", [freed, shrunk])
@pytest.mark.parametrize("mode", ["lazy", "device", "auto", "blocking"])
def test_a_parameter_without_its_memory_is_named_and_the_next_save_works(
    tmp_path: Path, mode: str, loss: Callable[[torch.Tensor], None]
) -> None:
    training = Training(1 << 20)
    with opened(tmp_path, training, mode) as checkpointer:
        for number in (0, 1):  # the second begins early, where it can
            training.step()
            checkpointer.save(number).wait(PATIENCE_S)
        kept = training.model.large1.detach().clone()
        loss(training.model.large1)
        with pytest.raises(laststep.UsageError, match="large1"):
            checkpointer.save(2)
        training.model.large1.data = kept
        wanted = training.copied()
        checkpointer.save(2).wait(PATIENCE_S)
        torch.cuda.synchronize()  # no error of the device is left behind
        assert is_stored(tmp_path, 2, wanted)


def test_without_room_for_a_ring_a_lazy_save_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training(1 << 20)
    monkeypatch.setattr(capture, "ring_chunks", lambda *_: 0)
    with opened(tmp_path, training, "lazy") as checkpointer:
        training.step()
        wanted = training.copied()
        handle = checkpointer.save(0)
        for parameter in training.model.parameters():
            parameter.data.zero_()
        handle.wait(PATIENCE_S)
    assert is_stored(tmp_path, 0, wanted)
