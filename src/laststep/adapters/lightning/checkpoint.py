"""The callback: makes a Checkpointer of a trainer's state, resumes, saves, and closes it.

Lightning counts completed steps of the optimizer. A checkpoint has that number as its step, and
after a restore `trainer.global_step` is `Restored.step`, not `next_step`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from laststep import browse
from laststep.adapters.lightning import finetuning
from laststep.adapters.lightning.io import IO, AlsoOurs
from laststep.adapters.lightning.package import FRAMEWORK, ModelCheckpoint, pl
from laststep.adapters.lightning.position import Position
from laststep.adapters.lightning.state import TrainerState, items_of
from laststep.catalog.retention import Keep
from laststep.checkpointer import Checkpointer
from laststep.errors import NotFoundError, UsageError
from laststep.state.values import RNG

if TYPE_CHECKING:
    import os

    from laststep.restoring.restore import Restored

log = logging.getLogger(__name__)

_NEVER = 1 << 60
"""Of steps: `step()` saves only where it is told to."""


_FINDERS = (".lr_find_", ".scale_batch_size_")
"""How the files begin to which Lightning's finders of rates and batch sizes go back."""


class Checkpoint(pl.callbacks.Checkpoint):  # type: ignore[misc]
    """`Trainer(callbacks=[laststep.lightning.Checkpoint("runs/a", every=500)])`. Further settings
    are those of `laststep.Checkpointer`."""

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
        """`every`: as for `Checkpointer`; without it, each epoch is saved at its end. `monitor`:
        each validation that logs this metric is followed by a save; with `top_k`, the best so many
        stay. `resume`: False begins anew, a number takes up that step."""
        if mode not in ("min", "max"):
            raise UsageError("mode is neither of two", expected="'min' or 'max'", found=repr(mode))
        if top_k is not None:
            if monitor is None:
                raise UsageError(
                    "top_k needs a metric",
                    found=f"top_k={top_k}, and no monitor",
                    remedy="pass monitor='val_loss', or keep=laststep.Keep(last=…)",
                )
            keep = settings.get("keep") or Keep(last=1)
            best = {"best": top_k, "metric": monitor, "mode": mode}
            settings["keep"] = msgspec.structs.replace(keep, **best)
        if resume is False:
            settings["new_lineage"] = True
        self._run, self._settings = run, settings
        self._by_epoch = every is None
        self._every = _NEVER if every is None else every
        self._monitor, self._mode, self._resume = monitor, mode, resume
        self._path = None if run is None else str(run)
        self._ckpt: Checkpointer | None = None
        self._resumed: int | None = None
        """The step that was restored."""
        self._is_due = self._is_told = False
        self._judged: object = None
        """The value of `monitor` that the last save had."""

    # -- called by Lightning ----------------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Before anything is restored: `ckpt_path` may be one of ours."""
        if stage != "fit":
            own, pickles = trainer.strategy.checkpoint_io, self._settings.get("allow_pickle", False)
            if not isinstance(own, IO):
                trainer.strategy.checkpoint_io = AlsoOurs(own, allow_pickle=pickles)
            return
        others = [one for one in trainer.checkpoint_callbacks if one is not self]
        if any(isinstance(one, Checkpoint) for one in others):
            raise UsageError(
                "two callbacks of laststep's save this training",
                expected="one",
                remedy="a second place for checkpoints is a tier: Checkpoint(tiers=[…])",
            )
        for one in others:
            if isinstance(one, ModelCheckpoint) and (one.save_top_k or one.save_last):
                log.warning(
                    "ModelCheckpoint saves as well, and training waits for it each time: what it "
                    "saves, laststep does too; take it out of the callbacks"
                )

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Model and optimizers are there."""
        if trainer.fast_dev_run:
            return
        position = Position(trainer, self._rests)
        state = TrainerState(trainer, position)
        items = {**items_of(trainer), "trainer": state, "hooks": state.hooks}
        items["rng"] = {"now": RNG(), **position.random_numbers()}
        self._ckpt = Checkpointer(self._run, items=items, every=self._every, **self._settings)
        self._path, self._trainer, self._state = self._ckpt.path, trainer, state
        self._position, self._metadata = position, FRAMEWORK.stamp()
        self._take_up(self._ckpt, trainer, position)
        position.attach()

    def _take_up(self, ckpt: Checkpointer, trainer: Any, position: Position) -> None:
        path = trainer.ckpt_path
        if path is not None and not Path(path).name.startswith(_FINDERS):
            self._refuse_both(path)
            return
        if self._resume is False:
            return
        restored = self._restored(ckpt)
        if restored.step is not None:
            position.resume(self._state.put_back())
            self._resumed = restored.step
            self._judged = trainer.callback_metrics.get(self._monitor)
            log.info("resumes at step %d of %s", restored.step, self._path)

    def _restored(self, ckpt: Checkpointer) -> Restored:
        """The newest checkpoint that is sound, or the one that is asked for; none in a new run."""
        if self._resume is not True:
            restored = self._restore(ckpt, self._resume)
            FRAMEWORK.own(restored.metadata, f"{self._path}, step {restored.step}")
            return restored
        return FRAMEWORK.resume(ckpt, lambda *_: self._restore(ckpt)) or ckpt.restore()

    def _restore(self, ckpt: Checkpointer, step: int | None = None) -> Restored:
        if finetuning.is_used(self._trainer):
            ckpt.restore(step, only="trainer")
            self._state.prepare()
        return ckpt.restore(step)

    def _refuse_both(self, path: object) -> None:
        if self._newest() is not None and not self._settings.get("new_lineage"):
            raise UsageError(
                "fit() is to begin with another checkpoint, and this run has some",
                where=str(self._path),
                expected="a new run, or no ckpt_path",
                found=str(path),
                remedy="choose another folder for the run, leave ckpt_path out to resume from it, "
                "or pass Checkpoint(…, resume=False) to leave its checkpoints behind",
            )

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """What was accumulated, if anything."""
        if self._ckpt is not None:
            self._state.put_back_gradients()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """The metric is there; the next time that nothing is half done is the time to save."""
        self._is_due = self._monitor is not None and not trainer.sanity_checking

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Wait for what was saved when the last batch or epoch ended: other callbacks may have put
        other weights into the model by now, such as averages."""
        self._close()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Where nothing was left to train, there was no end of it."""
        self._close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """What is under way is finished; what fails of it is told in the log."""
        ckpt, self._ckpt = self._ckpt, None
        if ckpt is None:
            return
        self._position.detach()
        ckpt.__exit__(type(exception), exception, exception.__traceback__)

    # -- saving -----------------------------------------------------------------------------------

    def _rests(self, *, ends: bool, epoch: bool) -> None:
        """Nothing is half done: by `every`, `monitor` or the end, it is time to save, or not."""
        known = self._monitor in self._trainer.callback_metrics
        if self._is_due and not known and not self._is_told:
            self._is_told = True
            log.warning(
                "monitor=%r is not among what validation logs (%s): no checkpoint is judged",
                self._monitor,
                ", ".join(map(str, self._trainer.callback_metrics)) or "nothing",
            )
        judged, self._is_due = self._is_due and known, False
        waits = known and self._trainer.enable_validation  # for a validation
        self._save(last=ends or judged or (epoch and self._by_epoch and not waits))

    def _save(self, *, last: bool) -> None:
        if self._ckpt is None or self._trainer.global_step == self._resumed:
            return  # a step is saved once, also where batches make none
        self._state.is_saved = True
        try:
            self._ckpt.step(
                self._trainer.global_step,
                metrics=_Metrics(self._metrics),
                metadata=self._metadata,
                last=last,
            )
        finally:
            self._state.is_saved = False

    def _metrics(self) -> dict[str, object]:
        """What is logged; the monitored one only where it is new, as weights have changed since."""
        metrics = dict(self._trainer.callback_metrics)
        if self._monitor in metrics:
            if metrics[self._monitor] is self._judged:
                del metrics[self._monitor]
            else:
                self._judged = metrics[self._monitor]
        return metrics

    def _close(self) -> None:
        ckpt, self._ckpt = self._ckpt, None
        if ckpt is not None:
            self._position.detach()
            ckpt.close()

    # -- what is there ----------------------------------------------------------------------------

    def _newest(self) -> browse.Checkpoint | None:
        try:
            return browse.open(str(self._path)).latest()
        except NotFoundError:
            return None

    @property
    def last_model_path(self) -> str:
        """The folder of the newest checkpoint; empty in a new run."""
        newest = self._newest()
        return "" if newest is None else f"{self._path}/{newest.folder}"

    @property
    def best_model_path(self) -> str:
        """That of the best by `monitor`, for `test(ckpt_path="best")`; without one, the newest."""
        best = self._best()
        return self.last_model_path if best is None else f"{self._path}/{best.folder}"

    @property
    def best_model_score(self) -> float | None:
        """Its `monitor`."""
        best = self._best()
        return None if best is None else self._score(best)

    def _best(self) -> browse.Checkpoint | None:
        if self._monitor is None or self._newest() is None:
            return None
        judged = [one for one in browse.open(str(self._path)) if self._score(one) is not None]
        choose = min if self._mode == "min" else max
        return choose(judged, key=self._score) if judged else None  # type: ignore[arg-type]

    def _score(self, checkpoint: browse.Checkpoint) -> float | None:
        score = checkpoint.metrics.get(str(self._monitor))
        return float(score) if isinstance(score, int | float) and not math.isnan(score) else None


class _Metrics(Mapping[str, object]):
    """Metrics that are computed if there is a save."""

    def __init__(self, compute: Any) -> None:
        self._compute = compute
        self._values: dict[str, object] | None = None

    def _known(self) -> dict[str, object]:
        if self._values is None:
            self._values = self._compute()
        return self._values

    def __getitem__(self, name: str) -> object:
        return self._known()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._known())

    def __len__(self) -> int:
        return len(self._known())
