"""A 128-bit fingerprint of device tensors, to prove that they did not change during a lazy copy.

Every 32-bit word is mixed with its position by a non-linear finaliser before it is summed, so that
sign flips, swaps and shifts cannot cancel, which they do under a plain multiply-and-sum. Made on the
current stream of the tensors' device without synchronising. It detects accidents, not attackers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

_STEP = 1 << 24
"""Words at a time: bounds the temporary memory to a few hundred megabytes."""


def fingerprints(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """One row of two 64-bit sums per tensor, on their device. Tensors MUST be contiguous."""
    rows = [_fingerprint(tensor) for tensor in tensors]
    return torch.stack(rows)


def _fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    raw = tensor.detach().view(-1).view(torch.uint8)
    whole = raw.numel() // 8 * 8
    total = torch.zeros(2, dtype=torch.int64, device=raw.device)
    aligned = raw.data_ptr() % 8 == 0
    words = (raw if aligned else raw.clone())[:whole].view(torch.int64)
    for start in range(0, words.numel(), _STEP):
        total += _mix(words[start : start + _STEP], start)
    if whole < raw.numel():
        total += _mix(raw[whole:].to(torch.int64), whole)
    return total


def _mix(words: torch.Tensor, first: int) -> torch.Tensor:
    """Two sums over the finaliser of splitmix64, seeded by position; arithmetic wraps mod 2**64."""
    position = torch.arange(first + 1, first + 1 + words.numel(), device=words.device)
    mixed = words ^ (position * -7046029254386353131)
    mixed = (mixed ^ (mixed >> 30)) * -4658895280553007687
    mixed = (mixed ^ (mixed >> 27)) * -7723592293110705685
    mixed = mixed ^ (mixed >> 31)
    other = (mixed ^ (mixed >> 29)) * -5435081209227447693
    return torch.stack((mixed.sum(), other.sum()))
