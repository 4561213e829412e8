"""What can happen to a state: between saves, so that it cannot be saved, and under a capture.

Each is a small function of a `World`; its name is what the table of faults calls it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from structure_state import DTYPES
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable

    from structure_state import World

BETWEEN: list[Callable[[World], None]] = []
REFUSED: list[Callable[[World], None]] = []
UNDER: list[Callable[[World, torch.Tensor], None]] = []


# -- between saves: the next save is to be exact ------------------------------------------------


@BETWEEN.append
def a_parameter_is_written(world: World) -> None:
    with torch.no_grad():
        world.parameter()[1].add_(1)


@BETWEEN.append
def the_data_of_a_parameter_are_replaced(world: World) -> None:
    parameter = world.parameter()[1]
    parameter.data = torch.randn_like(parameter.data)


@BETWEEN.append
def a_parameter_gets_another_shape(world: World) -> None:
    parameter = world.parameter()[1]
    parameter.data = world.tensor()
    world.forget(parameter)


@BETWEEN.append
def a_parameter_gets_another_dtype(world: World) -> None:
    parameter = world.parameter()[1]
    parameter.data = parameter.data.to(world.chance.choice(DTYPES[:4]))
    world.forget(parameter)


@BETWEEN.append
def a_parameter_becomes_strided(world: World) -> None:
    parameter = world.parameter()[1]
    if parameter.dim() == 2:
        parameter.data = parameter.data.t().contiguous().t()


@BETWEEN.append
def a_parameter_becomes_a_view_of_something_larger(world: World) -> None:
    parameter = world.parameter()[1]
    room = torch.zeros(parameter.numel() + 9, dtype=parameter.dtype, device=world.device)
    room[5 : 5 + parameter.numel()] = parameter.data.reshape(-1)
    parameter.data = room[5 : 5 + parameter.numel()].view(parameter.shape)


@BETWEEN.append
def a_parameter_is_added(world: World) -> None:
    name = f"p{world.chance.randrange(100, 10_000)}"
    if hasattr(world.model, name):
        return
    parameter = nn.Parameter(world.tensor())
    world.model.register_parameter(name, parameter)
    world.optimizer.add_param_group({"params": [parameter], "lr": world.chance.random()})


@BETWEEN.append
def a_parameter_is_removed(world: World) -> None:
    names = [name for name, _ in world.model.named_parameters()]
    if len(names) < 2:
        return
    _remove(world, world.chance.choice(names))


def _remove(world: World, name: str) -> None:
    """Take a name of a parameter away; the optimizer forgets one that has no other."""
    parameter = getattr(world.model, name)
    delattr(world.model, name)
    if any(parameter is other for other in world.model.parameters()):
        return
    world.forget(parameter)
    for group in world.optimizer.param_groups:
        group["params"] = [other for other in group["params"] if other is not parameter]


@BETWEEN.append
def two_parameters_are_tied(world: World) -> None:
    world.model.register_parameter(f"tied{world.chance.randrange(9)}", world.parameter()[1])


@BETWEEN.append
def a_tie_is_cut(world: World) -> None:
    tied = [name for name in world.model._parameters if name.startswith("tied")]
    if len(tied) < len(world.model._parameters):
        for name in tied:
            _remove(world, name)


@BETWEEN.append
def a_buffer_comes(world: World) -> None:
    world.model.register_buffer(f"b{world.chance.randrange(9)}", world.tensor())


@BETWEEN.append
def a_buffer_goes(world: World) -> None:
    for name in list(world.model._buffers)[:1]:
        delattr(world.model, name)


@BETWEEN.append
def a_buffer_is_no_longer_saved(world: World) -> None:
    name = f"b{world.chance.randrange(9)}"
    world.model.register_buffer(name, world.tensor(), persistent=False)


@BETWEEN.append
def a_buffer_is_resized_in_place(world: World) -> None:
    for buffer in list(world.model.buffers())[:1]:
        buffer.resize_(world.chance.randrange(50)).fill_(3)


@BETWEEN.append
def options_of_a_group_change(world: World) -> None:
    group = world.chance.choice(world.optimizer.param_groups)
    group["lr"] = world.chance.choice([0.0, -0.0, 1e-9, float("nan"), 1])
    group[world.chance.choice(["note", "other"])] = world.chance.choice([None, True, "x", (1, 2)])


@BETWEEN.append
def the_optimizer_forgets_everything(world: World) -> None:
    world.optimizer.state.clear()


@BETWEEN.append
def the_optimizer_forgets_a_parameter(world: World) -> None:
    world.forget(world.parameter()[1])


@BETWEEN.append
def a_moment_is_replaced(world: World) -> None:
    for entries in list(world.optimizer.state.values())[:2]:
        for key, value in entries.items():
            if isinstance(value, torch.Tensor):
                entries[key] = value.clone().add_(1)


@BETWEEN.append
def training_steps(world: World) -> None:
    world.optimizer.zero_grad()


@BETWEEN.append
def a_plain_value_changes_its_type(world: World) -> None:
    world.extra["step"] = world.chance.choice(
        [0, False, 0.0, -0.0, "0", None, b"0", (0,), [0], {"0": 0}, float("inf"), 1 << 80]
    )


@BETWEEN.append
def an_entry_comes(world: World) -> None:
    world.extra[f"k{world.chance.randrange(20)}"] = world.tensor()


@BETWEEN.append
def an_entry_goes(world: World) -> None:
    world.extra.pop(world.chance.choice([*world.extra, "nothing"]), None)


@BETWEEN.append
def an_entry_is_renamed(world: World) -> None:
    for key in list(world.extra)[:1]:
        world.extra[f"{key}/é~."] = world.extra.pop(key)


@BETWEEN.append
def entries_change_their_order(world: World) -> None:
    items = list(world.extra.items())
    world.chance.shuffle(items)
    world.extra.clear()
    world.extra.update(items)


@BETWEEN.append
def a_tensor_of_another_dtype_comes(world: World) -> None:
    tensor = (world.tensor() * 50).to(world.chance.choice(DTYPES))
    world.extra["dtype"] = tensor


@BETWEEN.append
def an_empty_tensor_comes(world: World) -> None:
    world.extra["empty"] = torch.empty(world.chance.choice([(0,), (3, 0), (0, 4)]))


@BETWEEN.append
def a_strided_tensor_comes(world: World) -> None:
    world.extra["strided"] = torch.randn(20, 30, device=world.device)[::2, 3:9].t()


@BETWEEN.append
def an_expanded_tensor_comes(world: World) -> None:
    world.extra["expanded"] = torch.randn(1, 5, device=world.device).expand(7, 5)


@BETWEEN.append
def overlapping_views_come(world: World) -> None:
    base = torch.randn(100, device=world.device)
    world.extra["views"] = [base[10:50], base[30:90], base.view(10, 10)[:, 3]]


@BETWEEN.append
def the_same_tensor_twice(world: World) -> None:
    tensor = world.tensor()
    world.extra["twice"] = {"a": tensor, "b": [tensor]}


@BETWEEN.append
def a_tensor_becomes_sparse(world: World) -> None:
    world.extra["t"] = torch.eye(5, device=world.device).to_sparse()


@BETWEEN.append
def a_tensor_becomes_dense_again(world: World) -> None:
    world.extra["t"] = world.tensor()


@BETWEEN.append
def a_conjugated_tensor_comes(world: World) -> None:
    world.extra["conj"] = torch.randn(6, dtype=torch.complex64, device=world.device).conj()


@BETWEEN.append
def an_array_comes(world: World) -> None:
    array = np.arange(24.0).reshape(4, 6)
    made = [array, array.T, array[::-1], array[:, ::2], array.astype(">f4"), array[:0]]
    world.extra["array"] = world.chance.choice(made)


@BETWEEN.append
def long_bytes_come(world: World) -> None:
    world.extra["bytes"] = world.chance.randbytes(world.chance.choice([0, 10, 100_000]))


@BETWEEN.append
def a_deep_tree_comes(world: World) -> None:
    tree: object = {"leaf": world.tensor(), "n": None}
    for depth in range(world.chance.randrange(12)):
        tree = [tree, depth] if depth % 2 else {"in": tree}
    world.extra["deep"] = tree


@BETWEEN.append
def requires_grad_is_toggled(world: World) -> None:
    parameter = world.parameter()[1]
    if parameter.is_floating_point():
        parameter.requires_grad_(not parameter.requires_grad)


@BETWEEN.append
def a_storage_is_freed_and_made_again(world: World) -> None:
    parameter = world.parameter()[1]
    kept, storage = parameter.detach().clone(), parameter.untyped_storage()
    size = storage.nbytes()
    storage.resize_(0)
    storage.resize_(size)
    parameter.data.copy_(kept)


# -- what cannot be saved: an error of ours, by name --------------------------------------------


@REFUSED.append
def memory_is_freed(world: World) -> None:
    _victim(world).untyped_storage().resize_(0)


@REFUSED.append
def a_storage_is_too_small(world: World) -> None:
    victim = _victim(world)
    victim.untyped_storage().resize_(victim.untyped_storage().nbytes() - 1)


@REFUSED.append
def a_tensor_becomes_meta(world: World) -> None:
    world.extra["t"] = torch.empty(3, device="meta")


@REFUSED.append
def a_tensor_becomes_nested(world: World) -> None:
    world.extra["t"] = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


@REFUSED.append
def a_tensor_becomes_mkldnn(world: World) -> None:
    world.extra["t"] = torch.ones(4, 4).to_mkldnn()


@REFUSED.append
def a_value_that_nobody_knows_comes(world: World) -> None:
    world.extra["odd"] = object()


def _victim(world: World) -> torch.Tensor:
    """A tensor with elements that lies alone in a storage that can be resized."""
    world.extra["t"] = torch.randn(1000, device=world.device)
    return world.extra["t"]


# -- under a capture: the save is exact, or Torn ------------------------------------------------


@UNDER.append
def nothing_happens(world: World, tensor: torch.Tensor) -> None:
    """Most saves of most programs."""


@UNDER.append
def written_under(world: World, tensor: torch.Tensor) -> None:
    tensor.copy_(tensor.to(torch.float64) + 1)


@UNDER.append
def swapped_and_back_under(world: World, tensor: torch.Tensor) -> None:
    kept = tensor.clone()
    tensor.zero_()
    world.parameter()[1].detach().sum()
    tensor.copy_(kept)


@UNDER.append
def all_swapped_and_back_under(world: World, tensor: torch.Tensor) -> None:
    live = [parameter.data for parameter in world.model.parameters()]
    kept = [one.clone() for one in live]
    for one in live:
        one.zero_()
    for one, was in zip(live, kept, strict=True):
        one.copy_(was)


@UNDER.append
def replaced_by_larger_under(world: World, tensor: torch.Tensor) -> None:
    tensor.data = torch.ones(tensor.numel() + 100_000, dtype=tensor.dtype, device=tensor.device)


@UNDER.append
def replaced_by_smaller_under(world: World, tensor: torch.Tensor) -> None:
    tensor.data = torch.ones(1, dtype=tensor.dtype, device=tensor.device)


@UNDER.append
def replaced_by_another_dtype_under(world: World, tensor: torch.Tensor) -> None:
    tensor.data = tensor.data.to(torch.float64)


@UNDER.append
def pointed_elsewhere_under(world: World, tensor: torch.Tensor) -> None:
    tensor.detach().set_(torch.ones_like(tensor))


@UNDER.append
def freed_under(world: World, tensor: torch.Tensor) -> None:
    tensor.untyped_storage().resize_(0)


@UNDER.append
def all_freed_under(world: World, tensor: torch.Tensor) -> None:
    for parameter in world.model.parameters():
        parameter.untyped_storage().resize_(0)


@UNDER.append
def shrunk_under(world: World, tensor: torch.Tensor) -> None:
    tensor.untyped_storage().resize_(tensor.untyped_storage().nbytes() // 2)


@UNDER.append
def grown_under(world: World, tensor: torch.Tensor) -> None:
    tensor.untyped_storage().resize_(tensor.untyped_storage().nbytes() + 100_000)


@UNDER.append
def let_go_of_under(world: World, tensor: torch.Tensor) -> None:
    world.extra.clear()
    world.optimizer.state.clear()
    for parameter in world.model.parameters():
        parameter.data = torch.ones_like(parameter.data)


@UNDER.append
def trained_under(world: World, tensor: torch.Tensor) -> None:
    world.train()
