"""`save_state` and `load_state` of an Accelerator, by a Checkpointer.

The step of a checkpoint is the number of steps that the (first) optimizer has done; a restored
`step` is that number too, so training goes on with the next. Where only others have done steps
since the last save, it counts one on: no checkpoint takes the place of another state. The folder
that a script names is a name of the checkpoint: `load_state` finds it again by that.
"""

from __future__ import annotations

import itertools
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate import Accelerator
from torch.optim.optimizer import register_optimizer_step_post_hook

from laststep.adapters.accelerate.prepared import FRAMEWORK, engines_of, held, items, keep_places
from laststep.browse import open as open_run
from laststep.catalog.retention import Keep
from laststep.checkpointer import Checkpointer
from laststep.errors import CorruptError, NotFoundError, UsageError
from laststep.tiers.tier import arranged

if TYPE_CHECKING:
    from collections.abc import Mapping

    from laststep.browse import Checkpoint
    from laststep.flush.saves import SaveHandle
    from laststep.restoring.restore import Restored

log = logging.getLogger(__name__)

FRAMEWORK.seam(Accelerator, "save_state", "output_dir", "safe_serialization")
FRAMEWORK.seam(Accelerator, "load_state", "input_dir", "load_kwargs")
FRAMEWORK.seam(Accelerator, "end_training")
FRAMEWORK.seam(Accelerator, "free_memory", "objects")
FRAMEWORK.seam(Accelerator, "get_state_dict", "model", "unwrap")

FRAMEWORK.seam(Accelerator, "prepare_data_loader", "data_loader")

_PREPARED = ("models", "optimizers", "schedulers", "dataloaders", "custom_objects")
_REPLACED = ("save_state", "load_state", "prepare_data_loader", "end_training", "free_memory")


def attach(accelerator: Any, run: str | os.PathLike[str] | None = None, /, **settings: Any) -> Any:
    """Let `save_state` and `load_state` of this Accelerator save to and load from a run; `settings`
    are those of a Checkpointer. Returns the Accelerator."""
    if isinstance(getattr(accelerator.save_state, "__self__", None), Attached):
        raise UsageError(
            "this Accelerator is attached to a run already",
            found=str(accelerator.save_state.__self__),
            remedy="attach it once",
        )
    attached = Attached(accelerator, run, settings)
    keep_places(accelerator)
    for name in _REPLACED:
        setattr(accelerator, name, getattr(attached, name))
    return accelerator


class Attached:
    """An Accelerator and the run that it is attached to."""

    def __init__(self, accelerator: Any, run: Any, settings: dict[str, Any]) -> None:
        self._accelerator, self._run, self._settings = accelerator, run, settings
        self._home = arranged(run, settings.get("tiers", ()), None).home
        self._before = {name: getattr(accelerator, name) for name in _REPLACED}
        self._checkpointer: Checkpointer | None = None
        self._steps = 0
        self._others_stepped = False
        """Whether another optimizer than the first has done a step since the last save or load."""
        self._names: tuple[int, list[str]] = (-1, [])
        """The last step, and what its checkpoint is called."""
        self._made_for: list[Any] = []
        """What was prepared when the Checkpointer was made."""
        self._counting = register_optimizer_step_post_hook(self._count)

    def __repr__(self) -> str:
        return f"<Accelerator of the run {self._home}>"

    # -- what an Accelerator has ------------------------------------------------------------------

    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,  # noqa: FBT001, FBT002 (as Accelerate has it)
        *,
        metrics: Mapping[str, object] | None = None,
        **unused: object,
    ) -> SaveHandle:
        """Save the state as it is now, and return as soon as training may go on."""
        if unused:
            log.warning("save_state: %s mean nothing to laststep", ", ".join(unused))
        project = self._accelerator.project_configuration
        if project.automatic_checkpoint_naming:
            output_dir = self._automatic / f"checkpoint_{project.iteration}"
        left = self._after_save_hooks(output_dir)
        checkpointer = self._checkpointer or self._make(left)
        self._refuse_more()
        step = self._steps_done()
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

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: Any = None,
        **load_model_func_kwargs: Any,
    ) -> Restored | None:
        """Restore the newest checkpoint that verifies, or the one of that name. In a new run there
        is none, which is no error: `step` is None then. A folder that Accelerate itself has saved
        is loaded by Accelerate."""
        if self._checkpointer is not None:
            self._checkpointer.wait()
        found = self._find(input_dir) if input_dir is not None or self._hooks("load") else []
        if input_dir is not None and not found:
            self._load_folder(input_dir, load_kwargs, load_model_func_kwargs)
            return None
        restored = self._restore_first_sound(found)
        if restored is None:
            checkpointer = self._checkpointer or self._make(held(self._accelerator, "models"))
            newest = FRAMEWORK.resume(checkpointer, lambda *_: checkpointer.restore())
            restored = newest or checkpointer.restore()
        self._go_on_from(restored)
        return restored

    def prepare_data_loader(self, *arguments: Any, **more: Any) -> Any:
        """As Accelerate does; from the first epoch on, its place is kept."""
        loader = self._before["prepare_data_loader"](*arguments, **more)
        keep_places(self._accelerator)
        return loader

    def end_training(self) -> None:
        """Wait for all saves, and raise what failed; then what Accelerate does."""
        try:
            self._close()
        finally:
            self._counting.remove()
            self._before["end_training"]()

    def free_memory(self, *objects: Any) -> Any:
        """Wait for all saves, since they speak for what is let go."""
        self._close()
        return self._before["free_memory"](*objects)

    # -- inside -----------------------------------------------------------------------------------

    @property
    def _automatic(self) -> Path:
        return Path(self._accelerator.project_dir or ".", "checkpoints")

    @property
    def _has_shards(self) -> bool:
        """Whether Accelerate hands hooks nothing, as no rank has all of a model."""
        return bool(engines_of(self._accelerator)) or self._accelerator.distributed_type == "FSDP"

    def _make(self, models: list[Any]) -> Checkpointer:
        """The Checkpointer, once all is prepared. Hooks that save and load a model themselves take
        it off the list."""
        chosen = items(self._accelerator)
        for number, model in enumerate(held(self._accelerator, "models")):
            if all(model is not one for one in models):
                del chosen[f"model_{number}" if number else "model"]
        project, settings = self._accelerator.project_configuration, {**self._settings}
        if project.automatic_checkpoint_naming and project.total_limit is not None:
            settings.setdefault("keep", Keep(last=project.total_limit))
        self._checkpointer = Checkpointer(self._run, items=chosen, **settings)
        self._made_for = self._prepared()
        return self._checkpointer

    def _prepared(self) -> list[Any]:
        return [one for what in _PREPARED for one in held(self._accelerator, what)]

    def _refuse_more(self) -> None:
        """What came later would not be saved."""
        new = [one for one in self._prepared() if all(one is not old for old in self._made_for)]
        if new:
            raise UsageError(
                "something was prepared or registered after the first save_state or load_state",
                found=", ".join(type(one).__name__ for one in new),
                remedy="prepare and register all before; or call accelerator.free_memory() first, "
                "where another training begins",
            )

    def _close(self) -> None:
        checkpointer, self._checkpointer = self._checkpointer, None
        if checkpointer is not None:
            checkpointer.close()

    def _count(self, optimizer: object, *_: object) -> None:
        optimizers = held(self._accelerator, "optimizers")
        is_first = bool(optimizers) and optimizer is optimizers[0].optimizer
        self._steps += is_first
        self._others_stepped |= not is_first

    def _steps_done(self) -> int:
        engines = engines_of(self._accelerator)
        if engines:
            return int(engines[0].global_steps)
        if self._others_stepped and self._steps == self._names[0]:
            self._steps += 1
        return self._steps

    def _hooks(self, what: str) -> list[Any]:
        name = f"_{what}_model_state_pre_hook"
        return [*getattr(self._accelerator, name).values()]

    def _after_save_hooks(self, folder: str | os.PathLike[str] | None) -> list[Any]:
        """The models that hooks have not saved themselves. They write where Accelerate would."""
        models, hooks = held(self._accelerator, "models"), self._hooks("save")
        if not hooks:
            return models
        if folder is None:
            raise UsageError(
                "hooks of register_save_state_pre_hook write into a folder, and there is none",
                remedy="name it: save_state(folder), or turn on automatic_checkpoint_naming",
            )
        Path(folder).mkdir(parents=True, exist_ok=True)
        given = [] if self._has_shards else models
        weights = [self._accelerator.get_state_dict(model, unwrap=False) for model in given]
        pairs = [*zip(given, weights, strict=True)]
        for hook in hooks:
            hook(models, weights, os.fspath(folder))
        if not pairs:
            return models
        return [model for model, of in pairs if any(of is left for left in weights)]

    def _restore_first_sound(self, found: list[Checkpoint]) -> Restored | None:
        """The first of them that is not damaged, for which hooks are run before; None for none."""
        for checkpoint, older in itertools.zip_longest(found, found[1:]):
            metadata = FRAMEWORK.own(checkpoint.metadata, f"{self._home}, step {checkpoint.step}")
            folder = (_names(metadata) or [f"{self._home}/{checkpoint.folder}"])[-1]
            models = [*held(self._accelerator, "models")]
            for hook in self._hooks("load"):
                hook([] if self._has_shards else models, folder)
            checkpointer = self._checkpointer or self._make(models)
            try:
                return checkpointer.restore(checkpoint.step)
            except CorruptError as damage:
                if older is None:
                    raise
                log.warning(
                    "step %d is damaged, step %d is tried: %s", checkpoint.step, older.step, damage
                )
        return None

    def _find(self, name: str | os.PathLike[str] | None) -> list[Checkpoint]:
        """All checkpoints, newest first, or the newest of that name: of that folder rather than of
        one that is called the same elsewhere, unless Accelerate has saved in that folder."""
        try:
            newest_first: list[Checkpoint] = [*open_run(self._home)][::-1]
        except NotFoundError:
            return []
        if name is None:
            return newest_first
        path = Path(name)
        named = [(one, [*map(Path, _names(one.metadata))]) for one in newest_first]
        found = [one for one, names in named if path in names]
        if not found and not any(path.expanduser().glob("random_states_*")):
            found = [one for one, names in named if path.name in (other.name for other in names)]
        return found[:1]

    def _load_folder(self, folder: Any, load_kwargs: Any, more: dict[str, Any]) -> None:
        """One that Accelerate has saved."""
        if not Path(folder).expanduser().is_dir():
            raise NotFoundError(
                f"there is no checkpoint {os.fspath(folder)!r}",
                where=str(self._home),
                remedy="`laststep ls` lists what is there; load_state() takes the newest",
            )
        log.info("%s is none of this run's checkpoints: Accelerate loads it", folder)
        self._before["load_state"](folder, load_kwargs, **more)

    def _go_on_from(self, restored: Restored) -> None:
        if restored.step is None:
            return
        metadata: Any = restored.metadata
        self._others_stepped = False
        self._steps = restored.step  # which counts those that are done, as it is counted here
        self._names = restored.step, [*metadata["names"]]
        self._accelerator.project_configuration.iteration = metadata["iteration"] + 1


def _names(metadata: object) -> list[str]:
    names = metadata.get("names") if isinstance(metadata, dict) else None
    return names if isinstance(names, list) else []
