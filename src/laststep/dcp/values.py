"""Convert values, which DCP passes as bytes of `torch.save`, to trees of plain values and back.

Values that a tree can express are stored like any other state: plain values, containers, arrays and
tensors. The bytes of any other value are stored unchanged. A value that torch.load accepts only
with `weights_only=False` (io.BytesIO excepted) is stored and loaded only if `allow_pickle` was
passed to both Writer and Reader.
"""

from __future__ import annotations

import contextlib
import functools
import io
import pickle
import threading
import types
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from laststep.adapters.importing.tensor_files import load_plain, refused_by
from laststep.codecs import objects
from laststep.codecs.objects import TensorRef
from laststep.dcp.record import tensor_name
from laststep.errors import LaststepError, UsageError
from laststep.state.collecting import collect
from laststep.state.tree import rebuild

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from laststep.adapters.nesting import Path

_ADMITTING = threading.Lock()


class Value(NamedTuple):
    """A value as a tree (typed JSON) and the tensors that the tree names."""

    tree: bytes
    tensors: dict[str, torch.Tensor]
    kind: Literal["value", "raw"]
    """The content of the tree: the value, or the planner's bytes."""


def take_apart(data: bytes, location: Path, *, fqn: str, allow_pickle: bool) -> Value:
    """Convert the planner's bytes; `location` is where the value will be stored. Raise `UsageError`
    if the value must be pickled, unless that is allowed."""
    with contextlib.suppress(LaststepError, pickle.UnpicklingError):
        return _collected(_plain_value(data), location, "value")
    if not allow_pickle:
        _loaded_safely(data, what=f"cannot save {fqn}")
    return _collected(data, location, "raw")


class _PlainUnpickler(pickle.Unpickler):
    """Creates only objects that a tree can hold. It creates no objects of user classes, although
    the bytes come from this process, because that could run any code."""

    def find_class(self, module: str, name: str) -> Any:
        if name not in _PLAIN.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name} is not plain")
        plain = super().find_class(module, name)
        return functools.partial(_made_tensor, plain) if name == "_rebuild_tensor_v2" else plain


def _made_tensor(make: Callable[..., object], *parts: object) -> object:
    """Create a tensor from storage, offset, size, stride, requires_grad, and more."""
    if parts[4]:
        raise pickle.UnpicklingError("a tree would lose requires_grad")
    return make(*parts)


_UNPICKLERS: Any = types.SimpleNamespace(__name__=__name__, Unpickler=_PlainUnpickler)
"""A stand-in for the module that torch.load expects as `pickle_module`."""
_BUILTINS = ("bytearray", "complex", "frozenset", "range", "set", "slice", "xrange")
_PLAIN: dict[str, Collection[str]] = {
    "builtins": _BUILTINS,
    "__builtin__": _BUILTINS,
    "collections": ("Counter", "OrderedDict", "deque"),
    "numpy": ("dtype", "ndarray"),
    "numpy._core.multiarray": ("_reconstruct", "scalar"),
    "numpy.core.multiarray": ("_reconstruct", "scalar"),
    "_codecs": ("encode",),
    "torch._utils": ("_rebuild_tensor_v2", "_rebuild_sparse_tensor"),
    "torch.serialization": ("_get_layout",),
    "torch": ["Size", "device"]
    + [n for n, v in vars(torch).items() if isinstance(v, torch.dtype) or n.endswith("Storage")],
}
"""Classes and functions that only make plain values, by module."""


def _plain_value(data: bytes) -> object:
    try:
        return torch.load(
            io.BytesIO(data), map_location="cpu", weights_only=False, pickle_module=_UNPICKLERS
        )
    except MemoryError:
        raise
    except Exception as error:  # a planner may give any bytes
        raise pickle.UnpicklingError from error


def _collected(value: object, location: Path, kind: Literal["value", "raw"]) -> Value:
    collected = collect(value)
    above = tensor_name(location)

    def name_in_item(name: str) -> str:
        return f"{above}/{name}" if above and name else above or name

    tree = rebuild(
        collected.tree, leaf=lambda name: TensorRef(name_in_item(name)), revive=lambda tag: tag
    )
    # Tensors that share memory within a value are each stored in full.
    tensors = {name_in_item(name): tensor for name, tensor in collected.tensors.items()}
    return Value(tree=objects.encode(tree), tensors=tensors, kind=kind)


def raw_bytes(data: bytes, *, fqn: str, allow_pickle: bool) -> io.BytesIO:
    """Return bytes for a planner, which may run code in them. Without `allow_pickle`, rewrite them
    from what loads without running code; raise `UsageError` if that is impossible."""
    if allow_pickle:
        return io.BytesIO(data)
    return put_together(_loaded_safely(data, what=f"cannot load {fqn}"))


def put_together(value: object) -> io.BytesIO:
    """Return a value as the bytes that a planner loads."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return buffer


def _loaded_safely(data: bytes, *, what: str) -> object:
    try:
        # io.BytesIO holds bytes and runs no code. Torch can allow a class only for the whole
        # process, so only one thread at a time does this. What the user has allowed stays allowed.
        with _ADMITTING, contextlib.ExitStack() as admitted:
            if io.BytesIO not in torch.serialization.get_safe_globals():
                admitted.enter_context(torch.serialization.safe_globals([io.BytesIO]))
            return load_plain(io.BytesIO(data))
    except MemoryError:
        raise
    except Exception as error:  # invalid bytes can make torch raise anything
        raise UsageError(
            f"{what}: it is a pickled object, which can run any code when loaded",
            expected="tensors, containers and plain values",
            found=refused_by(error) or "bytes that torch.load does not take",
            remedy="leave it out of the state, or pass allow_pickle=True to both Writer and Reader",
        ) from error
