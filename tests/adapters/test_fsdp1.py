"""FSDP1 by its adapter, on real ranks with gloo: from any of its forms into other layouts and back.

What the state is, is asked of FSDP1's own full state dicts, which know nothing of laststep. The
functions without `test_` are run by the ranks.
"""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import tasks  # of tests/ranks, as `wraps`
import torch
import torch.distributed as dist
from round_trips import Way, save_and_load
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
)
from wraps import WAYS, Net, Tensors, Trainer, batch

import laststep
from expect import raises
from laststep import fsdp1

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class Fsdp1(Trainer):
    """Two units inside of a third; a parameter without dimensions, which FSDP1 does not take."""

    options: dict[str, Any] = {"use_orig_params": True}  # noqa: RUF012 (nobody changes it)

    def wrap(self, net: Net) -> nn.Module:
        more = dict(self.options)
        if more.get("sharding_strategy") is ShardingStrategy.HYBRID_SHARD:
            more["device_mesh"] = init_device_mesh("cpu", (2, dist.get_world_size() // 2))
        more["device_id"] = torch.device("cpu")
        inner = more.pop("inner", {})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for name in ("up", "down"):
                part = FullyShardedDataParallel(getattr(net, name), **more, **inner)
                setattr(net, name, part)
            return FullyShardedDataParallel(net, ignored_states=[net.scale], **more)

    def items(self) -> dict[str, object]:
        return {
            "model": fsdp1.model(self.model),
            "optimizer": fsdp1.optimizer(self.optimizer, self.model),
        }

    def held(self) -> Tensors:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with FullyShardedDataParallel.state_dict_type(
                self.model, StateDictType.FULL_STATE_DICT
            ):
                found: Tensors = dict(self.model.state_dict())
                if not self.options["use_orig_params"]:
                    state = FullyShardedDataParallel.optim_state_dict(self.model, self.optimizer)
                    entries = state["state"].items()
                    return found | {f"{n}:{k}": entry for n, e in entries for k, entry in e.items()}
        return found | self.joined()

    def joined(self) -> Tensors:
        """The optimizer's state with `use_orig_params`: on a CPU, FSDP1's own full state dict of
        torch 2.13 has the second moments in the place of the first."""
        state = self.optimizer.state
        found = {f"scale:{key}": entry for key, entry in state[self.net.scale].items()}
        for module in FullyShardedDataParallel.fsdp_modules(self.model):
            prefix = next(n for n, m in self.model.named_modules() if m is module)
            flat = module._handle.flat_param
            rows = zip(flat._fqns, flat._shapes, flat._shard_param_infos, flat._params, strict=True)
            for name, shape, info, parameter in rows:
                full = f"{prefix}.{name}".replace("_fsdp_wrapped_module", "").lstrip(".")
                mine = (info.intra_param_start_idx or 0, dict(state.get(parameter, {})))
                for key, tensor in join(mine, shape).items():
                    found[f"{full.replace('..', '.')}:{key}"] = tensor
        return found


def join(mine: tuple[int, Tensors], shape: torch.Size) -> Tensors:
    """Entries of a parameter's state, from ranges that the ranks have of them."""
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, mine)
    found: Tensors = {}
    for first, entries in everybody:
        for key, entry in entries.items():
            if key == "step":
                assert found.setdefault(key, entry) == entry
                continue
            flat = found.setdefault(key, torch.full((shape.numel(),), torch.nan))
            flat[first : first + entry.numel()] = entry.flatten()
    return {key: tensor if key == "step" else tensor.view(shape) for key, tensor in found.items()}


def fsdp1_with(**options: Any) -> type[Fsdp1]:
    return type("Fsdp1With", (Fsdp1,), {"options": options})


HALF = {"mixed_precision": MixedPrecision(torch.bfloat16, cast_forward_inputs=True)}
WAYS |= {
    "original": Fsdp1,
    "flat": fsdp1_with(use_orig_params=False),
    "mixed": fsdp1_with(use_orig_params=True, inner=HALF),
    "mixed-flat": fsdp1_with(use_orig_params=False, inner=HALF),
    "hybrid": fsdp1_with(use_orig_params=True, sharding_strategy=ShardingStrategy.HYBRID_SHARD),
    "whole": fsdp1_with(use_orig_params=False, sharding_strategy=ShardingStrategy.NO_SHARD),
    "whole-original": fsdp1_with(use_orig_params=True, sharding_strategy=ShardingStrategy.NO_SHARD),
    "gathered": fsdp1_with(use_orig_params=True, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP),
}


class Rms(Fsdp1):
    """An optimizer with other entries than Adam's."""

    def __init__(self) -> None:
        super().__init__()
        self.optimizer = torch.optim.RMSprop(self.model.parameters(), lr=0.01, momentum=0.9)


WAYS |= {"rms": Rms, "rms-flat": type("RmsFlat", (Rms,), {"options": {"use_orig_params": False}})}
save_as, load_as, load_by_itself = tasks.save_as, tasks.load_as, tasks.load_by_itself


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "target"),
    [
        (("original", 2), ("plain", 1)),
        (("plain", 1), ("flat", 2)),
        (("flat", 2), ("fsdp2", 2)),
        (("fsdp2", 2), ("original", 2)),
        (("flat", 2), ("flat", 2)),
        (("mixed", 2), ("mixed-flat", 2)),
        *(
            pytest.param(*both, marks=pytest.mark.long)
            for both in [
                (("original", 2), ("original", 2)),
                (("flat", 2), ("plain", 1)),
                (("plain", 1), ("original", 2)),
                (("original", 2), ("fsdp2", 2)),
                (("fsdp2", 2), ("flat", 2)),
                (("rms", 2), ("rms-flat", 2)),
                (("rms-flat", 2), ("rms", 2)),
                (("flat", 3), ("original", 4)),
                (("original", 4), ("flat", 3)),
                (("plain", 1), ("flat", 4)),
                (("hybrid", 4), ("flat", 2)),
                (("flat", 2), ("hybrid", 4)),
                (("hybrid", 4), ("hybrid", 4)),
                (("whole", 2), ("original", 3)),
                (("original", 3), ("whole", 2)),
                (("whole-original", 2), ("whole", 2)),
                (("gathered", 2), ("whole-original", 2)),
                (("mixed-flat", 2), ("mixed", 2)),
            ]
        ),
    ],
    ids=lambda way: f"{way[0]}{way[1]}",
)
def test_fsdp1_loads_into_any_layout_and_any_layout_into_fsdp1(
    crew: Callable[..., list[Any]], tmp_path: Path, source: Way, target: Way
) -> None:
    save_and_load(crew, "test_fsdp1", tmp_path / "run", source, target)


def test_the_weights_of_mixed_precision_are_stored_in_full_precision(
    crew: Callable[..., list[Any]], tmp_path: Path
) -> None:
    run = str(tmp_path / "run")
    crew("test_fsdp1:save_as", 2, way="mixed", run=run)
    crew("test_fsdp1:load_by_itself", 1, run=run)
    assert laststep.load(run)["model"]["up.weight"].dtype == torch.float32


def save_and_load_gathered(run: str) -> None:
    """After a forward pass parameters are gathered, beside the ranges that they come from."""
    trainer, other = WAYS["gathered"](), WAYS["gathered"]()
    trainer.step(0)
    other.step(1)
    for one in (trainer, other):
        one.model(batch(2))
        handles = [m._handle for m in FullyShardedDataParallel.fsdp_modules(one.model)]
        assert not all(handle.needs_unshard() for handle in handles)
    with tasks.checkpointer(run, trainer) as c:
        c.save(1)
    with tasks.checkpointer(run, other) as c:
        c.restore()
    with torch.no_grad():
        assert torch.equal(other.model(batch(3)), trainer.model(batch(3)))
    tasks.equal(other.full(), trainer.full())


def test_what_a_forward_pass_gathered_is_gathered_anew_after_a_restore(
    crew: Callable[..., list[Any]], tmp_path: Path
) -> None:
    crew("test_fsdp1:save_and_load_gathered", 2, run=str(tmp_path / "run"))


def load_uneven_steps(run: str) -> str:
    trainer = WAYS["plain"]()
    trainer.step(0)
    trainer.optimizer.state[trainer.net.gate]["step"] += 1
    with tasks.checkpointer(run, trainer) as c:
        c.save(1)
    with tasks.checkpointer(run, WAYS["flat"]()) as c, pytest.raises(laststep.UsageError) as raised:
        c.restore()
    with tasks.checkpointer(run, other := WAYS["original"]()) as c:
        c.restore()
    tasks.equal(other.full(), trainer.full())
    return str(raised.value)


def test_parameters_that_took_different_steps_do_not_fit_into_one_flat_parameter(
    crew: Callable[..., list[Any]], tmp_path: Path
) -> None:
    for text in crew("test_fsdp1:load_uneven_steps", 2, run=str(tmp_path / "run")):
        assert "'step'" in text
        assert "use_orig_params=True" in text


def test_a_model_without_fsdp1_is_refused() -> None:
    with raises(laststep.UsageError, remedy=True):
        fsdp1.model(nn.Linear(2, 2)).describe()


def test_what_is_flattened_in_the_order_of_its_memory_is_refused() -> None:
    flat = SimpleNamespace(_fqns=["weight"], _contiguities=[False], _param_extensions=[None])
    unit = type("FullyShardedDataParallel", (nn.Module,), {})()
    unit._handle = SimpleNamespace(flat_param=flat)
    with raises(laststep.UsageError, where="weight"):
        fsdp1.model(unit).describe()


@pytest.mark.parametrize(
    "optimizer",
    [torch.optim.Adagrad([torch.zeros(1)]), torch.optim.SGD([torch.zeros(1)], 1, 0.9, 0.1)],
    ids=["unknown", "dampening"],
)
def test_an_optimizer_whose_first_state_is_not_known_is_refused(
    optimizer: torch.optim.Optimizer,
) -> None:
    with raises(laststep.UsageError, found=type(optimizer).__name__):
        fsdp1.optimizer(optimizer, nn.Linear(2, 2))
