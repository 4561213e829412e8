"""An engine of DeepSpeed whose `save_checkpoint` and `load_checkpoint` go to laststep.

Both take and return what DeepSpeed's do. `save_checkpoint` returns as soon as training may go on.
DeepSpeed's `global_steps` counts completed steps: that is the step of a save, and after a load
`global_steps` is `Restored.step`. What DeepSpeed calls a tag is in the metadata.
"""

from __future__ import annotations

import itertools
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from laststep import browse
from laststep.adapters.deepspeed.items import model, optimizer, progress
from laststep.adapters.deepspeed.seams import FRAMEWORK
from laststep.checkpointer import Checkpointer
from laststep.errors import CorruptError, LaststepError, NotFoundError, UsageError
from laststep.state.provider import State, StateProvider
from laststep.state.values import RNG

if TYPE_CHECKING:
    from collections.abc import Callable

    from laststep.restoring.restore import Peeked, Restored

log = logging.getLogger(__name__)

_SAVE = ("save_dir", "tag", "client_state", "save_latest", "exclude_frozen_parameters")
_LOAD = (
    "load_dir",
    "tag",
    "load_module_strict",
    "load_optimizer_states",
    "load_lr_scheduler_states",
    "load_module_only",
    "custom_load_fn",
)


def attach(engine: Any, run: str | os.PathLike[str] | None = None, **settings: Any) -> Any:
    """Let an engine save to a run and load from it; returns the engine.

    `settings` are those of `Checkpointer`, and more items. `engine.checkpointer` is the
    Checkpointer; `engine.destroy()` closes it, and so does the end of the process.
    """
    FRAMEWORK.check()
    if "checkpointer" in vars(engine):  # an engine has all attributes of its module
        raise UsageError(
            "this engine has a checkpointer already",
            found=repr(engine.checkpointer),
            remedy="call attach() once; engine.checkpointer is what it made",
        )
    FRAMEWORK.seam(type(engine), "save_checkpoint", *_SAVE)
    FRAMEWORK.seam(type(engine), "load_checkpoint", *_LOAD)
    FRAMEWORK.seam(type(engine), "destroy")
    saving = _EngineSaving(engine, run, settings)
    engine.checkpointer = saving.checkpointer
    engine.save_checkpoint, engine.load_checkpoint = saving.save_checkpoint, saving.load_checkpoint
    engine.destroy = saving.destroy
    return engine


class _EngineSaving:
    """What stands in the place of an engine's own methods."""

    def __init__(self, engine: Any, run: Any, settings: dict[str, Any]) -> None:
        self._engine = engine
        self._own_load, self._own_destroy = engine.load_checkpoint, engine.destroy
        self._client = _ClientState()
        self._model = model(engine)
        more = settings.pop("items", None) or {}
        self._items = {"model": self._model, **_items(engine), "client": self._client, **more}
        self._paced = bool(settings.get("every") or settings.get("preemption"))
        self._pickles = bool(settings.get("allow_pickle"))
        self._tags: tuple[int, list[str]] = (-1, [])
        """Of the last save or load: the step, and all tags that it goes by."""
        self._told = False
        self.checkpointer = Checkpointer(run, items=self._items, **settings)

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str] | None = None,
        tag: object = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,  # noqa: FBT001, FBT002 (DeepSpeed's signature)
        exclude_frozen_parameters: bool = False,  # noqa: FBT001, FBT002 (as above)
    ) -> bool:
        """Save; True once training may go on. With `every` or `preemption` and without a tag: save
        if it is time to, and say whether."""
        self._tell_of_folder(save_dir)
        self._tell_of_gradients()
        step = self._engine.global_steps
        name = f"global_step{step}" if tag is None else str(tag)
        known = [one for one in self._tags[1] if self._tags[0] == step and one != name]
        self._model.leaves_frozen = bool(exclude_frozen_parameters)
        self._client.hand_in(client_state or {})
        metadata = FRAMEWORK.stamp(
            tags=[*known, name], latest=bool(save_latest), frozen=not exclude_frozen_parameters
        )
        if self._paced and tag is None:
            if self.checkpointer.step(step, metadata=metadata) is None:
                return False
        else:  # as DeepSpeed overwrites what has the same tag
            self.checkpointer.save(step, metadata=metadata, overwrite=True)
        self._tags = (step, [*known, name])
        return True

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str] | None = None,
        tag: object = None,
        load_module_strict: bool = True,  # noqa: FBT001, FBT002 (DeepSpeed's signature)
        load_optimizer_states: bool = True,  # noqa: FBT001, FBT002 (as above)
        load_lr_scheduler_states: bool = True,  # noqa: FBT001, FBT002 (as above)
        load_module_only: bool = False,  # noqa: FBT001, FBT002 (as above)
        custom_load_fn: object = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """The folder of the checkpoint that was loaded, and its client state; (None, None) in a new
        run. Without a tag the newest that is whole, with one that one or an error."""
        if custom_load_fn is not None:
            raise UsageError(
                "custom_load_fn is not called",
                remedy="load weights with laststep.load, and hand "
                "them to the function before the engine is made",
            )
        left_out = {"optimizer"} if not load_optimizer_states else set()
        left_out |= set() if load_lr_scheduler_states else {"lr_scheduler"}
        wanted = {"model", "client"} if load_module_only else self._items.keys() - left_out
        only = None if wanted == self._items.keys() else sorted(wanted)
        name, other = None if tag is None else str(tag), self._other_run(load_dir)
        if other is not None:
            with Checkpointer(other, items=self._items, allow_pickle=self._pickles) as ckpt:
                restored = self._restore(ckpt, name, only, strict=load_module_strict)
        else:
            restored = self._restore(self.checkpointer, name, only, strict=load_module_strict)
        if restored is not None:
            stamp: Any = restored.metadata
            self._tags = (restored.step or 0, stamp["tags"])
            return f"{other or self.checkpointer.path}/{restored.folder}", self._client.hand_out()
        if self._is_deepspeeds(load_dir, name):
            flags = (load_optimizer_states, load_lr_scheduler_states, load_module_only)
            own: tuple[str, Any] = self._own_load(load_dir, tag, load_module_strict, *flags)
            return own
        if name is not None:
            raise _no_such(name, self.checkpointer.path)
        return None, None

    def destroy(self) -> None:
        """Wait for all saves, and end what works for them; then what DeepSpeed's own does."""
        self.checkpointer.close()
        self._own_destroy()

    def _restore(
        self, ckpt: Checkpointer, tag: str | None, only: list[str] | None, *, strict: bool
    ) -> Restored | None:
        """None in a new run."""
        self._client.hand_in({})

        def restore(_: Peeked, stamp: dict[str, object]) -> Restored:
            if tag is not None or not stamp["latest"]:
                return self._restore_listed(ckpt, tag, only, strict=strict)
            self._model.leaves_frozen = not stamp["frozen"]
            return ckpt.restore(only=only, strict=strict)

        return FRAMEWORK.resume(ckpt, restore)

    def _restore_listed(
        self, ckpt: Checkpointer, tag: str | None, only: list[str] | None, *, strict: bool
    ) -> Restored:
        """The one with the tag; without a tag, the newest that is sound of those that may be it."""
        listed: list[tuple[int, bool]] = _together(lambda: _find(ckpt.path, tag))
        for (step, frozen), older in itertools.zip_longest(listed, listed[1:]):
            self._model.leaves_frozen = not frozen
            try:
                return ckpt.restore(step, only=only, strict=strict)
            except CorruptError as damage:
                if older is None:
                    raise
                log.warning("step %d is damaged, step %d is tried: %s", step, older[0], damage)
        raise _no_such(tag or "latest", ckpt.path)

    def _is_deepspeeds(self, folder: str | os.PathLike[str] | None, tag: str | None) -> bool:
        """Whether a folder has what DeepSpeed has saved itself, with which a run may begin."""
        has = folder is not None and (Path(folder) / (tag or "latest")).exists()
        what = "DeepSpeed itself loads %s" if has else "there is nothing to load in %s"
        log.warning(what, folder if has else self.checkpointer.path)
        return has

    def _other_run(self, folder: str | os.PathLike[str] | None) -> str | None:
        """A folder, or URL, if it is a run, and not this one."""
        if folder is None or self._is_own(folder):
            return None
        return os.fspath(folder) if _together(lambda: _is_run(os.fspath(folder))) else None

    def _is_own(self, folder: str | os.PathLike[str]) -> bool:
        run = self.checkpointer.path
        return os.fspath(folder) == run or Path(folder).resolve() == Path(run).resolve()

    def _tell_of_folder(self, folder: str | os.PathLike[str] | None) -> None:
        if folder is not None and not self._told and not self._is_own(folder):
            self._told = True
            log.warning("the engine saves to %s, not to %s", self.checkpointer.path, folder)

    def _tell_of_gradients(self) -> None:
        done = self._engine.micro_steps % self._engine.gradient_accumulation_steps()
        if done:
            log.warning("the gradients of %d micro-steps since the last step are not saved", done)


def _items(engine: Any) -> dict[str, object]:
    """All but the model that belongs to the state of an engine."""
    ltd = engine.random_ltd_scheduler if engine.random_ltd_enabled() else None
    parts = {
        "lr_scheduler": engine.lr_scheduler,
        "random_ltd": ltd,
        "sampler": _sampler(engine),
        "scaler": getattr(engine.optimizer, "torch_autocast_gradscaler", None),
    }
    there = {name: part for name, part in parts.items() if part is not None}
    return {"optimizer": optimizer(engine), "counts": progress(engine), "rng": RNG(), **there}


def _sampler(engine: Any) -> object:
    """Of curriculum learning, which decides what data come next."""
    if engine.training_dataloader is None or not engine.curriculum_learning_enabled():
        return None
    return engine.training_dataloader.data_sampler


def _find(run: str, tag: str | None) -> list[tuple[int, bool]]:
    """The newest checkpoint with a tag, or all that were saved with `save_latest`, newest first:
    the step, and whether it has parameters that are not trained."""
    found = []
    for one in reversed(list(browse.open(run))):
        with one:
            stamp: Any = FRAMEWORK.own(one.metadata, f"{run}, step {one.step}")
        if stamp["latest"] if tag is None else tag in stamp["tags"]:
            found.append((one.step, bool(stamp["frozen"])))
    return found if tag is None else found[:1]


def _no_such(tag: str, run: str) -> NotFoundError:
    return NotFoundError(
        f"there is no checkpoint with the tag {tag!r}",
        where=run,
        remedy="`laststep ls` lists the steps; without a tag the newest is loaded",
    )


def _is_run(path: str) -> bool:
    try:
        return len(browse.open(path)) > 0
    except LaststepError:
        return False


class _ClientState(StateProvider):
    """What a user hands to `save_checkpoint`: the first rank's, as DeepSpeed takes it, since those
    of others may differ; all get it back."""

    kind = "client"
    per_rank = True

    def __init__(self) -> None:
        self._state: object = {}

    @staticmethod
    def when_ranks_change(states: list[Any], rank: int, ranks: int) -> Any:  # noqa: ARG004
        return states[0]

    def hand_in(self, state: object) -> None:
        self._state = state if _is_first() else {}

    def hand_out(self) -> Any:
        state, self._state = self._state, {}
        return _together(lambda: state)

    def describe(self) -> State:
        return State(value={"state": self._state}, fresh=((),))

    def restore(self, value: object) -> None:
        if isinstance(value, dict):
            self._state = value["state"]


def _is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _together(look: Callable[[], Any]) -> Any:
    """What the first rank finds, on all of them; what it raises, likewise."""
    found: list[Any] = [None]
    if _is_first():
        try:
            found = [look()]
        except Exception as error:  # noqa: BLE001 (raised on all ranks)
            found = [error]
    if dist.is_initialized():
        dist.broadcast_object_list(found)
    if isinstance(found[0], Exception):
        raise found[0]
    return found[0]
