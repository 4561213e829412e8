"""Items of a trainer's state for the Checkpointer, except its position in the data.

Plain values of callbacks and hooks are per rank, since some differ (a timer's, for example). Values
added by `on_save_checkpoint` hooks may include as many tensors as a model has; those are stored
once, not per rank.

Within an epoch, the sums behind `self.log(…, on_epoch=True)` and the states of metrics belong to
this state too, and at its end the gradients that manual optimization has accumulated. Lightning's
own checkpoints have none of these.
"""

# ruff: noqa: SLF001 (Lightning's results have no public names)

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any

import torch

from laststep.errors import MismatchError
from laststep.lightning import pl, torchmetrics
from laststep.state.provider import State, StateProvider
from laststep.state.tree import name_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from laststep.lightning.position import Position

    Hook = Callable[[dict[str, Any]], object]

log = logging.getLogger(__name__)

_TENSOR = "laststep.tensor"


def items_of(trainer: Any) -> dict[str, object]:
    """Return model, optimizers, schedulers and scaler as items, depending on the strategy."""
    strategy, model = trainer.strategy, trainer.lightning_module
    items: dict[str, object] = {}
    kinds = {kind.__name__ for kind in type(strategy).__mro__}
    if "DeepSpeedStrategy" in kinds:
        from laststep import deepspeed

        engine = strategy.model
        items["model"], items["optimizer"] = deepspeed.model(engine), deepspeed.optimizer(engine)
        items["engine"] = deepspeed.progress(engine)
    elif "FSDPStrategy" in kinds:
        from laststep import fsdp1

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
    """Plain values of loops, callbacks, data module and hooks."""

    kind = "trainer"
    per_rank = True

    def __init__(self, trainer: Any, position: Position) -> None:
        self._trainer, self._position = trainer, position
        self.hooks = HookTensors()
        self._stored: dict[str, Any] = {}
        self.is_saved = False
        """True while a save describes the state: hooks are called only then."""

    def describe(self) -> State:
        value = self._taken() if self.is_saved else {}
        return State(value=value, fresh=((),), volatile=frozenset(_paths_of_tensors(value)))

    def restore(self, value: object) -> None:
        self._stored = value if isinstance(value, dict) else {}

    @staticmethod
    def when_ranks_change(states: list[Any], rank: int, ranks: int) -> object:
        """Return the state for a rank; additional ranks get that of the first. Raise MismatchError
        if loaders have a state, since their data cannot be split over another number of ranks."""
        if states[0]["loaders"]:
            raise MismatchError(
                "the loaders have states, one for each rank",
                expected=f"{len(states)} ranks",
                found=str(ranks),
                remedy="resume with the same number of ranks, or use a loader without state",
            )
        return states[rank if rank < len(states) else 0]

    def _taken(self) -> dict[str, object]:
        trainer = self._trainer
        states = {callback.state_key: callback.state_dict() for callback in trainer.callbacks}
        value: dict[str, object] = self._position.describe()
        value["step"] = trainer.global_step
        value["callbacks"] = {key: state for key, state in states.items() if state}
        if trainer.datamodule is not None:
            value["datamodule"] = trainer.datamodule.state_dict()
        if getattr(trainer.precision_plugin, "scaler", None) is None:
            value["precision"] = trainer.precision_plugin.state_dict()
        value["logged"] = dict(trainer.callback_metrics)
        value["sums"], value["metrics"] = _sums(trainer), _metric_states(trainer)
        value["gradients"] = self._gradients() if self._position.accumulates else {}
        self.hooks.tensors = {}
        value["hooks"] = _without_tensors(self._added(value), (), self.hooks.tensors)
        return value

    def _gradients(self) -> dict[str, object]:
        """Return what a module with manual optimization has accumulated at the end of an epoch."""
        named = self._trainer.lightning_module.named_parameters()
        found = {name: weight.grad for name, weight in named if weight.grad is not None}
        plain: dict[str, object] = {
            name: grad for name, grad in found.items() if type(grad) is torch.Tensor
        }
        if len(plain) < len(found):
            log.warning("gradients of sharded parameters, left at the end of an epoch: not saved")
        return plain

    def _added(self, value: dict[str, object]) -> dict[str, object]:
        """Return the entries that hooks add to the checkpoint that Lightning would have saved."""
        of_callbacks, of_module = self._hooks("on_save_checkpoint")
        if not of_callbacks and not of_module:
            return {}
        given = self._as_lightning(value)
        shown = {**given, "state_dict": dict(given["state_dict"])}
        for hook in (*of_callbacks, *of_module):
            hook(shown)
        added = {key: entry for key, entry in shown.items() if entry is not given.get(key)}
        weights = added.pop("state_dict", {})
        if any(entry is not given["state_dict"].get(name) for name, entry in weights.items()):
            added["state_dict"] = weights  # else the model's own weights
        return added

    def put_back(self) -> dict[str, Any]:
        """Restore everything except gradients and loops. Return the stored values for these."""
        trainer, stored = self._trainer, self._stored
        if trainer.datamodule is not None and "datamodule" in stored:
            trainer.datamodule.load_state_dict(stored["datamodule"])
        if stored.get("precision"):
            trainer.precision_plugin.load_state_dict(stored["precision"])
        # Not `trainer.callback_metrics`, which looks into the results of a loop that runs.
        trainer._logger_connector._callback_metrics.update(stored["logged"])
        if stored["ranks"] == trainer.world_size:  # else these cover other batches
            _put_back_sums(trainer, stored)
            _put_back_metrics(trainer, stored["metrics"])
        shown = self._as_lightning(stored)
        shown |= _with_tensors(stored["hooks"], self.hooks.tensors)
        of_callbacks, of_module = self._hooks("on_load_checkpoint")
        for hook in (*of_module, *of_callbacks):  # in Lightning's order
            hook(shown)
        for callback in trainer.callbacks:
            if state := stored["callbacks"].get(callback.state_key):
                callback.load_state_dict(state)
            if isinstance(callback, pl.callbacks.EarlyStopping) and callback.stopped_epoch:
                trainer.should_stop = True
        return stored

    def put_back_gradients(self) -> None:
        """Restore accumulated gradients, which Lightning clears at the start."""
        stored, self._stored = self._stored, {}
        gradients = stored.get("gradients", {})
        if gradients and stored["ranks"] != self._trainer.world_size:
            log.warning("accumulated gradients are not restored with another number of ranks")
            return
        parameters = dict(self._trainer.lightning_module.named_parameters())
        for name, gradient in gradients.items():
            parameters[name].grad = gradient.to(parameters[name].device)

    def _as_lightning(self, value: dict[str, Any]) -> dict[str, Any]:
        """Return the checkpoint that hooks expect, with the live weights."""
        weights = self._trainer.lightning_module.state_dict(keep_vars=True)
        return {
            **_plain_entries(value),
            "state_dict": weights,
            "loops": {"fit_loop": value["loops"]},
        }

    def _hooks(self, name: str) -> tuple[list[Hook], list[Hook]]:
        trainer, model = self._trainer, self._trainer.lightning_module
        of_callbacks: list[Hook] = [
            functools.partial(getattr(callback, name), trainer, model)
            for callback in trainer.callbacks
            if getattr(type(callback), name) is not getattr(pl.Callback, name)
        ]
        is_plain = getattr(type(model), name) is getattr(pl.LightningModule, name)
        return of_callbacks, [] if is_plain else [getattr(model, name)]


_SUMS = ("value", "cumulated_batch_size")


def _sums(trainer: Any) -> dict[str, dict[str, torch.Tensor]]:
    """Return this rank's running sums, maxima, … of `self.log(…, on_epoch=True)`."""
    return {
        key: {name: getattr(result, name) for name in _SUMS if hasattr(result, name)}
        for key, result in trainer.fit_loop.epoch_loop._results.items()
        if result.is_tensor and result.meta.on_epoch and not result.has_reset
    }


def _put_back_sums(trainer: Any, stored: dict[str, Any]) -> None:
    """Restore each sum when its first value arrives, since Lightning creates it only then."""
    results, sums = trainer.fit_loop.epoch_loop._results, dict(stored["sums"])
    epochs = stored["loops"]["epoch_progress"]["current"]["ready"]
    original = results.update_metrics

    def go_on(key: str, *more: object) -> None:
        if trainer.fit_loop.epoch_progress.current.ready > epochs:
            sums.clear()  # the stored epoch has ended
        for name, value in sums.pop(key, {}).items():
            setattr(results[key], name, value.to(results[key].value.device))
        if not sums:
            results.update_metrics = original
        original(key, *more)

    if sums:
        results.update_metrics = go_on


def _metrics_of(trainer: Any) -> dict[str, Any]:
    modules = dict(trainer.lightning_module.named_modules())
    for module in modules.values():
        if isinstance(module, torchmetrics.MetricCollection):
            module.values()  # gives every metric of a group its shared state
    return {name: part for name, part in modules.items() if isinstance(part, torchmetrics.Metric)}


def _metric_states(trainer: Any) -> dict[str, object]:
    return {
        name: {"state": dict(metric.metric_state), "updates": metric._update_count}
        for name, metric in _metrics_of(trainer).items()
    }


def _put_back_metrics(trainer: Any, stored: dict[str, Any]) -> None:
    for name, metric in _metrics_of(trainer).items():
        if name in stored:
            for key, value in stored[name]["state"].items():
                is_list = isinstance(value, list)
                moved = [tensor.to(metric.device) for tensor in (value if is_list else [value])]
                setattr(metric, key, moved if is_list else moved[0])
            metric._update_count, metric._computed = stored[name]["updates"], None


def as_lightning(loaded: dict[str, Any]) -> dict[str, Any]:
    """Convert a checkpoint of the callback to Lightning's form."""
    stored = loaded["trainer"]
    added = _with_tensors(stored["hooks"], loaded["hooks"])
    return {**_plain_entries(stored), "state_dict": loaded["model"], **added}


def _plain_entries(value: dict[str, Any]) -> dict[str, Any]:
    return {
        "pytorch-lightning_version": pl.__version__,
        "epoch": value["loops"]["epoch_progress"]["current"]["completed"],
        "global_step": value["step"],
        "callbacks": value["callbacks"],
    }


class HookTensors(StateProvider):
    kind = "hooks"

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}

    def describe(self) -> State:
        return State(value=dict(self.tensors), fresh=((),))

    def restore(self, value: object) -> None:
        self.tensors = value if isinstance(value, dict) else {}


def _without_tensors(value: Any, path: tuple[object, ...], into: dict[str, torch.Tensor]) -> Any:
    """Move the tensors of a tree to `into` and return the tree with their names instead."""
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


def _paths_of_tensors(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if isinstance(value, torch.Tensor):
        yield path
    elif isinstance(value, dict | list | tuple):
        entries = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in entries:
            yield from _paths_of_tensors(inner, (*path, key))


def _with_tensors(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, dict):
        if value.keys() == {_TENSOR}:
            return tensors[value[_TENSOR]]
        return {key: _with_tensors(inner, tensors) for key, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_with_tensors(inner, tensors) for inner in value)
    return value
