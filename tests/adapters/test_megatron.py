"""Megatron's distributed optimizer by its adapter, into other layouts and back.

What Megatron itself does is skipped where it is not installed; the stand-in of megatron_training
is always there.
"""

from __future__ import annotations

import importlib.util
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from megatron_training import Chunk
from round_trips import Way, save_and_load
from torch import nn

import laststep
from expect import raises
from laststep import megatron
from laststep.state.layouts import Flat, Mesh, Replicate, Shard

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

needs_megatron = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="Megatron-Core is not installed"
)


@needs_megatron
@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "target"),
    [
        (("real", 2), ("two-groups", 1)),
        (("two-groups", 1), ("real", 2)),
        (("real", 3), ("real", 2)),
        (("real-half", 2), ("real-half", 2)),
        (("real-tp", 4), ("two-groups", 1)),
        (("two-groups", 1), ("real-tp", 4)),
    ],
    ids=lambda way: f"{way[0]}{way[1]}",
)
def test_megatron_itself_does_so(
    fresh: Callable[..., list[Any]], tmp_path: Path, source: Way, target: Way
) -> None:
    save_and_load(fresh, "megatron_training", tmp_path / "run", source, target)
    if source[0] != "real-tp":  # Megatron's own layers have an extra state, which is nothing
        fresh("megatron_training:load_by_itself", 1, run=str(tmp_path / "run"))


@needs_megatron
@pytest.mark.filterwarnings("ignore")  # what Megatron says of what it does not find
def test_blocks_are_what_megatron_means_by_a_stride() -> None:
    from megatron.core.tensor_parallel.layers import _initialize_affine_weight_cpu

    mesh = Mesh.of(("tp", "dp"), (2, 2), range(4))
    cut = (Shard(0), Replicate())
    layout = Flat((12, 3), mesh, ("dp",), 0, 18, cut, blocks=2)
    for rank in range(4):
        own = torch.empty(6, 3)
        whole = _initialize_affine_weight_cpu(
            own,
            12,
            3,
            6,
            0,
            nn.init.normal_,
            stride=2,
            return_master_weight=True,
            params_dtype=torch.float32,
            rank=rank // 2,
            world_size=2,
        )
        first, last = layout.range_of(rank)
        held = [
            whole[tuple(map(slice, box.start, box.stop))].flatten() for box in layout.held(rank)
        ]
        assert torch.equal(torch.cat(held), own.view(-1)[first:last])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "target"),
    [
        (("megatron", 2), ("plain", 1)),
        (("plain", 1), ("megatron", 2)),
        (("megatron-tp", 4), ("plain", 1)),
        (("plain", 1), ("megatron-tp", 4)),
        (("rmsprop-tp", 2), ("rmsprop-tp", 2)),
        pytest.param(("megatron-tp", 4), ("megatron-tp", 2), marks=pytest.mark.long),
        pytest.param(("megatron-tp", 4), ("megatron-tp", 4), marks=pytest.mark.long),
        pytest.param(("megatron", 3), ("megatron-tp", 4), marks=pytest.mark.long),
        pytest.param(("megatron", 4), ("megatron", 3), marks=pytest.mark.long),
        pytest.param(("megatron", 2), ("megatron", 2), marks=pytest.mark.long),
        pytest.param(("fsdp2", 2), ("megatron", 2), marks=pytest.mark.long),
    ],
    ids=lambda way: f"{way[0]}{way[1]}",
)
def test_the_distributed_optimizer_loads_into_any_layout_and_back(
    crew: Callable[..., list[Any]], tmp_path: Path, source: Way, target: Way
) -> None:
    save_and_load(crew, "megatron_training", tmp_path / "run", source, target)


class Layer(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.layer_number = number
        self.inner = nn.Linear(1, 1, bias=False)


def test_layers_have_their_numbers_in_the_whole_model_on_every_stage() -> None:
    stage = nn.Module()
    stage.layers = nn.ModuleList([Layer(5), Layer(6)])
    names = megatron._model_of([Chunk(Chunk(stage))]).names
    assert sorted(names.values()) == [["layers.4.inner.weight"], ["layers.5.inner.weight"]]


def test_an_optimizer_that_is_not_distributed_is_refused() -> None:
    with raises(laststep.UsageError, found="SimpleNamespace"):
        megatron.model(nn.Linear(2, 2), SimpleNamespace())


def part(shape: tuple[int, ...], **attributes: object) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros(shape))
    for name, value in {"tensor_model_parallel": True, **attributes}.items():
        setattr(parameter, name, value)
    return parameter


def model_with(name: str, parameter: nn.Parameter, *, gated: bool = True) -> megatron._Model:
    """Of a parameter in a layer that is cut as Megatron's are."""
    net, layer = nn.Module(), nn.Module()
    net.config = SimpleNamespace(gated_linear_unit=gated)
    net.add_module(name, layer)
    layer.weight = parameter
    layer.output_size_per_partition = 4
    return megatron._model_of([Chunk(net)])


def test_a_parameter_is_cut_as_its_attributes_say() -> None:
    up = part((4, 3), partition_dim=0, partition_stride=2)
    assert megatron._cut_of(up, model_with("linear_fc1", up), 2) == (0, 2)
    assert megatron._cut_of(up, model_with("linear_fc1", up), 1) is None
    down = part((4, 3), partition_dim=1, partition_stride=1)
    assert megatron._cut_of(down, model_with("linear_fc2", down), 2) == (1, 1)
    assert megatron._cut_of(down, model_with("linear_fc1", down, gated=False), 2) == (1, 1)
    norm = part((4,), tensor_model_parallel=False)
    assert megatron._cut_of(norm, megatron._model_of([]), 2) is None


@pytest.mark.parametrize(
    "attributes",
    [
        {},
        {"partition_dim": -1, "partition_stride": 1},
        {"partition_dim": 2, "partition_stride": 1},
        {"partition_dim": 1, "partition_stride": 2},
        {"partition_dim": 0, "partition_stride": 1},
        {"tensor_model_parallel": False},
    ],
    ids=["nothing", "none", "too-high", "columns-with-stride", "gated-without-stride", "unmarked"],
)
def test_what_is_cut_in_a_way_that_is_not_told_is_refused(attributes: dict[str, int]) -> None:
    parameter = part((4, 6), **attributes)
    with raises(laststep.UsageError, where="linear_fc1.weight"):
        megatron._cut_of(parameter, model_with("linear_fc1", parameter), 2)


@pytest.mark.parametrize(
    ("name", "parts", "size"),
    [
        ("mlp.experts.weight1", 2, "none"),
        ("weight", 1, "get_expert_model_parallel_world_size"),
        ("weight", 1, "get_expert_tensor_parallel_world_size"),
    ],
)
def test_experts_over_other_parallelism_than_data_are_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, parts: int, size: str
) -> None:
    parameter = part((2,), allreduce="experts" in name)
    state = SimpleNamespace(**{size: lambda: 1})
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", state)
    megatron._refuse_experts(parameter, name, 1)
    megatron._refuse_experts(part((2,)), "mlp.shared_experts.linear_fc1.weight", 2)
    setattr(state, size, lambda: 2)
    with raises(laststep.UsageError, "experts", found="2"):
        megatron._refuse_experts(parameter, name, parts)


@pytest.mark.parametrize("kind", ["", "expert_"])
def test_weights_sharded_over_more_than_tensor_parallelism_are_refused(kind: str) -> None:
    net = nn.Linear(2, 2)
    net.config = SimpleNamespace(**{f"{kind}gtp_weight_remat_size": 1})
    megatron._model_of([Chunk(net)])
    net.config = SimpleNamespace(**{f"{kind}gtp_weight_remat_size": 2})
    with raises(laststep.UsageError, found=f"{kind}gtp_weight_remat_size 2"):
        megatron._model_of([Chunk(net)])


def test_a_frozen_part_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda size: list(range(size)))
    net = nn.Linear(2, 2)
    net.weight = part((2, 2), partition_dim=0, partition_stride=1)
    one = SimpleNamespace(buffers=[SimpleNamespace(tp_group=1, param_index_map=[])])
    provider = megatron._MegatronModule([Chunk(net)], [one])
    provider._replaced([])
    one.buffers[0].tp_group = 2
    with raises(laststep.UsageError, where="weight"):
        provider._replaced([])
    one.buffers[0].param_index_map = [net.weight]
    provider._replaced([])
