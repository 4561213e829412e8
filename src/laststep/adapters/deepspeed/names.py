"""The names of a model's parameters, the same whatever ranks they lie on.

A pipeline's stages number their layers through; a layer of experts numbers those that it has here
from 0. Each is stored under its number among all of them, as it has on one rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

from laststep.adapters.deepspeed.seams import need
from laststep.adapters.flat_state import plain_name
from laststep.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

_EXPERTS = "deepspeed_experts."


def names_in(module: torch.nn.Module) -> Callable[[str], str]:
    """What a name within this module, or a prefix of names, is in all of the model."""
    first: dict[str, int] = {}
    for name, layer in module.named_modules():
        if type(layer).__name__ == "AutoEPMoELayer":  # which has its experts here in one tensor
            raise UsageError(
                "cannot take the state of DeepSpeed with AutoEP",
                where=name,
                remedy="use layers of deepspeed.moe",
            )
        if hasattr(layer, "ep_group") and hasattr(layer, "experts"):
            place = dist.get_rank(need(layer, "ep_group"))
            first[plain_name(f"{name}.experts.")] = place * need(layer, "num_local_experts")

    def whole(name: str) -> str:
        name = plain_name(name)
        layer, experts, rest = name.partition(_EXPERTS)
        number, dot, inner = rest.partition(".")
        if not number or layer not in first:
            return name
        return f"{layer}{experts}{first[layer] + int(number)}{dot}{inner}"

    return whole
