"""A DeepSpeed engine whose `save_checkpoint` and `load_checkpoint` use laststep.

Both have the parameters and results of DeepSpeed's methods. `save_checkpoint` returns as soon as
training may continue. DeepSpeed's `global_steps` counts completed steps: it is the step of a save,
and after a load `global_steps` is `Restored.step`. DeepSpeed's tags are stored in the metadata.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from laststep import browse
from laststep.adapters.framework import FrameworkCheckpointer, advising
from laststep.deepspeed.items import FRAMEWORK, check_version, model, optimizer, progress
from laststep.errors import NotFoundError, UsageError
from laststep.state.provider import RNG, State, StateProvider

if TYPE_CHECKING:
    import os

log = logging.getLogger(__name__)


def attach(engine: Any, run: str | os.PathLike[str] | None = None, **settings: Any) -> Any:
    """Make an engine save to a run and load from it; return the engine.

    `settings` are those of `Checkpointer`, and more items. `engine.checkpointer` is the
    Checkpointer; `engine.destroy()` closes it, and so does the end of the process.
    """
    check_version()
    if "checkpointer" in vars(engine):  # hasattr would also find attributes of the module
        raise UsageError(
            "this engine already has a checkpointer",
            found=repr(engine.checkpointer),
            remedy="call attach() only once; engine.checkpointer is the result",
        )
    saving = _EngineSaving(engine, run, settings)
    engine.checkpointer = saving.checkpointer
    for name in ("save_checkpoint", "load_checkpoint", "destroy"):
        setattr(engine, name, getattr(saving, name))
    return engine


class _EngineSaving:
    def __init__(self, engine: Any, run: Any, settings: dict[str, Any]) -> None:
        self._engine = engine
        self._own_load, self._own_destroy = engine.load_checkpoint, engine.destroy
        self._client = _ClientState()
        more = settings.pop("items", None) or {}
        self._items = {**_items(engine), "client": self._client, **more}
        self._paced = bool(settings.get("every") or settings.get("preemption"))
        self._tags: tuple[int, list[str]] = (-1, [])
        """The step of the last save or load, and all its tags."""
        self.checkpointer = FrameworkCheckpointer(run, items=self._items, **settings)

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
        _refuse(save_latest=not save_latest, exclude_frozen_parameters=exclude_frozen_parameters)
        engine = self._engine
        if left := engine.micro_steps % engine.gradient_accumulation_steps():
            log.warning("the gradients of %d micro-steps since the last step are not saved", left)
        step = engine.global_steps
        name = f"global_step{step}" if tag is None else str(tag)
        known = [old for old in self._tags[1] if self._tags[0] == step and old != name]
        self._client.state = client_state or {}
        metadata = FRAMEWORK.stamp(tags=[*known, name])
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
        _refuse(custom_load_fn=custom_load_fn is not None)
        skipped = {"optimizer"} if not load_optimizer_states else set()
        skipped |= set() if load_lr_scheduler_states else {"lr_scheduler"}
        wanted = {"model", "client"} if load_module_only else self._items.keys() - skipped
        only = None if wanted == self._items.keys() else sorted(wanted)
        strict, ckpt = load_module_strict, self.checkpointer
        self._client.state = {}
        with advising(ckpt):
            if tag is None:
                restored = FRAMEWORK.resume(ckpt, lambda *_: ckpt.restore(only=only, strict=strict))
            else:
                step = None if ckpt.peek() is None else _step_with(str(tag), ckpt.path)
                restored = None if step is None else ckpt.restore(step, only=only, strict=strict)
        if restored is not None:
            stamp: Any = restored.metadata
            self._tags = (restored.step or 0, stamp["tags"])
            return f"{ckpt.path}/{restored.folder}", self._client.state
        name = "latest" if tag is None else str(tag)
        if load_dir is not None and (Path(load_dir) / name).exists():
            log.warning("DeepSpeed itself loads %s", load_dir)
            flags = (load_optimizer_states, load_lr_scheduler_states, load_module_only)
            own: tuple[str, Any] = self._own_load(load_dir, tag, strict, *flags)
            return own
        if tag is not None:
            raise _no_such(name, ckpt.path)
        log.warning("there is nothing to load in %s; load_dir=%s", ckpt.path, load_dir)
        return None, None

    def destroy(self) -> None:
        """Wait for all saves and close the Checkpointer; then call DeepSpeed's own `destroy`."""
        self.checkpointer.close()
        self._own_destroy()


def _refuse(**unsupported: bool) -> None:
    for name, is_used in unsupported.items():
        if is_used:
            raise UsageError(
                f"laststep.deepspeed does not support {name}",
                remedy="leave it out; laststep.load reads single items of a checkpoint",
            )


def _items(engine: Any) -> dict[str, object]:
    loader = engine.training_dataloader  # whose sampler decides the next data
    has_sampler = loader is not None and engine.curriculum_learning_enabled()
    parts = {
        "lr_scheduler": engine.lr_scheduler,
        "random_ltd": engine.random_ltd_scheduler if engine.random_ltd_enabled() else None,
        "sampler": loader.data_sampler if has_sampler else None,
        "scaler": getattr(engine.optimizer, "torch_autocast_gradscaler", None),
    }
    return {
        "model": model(engine),
        "optimizer": optimizer(engine),
        "counts": progress(engine),
        "rng": RNG(),
        **{name: part for name, part in parts.items() if part is not None},
    }


def _step_with(tag: str, run: str) -> int:
    for checkpoint in reversed(list(browse.open(run))):
        with checkpoint:
            stamp: Any = FRAMEWORK.own(checkpoint.metadata, f"{run}, step {checkpoint.step}")
        if tag in stamp["tags"]:
            return checkpoint.step
    raise _no_such(tag, run)


def _no_such(tag: str, run: str) -> NotFoundError:
    return NotFoundError(
        f"there is no checkpoint with the tag {tag!r}",
        where=run,
        remedy="`laststep ls` lists the steps; without a tag the newest is loaded",
    )


class _ClientState(StateProvider):
    """The client state passed to `save_checkpoint`; each rank gets its own back."""

    kind = "client"
    per_rank = True

    def __init__(self) -> None:
        self.state: Any = {}

    @staticmethod
    def when_ranks_change(states: list[Any], rank: int, ranks: int) -> Any:  # noqa: ARG004
        return states[0]

    def describe(self) -> State:
        return State(value={"state": self.state}, fresh=((),))

    def restore(self, value: object) -> None:
        if isinstance(value, dict):
            self.state = value["state"]
