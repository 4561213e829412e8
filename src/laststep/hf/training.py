"""Saving and restoring within one call of `train()`: the Checkpointer and its items.

The state of the Trainer itself (counts, log, callbacks) is the metadata of each save. A Trainer
reads it from a file before model and optimizer are prepared, so it is given a temporary folder that
contains only that file. All tensors are restored at once when everything is prepared. The random
numbers are held back until the Trainer loads them, since it draws some before.

The items are the state that each rank holds, however the model is wrapped. Most of it exists only
once training starts, so those items are deferred.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers.trainer_callback import ExportableState, TrainerState
from transformers.trainer_utils import get_last_checkpoint

import laststep
from laststep import deepspeed, fsdp1
from laststep.accelerate.loaders import item_of, place_in
from laststep.adapters.export.trainer import MARK
from laststep.adapters.framework import FrameworkCheckpointer, advising
from laststep.browse import open as open_run
from laststep.constants import ADAPTERS_RUN
from laststep.errors import NotFoundError, UsageError
from laststep.events import Committed
from laststep.hf import FRAMEWORK
from laststep.hf.folders import Folders, is_peft, path_of
from laststep.process.threads import WorkerPool
from laststep.state.items import Deferred
from laststep.state.modules import trainable
from laststep.state.provider import RNG
from laststep.storage.files import absolute

if TYPE_CHECKING:
    from collections.abc import Callable

    from laststep.accelerate.loaders import PlacedLoader
    from laststep.errors import CorruptError
    from laststep.events import Event
    from laststep.flush.saves import SaveHandle


def _items_of(trainer: Any, data: Deferred, rng: HeldRNG) -> dict[str, object]:
    model, optimizer = _providers(trainer)
    items: dict[str, object] = {"model": model}
    if trainer.args.save_only_model:
        return items
    items["optimizer"] = optimizer
    items["scheduler"] = Deferred(lambda: trainer.lr_scheduler)
    if getattr(trainer.accelerator, "scaler", None) is not None:
        items["scaler"] = trainer.accelerator.scaler
    if trainer.is_deepspeed_enabled:
        items["counts"] = Deferred(lambda: trainer.model_wrapped, deepspeed.progress)
    if getattr(trainer.args, "sync_ref_model", False) and not trainer.is_deepspeed_enabled:
        items["ref_model"] = trainer.ref_model  # trl updates it from the model
    return {**items, "data": data, "rng": rng}


def _providers(trainer: Any) -> tuple[Deferred, Deferred]:
    """Return the items for the model and for the optimizer."""

    def wrapped() -> Any:
        return trainer.model_wrapped

    def of_trainer() -> Any:
        return trainer.optimizer

    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    if trainer.is_deepspeed_enabled:
        optimizer = Deferred(of_trainer, lambda _: deepspeed.optimizer(wrapped()))
        return Deferred(wrapped, deepspeed.model), optimizer
    if trainer.is_fsdp_enabled and getattr(plugin, "fsdp_version", 1) == 1:
        optimizer = Deferred(of_trainer, lambda outer: fsdp1.optimizer(outer.optimizer, wrapped()))
        return Deferred(wrapped, fsdp1.model), optimizer
    model = Deferred(lambda: trainer.model, lambda net: trainable(net) if is_peft(net) else net)
    return model, Deferred(of_trainer)


def _progress_of(loader: object) -> object:
    """Return the item for a loader; an empty one if Accelerate did not prepare it."""
    return {} if place_in(loader) is None else item_of(loader)


class HeldRNG(RNG):
    """Generators restored on `release()`: the Trainer draws some before the point of the save."""

    def __init__(self) -> None:
        self._held: Callable[[], None] | None = None

    def restore(self, value: object) -> None:
        self._held = lambda: RNG.restore(self, value)

    def derive(self, value: object, rank: int) -> None:
        self._held = lambda: RNG.derive(self, value, rank)

    def release(self) -> None:
        if self._held is not None:
            self._held()
        self._held = None


log = logging.getLogger(__name__)


@dataclasses.dataclass
class _Resume:
    """The checkpoint to resume from, and the folder that the Trainer reads its state from."""

    step: int
    metadata: dict[str, Any]
    folder: str
    exact: bool
    """True if the user asked for this very checkpoint."""
    restored: bool = False


class _Checkpointer(FrameworkCheckpointer):
    """Asks for metrics and metadata only once a save is due: the log grows with every step."""

    described: Callable[[], tuple[dict[str, Any], dict[str, object]]]

    def save(self, step: Any, **given: Any) -> SaveHandle:
        given["metrics"], given["metadata"] = self.described()
        return super().save(step, **given)


class TrainCall(contextlib.ExitStack):
    """The saves of one `train()` call; owns the Checkpointer and closes everything on exit."""

    def __init__(self, trainer: Any, trial: Any, run: Any, settings: dict[str, Any]) -> None:
        super().__init__()
        self._trainer, self._settings = trainer, dict(settings)
        self._output = Path(absolute(trainer._get_output_dir(trial)))
        if run is None and not settings.get("tiers"):
            run = self._output / ADAPTERS_RUN
        self._settings.setdefault("keep", _keep(trainer.args))
        self._own_schedule = bool(settings.get("every") or settings.get("preemption"))
        self.rng = HeldRNG()
        more = self._settings.pop("items", None) or {}
        self._loader: Any = None
        self._placed: PlacedLoader | None = None
        """Knows the position in the loader if Accelerate prepared that."""
        data = Deferred(lambda: self._loader, _progress_of)
        self._items = {**_items_of(trainer, data, self.rng), **more}
        self._place: tuple[int, int] | None = None
        """The current epoch and the step at which it started."""
        self._resume: _Resume | None = None
        self._saved: set[int] = set()
        self._scratch = Path(self.enter_context(tempfile.TemporaryDirectory(prefix="laststep-")))
        self._worker = self.enter_context(WorkerPool("folders", 1))
        """Creates the folders; closed after the Checkpointer, whose last commits need some."""
        self._ckpt = _Checkpointer(run, items=self._items, **self._settings)
        self._ckpt.described = self._described
        if trainer.args.push_to_hub:
            log.warning("checkpoints are not pushed to the hub: call trainer.push_to_hub()")
        self.enter_context(self._ckpt)
        self._folders: Folders | None = None

    # -- resuming ---------------------------------------------------------------------------------

    def found(self, asked: str | bool | None) -> str | None:  # noqa: FBT001 (the Trainer's type)
        """Return the folder that the Trainer resumes from, or None. Raise UsageError if the run has
        checkpoints that training would not resume from."""
        newest = self._ckpt.peek()
        last = get_last_checkpoint(self._output) if self._output.is_dir() else None
        # The number of the last folder if the Trainer itself has saved that.
        theirs = 0 if last is None or _is_ours(Path(last)) else int(last.rpartition("-")[2])
        if asked is True and newest is not None:
            if theirs > newest.step:
                raise UsageError(
                    "the Trainer has saved a later step without laststep",
                    where=self._ckpt.path,
                    expected=f"none after step {newest.step}",
                    found=str(last),
                    remedy=f"move it away, or pass {last!r} as resume_from_checkpoint with "
                    "another run=",
                )
            return self._from(newest.step, newest.metadata, exact=False)
        if isinstance(asked, str | os.PathLike) and _is_ours(Path(asked)):
            return self._named(Path(asked))
        if newest is not None and not self._settings.get("new_lineage"):
            raise UsageError(
                "the run has checkpoints, and training would start over instead of resuming",
                where=self._ckpt.path,
                expected="train(resume_from_checkpoint=True)",
                found=f"resume_from_checkpoint={asked!r}; the newest is of step {newest.step}",
                remedy="resume, choose another output_dir or run, or pass new_lineage=True",
            )
        if asked is not True:
            return os.fspath(asked) if asked else None
        if last is not None and not theirs:
            # It has only weights, so resuming from it would reset everything else.
            raise NotFoundError(
                "the run is empty, but checkpoint folders of an earlier run are here",
                where=self._ckpt.path,
                found=last,
                remedy="pass the same run= as before, or remove these folders to start over; "
                "from_pretrained loads their weights",
            )
        log.info("%s: no checkpoint yet; %s", self._ckpt.path, last or "training begins")
        return last

    def _named(self, folder: Path) -> str:
        """Return the folder for the Trainer if the user named a checkpoint by its folder."""
        step = folder.name.removeprefix("checkpoint-")
        if folder.resolve() != path_of(self._output, step).resolve() or not step.isdecimal():
            raise UsageError(
                "this is not a checkpoint of the run",
                where=self._ckpt.path,
                expected=str(path_of(self._output, "N")),
                found=str(folder),
                remedy="train(resume_from_checkpoint=True) takes the newest; "
                "from_pretrained loads the weights of others",
            )
        chosen = open_run(self._ckpt.path)[int(step)]
        return self._from(chosen.step, chosen.metadata, exact=True)

    def _from(self, step: int, metadata: object, *, exact: bool) -> str:
        own: dict[str, Any] = FRAMEWORK.own(metadata, self._ckpt.path)
        folder = path_of(self._scratch, step)
        folder.mkdir(exist_ok=True)
        # `begin` finds the best model where the run is now.
        state = TrainerState(**{**own["state"], "best_model_checkpoint": None})
        state.save_to_json(str(folder / "trainer_state.json"))
        self._resume = _Resume(step, own, str(folder), exact)
        return self._resume.folder

    def older(self, damage: CorruptError) -> str:
        """Return the folder of an older checkpoint; re-raise `damage` if none may replace it."""
        resume = self._resume
        if resume is None or resume.restored or resume.exact:
            raise damage
        newest = self._ckpt.peek()
        if newest is None or newest.step == resume.step:
            raise damage
        log.warning(
            "the checkpoint of step %d is damaged; resuming from step %d: %s",
            resume.step,
            newest.step,
            damage,
        )
        return self._from(newest.step, newest.metadata, exact=False)

    def is_ours(self, folder: str | None) -> bool:
        """Return True if the Trainer resumes from the folder that `found` returned."""
        return self._resume is not None and folder == self._resume.folder

    def begin(self, loader: Any, resumed_from: str | None) -> None:
        """Restore model, optimizer and loader, which are prepared by now, and get ready to save.
        `resumed_from` is the folder that the Trainer has read its state from."""
        self._loader = loader
        self._placed = place_in(loader)
        resume = self._resume if self.is_ours(resumed_from) else None
        if resume is not None:
            stored = set(resume.metadata["items"])
            absent = set(self._items) - stored
            if absent:
                log.warning(
                    "the checkpoint of step %d was saved without them: %s start over",
                    resume.step,
                    ", ".join(sorted(absent)),
                )
            both = sorted(set(self._items) & stored)  # DeepSpeed has counts of its own
            # `Restored.step` is the number of completed steps, as `global_step` is.
            with advising(self._ckpt):
                self._ckpt.restore(
                    resume.step if resume.exact else None,
                    only=None if stored == set(self._items) else both,
                )
            resume.restored = True
            if self._trainer.args.ignore_data_skip and self._placed is not None:
                self._placed.skip(0)  # restart the epoch, as requested
        if self._folders is None and self._trainer.args.should_save:
            self._folders = Folders(self._trainer, self._output, self._ckpt.path, self._worker)
            self._ckpt.subscribe(self._make_folder)
        if resume is not None:
            steps, state = open_run(self._ckpt.path).steps(), self._trainer.state
            best = state.best_global_step if state.best_global_step in steps else None
            state.best_model_checkpoint = None if best is None else str(path_of(self._output, best))
            if self._folders is not None:
                for step in {resume.step, best or resume.step}:
                    self._folders.make(step, again=False)

    # -- position in the data ---------------------------------------------------------------------

    def place(self) -> list[int] | None:
        """Return the epoch in which training resumes and its number of completed steps."""
        return None if self._resume is None else self._resume.metadata.get("place")

    def begin_epoch(self, epoch: int, done: int) -> None:
        """Record that an epoch starts, or continues after `done` steps."""
        self._place = (epoch, self._trainer.state.global_step - done)
        if self._placed is not None:
            self.rng.release()  # the loader restores the random numbers of its own fetches

    # -- saving -----------------------------------------------------------------------------------

    def save(self) -> None:
        """Save the present state without waiting for the commit."""
        step = self._trainer.state.global_step
        self._ckpt.save(step, overwrite=step in self._saved)
        self._saved.add(step)

    def stepped(self) -> None:
        """Save if `every` is due or training ends, or stop for `preemption`, after a step."""
        step = self._trainer.state.global_step
        if not self._own_schedule or step in self._saved:
            return
        ends = bool(self._settings.get("every")) and self._trainer.control.should_training_stop
        if self._ckpt.step(step, last=ends) is not None:
            self._saved.add(step)

    def wait(self) -> None:
        """Block until all saves are committed and their folders exist."""
        self._ckpt.wait()
        self._worker.wait()

    def loaded_best(self) -> bool:
        """Load the best model if it is a checkpoint of the run; return False if it is not."""
        state = self._trainer.state
        folder = Path(state.best_model_checkpoint)
        if folder != path_of(self._output, state.best_global_step) or not _is_ours(folder):
            return False
        self._ckpt.restore(state.best_global_step, only="model")
        return True

    def _described(self) -> tuple[dict[str, Any], dict[str, object]]:
        state, handler = self._trainer.state, self._trainer.callback_handler
        is_best = state.best_global_step == state.global_step
        if is_best:
            state.best_model_checkpoint = str(path_of(self._output, state.global_step))
        stateful = [
            holder
            for holder in [*handler.callbacks, self._trainer.control]
            if isinstance(holder, ExportableState)
        ]
        kept = dataclasses.replace(state, stateful_callbacks=stateful)
        # Plain JSON, as in the Trainer's file: NumPy's float64, for example, becomes a float.
        plain: dict[str, Any] = json.loads(json.dumps(vars(kept)))
        metrics: dict[str, Any] = {_BEST: state.global_step if is_best else -1}
        for entry in reversed(plain["log_history"]):
            if entry.get("step") != state.global_step:
                break
            metrics.update({k: v for k, v in entry.items() if isinstance(v, int | float)})
        epoch, began = self._place or (0, 0)
        place = [epoch, state.global_step - began]
        if self._placed is not None and self._placed.has_ended:
            place = [epoch + 1, 0]
        return metrics, FRAMEWORK.stamp(state=plain, items=sorted(self._items), place=place)

    def _make_folder(self, event: Event) -> None:
        if isinstance(event, Committed) and self._folders is not None:
            self._folders.make(event.step)


def _is_ours(folder: Path) -> bool:
    """Return True unless the Trainer saved this folder. We may still create a missing one."""
    return not folder.is_dir() or (folder / MARK).exists()


_BEST = "_best_at"
"""Metric that equals the checkpoint's step if it was the best when saved, else -1. Of two equal
metrics the Trainer prefers the earlier checkpoint and retention the later one; steps are never
equal."""


def _keep(args: Any) -> laststep.Keep | None:
    """Return the retention that `save_total_limit` asks for: the last ones and the best one."""
    limit = args.save_total_limit
    if limit is None or limit <= 0:
        return None
    if args.metric_for_best_model is None:
        return laststep.Keep(last=limit)
    return laststep.Keep(last=limit, best=1, metric=_BEST, mode="max")
