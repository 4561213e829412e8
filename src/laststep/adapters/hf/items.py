"""The items of a Trainer: what each rank holds, however the model is wrapped.

Most of it comes to be only when training begins, so it is asked for then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from accelerate.data_loader import DataLoaderAdapter

from laststep.adapters import deepspeed, fsdp1
from laststep.adapters.accelerate.loaders import LoaderProgress, place_in
from laststep.state.items import Late, trainable
from laststep.state.provider import ABSENT, State, StateProvider
from laststep.state.values import RNG

if TYPE_CHECKING:
    from collections.abc import Callable

    from laststep.adapters.accelerate.loaders import PlacedLoader

    _Held = Callable[[], object]
    _Make = Callable[[Any], object]


def items_of(trainer: Any, data: Data, rng: HeldRNG, logged: Logged) -> dict[str, object]:
    """The items by their names; all ranks have the same."""
    items: dict[str, object] = {"model": Late(*_model(trainer))}
    if trainer.args.save_only_model:
        return items
    items["optimizer"] = Late(lambda: trainer.optimizer, _optimizer(trainer))
    items["scheduler"] = Late(lambda: trainer.lr_scheduler)
    if getattr(trainer.accelerator, "scaler", None) is not None:
        items["scaler"] = trainer.accelerator.scaler
    if trainer.is_deepspeed_enabled:
        items["counts"] = Late(lambda: trainer.model_wrapped, deepspeed.progress)
    if getattr(trainer.args, "sync_ref_model", False) and not trainer.is_deepspeed_enabled:
        items["ref_model"] = trainer.ref_model  # trl's, which follows the model
    return {**items, "data": data, "rng": rng, "logged": logged}


def _model(trainer: Any) -> tuple[_Held, _Make]:
    if trainer.is_deepspeed_enabled or _is_fsdp1(trainer):
        make = deepspeed.model if trainer.is_deepspeed_enabled else fsdp1.model
        return lambda: trainer.model_wrapped, make
    return lambda: trainer.model, lambda model: trainable(model) if is_peft(model) else model


def _optimizer(trainer: Any) -> _Make:
    if trainer.is_deepspeed_enabled:
        return lambda _: deepspeed.optimizer(trainer.model_wrapped)
    if _is_fsdp1(trainer):
        return lambda optimizer: fsdp1.optimizer(optimizer.optimizer, trainer.model_wrapped)
    return lambda optimizer: optimizer


def _is_fsdp1(trainer: Any) -> bool:
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    return trainer.is_fsdp_enabled and getattr(plugin, "fsdp_version", 1) == 1


def is_peft(model: object) -> bool:
    """Whether peft has put adapters into a model, of which only these are trained."""
    return any(kind.__module__.startswith("peft.") for kind in type(model).__mro__)


class Data(StateProvider):
    """The place in the loader that the Trainer goes through. Of one that the user has made without
    Accelerate nothing is known."""

    kind = "loader"
    per_rank = True

    def __init__(self) -> None:
        self.placed: PlacedLoader | None = None
        self._progress: LoaderProgress | None = None
        self.when_ranks_change = self._for_other_ranks

    def follow(self, loader: object) -> None:
        """From now on it is this one."""
        known = isinstance(loader, DataLoaderAdapter)
        self.placed = place_in(loader) if known else None
        self._progress = LoaderProgress(loader) if known else None

    def describe(self) -> State:
        if self._progress is None:
            return State(value=None, fresh=((),))
        return self._progress.describe()

    def restore(self, value: object) -> None:
        if self._progress is not None and isinstance(value, dict):
            self._progress.restore(value)

    def _for_other_ranks(self, states: list[Any], rank: int, ranks: int) -> Any:
        make = None if self._progress is None else self._progress.when_ranks_change
        return make(states, rank, ranks) if callable(make) and None not in states else None


class HeldRNG(RNG):
    """Random numbers that take effect when they are released: the Trainer draws some first."""

    def __init__(self) -> None:
        self._held: Callable[[], None] | None = None

    def restore(self, value: object) -> None:
        self._held = lambda: RNG.restore(self, value)

    def derive(self, value: object, rank: int) -> None:
        self._held = lambda: RNG.derive(self, value, rank)

    def release(self) -> None:
        if self._held is not None:
            self._held()
        self._held = None


class Logged(StateProvider):
    """The sum of the losses since the Trainer has logged one, so that the next log is the same."""

    kind = "logged"
    per_rank = True
    when_ranks_change = "drop"

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._held: dict[str, Any] | None = None

    def describe(self) -> State:
        loss = getattr(self._trainer, "_tr_loss", None)
        value = {
            "loss": torch.zeros(()) if loss is None else loss,
            "since": getattr(self._trainer, "_globalstep_last_logged", 0),
        }
        return State(value=value, fresh=((),))

    def restore(self, value: object) -> None:
        self._held = value if isinstance(value, dict) and ABSENT not in value.values() else None

    def release(self) -> None:
        """Only once the Trainer has set its own, to begin with."""
        if self._held is not None:
            loss = self._held["loss"].to(self._trainer._tr_loss.device)
            self._trainer._tr_loss += loss
            self._trainer._globalstep_last_logged = self._held["since"]
            # The mean loss that `train()` returns is that of its own steps.
            self._trainer._total_loss_scalar -= loss.item()
        self._held = None
