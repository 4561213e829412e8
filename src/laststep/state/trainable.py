"""The part of a module that is trained, as with LoRA: what is frozen is not saved.

The parameters that want a gradient, and the buffers that training changes: those of modules which
have such parameters of their own, and the running statistics of norms, which change in frozen ones
too. What was trained once stays part of it when it is frozen later: it is not what it was before.
Whoever restores it has the rest: the module as it was before. Imports no torch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from laststep.errors import Usage
from laststep.state.modules import ModuleProvider, walk_modules
from laststep.state.tensors import is_module
from laststep.terms import with_article

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

    from laststep.state.provider import State

_STATISTICS = frozenset({"running_mean", "running_var", "num_batches_tracked"})


def trainable(model: torch.nn.Module) -> TrainableProvider:
    """What of a module is trained: `Checkpointer(run, model=laststep.trainable(model), …)`."""
    if not is_module(model):
        raise Usage(
            "trainable() takes a module", expected="an nn.Module", found=with_article(type(model)),
            remedy="pass the model itself",
        )  # fmt: skip
    return TrainableProvider(model)


class TrainableProvider(ModuleProvider):
    """Describes a module without what is frozen, and was so at each save and restore."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__(module)
        self._once: set[str] = set()
        """What was trained at an earlier save or restore, or when it was stored."""

    def expect(self, stored: Iterable[str]) -> None:
        """These are stored, and about to be restored, frozen or not."""
        self._once.update(stored)

    def describe(self) -> State:
        state = super().describe()
        self._once |= self._names()
        value, names = state.value, self._once
        assert isinstance(value, dict)  # noqa: S101 (of a module)
        extra = {path[0] for path in state.fresh}
        kept = {name: entry for name, entry in value.items() if name in names or name in extra}
        volatile = frozenset(path for path in state.volatile if path[0] in kept)
        return replace(state, value=kept, volatile=volatile)

    def _names(self) -> set[str]:
        names: set[str] = set()
        is_trained = False
        for _own, prefix, node in walk_modules(self._module):
            trained = [
                name
                for name, parameter in node._parameters.items()
                if parameter is not None and parameter.requires_grad
            ]
            buffers = node._buffers if trained else _STATISTICS.intersection(node._buffers)
            names.update(prefix + name for name in (*trained, *buffers))
            is_trained = is_trained or bool(trained)
        if not (is_trained or self._once):
            raise Usage(
                "nothing of the module is trained", expected="parameters that want a gradient",
                found="none", remedy="pass the module itself to save what is frozen",
            )  # fmt: skip
        return names
