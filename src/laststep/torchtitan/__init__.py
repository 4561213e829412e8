"""A checkpoint manager for torchtitan.

    checkpoint=laststep.torchtitan.Manager.Config(folder="checkpoint")

It implements torchtitan's checkpoint manager with laststep. torchtitan's own manager still loads
initial checkpoints of DCP or Hugging Face, and writes the latter. torchtitan counts completed
optimizer steps: that number is the step of a checkpoint, and the trainer's step after a restore.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any

import torch

from laststep.adapters.framework import Framework
from laststep.catalog.attempt import parse_folder
from laststep.catalog.retention import Keep
from laststep.catalog.run import Run
from laststep.checkpointer import Checkpointer
from laststep.errors import NotFoundError, UsageError
from laststep.settings import as_keywords
from laststep.state.provider import RNG, PerRank, StateDictProvider
from laststep.storage.registry import open_store

FRAMEWORK = Framework(package="torchtitan", extra="torchtitan", tested="0.3")
FRAMEWORK.check()  # before the imports below, which fail if it is not installed

import tyro  # noqa: E402
from torchtitan.components.checkpointer import (  # noqa: E402
    DATALOADER,
    LR_SCHEDULER,
    MODEL,
    OPTIMIZER,
    TRAIN_STATE,
    AsyncMode,
    CheckpointManager,
)
from torchtitan.components.dataloader import ParallelAwareDataloader  # noqa: E402
from torchtitan.tools import filesystem  # noqa: E402

from laststep.torchtitan.state import LoaderPlace, Optimizers, Parts, Weights  # noqa: E402

if TYPE_CHECKING:
    from laststep.restoring.restore import Restored

__all__ = ["Manager"]


FRAMEWORK.seam(CheckpointManager, "_load", "step")
FRAMEWORK.seam(CheckpointManager, "_save", "curr_step", "last_step")
FRAMEWORK.seam(CheckpointManager, "_should_save", "curr_step", "last_step")
FRAMEWORK.seam(
    CheckpointManager,
    "dcp_save",
    "state_dict",
    "checkpoint_id",
    "async_mode",
    "enable_garbage_collection",
    "to_hf",
)

_STAMP = FRAMEWORK.stamp()  # made once: looking up a version reads files
_THEIRS = re.compile(r"step-([0-9]+)")
"""Names of the folders that torchtitan itself writes."""


class Manager(CheckpointManager):  # type: ignore[misc]
    """Saves and restores with laststep. Each checkpoint can be resumed."""

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
        self._parts: list[torch.nn.Module] = self.states[MODEL].model
        dataloader = self.states[DATALOADER]
        schedule = StateDictProvider(self.states[LR_SCHEDULER])
        schedule.per_rank = False  # although it is iterable, as a loader is
        self._items = {
            **self.states,
            MODEL: Parts(self._parts),
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
        self._ckpt = Checkpointer(
            None if "tiers" in settings else self.folder, items=self._items, **as_keywords(settings)
        )

    # -- saving -----------------------------------------------------------------------------------

    @torch.no_grad()
    def _save(self, curr_step: int, last_step: bool = False) -> bool:  # noqa: FBT001, FBT002 (theirs)
        if last_step and self.last_save_model_only and curr_step > 0:
            if not self.load_only:
                self._save_model(curr_step)
            return not self.load_only
        if self._by_step and not self.load_only:
            handle = self._ckpt.step(curr_step, metadata=_STAMP, last=last_step)
        elif self._should_save(curr_step, last_step):
            handle = self._ckpt.save(curr_step, metadata=_STAMP)
        else:
            return False
        self.save_future = handle
        return handle is not None

    def _save_model(self, step: int) -> None:
        """Save only the model, under torchtitan's names and in the dtype of exports. A separate
        folder keeps the newest checkpoint of the run resumable."""
        weights = {
            name: entry.to(self.export_dtype)
            if isinstance(entry, torch.Tensor) and entry.is_floating_point()
            else entry
            for name, entry in self.states[MODEL].state_dict().items()
        }
        folder = filesystem.join(self.folder, "final")
        if self.last_save_in_hf:
            self.dcp_save(weights, folder, AsyncMode.DISABLED, to_hf=True)
            return
        keep = Keep(last=1, abandoned=False)
        with Checkpointer(folder, items={MODEL: weights}, keep=keep, new_lineage=True) as alone:
            alone.save(step, metadata=_STAMP)

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
            return self._begin(step)
        if step == -1:
            self._refuse_later(newest.step)
            FRAMEWORK.resume(self._ckpt, lambda found, _: self._restore(found.step))
        else:
            FRAMEWORK.own(newest.metadata, filesystem.join(self.folder, newest.folder))
            self._restore(step, step)
        return True

    def _refuse_later(self, newest: int) -> None:
        """Raise UsageError if torchtitan's own manager has saved a later step here."""
        listed = filesystem.listdir(self.folder) if filesystem.isdir(self.folder) else []
        theirs = [
            int(own[1])
            for name in listed
            if (own := _THEIRS.fullmatch(name))
            and filesystem.isfile(filesystem.join(self.folder, f"{name}/.metadata"))
        ]
        if max(theirs, default=-1) > newest:
            raise UsageError(
                "torchtitan has saved a later step into the folder of the run",
                where=self.folder,
                expected=f"none after step {newest}",
                found=f"step-{max(theirs)}",
                remedy=f"move that away, or set load_step={newest} to go on from the run's own",
            )

    def _restore(self, number: int, step: int | None = None) -> Restored:
        """Restore `step`, or by default the checkpoint that was peeked at. `number` is its step; at
        step 0 only the model is restored."""
        return self._ckpt.restore(step, only=self._wanted(model_only=number == 0))

    def _begin(self, step: int) -> bool:
        """Start from another laststep run, or from a checkpoint that torchtitan can load."""
        start = self.initial_load_path
        if step != -1 or start is None or self.initial_load_in_hf or not (run := _run_at(start)):
            return bool(super()._load(step))
        url, number = run
        names = self._wanted(model_only=self.initial_load_model_only)
        items = {**self._items, MODEL: Weights(self._parts, self.states[MODEL])}
        with Checkpointer(url, items={name: items[name] for name in names}) as source:
            source.restore(number, only=names)
        return True

    def _wanted(self, *, model_only: bool) -> list[str]:
        """Return the names of the items to load."""
        if model_only:
            return [MODEL]
        for name in self.exclude_from_loading:
            if name not in self._items:
                raise UsageError(
                    "exclude_from_loading names an unknown part of the state",
                    expected=", ".join(self._items),
                    found=name,
                    remedy="leave it out",
                )
        return [name for name in self._items if name not in self.exclude_from_loading]


def _run_at(path: str) -> tuple[str, int | None] | None:
    """Return the run and the step (None: the newest) that a path refers to, if it does."""
    above, _, last = path.rstrip("/").rpartition("/")
    named = parse_folder(last)
    url, step = (path, None) if named is None else (above, named.step)
    try:
        Run.open(open_store(url))
    except NotFoundError:
        return None
    return url, step
