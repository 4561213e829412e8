"""Find out how many ranks this job has.

Knows only torch.distributed and the variables that its launchers set.
"""

from __future__ import annotations

import os

import torch.distributed

from laststep.errors import Usage


def world_size() -> int:
    """The number of ranks: the process group's, or what a launcher announced."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size()
    announced = os.environ.get("WORLD_SIZE", "1")
    return int(announced) if announced.isdigit() else 1


def require_single_rank() -> None:
    """Raise `Usage` in a job of several ranks, which this version cannot save as one checkpoint."""
    ranks = world_size()
    if ranks > 1:
        raise Usage(
            "this version saves jobs of one rank only",
            expected="a world size of 1",
            found=f"{ranks} ranks",
            remedy="save with torch.distributed.checkpoint until a later version takes over",
        )
