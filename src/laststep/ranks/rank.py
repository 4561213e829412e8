"""Find out which rank of how many this process is.

Knows only torch.distributed and the variables that its launchers set.
"""

from __future__ import annotations

import os
from typing import NamedTuple

import torch.distributed

from laststep.errors import UsageError
from laststep.process import system


class Rank(NamedTuple):
    """This process's number, and how many there are."""

    number: int
    ranks: int

    @property
    def is_first(self) -> bool:
        """Whether it decides for all."""
        return self.number == 0


def this_rank() -> Rank:
    """This process's rank, which lines of the log carry from now on; `UsageError` in a job of
    several whose process group is not there yet."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        rank = Rank(torch.distributed.get_rank(), torch.distributed.get_world_size())
        system.speak_as(rank.number if rank.ranks > 1 else None)
        return rank
    announced = os.environ.get("WORLD_SIZE", "1")
    if announced.isdigit() and int(announced) > 1:
        raise UsageError(
            "the ranks of this job do not know each other yet",
            expected="torch.distributed.init_process_group() before the Checkpointer is made",
            found=f"WORLD_SIZE={announced} and no process group",
            remedy="call init_process_group() first, or unset WORLD_SIZE for a job of its own",
        )
    system.speak_as(None)
    return Rank(0, 1)


def ranks_per_node() -> int:
    """How many ranks a node has, as far as the launcher says; else 1."""
    announced = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(announced)) if announced.isdigit() else 1


def leaves_cores(rank: Rank) -> bool:
    """Whether this node has a core for something else, while each of its ranks is busy on one."""
    return rank.ranks == 1 or ranks_on_this_node(rank) < (os.cpu_count() or 1)


def ranks_on_this_node(rank: Rank) -> int:
    """How many ranks share this node's memory: what the launcher says, or all of them."""
    announced = os.environ.get("LOCAL_WORLD_SIZE", "")
    return min(ranks_per_node() if announced.isdigit() else rank.ranks, rank.ranks)
