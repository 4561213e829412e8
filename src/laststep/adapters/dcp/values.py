"""Values that DCP hands over as bytes of `torch.save`: as trees of plain values, and back.

What a tree can express is stored like any other state: plain values, containers, arrays, tensors;
and, described, datetimes, paths, enums and dataclasses (`typed`).
Whatever else a value is, its bytes are kept as they are. What torch.load takes only with
`weights_only=False`, but for an io.BytesIO, is stored and loaded only where `allow_pickle` was
passed, to both sides.
"""

from __future__ import annotations

import contextlib
import functools
import io
import pickle
import threading
import types
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from laststep.adapters.dcp import typed
from laststep.adapters.dcp.layout import tensor_name
from laststep.adapters.importing.torch_save import load_plain, refused_by
from laststep.codecs import objects
from laststep.codecs.objects import TensorRef
from laststep.errors import LaststepError, UsageError
from laststep.state.tensors import collect
from laststep.state.tree import rebuild

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from laststep.adapters.nesting import Path

_ADMITTING = threading.Lock()
REMEDY = "leave it out of the state, or pass allow_pickle=True to both Writer and Reader"


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A value taken apart: its tree as typed JSON, and the tensors that it names."""

    tree: bytes
    tensors: dict[str, torch.Tensor]
    kind: Literal["value", "typed", "raw"]
    """Whether the tree is the value, describes it (`typed`), or is the bytes that the planner
    gave."""


def take_apart(data: bytes, location: Path, *, fqn: str, allow_pickle: bool) -> Value:
    """What `data` holds; `location` is where it will lie. `UsageError` for what must be pickled,
    unless that is allowed."""
    with contextlib.suppress(LaststepError, _NotPlain):
        value, is_typed = _plain_value(data)
        return _collected(value, location, "typed" if is_typed else "value")
    if not allow_pickle:
        _loaded_safely(data, what=f"cannot save {fqn}")
    return _collected(data, location, "raw")


class _NotPlain(Exception):
    """A value that a tree would not give back as it was."""


class _PlainUnpickler(pickle.Unpickler):
    """Makes only objects that a tree can hold, or that can be described. It makes none of a user's
    own classes, although the bytes come from this process: making one might do anything."""

    def find_class(self, module: str, name: str) -> Any:
        if name == "getattr" and module in ("builtins", "__builtin__"):
            return typed.member
        instead = typed.unmade(module, name)
        if instead is not None:
            return instead
        if (module, name) not in _PLAIN and not (module == "torch" and name in _OF_TORCH):
            raise pickle.UnpicklingError(f"{module}.{name} is not plain")
        plain = super().find_class(module, name)
        return functools.partial(_rebuilt, plain) if name == "_rebuild_tensor_v2" else plain


def _rebuilt(make: Callable[..., object], *parts: object) -> object:
    """Make a tensor; the parts are storage, offset, size, stride, requires_grad, and more."""
    if parts[4]:
        raise _NotPlain  # it would come back as one that does not
    return make(*parts)


_UNPICKLERS: Any = types.SimpleNamespace(__name__=__name__, Unpickler=_PlainUnpickler)
"""What torch.load wants to have as a module."""
_ARRAYS = ("numpy._core.multiarray", "numpy.core.multiarray")
_PLAIN = frozenset(
    {
        *(
            ("builtins", name)
            for name in ("bytearray", "complex", "frozenset", "range", "set", "slice")
        ),
        *(
            ("__builtin__", name)
            for name in ("bytearray", "complex", "frozenset", "range", "set", "slice", "xrange")
        ),
        *(("collections", name) for name in ("Counter", "OrderedDict", "deque")),
        *((module, name) for module in _ARRAYS for name in ("_reconstruct", "scalar")),
        *(("datetime", name) for name in typed.OF_DATETIME),
        *(("pathlib", name) for name in typed.OF_PATHLIB),
        ("numpy", "dtype"),
        ("numpy", "ndarray"),
        ("_codecs", "encode"),
        ("torch._utils", "_rebuild_tensor_v2"),
        ("torch._utils", "_rebuild_sparse_tensor"),
        ("torch.serialization", "_get_layout"),
    }
)
_OF_TORCH = frozenset(
    {
        "Size",
        "device",
        *(
            name
            for name, value in vars(torch).items()
            if isinstance(value, torch.dtype) or name.endswith("Storage")
        ),
    }
)


def _plain_value(data: bytes) -> tuple[object, bool]:
    """The value, and whether it is one that is only described."""
    try:
        value = torch.load(
            io.BytesIO(data), map_location="cpu", weights_only=False, pickle_module=_UNPICKLERS
        )
        return typed.describe(value)
    except MemoryError:
        raise
    except Exception as error:  # a planner may give any bytes
        raise _NotPlain from error


def _collected(value: object, location: Path, kind: Literal["value", "typed", "raw"]) -> Value:
    collected = collect(value)
    above = tensor_name(location)

    def name_in_item(name: str) -> str:
        return f"{above}/{name}" if above and name else above or name

    tree = rebuild(
        collected.tree, leaf=lambda ref: TensorRef(name_in_item(ref.name)), revive=lambda tag: tag
    )
    # What shares memory within a value is stored as often as it is met.
    tensors = {name_in_item(name): tensor for name, tensor in collected.tensors.items()}
    return Value(tree=objects.encode(tree), tensors=tensors, kind=kind)


def raw_bytes(data: bytes, *, fqn: str, allow_pickle: bool) -> io.BytesIO:
    """Bytes that were kept as they were, for a planner, which may run the code in them. Unless
    `allow_pickle`, it gets them written anew from what loads without running any."""
    if allow_pickle:
        return io.BytesIO(data)
    return put_together(_loaded_safely(data, what=f"cannot load {fqn}"))


def put_together(value: object) -> io.BytesIO:
    """A value as the bytes that a planner loads."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return buffer


@contextlib.contextmanager
def _admitting_bytes_io() -> Iterator[None]:
    """Let torch.load make an io.BytesIO, which holds bytes and runs nothing. Torch can admit a
    class only for the whole process, so one thread at a time does this, and a class that the user
    has admitted stays admitted."""
    with _ADMITTING:
        if io.BytesIO in torch.serialization.get_safe_globals():
            yield
            return
        with torch.serialization.safe_globals([io.BytesIO]):
            yield


def _loaded_safely(data: bytes, *, what: str) -> object:
    try:
        with _admitting_bytes_io():
            return load_plain(io.BytesIO(data))
    except MemoryError:
        raise
    except Exception as error:  # junk makes torch raise anything
        raise UsageError(
            f"{what}: it is a pickled object, which can run any code when loaded",
            expected="tensors, containers and plain values",
            found=refused_by(error) or "bytes that torch.load does not take",
            remedy=REMEDY,
        ) from error
