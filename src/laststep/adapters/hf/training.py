"""What one call of `train()` saves and restores: the Checkpointer, and what lies around it.

The state of the Trainer itself (its counts, its log, its callbacks) is the metadata of each save.
A Trainer reads that from a file before model and optimizer are prepared, so it is handed a folder
of its own with that file alone. All tensors are restored at once, when everything is prepared; what
the Trainer would overwrite after that (random numbers, the sum of the losses to be logged) is held
until it asks for it.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from transformers.trainer_callback import ExportableState, TrainerState
from transformers.trainer_utils import get_last_checkpoint

import laststep
from laststep.adapters.hf import FRAMEWORK
from laststep.adapters.hf.folders import MARK, Folders, path_of, state_json
from laststep.adapters.hf.items import Data, HeldRNG, Logged, items_of
from laststep.browse import open as open_run
from laststep.errors import NotFoundError, UsageError
from laststep.events import Committed
from laststep.storage.files import absolute

if TYPE_CHECKING:
    from types import TracebackType

    from laststep.errors import CorruptError
    from laststep.events import Event

log = logging.getLogger(__name__)

_FOLDER = re.compile(r"checkpoint-([0-9]+)")
RUN = "_laststep"
"""The run's folder in `output_dir`, of which pushes to the hub leave out what begins with `_`."""


class _Resume:
    """Where training goes on."""

    def __init__(self, step: int, metadata: dict[str, Any], *, exact: bool, within: str) -> None:
        self.step, self.exact = step, exact
        self.stored = set(metadata["items"])
        self.place: list[int] | None = metadata.get("place")
        self.restored = False
        folder = path_of(Path(tempfile.mkdtemp(dir=within)), step)
        folder.mkdir()
        (folder / "trainer_state.json").write_bytes(state_json(TrainerState(**metadata["state"])))
        self.path = str(folder)


class TrainCall:
    """The saves of one `train()`; closes everything at its end."""

    def __init__(self, trainer: Any, trial: Any, run: Any, settings: dict[str, Any]) -> None:
        self._trainer, self._settings = trainer, dict(settings)
        self._output = Path(absolute(trainer._get_output_dir(trial)))
        if run is None and not settings.get("tiers"):
            run = self._output / RUN
        self._settings.setdefault("keep", _keep(trainer.args))
        self._own_schedule = bool(settings.get("every") or settings.get("preemption"))
        self._rng, self._logged = HeldRNG(), Logged(trainer)
        more = self._settings.pop("items", None) or {}
        self._data = Data()
        self._items = {**items_of(trainer, self._data, self._rng, self._logged), **more}
        self._place: tuple[int, int] | None = None
        """The pass over the data, and at which step it began."""
        self._resume: _Resume | None = None
        self._saved: set[int] = set()
        self._scratch = tempfile.TemporaryDirectory(prefix="laststep-")
        self._ckpt = laststep.Checkpointer(run, items=self._items, **self._settings)
        self._folders: Folders | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._ckpt.__exit__(kind, error, trace)
        finally:
            if self._folders is not None:
                self._folders.close()
            self._scratch.cleanup()

    # -- resuming ---------------------------------------------------------------------------------

    def found(self, asked: str | bool | None) -> str | None:  # noqa: FBT001 (the user's word)
        """What `resume_from_checkpoint` stands for: a folder for the Trainer, or None."""
        newest = self._ckpt.peek()
        if asked is True and newest is not None:
            self._refuse_later(newest.step)
            return self._from(newest.step, newest.metadata, exact=False)
        if isinstance(asked, str | os.PathLike) and _is_an_adapter_s(Path(asked)):
            return self._named(Path(asked))
        if newest is not None and not self._settings.get("new_lineage"):
            raise UsageError(
                "the run has checkpoints, and training would not go on from any of them",
                where=self._ckpt.path,
                expected="train(resume_from_checkpoint=True)",
                found=f"resume_from_checkpoint={asked!r}; the newest is of step {newest.step}",
                remedy="resume, choose another output_dir or run, or pass new_lineage=True",
            )
        if asked is True:
            asked = get_last_checkpoint(self._output) if self._output.is_dir() else None
            if asked is not None and _is_an_adapter_s(Path(asked)):
                raise self._lost(Path(asked))
            log.info("%s: no checkpoint yet; %s", self._ckpt.path, asked or "training begins")
        return os.fspath(asked) if asked else None

    def _refuse_later(self, newest: int) -> None:
        """What the Trainer itself has saved since would be passed over, and replaced."""
        folders = self._output.glob("checkpoint-*") if self._output.is_dir() else ()
        steps = {int(name[1]): one for one in folders if (name := _FOLDER.fullmatch(one.name))}
        last = max(steps, default=0)
        if last > newest and not _is_an_adapter_s(steps[last]):
            raise UsageError(
                "the Trainer itself has saved a later step, without laststep",
                where=self._ckpt.path,
                expected=f"none after step {newest}",
                found=str(steps[last]),
                remedy=f"move that away, or pass {str(steps[last])!r} as resume_from_checkpoint "
                "with another run=, which then begins with it",
            )

    def _lost(self, folder: Path) -> NotFoundError:
        """A folder has weights alone: to go on from it would begin all the rest anew."""
        whence = json.loads((folder / MARK).read_bytes())["run"]
        return NotFoundError(
            "the run is empty, but one that was here before has made folders",
            where=self._ckpt.path,
            expected=f"the run {whence}",
            found=str(folder),
            remedy="pass run= as before, or remove these folders to begin anew; from_pretrained "
            "loads their weights",
        )

    def _named(self, folder: Path) -> str:
        """The folder for a checkpoint of the run that was asked for by its folder."""
        name = _FOLDER.fullmatch(folder.name)
        if name is None or folder.resolve().parent != self._output.resolve():
            raise UsageError(
                "this is no checkpoint of the run",
                where=self._ckpt.path,
                expected=str(path_of(self._output, "N")),
                found=str(folder),
                remedy="train(resume_from_checkpoint=True) takes the newest; "
                "from_pretrained loads the weights of others",
            )
        catalog = open_run(self._ckpt.path)
        chosen = catalog[int(name[1])]
        newest = catalog.steps()[-1]
        if newest > chosen.step:
            log.warning(
                "%s: training goes on from step %d, as asked for; there is a newer checkpoint, of "
                "step %d",
                self._ckpt.path,
                chosen.step,
                newest,
            )
        return self._from(chosen.step, chosen.metadata, exact=True)

    def _from(self, step: int, metadata: object, *, exact: bool) -> str:
        own: dict[str, Any] = FRAMEWORK.own(metadata, self._ckpt.path)
        self._resume = _Resume(step, own, exact=exact, within=self._scratch.name)
        return self._resume.path

    def older(self, damage: CorruptError) -> str:
        """The folder to go on from instead of one that was found damaged."""
        resume = self._resume
        if resume is None or resume.restored or resume.exact:
            raise damage
        newest = self._ckpt.peek()
        if newest is None:
            raise damage
        log.warning(
            "the checkpoint of step %d is damaged; training goes on from step %d: %s",
            resume.step,
            newest.step,
            damage,
        )
        return self._from(newest.step, newest.metadata, exact=False)

    def is_ours(self, folder: str | None) -> bool:
        """Whether the Trainer resumes from what `found` gave it."""
        return self._resume is not None and folder == self._resume.path

    def begin(self, loader: Any, *, resumes: bool) -> None:
        """Model, optimizer and loader are prepared: restore them, and make ready for saves."""
        self._data.follow(loader)
        resume = self._resume if resumes else None
        if resume is not None:
            absent = set(self._items) - resume.stored
            if absent:
                log.warning(
                    "the checkpoint of step %d was saved without them: %s begin anew",
                    resume.step,
                    ", ".join(sorted(absent)),
                )
            both = sorted(set(self._items) & resume.stored)  # DeepSpeed has counts of its own
            # `Restored.step` is the number of completed steps, as `global_step` is.
            self._ckpt.restore(
                resume.step if resume.exact else None,
                only=None if resume.stored == set(self._items) else both,
            )
            resume.restored = True
            if self._trainer.args.ignore_data_skip and self._data.placed is not None:
                self._data.placed.skip(0)  # the epoch begins anew, as is asked for
        if self._folders is None and self._trainer.args.should_save:
            self._folders = Folders(self._trainer, self._output, self._ckpt.path)
            self._ckpt.subscribe(self._heard)
        if resume is not None:
            self._find_best()
            if self._folders is not None:
                self._folders.make(resume.step, again=False)

    def _find_best(self) -> None:
        """The best model is still known where its folder was not made yet, or lay elsewhere; of
        such the Trainer forgets it."""
        state = self._trainer.state
        if not state.best_global_step or state.best_model_checkpoint is not None:
            return
        folder = path_of(self._output, state.best_global_step)
        if state.best_global_step in open_run(self._ckpt.path).steps():
            if self._folders is not None:
                self._folders.make(state.best_global_step, again=False)
        elif not folder.is_dir():
            return
        state.best_model_checkpoint = str(folder)

    # -- the place in the data --------------------------------------------------------------------

    def place(self) -> tuple[int, int] | None:
        """The pass over the data that training goes on in, and the steps of it that are done."""
        found = self._resume.place if self._resume is not None else None
        return (found[0], found[1]) if found is not None else None

    def begin_epoch(self, epoch: int, done: int) -> None:
        """A pass over the data begins, or goes on after so many steps."""
        self._place = (epoch, self._trainer.state.global_step - done)
        if self._data.placed is not None:
            self.released()  # what was fetched before the save is fetched with the numbers of then

    def released(self) -> None:
        """What was held back takes effect, once: the Trainer is where it was at the save."""
        self._rng.release()
        self._logged.release()

    # -- saving -----------------------------------------------------------------------------------

    def save(self) -> None:
        """Save the state as it is now; training goes on at once."""
        step = self._trainer.state.global_step
        metrics, metadata = self._described()
        again = step in self._saved
        self._ckpt.save(step, metrics=metrics, metadata=metadata, overwrite=again)
        self._saved.add(step)

    def stepped(self) -> None:
        """A step is over, its log and evaluation too: save by `every`, end by `preemption`."""
        step = self._trainer.state.global_step
        if self._own_schedule and step not in self._saved:
            metrics, metadata = self._described()
            if self._ckpt.step(step, metrics=metrics, metadata=metadata) is not None:
                self._saved.add(step)

    def wait(self) -> None:
        """Until everything is committed, and its folder is there."""
        self._ckpt.wait()
        if self._folders is not None:
            self._folders.wait()

    def loaded_best(self) -> bool:
        """Whether the best model is one of the run's, and is loaded now."""
        name = _FOLDER.fullmatch(Path(self._trainer.state.best_model_checkpoint).name)
        try:
            best = open_run(self._ckpt.path)[int(name[1])] if name else None
        except NotFoundError:
            best = None
        if best is None:
            return False
        self._ckpt.restore(best.step, only="model")
        return True

    def _described(self) -> tuple[dict[str, Any], dict[str, object]]:
        """Metrics and metadata of a save."""
        state, handler = self._trainer.state, self._trainer.callback_handler
        is_best = state.best_global_step == state.global_step
        if is_best:
            state.best_model_checkpoint = str(path_of(self._output, state.global_step))
        stateful = [
            one
            for one in [*handler.callbacks, self._trainer.control]
            if isinstance(one, ExportableState)
        ]
        kept = dataclasses.replace(state, stateful_callbacks=stateful)
        # As the Trainer's file would have it: NumPy's float64, for one, becomes a float.
        plain: dict[str, Any] = json.loads(json.dumps(vars(kept)))
        metrics: dict[str, Any] = {_BEST: state.global_step if is_best else -1}
        for entry in reversed(plain["log_history"]):
            if entry.get("step") != state.global_step:
                break
            metrics.update({k: v for k, v in entry.items() if isinstance(v, int | float)})
        epoch, began = self._place or (0, 0)
        place = [epoch, state.global_step - began]
        if self._data.placed is not None and self._data.placed.has_ended:
            place = [epoch + 1, 0]
        return metrics, FRAMEWORK.stamp(state=plain, items=sorted(self._items), place=place)

    def _heard(self, event: Event) -> None:
        if isinstance(event, Committed) and self._folders is not None:
            self._folders.make(event.step)


def _is_an_adapter_s(folder: Path) -> bool:
    """Whether a folder was not saved by the Trainer itself; one that is not there may be made."""
    return not folder.is_dir() or (folder / MARK).exists()


_BEST = "best_at"
"""A metric: its own step for a checkpoint that was the best when it was saved, else -1. The Trainer
takes the earlier of two equals for the better, retention the later; of steps no two are equal."""


def _keep(args: Any) -> laststep.Keep | None:
    """As `save_total_limit` has it: the last ones, and the best."""
    limit = args.save_total_limit
    if limit is None or limit <= 0:
        return None
    if args.metric_for_best_model is None:
        return laststep.Keep(last=limit)
    return laststep.Keep(last=limit, best=1, metric=_BEST, mode="max")
