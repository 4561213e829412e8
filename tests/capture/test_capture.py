"""What is stored is the state at save(), by whichever way it was captured."""

from __future__ import annotations

import threading
from threading import Semaphore
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

import laststep
from cases import long
from expect import raises
from laststep.capture import mover
from laststep.capture.mover import Job
from laststep.process import signals
from waiting import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

POOL_BYTES = 64 << 20


class Gate:
    """Holds the capture thread at its first copy until it is opened."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.opened = threading.Event()

    def pass_through(self) -> None:
        if threading.current_thread().name == "laststep-capture":
            self.reached.set()
            assert self.opened.wait(PATIENCE_S)


@pytest.fixture
def held_back(monkeypatch: pytest.MonkeyPatch) -> Semaphore:
    """Released by every thread that comes to the fence while a capture stands there."""
    came, hold_back = Semaphore(0), Job.hold_back

    def note(job: Job) -> None:
        came.release()
        hold_back(job)

    monkeypatch.setattr(Job, "hold_back", note)
    return came


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate()
    land = mover.land

    def held(*arguments: object) -> None:
        made.pass_through()
        land(*arguments)

    monkeypatch.setattr(mover, "land", held)
    yield made
    made.opened.set()


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "plain": lambda m: torch.optim.AdamW(m.parameters(), lr=0.1, foreach=False),
    "foreach": lambda m: torch.optim.AdamW(m.parameters(), lr=0.1, foreach=True),
    "fused": lambda m: torch.optim.AdamW(m.parameters(), lr=0.1, fused=True),
    "momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
}


def backward(model: nn.Module) -> None:
    model(torch.randn(8, 6)).square().sum().backward()


def snapshot(model: nn.Module, *optimizers: torch.optim.Optimizer) -> list[torch.Tensor]:
    tensors = list(model.state_dict().values())
    for optimizer in optimizers:
        for state in optimizer.state.values():
            tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
    return [tensor.detach().clone() for tensor in tensors]


def stored(run: Path, step: int, *, optimizers: int = 1, kind: str = "plain") -> list[torch.Tensor]:
    """The same tensors as of that step, read through a fresh training."""
    model = network()
    made = [OPTIMIZERS[kind](model) for _ in range(optimizers)]
    items = {f"optimizer{n}": optimizer for n, optimizer in enumerate(made)}
    with laststep.Checkpointer(
        run,
        model=model,
        items=items,
        options=laststep.Options(flush="thread"),
        host_memory_bytes=POOL_BYTES,
    ) as checkpointer:
        checkpointer.restore(step)
    return snapshot(model, *made)


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def lazy(run: Path, model: nn.Module, *optimizers: torch.optim.Optimizer) -> laststep.Checkpointer:
    items = {f"optimizer{n}": optimizer for n, optimizer in enumerate(optimizers)}
    return laststep.Checkpointer(
        run,
        model=model,
        items=items,
        options=laststep.Options(capture="lazy", flush="thread"),
        host_memory_bytes=POOL_BYTES,
    )


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_lazy_capture_holds_the_optimizer_back_until_it_has_the_state_at_save(
    kind: str, tmp_path: Path, gate: Gate, held_back: Semaphore
) -> None:
    model = network()
    optimizer = OPTIMIZERS[kind](model)
    with lazy(tmp_path / "run", model, optimizer) as checkpointer:
        backward(model)
        optimizer.step()  # the fence is seen to work
        expected = snapshot(model, optimizer)
        handle = checkpointer.save(0)
        assert gate.reached.wait(PATIENCE_S)
        assert not handle.captured.done()
        for _ in range(2):  # gradients are accumulated meanwhile, and batch statistics move
            backward(model)
        training = threading.Thread(target=optimizer.step)
        training.start()
        assert held_back.acquire(timeout=PATIENCE_S)
        training.join(0.2)
        assert training.is_alive()
        parameters = [p.detach().clone() for p in model.parameters()]
        gate.opened.set()
        training.join(PATIENCE_S)
        assert not training.is_alive()
        after = [p.detach() for p in model.parameters()]
        assert not any(torch.equal(a, b) for a, b in zip(parameters, after, strict=True))
        handle.wait(PATIENCE_S)
        assert handle.report.fence_s > 0.1
    assert equal(stored(tmp_path / "run", 0, kind=kind), expected)


def test_every_optimizer_is_held_back(tmp_path: Path, gate: Gate, held_back: Semaphore) -> None:
    model = network()
    halves = [
        torch.optim.SGD(model[0].parameters(), lr=0.1),
        torch.optim.SGD(model[2].parameters(), lr=0.1),
    ]
    with lazy(tmp_path / "run", model, *halves) as checkpointer:
        backward(model)
        for optimizer in halves:
            optimizer.step()
        expected = snapshot(model)
        checkpointer.save(0)
        assert gate.reached.wait(PATIENCE_S)
        steps = [threading.Thread(target=optimizer.step) for optimizer in halves]
        for step in steps:
            step.start()
            assert held_back.acquire(timeout=PATIENCE_S)
        for step in steps:
            step.join(0.1)
            assert step.is_alive()
        gate.opened.set()
        for step in steps:
            step.join(PATIENCE_S)
    assert torch.equal(laststep.open(tmp_path / "run")[0].tensor("model/0.weight")[:], expected[0])


def test_an_optimizer_that_steps_inside_of_backward_is_held_back(
    tmp_path: Path, gate: Gate, held_back: Semaphore
) -> None:
    model = network()
    each = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def step_now(parameter: torch.Tensor) -> None:
        each[parameter].step()
        each[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step_now)
    with laststep.Checkpointer(
        tmp_path / "run",
        model=model,
        options=laststep.Options(capture="lazy", flush="thread"),
        host_memory_bytes=POOL_BYTES,
    ) as checkpointer:
        backward(model)
        expected = snapshot(model)
        checkpointer.save(0)
        assert gate.reached.wait(PATIENCE_S)
        training = threading.Thread(target=backward, args=(model,))
        training.start()
        assert held_back.acquire(timeout=PATIENCE_S)
        training.join(0.2)
        assert training.is_alive()
        gate.opened.set()
        training.join(PATIENCE_S)
        checkpointer.wait()
        fresh = network()
    with laststep.Checkpointer(
        tmp_path / "run", model=fresh, options=laststep.Options(flush="thread")
    ) as checkpointer:
        checkpointer.restore()
    assert equal(snapshot(fresh), expected)


@torch.no_grad()
def by_data(model: nn.Module) -> None:
    model[0].weight.data[3, 2] += 1


@torch.no_grad()
def in_place(model: nn.Module) -> None:
    model[2].bias.mul_(-1)


@torch.no_grad()
def by_swap(model: nn.Module) -> None:
    first = model[0].weight[0].clone()
    model[0].weight[0] = model[0].weight[1]
    model[0].weight[1] = first


def test_what_is_torn_is_named_with_its_item(tmp_path: Path, gate: Gate) -> None:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    other = {"0.weight": torch.zeros(1000)}
    checkpointer = laststep.Checkpointer(
        tmp_path / "run",
        model=model,
        optimizer=optimizer,
        other=other,
        options=laststep.Options(capture="lazy", flush="thread"),
        host_memory_bytes=POOL_BYTES,
    )
    backward(model)
    optimizer.step()
    handle = checkpointer.save(0)
    assert gate.reached.wait(PATIENCE_S)
    other["0.weight"].fill_(1)
    gate.opened.set()
    with pytest.raises(laststep.TornCaptureError) as caught:
        handle.wait(PATIENCE_S)
    assert caught.value.where == "other/0.weight"
    checkpointer.close()


@pytest.mark.parametrize(
    ("change", "torn"),
    [(by_data, "model/0.weight"), (in_place, "model/2.bias"), (by_swap, "model/0.weight")],
)
def test_a_change_behind_the_back_of_a_lazy_capture_is_torn_and_later_saves_block(
    change: Callable[[nn.Module], None], torn: str, tmp_path: Path, gate: Gate
) -> None:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    checkpointer = lazy(tmp_path / "run", model, optimizer)
    backward(model)
    optimizer.step()
    handle = checkpointer.save(0)
    assert gate.reached.wait(PATIENCE_S)
    change(model)
    gate.opened.set()
    with raises(laststep.TornCaptureError, where=torn, expected=True):
        handle.wait(PATIENCE_S)
    assert not handle.committed.done()
    optimizer.step()
    gate.reached.clear()
    gate.opened.clear()
    expected = snapshot(model, optimizer)
    later = checkpointer.save(1)  # what was told is not told again
    in_place(model)  # captured before save() returned
    assert not gate.reached.is_set()
    gate.opened.set()
    later.wait(PATIENCE_S)
    checkpointer.close()
    assert laststep.open(tmp_path / "run").steps() == [1]
    assert equal(stored(tmp_path / "run", 1), expected)


def test_lazy_is_not_trusted_before_the_fence_was_seen_to_fire(tmp_path: Path, gate: Gate) -> None:
    model = network()
    expected = snapshot(model)
    with lazy(tmp_path / "run", model) as checkpointer:
        handle = checkpointer.save(0)
        by_data(model)
        handle.wait(PATIENCE_S)
        assert not gate.reached.is_set()
        fresh = network()
    with laststep.Checkpointer(
        tmp_path / "run", model=fresh, options=laststep.Options(flush="thread")
    ) as checkpointer:
        checkpointer.restore()
    assert equal(snapshot(fresh), expected)


def test_batch_statistics_that_move_in_forward_do_not_tear_a_lazy_capture(
    tmp_path: Path, gate: Gate
) -> None:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with lazy(tmp_path / "run", model, optimizer) as checkpointer:
        backward(model)
        optimizer.step()
        expected = snapshot(model, optimizer)
        checkpointer.save(0)
        assert gate.reached.wait(PATIENCE_S)
        backward(model)
        gate.opened.set()
    assert equal(stored(tmp_path / "run", 0), expected)


@pytest.mark.parametrize(
    ("flush", "way"),
    [
        ("process", "auto"),
        ("thread", "lazy"),
        ("thread", "blocking"),
        *long(("thread", "auto"), ("process", "lazy"), ("process", "blocking")),
    ],
)
def test_a_state_larger_than_the_pool_streams_through_it(
    way: str, flush: str, tmp_path: Path
) -> None:
    tensors = {f"t{n}": torch.full((5 << 20,), float(n)) for n in range(8)}  # 8 times 20 MiB
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    with laststep.Checkpointer(
        tmp_path / "run",
        state=tensors,
        options=laststep.Options(capture=way, flush=flush),
        host_memory_bytes=POOL_BYTES,
    ) as checkpointer:
        optimizer.step()
        handle = checkpointer.save(0)
        if way != "lazy":
            for tensor in tensors.values():
                tensor.zero_()
        assert handle.wait(PATIENCE_S)
        assert handle.report.size_bytes > 160 << 20
        if way == "lazy":
            for tensor in tensors.values():
                tensor.zero_()
        checkpointer.restore()
    assert all(bool((tensors[f"t{n}"] == n).all()) for n in range(8))


def test_many_small_files_pass_through_the_smallest_pool(tmp_path: Path) -> None:
    items = {f"item{n}": {"t": torch.full((1 << 20,), n, dtype=torch.uint8)} for n in range(12)}
    with laststep.Checkpointer(
        tmp_path / "run",
        items=items,
        options=laststep.Options(flush="thread"),
        host_memory_bytes=POOL_BYTES,
    ) as checkpointer:
        assert checkpointer.save(0).wait(PATIENCE_S)
        for item in items.values():
            item["t"].zero_()
        checkpointer.restore()
    assert all(bool((items[f"item{n}"]["t"] == n).all()) for n in range(12))


def test_a_busy_capture_is_waited_for_or_the_save_is_skipped(tmp_path: Path, gate: Gate) -> None:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    events: list[object] = []
    with laststep.Checkpointer(
        tmp_path / "run",
        model=model,
        optimizer=optimizer,
        options=laststep.Options(
            capture="lazy", flush="thread", on_busy="skip", subscribers=[events.append]
        ),
        host_memory_bytes=POOL_BYTES,
    ) as checkpointer:
        backward(model)
        optimizer.step()
        first = checkpointer.save(0)
        assert gate.reached.wait(PATIENCE_S)
        second = checkpointer.save(1)
        assert second.report.skipped
        assert not second.wait()  # at once: it will never be committed
        assert not second.committed.done()
        assert "skipped" in repr(second)
        gate.opened.set()
        first.wait(PATIENCE_S)
        checkpointer.save(1).wait(PATIENCE_S)
    assert laststep.open(tmp_path / "run").steps() == [0, 1]
    assert [type(e).__name__ for e in events].count("SaveSkipped") == 1


def test_with_on_busy_wait_every_save_is_made(
    tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait = signals.wait

    def open_after_a_while(event: threading.Event, timeout_s: float | None = None) -> bool:
        if threading.current_thread() is threading.main_thread():
            threading.Timer(0.1, gate.opened.set).start()
        return wait(event, timeout_s)

    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    with lazy(tmp_path / "run", model, optimizer) as checkpointer:
        backward(model)
        optimizer.step()
        checkpointer.save(0)
        assert gate.reached.wait(PATIENCE_S)
        monkeypatch.setattr(signals, "wait", open_after_a_while)
        second = checkpointer.save(1)
        assert second.report.waited_s > 0.05
    assert laststep.open(tmp_path / "run").steps() == [0, 1]


def test_a_report_says_what_a_save_moved_and_cost(tmp_path: Path) -> None:
    model = network()
    size = sum(t.nbytes for t in model.state_dict().values())
    with laststep.Checkpointer(
        tmp_path / "run", model=model, options=laststep.Options(flush="thread")
    ) as checkpointer:
        handle = checkpointer.save(3)
        handle.wait(PATIENCE_S)
        report = handle.report
    assert report.step == 3
    assert report.tensors == len(model.state_dict())
    assert report.size_bytes >= size
    assert "host" in report.capture
    assert 0 < report.stall_s < report.committed_s
    assert 0 < report.captured_s <= report.durable_s <= report.committed_s
    assert report.lost_s == report.stall_s + report.device_copy_s + report.fence_s
    assert (tmp_path / "run" / report.folder / "manifest.json").exists()
    assert report.skipped is None
    assert "committed" in repr(handle)
