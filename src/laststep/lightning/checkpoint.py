"""A callback that saves and resumes, and a plugin for users who keep `ModelCheckpoint`.

Lightning counts completed optimizer steps. A checkpoint has that number as its step, and after a
restore `trainer.global_step` is `Restored.step`, not `next_step`.
"""

from __future__ import annotations

import functools
import logging
import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from laststep import browse
from laststep.catalog.retention import Keep
from laststep.checkpointer import Checkpointer
from laststep.errors import NotFoundError, UsageError
from laststep.lightning.package import FRAMEWORK, CheckpointIO, ModelCheckpoint, TorchIO, pl
from laststep.lightning.position import Position
from laststep.lightning.state import TrainerState, as_lightning, finetuning_callbacks, items_of
from laststep.oneoff import load, save
from laststep.state.provider import RNG

if TYPE_CHECKING:
    import os

    from laststep.restoring.restore import Restored


class IO(CheckpointIO):  # type: ignore[misc]
    """Plugin that stores each `.ckpt` as a laststep folder:
    `Trainer(plugins=[laststep.lightning.IO()])`."""

    def __init__(self, *, allow_pickle: bool = False) -> None:
        """Set `allow_pickle` if hyperparameters or callbacks hold objects other than plain
        values."""
        self._allow_pickle = allow_pickle
        self._files: Any = TorchIO()

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Store a checkpoint. An existing one is replaced only once the new one is durable."""
        if storage_options is not None:
            raise UsageError(
                "IO takes no storage_options",
                found=repr(storage_options)[:80],
                remedy="leave them out: a path is all it needs",
            )
        save(checkpoint, path, allow_pickle=self._allow_pickle, overwrite=True)

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: Any = None,
        weights_only: bool | None = None,  # noqa: FBT001 (Lightning's signature)
    ) -> dict[str, Any]:
        """Load a checkpoint; a file, as opposed to a folder, was saved by Lightning itself."""
        if Path(path).is_file():
            return self._files.load_checkpoint(path, map_location, weights_only)  # type: ignore[no-any-return]
        device = None if callable(map_location) or isinstance(map_location, dict) else map_location
        loaded: Any = load(path, map_location=device, allow_pickle=self._allow_pickle)
        return as_lightning(loaded)

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Delete a checkpoint, whether a folder or a file."""
        found = Path(path)
        if found.is_dir() and not found.is_symlink():
            shutil.rmtree(found)
        else:
            found.unlink(missing_ok=True)


class AlsoOurs(IO):
    """Wraps the trainer's own plugin so that it can load laststep checkpoints as well."""

    def __init__(self, own: Any, *, allow_pickle: bool) -> None:
        super().__init__(allow_pickle=allow_pickle)
        self._files = own

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        self._files.save_checkpoint(checkpoint, path, storage_options)

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        self._files.remove_checkpoint(path)

    def teardown(self) -> None:
        self._files.teardown()


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
        if mode not in ("min", "max"):
            raise UsageError("invalid mode", expected="'min' or 'max'", found=repr(mode))
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
        """The value of `monitor` at the last save."""

    # -- called by Lightning ----------------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Prepare for a `ckpt_path` of ours before Lightning restores, and check the other
        callbacks."""
        if stage != "fit":
            own, pickles = trainer.strategy.checkpoint_io, self._settings.get("allow_pickle", False)
            if not isinstance(own, IO):
                trainer.strategy.checkpoint_io = AlsoOurs(own, allow_pickle=pickles)
            return
        others = [one for one in trainer.checkpoint_callbacks if one is not self]
        if any(isinstance(one, Checkpoint) for one in others):
            raise UsageError(
                "two laststep callbacks save this training",
                expected="one",
                remedy="pass a second place as a tier: Checkpoint(tiers=[…])",
            )
        for one in others:
            if isinstance(one, ModelCheckpoint) and (one.save_top_k or one.save_last):
                log.warning(
                    "ModelCheckpoint saves as well, and training waits for it each time: what it "
                    "saves, laststep does too; take it out of the callbacks"
                )

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Create the Checkpointer and resume; model and optimizers exist by now."""
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
            if self._newest() is not None and not self._settings.get("new_lineage"):
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
        if self._resume is not True:
            restored = self._restore(ckpt, self._resume)
            FRAMEWORK.own(restored.metadata, f"{self._path}, step {restored.step}")
        else:
            found = FRAMEWORK.resume(ckpt, lambda *_: self._restore(ckpt))
            restored = found or ckpt.restore()
        if restored.step is not None:
            position.resume(self._state.put_back())
            self._resumed = restored.step
            self._judged = trainer.callback_metrics.get(self._monitor)
            log.info("resumes at step %d of %s", restored.step, self._path)

    def _restore(self, ckpt: Checkpointer, step: int | None = None) -> Restored:
        if finetuning_callbacks(self._trainer):
            ckpt.restore(step, only="trainer")
            self._state.prepare()
        return ckpt.restore(step)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Restore accumulated gradients, if there are any."""
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
        """Close the Checkpointer if `on_train_end` was not called because nothing was left to
        train."""
        self._close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Finish the saves in progress; log failures instead of raising them."""
        ckpt, self._ckpt = self._ckpt, None
        if ckpt is not None:
            self._position.detach()
            ckpt.__exit__(type(exception), exception, exception.__traceback__)

    # -- saving -----------------------------------------------------------------------------------

    def _rests(self, *, ends: bool, epoch: bool) -> None:
        """Save if `every`, `monitor`, the end of an epoch or the end of training asks for it.
        Called when no batch is half done."""
        known = self._monitor in self._trainer.callback_metrics
        if self._is_due and not known and not self._is_told:
            self._is_told = True
            log.warning(
                "monitor=%r is not logged by validation (%s): no checkpoint is ranked",
                self._monitor,
                ", ".join(map(str, self._trainer.callback_metrics)) or "nothing",
            )
        judged, self._is_due = self._is_due and known, False
        waits = known and self._trainer.enable_validation  # for the next validation
        self._save(last=ends or judged or (epoch and self._by_epoch and not waits))

    def _save(self, *, last: bool) -> None:
        if self._ckpt is None or self._trainer.global_step == self._resumed:
            return  # save a step once, also if batches do not advance it
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
        """Return the logged metrics. The monitored one is included only if it is new, since the
        weights have changed after an old one was computed."""
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

    # -- checkpoints of the run -------------------------------------------------------------------

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
        """The folder of the best checkpoint by `monitor`, for `test(ckpt_path="best")`. Without
        `monitor`, the newest."""
        best = self._best()
        return self.last_model_path if best is None else f"{self._path}/{best.folder}"

    @property
    def best_model_score(self) -> float | None:
        """The value of `monitor` for the best checkpoint."""
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
    """Metrics that are computed only if a save reads them."""

    def __init__(self, compute: Callable[[], dict[str, object]]) -> None:
        self._known = functools.cache(compute)

    def __getitem__(self, name: str) -> object:
        return self._known()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._known())

    def __len__(self) -> int:
        return len(self._known())
