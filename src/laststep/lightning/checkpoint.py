"""A callback that saves and resumes.

Lightning counts completed optimizer steps. A checkpoint has that number as its step, and after a
restore `trainer.global_step` is `Restored.step`, not `next_step`.
"""

from __future__ import annotations

import logging
import math
import operator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from laststep import browse
from laststep.adapters.framework import advising
from laststep.arguments import check_early
from laststep.catalog.retention import Keep
from laststep.checkpointer import Checkpointer
from laststep.errors import NotFoundError, UsageError
from laststep.lightning import FRAMEWORK, pl
from laststep.lightning.position import Position
from laststep.lightning.state import TrainerState, as_lightning, items_of
from laststep.oneoff import load
from laststep.state.provider import RNG
from laststep.tiers.tier import arranged

if TYPE_CHECKING:
    import os

log = logging.getLogger(__name__)

_NEVER = 1 << 60
"""A number of steps that is never reached: `step()` then saves only with `last=True`."""
_FINDERS = (".lr_find_", ".scale_batch_size_")
"""Name prefixes of the files that Lightning's learning rate and batch size finders restore from."""


class Checkpoint(pl.callbacks.Checkpoint):  # type: ignore[misc]
    """Callback that saves and resumes: `Trainer(callbacks=[Checkpoint("runs/a", every=500)])`.

    Other settings are those of `laststep.Checkpointer`.
    """

    def __init__(
        self,
        run: str | os.PathLike[str] | None = None,
        *,
        every: int | str | None = None,
        monitor: str | None = None,
        mode: str = "min",
        top_k: int | None = None,
        resume: bool | int = True,
        **settings: Any,
    ) -> None:
        """Configure when to save, what to keep and where to resume.

        `every`: as for `Checkpointer`; by default, save at the end of each epoch. `monitor`: save
        after each validation that logs this metric; with `top_k`, keep the best `top_k`
        checkpoints. `resume`: False starts over, a number resumes from that step.
        """
        check_early({"every": every, **settings})
        if mode not in ("min", "max"):
            raise UsageError("invalid mode", expected="'min' or 'max'", found=repr(mode))
        if top_k is not None:
            settings["keep"] = msgspec.structs.replace(
                settings.get("keep") or Keep(last=1), best=top_k, metric=monitor, mode=mode
            )
        if resume is False:
            settings["new_lineage"] = True
        self._run, self._every, self._settings = run, every, settings
        self._monitor, self._mode, self._resume = monitor, mode, resume
        self._path = str(arranged(run, settings.get("tiers", ()), None).primary)
        self._ckpt: Checkpointer | None = None
        self._resumed: int | None = None
        self._is_due = False
        self._judged: object = None
        """The value of `monitor` at the last save."""

    # -- called by Lightning ----------------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """For `fit`, refuse callbacks that do not go together with this one; else let Lightning
        load checkpoints of ours too, for `test(ckpt_path="best")`."""
        if stage != "fit":
            self._load_ours(trainer.strategy.checkpoint_io)
            return
        refused = pl.callbacks.BaseFinetuning, pl.callbacks.StochasticWeightAveraging, Checkpoint
        for callback in trainer.callbacks:
            if isinstance(callback, refused) and callback is not self:
                raise UsageError(
                    "laststep.lightning.Checkpoint cannot resume a training with this callback",
                    expected="one laststep callback, and none that changes the optimizer's groups "
                    "or the schedulers during training",
                    found=type(callback).__name__,
                    remedy="leave it out; WeightAveraging and further tiers= are supported",
                )

    def _load_ours(self, files: Any) -> None:
        """Make Lightning's plugin for files load folders of ours too."""
        if "load_checkpoint" in vars(files):
            return
        theirs = files.load_checkpoint
        pickles = bool(self._settings.get("allow_pickle"))

        def load_checkpoint(path: str, weights_only: bool | None = None) -> Any:  # noqa: FBT001
            if Path(path).is_file():
                return theirs(path, weights_only=weights_only)
            ours: Any = load(path, allow_pickle=pickles)
            return as_lightning(ours)

        files.load_checkpoint = load_checkpoint

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Create the Checkpointer and resume; model and optimizers exist by now."""
        if trainer.fast_dev_run:
            return
        position = Position(trainer, self._rests)
        state = TrainerState(trainer, position)
        items = {**items_of(trainer), "trainer": state, "hooks": state.hooks}
        names = ("made", "begin", "first", "ahead")
        items["rng"] = {"now": RNG(), **{name: getattr(position, name) for name in names}}
        every = _NEVER if self._every is None else self._every
        self._ckpt = Checkpointer(self._run, items=items, every=every, **self._settings)
        self._path, self._trainer, self._state = self._ckpt.path, trainer, state
        self._position, self._metadata = position, FRAMEWORK.stamp()
        self._take_up(self._ckpt, trainer)
        position.attach()

    def _take_up(self, ckpt: Checkpointer, trainer: Any) -> None:
        path = trainer.ckpt_path
        if path is not None and not Path(path).name.startswith(_FINDERS):
            if self.last_model_path and not self._settings.get("new_lineage"):
                raise UsageError(
                    "fit() has a ckpt_path, but this run has checkpoints of its own",
                    where=str(self._path),
                    expected="a new run, or no ckpt_path",
                    found=str(path),
                    remedy="choose another folder for the run, leave ckpt_path out to resume from "
                    "it, or pass Checkpoint(…, resume=False) to leave its checkpoints behind",
                )
            return
        if self._resume is False:
            return
        with advising(ckpt):
            if self._resume is not True:
                restored = ckpt.restore(self._resume)
                FRAMEWORK.own(restored.metadata, f"{self._path}, step {restored.step}")
            else:
                restored = FRAMEWORK.resume(ckpt, lambda *_: ckpt.restore()) or ckpt.restore()
        if restored.step is not None:
            self._position.resume(self._state.put_back())
            self._resumed = restored.step
            self._judged = trainer.callback_metrics.get(self._monitor)
            log.info("resumes at step %d of %s", restored.step, self._path)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if self._ckpt is not None:
            self._state.put_back_gradients()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Request a save for the new metric, at the next point where no batch is half done."""
        self._is_due = self._monitor is not None and not trainer.sanity_checking

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Wait for the saves made at the end of the last batch or epoch. Do not save again: other
        callbacks may have put other weights into the model by now, such as averages."""
        self._close()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Close if `on_train_end` was not called because nothing was left to train."""
        self._close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._close(exception)

    def _close(self, error: BaseException | None = None) -> None:
        ckpt, self._ckpt = self._ckpt, None
        if ckpt is not None:
            self._position.detach()
            ckpt.__exit__(None if error is None else type(error), error, None)

    # -- saving -----------------------------------------------------------------------------------

    def _rests(self, *, ends: bool, epoch: bool) -> None:
        """Save if a setting or the end of training asks for it. No batch is half done here."""
        metrics = dict(self._trainer.callback_metrics)
        known = self._monitor in metrics
        judged, self._is_due = self._is_due and known, False
        waits = known and self._trainer.enable_validation  # for the next validation
        if self._ckpt is None or self._trainer.global_step == self._resumed:
            return  # save a step once, also if batches do not advance it
        score = metrics.get(self._monitor)
        if known and score is self._judged:
            del metrics[self._monitor]  # the weights have changed since it was computed
        self._state.is_saved = True
        try:
            handle = self._ckpt.step(
                self._trainer.global_step,
                metrics=metrics,
                metadata=self._metadata,
                last=ends or judged or (epoch and self._every is None and not waits),
            )
        finally:
            self._state.is_saved = False
        if known and handle is not None:
            self._judged = score

    # -- checkpoints of the run -------------------------------------------------------------------

    @property
    def last_model_path(self) -> str:
        """The folder of the newest checkpoint; empty in a new run."""
        try:
            return f"{self._path}/{browse.open(str(self._path)).latest().folder}"
        except NotFoundError:
            return ""

    @property
    def best_model_path(self) -> str:
        """The folder of the best checkpoint by `monitor`; without `monitor`, the newest."""
        best = self._best()
        return self.last_model_path if best is None else f"{self._path}/{best.folder}"

    def _best(self) -> browse.Checkpoint | None:
        if self._monitor is None or not self.last_model_path:
            return None
        scores = (
            (saved.metrics.get(self._monitor), saved) for saved in browse.open(str(self._path))
        )
        judged = [
            (float(score), saved)
            for score, saved in scores
            if isinstance(score, int | float) and not math.isnan(score)
        ]
        choose = min if self._mode == "min" else max
        return choose(judged, key=operator.itemgetter(0))[1] if judged else None
