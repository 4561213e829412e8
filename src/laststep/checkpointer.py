"""The Checkpointer: save, restore, wait, close.

Lives on the training thread and owns all other parts. It keeps the order of operations and the
promises about errors: a failed save raises at the next call, a partly restored state is never
saved, and every save that has begun is finished or reported before the process ends.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import time
from typing import TYPE_CHECKING, Never, Self, SupportsIndex

from laststep import arguments
from laststep.checks import seconds
from laststep.commit import thread as teaming
from laststep.constants import CHUNK_BYTES
from laststep.errors import AbortedError, LaststepError, UsageError, brief, ends_tracebacks
from laststep.events import Bus, SaveSkipped, SaveStarted, Subscriber, watch
from laststep.flush.saves import Save
from laststep.preempting import Preempting
from laststep.process import signals, system
from laststep.process import threads as single
from laststep.ranks.group import leaves_cores, ranks_on_this_node, this_rank
from laststep.restoring import choose
from laststep.restoring.restore import RestoreRequest
from laststep.running import Resuming, RunningParts, start_parts
from laststep.saving import schedule as scheduling
from laststep.saving.context import RunContext, look_at
from laststep.saving.describe import Preparer, take_state, without_collection
from laststep.settings import DEFAULTS, FlushIn, OnBusy
from laststep.state.items import Deferred, providers_for
from laststep.storage.registry import open_store
from laststep.tiers.tier import Tier, arranged

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import torch

    from laststep.capture.mover import Job
    from laststep.catalog.retention import Keep
    from laststep.flush.protocol import Role
    from laststep.flush.saves import SaveHandle
    from laststep.ranks.key_value import KeyValueStore
    from laststep.restoring.restore import Peeked, Restored
    from laststep.settings import Options, Preemption

log = logging.getLogger(__name__)

DISABLED = "LASTSTEP_DISABLED"
"""The environment variable that turns saving off, for a run in which laststep is not wanted."""
_DEFERRED_STEP = 3
"""The optimizer step at which deferred items are looked at: by then the optimizer has state."""


class Checkpointer(single.OnlyOne):
    """Saves and restores the state of one run: `Checkpointer("runs/gpt", model=model, …)`.

    Create it after the model is on its device, and in a job of several ranks on all of them. It is
    meant for the training thread; calls from other threads are serialised.

    run: The folder of the run, created at the first save, or the URL of a store. Omit it if
        `tiers` names it.
    items: Items by name, for names that are settings or no identifiers. All keywords that are not
        listed here are items too.
    keep: The retention rules, a `Keep`; None keeps all checkpoints.
    tiers: The stores of the run, nearest first: paths, URLs and `Tier`s. `"shm://"` in front keeps
        saves in memory that outlives the trainer.
    every: How often `step()` saves: an int N for every N steps, a duration such as `"10 min"`, or
        `"auto"` to minimise the time lost to failures and saves.
    compression: `"none"`, `"adaptive"`, `"max"` or the name of a codec; or a dict with one of these
        per item, in which `"*"` stands for all others.
    allow_pickle: Pickle objects that cannot be stored otherwise, and unpickle them on restore.
    new_lineage: Allow saves without a `restore()` in a run that has checkpoints; they start a new
        lineage. Also allow saves that lack items of the restored checkpoint. Otherwise the first
        such save raises `UsageError`.
    host_memory_bytes: The limit of host memory for saves, at least 64 MiB. None means a quarter of
        the available memory, shared by the ranks of a node.
    preemption: True or a `Preemption` to save and exit when the job is about to be killed.
    options: All other settings, an `Options`.
    """

    @ends_tracebacks
    def __init__(  # noqa: PLR0913 (each setting is a keyword of its own)
        self,
        run: str | os.PathLike[str] | None = None,
        /,
        *unnamed: Never,
        items: Mapping[str, object] | None = None,
        keep: Keep | None = None,
        tiers: Sequence[str | os.PathLike[str] | Tier] = (),
        every: int | str | None = DEFAULTS.every,
        compression: str | Mapping[str, str] = DEFAULTS.compression,
        allow_pickle: bool = DEFAULTS.allow_pickle,
        new_lineage: bool = DEFAULTS.new_lineage,
        host_memory_bytes: int | None = DEFAULTS.host_memory_bytes,
        preemption: Preemption | bool | None = False,
        options: Options | None = None,
        **more_items: object,
    ) -> None:
        """Check the run and the arguments, and start the background threads. Creates nothing in
        the run before the first save. Raises `UsageError` for arguments that cannot work, and
        `StorageError` if there is no run and none can be created."""
        named = arguments.all_items(unnamed, items, more_items)
        settings = arguments.all_settings(
            options,
            named,
            every=every,
            compression=compression,
            allow_pickle=allow_pickle,
            new_lineage=new_lineage,
            host_memory_bytes=host_memory_bytes,
        )
        places, rank = arranged(run, tiers, arguments.rules(keep)), self._who()
        arguments.check_tiers(places.replicas, named)
        self._preparer = Preparer(rank)
        self._turn = Turn()
        self._closed = False
        self._pid = os.getpid()
        asked_off = os.environ.get(DISABLED, "").lower() not in ("", "0", "false", "no")
        self._is_off = asked_off and self._can_be_off
        by_others = rank.ranks > 1 or settings.flush is FlushIn.PROCESS
        self._context = context = RunContext(
            store=open_store(places.primary, shared=by_others),
            tiers=places,
            providers=providers_for(named),
            settings=settings,
            rank=rank,
            bus=Bus(),
        )
        self.path = context.store.url
        self._take = functools.partial(
            take_state, context.providers, {}, allow_pickle=settings.allow_pickle
        )
        self._deferred = [item for item in context.providers.values() if isinstance(item, Deferred)]
        teaming.check_own(context.providers, rank)
        if rank.is_first or not context.store.same_everywhere:
            look_at(context.store)
        if self._is_off:
            log.log(
                system.shared_warning(), "%s is set: nothing is saved to %s", DISABLED, self.path
            )
        watch(context.bus, settings.subscribers, progress=settings.progress)
        asked = arguments.preemption(preemption)
        self._ending = None if asked is None else Preempting(asked, rank, context.bus)
        with signals.defer_signals():
            self._work = work = start_parts(context)
            self._pool, self._capturer, self._client = work.pool, work.capturer, work.client
            self._team, self._saves = work.team, work.saves
            self._capturer.at_optimizer_step(1, work.start_early)
            if self._deferred:
                self._capturer.at_optimizer_step(_DEFERRED_STEP, system.weakly(self._expect_late))
            self._dropped = work.outlive(self)
            self._resuming = Resuming(context, work)
            self._schedule = scheduling.Schedule(settings, rank, self._client.instance.past)
            choose.enter(work, self.path, RunningParts.under_way)
        if self._ending is not None:
            self._ending.install()  # not inside `defer_signals`, which replaces handlers

    def __repr__(self) -> str:
        state = ", closed" if self._closed else ""
        return f"<Checkpointer of {self.path}: {', '.join(self._context.providers)}{state}>"

    _who = staticmethod(this_rank)
    _can_be_off = True
    _may_lack_items = False
    """True in adapters whose items depend on how the framework trains this time."""

    # -- saving -----------------------------------------------------------------------------------

    @ends_tracebacks
    def save(
        self,
        step: SupportsIndex,
        *,
        metrics: Mapping[str, object] | None = None,
        metadata: object = None,
        overwrite: bool = False,
        streams: Sequence[torch.cuda.Stream] = (),
    ) -> SaveHandle:
        """Save the state as it is now; return as soon as training may continue.

        The checkpoint exists once the returned handle is committed. If an earlier save failed, its
        error is raised here, once. With several ranks this save has begun nevertheless, because
        the other ranks depend on it.

        step: An int of 0 or more; pass `int(step)` for a tensor. Raises `AlreadyExistsError` if
            the lineage already has this step, unless `overwrite`.
        metrics: Names mapped to numbers, strings, bools or tensors of one element.
        metadata: Any tree of plain values; `restore()` returns it.
        overwrite: Save the step even if the lineage already has it.
        streams: CUDA streams other than the current one that have written state and have not been
            joined yet.
        """
        with self._call("save"):
            began = time.perf_counter()
            self._saves.take_over()
            asked = arguments.save_request(step, metrics, metadata, overwrite, streams)
            if self._team is None:  # else ranks learn of it at different saves, but must all save
                self._saves.raise_failed(unsaved=asked.step)
            if self._saves.refusal is not None:
                self._work.revive(self._context.settings)
            overwrite = self._saves.check_new(asked.step, self.path, overwrite=asked.overwrite)
            role: Role = "alone"
            if self._team is not None:
                role = "first" if self._context.rank.is_first else "member"
            save = Save(self._client, asked.step, overwrite=overwrite, role=role)
            last = self._preparer.last
            short = last is not None and self._pool.room_bytes < last.plan.tensor_bytes
            obstacle = self._saves.obstacle(short_of_room=short)
            is_last = self._ending is not None and self._ending.is_last
            waits = self._context.settings.on_busy is OnBusy.WAIT or is_last
            if self._is_off:
                obstacle, waits = f"{DISABLED} is set", False
            if obstacle is None or waits:
                waited = 0.0 if obstacle is None else self._saves.wait_for_turn()
                with without_collection():
                    job = self._capture(save, asked)
                job.timing.stall_s = time.perf_counter() - began
                job.timing.waited_s += waited
                self._schedule.began(save.handle)
            else:
                save.skip(obstacle)
                self._context.bus.emit(SaveSkipped(step=save.step, reason=obstacle))
                if self._team is not None:
                    self._team.stay_out(save.step, f"skipped the save: {obstacle}")
            self._saves.raise_failed()
        if self._ending is not None and self._team is not None:
            self._ending.reached(save.step, self._meet_to_stop)
        return save.handle

    def _capture(self, save: Save, asked: arguments.SaveRequest) -> Job:
        """Take the state and hand it to the capture thread."""
        self._capturer.join(asked.streams)
        early, last = None, self._preparer.last
        providers = self._context.providers
        if last is not None and all(provider.passive for provider in providers.values()):
            early = self._capturer.start_early(last.copies)
        try:
            self._resuming.saves(may_lack_items=self._may_lack_items)
            if self._team is not None:
                teaming.refuse_mixed(providers)
            taken = self._take(asked.metrics, asked.metadata)
            if self._deferred:
                self._look_at_late()
            agree = None
            if self._team is not None:
                agree = functools.partial(self._team.global_layouts.on, step=save.step)
            prepared, sources = self._preparer.prepare(taken, agree)
            save.report.size_bytes = size_bytes = prepared.plan.tensor_bytes
            save.report.tensors = len(prepared.plan.pieces)
            self._context.bus.emit(SaveStarted(step=save.step, size_bytes=size_bytes))
            self._pool.want(self._work.sets * size_bytes + CHUNK_BYTES)
            self._work.has_saved = True
            if self._team is None:
                self._client.begin(
                    save, prepared.plan, functools.partial(taken.seal, prepared, None)
                )
            else:
                self._team.begin(save, prepared, taken)
        except BaseException as error:
            if early is not None:
                self._capturer.cancel(early)
            if self._team is not None:
                self._team.stay_out(save.step, brief(error))
            raise
        try:
            job = self._capturer.take(prepared.copies, sources, save, early)
        except BaseException as error:
            # Also for Ctrl-C: a save whose capture never ends would block all later ones.
            interrupted = AbortedError("save() was interrupted")
            save.failed(error if isinstance(error, LaststepError) else interrupted)
            self._saves.forget(save)
            raise
        save.job = job
        return job

    @ends_tracebacks
    def step(
        self,
        step: SupportsIndex,
        *,
        metrics: Mapping[str, object] | None = None,
        metadata: object = None,
        last: bool = False,
        streams: Sequence[torch.cuda.Stream] = (),
    ) -> SaveHandle | None:
        """Save the state if a save is due by `every`; call it on all ranks at the end of each step.

        Returns the handle of the save, or None if none was due. `last=True` saves in any case,
        unless this step is saved already. The other arguments are those of `save()`. Steps must
        not decrease, except after a `restore()`.

        If an earlier save failed, its error is raised here: by the next call or, with several
        ranks, together with the next save. The next call of a single rank then saves what was due.
        With `preemption`, raises `Preempted` after the last save of a preempted job.
        """
        system.check_process("step", self._pid)
        self._check_usable("step")
        number, last = arguments.plain_step(step), arguments.true_or_false("last", last)
        save = functools.partial(
            self.save, number, metrics=metrics, metadata=metadata, streams=streams
        )
        ending = self._ending
        if ending is None and self._context.settings.every is None:
            raise UsageError(
                "step() needs a save interval",
                expected="a Checkpointer with every=… or preemption=…",
                remedy="pass every='auto', every=1000 or every='10 min'; or call save()",
            )
        if ending is not None and ending.reached(number, self._meet_to_stop):
            return ending.carry_out(number, save, self._work)
        if self._team is None and any(save.over for save in self._saves.all()):
            with signals.defer_signals(), self._turn.of("step"):
                self._raise_failed()  # before the schedule sees this step: it stays due
        if self._is_off or not self._schedule.due(number, self._meet, last=last):
            return None
        return save() if ending is None else ending.bound(number, save, self._work)

    def _meet(self) -> scheduling.Notes:
        """Connect the ranks for `step()`, at its first call and after a restore. Collective."""
        with signals.defer_signals():
            team, ranks = self._team, self._resuming.all_ranks("step()")
            return scheduling.Notes() if team is None else team.notes(ranks)

    @property
    def preempted(self) -> bool:
        """True if the job is being preempted and the training loop should end. Changes only in
        `step()` and `save()`, and is the same on all ranks after each."""
        stops = self._ending is not None and self._ending.stops
        if stops:
            self._work.ends_well = True  # the loop ends now, even if it does not call close()
        return stops

    def _meet_to_stop(self) -> KeyValueStore:
        """Connect several ranks, so that they agree on the step at which they stop. Collective."""
        with signals.defer_signals():
            ranks = self._resuming.all_ranks("step()")
            assert self._team is not None  # noqa: S101 (only with several ranks)
            return self._team.new_kv(ranks, "stop")

    @ends_tracebacks
    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until all saves are committed and return True; return False after `timeout_s`
        seconds. Raises the error of a failed save; with on_error="warn" returns False instead."""
        system.check_process("wait", self._pid)
        self._turn.check("wait")
        if not self._work.over_within(seconds(timeout_s)):
            return False
        with signals.defer_signals(), self._turn.of("wait"):
            return self._raise_failed()

    @ends_tracebacks
    def close(self) -> None:
        """Wait for all saves, end the flusher, and raise the error of a failed save. May be called
        twice: the second call completes one that was interrupted."""
        self._end(well=True)

    def _end(self, *, well: bool) -> None:
        if os.getpid() != self._pid or self._work.closes:
            return
        self._turn.check("close")
        with signals.defer_signals():
            self._work.wait()  # Ctrl-C here leaves the Checkpointer open
            with self._turn.of("close"):
                self._closed = True
                self._work.ends_well = self._client.drains_last = well
                self._client.ends_well = well and self._context.rank.is_first
                if well:
                    self._schedule.warn_of_unsaved_step()
                self._work.close()  # Ctrl-C here leaves the rest to the next call
                self._dropped.detach()
                system.let_be(self._work)
                if self._ending is not None:
                    self._ending.close()
                self._raise_failed()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
            return
        try:
            self._end(well=not isinstance(error, Exception))  # well: Ctrl-C or an exit
        except LaststepError as failed:
            # The error of the body takes precedence; the error of the save is only logged.
            log.error("a save failed too: %s", failed)  # noqa: TRY400 (no second traceback)

    def subscribe(self, subscriber: Subscriber) -> None:
        """Call `subscriber` with every event (see `laststep.events`)."""
        self._context.bus.subscribe(subscriber)

    # -- restoring --------------------------------------------------------------------------------

    @ends_tracebacks
    def restore(
        self,
        step: SupportsIndex | None = None,
        *,
        only: Sequence[str] | str | None = None,
        strict: bool = True,
        exact: bool = False,
    ) -> Restored:
        """Restore the newest checkpoint that verifies, or exactly the given step. Call it on all
        ranks.

        Waits for all saves to this run that are in progress in this process, and raises the error
        of a failed one of this Checkpointer. In a new run it restores nothing, and
        `Restored.next_step` is 0.

        step: The step to restore; None means the newest checkpoint that verifies.
        only: An item, a glob over `item/tensor` names, or a list of these. Nothing else is read
            or changed, and a run in progress continues from its present step.
        strict: False restores everything that fits and lists the rest in `Restored.problems`.
            True raises `MismatchError` instead.
        exact: True raises `MismatchError` for tensors that were rounded when they were saved.
        """
        starting = self._work.starting(beside=leaves_cores(self._context.rank))
        with self._call("restore", mixed_is_fine=True), starting:
            wanted = self._request(step, only, strict=strict, exact=exact)
            restored = self._resuming.restore(wanted, self._begin_anew)
            if self._deferred:
                self._look_at_late()
            return restored

    @ends_tracebacks
    def peek(self) -> Peeked | None:
        """Return the newest checkpoint that can be opened, with its step, metrics and metadata,
        without restoring anything; None in a new run. All ranks must call it.

        Until the next save, every `restore()` without a step reads this checkpoint, even if there
        is a newer one by then. If such a restore finds it damaged, it raises `CorruptError`, and
        the next `peek()` returns the next older checkpoint.
        """
        with self._call("peek", mixed_is_fine=True):
            return self._resuming.peek(self._request(None, None, strict=True, exact=False))

    def continue_newest(self) -> None:
        self._resuming.continue_newest()

    # -- internal ---------------------------------------------------------------------------------

    def _request(
        self, step: SupportsIndex | None, only: object, *, strict: bool, exact: bool
    ) -> RestoreRequest:
        context = self._context
        ranks_here, remote = ranks_on_this_node(context.rank), context.store.same_everywhere
        return RestoreRequest(
            step=None if step is None else arguments.plain_step(step),
            only=arguments.patterns(only),
            strict=arguments.true_or_false("strict", strict),
            exact=arguments.true_or_false("exact", exact),
            allow_pickle=context.settings.allow_pickle,
            threads=context.settings.readers(ranks_here, remote=remote),
            tiers=context.tiers.replicas,
        )

    def _begin_anew(self) -> None:
        """Reset schedule and preemption; called when all ranks are ready to restore."""
        self._schedule.anew()
        if self._ending is not None:
            self._ending.anew()

    def _look_at_late(self) -> None:
        """Check deferred items and allocate memory for them, once all of them exist."""
        if all(item.is_made for item in self._deferred):
            teaming.check_own(self._context.providers, self._context.rank)
            self._deferred.clear()
            self._work.expect(self._context)

    @contextlib.contextmanager
    def _call(self, what: str, *, mixed_is_fine: bool = False) -> Iterator[None]:
        """Admit one call at a time, and only if the Checkpointer can be used."""
        system.check_process(what, self._pid)  # before a lock that a fork may have copied
        with signals.defer_signals(), self._turn.of(what), system.translate_oom(what):
            self._check_usable(what, mixed_is_fine=mixed_is_fine)
            yield

    def _check_usable(self, what: str, *, mixed_is_fine: bool = False) -> None:
        mixed = "" if mixed_is_fine else self._resuming.mixed
        if self._closed:
            raise UsageError(
                f"cannot {what}: the Checkpointer is closed",
                remedy="create a new Checkpointer for the same run",
            )
        if mixed:
            raise UsageError(
                f"cannot {what}: the live state is only partly restored",
                found=f"a restore that failed, or several checkpoints, in {mixed}",
                remedy="restore() a whole checkpoint first",
            )

    def _raise_failed(self) -> bool:
        """Raise the first error of a finished save that has not been raised yet."""
        self._saves.take_over()
        return self._saves.raise_failed()

    def _expect_late(self) -> bool:
        """Allocate memory for deferred items early; return False if one does not exist yet."""
        if self._closed or self._work.has_saved or os.getpid() != self._pid:
            return True
        if not all(item.is_there() for item in self._deferred):
            return False
        with contextlib.suppress(LaststepError):  # the first save reports it
            self._look_at_late()
        return True


class Turn:
    """A lock that admits one call at a time, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: int | None = None
        """The thread that holds the lock; `_what` is the name of its call."""
        self._what = ""

    @contextlib.contextmanager
    def of(self, what: str) -> Iterator[None]:
        """Hold the lock for a call. Signals must be deferred; they are handled while waiting."""
        self.check(what)
        while not self._lock.acquire(timeout=signals.LOOK_S):
            signals.check_signals()
        self._thread, self._what = threading.get_ident(), what
        try:
            yield
        finally:
            self._thread = None
            self._lock.release()

    def check(self, what: str) -> None:
        """Raise `UsageError` inside another call, as in a signal handler: it would deadlock."""
        if self._thread == threading.get_ident():
            raise UsageError(
                f"cannot {what} during {self._what}()",
                remedy=f"in a signal handler, set a flag and call {what}() later",
            )
