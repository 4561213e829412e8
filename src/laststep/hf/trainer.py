"""The Trainer with its saving and loading replaced.

Overrides the few methods in which Hugging Face's Trainer saves and loads; a `TrainCall` per call of
`train()` does the work. The Trainer counts completed steps and so do its checkpoints: the step of a
save is `global_step`, and training continues from `Restored.step`.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import sys
from typing import TYPE_CHECKING, Any

import transformers.trainer
from accelerate import skip_first_batches
from transformers import Trainer

from laststep.accelerate.loaders import skip_in_place
from laststep.arguments import check_early
from laststep.errors import CorruptError, UsageError
from laststep.hf.training import TrainCall

if TYPE_CHECKING:
    import os

log = logging.getLogger(__name__)

_SAVING = ("save_model", "_save", "_load_")
"""The beginnings of the names of methods that are not called if laststep saves and restores."""

# The Trainer calls this function of Accelerate's; tracked loaders skip by themselves.
transformers.trainer.skip_first_batches = functools.partial(skip_in_place, skip_first_batches)


class SavingTrainer(Trainer):  # type: ignore[misc]
    """The methods that `attach` puts in front of those of a trainer's class."""

    _laststep_run: str | os.PathLike[str] | None
    _laststep_settings: dict[str, Any]
    _laststep: TrainCall

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,  # noqa: FBT001 (as the Trainer has it)
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        """Train as `Trainer.train` does; `True` starts a new run if there is no checkpoint yet."""
        self._tell_who_saves()
        with TrainCall(self, trial, self._laststep_run, self._laststep_settings) as self._laststep:
            resume = self._laststep.found(resume_from_checkpoint)
            return super().train(resume, trial, ignore_keys_for_eval)

    def _tell_who_saves(self) -> None:
        """Warn about overridden saving methods, except those of trl, which create a model card."""
        for kind in set(type(self).__mro__) - set(SavingTrainer.__mro__):
            saving = (name for name in vars(kind) if name.startswith(_SAVING))
            lost = [name for name in saving if hasattr(Trainer, name)]
            if lost and not kind.__module__.startswith("trl.trainer."):
                log.warning(
                    "%s of %s are not called because laststep saves; pass what they add to a "
                    "checkpoint as one of `items=`",
                    ", ".join(lost),
                    kind.__name__,
                )

    def _inner_training_loop(
        self,
        batch_size: int | None = None,
        args: Any = None,
        resume_from_checkpoint: str | None = None,
        *more: Any,
        **keywords: Any,
    ) -> Any:
        while True:
            try:
                return super()._inner_training_loop(
                    batch_size, args, resume_from_checkpoint, *more, **keywords
                )
            except CorruptError as error:
                resume_from_checkpoint = self._laststep.older(error)

    def _init_training_state(
        self,
        max_steps: int,
        num_update_steps_per_epoch: int,
        num_train_epochs: int,
        resume_from_checkpoint: str | None,
        trial: Any,
    ) -> tuple[int, int]:
        epochs, batches = super()._init_training_state(
            max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial
        )
        # For data without a length the Trainer cannot compute how many epochs are complete.
        if num_train_epochs == sys.maxsize and self._laststep.is_ours(resume_from_checkpoint):
            epochs, steps = self._laststep.place() or (epochs, self.state.global_step)
            skipped = 0 if self.args.ignore_data_skip else steps
            batches = skipped * self.args.gradient_accumulation_steps
        return epochs, batches

    def _run_epoch(self, **keywords: Any) -> None:
        epoch, folder = keywords["epoch"], keywords["resume_from_checkpoint"]
        first = epoch == keywords["epochs_trained"] and folder is not None
        ours = self._laststep.is_ours(folder)
        if first and ours and self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True  # else the Trainer does one more step
            return
        batches = keywords["steps_trained_in_current_epoch"] if first else 0
        self._laststep.begin_epoch(epoch, batches // self.args.gradient_accumulation_steps)
        super()._run_epoch(**keywords)

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None
    ) -> Any:
        theirs = None if self._laststep.is_ours(resume_from_checkpoint) else resume_from_checkpoint
        prepared = super()._prepare_for_training(max_steps, train_dataloader, theirs)
        self._laststep.begin(prepared[1], resume_from_checkpoint)
        return prepared

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if not self._laststep.is_ours(resume_from_checkpoint):  # else `begin` restores everything
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if self._laststep.is_ours(checkpoint):
            self._laststep.rng.release()
        else:
            super()._load_rng_state(checkpoint)

    def _maybe_log_save_evaluate(self, *args: Any, **keywords: Any) -> None:
        super()._maybe_log_save_evaluate(*args, **keywords)
        self._laststep.stepped()

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if self.hp_search_backend is None and trial is None:
            self.store_flos()
        self._laststep.save()

    def _load_best_model(self) -> None:
        if not self._laststep.loaded_best():
            super()._load_best_model()

    def _finalize_training(self, trial: Any, num_train_samples: int, start_time: float) -> Any:
        self._laststep.wait()
        return super()._finalize_training(trial, num_train_samples, start_time)


def attach(trainer: Any, run: str | os.PathLike[str] | None = None, **settings: Any) -> Any:
    """Make an existing trainer save to laststep and return it. The run is `run`, or
    `output_dir/_laststep` by default; `settings` are those of a `Checkpointer`."""
    if not isinstance(trainer, Trainer):
        raise UsageError(
            "laststep.hf.attach needs a transformers.Trainer", found=repr(trainer)[:80]
        )
    _refuse_arguments(trainer, settings)
    check_early(settings)
    if not isinstance(trainer, SavingTrainer):
        kind = type(trainer)
        trainer.__class__ = type(
            kind.__name__, (SavingTrainer, kind), {"__module__": kind.__module__}
        )
    trainer._laststep_run, trainer._laststep_settings = run, settings
    return trainer


def _refuse_arguments(trainer: Any, settings: dict[str, Any]) -> None:
    """Raise UsageError for a keyword that belongs to the Trainer's own arguments."""
    own = {field.name for field in dataclasses.fields(trainer.args)}
    for name, value in settings.items():
        if name in own:
            raise UsageError(
                f"unknown setting {name!r}",
                expected="settings of a Checkpointer",
                found=f"an argument of the Trainer: {name}={value!r}",
                remedy=f"pass {name} to TrainingArguments",
            )
