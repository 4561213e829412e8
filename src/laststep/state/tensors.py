"""Everything that must know what a tensor is: take it apart, describe it, allocate it, revive it.

The only module of `state` that imports torch. Never copies tensor data and never moves it between
devices; `engine.copy` does that.
"""

from __future__ import annotations

import pickle
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np
import torch

from laststep.codecs.objects import Tagged, TensorRef
from laststep.errors import Corrupt, Usage
from laststep.state.known import Known, walk_known
from laststep.state.names import name_of
from laststep.state.pieces import Collected, Piece, View
from laststep.state.sharing import Extent, find_overlaps, find_ties
from laststep.state.tree import NOT_MINE, Path, copy_tree, show_path
from laststep.terms import DTYPES

TORCH_DTYPES: Final[dict[str, torch.dtype]] = {
    name: getattr(torch, name) for name in DTYPES if hasattr(torch, name)
}
DTYPE_NAMES: Final = {dtype: name for name, dtype in TORCH_DTYPES.items()}
_ARRAYS: Final = frozenset({np.ndarray, np.memmap})
"""Other subclasses, such as masked arrays, hold more than their elements."""
_ARRAY_DTYPES: Final = frozenset(map(np.dtype, (
    "?", "u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f2", "f4", "f8", "c8", "c16",
)))  # fmt: skip
_PLAIN_TENSORS: Final = frozenset({torch.Tensor, torch.nn.Parameter})
_BASE_ALIGN = 16
"""A base starts at a multiple of the largest element, so that every view of it is aligned."""


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


class CollectCache:
    """What the last save of an item found; holds no tensor's memory."""

    def __init__(self) -> None:
        self.known: list[Known] = []
        self.pieces: tuple[Piece, ...] = ()
        self.ties: dict[str, str] = {}


class Collector:
    """The `Leaves` of a torch state: remembers every tensor under the name of its path."""

    def __init__(self, volatile: frozenset[Path], allow_pickle: bool) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.volatile_names: set[str] = set()
        self.paths: dict[str, Path] = {}
        self.originals: dict[str, torch.Tensor] = {}
        self._volatile = volatile
        self._allow_pickle = allow_pickle

    def take(self, path: Path, value: object) -> object:
        kind = type(value)
        if kind in _PLAIN_TENSORS or isinstance(value, torch.Tensor):
            return self._take_tensor(path, value)  # type: ignore[arg-type]
        if kind in _ARRAYS:
            if value.dtype.newbyteorder("=") not in _ARRAY_DTYPES:  # type: ignore[attr-defined]
                return NOT_MINE
            return Tagged("ndarray", self._take_array(path, value))  # type: ignore[arg-type]
        if isinstance(value, np.generic):
            if value.dtype.hasobject or value.dtype.kind == "V":
                return NOT_MINE
            return Tagged("scalar", [value.dtype.str, value.tobytes()])
        if kind is Counter:  # MultiStepLR keeps its milestones in one
            return Tagged("counter", copy_tree(dict(value), self, path, allow_pickle=False))
        if kind is bytes:  # larger than what the tree keeps as text
            blob = torch.frombuffer(bytearray(value), dtype=torch.uint8)  # type: ignore[arg-type]
            return Tagged("bytes", self._keep(path, blob))
        if isinstance(value, torch.dtype):
            return Tagged("dtype", str(value).removeprefix("torch."))
        if isinstance(value, torch.device):
            return Tagged("device", str(value))
        if isinstance(value, torch.Size):
            return Tagged("size", tuple(value))
        return NOT_MINE

    def _keep(self, path: Path, tensor: torch.Tensor) -> TensorRef:
        name = name_of(path)
        self.tensors[name] = tensor
        self.paths[name] = path
        if path in self._volatile:
            self.volatile_names.add(name)
        return TensorRef(name)

    def _take_array(self, path: Path, array: np.ndarray) -> list[object]:
        # Byte order and read-only flags are not torch's: a copy in native order has neither.
        # Nor are strides that run backwards or are no whole number of elements.
        strides = [step < 0 or step % array.itemsize for step in array.strides]
        odd = not array.flags.writeable or not array.dtype.isnative or any(strides)
        safe = array.astype(array.dtype.newbyteorder("="), copy=True) if odd else array
        return [array.dtype.str, self._keep(path, torch.from_numpy(safe))]

    def _take_tensor(self, path: Path, tensor: torch.Tensor) -> object:
        kind = type(tensor)
        if kind not in _PLAIN_TENSORS:
            return self._take_subclass(path, tensor)
        if tensor.layout is not torch.strided:
            return self._take_sparse(path, tensor)
        if tensor.device.type == "meta":
            raise Usage("cannot save a meta tensor: it has no data", where=show_path(path),
                        remedy="materialise it first, e.g. module.to_empty(device=...)")  # fmt: skip
        if tensor.dtype not in DTYPE_NAMES:
            raise Usage(f"cannot save a tensor of {tensor.dtype}", where=show_path(path),
                        expected="a plain dtype", remedy="dequantise it first")  # fmt: skip
        original = tensor
        if tensor.is_conj() or tensor.is_neg():
            tensor = tensor.resolve_conj().resolve_neg()
        ref = self._keep(path, tensor.detach() if tensor.requires_grad else tensor)
        self.originals[ref.name] = original
        return ref

    def _take_subclass(self, path: Path, tensor: torch.Tensor) -> object:
        for base in type(tensor).__mro__:
            handler = _HANDLERS.get(base)
            if handler is not None:
                parts = copy_tree(handler.to_parts(tensor), self, path, self._allow_pickle)
                return Tagged("subclass", [handler.name, parts])
        if isinstance(tensor, torch.nn.parameter.UninitializedTensorMixin):
            raise Usage("cannot save a parameter that is not initialised yet", where=show_path(path),
                        remedy="run one forward pass first")  # fmt: skip
        raise Usage(
            f"cannot save the tensor subclass {type(tensor).__qualname__}",
            where=show_path(path),
            remedy="teach laststep its parts with laststep.register_tensor_type",
        )

    def _take_sparse(self, path: Path, tensor: torch.Tensor) -> object:
        parts: dict[str, object]
        if tensor.layout is torch.sparse_coo:
            # _indices and _values do not demand coalescing, which would change what is stored.
            parts = {"indices": tensor._indices(), "values": tensor._values(),
                     "coalesced": tensor.is_coalesced()}  # fmt: skip
        elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
            parts = {"crow": tensor.crow_indices(), "col": tensor.col_indices(), "values": tensor.values()}
        elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
            parts = {"ccol": tensor.ccol_indices(), "row": tensor.row_indices(), "values": tensor.values()}
        else:
            raise Usage(f"cannot save a tensor of layout {tensor.layout}", where=show_path(path))
        parts = {k: v.detach() if isinstance(v, torch.Tensor) else v for k, v in parts.items()}
        layout = str(tensor.layout).removeprefix("torch.")
        return Tagged("sparse", [layout, tuple(tensor.shape), copy_tree(parts, self, path, False)])


def collect(
    value: object,
    *,
    volatile: frozenset[Path] = frozenset(),
    allow_pickle: bool = False,
    cache: CollectCache | None = None,
) -> Collected:
    """Take a state apart: its tree of plain values, its tensors as pieces, what shares memory.

    With a `cache`, a state whose tensors are all still the same memory as last time is only walked.
    """
    if cache is not None and cache.known:
        met = walk_known(value, cache.known)
        if met is not None:
            tree, sources = met
            return Collected(tree=tree, pieces=cache.pieces, sources=sources, ties=cache.ties)
    collector = Collector(volatile, allow_pickle)
    tree = copy_tree(value, collector, (), allow_pickle)
    collected = _collected(tree, collector)
    if cache is not None:
        _remember(cache, collector, collected)
    return collected


def _remember(cache: CollectCache, collector: Collector, collected: Collected) -> None:
    """Only what is as simple as it is common: every leaf a plain tensor, no overlapping views."""
    cache.known = []
    simple = not collected.views and len(collector.originals) == len(collector.tensors)
    if not simple or any(t.is_conj() or t.is_neg() for t in collector.originals.values()):
        return
    cache.pieces, cache.ties = collected.pieces, collected.ties
    parent: Path = ()
    for name, tensor in collector.originals.items():
        *above, key = collector.paths[name] or (None,)
        parent = parent if list(parent) == above else tuple(above)
        cache.known.append(
            Known(
                weakref.ref(tensor), parent, key, tensor.data_ptr(), tensor.shape, tensor.stride(),
                tensor.dtype, TensorRef(name), name not in collected.ties,
            )
        )  # fmt: skip


def _collected(tree: object, collector: Collector) -> Collected:
    tensors = collector.tensors
    ties, views, bases = _sharing(tensors)
    own = {n: t for n, t in tensors.items() if n not in ties and n not in views} | bases
    loose = {view.base for name, view in views.items() if name in collector.volatile_names}
    loose |= collector.volatile_names
    return Collected(
        tree=tree,
        pieces=tuple(_piece(name, tensor, name in loose) for name, tensor in own.items()),
        sources=tuple(own.values()),
        ties=ties,
        views=views,
        tensors=dict(tensors),
    )


def _piece(name: str, tensor: torch.Tensor, volatile: bool) -> Piece:
    device = tensor.device
    return Piece(
        name, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), tensor.nbytes,
        "cpu" if device.type == "cpu" else str(device), tensor.is_contiguous(), volatile,
    )  # fmt: skip


def _sharing(
    tensors: dict[str, torch.Tensor],
) -> tuple[dict[str, str], dict[str, View], dict[str, torch.Tensor]]:
    """Ties, views and base tensors among these; the common case (nothing shared) is one pass."""
    storages = {name: tensor.untyped_storage().data_ptr() for name, tensor in tensors.items()}
    if len(set(storages.values())) == len(storages):
        return {}, {}, {}
    extents = [_extent(name, tensor, storages[name]) for name, tensor in tensors.items()]
    ties = find_ties(extents)
    views: dict[str, View] = {}
    bases: dict[str, torch.Tensor] = {}
    for overlap in find_overlaps([extent for extent in extents if extent.name not in ties]):
        base_name = f"~6base{len(bases)}"
        storage = tensors[overlap.members[0].name].untyped_storage()
        whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        start = overlap.start // _BASE_ALIGN * _BASE_ALIGN
        bases[base_name] = whole[start : overlap.stop]
        for member in overlap.members:
            tensor = tensors[member.name]
            views[member.name] = View(
                base=base_name,
                dtype=DTYPE_NAMES[tensor.dtype],
                shape=tuple(tensor.shape),
                stride=tuple(tensor.stride()),
                offset_bytes=tensor.storage_offset() * tensor.element_size() - start,
            )
    return ties, views, bases


def _extent(name: str, tensor: torch.Tensor, storage: int) -> Extent:
    size = tensor.element_size()
    shape, stride = tuple(tensor.shape), tuple(tensor.stride())
    start = tensor.storage_offset() * size
    reach = sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
    stop = start if tensor.numel() == 0 else start + (reach + 1) * size
    return Extent(name, storage, start, stop, (tensor.dtype, shape, stride, start))


def allocate(dtype: str, shape: tuple[int, ...], device: str) -> torch.Tensor:
    """A new tensor with undefined content."""
    return torch.empty(shape, dtype=TORCH_DTYPES[dtype], device=device)


def open_view(base: torch.Tensor, view: View) -> torch.Tensor:
    """The strided window that `view` describes, in the bytes of `base`."""
    typed = torch.empty(0, dtype=TORCH_DTYPES[view.dtype], device=base.device)
    storage_offset = base.storage_offset() + view.offset_bytes
    return typed.set_(
        base.untyped_storage(), storage_offset // typed.element_size(), view.shape, view.stride
    )


def revive(tagged: Tagged, *, where: str, allow_pickle: bool) -> object:
    """The value that a Tagged stands for, with its inner tensors already in place."""
    try:
        return _revive(tagged, allow_pickle)
    except (Usage, Corrupt):
        raise
    except Exception as error:
        raise Corrupt(f"cannot rebuild a stored {tagged.tag}", where=where, found=str(error)) from error


def _revive(tagged: Tagged, allow_pickle: bool) -> object:
    tag, value = tagged.tag, tagged.value
    if tag == "ndarray":
        dtype, tensor = value  # type: ignore[misc]
        if not isinstance(tensor, torch.Tensor):  # left out of a partial restore
            return tensor
        return tensor.cpu().numpy().astype(np.dtype(dtype), copy=False)
    if tag == "scalar":
        dtype, data = value  # type: ignore[misc]
        return np.frombuffer(data, dtype=np.dtype(dtype))[0]
    if tag == "bytes":
        return value.cpu().numpy().tobytes() if isinstance(value, torch.Tensor) else value
    if tag == "counter":
        return Counter(value)  # type: ignore[call-overload]
    if tag == "dtype":
        dtype = getattr(torch, str(value), None)
        if not isinstance(dtype, torch.dtype):
            raise Corrupt("unknown dtype", found=repr(value)[:80])
        return dtype
    if tag == "device":
        return torch.device(str(value))
    if tag == "size":
        return torch.Size(value)  # type: ignore[arg-type, call-overload]
    if tag == "sparse":
        return _revive_sparse(*value)  # type: ignore[misc]
    if tag == "subclass":
        name, parts = value  # type: ignore[misc]
        for handler in _HANDLERS.values():
            if handler.name == name:
                return handler.from_parts(parts)
        raise Usage(f"cannot load the tensor subclass {name!r}",
                    remedy="register it first with laststep.register_tensor_type")  # fmt: skip
    if tag == "pickle":
        if not allow_pickle:
            raise Usage(
                "the checkpoint holds a pickled object, which can run any code when loaded",
                remedy="pass allow_pickle=True if you trust whoever wrote it",
            )
        return pickle.loads(value)  # type: ignore[arg-type]  # noqa: S301 (asked for, twice)
    raise Corrupt(f"unknown kind of stored value {tag!r}")


def _revive_sparse(layout: str, shape: tuple[int, ...], parts: dict[str, torch.Tensor]) -> object:
    if any(not isinstance(part, torch.Tensor | bool) for part in parts.values()):
        return next(part for part in parts.values() if not isinstance(part, torch.Tensor | bool))
    values = parts["values"]
    if layout == "sparse_coo":
        # Verified bytes of a tensor that torch made: its invariants held when it was saved.
        sparse = torch.sparse_coo_tensor(parts["indices"], values, shape, check_invariants=True)
        return sparse._coalesced_(bool(parts["coalesced"]))
    if layout in ("sparse_csr", "sparse_bsr"):
        rows, columns = parts["crow"], parts["col"]
    else:
        rows, columns = parts["ccol"], parts["row"]
    kind = getattr(torch, layout)
    return torch.sparse_compressed_tensor(
        rows, columns, values, shape, layout=kind, check_invariants=True
    )


def is_module(value: object) -> bool:
    return isinstance(value, torch.nn.Module)


def is_optimizer(value: object) -> bool:
    return isinstance(value, torch.optim.Optimizer)


def is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def dense_bytes(tensor: torch.Tensor) -> int:
    """The bytes of a tensor as far as that can be said: a sparse one counts as nothing."""
    return tensor.nbytes if tensor.layout is torch.strided else 0


def same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are the same window of the same storage; False where they have none."""
    if a.layout is not torch.strided or b.layout is not torch.strided:
        return False
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride()


def put_tensor(live: torch.Tensor, loaded: torch.Tensor | float) -> torch.Tensor:
    """Give a live tensor a loaded value, unless it was restored in place; returns what is to stand:
    the live tensor, or the loaded one where a sparse tensor of another size cannot be filled."""
    with torch.no_grad():
        if not isinstance(loaded, torch.Tensor):
            live.fill_(loaded)
        elif live.layout is not torch.strided or live.shape != loaded.shape:
            return loaded
        elif not same_memory(live, loaded) or live.is_conj() or live.is_neg():
            live.copy_(loaded)
    return live


def torch_rng_states() -> dict[str, object]:
    """The states of torch's generators: the CPU's, and every CUDA device's once CUDA is in use."""
    cuda: list[torch.Tensor] = []
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        cuda = torch.cuda.get_rng_state_all()
    return {"cpu": torch.get_rng_state(), "cuda": cuda}


def set_torch_rng_states(states: dict[str, object]) -> None:
    torch.set_rng_state(states["cpu"])  # type: ignore[arg-type]
    cuda = states["cuda"]
    if cuda and torch.cuda.is_available():
        count = torch.cuda.device_count()
        torch.cuda.set_rng_state_all(cuda[:count])  # type: ignore[index]


def load_torch_file(path: str) -> object:
    """What a `torch.save` file holds, safe types only."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise Usage(
            "the file holds more than tensors and plain values",
            where=path,
            found=str(error).splitlines()[0],
            remedy="load it yourself if you trust it, and save its parts with laststep.save",
        ) from error


def copy_tensors(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy each second tensor into the first, whatever their strides and devices."""
    with torch.no_grad():
        for target, source in pairs:
            target.copy_(source)


def hold_scalar(name: str, value: object) -> object:
    """A metric as it is now: a tensor is copied on its device, without waiting for it."""
    if isinstance(value, torch.Tensor):
        if value.numel() != 1 or value.is_complex():
            found = f"{value.dtype}{list(value.shape)}"
            raise Usage(f"metric {name!r} is not one number", found=found)
        return value.detach().clone()
    if isinstance(value, np.generic):
        return value.item()
    if type(value) not in (int, float, str, bool):
        raise Usage(f"metric {name!r} is not a number", expected="a number, a string or a tensor of one element",
                    found=type(value).__name__)  # fmt: skip
    return value


def plain_scalar(value: object) -> object:
    """The number in a held metric; waits for the device if it must."""
    return value.item() if isinstance(value, torch.Tensor) else value


def from_bytes(data: bytearray, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """A CPU tensor over bytes in row-major order; takes the buffer over."""
    if not data:
        return torch.empty(shape, dtype=TORCH_DTYPES[dtype])
    return torch.frombuffer(data, dtype=TORCH_DTYPES[dtype]).view(shape)
