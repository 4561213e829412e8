"""The commit thread of a rank: takes part in the job's saves one by one, in the background.

Whatever happens in a save (`rounds`), every live rank gets the outcome and its reason in time, and
every `SaveHandle` is resolved here.

Before the first save, the ranks agree on a random key prefix for this job instance.
"""

from __future__ import annotations

import functools
import logging
import os
import queue
from collections import Counter
from typing import TYPE_CHECKING

from laststep.codecs.digests import digest
from laststep.commit.differences import Comparing
from laststep.commit.layouts import GlobalLayouts
from laststep.commit.rounds import Leader, Member, Participant, Round
from laststep.errors import StorageError, UsageError
from laststep.plan.receipts import cut
from laststep.process import threads
from laststep.ranks.group import RankGroup, Ranks
from laststep.ranks.key_value import KeyValueStore
from laststep.saving.schedule import SharedNotes
from laststep.settings import WAIT_FOR_OTHERS_S
from laststep.state.provider import PerRank
from laststep.storage.registry import open_store

if TYPE_CHECKING:
    from collections.abc import Mapping

    from laststep.flush.client import Client
    from laststep.flush.saves import Save
    from laststep.ranks.group import Rank
    from laststep.saving.context import RunContext
    from laststep.saving.describe import Prepared, TakenState
    from laststep.state.provider import StateProvider


log = logging.getLogger(__name__)

_NAME_BYTES = 8


class CommitThread:
    def __init__(self, participant: Participant, client: Client, comparing: Comparing) -> None:
        self.rank = participant.rank
        self.global_layouts = participant.global_layouts
        self._participant = participant
        self._client = client
        self._comparing = comparing
        self._entered = self._ended = 0
        """Counts of saves: written by the training thread, and by the commit thread."""
        self.global_layouts.known = lambda: (
            participant.known if self._entered == self._ended else None
        )
        self._step_kv: KeyValueStore | None = None
        self._rounds: queue.SimpleQueue[Round | None] = queue.SimpleQueue()
        self._thread = threads.Worker("commit", self._work).start()

    def all_ranks(self, call: str) -> Ranks:
        """Return the ranks that restore together. Collective: all of them make the same `call` now.

        Before the first save, the keys of all ranks move under a random prefix of this job
        instance: a launcher may restart ranks with a key-value store that still holds the keys of
        dead ones.
        """
        # Rank 0 may have to wait for a save that another process has not finished.
        deadline_s = self._participant.deadline_s + WAIT_FOR_OTHERS_S
        prefix = self.global_layouts.kv.prefix
        ranks = RankGroup(self.rank, prefix, deadline_s=deadline_s, call=call)
        name = ranks.broadcast(0, os.urandom(_NAME_BYTES)).hex()
        if not ranks.all_max(self._entered > 0):
            self._participant.kv.under(name)
            self.global_layouts.kv.under(name)
        return ranks

    def notes(self, ranks: Ranks) -> SharedNotes:
        """Return the sync points at which all ranks save in the same `step()`. Collective."""
        if self._step_kv is not None:
            self._step_kv.close()
        self._step_kv = self.new_kv(ranks, "step")
        deadline_s = self._participant.deadline_s
        return SharedNotes(self._step_kv, is_first=self.rank.is_first, deadline_s=deadline_s)

    def new_kv(self, ranks: Ranks, what: str) -> KeyValueStore:
        """Open a key-value store under a prefix that is used only once. Collective."""
        name = ranks.broadcast(0, os.urandom(_NAME_BYTES)).hex()
        prefix = f"{self.global_layouts.kv.prefix}/{what}/{name}"
        return KeyValueStore(prefix, ranks=ranks.size, patience_s=self._participant.deadline_s)

    def begin(self, save: Save, prepared: Prepared, taken: TakenState) -> None:
        """Enter a save of all ranks; its chunks may follow."""
        assert prepared.write_shard is not None  # noqa: S101 (set whenever there are several ranks)
        global_layout = prepared.write_shard.global_layout
        round_ = Round(save.step, save, global_layout)
        round_.replicas = self._comparing.begin(save.handle, taken, global_layout, self.rank.number)
        seal = functools.partial(round_.seal, rank=self.rank.number)
        self._client.begin(save, prepared.plan, functools.partial(taken.seal, prepared, seal))
        self._enter(round_)

    def stay_out(self, step: int, why: str) -> None:
        """Notify the other ranks that this one takes no part in a save of `step`."""
        self._enter(Round(step, None, None, problem=why))

    def close(self) -> None:
        """End the thread; call it when all saves are over."""
        self._rounds.put(None)
        self._thread.join()
        for kv in self._all_kv():
            kv.close()

    def leave(self) -> None:
        """Close the connections at interpreter exit, whatever is in progress."""
        for kv in self._all_kv():
            kv.close_at_exit()

    def _all_kv(self) -> list[KeyValueStore]:
        steps = [] if self._step_kv is None else [self._step_kv]
        return [self._participant.kv, self.global_layouts.kv, *steps]

    def _enter(self, round_: Round) -> None:
        self._entered += 1
        self._rounds.put(round_)

    # -- on the commit thread ---------------------------------------------------------------------

    def _work(self) -> None:
        while (round_ := self._rounds.get()) is not None:
            try:
                self._participant.go_through(round_)
            except BaseException as error:
                # Nothing else resolves this save: its waiters would block forever.
                with threads.outlasting(log, "the commit of step %d failed", round_.step):
                    if round_.save is not None:
                        round_.save.failed(StorageError("a commit failed", found=repr(error)))
                    raise
            self._ended += 1


_made: Counter[str] = Counter()


def refuse_mixed(providers: Mapping[str, StateProvider]) -> None:
    """Raise `UsageError` for a group that mixes per-rank state with shared state."""
    for name, provider in providers.items():
        if getattr(provider, "mixed", False):
            raise UsageError(
                "a group mixes shared state with per-rank state",
                where=f"item {name!r}",
                remedy="pass random numbers, loaders and the like as items of their own",
            )


def check_own(providers: Mapping[str, StateProvider], rank: Rank) -> None:
    """With several ranks, refuse mixed groups; log which items are per-rank without `PerRank`."""
    if rank.ranks == 1:
        return
    refuse_mixed(providers)
    for name, provider in providers.items():
        if provider.per_rank and provider.parts() and not isinstance(provider, PerRank):
            log.info(
                (
                    "%s is treated as per-rank state because it reads data (it has __iter__ or a "
                    "dataset); laststep.PerRank(%s, …) sets what happens to it when the number of "
                    "ranks changes"
                ),
                name,
                name,
            )


def gather(run: RunContext, client: Client) -> CommitThread:
    """Start the commit thread, through which this rank saves together with the others."""
    url, rank, deadline_s = run.store.url, run.rank, run.settings.deadline_s
    _made[url] += 1
    prefix = f"laststep/{digest(url.encode()).hex()}/{_made[url]}"
    # One connection per thread: the training thread must not wait for the commit thread's requests.
    key_value = [KeyValueStore(prefix, ranks=rank.ranks, patience_s=deadline_s) for _ in range(2)]
    global_layouts = GlobalLayouts(rank, key_value[0], deadline_s=deadline_s)
    store, groups = open_store(url), cut(rank.ranks)
    shared = (rank, key_value[1], client, global_layouts, store, deadline_s, groups)
    participant = Leader(*shared, run.bus) if rank.is_first else Member(*shared)
    return CommitThread(participant, client, Comparing(run.settings.compare_replicas))
