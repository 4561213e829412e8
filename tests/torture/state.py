"""The state that is tortured: every bit of it follows from the step, so any copy can be judged."""

from __future__ import annotations

from typing import TypedDict

import torch

_ODD = 0x9E3779B97F4A7C15 - (1 << 64)
_SIZES = {"large": 200_000, "small": 1_000, "tiny": 3}
_HALVES = 60_000
_BLOCK = 1 << 17
"""Elements of a block."""
_BLOCKS = 4
_DRIFTING = 600_001
COMPRESSION = {"weights": "max", "drift": "max"}
"""How the items are encoded: what is slow is borrowed as it is."""


class Live(TypedDict):
    """What the trainer passes as items."""

    weights: dict[str, torch.Tensor]
    slow: dict[str, torch.Tensor]
    """Of which each step changes one block in four, the last of them a short one."""
    drift: dict[str, torch.Tensor]
    """Of which each step changes a few elements: told by its difference to an earlier one."""
    counters: dict[str, object]


def new() -> Live:
    """A live state before any step."""
    weights = {name: torch.zeros(size, dtype=torch.int64) for name, size in _SIZES.items()}
    weights["halves"] = torch.zeros(_HALVES, dtype=torch.bfloat16)
    slow = {"slow": torch.zeros(_BLOCKS * _BLOCK - 99, dtype=torch.int64)}
    drift = {"drift": torch.zeros(_DRIFTING, dtype=torch.bfloat16)}
    counters = {"step": -1, "history": list[object]()}
    return {"weights": weights, "slow": slow, "drift": drift, "counters": counters}


def advance(live: Live, step: int) -> None:
    """Make it the state of that step, in place."""
    for name, tensor in _tensors(live).items():
        tensor.copy_(expected(name, step))
    live["counters"]["step"] = step
    live["counters"]["history"] = [step, -step, f"step {step}", 1.0 / (step + 1)]


def _tensors(live: Live) -> dict[str, torch.Tensor]:
    return live["weights"] | live["slow"] | live["drift"]


def expected(name: str, step: int) -> torch.Tensor:
    """One tensor at one step."""
    if name == "slow":
        last = [step - (step - block) % _BLOCKS for block in range(_BLOCKS)]
        blocks = [torch.arange(_BLOCK) + 1_000_003 * changed for changed in last]
        return (torch.cat(blocks) * _ODD)[:-99]
    if name == "drift":
        bits = (torch.arange(_DRIFTING) * _ODD >> 40 & 0x7F) + 0x3F80
        bits[step % 1009 :: 1009] += 1 + step % 5
        return bits.to(torch.int16).view(torch.bfloat16)
    if name == "halves":
        return (torch.arange(_HALVES) % 251 + step % 7).to(torch.bfloat16)
    size = _SIZES[name]
    mixed = torch.arange(size, dtype=torch.int64) + (step + 1) * 1_000_003 + len(name)
    return mixed * _ODD  # wraps around, which mixes the bits


def wrong(live: Live, step: int) -> list[str]:
    """All that is not as it was at that step."""
    found = [
        name
        for name, tensor in _tensors(live).items()
        if not torch.equal(tensor, expected(name, step))
    ]
    counters = live["counters"]
    wanted: list[object] = [step, -step, f"step {step}", 1.0 / (step + 1)]
    if counters["step"] != step or counters["history"] != wanted:
        found.append(f"counters ({counters})")
    return found
