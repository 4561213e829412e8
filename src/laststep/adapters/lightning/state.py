"""What a trainer's state consists of, beside where it is in its data: items for the Checkpointer.

Plain values of callbacks and hooks are each rank's own, since some, such as a timer's, differ. What
`on_save_checkpoint` hooks add may hold a model's worth of tensors: these are stored once.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from laststep.adapters.lightning import finetuning, logged
from laststep.adapters.lightning.package import pl
from laststep.errors import MismatchError
from laststep.state.provider import State, StateProvider
from laststep.state.tree import name_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from laststep.adapters.lightning.position import Position

    Hook = Callable[[dict[str, Any]], object]

_TENSOR = "laststep.tensor"
"""The key of a dict that stands for a tensor."""
_GRADIENTS = "laststep.gradients"
"""Under which gradients are named among the tensors of hooks."""


def items_of(trainer: Any) -> dict[str, object]:
    """Model, optimizers, schedulers and scaler, by the strategy that spreads them."""
    strategy, model = trainer.strategy, trainer.lightning_module
    items: dict[str, object] = {}
    kinds = {kind.__name__ for kind in type(strategy).__mro__}
    if "DeepSpeedStrategy" in kinds:
        from laststep.adapters import deepspeed

        engine = strategy.model
        items["model"], items["optimizer"] = deepspeed.model(engine), deepspeed.optimizer(engine)
        items["engine"] = deepspeed.progress(engine)
    elif "FSDPStrategy" in kinds:
        from laststep.adapters import fsdp1

        items["model"] = fsdp1.model(strategy.model)
        shards = [fsdp1.optimizer(inner, strategy.model) for inner in trainer.optimizers]
        items |= _numbered("optimizer", shards)
    else:
        items["model"] = model
        items |= _numbered("optimizer", trainer.optimizers)
    items |= _numbered("scheduler", [config.scheduler for config in trainer.lr_scheduler_configs])
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return items if scaler is None else {**items, "scaler": scaler}


def _numbered(name: str, things: list[Any]) -> dict[str, object]:
    return {name if len(things) == 1 else f"{name}-{i}": thing for i, thing in enumerate(things)}


class TrainerState(StateProvider):
    """Loops, callbacks, data module, and what hooks have added: all that is plain."""

    kind = "trainer"
    per_rank = True

    def __init__(self, trainer: Any, position: Position) -> None:
        self._trainer, self._position = trainer, position
        self.hooks = HookTensors()
        self._stored: dict[str, Any] | None = None
        self.is_saved = False
        """Whether it is described for a save: hooks are not called for anything else."""

    def describe(self) -> State:
        return State(value=self._taken() if self.is_saved else {}, fresh=((),))

    def restore(self, value: object) -> None:
        self._stored = value if isinstance(value, dict) else None

    @staticmethod
    def when_ranks_change(states: list[Any], rank: int, ranks: int) -> object:
        """A new rank takes the first one's. Who reads what of the data cannot be told of loaders
        that have a state."""
        if states[0]["loaders"]:
            raise MismatchError(
                "the loaders have states, one for each rank",
                expected=f"{len(states)} ranks",
                found=str(ranks),
                remedy="resume with as many ranks, or with a loader without one",
            )
        return states[rank if rank < len(states) else 0]

    def _taken(self) -> dict[str, object]:
        trainer = self._trainer
        states = {one.state_key: one.state_dict() for one in trainer.callbacks}
        value: dict[str, object] = self._position.describe()
        value["step"] = trainer.global_step
        value["callbacks"] = {key: state for key, state in states.items() if state}
        if trainer.datamodule is not None:
            value["datamodule"] = trainer.datamodule.state_dict()
        if getattr(trainer.precision_plugin, "scaler", None) is None:
            value["precision"] = trainer.precision_plugin.state_dict()
        value["logged"] = logged.describe(trainer)
        value["frozen"] = finetuning.describe(trainer)
        self.hooks.tensors = {}
        value["hooks"] = _without_tensors(self._added(value), (), self.hooks.tensors)
        value["gradients"] = _without_tensors(self._gradients(), (_GRADIENTS,), self.hooks.tensors)
        return value

    def _gradients(self) -> dict[str, object]:
        """Those that a module which steps by itself has accumulated when an epoch is over; of
        sharded parameters none."""
        if not self._position.accumulates:
            return {}
        named = self._trainer.lightning_module.named_parameters()
        return {name: one.grad for name, one in named if type(one.grad) is torch.Tensor}

    def _added(self, value: dict[str, object]) -> dict[str, object]:
        """What the hooks put into the checkpoint that Lightning would have saved."""
        of_callbacks, of_module = self._hooks("on_save_checkpoint")
        if not of_callbacks and not of_module:
            return {}
        given = self._as_lightning(value)
        shown = dict(given)
        shown["state_dict"] = dict(given["state_dict"])
        for hook in (*of_callbacks, *of_module):
            hook(shown)
        added = {key: entry for key, entry in shown.items() if entry is not given.get(key)}
        weights = added.pop("state_dict", {})
        if any(entry is not given["state_dict"].get(name) for name, entry in weights.items()):
            added["state_dict"] = weights  # else they are in the model
        return added

    def prepare(self) -> None:
        """Before the optimizers are restored: some have gained groups since the script's start."""
        if self._stored is not None:
            stored = self._stored
            finetuning.put_back(self._trainer, stored["callbacks"], stored["frozen"])

    def put_back(self) -> dict[str, Any]:
        """Hand over what was restored, to all but the loops, for which it is returned."""
        if self._stored is None or "loops" not in self._stored:
            raise MismatchError(
                "this checkpoint does not say where training was",
                expected="the item 'trainer'",
                remedy="`laststep.load` reads single items of it",
            )
        stored, trainer = self._stored, self._trainer
        if trainer.datamodule is not None and "datamodule" in stored:
            trainer.datamodule.load_state_dict(stored["datamodule"])
        if stored.get("precision"):
            trainer.precision_plugin.load_state_dict(stored["precision"])
        if stored["ranks"] == trainer.world_size:  # else it is of other batches
            begun = stored["loops"]["epoch_progress"]["current"]["ready"]
            logged.put_back(trainer, stored["logged"], begun)
        shown = self._as_lightning(stored)
        shown |= _with_tensors(stored["hooks"], self.hooks.tensors)
        of_callbacks, of_module = self._hooks("on_load_checkpoint")
        for hook in (*of_module, *of_callbacks):  # in Lightning's order
            hook(shown)
        for one in trainer.callbacks:
            if state := stored["callbacks"].get(one.state_key):
                one.load_state_dict(state)
            if isinstance(one, pl.callbacks.EarlyStopping) and one.stopped_epoch:
                trainer.should_stop = True
        return stored

    def put_back_gradients(self) -> None:
        """After Lightning has cleared them, as it does before it begins."""
        stored, self._stored = self._stored, None
        if stored is not None:
            parameters = dict(self._trainer.lightning_module.named_parameters())
            for name, gradient in _with_tensors(stored["gradients"], self.hooks.tensors).items():
                parameters[name].grad = gradient.to(parameters[name].device)

    def _as_lightning(self, value: dict[str, Any]) -> dict[str, Any]:
        """The checkpoint that hooks know, with the live weights."""
        model = self._trainer.lightning_module
        counts = value["loops"]["epoch_progress"]["current"]
        return {
            "epoch": counts["completed"],
            "global_step": value["step"],
            "pytorch-lightning_version": pl.__version__,
            "state_dict": model.state_dict(keep_vars=True),
            "loops": {"fit_loop": value["loops"]},
            "callbacks": value["callbacks"],
        }

    def _hooks(self, name: str) -> tuple[list[Hook], list[Hook]]:
        """Those that somebody has overridden, of callbacks and of the module."""
        trainer, model = self._trainer, self._trainer.lightning_module
        of_callbacks: list[Hook] = [
            functools.partial(getattr(one, name), trainer, model)
            for one in trainer.callbacks
            if getattr(type(one), name) is not getattr(pl.Callback, name)
        ]
        is_plain = getattr(type(model), name) is getattr(pl.LightningModule, name)
        return of_callbacks, [] if is_plain else [getattr(model, name)]


def as_lightning(loaded: dict[str, Any]) -> dict[str, Any]:
    """The weights of a checkpoint that the callback has saved, and what hooks have added."""
    if "trainer" not in loaded:
        return loaded
    stored = loaded["trainer"]
    return {
        "pytorch-lightning_version": pl.__version__,
        "state_dict": loaded["model"],
        "epoch": stored["loops"]["epoch_progress"]["current"]["completed"],
        "global_step": stored["step"],
        "callbacks": stored["callbacks"],
        **_with_tensors(stored["hooks"], loaded["hooks"]),
    }


class HookTensors(StateProvider):
    """The tensors among what hooks have added, by their names."""

    kind = "hooks"

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}

    def describe(self) -> State:
        return State(value=dict(self.tensors), fresh=((),))

    def restore(self, value: object) -> None:
        self.tensors = value if isinstance(value, dict) else {}


def _without_tensors(value: Any, path: tuple[object, ...], into: dict[str, torch.Tensor]) -> Any:
    """A tree in which tensors are named that now lie in `into`."""
    if isinstance(value, torch.Tensor):
        name = name_of(path)
        into[name] = value.detach()
        return {_TENSOR: name}
    if isinstance(value, dict):
        return {key: _without_tensors(inner, (*path, key), into) for key, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(
            _without_tensors(inner, (*path, i), into) for i, inner in enumerate(value)
        )
    return value


def _with_tensors(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, dict):
        if value.keys() == {_TENSOR}:
            return tensors[value[_TENSOR]]
        return {key: _with_tensors(inner, tensors) for key, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_with_tensors(inner, tensors) for inner in value)
    return value
