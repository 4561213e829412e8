"""The items of an Accelerator, and its `save_state` and `load_state` on top of a Checkpointer.

Items have the names that a plain loop would give them: `model`, `optimizer`, `scheduler`, `loader`,
`scaler`, `rng`; a second model is `model_1`. Accelerate's wrappers are unwrapped, and the state of
FSDP and DeepSpeed is stored as that of the plain model. So training under one plugin can resume
under another, or without Accelerate.

The step of a checkpoint is the number of steps that the (first) optimizer has completed. A restored
`step` is that number too, so training continues with the next one. If only other optimizers have
stepped since the last save, the step is increased by one, so that no checkpoint replaces another
state. The folder that a script passes becomes a name of the checkpoint, by which `load_state` finds
it.
"""

# ruff: noqa: SLF001 (Accelerate has no public names for what it has prepared)

from __future__ import annotations

import functools
import itertools
import logging
import os
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate.utils import broadcast_object_list
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

from laststep import deepspeed, fsdp1
from laststep.accelerate.loaders import item_of, place_in, skip_in_place
from laststep.accelerate.uses import USES
from laststep.adapters.framework import Framework, advising
from laststep.arguments import check_early
from laststep.browse import Checkpoint
from laststep.browse import open as open_run
from laststep.catalog.retention import Keep
from laststep.checkpointer import Checkpointer
from laststep.errors import NotFoundError, UsageError
from laststep.state.provider import RNG, State, StateProvider
from laststep.tiers.tier import arranged

if TYPE_CHECKING:
    from collections.abc import Mapping

    from laststep.flush.saves import SaveHandle
    from laststep.restoring.restore import Peeked, Restored

log = logging.getLogger(__name__)

FRAMEWORK = Framework(
    package="accelerate", extra="accelerate", oldest="1.15", newest="1.15", uses=USES
)
FRAMEWORK.check()


def items(accelerator: Any) -> dict[str, object]:
    """Return everything that `save_state` would save and the position in each loader. Call this
    after `prepare`; raises UsageError if nothing is prepared."""
    models, optimizers = accelerator._models, accelerator._optimizers
    engines = _engines_of(accelerator)
    if engines:
        models, optimizers = [*map(deepspeed.model, engines)], [*map(deepspeed.optimizer, engines)]
    elif any(isinstance(model, FullyShardedDataParallel) for model in models):
        # Each optimizer belongs to the model at its position.
        pairs = [*zip(models, optimizers, strict=True)]
        models = [
            fsdp1.model(model) if isinstance(model, FullyShardedDataParallel) else model
            for model in models
        ]
        optimizers = [fsdp1.optimizer(optimizer.optimizer, model) for model, optimizer in pairs]
    found = _numbered("model", models) | _numbered("optimizer", optimizers)
    found |= _numbered("progress", map(deepspeed.progress, engines))
    found |= _numbered("scheduler", accelerator._schedulers)
    keep_places(accelerator)
    found |= _numbered("loader", map(item_of, accelerator._dataloaders))
    found |= _numbered("custom", accelerator._custom_objects)
    if not found:
        raise UsageError(
            "this Accelerator has not prepared anything yet",
            expected="models, optimizers, loaders",
            remedy="call accelerator.prepare(…) before",
        )
    if accelerator.scaler is not None:
        found["scaler"] = accelerator.scaler
    return {**found, "accelerator": _Count(accelerator), "rng": RNG()}


def _engines_of(accelerator: Any) -> list[Any]:
    kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    if kind in {"MEGATRON_LM", "XLA"}:
        raise UsageError(
            f"laststep.accelerate does not know the state of {kind}",
            remedy="for Megatron, pass laststep.megatron's providers to a Checkpointer",
        )
    return accelerator._models if kind == "DEEPSPEED" else []


class _Count(StateProvider):
    """The number of batches for which gradients have been accumulated."""

    kind = "progress"

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def describe(self) -> State:
        if not self._accelerator.sync_gradients:
            log.warning(
                "saved between two steps of the optimizer: the gradients of %d batches are not in "
                "the checkpoint; save where accelerator.sync_gradients is true",
                self._accelerator.step % self._accelerator.gradient_accumulation_steps,
            )
        return State(value={"step": self._accelerator.step})

    def restore(self, value: Any) -> None:
        self._accelerator.step = value["step"]


def _numbered(name: str, things: Any) -> dict[str, object]:
    """Number names as Accelerate numbers its files."""
    return {f"{name}_{i}" if i else name: thing for i, thing in enumerate(things)}


def keep_places(accelerator: Any) -> None:
    """Track the position in each loader from its next epoch on."""
    if "skip_first_batches" not in vars(accelerator):
        own = accelerator.skip_first_batches
        accelerator.skip_first_batches = functools.partial(skip_in_place, own)
    for loader in accelerator._dataloaders:
        place_in(loader)


_REPLACED = ("save_state", "load_state", "prepare_data_loader", "end_training", "free_memory")


def attach(accelerator: Any, run: str | os.PathLike[str] | None = None, /, **settings: Any) -> Any:
    """Make `save_state` and `load_state` of this Accelerator use a run, and return the Accelerator.
    `settings` are those of a Checkpointer."""
    check_early(settings)
    before = getattr(accelerator.save_state, "__self__", None)
    if isinstance(before, Attached):
        raise UsageError(
            "this Accelerator is already attached to a run",
            found=str(before.home),
            remedy="attach it only once",
        )
    attached = Attached(accelerator, run, settings)
    keep_places(accelerator)
    for name in _REPLACED:
        setattr(accelerator, name, getattr(attached, name))
    return accelerator


class Attached:
    def __init__(self, accelerator: Any, run: Any, settings: dict[str, Any]) -> None:
        self._accelerator, self._run, self._settings = accelerator, run, settings
        self.home = arranged(run, settings.get("tiers", ()), None).primary
        self._before = {name: getattr(accelerator, name) for name in _REPLACED}
        self._checkpointer: Checkpointer | None = None
        self._steps = 0
        self._others_stepped = False
        """True if an optimizer other than the first has stepped since the last save or load."""
        self._names: tuple[int, list[str]] = (-1, [])
        """The step of the last save or load, and the names of its checkpoint."""
        self._made_for: list[Any] = []
        """The objects that were prepared when the Checkpointer was created."""
        self._by_hooks: list[Any] = []
        """The models that hooks save and load themselves."""
        count = weakref.WeakMethod(self._count)  # the hook outlives an Accelerator that is dropped
        self._counting = register_optimizer_step_post_hook(
            lambda *stepped: None if (method := count()) is None else method(*stepped)
        )
        weakref.finalize(self, self._counting.remove)

    # -- methods of an Accelerator ----------------------------------------------------------------

    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,  # noqa: FBT001, FBT002 (as Accelerate has it)
        *,
        metrics: Mapping[str, object] | None = None,
    ) -> SaveHandle:
        """Save the present state, and return as soon as training may continue."""
        project = self._accelerator.project_configuration
        if project.automatic_checkpoint_naming:
            folder = Path(self._accelerator.project_dir or ".", "checkpoints")
            output_dir = folder / f"checkpoint_{project.iteration}"
        checkpointer = self._ready(self._after_save_hooks(output_dir))
        engines = _engines_of(self._accelerator)
        if not engines and self._others_stepped and self._steps == self._names[0]:
            self._steps += 1
        step = int(engines[0].global_steps) if engines else self._steps
        names = [*self._names[1]] if self._names[0] == step else []
        names += [] if output_dir is None else [os.fspath(output_dir)]
        self._names, self._others_stepped = (step, names), False
        handle = checkpointer.save(
            step,
            metrics=metrics,
            overwrite=True,
            metadata=FRAMEWORK.stamp(names=names, iteration=project.iteration),
        )
        project.iteration += 1
        return handle

    def load_state(self, input_dir: str | os.PathLike[str] | None = None) -> Restored | None:
        """Restore the newest checkpoint that verifies, or the one named `input_dir`.

        A new run has no checkpoint; that is not an error, and `step` is None then. A folder that
        Accelerate itself has saved is loaded by Accelerate, and None is returned.
        """
        if self._checkpointer is not None:
            self._checkpointer.wait()
        hooks = self._accelerator._load_model_state_pre_hook
        found = self._find(input_dir) if input_dir is not None or hooks else None
        if input_dir is not None and found is None:
            if not Path(input_dir).expanduser().is_dir():
                raise NotFoundError(
                    f"there is no checkpoint {os.fspath(input_dir)!r}",
                    where=str(self.home),
                    remedy="`laststep ls` lists the checkpoints; load_state() takes the newest",
                )
            log.info("%s is not a checkpoint of this run: Accelerate loads it", input_dir)
            self._before["load_state"](input_dir)
            return None
        by_hooks = self._after_load_hooks(found, input_dir) if found is not None else []
        checkpointer = self._ready(by_hooks)
        if input_dir is None or found is None:

            def restore(peeked: Peeked, _: object) -> Restored:
                if hooks and (found is None or peeked.folder != found.folder):
                    self._after_load_hooks(peeked)
                return checkpointer.restore()

            with advising(checkpointer):
                restored = FRAMEWORK.resume(checkpointer, restore) or checkpointer.restore()
        else:
            with advising(checkpointer):
                restored = checkpointer.restore(found.step)
        if restored.step is None and hooks:
            self._close()  # the first save tells which models hooks save
        if restored.step is not None:
            metadata: Any = restored.metadata
            self._others_stepped = False
            self._steps = restored.step  # the number of completed steps, as `_count` counts them
            self._names = restored.step, [*metadata["names"]]
            self._accelerator.project_configuration.iteration = metadata["iteration"] + 1
        return restored

    def prepare_data_loader(self, *arguments: Any, **more: Any) -> Any:
        loader = self._before["prepare_data_loader"](*arguments, **more)
        keep_places(self._accelerator)
        return loader

    def end_training(self) -> None:
        """Wait for all saves and raise their errors; then end training as Accelerate does."""
        try:
            self._close()
        finally:
            self._counting.remove()
            self._before["end_training"]()

    def free_memory(self, *objects: Any) -> Any:
        """Wait for all saves before freeing memory, since they refer to the freed objects."""
        self._close()
        return self._before["free_memory"](*objects)

    @property
    def _has_shards(self) -> bool:
        """True if Accelerate passes no models or weights to hooks, since no rank has all of one."""
        return bool(_engines_of(self._accelerator)) or self._accelerator.distributed_type == "FSDP"

    def _after_save_hooks(self, folder: str | os.PathLike[str] | None) -> list[Any]:
        """Run the save hooks and return the models whose weights they have removed."""
        models = self._accelerator._models
        hooks = [*self._accelerator._save_model_state_pre_hook.values()]
        if not hooks:
            return []
        if folder is None:
            raise UsageError(
                "hooks of register_save_state_pre_hook need a folder, but there is none",
                remedy="name it: save_state(folder), or turn on automatic_checkpoint_naming",
            )
        at = Path(folder).expanduser()
        at.mkdir(parents=True, exist_ok=True)
        given = [] if self._has_shards else [*models]
        weights = [self._accelerator.get_state_dict(model, unwrap=False) for model in given]
        before = [*weights]
        for hook in hooks:
            hook(models, weights, str(at))
        gone = [all(of is not left for left in weights) for of in before]
        if sum(gone) != len(before) - len(weights):  # some were replaced
            gone = [False] * len(before)
        if gone:
            broadcast_object_list(gone)  # many hooks remove weights on the main process only
        return [*itertools.compress(given, gone)]

    def _after_load_hooks(
        self, checkpoint: Checkpoint | Peeked, name: str | os.PathLike[str] | None = None
    ) -> list[Any]:
        """Run the load hooks for this name or the last; return the models that they removed."""
        folder = f"{self.home}/{checkpoint.folder}"
        metadata: Any = FRAMEWORK.own(checkpoint.metadata, folder)
        names = metadata["names"] if name is None else [name]
        folder = str(Path(names[-1]).expanduser()) if names else folder
        models = [] if self._has_shards else [*self._accelerator._models]
        left = [*models]
        for hook in self._accelerator._load_model_state_pre_hook.values():
            hook(left, folder)
        return [model for model in models if all(model is not kept for kept in left)]

    def _make(self, by_hooks: list[Any]) -> Checkpointer:
        project, settings = self._accelerator.project_configuration, {**self._settings}
        if project.automatic_checkpoint_naming and project.total_limit is not None:
            settings.setdefault("keep", Keep(last=project.total_limit))
        self._made_for, self._by_hooks = self._prepared(), by_hooks
        chosen = items(self._accelerator)
        for name, model in _numbered("model", self._accelerator._models).items():
            if any(model is hooked for hooked in by_hooks):
                del chosen[name]
        self._checkpointer = Checkpointer(self._run, items=chosen, **settings)
        return self._checkpointer

    def _prepared(self) -> list[Any]:
        acc = self._accelerator
        kinds = acc._models, acc._optimizers, acc._schedulers, acc._dataloaders, acc._custom_objects
        return [*itertools.chain.from_iterable(kinds)]

    def _ready(self, by_hooks: list[Any]) -> Checkpointer:
        """Return the Checkpointer; raise UsageError if objects or hooked models have changed."""
        checkpointer = self._checkpointer or self._make(by_hooks)
        left = [model for model in self._by_hooks if all(model is not kept for kept in by_hooks)]
        if left:
            raise UsageError(
                "hooks saved or loaded a model themselves before, and leave it to laststep now",
                found=", ".join(type(model).__name__ for model in left),
                remedy="remove it from the list in the hooks of each save_state and load_state",
            )
        new = [obj for obj in self._prepared() if all(obj is not old for old in self._made_for)]
        if new:
            raise UsageError(
                "an object was prepared or registered after the first save_state or load_state",
                found=", ".join(type(obj).__name__ for obj in new),
                remedy=(
                    "prepare and register everything before; or call accelerator.free_memory() "
                    "first to start another training"
                ),
            )
        return checkpointer

    def _close(self) -> None:
        checkpointer, self._checkpointer = self._checkpointer, None
        self._made_for = []
        if checkpointer is not None:
            checkpointer.close()

    def _count(self, optimizer: object, *_: object) -> None:
        optimizers = self._accelerator._optimizers
        is_first = bool(optimizers) and optimizer is optimizers[0].optimizer
        self._steps += is_first
        self._others_stepped |= not is_first

    def _find(self, name: str | os.PathLike[str] | None) -> Checkpoint | None:
        """Return the newest checkpoint, or the newest with this name."""
        try:
            checkpoints: list[Checkpoint] = [*open_run(self.home)]
        except NotFoundError:
            return None
        for checkpoint in reversed(checkpoints):
            stamp: Any = FRAMEWORK.own(checkpoint.metadata, f"{self.home}, step {checkpoint.step}")
            if name is None or Path(name) in map(Path, stamp["names"]):
                return checkpoint
        return None
