"""Callbacks that unfreeze modules in the course of training (`BaseFinetuning`): they give the
optimizer groups of parameters that it does not have when a script starts.

Lightning hands such a callback its state before the optimizer has its own. What it had unfrozen by
then it leaves frozen; here that is stored and put back too.
"""

from __future__ import annotations

from typing import Any

from torch.nn.modules.batchnorm import _BatchNorm

from laststep.adapters.lightning.package import pl


def is_used(trainer: Any) -> bool:
    """Whether there is such a callback."""
    return bool(_callbacks(trainer))


def describe(trainer: Any) -> dict[str, list[str]]:
    """By name, what is frozen; nothing where no such callback is."""
    if not is_used(trainer):
        return {}
    model = trainer.lightning_module
    norms = [
        name
        for name, one in model.named_modules()
        if isinstance(one, _BatchNorm) and not one.track_running_stats
    ]
    frozen = [name for name, one in model.named_parameters() if not one.requires_grad]
    return {"parameters": frozen, "norms": norms}


def put_back(trainer: Any, states: dict[str, Any], described: dict[str, list[str]]) -> None:
    """By the `states` of callbacks the optimizers get the groups that they had, and by what
    `describe` gave the model is frozen as it was."""
    model = trainer.lightning_module
    for one in _callbacks(trainer):
        if state := states.get(one.state_key):
            one.load_state_dict(state)
            one.on_fit_start(trainer, model)
    if described:
        for name, parameter in model.named_parameters():
            parameter.requires_grad = name not in described["parameters"]
        for name, module in model.named_modules():
            if isinstance(module, _BatchNorm):
                module.track_running_stats = name not in described["norms"]


def _callbacks(trainer: Any) -> list[Any]:
    return [one for one in trainer.callbacks if isinstance(one, pl.callbacks.BaseFinetuning)]
