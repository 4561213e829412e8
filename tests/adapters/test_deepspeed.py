"""DeepSpeed's ZeRO by its adapter: stages 1 to 3, fp32 and bf16, into other layouts and back.

Skipped where DeepSpeed is not installed; `pip install deepspeed` with `DS_BUILD_OPS=0` will do, it
runs on CPUs with gloo. What the state is, is asked of DeepSpeed's own `safe_get_full_…`. The
functions without `test_` are run by the ranks. What is checked without DeepSpeed is at the end.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import tasks  # of tests/ranks, as `wraps`
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 (everybody calls it so)
import wraps
from round_trips import Way, save_and_load
from torch import nn
from wraps import WAYS, Tensors, Trainer, adam, batch, loss_of

import laststep
from expect import raises
from laststep import deepspeed

if TYPE_CHECKING:
    from collections.abc import Callable

SOURCE = Path(__file__).resolve().parents[2] / "src"
needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed"
)


class Net(wraps.Net):
    """DeepSpeed takes no parameter without dimensions, and gathers those of a module that is
    called."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([1.5]))

    def first(self, words: torch.Tensor) -> torch.Tensor:
        inner = self.embed(words)
        return inner + self.down(F.gelu(self.up(inner)))

    def last(self, inner: torch.Tensor) -> torch.Tensor:
        inner = inner * self.mix[0] + self.mix[1]
        inner = (inner.unflatten(-1, (5, 2)) * self.gate[:, None]).flatten(-2)
        with torch.no_grad():
            self.seen += 1
            self.mean.lerp_(inner.mean((0, 1)).to(self.mean.dtype), 0.25)
        return self.head(inner) * self.scale


class Zero(Trainer):
    stage = 1
    half = False
    frozen = False
    more: dict[str, Any] = {}  # noqa: RUF012 (nobody changes it)
    options: dict[str, Any] = {}  # noqa: RUF012 (as above)

    def __init__(self) -> None:
        os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": str(dist.get_rank())}
        import deepspeed as real

        self.net = Net()
        self.net.mix.requires_grad_(not self.frozen)
        zero = {"stage": self.stage, "stage3_param_persistence_threshold": 0, **self.options}
        self.engine, self.zero, _, _ = real.initialize(
            model=self.net,
            optimizer=adam([p for p in self.net.parameters() if p.requires_grad]),
            config={
                "train_micro_batch_size_per_gpu": 4,
                "zero_optimization": zero,
                "gradient_clipping": 0.0,
                "bf16": {"enabled": self.half},
                **self.more,
            },
        )
        self.net.mean = self.net.mean.float()  # as a plain model has it; DeepSpeed rounds it too

    def items(self) -> dict[str, object]:
        return {
            "model": deepspeed.model(self.engine),
            "optimizer": deepspeed.optimizer(self.engine),
        }

    def step(self, number: int) -> float:
        words = batch(number)
        loss = loss_of(self.engine(words), words)
        self.engine.backward(loss)
        self.engine.step()
        return loss.item()

    def held(self) -> Tensors:
        from deepspeed.runtime.zero.partition_parameters import GatheredParameters
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        if self.options.get("round_robin_gradients"):  # which DeepSpeed's own functions overlook
            return dict(self.net.state_dict())
        if self.stage < 3:  # else it looks for the state of parameters only in the first step
            self.zero._lazy_init_hp_params_optimizer_state()
        found: Tensors = dict(self.net.named_buffers())
        (steps,) = {float(s["step"]) for s in self.zero.optimizer.state.values()}
        for name, parameter in self.net.named_parameters():
            if not parameter.requires_grad:
                with GatheredParameters([parameter], enabled=self.stage == 3):
                    found[name] = parameter.detach().clone()
                continue
            found[name] = safe_get_full_fp32_param(parameter).detach().clone()
            found[f"{name}:step"] = torch.tensor(steps)
            for key in ("exp_avg", "exp_avg_sq"):
                found[f"{name}:{key}"] = safe_get_full_optimizer_state(parameter, key).clone()
            with GatheredParameters([parameter], enabled=self.stage == 3):
                assert torch.equal(parameter.detach(), found[name].to(parameter.dtype)), name
        found["head.weight"] = found["embed.weight"]
        return found


def zero_with(**of_class: Any) -> type[Zero]:
    return type("ZeroWith", (Zero,), of_class)


WAYS |= {
    "one": Zero,
    "two": zero_with(stage=2),
    "two-in-turns": zero_with(stage=2, options={"round_robin_gradients": True}),
    "three": zero_with(stage=3),
    "three-in-parts": zero_with(
        stage=3, options={"sub_group_size": 60, "stage3_param_persistence_threshold": 30}
    ),
    "three-frozen": zero_with(stage=3, half=True, frozen=True),
    "one-half-full-grads": zero_with(half=True, more={"data_types": {"grad_accum_dtype": "fp32"}}),
    "two-half": zero_with(stage=2, half=True),
    "three-half": zero_with(stage=3, half=True, options={"stage3_param_persistence_threshold": 30}),
}


def save_as(way: str, run: str) -> None:
    wraps.Net = Net
    tasks.save_as(way, run)


def load_as(way: str, run: str, *, trained: bool, exactly: bool) -> None:
    wraps.Net = Net
    tasks.load_as(way, run, trained=trained, exactly=exactly)


def load_only(way: str, run: str) -> None:
    """Without going on: in another precision that goes another way."""
    wraps.Net = Net
    trainer = WAYS[way]()
    with tasks.checkpointer(run, trainer) as c:
        assert c.restore().step == 2
    tasks.equal(trainer.full(), torch.load(f"{run}.pt")["then"])


@needs_deepspeed
@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "target"),
    [
        (("one", 2), ("plain", 1)),
        (("plain", 1), ("two", 2)),
        (("two", 2), ("three", 2)),
        (("three-in-parts", 2), ("fsdp2", 2)),
        (("fsdp2", 2), ("three-in-parts", 2)),
        (("two", 3), ("one", 2)),
        (("three", 3), ("three-in-parts", 2)),
        (("two-in-turns", 3), ("two-in-turns", 3)),
        (("two-half", 2), ("two-half", 2)),
        (("three-half", 2), ("three-half", 2)),
        (("three-frozen", 2), ("three-frozen", 2)),
        (("one-half-full-grads", 2), ("one-half-full-grads", 2)),
    ],
    ids=lambda way: f"{way[0]}{way[1]}",
)
def test_zero_loads_into_any_layout_and_any_layout_into_zero(
    fresh: Callable[..., list[Any]], tmp_path: Path, source: Way, target: Way
) -> None:
    save_and_load(fresh, "test_deepspeed", tmp_path / "run", source, target)


@needs_deepspeed
@pytest.mark.slow
@pytest.mark.parametrize("way", ["two-half", "three-half"])
def test_the_fp32_weights_of_bf16_load_into_a_plain_model_and_back(
    fresh: Callable[..., list[Any]], tmp_path: Path, way: str
) -> None:
    for source, target in (((way, 2), ("plain", 1)), (("plain", 1), (way, 2))):
        run = str(tmp_path / source[0])
        fresh("test_deepspeed:save_as", source[1], way=source[0], run=run)
        fresh("test_deepspeed:load_only", target[1], way=target[0], run=run)


def count(run: str) -> None:
    trainer = WAYS["one"]()
    for number in range(3):
        trainer.step(number)
    counted = deepspeed.progress(trainer.engine)
    with tasks.opened(run, counts=counted) as c:
        c.save(1).wait()
        trainer.step(3)
        c.restore()
    assert (trainer.engine.global_steps, trainer.engine.global_samples) == (3, 24)


@needs_deepspeed
@pytest.mark.slow
def test_the_counts_of_an_engine_come_back(fresh: Callable[..., list[Any]], tmp_path: Path) -> None:
    fresh("test_deepspeed:count", 2, run=str(tmp_path / "run"))


def engine_with(**zero: Any) -> SimpleNamespace:
    return SimpleNamespace(module=nn.Linear(2, 2), optimizer=SimpleNamespace(**zero))


def test_an_engine_without_an_optimizer_is_refused() -> None:
    engine = SimpleNamespace(module=nn.Linear(2, 2), optimizer=None)
    with raises(laststep.UsageError, remedy="engine.module"):
        deepspeed.model(engine)


@pytest.mark.parametrize("attribute", ["swap_optimizer", "zenflow"])
def test_state_that_lies_elsewhere_is_refused(attribute: str) -> None:
    with pytest.raises(laststep.UsageError, match="DeepSpeed"):
        deepspeed.model(engine_with(bit16_groups=[], **{attribute: True}))


def test_experts_that_lie_in_one_tensor_are_refused() -> None:
    fused = type("AutoEPMoELayer", (nn.Module,), {})()
    engine = SimpleNamespace(module=nn.Sequential(fused), optimizer=SimpleNamespace())
    with pytest.raises(laststep.UsageError, match="AutoEP"):
        deepspeed.model(engine)


def test_importing_laststep_imports_no_adapter() -> None:
    code = "import laststep, sys; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
    )
    loaded = done.stdout.split()
    assert "laststep" in loaded
    assert not {f"laststep.{name}" for name in ("adapters", "deepspeed", "hf")} & set(loaded)
