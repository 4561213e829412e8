"""All operations that depend on the kind of a tensor: inspect, describe, allocate, rebuild.

Moves no tensor between devices: `capture` does that in a save, `restoring` in a restore. Memory and
form are read from all tensors of a state in bulk, because there are thousands and training waits.
"""

from __future__ import annotations

import functools
import operator
import pickle
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import numpy as np
import torch

from laststep.constants import DTYPES, with_article
from laststep.errors import CorruptError, UsageError
from laststep.process import system
from laststep.state.layouts import Layout, Mesh, Placement, Replicate, Shard, Sharded
from laststep.state.tree import OWNED, owned

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

    from laststep.codecs.objects import Tagged
    from laststep.state.boxes import Box
    from laststep.state.tree import View


TORCH_DTYPES: Final[dict[str, torch.dtype]] = {
    name: getattr(torch, name) for name in DTYPES if hasattr(torch, name)
}
DTYPE_NAMES: Final = {dtype: name for name, dtype in TORCH_DTYPES.items()}
PLAIN_TENSORS: Final = frozenset({torch.Tensor, torch.nn.Parameter})
COMPRESSED: Final = {
    "sparse_csr": ("crow", "col"),
    "sparse_bsr": ("crow", "col"),
    "sparse_csc": ("ccol", "row"),
    "sparse_bsc": ("ccol", "row"),
}
"""Layouts of compressed sparse tensors → the stored names of their compressed and plain indices."""


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


def needed_bytes(tensor: torch.Tensor) -> int:
    """Return the number of bytes from the start of its storage to the end of a tensor."""
    if tensor.numel() == 0:
        return 0
    if tensor.is_contiguous():
        reach = tensor.numel()
    else:
        pairs = zip(tensor.shape, tensor.stride(), strict=True)
        reach = 1 + sum((size - 1) * step for size, step in pairs)
    return (int(tensor.storage_offset()) + reach) * tensor.element_size()


def is_backed(tensor: torch.Tensor) -> bool:
    """Return True if a plain, strided tensor is within its storage."""
    needed = needed_bytes(tensor)
    return needed == 0 or (needed <= tensor.untyped_storage().nbytes() and tensor.data_ptr() != 0)


class LocalShard(NamedTuple):
    """The part of a logical tensor that this rank holds, and the layout over all ranks.

    `local` has the shape of this rank's box; for a `Flat` layout it is the range of the flattened
    tensor, in one dimension. It has no elements if the rank holds nothing.
    """

    local: torch.Tensor
    layout: Layout


class LocalBox(NamedTuple):
    """A box of a logical tensor, and the local memory that holds it."""

    box: Box
    memory: torch.Tensor


def dtensor_class() -> type | None:
    """Return the class DTensor, or None if its module was not imported."""
    module = sys.modules.get("torch.distributed.tensor")
    return None if module is None else module.DTensor


def is_dtensor(value: object) -> bool:
    kind = dtensor_class()
    return kind is not None and isinstance(value, kind)


def local_shard_of(tensor: DTensor, where: str) -> LocalShard:
    try:
        layout = _layout_of(tensor.device_mesh, tensor.placements, tensor.shape)
    except UsageError as error:
        raise error.amended(where=where) from None
    return LocalShard(tensor._local_tensor, layout)


@functools.lru_cache(maxsize=4096)
def _layout_of(
    mesh: DeviceMesh, places: tuple[torch.distributed.tensor.Placement, ...], shape: torch.Size
) -> Sharded:
    """Return a cached layout, because thousands of tensors share a few."""
    placements: list[Placement] = []
    for place in places:
        if place.is_replicate():
            placements.append(Replicate())
        elif place.is_partial() or getattr(place, "dim", None) is None:
            raise UsageError(
                f"cannot save a tensor that is placed as {place}",
                expected="shards and replicas",
                remedy="redistribute it first",
            )
        else:
            dim = int(place.dim) % max(len(shape), 1)  # type: ignore[attr-defined]
            placements.append(Shard(dim, int(getattr(place, "split_factor", 1))))
    return Sharded(tuple(shape), mesh_of(mesh), tuple(placements))


@functools.lru_cache(maxsize=256)
def mesh_of(mesh: DeviceMesh) -> Mesh:
    """Convert a DeviceMesh; cached, because `mesh.mesh` is computed at each access."""
    sizes = tuple(mesh.mesh.shape)
    names = mesh.mesh_dim_names or tuple(f"dim{n}" for n in range(len(sizes)))
    return Mesh.of(tuple(names), sizes, mesh.mesh.flatten().tolist())


def check_held(rank: int, boxes: tuple[Box, ...], elements: int, where: str) -> None:
    """Raise `UsageError` if the number of elements in a rank's memory is not that of its boxes."""
    volume = sum(box.volume for box in boxes)
    if volume != elements:
        raise UsageError(
            "a tensor does not match its layout",
            where=where,
            expected=f"{volume} elements on rank {rank}",
            found=str(elements),
            remedy="check the layout, and the ranks of its mesh",
        )


def held_by(rank: int, shard: LocalShard, where: str) -> list[LocalBox]:
    """Return the boxes that a rank holds, each with its memory."""
    boxes = shard.layout.held(rank)
    check_held(rank, boxes, shard.local.numel(), where)
    if len(boxes) == 1:
        return [LocalBox(boxes[0], shard.local.view(boxes[0].shape))]
    flat, at, held = shard.local.reshape(-1), 0, []
    for box in boxes:
        held.append(LocalBox(box, flat[at : at + box.volume].view(box.shape)))
        at += box.volume
    return held


def like(model: DTensor, local: torch.Tensor) -> torch.Tensor:
    """Wrap local memory in a DTensor of the same shape and layout as `model`."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local,
        model.device_mesh,
        model.placements,
        run_check=False,
        shape=model.shape,
        stride=model.stride(),
    )


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


_T = TypeVar("_T")

_COMPLEX: Final = frozenset({torch.complex32, torch.complex64, torch.complex128})
_SHAPE: Final = operator.attrgetter("shape")
_DTYPE: Final = operator.attrgetter("dtype")
_DATA_PTR: Final = torch.Tensor.data_ptr
_STORAGE: Final = torch.Tensor.untyped_storage
_STORAGE_BYTES: Final = torch.UntypedStorage.nbytes
_IS_CONTIGUOUS: Final = torch.Tensor.is_contiguous
_IS_NEGATIVE: Final = torch.Tensor.is_neg


def in_batches(many: Sequence[_T]) -> Iterator[Sequence[_T]]:
    """Iterate in batches that fit the processor's cache: 1.6 times as fast for 100,000 tensors."""
    for first in range(0, len(many), 1024):
        yield many[first : first + 1024]


class TensorForms(NamedTuple):
    """Forms and addresses of strided tensors; equal if the same bytes have the same form."""

    addresses: list[int]
    storages: list[int]
    """The sizes of their storages, which can shrink under a tensor that keeps its shape."""
    shapes: list[torch.Size]
    dtypes: list[torch.dtype]
    contiguous: list[bool]
    details: list[tuple[object, ...]]
    """Strides and devices of those that are not identified by the rest."""
    marked: bool
    """True if any is only marked as negated or conjugated: its memory is not its values."""


def forms_of(memories: Sequence[torch.Tensor]) -> TensorForms:
    """Return the forms of strided tensors; `RuntimeError` for others, with no shape or address."""
    addresses: list[int] = []
    storages: list[int] = []
    shapes: list[torch.Size] = []
    dtypes: list[torch.dtype] = []
    contiguous: list[bool] = []
    marked = False
    for batch in in_batches(memories):
        shapes += map(_SHAPE, batch)
        dtypes += map(_DTYPE, batch)
        addresses += map(_DATA_PTR, batch)
        storages += map(_STORAGE_BYTES, map(_STORAGE, batch))
        contiguous += map(_IS_CONTIGUOUS, batch)
        marked = marked or any(map(_IS_NEGATIVE, batch))
    if not _COMPLEX.isdisjoint(dtypes):
        marked = marked or any(map(torch.Tensor.is_conj, memories))
    details: list[tuple[object, ...]] = []
    if not all(contiguous) or not all(addresses):
        details = [
            (number, memory.stride(), memory.device)
            for number, memory in enumerate(memories)
            if not contiguous[number] or not addresses[number]
        ]
    return TensorForms(addresses, storages, shapes, dtypes, contiguous, details, marked)


def allocate(dtype: str, shape: tuple[int, ...], device: str) -> torch.Tensor:
    """Return a new tensor with undefined content; huge pages fill 1 GB in 0.14 s, not 0.64 s."""
    made = torch.empty(shape, dtype=TORCH_DTYPES[dtype], device=device)
    if made.device.type == "cpu":
        system.prefer_huge_pages(made.data_ptr(), made.nbytes)
    return made


def open_view(base: torch.Tensor, view: View) -> torch.Tensor:
    typed = torch.empty(0, dtype=TORCH_DTYPES[view.dtype], device=base.device)
    storage_offset = base.storage_offset() + view.offset_bytes
    return typed.set_(
        base.untyped_storage(), storage_offset // typed.element_size(), view.shape, view.stride
    )


def from_bytes(data: bytearray, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a CPU tensor over bytes in row-major order; takes ownership of the buffer."""
    if not data:
        return torch.empty(shape, dtype=TORCH_DTYPES[dtype])
    return torch.frombuffer(data, dtype=TORCH_DTYPES[dtype]).view(shape)


def expected_bytes(part: object, ranks: int, *, trained_only: bool) -> Iterator[tuple[str, int]]:
    """Yield (device, bytes that this rank writes) for each tensor of a module, or of an optimizer
    after its first step, with two moments per parameter. That is the local part of a DTensor, or an
    equal part of a plain tensor, which all `ranks` may hold. A sparse tensor counts as 0."""
    tensors: list[torch.Tensor] = []
    if isinstance(part, torch.nn.Module):
        tensors = [*part.parameters(), *part.buffers()]
        tensors = [t for t in tensors if t.requires_grad or not trained_only]
    elif isinstance(part, torch.optim.Optimizer):
        tensors = 2 * [parameter for group in part.param_groups for parameter in group["params"]]
    for tensor in tensors:
        if is_dtensor(tensor):
            yield str(tensor.device), local_tensor(tensor).nbytes
        elif tensor.layout is torch.strided:
            yield str(tensor.device), tensor.nbytes // ranks


def same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return True if two tensors are the same window of the same storage."""
    a, b = local_tensor(a), local_tensor(b)
    if a.layout is not torch.strided or b.layout is not torch.strided:
        return False
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride()


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return True if two tensors of one form have the same bytes."""
    rows = (t.detach().contiguous() for t in (a, b))
    # as_strided, not view: a contiguous tensor of one element may have any stride.
    return torch.equal(*(t.as_strided((t.numel(),), (1,)).view(torch.uint8) for t in rows))


def repeats_itself(tensor: torch.Tensor) -> bool:
    """Return True if several elements share one address, which torch refuses to write to."""
    if tensor.numel() == 0 or 0 not in tensor.stride():
        return False
    return any(n > 1 and step == 0 for n, step in zip(tensor.shape, tensor.stride(), strict=True))


def put_tensor(live: torch.Tensor, loaded: torch.Tensor | float) -> torch.Tensor:
    """Give a live tensor a loaded value, unless it was already restored in place. Return the tensor
    to use: the live one, or the loaded one if the live one is not strided or has another shape."""
    with torch.no_grad():
        if not isinstance(loaded, torch.Tensor):
            live.fill_(loaded)
        elif live.layout is not torch.strided or live.shape != loaded.shape:
            return loaded
        elif not same_memory(live, loaded) or live.is_conj() or live.is_neg():
            live.copy_(loaded)
    return live


def box_of(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """Return the window of a tensor for a box; the tensor itself if the box covers all of it."""
    if box.shape == tuple(tensor.shape):
        return tensor
    return tensor[tuple(map(slice, box.start, box.stop))]


def copy_tensors(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy each second tensor into the first, whatever their strides and devices."""
    with torch.no_grad():
        for target, source in pairs:
            target.copy_(source)


class _HeldScalar(NamedTuple):
    """A metric that is still on its device, and the event after which it can be read."""

    tensor: torch.Tensor
    event: torch.cuda.Event | None


def hold_scalar(name: str, value: object) -> object:
    """Return a snapshot of a metric: a tensor is copied on its device, without waiting for it."""
    if type(value) in (int, float, str, bool):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, torch.Tensor) and _is_number(value):
        held, event = value.detach().clone(), None
        if held.is_cuda:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(held.device))
        return _HeldScalar(held, event)
    raise UsageError(
        f"metric {name!r} is not one number",
        expected="a number, a string or a tensor of one element, with memory",
        found=with_article(type(value)),
        remedy="pass float(value), reduce it first, e.g. with mean(), or put it into metadata",
    )


def _is_number(tensor: torch.Tensor) -> bool:
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_complex():
        return False
    return tensor.numel() == 1 and is_backed(tensor)


def plain_scalar(value: object) -> object:
    """Return the number in a held metric; waits for the device if necessary."""
    if not isinstance(value, _HeldScalar):
        return value
    if value.event is not None:
        value.event.synchronize()  # copied on training's stream, not on this thread's
    return value.tensor.item()


def revive(tagged: Tagged, *, where: str, allow_pickle: bool) -> object:
    """Rebuild the value of a Tagged, with its tensors in place, or raise `CorruptError`."""
    try:
        return _revive(tagged, allow_pickle=allow_pickle)
    except UsageError:
        raise
    except CorruptError as error:
        raise error.amended(where=error.where or where) from None
    except Exception as error:
        if system.is_one(error):
            raise
        raise CorruptError(
            f"cannot rebuild a stored {tagged.tag}", where=where, found=str(error)
        ) from error


def _revive(tagged: Tagged, *, allow_pickle: bool) -> object:
    value: Any = tagged.value
    match tagged.tag:
        case "pickle":
            if not allow_pickle:
                raise UsageError(
                    "the checkpoint holds a pickled object, which can run any code when loaded",
                    remedy="pass allow_pickle=True if you trust whoever wrote it",
                )
            return pickle.loads(value)  # noqa: S301 (opted in twice)
        case "ndarray":
            return _revive_array(*value)
        case "scalar":
            dtype, data = value
            return np.frombuffer(data, dtype=np.dtype(dtype))[0]
        case "bytes":
            return value.cpu().numpy().tobytes() if isinstance(value, torch.Tensor) else value
        case "counter":
            return Counter(value)
        case "dtype":
            found = vars(torch).get(str(value))  # getattr would import lazy submodules of torch
            if not isinstance(found, torch.dtype):
                raise CorruptError("unknown dtype", found=repr(value)[:80])
            return found
        case "device":
            return torch.device(str(value))
        case "size":
            return torch.Size(value)
        case "sparse":
            return _revive_sparse(*value)
        case "subclass":
            return _revive_subclass(*value)
        case _ if tagged.tag == OWNED:
            return owned(tagged).state
    raise CorruptError(f"unknown kind of stored value {tagged.tag!r}")


def _revive_array(dtype: str, tensor: object) -> object:
    if not isinstance(tensor, torch.Tensor):  # skipped in a partial restore
        return tensor
    array, wanted = tensor.cpu().numpy(), np.dtype(dtype)
    if wanted.newbyteorder("=") != array.dtype:  # only the byte order may differ
        raise CorruptError("an array of another dtype than its bytes", found=str(wanted))
    return array.astype(wanted, copy=False)


def _revive_sparse(layout: str, shape: tuple[int, ...], parts: dict[str, Any]) -> object:
    for part in parts.values():
        if not isinstance(part, torch.Tensor | bool):  # skipped in a partial restore
            return part
    values = parts["values"]
    if layout == "sparse_coo":
        # The bytes are verified and torch made the tensor, so its invariants held at the save.
        sparse = torch.sparse_coo_tensor(parts["indices"], values, shape, check_invariants=True)
        return sparse._coalesced_(bool(parts["coalesced"]))
    first, second = (parts[name] for name in COMPRESSED[layout])
    kind = getattr(torch, layout)
    return torch.sparse_compressed_tensor(
        first, second, values, shape, layout=kind, check_invariants=True
    )


def _revive_subclass(name: str, parts: object) -> object:
    for handler in _HANDLERS.values():
        if handler.name == name:
            return handler.from_parts(parts)
    raise UsageError(
        f"cannot load the tensor subclass {name!r}",
        remedy="register it first with laststep.register_tensor_type",
    )
