"""Put together what collecting took apart and tagged: arrays, sparse tensors and the rest."""

from __future__ import annotations

import pickle
from collections import Counter
from typing import TYPE_CHECKING, Final, cast

import numpy as np
import torch

from laststep.codecs.objects import Tagged
from laststep.errors import Corrupt, Usage
from laststep.process import shortage
from laststep.state.tensors.kinds import handler_named
from laststep.state.tree import OWNED, owned

if TYPE_CHECKING:
    from collections.abc import Callable

_SparseParts = tuple[str, tuple[int, ...], dict[str, object]]
"""Layout, shape, and the tensors that a sparse tensor is made of."""


def revive(tagged: Tagged, *, where: str, allow_pickle: bool) -> object:
    """The value that a Tagged stands for, with its inner tensors already in place."""
    try:
        return _revive(tagged, allow_pickle=allow_pickle)
    except Usage:
        raise
    except Corrupt as error:
        raise Corrupt(
            error.what, where=error.where or where, expected=error.expected, found=error.found
        ) from None
    except Exception as error:
        if shortage.is_one(error):
            raise
        raise Corrupt(
            f"cannot rebuild a stored {tagged.tag}", where=where, found=str(error)
        ) from error


def _revive(tagged: Tagged, *, allow_pickle: bool) -> object:
    if tagged.tag == "pickle":
        if not allow_pickle:
            raise Usage(
                "the checkpoint holds a pickled object, which can run any code when loaded",
                remedy="pass allow_pickle=True if you trust whoever wrote it",
            )
        return pickle.loads(tagged.value)  # type: ignore[arg-type]  # noqa: S301 (asked for, twice)
    if tagged.tag not in _REVIVERS:
        raise Corrupt(f"unknown kind of stored value {tagged.tag!r}")
    return _REVIVERS[tagged.tag](tagged.value)


# Each takes what the Collector made. What has another form makes it raise, which is Corrupt.


def _revive_array(value: object) -> object:
    dtype, tensor = cast("tuple[str, object]", value)
    if not isinstance(tensor, torch.Tensor):  # left out of a partial restore
        return tensor
    array, wanted = tensor.cpu().numpy(), np.dtype(dtype)
    if wanted.newbyteorder("=") != array.dtype:  # only the order of its bytes is not the tensor's
        raise Corrupt("an array of another dtype than its bytes", found=f"{wanted}, {array.dtype}")
    return array.astype(wanted, copy=False)


def _revive_scalar(value: object) -> object:
    dtype, data = cast("tuple[str, bytes]", value)
    return np.frombuffer(data, dtype=np.dtype(dtype))[0]


def _revive_bytes(value: object) -> object:
    return value.cpu().numpy().tobytes() if isinstance(value, torch.Tensor) else value


def _revive_dtype(value: object) -> object:
    dtype = vars(torch).get(str(value))  # getattr would import what torch has not loaded yet
    if not isinstance(dtype, torch.dtype):
        raise Corrupt("unknown dtype", found=repr(value)[:80])
    return dtype


def _revive_sparse(layout: str, shape: tuple[int, ...], parts: dict[str, object]) -> object:
    for part in parts.values():
        if not isinstance(part, torch.Tensor | bool):  # left out of a partial restore
            return part
    tensors = cast("dict[str, torch.Tensor]", parts)
    values = tensors["values"]
    if layout == "sparse_coo":
        # Verified bytes of a tensor that torch made: its invariants held when it was saved.
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
        raise Usage(
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
