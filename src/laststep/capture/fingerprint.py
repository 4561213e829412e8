"""Fingerprints of device memory, to prove that a copy is what was there at `save()`.

Every word is mixed with its position by a non-linear bijection before it is summed, so that sign
flips, swaps and shifts cannot cancel, as they do under a plain multiply-and-sum. Two 64-bit sums
per range, computed on the current stream without synchronising. Depends on the bytes alone, not on
their address. Detects accidents, not attackers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from laststep.capture.kernels import Tiles

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from laststep.capture.kernels import Kernels


class Fingerprint:
    """Fingerprints a fixed list of ranges; holds none of the memory. Two fingerprints are
    comparable if their ranges have equal sizes and both or neither use kernels."""

    def __init__(
        self,
        ranges: Sequence[tuple[int, int]],
        kernels: Kernels | None,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        """Ranges of (address, bytes), none of them empty; `stream` is a side stream for uploads,
        which kernels need."""
        self._tiles: Tiles | None = None
        self.owners = list(range(len(ranges)))
        """The range of each row."""
        if kernels is not None and stream is not None and ranges:
            self._tiles = Tiles(kernels, ranges, stream)
            self.owners = self._tiles.owners

    def sums(
        self, first: int, last: int, bytes_of: Callable[[int], torch.Tensor]
    ) -> tuple[slice, torch.Tensor]:
        """Return rows of two sums for the ranges [first, last), computed on the current stream, and
        their positions among all rows; `bytes_of` returns the bytes of a range if there are no
        kernels."""
        if self._tiles is not None:
            return self._tiles.rows(first, last), self._tiles.sums(first, last)
        rows = [mixed(bytes_of(number)) for number in range(first, last)]
        return slice(first, last), torch.stack(rows)


def mixed(raw: torch.Tensor) -> torch.Tensor:
    """Compute the same in plain torch operations on a flat byte tensor: several passes, and
    temporaries of several times its size. A range is never larger than a chunk."""
    whole = raw.numel() // 8 * 8
    odd = raw.data_ptr() % 8 or raw.storage_offset() % 8
    words = (raw[:whole].clone() if odd else raw[:whole]).view(torch.int64)
    total = _mix(words, 0)
    return total + _mix(raw[whole:].to(torch.int64), whole) if whole < raw.numel() else total


def _mix(words: torch.Tensor, first: int) -> torch.Tensor:
    """Two sums over the finaliser of splitmix64, seeded by position; arithmetic wraps mod 2**64."""
    position = torch.arange(first + 1, first + 1 + words.numel(), device=words.device)
    mixed = words ^ (position * -7046029254386353131)
    mixed = (mixed ^ (mixed >> 30)) * -4658895280553007687
    mixed = (mixed ^ (mixed >> 27)) * -7723592293110705685
    mixed = mixed ^ (mixed >> 31)
    other = (mixed ^ (mixed >> 29)) * -5435081209227447693
    return torch.stack((mixed.sum(), other.sum()))
