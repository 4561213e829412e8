"""Capture and restore on a CUDA device: the state at save() is stored, whatever comes after."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
import torch

import laststep
from expect import raises
from laststep.capture.kernels import Fingerprint, kernels_on, prepare_kernels

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)
MODES = ["device", "lazy", "auto", "blocking"]


class Net(torch.nn.Module):
    """Enough to have buffers that forward changes, odd shapes and strided weights."""

    def __init__(self, width: int = 512) -> None:
        super().__init__()
        self.first = torch.nn.Linear(width, width)
        self.norm = torch.nn.BatchNorm1d(width)
        self.conv = torch.nn.Conv2d(3, 5, 3)
        self.odd = torch.nn.Parameter(torch.randn(7, 3, dtype=torch.bfloat16))
        self.last = torch.nn.Linear(width, width, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x))).square().mean() + self.odd.float().sum() * 1e-3


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    torch.manual_seed(0)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()  # what an earlier test needed at its peak is not ours
    yield
    torch.cuda.synchronize()


def make(**options: object) -> tuple[Net, torch.optim.Optimizer]:
    net = Net().cuda()
    net.conv.to(memory_format=torch.channels_last)
    return net, torch.optim.AdamW(net.parameters(), lr=1e-2, **options)


def step(net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    net(torch.randn(64, 512, device="cuda")).backward()
    optimizer.step()


def snapshot(net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    torch.cuda.synchronize()
    tensors = [t.clone() for t in net.state_dict().values()]
    for state in optimizer.state.values():
        tensors += [v.clone() for v in state.values() if isinstance(v, torch.Tensor)]
    return tensors


def reload(run: Path, **options: object) -> list[torch.Tensor]:
    torch.manual_seed(99)
    net, optimizer = make(**options)
    with laststep.Checkpointer(run, model=net, optimizer=optimizer) as ckpt:
        ckpt.restore()
        return snapshot(net, optimizer)


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}, {"capturable": True}])
@pytest.mark.parametrize("mode", MODES)
def test_every_way_stores_the_state_at_save(
    tmp_path: Path, mode: str, options: dict[str, bool]
) -> None:
    net, optimizer = make(**options)
    with laststep.Checkpointer(
        tmp_path, model=net, optimizer=optimizer, options=laststep.Options(capture=mode)
    ) as ckpt:
        for number in range(6):
            step(net, optimizer)
            wanted = snapshot(net, optimizer)
            handle = ckpt.save(number)
            for _ in range(3):
                step(net, optimizer)
            handle.wait()
            assert same(reload(tmp_path, **options), wanted), f"save {number}"


@pytest.mark.parametrize("mode", ["device", "auto"])
def test_writes_behind_the_optimizer_do_not_reach_a_staged_save(tmp_path: Path, mode: str) -> None:
    net, optimizer = make()
    with laststep.Checkpointer(
        tmp_path, model=net, optimizer=optimizer, options=laststep.Options(capture=mode)
    ) as ckpt:
        for number in range(3):
            step(net, optimizer)
            wanted = snapshot(net, optimizer)
            handle = ckpt.save(number)
            for parameter in net.parameters():
                parameter.data.mul_(2)
            with torch.no_grad():
                net.norm.running_mean.add_(1)
            handle.wait()
            assert same(reload(tmp_path), wanted)


def test_a_lazy_save_whose_state_changes_is_torn_and_the_next_one_blocks(tmp_path: Path) -> None:
    net, optimizer = make()
    # A big parameter, so that the change comes before the copy.
    net.big = torch.nn.Parameter(torch.randn(200_000_000, device="cuda"))
    net.big.data.neg_()  # the first one loads its kernel, for longer than the copy takes
    ckpt = laststep.Checkpointer(
        tmp_path, model=net, optimizer=optimizer, options=laststep.Options(capture="lazy")
    )
    step(net, optimizer)
    handle = ckpt.save(1)
    net.big.data.neg_()
    with raises(laststep.TornCaptureError, where="model/big"):
        handle.wait()
    step(net, optimizer)
    with torch.no_grad():
        wanted = net.big.detach().clone()
    handle = ckpt.save(2)
    net.big.data.neg_()
    handle.wait()
    ckpt.close()
    assert [c.step for c in laststep.open(tmp_path)] == [2]
    assert torch.equal(laststep.open(tmp_path)[2].tensor("model/big")[:], wanted.cpu())


def test_steps_replayed_from_a_graph_are_captured_exactly(tmp_path: Path) -> None:
    net, optimizer = make(capturable=True)
    still = torch.randn(64, 512, device="cuda")

    def train() -> None:
        optimizer.zero_grad(set_to_none=False)
        net(still).backward()
        optimizer.step()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            train()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        train()
    for mode in MODES:
        run = tmp_path / mode
        with laststep.Checkpointer(
            run, model=net, optimizer=optimizer, options=laststep.Options(capture=mode)
        ) as ckpt:
            for number in range(3):
                graph.replay()
                wanted = snapshot(net, optimizer)
                handle = ckpt.save(number)
                graph.replay()
                handle.wait()
                assert same(reload(run, capturable=True), wanted), mode


def test_an_optimizer_in_backward_waits_for_a_lazy_capture(tmp_path: Path) -> None:
    net = Net().cuda()
    each = {p: torch.optim.AdamW([p], lr=1e-2) for p in net.parameters()}

    def hook(parameter: torch.Tensor) -> None:
        each[parameter].step()
        each[parameter].zero_grad()

    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(hook)
    for mode in ("lazy", "auto"):
        run = tmp_path / mode
        items = {"model": net} | {f"opt{i}": o for i, o in enumerate(each.values())}
        with laststep.Checkpointer(
            run, items=items, options=laststep.Options(capture=mode)
        ) as ckpt:
            for number in range(3):
                net(torch.randn(64, 512, device="cuda")).backward()
                torch.cuda.synchronize()
                wanted = [t.clone() for t in net.state_dict().values()]
                handle = ckpt.save(number)
                net(torch.randn(64, 512, device="cuda")).backward()
                handle.wait()
                other = Net().cuda()
                with laststep.Checkpointer(run, model=other) as reader:
                    reader.restore(only=["model"])
                assert same(list(other.state_dict().values()), wanted), mode


def test_a_compiled_module_and_an_ema_are_stored_as_they_were(tmp_path: Path) -> None:
    net, optimizer = make()
    average = torch.optim.swa_utils.AveragedModel(net)
    compiled = torch.compile(net, backend="eager")
    with laststep.Checkpointer(tmp_path, model=compiled, optimizer=optimizer, ema=average) as ckpt:
        for number in range(3):
            step(compiled, optimizer)
            average.update_parameters(net)
            wanted = [t.clone() for t in average.state_dict().values()]
            handle = ckpt.save(number)
            step(compiled, optimizer)
            average.update_parameters(net)
            handle.wait()
    plain, _ = make()
    other = torch.optim.swa_utils.AveragedModel(plain)
    with laststep.Checkpointer(tmp_path, model=plain, ema=other) as reader:
        reader.restore(only=["model", "ema"])
    assert same(list(other.state_dict().values()), wanted)


def test_a_state_larger_than_the_pool_streams_through_it(tmp_path: Path) -> None:
    big = {"x": torch.randn(100_000_000, device="cuda"), "y": torch.arange(10, device="cuda")}
    for mode in MODES:
        with laststep.Checkpointer(
            tmp_path / mode,
            state=big,
            options=laststep.Options(capture=mode),
            host_memory_bytes=64 << 20,
        ) as ckpt:
            ckpt.save(0).wait()
        loaded = laststep.load(tmp_path / mode)
        assert torch.equal(loaded["state"]["x"], big["x"].cpu()), mode


def test_tensors_on_another_stream_are_joined_when_named(tmp_path: Path) -> None:
    state = {"x": torch.zeros(50_000_000, device="cuda")}
    side = torch.cuda.Stream()
    with laststep.Checkpointer(tmp_path, state=state) as ckpt:
        for number in range(3):
            with torch.cuda.stream(side):
                torch.cuda._sleep(50_000_000)
                state["x"].fill_(number + 1)
            ckpt.save(number, streams=[side]).wait()
            assert laststep.open(tmp_path)[number].tensor("state/x")[-1].item() == number + 1


def test_tensors_that_move_between_saves_are_found_again(tmp_path: Path) -> None:
    state: dict[str, torch.Tensor] = {}
    with laststep.Checkpointer(
        tmp_path, state=state, options=laststep.Options(capture="device")
    ) as ckpt:
        for number in range(6):
            if number % 2 == 0:
                state["x"] = torch.full((1_000_003,), float(number), device="cuda")
                state["y"] = torch.full((5,), number, device="cuda", dtype=torch.int8)
                torch.cuda.empty_cache()
            else:
                state["x"].add_(1)
            wanted = {k: v.cpu().clone() for k, v in state.items()}
            ckpt.save(number).wait()
            loaded = laststep.load(tmp_path)["state"]
            assert all(torch.equal(loaded[k], wanted[k]) for k in wanted)


def test_training_that_runs_out_of_memory_gets_what_was_set_aside(tmp_path: Path) -> None:
    state = {"x": torch.randn(500_000_000, device="cuda")}
    with laststep.Checkpointer(tmp_path, state=state) as ckpt:
        ckpt.save(0).wait()
        free, _ = torch.cuda.mem_get_info()
        piece = 256 << 20
        # More than is free, without what was set aside for saves.
        hog = [
            torch.empty(piece, dtype=torch.uint8, device="cuda") for _ in range(free // piece + 4)
        ]
        state["x"].neg_()
        ckpt.save(1).wait()  # there is no room to stage any more, so this one is captured directly
        assert torch.equal(laststep.load(tmp_path)["state"]["x"], state["x"].cpu())
        del hog


def test_restore_writes_into_the_live_tensors(tmp_path: Path) -> None:
    net, optimizer = make()
    step(net, optimizer)
    with laststep.Checkpointer(tmp_path, model=net, optimizer=optimizer) as ckpt:
        ckpt.save(0).wait()
        addresses = [t.data_ptr() for t in net.state_dict().values()]
        wanted = snapshot(net, optimizer)
        step(net, optimizer)
        ckpt.restore()
        assert addresses == [t.data_ptr() for t in net.state_dict().values()]
        assert same(snapshot(net, optimizer), wanted)


def test_rng_of_the_device_is_restored(tmp_path: Path) -> None:
    with laststep.Checkpointer(tmp_path, rng=laststep.RNG()) as ckpt:
        ckpt.save(0).wait()
        wanted = torch.rand(5, device="cuda")
        ckpt.restore()
        assert torch.equal(torch.rand(5, device="cuda"), wanted)


def _flip_sign(x: torch.Tensor) -> None:
    x[12345] *= -1


def _swap(x: torch.Tensor) -> None:
    x[[10, 20]] = x[[20, 10]]


def _negate_two(x: torch.Tensor) -> None:
    x[[5, 7]] *= -1


@pytest.mark.parametrize("change", [_flip_sign, _swap, _negate_two, torch.Tensor.neg_])
@pytest.mark.parametrize("fast", [True, False])
def test_fingerprints_notice_sign_flips_and_swaps(
    change: Callable[[torch.Tensor], object], fast: bool
) -> None:
    prepare_kernels(CUDA)
    kernels = kernels_on(CUDA)
    assert kernels is not None
    x = torch.randn(1_000_001, device="cuda")
    place = [(x.data_ptr(), x.nbytes)]
    fingerprint = Fingerprint(place, kernels if fast else None, torch.cuda.Stream())

    def sums() -> torch.Tensor:
        return fingerprint.sums(0, 1, lambda _: x.view(torch.uint8))[1]

    before = sums()
    assert torch.equal(before, sums())
    change(x)
    assert not torch.equal(before, sums())


@pytest.mark.parametrize("size", [1, 3, 4, 63, 4099, (1 << 18) + 5, 1 << 20])
def test_a_fingerprint_by_kernels_depends_on_the_bytes_alone(size: int) -> None:
    prepare_kernels(CUDA)
    kernels = kernels_on(CUDA)
    assert kernels is not None
    raw = torch.randint(0, 255, (size,), dtype=torch.uint8, device="cuda")
    wanted: torch.Tensor | None = None
    for at in (0, 1, 2, 3, 4, 8, 16):
        room = torch.zeros(size + 16, dtype=torch.uint8, device="cuda")
        room[at : at + size] = raw
        place = [(room.data_ptr() + at, size)]
        found = Fingerprint(place, kernels, torch.cuda.Stream()).sums(0, 1, lambda _: raw)[1]
        assert wanted is None or torch.equal(found, wanted), at
        wanted = found
        room[at + size - 1] ^= 1
        other = Fingerprint(place, kernels, torch.cuda.Stream()).sums(0, 1, lambda _: raw)[1]
        assert not torch.equal(other, wanted), at


def test_enqueueing_a_thousand_tensors_makes_few_launches(tmp_path: Path) -> None:
    """Time is a benchmark's business; launches that do not grow with tensors keep it small."""
    state = {f"t{i}": torch.randn(64, device="cuda") for i in range(1000)}
    with laststep.Checkpointer(
        tmp_path, state=state, options=laststep.Options(capture="device")
    ) as ckpt:
        deadline = time.monotonic() + 60
        while kernels_on(CUDA) is None and time.monotonic() < deadline:
            time.sleep(0.05)
        ckpt.save(0).wait()
        ckpt.save(1).wait()
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True
        ) as profile:
            ckpt.save(2)
            torch.cuda.synchronize()
        ckpt.wait()
    kernels = [e for e in profile.events() if "copy_" in e.name and "memcpy" not in e.name.lower()]
    assert 1 <= len(kernels) <= 3


@pytest.mark.parametrize("mode", ["device", "auto"])
def test_copies_of_training_get_through_while_a_capture_copies(tmp_path: Path, mode: str) -> None:
    """A `loss.item()` waits for some of the capture's copies, not for all of them."""
    weights = torch.zeros(4 << 28, device="cuda")  # 4 GiB: 32 batches of copies
    loss = torch.zeros((), device="cuda")
    with laststep.Checkpointer(
        tmp_path, weights=weights, options=laststep.Options(capture=mode)
    ) as ckpt:
        ckpt.save(1).committed.wait()  # from now on there is memory for all of it
        weights.add_(1)
        handle = ckpt.save(2)
        seen = 0
        while not handle.captured.over_within(0):
            loss.item()
            seen += 1
    assert seen > 4
