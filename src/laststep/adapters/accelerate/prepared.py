"""What an Accelerator has prepared, as items of a Checkpointer.

They have the names that a plain loop would give them: `model`, `optimizer`, `scheduler`, `loader`,
`scaler`, `rng`; a second model is `model_1`. Wrappers of Accelerate's are looked through, the state
of FSDP and DeepSpeed is that of the plain model. So what was trained under one plugin goes on under
another, or without Accelerate.
"""

from __future__ import annotations

import logging
from typing import Any

from accelerate import Accelerator
from torch.distributed.fsdp import FullyShardedDataParallel

from laststep.adapters import deepspeed, fsdp1
from laststep.adapters.accelerate.loaders import LoaderProgress, place_in
from laststep.adapters.framework import Framework
from laststep.errors import UsageError
from laststep.state.provider import State, StateProvider
from laststep.state.values import RNG

log = logging.getLogger(__name__)

FRAMEWORK = Framework(package="accelerate", extra="accelerate", first="1.15", last="1.15")
FRAMEWORK.check()
FRAMEWORK.seam(Accelerator, "skip_first_batches", "dataloader", "num_batches")


def items(accelerator: Any) -> dict[str, object]:
    """All that `save_state` would save, and the place in each loader; for after `prepare`."""
    engines = engines_of(accelerator)
    models = [_model(model, engines) for model in held(accelerator, "models")]
    optimizers = [deepspeed.optimizer(x) for x in engines] or _optimizers(accelerator)
    found = _numbered("model", models) | _numbered("optimizer", optimizers)
    found |= _numbered("progress", [deepspeed.progress(engine) for engine in engines])
    found |= _numbered("scheduler", held(accelerator, "schedulers"))
    found |= _numbered("loader", _loaders(accelerator))
    found |= _numbered("custom", held(accelerator, "custom_objects"))
    if not found:
        raise UsageError(
            "this Accelerator has prepared nothing yet",
            expected="models, optimizers, loaders",
            remedy="call accelerator.prepare(…) before",
        )
    if accelerator.scaler is not None:
        found["scaler"] = accelerator.scaler
    return {**found, "accelerator": _Count(accelerator), "rng": RNG()}


def engines_of(accelerator: Any) -> list[Any]:
    """DeepSpeed's, which hold model and optimizer."""
    kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    if kind in {"MEGATRON_LM", "XLA"}:
        raise UsageError(
            f"laststep.accelerate does not know the state of {kind}",
            expected="DDP, FSDP, DeepSpeed or one process",
            found=kind,
            remedy="for Megatron, pass laststep.adapters.megatron's providers to a Checkpointer",
        )
    return held(accelerator, "models") if kind == "DEEPSPEED" else []


def held(accelerator: Any, what: str) -> list[Any]:
    """What an Accelerator has noted in `prepare` or `register_for_checkpointing`; it has no public
    way to ask for that."""
    noted = getattr(accelerator, f"_{what}", None)
    if not isinstance(noted, list):
        raise UsageError(
            f"cannot find the {what} of this {type(accelerator).__name__}",
            expected=f"an Accelerator of accelerate {FRAMEWORK.last} with a list _{what}",
            found=f"accelerate {FRAMEWORK.version}",
            remedy="pip install 'laststep[accelerate]'",
        )
    return noted


class _Count(StateProvider):
    """How many batches gradients have been accumulated for."""

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
    """As Accelerate numbers its files."""
    return {f"{name}_{i}" if i else name: thing for i, thing in enumerate(things)}


def _model(model: Any, engines: list[Any]) -> object:
    if engines:
        return deepspeed.model(model)
    return fsdp1.model(model) if isinstance(model, FullyShardedDataParallel) else model


def _optimizers(accelerator: Any) -> list[object]:
    """Under FSDP of the first version there are as many models, in the same order."""
    models, optimizers = held(accelerator, "models"), held(accelerator, "optimizers")
    if not any(isinstance(model, FullyShardedDataParallel) for model in models):
        return optimizers
    pairs = zip(optimizers, models, strict=True)
    return [fsdp1.optimizer(optimizer.optimizer, model) for optimizer, model in pairs]


def _loaders(accelerator: Any) -> list[object]:
    keep_places(accelerator)
    loaders = held(accelerator, "dataloaders")
    return [LoaderProgress(x) if hasattr(x, "base_dataloader") else x for x in loaders]


def keep_places(accelerator: Any) -> None:
    """Of its loaders, from the epoch on that begins next; what skips batches knows of them."""
    if not isinstance(accelerator.skip_first_batches, _Skips):
        accelerator.skip_first_batches = _Skips(accelerator.skip_first_batches)
    for loader in held(accelerator, "dataloaders"):
        if hasattr(loader, "base_dataloader"):
            place_in(loader)


class _Skips:
    """`skip_first_batches` for loaders whose place is kept: that very loader, to begin there. A
    loader that a restore has brought to that place is there already."""

    def __init__(self, otherwise: Any) -> None:
        self._otherwise = otherwise

    def __call__(self, dataloader: Any, num_batches: int = 0) -> Any:
        if not hasattr(dataloader, "base_dataloader"):
            return self._otherwise(dataloader, num_batches)
        place_in(dataloader).skip(num_batches)
        return dataloader
