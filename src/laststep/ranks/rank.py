"""Find the rank of this process and the number of ranks.

Knows only torch.distributed and the environment variables of its launchers.
"""

from __future__ import annotations

import os
from typing import NamedTuple

import torch.distributed

from laststep.errors import UsageError
from laststep.process import system


class Rank(NamedTuple):
    """The number of this process and the number of processes."""

    number: int
    ranks: int

    @property
    def is_first(self) -> bool:
        """Return whether this is rank 0, which decides for all."""
        return self.number == 0


def this_rank() -> Rank:
    """Return this process's rank, which log lines name from now on."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        rank = Rank(torch.distributed.get_rank(), torch.distributed.get_world_size())
        system.log_as_rank(rank.number if rank.ranks > 1 else None)
        return rank
    announced = os.environ.get("WORLD_SIZE", "1")
    if announced.isdigit() and int(announced) > 1:
        raise UsageError(
            "torch.distributed is not initialized",
            expected="torch.distributed.init_process_group() before the Checkpointer is made",
            found=f"WORLD_SIZE={announced} and no process group",
            remedy="call init_process_group() first, or unset WORLD_SIZE for a job of its own",
        )
    system.log_as_rank(None)
    return Rank(0, 1)


def ranks_per_node() -> int:
    """Return the number of ranks per node if the launcher says it, else 1."""
    announced = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(announced)) if announced.isdigit() else 1


def leaves_cores(rank: Rank) -> bool:
    """Return whether this node has more cores than ranks."""
    return rank.ranks == 1 or ranks_on_this_node(rank) < (os.cpu_count() or 1)


def ranks_on_this_node(rank: Rank) -> int:
    """Return how many ranks share this node's memory: as the launcher says, else all of them."""
    announced = os.environ.get("LOCAL_WORLD_SIZE", "")
    return min(ranks_per_node() if announced.isdigit() else rank.ranks, rank.ranks)
