"""Position of training between two batches: counters of Lightning's loops, position in the data.

Lightning saves before a batch is complete: validation, a hook of the module and a scheduler may
still follow. This module instead waits for the moment when nothing is half done: the end of a batch
or, for the last batch of an epoch, the end of the epoch.

A loader that has a state gets it back. Any other loader restarts its epoch with the random numbers
of that time and repeats the consumed batches, so it draws the same samples as before. If Lightning
prefetches a batch because the loader has no length, the last one is fetched with the random numbers
used originally. If a short loader restarts within an epoch of a longer one, it does so with the
random numbers used originally. The loader itself is also created with its original random numbers,
since its creation may draw which samples there are.
"""

# ruff: noqa: SLF001 (Lightning's loops have no public names)

from __future__ import annotations

import functools
import itertools
import warnings
from typing import TYPE_CHECKING, Any

from laststep.lightning import LOADER_MODES, CombinedLoader, SigTerm, pl
from laststep.state.provider import RNG, State

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


class KeptRNG(RNG):
    def __init__(self) -> None:
        self.take()

    def take(self) -> None:
        self.held = RNG().describe().value

    def put(self) -> None:
        RNG().restore(self.held)

    def describe(self) -> State:
        return State(value=self.held, fresh=((),))

    def restore(self, value: object) -> None:
        if not self.check(value):
            self.held = value

    def derive(self, value: object, rank: int) -> None:
        now = KeptRNG()
        super().derive(value, rank)
        self.take()
        now.put()


class SharedRNG(KeptRNG):
    """State of the generators at a moment when all ranks must draw the same numbers."""

    def derive(self, value: object, rank: int) -> None:
        self.restore(value)


class Restarting:
    """A loader that Lightning starts again, beside a longer one."""

    def __init__(self, loader: Any, stored: tuple[int, object] | None) -> None:
        """Restart as often as `stored` says with the random numbers that follow it."""
        self._loader, self._stored = loader, stored
        self.last: tuple[int, object] | None = None
        """The number of restarts in this epoch, and the random numbers before the last one."""

    def __iter__(self) -> Iterator[object]:
        restarts = 1 if self.last is None else self.last[0] + 1
        if self._stored is not None and restarts == self._stored[0]:
            RNG().restore(self._stored[1])
        self.last = restarts, RNG().describe().value
        return iter(self._loader)

    def __len__(self) -> int:
        return len(self._loader)


class Position:
    """Position of one `fit()`: tells when to save, describes the position and resumes from it."""

    def __init__(self, trainer: Any, rests: Callable[..., None]) -> None:
        """Call `rests` whenever nothing is half done. Its keyword arguments say if training `ends`
        there and if an `epoch` has just ended."""
        self._fit = trainer.fit_loop
        self._epoch = trainer.fit_loop.epoch_loop
        self._trainer, self._rests = trainer, rests
        self.made = SharedRNG()
        """Random numbers before the loader was created."""
        self.begin, self.first, self.ahead = KeptRNG(), KeptRNG(), KeptRNG()
        """Random numbers before the epoch, its first batch and the last prefetched batch."""
        self._restarting: list[Restarting] = []
        self._ahead: list[object] | None = None
        """The states of the loaders before the last prefetched batch."""
        self._fetcher: Any = None
        self._starts = False
        self._stored: dict[str, Any] | None = None
        self._now: KeptRNG | None = None
        self._around: list[tuple[Any, str]] = []
        self.accumulates = False
        """True if accumulated gradients wait for a step of the optimizer."""

    def attach(self) -> None:
        for loop, method, ours in (
            (self._fit, "setup_data", self._data_set_up),
            (self._fit, "on_advance_start", self._epoch_starts),
            (self._fit, "_load_combined_loader_states", self._loader_made),
            (self._fit, "on_advance_end", self._epoch_ended),
            (self._epoch, "on_run_start", self._epoch_begins),
            (self._epoch, "on_advance_end", self._batch_ended),
        ):
            setattr(loop, method, functools.partial(ours, getattr(loop, method)))
            self._around.append((loop, method))
        self._stepped = self._epoch.global_step

    def detach(self) -> None:
        for loop, method in self._around:
            delattr(loop, method)
        self._around.clear()

    # -- saving -----------------------------------------------------------------------------------

    def describe(self) -> dict[str, object]:
        loops = self._fit.state_dict()
        loops["state_dict"] = {}  # Lightning would read the loaders' states a batch too late
        between = self.is_between_epochs
        ahead = None if between else self._ahead
        fetcher = self._fetcher
        return {
            "loops": loops,
            "consumed": 0 if between else fetcher.fetched - len(getattr(fetcher, "batches", ())),
            "ranks": self._trainer.world_size,
            "made": self._fit._last_train_dl_reload_epoch,
            "restarts": [loader.last for loader in self._restarting],
            "accumulate": self._trainer.accumulate_grad_batches,
            "loaders": self._states_of_loaders() if ahead is None else ahead,
        }

    @property
    def is_between_epochs(self) -> bool:
        """True if the last epoch that was started is complete."""
        counts = self._fit.epoch_progress.current
        return bool(counts.ready == counts.processed)

    def _states_of_loaders(self) -> list[object]:
        """Return the loaders' states, or an empty list unless all loaders have one. A loader
        without a state can only repeat its batches, so the others must repeat theirs too."""
        loader = self._fit._combined_loader
        states: list[object] = [] if loader is None else loader._state_dicts()
        return states if loader is not None and len(states) == len(loader.flattened) else []

    def _batch_ended(self, original: Callable[[Any], None], fetcher: Any) -> None:
        stopped = self._stopped_in(functools.partial(original, fetcher))
        epoch = self._epoch
        self.accumulates = self._waits_for_step()
        if self.accumulates:
            return  # ignore `stopped` too: Lightning raises it again after the next batch
        if not epoch._num_ready_batches_reached():
            self._rests(ends=epoch.done or stopped is not None, epoch=False)
        if stopped is not None:
            raise stopped

    def _waits_for_step(self) -> bool:
        """Return True while gradients are accumulated, in either way of optimization."""
        if self._trainer.lightning_module.automatic_optimization:
            return bool(self._epoch._should_accumulate())
        before, self._stepped = self._stepped, self._epoch.global_step
        return bool(self._stepped == before)

    def _epoch_ended(self, original: Callable[[], None]) -> None:
        stopped = self._stopped_in(original)
        if self._epoch._num_ready_batches_reached():  # else training ends within the epoch
            self._rests(ends=stopped is not None or self._is_over, epoch=True)
        if stopped is not None:
            raise stopped

    @property
    def _is_over(self) -> bool:
        """True if no epoch follows. `_FitLoop.done` would log that once more."""
        fit, epochs = self._fit, self._fit.epoch_progress.current.processed
        limits = ((fit.max_steps, self._epoch.global_step), (fit.max_epochs, epochs))
        reached = any(0 <= most <= count for most, count in limits)
        return bool(reached or (self._trainer.should_stop and fit._can_stop_early))

    def _stopped_in(self, original: Callable[[], None]) -> BaseException | None:
        """Call `original` and return the SIGTERM exception that Lightning raises at its end, so
        that the caller can save first. With several ranks, raise it: the others may not know of it
        yet."""
        try:
            original()
        except SigTerm as stopped:
            if self._trainer.world_size > 1:
                raise
            return stopped
        return None

    # -- resuming ---------------------------------------------------------------------------------

    def resume(self, stored: dict[str, Any]) -> None:
        """Resume from the result of `describe`. The random numbers are already restored."""
        self._stored, self._now = stored, KeptRNG()
        self._fit.load_state_dict(stored["loops"])
        if stored["consumed"] and stored["ranks"] != self._trainer.world_size:
            # The total number of samples stays the same, apart from rounding down; each rank reads
            # other samples than before.
            counts = self._epoch.batch_progress.current
            scaled = stored["consumed"] * stored["ranks"] // self._trainer.world_size
            done = stored["consumed"] = scaled - scaled % stored["accumulate"]
            counts.ready = counts.started = counts.processed = counts.completed = done
        warnings.filterwarnings("ignore", "You're resuming from a checkpoint that ended before")

    def _data_set_up(self, original: Callable[[], None]) -> None:
        """Wrap `setup_data`, in which Lightning creates or replaces the loader. On resume, create
        it with its original random numbers, in the epoch of that time."""
        loader, now = self._fit._combined_loader, KeptRNG()
        if self._stored is None or loader is not None:
            original()
            if self._fit._combined_loader is not loader:
                self.made.held = now.held
            return
        counts = self._fit.epoch_progress.current
        completed, counts.completed = counts.completed, self._stored["made"]
        self.made.put()
        original()
        if self._trainer.num_sanity_val_steps:
            self.made.put()  # loaders for the sanity check used the same numbers
        counts.completed, self._fit._last_train_dl_reload_epoch = completed, self._stored["made"]

    def _loader_made(self, original: Callable[[], None]) -> None:
        """Wrap the start of the iteration. On resume, leave that to `_wind_on`."""
        if self._starts:  # this loader is for a new epoch
            self._stored = None
            self._fit._resuming_from_checkpoint = False
        if self._stored is None:
            self.begin.take()
            original()
            return
        if self.is_between_epochs:  # else Lightning would resume a completed epoch
            self._fit._restarting = self._epoch.restarting = False
        loader = self._fit._combined_loader
        kind = type(loader)
        loader.__class__ = type("NotBegun", (_NotBegun, kind), {"kind": kind})

    def _epoch_starts(self, original: Callable[[], None]) -> None:
        """Wrap the start of an epoch; on resume it draws the same as without interruption."""
        if self._now is not None and self._stored is not None and not self._stored["consumed"]:
            self._now.put()
        self._starts = True
        original()
        self._starts = False

    def _epoch_begins(self, original: Callable[[Any], None], fetcher: Any) -> None:
        self._fetcher, self._ahead = fetcher, None
        if self._stored is not None:
            self._wind_on(fetcher, self._stored)
            original(fetcher)
        else:
            if self._trainer.current_epoch > 0:  # else it has already started: see `_loader_made`
                self.begin.take()
            original(fetcher)
            self.first.take()
            self._watch_restarts(fetcher)
        self._stored = self._now = None
        if fetcher.length is None:
            fetcher._start_profiler = functools.partial(self._fetches, fetcher._start_profiler)

    def _watch_restarts(
        self, fetcher: Any, stored: Iterable[tuple[int, object] | None] = ()
    ) -> None:
        """Follow the restarts of short loaders in the epoch that has begun."""
        cycle = fetcher.iterator._iterator
        pairs = itertools.zip_longest(cycle.iterables, stored)
        self._restarting = cycle.iterables = [Restarting(*pair) for pair in pairs]

    def _fetches(self, original: Callable[[], None]) -> None:
        self.ahead.take()
        self._ahead = self._states_of_loaders()
        original()

    def _wind_on(self, fetcher: Any, stored: dict[str, Any]) -> None:
        """Advance the loader to its stored position."""
        if stored["loaders"]:
            self._fit._combined_loader._load_state_dicts(stored["loaders"])
        if not stored["consumed"]:
            self._begin(fetcher, stored["loaders"])
        elif stored["loaders"]:
            fetcher._start_profiler = self.ahead.put  # called after the start, before fetching
            iter(fetcher)
            self._watch_restarts(fetcher)
        else:
            self._hand_out_again(fetcher, stored["consumed"], stored["restarts"])
        logged = stored["loops"]["epoch_loop.state_dict"]["_batches_that_stepped"]
        self._epoch._batches_that_stepped = logged  # Lightning may have added one
        if stored["consumed"] and self._now is not None:
            self._now.put()
            scheduler = pl.callbacks.GradientAccumulationScheduler  # sets it as an epoch starts
            if any(isinstance(callback, scheduler) for callback in self._trainer.callbacks):
                self._trainer.accumulate_grad_batches = stored["accumulate"]
        self._fit._restarting = self._epoch.restarting = False

    def _begin(self, fetcher: Any, states: list[Any]) -> None:
        """Start the epoch after the completed one."""
        self.begin.take()
        if any(state.get("_iterator_finished") is False for state in states):
            # A torchdata loader still considers the old epoch unfinished: enter it once to end it.
            iter(fetcher)
            self.begin.put()
        iter(fetcher)
        self.first.take()
        self._watch_restarts(fetcher)

    def _hand_out_again(self, fetcher: Any, consumed: int, restarts: list[Any]) -> None:
        self.begin.put()
        iter(fetcher)
        self._watch_restarts(fetcher, restarts)
        self.first.put()
        batches = getattr(fetcher, "iterator_wrapper", fetcher)
        for left in reversed(range(consumed)):
            if not left and fetcher.length is None:
                self.ahead.put()
            next(batches)
        fetcher.fetched -= self._epoch.batch_progress.current.ready  # Lightning adds these again


class _NotBegun(CombinedLoader):  # type: ignore[misc]
    """Temporary class of a loader that Lightning iterates before its position is restored.
    `__iter__` yields nothing and restores the original class."""

    kind: type

    def __iter__(self) -> Iterator[object]:
        self.__class__ = self.kind
        self._iterator = LOADER_MODES[self._mode]["iterator"](self.flattened, self._limits)
        return iter(())
