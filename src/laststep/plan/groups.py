"""Cut the ranks of a job into groups, whose first ranks gather what the others have written.

Pure. With about as many groups as ranks in each, nobody hears from more than some hundred others,
in jobs of a hundred thousand ranks as well.
"""

from __future__ import annotations

import math
from typing import NamedTuple

ONE_GROUP_RANKS = 256
"""Up to so many ranks, all are one group: the first rank hears from everybody itself."""


class Groups(NamedTuple):
    """The groups of a job: so many consecutive ranks in each, but for the last."""

    ranks: int
    size: int

    @property
    def leaders(self) -> range:
        """The first rank of each group."""
        return range(0, self.ranks, self.size)

    def leader_of(self, rank: int) -> int:
        """The first rank of the group that a rank is in."""
        return rank - rank % self.size

    def group_of(self, rank: int) -> range:
        """All ranks of the group that a rank is in."""
        first = self.leader_of(rank)
        return range(first, min(first + self.size, self.ranks))


def cut(ranks: int, per_node: int = 1) -> Groups:
    """The groups of a job of so many ranks. Nodes of `per_node` ranks are not cut apart, where that
    is known."""
    if ranks <= ONE_GROUP_RANKS:
        return Groups(ranks, ranks)
    nodes = max(round(math.sqrt(ranks) / per_node), 1)
    return Groups(ranks, min(nodes * per_node, ranks))
