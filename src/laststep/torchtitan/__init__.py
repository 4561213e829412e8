"""A checkpoint manager for torchtitan.

    checkpoint=laststep.torchtitan.Manager.Config(folder="checkpoint")

It implements torchtitan's checkpoint manager with laststep. torchtitan's own manager still loads
initial checkpoints of DCP or Hugging Face, and writes the model alone at the end. torchtitan counts
completed optimizer steps: that number is the step of a checkpoint, and the trainer's step after a
restore.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any

import torch

from laststep.adapters.framework import Framework, FrameworkCheckpointer, advising
from laststep.catalog.retention import Keep
from laststep.errors import UsageError
from laststep.settings import as_keywords
from laststep.state.provider import RNG, PerRank, StateDictProvider
from laststep.torchtitan.uses import USES

FRAMEWORK = Framework(
    package="torchtitan", extra="torchtitan", oldest="0.3", newest="0.3", uses=USES
)
FRAMEWORK.check()  # before the imports below, which fail if it is not installed

import tyro  # noqa: E402
from torchtitan.components.checkpointer import (  # noqa: E402
    DATALOADER,
    LR_SCHEDULER,
    MODEL,
    OPTIMIZER,
    TRAIN_STATE,
    CheckpointManager,
)
from torchtitan.components.dataloader import ParallelAwareDataloader  # noqa: E402
from torchtitan.tools import filesystem  # noqa: E402

from laststep.torchtitan.state import LoaderPlace, Optimizers, Parts  # noqa: E402

if TYPE_CHECKING:
    from laststep.restoring.restore import Restored

__all__ = ["Manager"]

_STAMP = FRAMEWORK.stamp()  # made once: looking up a version reads files


class Manager(CheckpointManager):  # type: ignore[misc]
    """Saves and restores with laststep. Each checkpoint can be resumed."""

    folder: str

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):  # type: ignore[misc]
        """torchtitan's own settings and those of laststep. No `async_mode` makes training wait."""

        enable: bool = True
        settings: Annotated[dict[str, Any], tyro.conf.Suppress] = field(default_factory=dict)
        """Settings of `laststep.Checkpointer`, such as `{"compression": "adaptive"}`."""

    def __init__(self, config: Config, **given: Any) -> None:
        # Otherwise it starts a thread to delete folders and creates a process group for saves.
        bare: Any = replace(config, keep_latest_k=0, async_mode="disabled")  # type: ignore[call-arg]
        super().__init__(bare, **given)
        if not self.enable:
            return
        dataloader = self.states[DATALOADER]
        schedule = StateDictProvider(self.states[LR_SCHEDULER])
        schedule.per_rank = False  # although it is iterable, as a loader is
        self._items = {
            **self.states,
            MODEL: Parts(self.states[MODEL].model),
            OPTIMIZER: Optimizers(list(self.states[OPTIMIZER])),
            LR_SCHEDULER: schedule,
            "rng": RNG(),  # restored last: a loader draws a number when it starts
        }
        if TRAIN_STATE in self._items:  # each rank counts its own tokens in it
            self._items[TRAIN_STATE] = PerRank(
                self._items[TRAIN_STATE],
                when_ranks_change=lambda states, rank, _: states[rank % len(states)],
            )
        if isinstance(dataloader, ParallelAwareDataloader):
            self._items[DATALOADER] = LoaderPlace(dataloader)
        elif dataloader is None:
            del self._items[DATALOADER]
        keep = Keep(last=config.keep_latest_k) if config.keep_latest_k else None
        settings = {"keep": keep, **config.settings}
        if settings.get("preemption"):
            settings.setdefault("every", config.interval)  # preemption is checked at each step
        self._by_step = "every" in settings
        self._ckpt = FrameworkCheckpointer(
            None if "tiers" in settings else self.folder, items=self._items, **as_keywords(settings)
        )

    # -- saving -----------------------------------------------------------------------------------

    @torch.no_grad()
    def _save(self, curr_step: int, last_step: bool = False) -> bool:  # noqa: FBT001, FBT002 (theirs)
        if last_step and self.last_save_model_only and curr_step > 0:
            if not self.load_only:
                # In a folder of its own, so that the run ends with a checkpoint to resume from.
                run = self.folder
                self.folder = filesystem.join(run, "final")
                self._save_last_step(curr_step)
                self.folder = run
            return not self.load_only
        if self._by_step and not self.load_only:
            handle = self._ckpt.step(curr_step, metadata=_STAMP, last=last_step)
        elif self._should_save(curr_step, last_step):
            handle = self._ckpt.save(curr_step, metadata=_STAMP)
        else:
            return False
        self.save_future = handle
        return handle is not None

    def _maybe_wait_for_staging(self) -> None:
        """Do nothing: a capture that overlaps training delays the optimizer's step itself."""

    def _wait_for_saving(self) -> None:
        self.save_future = None
        self._ckpt.wait()

    def _close(self) -> None:
        if hasattr(self, "_ckpt"):  # else the constructor has failed
            self._ckpt.close()

    # -- loading ----------------------------------------------------------------------------------

    @torch.no_grad()
    def _load(self, step: int = -1) -> bool:
        newest = self._ckpt.peek()
        if newest is None:
            return bool(super()._load(step))
        if step != -1:
            FRAMEWORK.own(newest.metadata, filesystem.join(self.folder, newest.folder))
            self._restore(step, step)
            return True
        theirs = self._find_load_step()
        if theirs > newest.step:
            raise UsageError(
                "torchtitan has saved a later step into the folder of the run",
                where=self.folder,
                expected=f"none after step {newest.step}",
                found=f"step-{theirs}",
                remedy=f"move that away, or set load_step={newest.step} to leave it out",
            )
        with advising(self._ckpt):
            FRAMEWORK.resume(self._ckpt, lambda found, _: self._restore(found.step))
        return True

    def _restore(self, number: int, step: int | None = None) -> Restored:
        """Restore `step`, or by default the checkpoint that was peeked at. `number` is its step; at
        step 0 only the model is restored."""
        if number == 0:
            return self._ckpt.restore(step, only=[MODEL])
        excluded = set(self.exclude_from_loading)
        if unknown := excluded - self._items.keys():
            raise UsageError("exclude_from_loading names no part of the state", found=str(unknown))
        return self._ckpt.restore(step, only=[name for name in self._items if name not in excluded])
