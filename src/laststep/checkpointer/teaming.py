"""Bring the ranks of a job together for the saves of one Checkpointer.

All ranks make their Checkpointers in the same order: the n-th of a run on one rank meets the n-th
of that run on the others.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from laststep.checkpointer.agreeing import Agreements
from laststep.checkpointer.team import Team
from laststep.codecs.digests import digest
from laststep.dist.board import Board

if TYPE_CHECKING:
    from laststep.config import Settings
    from laststep.dist.ranks import Rank
    from laststep.engine.client import Client

_made: Counter[str] = Counter()


def gather(rank: Rank, run: str, client: Client, settings: Settings) -> Team:
    """This rank's side of the team."""
    _made[run] += 1
    prefix = f"laststep/{digest(run.encode()).hex()}/{_made[run]}"
    # A connection for each thread that asks: the training thread's must not wait for the other's.
    agreements = Agreements(rank, Board(prefix), deadline_s=settings.deadline_s)
    return Team(rank, Board(prefix), client, agreements, deadline_s=settings.deadline_s)
