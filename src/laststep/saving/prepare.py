"""What follows from how a state is described: worked out once, and kept while that stays the same.

Runs on the training thread in `save()`. Between two saves a training mostly changes nothing but
numbers, so each description is compared with the last one, once. Everything that depends on it
hangs on one value, which is replaced whole: no part of it can be of another state.
"""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING

from laststep.capture.copies import Copies
from laststep.flush.encoder import Rounding
from laststep.plan.deriving import with_derived
from laststep.plan.files import SavePlan, plan_save
from laststep.process import signals
from laststep.saving.describe import agree_alone, table_of, take_state, without_collection, work_out
from laststep.terms import CHUNK_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    import torch

    from laststep.capture.capture import Capturer
    from laststep.codecs.objects import EncodedDicts
    from laststep.memory.pool import Pool
    from laststep.plan.files import ItemSpec
    from laststep.plan.tables import Agreement, Table
    from laststep.ranks.rank import Rank
    from laststep.saving.describe import Described, Portion, TakenState
    from laststep.state.provider import StateProvider
    from laststep.state.tensors import CollectCache

log = logging.getLogger(__name__)


class Prepared:
    """All that a save needs besides the state itself."""

    def __init__(self, described: Described, plan: SavePlan, portion: Portion | None) -> None:
        self.described = described
        self.plan = plan
        self.portion = portion
        """What this rank writes of what it holds; None: all of it, as it is."""
        self.copies = Copies(plan)
        self.trees: dict[str, EncodedDicts] = {}
        """What the capture thread keeps of each item's tree from one save to the next."""


class Preparer:
    """Prepares the saves of one Checkpointer."""

    def __init__(
        self,
        rank: Rank,
        *,
        derived: bool | Mapping[str, str] = False,
        lossy: Mapping[str, str] | None = None,
        excerpts: Sequence[Collection[str]] = (),
    ) -> None:
        """`derived` is what the user says of tensors that follow from others, `lossy` of those that
        may be rounded, `excerpts` of items that go somewhere without the rest."""
        self._rank = rank
        self._derived = derived
        self._lossy = lossy or {}
        self._excerpts = excerpts
        self.last: Prepared | None = None

    def prepare(
        self, taken: TakenState, agree: Callable[[Table], Agreement] | None = None
    ) -> tuple[Prepared, tuple[torch.Tensor, ...]]:
        """What follows from this state, the very same value while it stays; and the memory that is
        written, one for each piece of the plan. In a job of several ranks, `agree` tells what all
        hold, when this rank holds what a table says."""
        described = taken.described
        last = self.last if self.last and self.last.described == described else None
        if agree is None and not any(layouts for _, layouts in described):
            if last is None:
                last = self.last = Prepared(described, self._plan(taken.specs), None)
            return last, taken.sources
        known = last and last.portion
        table = known.table if known else table_of(taken)
        if agree is not None:
            agreement = agree(table)
        else:
            agreement = known.agreement if known else agree_alone(table)
        if last and known and known.agreement is agreement:
            sources = known.sources(taken)
            if sources is not None:
                return last, sources
        portion, sources = work_out(taken, agreement, table, self._rank.number)
        if agree is None:
            plan = self._plan(portion.specs)
        else:
            plan = self._plan(portion.specs, rank=self._rank, values=portion.values)
        self.last = Prepared(described, plan, portion)
        return self.last, sources

    def _plan(
        self,
        items: tuple[ItemSpec, ...],
        rank: Rank | None = None,
        values: tuple[str, ...] | None = None,
    ) -> SavePlan:
        plan = plan_save(items, rank=rank, values=values)
        if rank is None and self._lossy:
            self._tell_of_useless(plan)
        if not self._derived:
            return plan
        return with_derived(plan, self._derived, is_all=rank is None, excerpts=self._excerpts)

    def _tell_of_useless(self, plan: SavePlan) -> None:
        """Warn of patterns that round nothing, once. In a job of ranks each has but a part."""
        used = {p for file in plan.files for p in Rounding(file.layout, self._lossy).patterns}
        for pattern in self._lossy.keys() - used:
            log.warning(
                "lossy: %r rounds nothing: no float32 tensor of one or more dimensions is named so "
                "(`laststep show` lists names), or an earlier pattern names it",
                pattern,
            )
        self._lossy = {pattern: self._lossy[pattern] for pattern in used}


def rehearse(
    providers: Mapping[str, StateProvider],
    caches: dict[str, CollectCache],
    preparer: Preparer,
    pool: Pool,
    capturer: Capturer,
    *,
    allow_pickle: bool,
) -> bool:
    """Find out where everything is before the first save asks, while the device has work; False if
    it is too early. Whatever goes wrong is the first save's to report."""
    if not all(provider.cheap for provider in providers.values()):
        return True  # what is not may have come to a dict meanwhile
    if not capturer.is_ready():
        return False
    with signals.held(), without_collection(), contextlib.suppress(Exception):
        taken = take_state(providers, caches, None, None, allow_pickle=allow_pickle)
        prepared, sources = preparer.prepare(taken)
        pool.want(prepared.plan.tensor_bytes + CHUNK_BYTES)
        capturer.prepare(prepared.copies, sources)
    return True
