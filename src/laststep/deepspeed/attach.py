"""A DeepSpeed engine whose `save_checkpoint` and `load_checkpoint` use laststep.

Both have the parameters and results of DeepSpeed's methods. `save_checkpoint` returns as soon as
training may continue. DeepSpeed's `global_steps` counts completed steps: it is the step of a save,
and after a load `global_steps` is `Restored.step`. DeepSpeed's tags are stored in the metadata.
"""

from __future__ import annotations

import inspect
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist

from laststep import browse
from laststep.adapters.framework import first_sound
from laststep.checkpointer import Checkpointer
from laststep.deepspeed.items import FRAMEWORK, model, optimizer, progress
from laststep.errors import LaststepError, NotFoundError, UsageError
from laststep.state.provider import RNG, State, StateProvider

if TYPE_CHECKING:
    from collections.abc import Callable

    from laststep.restoring.restore import Peeked, Restored

log = logging.getLogger(__name__)

_REPLACED = ("save_checkpoint", "load_checkpoint", "destroy")
"""Methods of an engine; those that replace them have the same parameters."""


def attach(engine: Any, run: str | os.PathLike[str] | None = None, **settings: Any) -> Any:
    """Make an engine save to a run and load from it; return the engine.

    `settings` are those of `Checkpointer`, and more items. `engine.checkpointer` is the
    Checkpointer; `engine.destroy()` closes it, and so does the end of the process.
    """
    FRAMEWORK.check()
    if "checkpointer" in vars(engine):  # hasattr would also find attributes of the module
        raise UsageError(
            "this engine already has a checkpointer",
            found=repr(engine.checkpointer),
            remedy="call attach() only once; engine.checkpointer is the result",
        )
    for name in _REPLACED:
        _, *parameters = inspect.signature(getattr(_EngineSaving, name)).parameters
        FRAMEWORK.seam(type(engine), name, *parameters)
    saving = _EngineSaving(engine, run, settings)
    engine.checkpointer = saving.checkpointer
    for name in _REPLACED:
        setattr(engine, name, getattr(saving, name))
    return engine


class _EngineSaving:
    """The methods that replace an engine's own."""

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
        """The step of the last save or load, and all its tags."""
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
        """Save, and return True once training may continue. With `every` or `preemption` and
        without a tag, save only if a save is due, and return False if not."""
        engine, run = self._engine, self.checkpointer.path
        if save_dir is not None and not self._told and not self._is_own(save_dir):
            self._told = True
            log.warning("the engine saves to %s, not to %s", run, save_dir)
        if left := engine.micro_steps % engine.gradient_accumulation_steps():
            log.warning("the gradients of %d micro-steps since the last step are not saved", left)
        step = engine.global_steps
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
        else:  # DeepSpeed overwrites a checkpoint of the same tag
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
        """Load a checkpoint; return its folder and client state, or (None, None) in a new run.

        Without a tag, load the newest undamaged checkpoint. With a tag, load that checkpoint or
        raise NotFoundError. A folder that DeepSpeed itself has saved is loaded by DeepSpeed.
        """
        if custom_load_fn is not None:
            raise UsageError(
                "custom_load_fn is not supported",
                remedy="load weights with laststep.load, and hand "
                "them to the function before the engine is made",
            )
        skipped = {"optimizer"} if not load_optimizer_states else set()
        skipped |= set() if load_lr_scheduler_states else {"lr_scheduler"}
        wanted = {"model", "client"} if load_module_only else self._items.keys() - skipped
        only = None if wanted == self._items.keys() else sorted(wanted)
        name = None if tag is None else str(tag)
        other = None
        if load_dir is not None and not self._is_own(load_dir):
            other = _together(lambda: _run_at(os.fspath(load_dir)))
        if other is not None:
            with Checkpointer(other, items=self._items, allow_pickle=self._pickles) as ckpt:
                restored = self._restore(ckpt, name, only, strict=load_module_strict)
        else:
            restored = self._restore(self.checkpointer, name, only, strict=load_module_strict)
        if restored is not None:
            stamp: Any = restored.metadata
            self._tags = (restored.step or 0, stamp["tags"])
            return f"{other or self.checkpointer.path}/{restored.folder}", self._client.hand_out()
        if load_dir is not None and (Path(load_dir) / (name or "latest")).exists():
            log.warning("DeepSpeed itself loads %s", load_dir)
            flags = (load_optimizer_states, load_lr_scheduler_states, load_module_only)
            own: tuple[str, Any] = self._own_load(load_dir, tag, load_module_strict, *flags)
            return own
        log.warning("there is nothing to load in %s", self.checkpointer.path)
        if name is not None:
            raise _no_such(name, self.checkpointer.path)
        return None, None

    def destroy(self) -> None:
        """Wait for all saves and close the Checkpointer; then call DeepSpeed's own `destroy`."""
        self.checkpointer.close()
        self._own_destroy()

    def _restore(
        self, ckpt: Checkpointer, tag: str | None, only: list[str] | None, *, strict: bool
    ) -> Restored | None:
        """Restore the checkpoint with this tag or, without a tag, the newest undamaged one that was
        saved with `save_latest`. Return None in a new run."""
        self._client.hand_in({})

        def load(step: int | None, frozen: object) -> Restored:
            self._model.leaves_frozen = not frozen
            return ckpt.restore(step, only=only, strict=strict)

        def restore(_: Peeked, stamp: dict[str, object]) -> Restored:
            if tag is None and stamp["latest"]:
                return load(None, stamp["frozen"])
            listed: list[_TaggedCheckpoint] = _together(lambda: _find(ckpt.path, tag))
            restored = first_sound(listed, lambda found: load(found.step, found.frozen))
            if restored is None:
                raise _no_such(tag or "latest", ckpt.path)
            return restored

        return FRAMEWORK.resume(ckpt, restore)

    def _is_own(self, folder: str | os.PathLike[str]) -> bool:
        run = self.checkpointer.path
        return os.fspath(folder) == run or Path(folder).resolve() == Path(run).resolve()


def _items(engine: Any) -> dict[str, object]:
    """Return all items of an engine's state except the model."""
    loader = engine.training_dataloader  # whose sampler decides the next data
    has_sampler = loader is not None and engine.curriculum_learning_enabled()
    parts = {
        "lr_scheduler": engine.lr_scheduler,
        "random_ltd": engine.random_ltd_scheduler if engine.random_ltd_enabled() else None,
        "sampler": loader.data_sampler if has_sampler else None,
        "scaler": getattr(engine.optimizer, "torch_autocast_gradscaler", None),
    }
    there = {name: part for name, part in parts.items() if part is not None}
    return {"optimizer": optimizer(engine), "counts": progress(engine), "rng": RNG(), **there}


class _TaggedCheckpoint(NamedTuple):
    """A checkpoint; `frozen` is True if it has the frozen parameters."""

    step: int
    frozen: bool


def _find(run: str, tag: str | None) -> list[_TaggedCheckpoint]:
    """Return the newest with a tag; without one, all saved with `save_latest`, newest first."""
    found = []
    for one in reversed(list(browse.open(run))):
        with one:
            stamp: Any = FRAMEWORK.own(one.metadata, f"{run}, step {one.step}")
        if stamp["latest"] if tag is None else tag in stamp["tags"]:
            found.append(_TaggedCheckpoint(one.step, bool(stamp["frozen"])))
    return found if tag is None else found[:1]


def _no_such(tag: str, run: str) -> NotFoundError:
    return NotFoundError(
        f"there is no checkpoint with the tag {tag!r}",
        where=run,
        remedy="`laststep ls` lists the steps; without a tag the newest is loaded",
    )


def _run_at(path: str) -> str | None:
    """Return the path or URL if a run with checkpoints is there."""
    try:
        return path if len(browse.open(path)) else None
    except LaststepError:
        return None


class _ClientState(StateProvider):
    """The client state passed to `save_checkpoint`. As in DeepSpeed, only that of rank 0 is saved,
    since those of other ranks may differ; all ranks get it back."""

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
    """Call `look` on rank 0; return its result or raise its error on all. Collective."""
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
