"""Bring the ranks of a job together for the saves of one Checkpointer.

All ranks make their Checkpointers in the same order: the n-th of a run on one rank meets the n-th
of that run on the others.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import TYPE_CHECKING

from laststep.codecs.digests import digest
from laststep.commit.agreement import Agreements
from laststep.commit.replicas import Comparing
from laststep.commit.round import RoundContext
from laststep.commit.thread import CommitThread
from laststep.plan.groups import cut
from laststep.ranks.board import Board
from laststep.ranks.group import Alone, RankGroup
from laststep.ranks.rank import ranks_per_node
from laststep.saving.portion import refuse_mixed
from laststep.settings import WAIT_FOR_OTHERS_S
from laststep.state.values import PerRank
from laststep.storage.registry import open_store

if TYPE_CHECKING:
    from collections.abc import Mapping

    from laststep.events import Bus
    from laststep.flush.client import Client
    from laststep.ranks.group import Ranks
    from laststep.ranks.rank import Rank
    from laststep.settings import Settings
    from laststep.state.provider import StateProvider

log = logging.getLogger(__name__)

_made: Counter[str] = Counter()


def check_own(providers: Mapping[str, StateProvider], rank: Rank) -> None:
    """Of several ranks, refuse groups that are each rank's own in part. The log tells of items that
    are taken for each rank's own though nobody said so."""
    for name, provider in providers.items() if rank.ranks > 1 else ():
        refuse_mixed(name, mixed=getattr(provider, "mixed", False))
        if provider.per_rank and provider.parts() and not isinstance(provider, PerRank):
            log.info(
                "%s is taken for each rank's own: it reads data (it has __iter__ or a dataset); "
                "laststep.PerRank(%s, …) says what becomes of it when the number of ranks changes",
                name, name,
            )  # fmt: skip


def all_ranks(rank: Rank, settings: Settings, team: CommitThread | None, call: str) -> Ranks:
    """The ranks that restore together; with a team, those that save together too. All make that
    `call` now."""
    if team is None:
        return Alone(rank)
    # The first rank may wait for a save that another process has not finished.
    name = team.agreements.board.prefix
    deadline_s = settings.deadline_s + WAIT_FOR_OTHERS_S
    group = RankGroup(rank, name, deadline_s=deadline_s, call=call)
    team.meet(group)
    return group


def gather(rank: Rank, run: str, client: Client, settings: Settings, bus: Bus) -> CommitThread:
    """Start this rank's commit thread, through which it saves together with the others."""
    _made[run] += 1
    prefix = f"laststep/{digest(run.encode()).hex()}/{_made[run]}"
    # A connection for each thread that asks: the training thread's must not wait for the other's.
    deadline_s = settings.deadline_s
    boards = [Board(prefix, ranks=rank.ranks, patience_s=deadline_s) for _ in range(2)]
    agreements = Agreements(rank, boards[0], deadline_s=deadline_s)
    store = open_store(run)
    desk = RoundContext(rank, boards[1], client, agreements, store, deadline_s=deadline_s)
    comparing = Comparing(settings.compare_replicas)
    return CommitThread(desk, cut(rank.ranks, ranks_per_node()), comparing, bus)


def board_to_stop(team: CommitThread | None, ranks: Ranks) -> Board:
    """The notes by which several ranks agree on the step at which they stop."""
    assert team is not None  # noqa: S101 (of several ranks)
    return team.new_board(ranks, "stop")
