"""The Checkpointer: save, restore, wait, close.

Lives on the training thread and owns everything else: the pool, the capture thread, the flusher and
its client. It keeps the order of things and the promises about errors: a failed save raises at the
next call, a state restored only in part is not saved, and whatever was handed over is finished or
reported before the process ends.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import time
from typing import TYPE_CHECKING, Never, Self, SupportsIndex

from laststep import arguments
from laststep.checks import seconds
from laststep.commit import thread as teaming
from laststep.errors import AbortedError, LaststepError, brief
from laststep.events import Bus, SaveSkipped, SaveStarted, Subscriber
from laststep.flush.saves import SaveUnderWay
from laststep.process import signals, system
from laststep.process import threads as single
from laststep.ranks.rank import leaves_cores, ranks_on_this_node, this_rank
from laststep.restoring import waiting
from laststep.resuming import Resuming
from laststep.running import RunningParts, start_parts
from laststep.saving import place as places
from laststep.saving import place as queueing
from laststep.saving import preempting
from laststep.saving import preflight as sizing
from laststep.saving import schedule as scheduling
from laststep.saving.describe import take_state, without_collection
from laststep.saving.place import SavedSteps
from laststep.saving.prepare import Preparer, rehearse
from laststep.settings import DEFAULTS, FlushIn, OnBusy, Settings
from laststep.state.items import Late, providers_for
from laststep.storage.registry import open_store
from laststep.tiers.tier import Tier, arranged
from laststep.watching import watch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import TracebackType

    import torch

    from laststep.capture.job import Job
    from laststep.catalog.retention import Keep
    from laststep.flush.saves import SaveHandle
    from laststep.plan.files import SavePlan
    from laststep.ranks.board import Board
    from laststep.ranks.rank import Rank
    from laststep.restoring.restore import Peeked, Restored, RestoreRequest
    from laststep.settings import Capture, CompareReplicas, Preemption
    from laststep.state.tensors import CollectCache

log = logging.getLogger(__name__)

_REHEARSAL_STEP = 3
"""The optimizer step at which the first save is rehearsed: by then the optimizer has its state."""


class Checkpointer(single.OnlyOne):
    """Saves and restores the state of a run: `Checkpointer("runs/gpt", model=model, …)`. Meant for
    the thread that trains; calls from several are taken one after the other."""

    def __init__(  # noqa: PLR0913 (each setting is a keyword of its own)
        self,
        run: str | os.PathLike[str] | None = None,
        /,
        *unnamed: Never,
        items: Mapping[str, object] | None = None,
        keep: Keep | None = None,
        tiers: Sequence[str | os.PathLike[str] | Tier] = (),
        capture: Capture | str = DEFAULTS.capture,
        flush: FlushIn | str = DEFAULTS.flush,
        on_busy: OnBusy | str = DEFAULTS.on_busy,
        host_memory_bytes: int | None = DEFAULTS.host_memory_bytes,
        device_margin_bytes: int = DEFAULTS.device_margin_bytes,
        allow_pickle: bool = DEFAULTS.allow_pickle,
        writers: int = DEFAULTS.writers,
        progress: bool | None = DEFAULTS.progress,
        deadline_s: float = DEFAULTS.deadline_s,
        compare_replicas: CompareReplicas | str = DEFAULTS.compare_replicas,
        compression: str | Mapping[str, str] = DEFAULTS.compression,
        lossy: Mapping[str, str] | None = DEFAULTS.lossy,
        derived: bool | Mapping[str, str] = DEFAULTS.derived,
        every: int | str | None = DEFAULTS.every,
        mtbf: str | None = DEFAULTS.mtbf,
        most_share: float = DEFAULTS.most_share,
        new_lineage: bool = DEFAULTS.new_lineage,
        preemption: Preemption | bool | None = False,
        subscribers: Sequence[Subscriber] = (),
        **more_items: object,
    ) -> None:
        """`items` and keyword arguments name the parts of the state; see docs for the settings."""
        arguments.refuse_unnamed(unnamed)
        named = arguments.all_items(items, more_items)
        self._settings = Settings(
            capture=capture,  # type: ignore[arg-type]
            flush=flush,  # type: ignore[arg-type]
            on_busy=on_busy,  # type: ignore[arg-type]
            host_memory_bytes=host_memory_bytes,
            device_margin_bytes=device_margin_bytes,
            allow_pickle=allow_pickle,
            writers=writers,
            progress=progress,
            deadline_s=deadline_s,
            compare_replicas=compare_replicas,  # type: ignore[arg-type]
            new_lineage=new_lineage,
            every=every,
            mtbf=mtbf,
            most_share=most_share,
            derived=arguments.derived(derived),
            **arguments.coding(compression, lossy, named, here=flush == FlushIn.THREAD),
        )
        self._tiers = arranged(run, tiers, arguments.rules(keep))
        excerpts = arguments.excerpts(self._tiers.further, named, self._settings.derived)
        subscribers = arguments.callables(subscribers)
        self._rank = self._who()
        self._preparer = Preparer(
            self._rank,
            derived=self._settings.derived,
            lossy=self._settings.lossy,
            excerpts=excerpts,
        )
        self._caches: dict[str, CollectCache] = {}
        """By which the state of each item is known again at its next save."""
        self._turn = queueing.Turn()
        self._steps = SavedSteps()
        self._closed = False
        self._pid = os.getpid()
        by_others = self._rank.ranks > 1 or self._settings.flush is FlushIn.PROCESS
        self._store = open_store(self._tiers.home, shared=by_others)
        self.path = self._store.url
        self._providers = providers_for(named)
        self._late = [one for one in self._providers.values() if isinstance(one, Late)]
        teaming.check_own(self._providers, self._rank)
        if self._rank.is_first or not self._store.same_everywhere:
            places.look_at(self._store)
        self._bus = Bus()
        watch(self._bus, subscribers, progress=self._settings.progress)
        self._ending = preempting.look_out(arguments.preemption(preemption), self._rank, self._bus)
        with signals.held():
            self._start()
        if self._ending is not None:
            self._ending.install()  # outside of `held`, which holds other handlers now

    def _start(self) -> None:
        """Everything that runs."""
        self._work = work = start_parts(
            self._store, self._tiers, self._providers, self._settings, self._rank, self._bus
        )
        self._pool, self._capturer, self._client = work.pool, work.capturer, work.client
        self._team = work.team
        self._capturer.at_optimizer_step(1, self._work.start_early)
        self._capturer.at_optimizer_step(_REHEARSAL_STEP, system.weakly(self._rehearse))
        self._dropped = self._work.outlive(self)
        self._resuming = Resuming(
            self._store,
            self._tiers,
            self._providers,
            self._settings,
            self._rank,
            self._bus,
            work,
            self._steps,
        )
        self._schedule = scheduling.Schedule(
            self._settings, self._rank, self._client.past, may_only_end=self._ending is not None
        )
        waiting.enter(self._work, self.path, RunningParts.under_way)

    def __repr__(self) -> str:
        state = ", closed" if self._closed else ""
        return f"<Checkpointer of {self.path}: {', '.join(self._providers)}{state}>"

    @staticmethod
    def _who() -> Rank:
        return this_rank()

    # -- saving -----------------------------------------------------------------------------------

    def save(
        self,
        step: SupportsIndex,
        *,
        metrics: Mapping[str, object] | None = None,
        metadata: object = None,
        overwrite: bool = False,
        streams: Sequence[torch.cuda.Stream] = (),
    ) -> SaveHandle:
        """Save the state as it is now, and return as soon as training may go on.

        Raises what made an earlier save fail, once. In a job of several ranks this save is under
        way all the same when it does: the others count on it. `streams` names CUDA streams, other
        than the current one, on which state was written and not yet joined.
        """
        system.check_process("save", self._pid)  # before a turn that may be another process's
        asked = arguments.SaveRequest(step, metrics, metadata, overwrite, streams)
        with signals.held(), self._turn.of("save"), system.translate_oom("save"):
            handle = self._save(asked)
        if self._ending is not None and self._team is not None:
            self._ending.reached(handle.step, self._meet_to_stop)
        return handle

    def _save(self, asked: arguments.SaveRequest) -> SaveHandle:
        began = time.perf_counter()
        self._check_usable("save")
        self._steps.take_over(self._client.saves)
        if self._team is None:  # else ranks hear of it at different saves, and make the same ones
            queueing.raise_first(self._client.saves.tell())
        try:
            return self._begin_save(asked, began)
        except BaseException:
            self._schedule.refused()
            raise

    def _begin_save(self, asked: arguments.SaveRequest, began: float) -> SaveHandle:
        step, asked = asked.plain()
        self._work.revive(self._settings)
        others = [save.handle.step for save in self._client.saves.all()]
        overwrite = self._steps.replaces(step, others, self.path, overwrite=asked.overwrite)
        save = SaveUnderWay(
            self._client,
            step,
            overwrite=overwrite,
            role="alone" if self._team is None else "first" if self._rank.is_first else "member",
        )
        waited = self._make_room(save)
        if save.handle.report.skipped is None:
            with without_collection():
                job = self._capture(save, asked)
            job.timing.stall_s = time.perf_counter() - began
            job.timing.waited_s += waited
            self._schedule.began(save.handle)
        else:
            self._schedule.give_up_due()
        queueing.raise_first(self._client.saves.tell())
        return save.handle

    def _capture(self, save: SaveUnderWay, asked: arguments.SaveRequest) -> Job:
        """Take the state and hand it to the capture thread."""
        self._capturer.join(asked.streams)
        early, last = None, self._preparer.last
        if last is not None and all(provider.passive for provider in self._providers.values()):
            early = self._capturer.start_early(last.copies)
        try:
            self._resuming.saves()
            taken = take_state(
                self._providers,
                self._caches,
                asked.metrics,
                asked.metadata,
                allow_pickle=self._settings.allow_pickle,
            )
            self._look_at_late()
            agree = None
            if self._team is not None:
                agree = functools.partial(self._team.agreements.on, step=save.handle.step)
            prepared, sources = self._preparer.prepare(taken, agree)
            self._announce(save.handle, prepared.plan)
            if self._team is None:
                self._client.begin(save, prepared.plan, taken.sealing(prepared))
            else:
                self._team.begin(save, prepared, taken)
        except BaseException as error:
            if early is not None:
                self._capturer.cancel(early)
            if self._team is not None:
                self._team.stay_out(save.handle.step, brief(error))
            raise
        try:
            job = self._capturer.take(prepared.copies, sources, save, early)
        except BaseException as error:
            # Ctrl-C included: a save that is never sealed would hold up all that follow it.
            save.failed(
                error
                if isinstance(error, LaststepError)
                else AbortedError("save() was interrupted")
            )
            self._client.saves.forget(save)
            raise
        save.job = job
        save.handle.refresh_with(sizing.report_of(job))
        return job

    def step(
        self,
        step: SupportsIndex,
        *,
        metrics: Mapping[str, object] | None = None,
        metadata: object = None,
        last: bool = False,
        streams: Sequence[torch.cuda.Stream] = (),
    ) -> SaveHandle | None:
        """Save the state, if by `every` it is time to; for the end of each step, on all ranks.

        `last` saves it in any case. Returns the save, if there is one. Raises what made an earlier
        one fail: at once, or in a job of several ranks with the next save, which all make. If that
        keeps a single rank from saving, the next call of `step` saves. With `preemption`,
        `Preempted` where the job is to end: its last save is over then.
        """
        self._check_usable("step")
        number, last = arguments.plain_step(step), arguments.true_or_false("last", last)
        due = self._schedule.due(number, self._meet, last=last)
        save = functools.partial(
            self.save, number, metrics=metrics, metadata=metadata, streams=streams
        )
        if self._ending is not None:
            if self._ending.reached(number, self._meet_to_stop):
                self._schedule.give_up_due()
                return self._ending.carry_out(number, save, self._work, self._steps)
            if due:
                return self._ending.bound(number, save, self._work, self._steps)
        elif due:
            return save()
        if self._team is None and any(save.over for save in self._client.saves.all()):
            with signals.held(), self._turn.of("step"):
                self._raise_failed()
        return None

    def _meet(self) -> scheduling.Notes:
        """Bring the ranks together for `step()`, when it is first called or after a restore."""
        with signals.held():
            team, ranks = self._team, self._resuming.all_ranks("step()")
            return scheduling.OwnNotes() if team is None else team.notes(ranks)

    @property
    def preempted(self) -> bool:
        """Whether the job is to end, by its `preemption`; in a job of several ranks the same on all
        of them after the same `step()` or `save()`."""
        stops = self._ending is not None and self._ending.stops
        if stops:
            self._work.ends_well = True  # the loop ends now, whether or not it calls close()
        return stops

    def _meet_to_stop(self) -> Board:
        """Bring several ranks together, so that they can agree on the step at which they stop."""
        with signals.held():
            return teaming.board_to_stop(self._team, self._resuming.all_ranks("step()"))

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until all saves are committed; False when the time is up. Raises what failed."""
        system.check_process("wait", self._pid)
        self._turn.check("wait")
        if not self._work.over_within(seconds(timeout_s)):
            return False
        with signals.held(), self._turn.of("wait"):
            self._raise_failed()
        return True

    def close(self) -> None:
        """Wait for all saves, end the flusher, and raise what failed. May be called twice: the
        second call does what an interrupt of the first one has left."""
        self._end(well=True)

    def _end(self, *, well: bool) -> None:
        """Close, knowing whether training has ended as it should."""
        if os.getpid() != self._pid or self._work.closes:
            return
        self._turn.check("close")
        with signals.held():
            self._work.wait()  # Ctrl-C here leaves it open
            with self._turn.of("close"):
                self._closed = True
                self._work.ends_well = self._client.drains_last = well
                self._client.ends_well = well and self._schedule.end()
                self._work.close()  # Ctrl-C here leaves the rest to the next call
                self._dropped.detach()
                system.let_be(self._work)
                if self._ending is not None:
                    self._ending.close()
                self._raise_failed()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
            return
        try:
            self._end(well=not isinstance(error, Exception))  # else somebody has stopped it
        except LaststepError as failed:
            # The body's own error is the news; what a save died of is in the log.
            log.error("a save failed as well: %s", failed)  # noqa: TRY400 (no second traceback)

    def subscribe(self, subscriber: Subscriber) -> Callable[[], None]:
        """Be told of every event; returns the function that ends it."""
        return self._bus.subscribe(subscriber)

    # -- restoring --------------------------------------------------------------------------------

    def restore(
        self,
        step: SupportsIndex | None = None,
        *,
        only: Sequence[str] | str | None = None,
        strict: bool = True,
        exact: bool = False,
    ) -> Restored:
        """Restore the newest checkpoint that verifies, or exactly the given step.

        `only` names items, or globs over `item/tensor` names; nothing else is read or changed, and
        a run that is under way goes on from where it is. `exact` refuses what was rounded. Saves to
        this run that are under way in this process are waited for; what failed of one's own is
        raised.
        """
        system.check_process("restore", self._pid)
        starting = self._work.starting(beside=leaves_cores(self._rank))
        with signals.held(), self._turn.of("restore"), system.translate_oom("restore"), starting:
            self._check_usable("restore", mixed_is_fine=True)
            wanted = self._request(step, only, strict=strict, exact=exact)
            restored = self._resuming.restore(wanted, self._begin_anew)
            self._look_at_late()
            return restored

    def peek(self) -> Peeked | None:
        """The newest checkpoint that opens, with its metadata, before any state is restored; None
        in a new run. On all ranks, as with `restore()`.

        Each `restore()` that follows, up to the next save, reads this very one, of which it names a
        part or not. One that finds it damaged raises `CorruptError`, and `peek()` then gives the
        next older one."""
        system.check_process("peek", self._pid)
        with signals.held(), self._turn.of("peek"), system.translate_oom("peek"):
            self._check_usable("peek", mixed_is_fine=True)
            return self._resuming.peek(self._request(None, None, strict=True, exact=False))

    def continue_newest(self) -> None:
        """Let saves continue the newest checkpoint without restoring it, as an import does."""
        self._resuming.continue_newest()

    # -- inside -----------------------------------------------------------------------------------

    def _request(
        self, step: SupportsIndex | None, only: object, *, strict: bool, exact: bool
    ) -> RestoreRequest:
        return arguments.restore_request(
            step,
            only,
            self._settings,
            ranks_on_this_node(self._rank),
            strict=strict,
            exact=exact,
            remote=self._store.same_everywhere,
            tiers=self._tiers.further,
        )

    def _begin_anew(self) -> None:
        """The ranks of this job are here to restore."""
        self._schedule.anew()
        if self._ending is not None:
            self._ending.anew()

    def _look_at_late(self) -> None:
        """Have ready what items need that did not exist at construction, once all do."""
        if self._late and all(one.is_made for one in self._late):
            teaming.check_own(self._providers, self._rank)
            self._late.clear()
            self._work.expect(self._providers, self._settings, self._rank)

    def _check_usable(self, what: str, *, mixed_is_fine: bool = False) -> None:
        system.check_process(what, self._pid)
        mixed = None if mixed_is_fine else self._resuming.mixed
        places.refuse_unusable(what, closed=self._closed, mixed=mixed)

    def _raise_failed(self) -> None:
        """Raise the first failure that nobody has seen, of saves that are over."""
        self._steps.take_over(self._client.saves)
        queueing.raise_first(self._client.saves.tell())

    def _make_room(self, save: SaveUnderWay) -> float:
        """Wait for, or give way to, earlier saves that stand in the way; returns the seconds."""
        saves, last = self._client.saves.all(), self._preparer.last
        short = last is not None and self._pool.room_bytes < last.plan.tensor_bytes
        reason = queueing.obstacle(saves, short_of_room=short)
        if reason is None:
            return 0.0
        is_last = self._ending is not None and self._ending.is_last
        if self._settings.on_busy is OnBusy.WAIT or is_last:
            return queueing.wait_for_turn(saves)
        save.handle.skip(reason)
        self._bus.emit(SaveSkipped(step=save.handle.step, reason=reason))
        if self._team is not None:
            self._team.stay_out(save.handle.step, f"skipped the save: {reason}")
        return 0.0

    def _announce(self, handle: SaveHandle, plan: SavePlan) -> None:
        size_bytes = plan.tensor_bytes
        handle.report.size_bytes, handle.report.tensors = size_bytes, len(plan.pieces)
        self._bus.emit(SaveStarted(step=handle.step, size_bytes=size_bytes))
        self._work.prepare_for(size_bytes, self._store, self._tiers.keep, self._bus)

    def _rehearse(self) -> bool:
        """Prepare what the first save needs, at an early optimizer step; False if it is too early.
        A rank among others prepares memory alone."""
        if self._closed or self._work.preflight or os.getpid() != self._pid:
            return True
        if self._late:
            if all(one.is_there() for one in self._late):
                with contextlib.suppress(LaststepError):  # the first save tells of it
                    self._look_at_late()
            return False
        if self._team is not None or not all(
            provider.cheap for provider in self._providers.values()
        ):
            return True
        return rehearse(
            self._providers,
            self._caches,
            self._preparer,
            self._pool,
            self._capturer,
            allow_pickle=self._settings.allow_pickle,
        )
