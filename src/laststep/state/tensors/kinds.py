"""Kinds of tensors: dtypes by name, and tensor subclasses that users register.

Also rebuilds stored values of these kinds.
"""

from __future__ import annotations

import pickle
from collections import Counter
from typing import TYPE_CHECKING, Final, NamedTuple, cast

import numpy as np
import torch

from laststep.codecs.objects import Tagged
from laststep.constants import DTYPES
from laststep.errors import CorruptError, UsageError
from laststep.process import system
from laststep.state.tree import OWNED, owned

if TYPE_CHECKING:
    from collections.abc import Callable


TORCH_DTYPES: Final[dict[str, torch.dtype]] = {
    name: getattr(torch, name) for name in DTYPES if hasattr(torch, name)
}
DTYPE_NAMES: Final = {dtype: name for name, dtype in TORCH_DTYPES.items()}
PLAIN_TENSORS: Final = frozenset({torch.Tensor, torch.nn.Parameter})


class TensorHandler(NamedTuple):
    """Functions that take a tensor subclass apart into plain tensors and values, and rebuild it."""

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
    """Register a tensor subclass: `to_parts` returns a tree of plain tensors that share its memory,
    `from_parts` builds the subclass from such a tree. `name` is stored and MUST NOT change."""
    _HANDLERS[kind] = TensorHandler(name, to_parts, from_parts)


def handler_for(kind: type) -> TensorHandler | None:
    """Return the handler of this class or of its nearest registered base class."""
    return next((_HANDLERS[base] for base in kind.__mro__ if base in _HANDLERS), None)


def handler_named(name: str) -> TensorHandler | None:
    """Return the handler with this stored name."""
    return next((handler for handler in _HANDLERS.values() if handler.name == name), None)


def is_module(value: object) -> bool:
    return isinstance(value, torch.nn.Module)


def is_optimizer(value: object) -> bool:
    return isinstance(value, torch.optim.Optimizer)


def is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def is_tensor_type(kind: type) -> bool:
    return issubclass(kind, torch.Tensor)


_SparseParts = tuple[str, tuple[int, ...], dict[str, object]]
"""Layout, shape, and the tensors that form a sparse tensor."""


def revive(tagged: Tagged, *, where: str, allow_pickle: bool) -> object:
    """Rebuild the value of a Tagged, whose inner tensors are already in place. Raise `CorruptError`
    if it is malformed."""
    try:
        return _revive(tagged, allow_pickle=allow_pickle)
    except UsageError:
        raise
    except CorruptError as error:
        raise CorruptError(
            error.what, where=error.where or where, expected=error.expected, found=error.found
        ) from None
    except Exception as error:
        if system.is_one(error):
            raise
        raise CorruptError(
            f"cannot rebuild a stored {tagged.tag}", where=where, found=str(error)
        ) from error


def _revive(tagged: Tagged, *, allow_pickle: bool) -> object:
    if tagged.tag == "pickle":
        if not allow_pickle:
            raise UsageError(
                "the checkpoint holds a pickled object, which can run any code when loaded",
                remedy="pass allow_pickle=True if you trust whoever wrote it",
            )
        return pickle.loads(tagged.value)  # type: ignore[arg-type]  # noqa: S301 (opted in twice)
    if tagged.tag not in _REVIVERS:
        raise CorruptError(f"unknown kind of stored value {tagged.tag!r}")
    return _REVIVERS[tagged.tag](tagged.value)


# Each takes a value made by the Collector. Any exception on other values becomes CorruptError.


def _revive_array(value: object) -> object:
    dtype, tensor = cast("tuple[str, object]", value)
    if not isinstance(tensor, torch.Tensor):  # skipped in a partial restore
        return tensor
    array, wanted = tensor.cpu().numpy(), np.dtype(dtype)
    if wanted.newbyteorder("=") != array.dtype:  # only the byte order may differ
        raise CorruptError(
            "an array of another dtype than its bytes", found=f"{wanted}, {array.dtype}"
        )
    return array.astype(wanted, copy=False)


def _revive_scalar(value: object) -> object:
    dtype, data = cast("tuple[str, bytes]", value)
    return np.frombuffer(data, dtype=np.dtype(dtype))[0]


def _revive_bytes(value: object) -> object:
    return value.cpu().numpy().tobytes() if isinstance(value, torch.Tensor) else value


def _revive_dtype(value: object) -> object:
    dtype = vars(torch).get(str(value))  # getattr would import lazy submodules of torch
    if not isinstance(dtype, torch.dtype):
        raise CorruptError("unknown dtype", found=repr(value)[:80])
    return dtype


def _revive_sparse(layout: str, shape: tuple[int, ...], parts: dict[str, object]) -> object:
    for part in parts.values():
        if not isinstance(part, torch.Tensor | bool):  # skipped in a partial restore
            return part
    tensors = cast("dict[str, torch.Tensor]", parts)
    values = tensors["values"]
    if layout == "sparse_coo":
        # The bytes are verified and torch made the tensor, so its invariants held at the save.
        sparse = torch.sparse_coo_tensor(tensors["indices"], values, shape, check_invariants=True)
        return sparse._coalesced_(bool(parts["coalesced"]))
    if layout in ("sparse_csr", "sparse_bsr"):
        rows, columns = tensors["crow"], tensors["col"]
    else:
        rows, columns = tensors["ccol"], tensors["row"]
    kind = getattr(torch, layout)
    return torch.sparse_compressed_tensor(
        rows, columns, values, shape, layout=kind, check_invariants=True
    )


def _revive_subclass(value: object) -> object:
    name, parts = cast("tuple[str, object]", value)
    handler = handler_named(name)
    if handler is None:
        raise UsageError(
            f"cannot load the tensor subclass {name!r}",
            remedy="register it first with laststep.register_tensor_type",
        )
    return handler.from_parts(parts)


_REVIVERS: Final[dict[str, Callable[[object], object]]] = {
    "ndarray": _revive_array,
    "scalar": _revive_scalar,
    "bytes": _revive_bytes,
    "counter": lambda value: Counter(cast("dict[object, int]", value)),
    "dtype": _revive_dtype,
    "device": lambda value: torch.device(str(value)),
    "size": lambda value: torch.Size(cast("tuple[int, ...]", value)),
    "sparse": lambda value: _revive_sparse(*cast("_SparseParts", value)),
    "subclass": _revive_subclass,
    OWNED: lambda value: owned(Tagged(OWNED, value)).state,
}
