"""A fingerprint of device tensors, to prove that they did not change during a lazy copy.

Every word is mixed with its position by a non-linear bijection before it is summed, so that sign
flips, swaps and shifts cannot cancel, which they do under a plain multiply-and-sum. Two 64-bit sums
per stretch; made on the current stream without synchronising. It detects accidents, not attackers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from laststep.engine.copy.kernels import Tiles, kernels_on

if TYPE_CHECKING:
    from collections.abc import Sequence

_STEP = 1 << 24
"""Words at a time without kernels: bounds the temporary memory to a few hundred megabytes."""


class Fingerprint:
    """How a set of contiguous, non-empty tensors is fingerprinted; holds on to none of them."""

    def __init__(self, tensors: Sequence[torch.Tensor], stream: torch.cuda.Stream | None) -> None:
        """`stream` is a side stream for uploads; None for tensors of the host."""
        self._places = [(tensor.data_ptr(), tensor.nbytes) for tensor in tensors]
        self._tiles: Tiles | None = None
        self._rest = list(range(len(tensors)))
        self.owners: list[int] = []
        kernels = None if stream is None else kernels_on(stream.device)
        if stream is not None and kernels is not None:
            fast = [n for n, t in enumerate(tensors) if t.nbytes % 4 == 0 and t.data_ptr() % 4 == 0]
            if fast:
                self._tiles = Tiles(kernels, [tensors[n] for n in fast], stream)
                self.owners = [fast[owner] for owner in self._tiles.owners]
                self._rest = sorted(set(self._rest) - set(fast))
        self.owners += self._rest

    def fits(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether these are tensors of the same sizes at the same places."""
        return [(tensor.data_ptr(), tensor.nbytes) for tensor in tensors] == self._places

    def rows(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """One row of two sums per stretch, on the current stream; `owners` says whose."""
        parts = [] if self._tiles is None else [self._tiles.sums()]
        if self._rest:
            parts.append(torch.stack([_plain(tensors[number]) for number in self._rest]))
        return torch.cat(parts)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """The same idea in plain operations: several passes, bounded temporaries."""
    raw = tensor.detach().view(-1).view(torch.uint8)
    whole = raw.numel() // 8 * 8
    total = torch.zeros(2, dtype=torch.int64, device=raw.device)
    aligned = raw if raw.data_ptr() % 8 == 0 else raw.clone()
    words = aligned[:whole].view(torch.int64)
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
