"""What kinds of tensors there are: the dtypes by their names, and subclasses that users teach."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from laststep.terms import DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable

TORCH_DTYPES: Final[dict[str, torch.dtype]] = {
    name: getattr(torch, name) for name in DTYPES if hasattr(torch, name)
}
DTYPE_NAMES: Final = {dtype: name for name, dtype in TORCH_DTYPES.items()}
PLAIN_TENSORS: Final = frozenset({torch.Tensor, torch.nn.Parameter})


class TensorHandler(NamedTuple):
    """How a tensor subclass is taken apart into plain tensors and values, and put together."""

    name: str
    to_parts: Callable[[torch.Tensor], object]
    from_parts: Callable[[object], torch.Tensor]


_HANDLERS: dict[type, TensorHandler] = {}


def register_tensor_type(
    kind: type[torch.Tensor],
    *,
    name: str,
    to_parts: Callable[[torch.Tensor], object],
    from_parts: Callable[[object], torch.Tensor],
) -> None:
    """Teach laststep a tensor subclass: `to_parts` gives a tree of plain tensors that share its
    memory, `from_parts` builds the subclass from such a tree. `name` is stored and MUST stay."""
    _HANDLERS[kind] = TensorHandler(name, to_parts, from_parts)


def handler_for(kind: type) -> TensorHandler | None:
    """Who takes tensors of this class, or of the nearest class above it, apart."""
    return next((_HANDLERS[base] for base in kind.__mro__ if base in _HANDLERS), None)


def handler_named(name: str) -> TensorHandler | None:
    """Who puts together what was stored under this name."""
    return next((handler for handler in _HANDLERS.values() if handler.name == name), None)


def is_module(value: object) -> bool:
    return isinstance(value, torch.nn.Module)


def is_optimizer(value: object) -> bool:
    return isinstance(value, torch.optim.Optimizer)


def is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def is_tensor_type(kind: type) -> bool:
    return issubclass(kind, torch.Tensor)
