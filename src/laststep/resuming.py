"""From where a start goes on: the checkpoint that it restores, and what its saves continue.

Belongs to the training thread. Knows whether the live state is one state, and whether it is decided
which checkpoint the first save follows.
"""

from __future__ import annotations

import contextlib
import functools
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from laststep.catalog.lineage import Seen
from laststep.commit import thread as teaming
from laststep.errors import CorruptError, NotFoundError
from laststep.ranks.group import together
from laststep.restoring import waiting
from laststep.restoring.fit import selection
from laststep.restoring.restore import Restored, newest_of, peek_into, restore_into
from laststep.running import continuing
from laststep.saving import place as places
from laststep.saving import place as queueing
from laststep.saving.describe import without_collection
from laststep.tiers.nearest import nearest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from laststep.events import Bus
    from laststep.ranks.group import Ranks
    from laststep.ranks.rank import Rank
    from laststep.restoring.restore import Outcome, Peeked, RestoreRequest
    from laststep.running import RunningParts
    from laststep.saving.place import SavedSteps
    from laststep.settings import Settings
    from laststep.state.provider import StateProvider
    from laststep.storage.store import Store
    from laststep.tiers.nearest import NearestStore
    from laststep.tiers.tier import Arranged


class _Peek(NamedTuple):
    """The checkpoint that was peeked at."""

    peeked: Peeked
    elsewhere: set[str]
    """The items that were not read in the run itself, or not all of them."""


class _Origin(NamedTuple):
    """Of which checkpoint the live state of an item is, up to the next save."""

    folder: str
    is_all: bool
    """False where a restore has failed midway."""


class Resuming:
    """What this start goes on from."""

    def __init__(
        self,
        store: Store,
        tiers: Arranged,
        providers: Mapping[str, StateProvider],
        settings: Settings,
        rank: Rank,
        bus: Bus,
        work: RunningParts,
        steps: SavedSteps,
    ) -> None:
        self._store, self._tiers, self._providers = store, tiers, providers
        self._settings, self._rank, self._bus = settings, rank, bus
        self._work, self._steps = work, steps
        self._group: Ranks | None = None
        self._origins: dict[str, _Origin] = {}
        """Of the items that were restored in parts, or in vain."""
        self._seen = Seen()
        self._resumed = False
        self._knows_lineage = settings.new_lineage
        """Whether it is decided what the first save continues."""
        self._peek: _Peek | None = None
        self._damaged: frozenset[str] = frozenset()
        """Those that were peeked at, and then found damaged."""

    @property
    def mixed(self) -> str | None:
        """The checkpoint of which only a part was put in place, so that nothing may be saved."""
        origins = list(self._origins.values())
        broken = [origin.folder for origin in origins if not origin.is_all]
        several = {origin.folder for origin in origins}
        return broken[0] if broken else min(several) if len(several) > 1 else None

    def all_ranks(self, call: str) -> Ranks:
        """Those that restore together, and meet for `step()`; brought together by that call."""
        if self._group is None:
            self._group = teaming.all_ranks(self._rank, self._settings, self._work.team, call)
        return self._group

    def peek(self, wanted: RestoreRequest) -> Peeked | None:
        """Find the checkpoint to restore, and hold to it instead of an earlier one."""
        earlier, self._peek = self._peek, None
        with self._looking("peek()") as (store, group):
            found = peek_into(
                store, self._bus, replace(wanted, damaged=self._damaged), ranks=group, saw=self._saw
            )
        if found is None and self._damaged:
            raise CorruptError(
                "no checkpoint of this run is sound",
                where=self._store.url,
                found=f"damage in {', '.join(sorted(self._damaged))}",
                remedy=f"`laststep verify {self._store.url}` lists it; a copy of the run may still "
                "be good, and a new run elsewhere begins from the start",
            )
        self._peek = None if found is None else _Peek(found, set())
        if earlier is not None and found is not None and found.folder == earlier.peeked.folder:
            self._peek = earlier
        return found

    def restore(self, wanted: RestoreRequest, begin_anew: Callable[[], None]) -> Restored:
        """Restore, and let saves continue that; `begin_anew` is called when all ranks are here."""
        peek = self._peek = self._peek if wanted.step is None else None
        if peek is not None:
            wanted = replace(wanted, peeked=peek.peeked.folder)
        remote = self._store.same_everywhere
        try:
            with (
                self._looking("restore()") as (store, group),
                self._work.pool.reading(wanted.threads, remote=remote) as room,
            ):
                begin_anew()
                before = self._origins
                outcome = restore_into(
                    store,
                    self._providers,
                    room,
                    self._bus,
                    wanted,
                    ranks=group,
                    touched=functools.partial(self._touch, wanted.only),
                    saw=self._saw,
                )
        except (CorruptError, NotFoundError) as error:
            if peek is None:
                raise
            raise self._let_go(peek, error) from error
        self._knows_lineage = True
        if outcome is None:
            self._steps.restored(0)
            self._work.client.continue_from(continuing(None, self._seen))
            return Restored(step=None, next_step=0)
        self._go_on(outcome, wanted, before, peek)
        return outcome.told(() if peek is None else peek.peeked.skipped)

    def _touch(self, only: Sequence[str] | None, folder: str) -> None:
        """From now on items are neither what they were nor what is stored, until all is read."""
        touched = [item for item in self._providers if selection(only, item)[0]]
        self._origins = self._origins | dict.fromkeys(touched, _Origin(folder, is_all=False))

    def _go_on(
        self,
        outcome: Outcome,
        wanted: RestoreRequest,
        before: dict[str, _Origin],
        peek: _Peek | None,
    ) -> None:
        """Saves continue what was restored. A part that was taken from anywhere says nothing of the
        rest; parts of what was peeked at are to be of one checkpoint."""
        found, only, was_read = outcome.chosen, wanted.only, outcome.was_read
        if peek is not None:
            items = [item for item in self._providers if selection(only, item) == (True, None)]
            this = _Origin(found.folder, is_all=True)
            before = before | dict.fromkeys(items, this)
            peek.elsewhere.difference_update(items)
            if not outcome.was_at_home:
                peek.elsewhere.update(items)
            of_this = {item for item, origin in before.items() if origin == this}
            was_read = of_this >= self._providers.keys() and not peek.elsewhere
        elif only is None:
            before = {}
        if not outcome.mixed:
            self._origins = before
        # A part taken from an older checkpoint in mid-run does not turn the run back to it.
        if only is None or peek is not None or not (self._resumed or self._work.preflight):
            self._work.client.continue_from(continuing(found, self._seen, was_read=was_read))
            self._steps.restored(found.step, found.lineage_steps)
            self._resumed = True

    def _let_go(
        self, peek: _Peek, error: CorruptError | NotFoundError
    ) -> CorruptError | NotFoundError:
        """What was peeked at is not to be had: the next `peek()` offers another."""
        self._peek = None
        offered = "another"
        if isinstance(error, CorruptError):
            self._damaged |= {peek.peeked.folder}
            offered = "the next older"
        told = type(error)(
            error.what,
            where=error.where,
            expected=error.expected,
            found=error.found,
            remedy=f"peek() again offers {offered} one, of which all is then to be restored",
        )
        return told if error.missing is None else told.lacking(error.missing)

    def saves(self) -> None:
        """Before each save. Before the first one without a restore(): it may leave nothing
        behind."""
        self._peek = None
        self._origins = {}
        if not self._knows_lineage:
            seen = self._work.client.newest_point()
            places.refuse_to_leave(newest_of(self._store), self._store.url)
            self._work.client.continue_from(continuing(None, seen))
            self._knows_lineage = True

    def continue_newest(self) -> None:
        """Let saves continue the newest checkpoint without restoring it, as an import does."""
        seen = self._work.client.newest_point()
        newest = newest_of(self._store)
        self._work.client.continue_from(continuing(newest, seen, resumed=False))
        self._knows_lineage = True

    @contextlib.contextmanager
    def _looking(self, call: str) -> Iterator[tuple[NearestStore | Store, Ranks]]:
        """All saves are over, here and in other Checkpointers of this process, and all ranks are
        here: the run as they see it."""
        self._work.wait()
        waiting.wait_for_others(self._work, self._store.url)
        near = nearest(
            self._store,
            self._tiers.memory,
            self._work.segment,
            has_further=bool(self._tiers.further),
        )
        with without_collection(), near as store:
            known = self._group is not None
            group = self.all_ranks(call)
            if known:  # else they arrived where it was made
                group.arrive()
            together(group, self._ready)
            yield store, group

    def _ready(self) -> None:
        """Raise what failed, or see to it that more saves can be made."""
        self._steps.take_over(self._work.client.saves)
        queueing.raise_first(self._work.client.saves.tell())
        self._work.revive(self._settings)

    def _saw(self, seen: Seen) -> None:
        # A restore bound to a peek leaves out what was committed after it: to count that as seen
        # would let the next save abandon it. `peek()` itself runs unbound.
        if self._peek is None:
            self._seen = seen
