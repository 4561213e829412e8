"""Track which checkpoint the live state comes from and which one the next save continues.

Belongs to the training thread. Detects a live state that mixes several checkpoints, and records
whether it is decided which checkpoint the first save follows.
"""

from __future__ import annotations

import contextlib
import functools
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from laststep.catalog.lineage import Seen
from laststep.commit import thread as teaming
from laststep.errors import CorruptError, NotFoundError
from laststep.ranks.group import collective
from laststep.restoring import waiting
from laststep.restoring.plan import selection
from laststep.restoring.restore import Restored, newest_of, peek_into, restore_into
from laststep.running import continuing
from laststep.saving.context import RunContext, refuse_to_leave
from laststep.saving.describe import without_collection
from laststep.tiers.nearest import NearestStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from laststep.ranks.group import Ranks
    from laststep.restoring.restore import Outcome, Peeked, RestoreRequest
    from laststep.running import RunningParts
    from laststep.storage.store import Store


class _Peek(NamedTuple):
    """The checkpoint that `peek()` returned."""

    peeked: Peeked
    elsewhere: set[str]
    """The items that were not, or not completely, read from the primary."""


class _Origin(NamedTuple):
    """The checkpoint that the live state of an item comes from, until the next save."""

    folder: str
    is_all: bool
    """False if a restore failed midway."""


class Resuming:
    """The checkpoint that this job instance continues."""

    def __init__(self, context: RunContext, work: RunningParts) -> None:
        self._context, self._store = context, context.store
        self._work = work
        self._group: Ranks | None = None
        self._origins: dict[str, _Origin] = {}
        """Origins of items that were restored separately, or whose restore failed."""
        self._seen = Seen()
        self._resumed = False
        self._knows_lineage = context.settings.new_lineage
        """True once it is decided which checkpoint the first save continues."""
        self._peek: _Peek | None = None
        self._damaged: frozenset[str] = frozenset()
        """Checkpoints that `peek()` returned and that were then found damaged."""

    @property
    def mixed(self) -> str | None:
        """A checkpoint that is only partly in the live state, so that nothing may be saved; else
        None."""
        if not self._origins:
            return None
        origins = list(self._origins.values())
        broken = [origin.folder for origin in origins if not origin.is_all]
        several = {origin.folder for origin in origins}
        return broken[0] if broken else min(several) if len(several) > 1 else None

    def all_ranks(self, call: str) -> Ranks:
        """Return the ranks that restore together and meet for `step()`. Collective at its first
        call."""
        if self._group is None:
            self._group = teaming.all_ranks(self._context, self._work.team, call)
        return self._group

    def peek(self, wanted: RestoreRequest) -> Peeked | None:
        """Find the checkpoint to restore, and bind later restores to it instead of an earlier
        one."""
        earlier, self._peek = self._peek, None
        with self._looking("peek()") as (store, group):
            found = peek_into(
                store,
                self._context.bus,
                replace(wanted, damaged=self._damaged),
                ranks=group,
                saw=self._saw,
            )
        if found is None and self._damaged:
            raise CorruptError(
                "no checkpoint of this run is sound",
                where=self._store.url,
                found=f"damage in {', '.join(sorted(self._damaged))}",
                remedy=(
                    f"`laststep verify {self._store.url}` lists it; "
                    "try a copy of the run, or start a new run elsewhere"
                ),
            )
        self._peek = None if found is None else _Peek(found, set())
        if earlier is not None and found is not None and found.folder == earlier.peeked.folder:
            self._peek = earlier
        return found

    def restore(self, wanted: RestoreRequest, begin_anew: Callable[[], None]) -> Restored:
        """Restore, and let saves continue the restored checkpoint. `begin_anew` is called when all
        ranks are ready."""
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
                    self._context.providers,
                    room,
                    self._context.bus,
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
            self._work.saves.restored(0)
            self._work.client.continue_from(continuing(None, self._seen))
            return Restored(step=None, next_step=0)
        self._go_on(outcome, wanted, before, peek)
        return outcome.told(() if peek is None else peek.peeked.skipped)

    def _touch(self, only: Sequence[str] | None, folder: str) -> None:
        """Record that the selected items are incomplete from now on: they hold neither their old
        state nor the stored one until everything is read."""
        touched = [item for item in self._context.providers if selection(only, item)[0]]
        self._origins = self._origins | dict.fromkeys(touched, _Origin(folder, is_all=False))

    def _go_on(
        self,
        outcome: Outcome,
        wanted: RestoreRequest,
        before: dict[str, _Origin],
        peek: _Peek | None,
    ) -> None:
        """Record the origins of the restored items and let saves continue the checkpoint. A partial
        restore without a peek leaves the origins of all other items unknown; partial restores after
        a peek must all come from that checkpoint."""
        found, only, was_read = outcome.chosen, wanted.only, outcome.was_read
        if peek is not None:
            items = [
                item for item in self._context.providers if selection(only, item) == (True, None)
            ]
            this = _Origin(found.folder, is_all=True)
            before = before | dict.fromkeys(items, this)
            peek.elsewhere.difference_update(items)
            if not outcome.was_in_primary:
                peek.elsewhere.update(items)
            of_this = {item for item, origin in before.items() if origin == this}
            was_read = of_this >= self._context.providers.keys() and not peek.elsewhere
        elif only is None:
            before = {}
        if not outcome.mixed:
            self._origins = before
        # Restoring a part of an older checkpoint in mid-run does not move the run back to it.
        if only is None or peek is not None or not (self._resumed or self._work.has_saved):
            self._work.client.continue_from(continuing(found, self._seen, was_read=was_read))
            self._work.saves.restored(found.step, found.lineage_steps)
            self._resumed = True

    def _let_go(
        self, peek: _Peek, error: CorruptError | NotFoundError
    ) -> CorruptError | NotFoundError:
        """Release a peeked checkpoint that cannot be restored, so that the next `peek()` returns
        another. Returns the error to raise."""
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
            remedy=f"call peek() again for {offered} one, and restore all of it",
        )
        return told if error.missing is None else told.lacking(error.missing)

    def saves(self) -> None:
        """Prepare for a save. For the first save without a restore(), raise `UsageError` if it
        would abandon checkpoints of the run."""
        self._peek = None
        self._origins = {}
        if not self._knows_lineage:
            seen = self._work.client.newest_point()
            refuse_to_leave(newest_of(self._store), self._store.url)
            self._work.client.continue_from(continuing(None, seen))
            self._knows_lineage = True

    def continue_newest(self) -> None:
        """Let saves continue the newest checkpoint without restoring it, as an import does."""
        seen = self._work.client.newest_point()
        newest = newest_of(self._store)
        self._work.client.continue_from(continuing(newest, seen, resumed=False))
        self._knows_lineage = True

    @contextlib.contextmanager
    def _looking(self, call: str) -> Iterator[tuple[Store, Ranks]]:
        """Wait until all saves are over, in this and other Checkpointers of this process, and until
        all ranks are here; yield the run's store as the ranks see it, and the ranks."""
        self._work.wait()
        waiting.wait_for_others(self._work, self._store.url)
        store, tiers = self._store, self._context.tiers
        with contextlib.ExitStack() as stack:
            if tiers.memory is not None or tiers.replicas:
                near = NearestStore(store, tiers.memory, self._work.segment)
                store = stack.enter_context(contextlib.closing(near))
            stack.enter_context(without_collection())
            known = self._group is not None
            group = self.all_ranks(call)
            if known:  # else creating the group has synchronised them
                group.arrive()
            collective(group, self._ready)
            yield store, group

    def _ready(self) -> None:
        """Raise the error of a failed save, or restart a flusher that died so that more saves can
        be made."""
        self._work.saves.take_over()
        self._work.saves.raise_failed()
        self._work.revive(self._context.settings)

    def _saw(self, seen: Seen) -> None:
        # A restore bound to a peek ignores checkpoints committed after it. Counting those as seen
        # would let the next save abandon them. `peek()` itself runs unbound.
        if self._peek is None:
            self._seen = seen
