"""Take a state apart into its tree of plain values, its tensors as pieces, and shared memory.

Copies no data of a tensor that training may change: `capture` does that.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import compress, repeat
from operator import attrgetter
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from laststep.codecs.objects import Tagged, TensorRef
from laststep.errors import UsageError
from laststep.state.boxes import MemoryRange, find_overlaps, find_ties
from laststep.state.provider import Collected, Piece, View
from laststep.state.structure import KnownState, first_walk
from laststep.state.tensors.kinds import DTYPE_NAMES, PLAIN_TENSORS, handler_for
from laststep.state.tensors.live import (
    LocalShard,
    TensorDescriptions,
    TensorPlaces,
    is_backed,
    is_dtensor,
    is_dtensor_class,
    local_shard_of,
    needed_bytes,
    not_backed,
)
from laststep.state.tree import NOT_MINE, OWNED, Owned, Path, copy_tree, name_of, show_path

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from laststep.state.layouts import Layout

_REQUIRES_GRAD: Final = attrgetter("requires_grad")
_ARRAYS: Final = frozenset({np.ndarray, np.memmap})
"""Array types that consist of their elements only; other subclasses, such as masked arrays, hold
more."""
_ARRAY_DTYPES: Final = frozenset(
    map(
        np.dtype,
        ("?", "u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f2", "f4", "f8", "c8", "c16"),
    )
)
_BASE_ALIGN = 16
"""Alignment of the start of a base: the size of the largest element, so that every view is
aligned."""


class CollectCache:
    """The result of the last save of an item; holds no tensor memory."""

    def __init__(self) -> None:
        self.last: _Last | None = None


class Collector:
    """The `Leaves` of a torch state: remembers every tensor under the name of its path."""

    def __init__(self, volatile: frozenset[Path], *, allow_pickle: bool) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.volatile_names: set[str] = set()
        self.trained_names: set[str] = set()
        self.layouts: dict[str, Layout] = {}
        self.owners: dict[str, object] = {}
        self._volatile = volatile
        self._allow_pickle = allow_pickle

    def take(self, path: Path, value: object) -> object:
        kind = type(value)
        if kind in PLAIN_TENSORS or isinstance(value, torch.Tensor):
            return self._take_tensor(path, value)  # type: ignore[arg-type]
        if kind is LocalShard:
            return self._take_local_shard(path, value, value)  # type: ignore[arg-type]
        if kind in _ARRAYS:
            if value.dtype.newbyteorder("=") not in _ARRAY_DTYPES:  # type: ignore[attr-defined]
                return NOT_MINE
            return Tagged("ndarray", self._take_array(path, value))  # type: ignore[arg-type]
        if isinstance(value, np.generic):
            if value.dtype.hasobject or value.dtype.kind == "V":
                return NOT_MINE
            return Tagged("scalar", [value.dtype.str, value.tobytes()])
        if type(value) is Counter:  # MultiStepLR keeps its milestones in a Counter
            return Tagged("counter", copy_tree(dict(value), self, path, allow_pickle=False))
        if kind is Owned:
            state = copy_tree(value.state, self, path, allow_pickle=self._allow_pickle)  # type: ignore[attr-defined]
            return Tagged(OWNED, [value.owner, state])  # type: ignore[attr-defined]
        if type(value) is bytes:  # larger ones than the tree keeps as text
            blob = torch.frombuffer(bytearray(value), dtype=torch.uint8)
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
        if self._volatile and path in self._volatile:
            self.volatile_names.add(name)
        return TensorRef(name)

    def _take_array(self, path: Path, array: np.ndarray) -> list[object]:
        # torch has no foreign byte order, no read-only memory, and no strides that are negative or
        # not a whole number of elements: copy such an array in native order.
        strides = [step < 0 or step % array.itemsize for step in array.strides]
        odd = not array.flags.writeable or not array.dtype.isnative or any(strides)
        safe = array.astype(array.dtype.newbyteorder("="), copy=True) if odd else array
        return [array.dtype.str, self._keep(path, torch.from_numpy(safe))]

    def _take_tensor(self, path: Path, tensor: torch.Tensor) -> object:
        kind = type(tensor)
        if kind not in PLAIN_TENSORS:
            return self._take_subclass(path, tensor)
        if tensor.is_nested:
            raise UsageError(
                "cannot save a nested tensor",
                where=show_path(path),
                expected="tensors of one shape",
                remedy="save the list of its parts, tensor.unbind(), instead",
            )
        if tensor.layout is not torch.strided:
            return self._take_sparse(path, tensor)
        if tensor.is_meta:
            raise UsageError(
                "cannot save a meta tensor: it has no data",
                where=show_path(path),
                remedy="materialise it first, e.g. module.to_empty(device=...)",
            )
        if tensor.dtype not in DTYPE_NAMES:
            raise UsageError(
                f"cannot save a tensor of {tensor.dtype}",
                where=show_path(path),
                expected="a plain dtype",
                remedy="dequantise it first",
            )
        if not is_backed(tensor):
            raise not_backed(tensor, show_path(path))
        detached = tensor.detach() if tensor.requires_grad else tensor
        if tensor.is_conj() or tensor.is_neg():
            detached = detached.resolve_conj().resolve_neg()
        ref = self._keep(path, detached)
        if tensor.requires_grad:
            self.trained_names.add(ref.name)
        return ref

    def _take_local_shard(self, path: Path, shard: LocalShard, owner: object) -> object:
        ref = self._take_tensor(path, shard.local.detach())
        if not isinstance(ref, TensorRef):
            raise UsageError(
                "cannot save a shard of a tensor that is not plain", where=show_path(path)
            )
        if getattr(owner, "requires_grad", False):
            self.trained_names.add(ref.name)
        self.layouts[ref.name] = shard.layout
        self.owners[ref.name] = owner
        return ref

    def _take_subclass(self, path: Path, tensor: torch.Tensor) -> object:
        if is_dtensor(tensor):
            return self._take_local_shard(path, local_shard_of(tensor, show_path(path)), tensor)  # type: ignore[arg-type]
        handler = handler_for(type(tensor))
        if handler is not None:
            inner = handler.to_parts(tensor)
            parts = copy_tree(inner, self, path, allow_pickle=self._allow_pickle)
            return Tagged("subclass", [handler.name, parts])
        if torch.nn.parameter.is_lazy(tensor):
            raise UsageError(
                "cannot save a parameter that is not initialised yet",
                where=show_path(path),
                remedy="run one forward pass first",
            )
        raise UsageError(
            f"cannot save the tensor subclass {type(tensor).__qualname__}",
            where=show_path(path),
            remedy="teach laststep its parts with laststep.register_tensor_type",
        )

    def _take_sparse(self, path: Path, tensor: torch.Tensor) -> object:
        parts: dict[str, object]
        if tensor.layout is torch.sparse_coo:
            # indices() and values() would require coalescing, which changes the stored tensor.
            parts = {"indices": tensor._indices(), "values": tensor._values()}
            parts["coalesced"] = tensor.is_coalesced()
        elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
            parts = {
                "crow": tensor.crow_indices(),
                "col": tensor.col_indices(),
                "values": tensor.values(),
            }
        elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
            parts = {
                "ccol": tensor.ccol_indices(),
                "row": tensor.row_indices(),
                "values": tensor.values(),
            }
        else:
            raise UsageError(
                f"cannot save a tensor of layout {tensor.layout}",
                where=show_path(path),
                expected="a strided or sparse tensor",
                remedy="make it dense first, with to_dense()",
            )
        parts = {k: v.detach() if isinstance(v, torch.Tensor) else v for k, v in parts.items()}
        layout = str(tensor.layout).removeprefix("torch.")
        copied = copy_tree(parts, self, path, allow_pickle=False)
        return Tagged("sparse", [layout, tuple(tensor.shape), copied])


def collect(
    value: object,
    *,
    volatile: frozenset[Path] = frozenset(),
    allow_pickle: bool = False,
    cache: CollectCache | None = None,
) -> Collected:
    """Take a state apart into its tree of plain values, its tensors as pieces, and shared memory.

    With a `cache`, a state that consists of common tensors is described in bulk, and if all its
    tensors still have the same memory as at the last save, it is only walked.
    """
    if cache is not None:
        again = None if cache.last is None else cache.last.again(value, volatile)
        if again is not None:
            return again
        cache.last = None
        common = _collect_common(value, volatile)
        if common is not None:
            collected, cache.last = common
            return collected
    collector = Collector(volatile, allow_pickle=allow_pickle)
    tree = copy_tree(value, collector, (), allow_pickle=allow_pickle)
    forms = TensorDescriptions(list(collector.tensors.values()))
    return replace(
        _collected(
            tree, collector.tensors, forms, collector.volatile_names, collector.trained_names
        ),
        layouts=collector.layouts,
        owners=collector.owners,
    )


def _collect_common(
    value: object, volatile: frozenset[Path]
) -> tuple[Collected, _Last | None] | None:
    """Take apart a state in which every leaf is a plain tensor or a DTensor whose memory is its
    values. Return None for any other state, which is then taken apart leaf by leaf, so that errors
    name the path."""
    walk = first_walk(value, _is_common, volatile)
    if walk is None or not walk.leaves:
        return None
    leaves: list[torch.Tensor] = walk.leaves  # type: ignore[assignment]
    try:
        places = TensorPlaces(leaves)
        layouts = {walk.names[n]: local_shard_of(leaves[n], "").layout for n in places.spread}  # type: ignore[arg-type]
    except (RuntimeError, UsageError):  # sparse, nested, or a partial placement
        return None
    # Not detached: the tensors outlive this save, so the next save recognises them.
    memories = places.memories(leaves)
    tensors = dict(zip(walk.names, memories, strict=True))
    if len(tensors) != len(memories) or not _are_common(memories, places):
        return None
    trained = set(compress(walk.names, map(_REQUIRES_GRAD, leaves)))
    collected = _collected(walk.tree, tensors, places.forms, walk.volatile_names, trained)
    collected = replace(collected, layouts=layouts)
    if collected.views:
        return collected, None
    own = [name not in collected.ties for name in walk.names]
    return collected, _Last(KnownState(walk), places, own, volatile, collected)


def _is_common(kind: type) -> bool:
    return kind in PLAIN_TENSORS or is_dtensor_class(kind)


def _are_common(memories: Sequence[torch.Tensor], places: TensorPlaces) -> bool:
    """Return True if all are plain tensors of known dtypes whose memory exists and is their
    values."""
    forms = places.forms
    looks = zip(
        forms.sizes, forms.storages, forms.offsets, forms.addresses, forms.contiguous, strict=True
    )
    # Most start at offset 0 of their storage and are contiguous. Only check the others one by one.
    odd = [
        number
        for number, (size, storage, offset, address, contiguous) in enumerate(looks)
        if size > storage or offset or not address or not contiguous
    ]
    return (
        PLAIN_TENSORS.issuperset(places.memory_kinds)
        and DTYPE_NAMES.keys() >= set(forms.dtypes)
        and "meta" not in forms.devices
        and all(is_backed(memories[number]) for number in odd)
        and places.are_values(memories)
    )


class _Last:
    """The state of an item at its last save, to recognise it at the next one."""

    def __init__(
        self,
        known: KnownState,
        places: TensorPlaces,
        own: list[bool],
        volatile: frozenset[Path],
        collected: Collected,
    ) -> None:
        self._known = known
        self._places = places
        self._own = own
        """True for each leaf that is a piece, and not tied to an earlier leaf."""
        self._volatile = volatile
        self._pieces, self._ties = collected.pieces, collected.ties
        self._layouts = collected.layouts

    def again(self, value: object, volatile: frozenset[Path]) -> Collected | None:
        """Take apart a state that differs from this one only in plain values; return None for any
        other."""
        met = self._known.walk(value) if volatile == self._volatile else None
        memories = None if met is None else self._places.again(met[1])
        if met is None or memories is None:
            return None
        return Collected(
            tree=met[0],
            pieces=self._pieces,
            sources=tuple(compress(memories, self._own)),
            ties=self._ties,
            layouts=self._layouts,
        )


def _collected(
    tree: object,
    tensors: dict[str, torch.Tensor],
    forms: TensorDescriptions,
    volatile: set[str],
    trained: set[str],
) -> Collected:
    ties, views, bases = _sharing(tensors, forms)
    own = tensors
    if ties or views:
        own = {n: t for n, t in tensors.items() if n not in ties and n not in views} | bases
        forms = TensorDescriptions(list(own.values()))
    loose = volatile | {view.base for name, view in views.items() if name in volatile}
    return Collected(
        tree=tree,
        pieces=tuple(_pieces(own, forms, loose, trained)),
        sources=tuple(own.values()),
        ties=ties,
        views=views,
        tensors=tensors,
    )


def _pieces(
    names: Iterable[str], forms: TensorDescriptions, volatile: set[str], trained: set[str]
) -> Iterator[Piece]:
    return map(
        Piece._make,
        zip(
            names,
            map(DTYPE_NAMES.__getitem__, forms.dtypes),
            map(tuple, forms.shapes),
            forms.sizes,
            forms.devices,
            forms.contiguous,
            map(volatile.__contains__, names),
            repeat(None),
            map(trained.__contains__, names),
        ),
    )


def _lie_apart(forms: TensorDescriptions) -> bool:
    """Return True if all are contiguous and no two share bytes: a quick test for the common
    case."""
    if not all(forms.contiguous):
        return False
    starts = np.array(forms.addresses, dtype=np.int64)
    sizes = np.array(forms.sizes, dtype=np.int64)
    order = np.argsort(starts)
    ends = (starts + sizes)[order]
    return not bool((starts[order][1:] < ends[:-1]).any())


def _sharing(
    tensors: dict[str, torch.Tensor], forms: TensorDescriptions
) -> tuple[dict[str, str], dict[str, View], dict[str, torch.Tensor]]:
    """Return ties, views and base tensors; the common case (nothing shared) takes one pass."""
    if _lie_apart(forms):
        return {}, {}, {}
    storages = {name: tensor.untyped_storage().data_ptr() for name, tensor in tensors.items()}
    if len(set(storages.values())) == len(storages):
        return {}, {}, {}
    extents = [_extent(name, tensor, storages[name]) for name, tensor in tensors.items()]
    ties = find_ties(extents)
    views: dict[str, View] = {}
    bases: dict[str, torch.Tensor] = {}
    for overlap in find_overlaps([extent for extent in extents if extent.name not in ties]):
        base_name = f"~6base{len(bases)}"
        # NumPy arrays at the same address each have their own storage, of the size of the array.
        storage = max(
            (tensors[member.name].untyped_storage() for member in overlap.members),
            key=torch.UntypedStorage.nbytes,
        )
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
                offset_bytes=int(tensor.storage_offset()) * tensor.element_size() - start,
            )
    return ties, views, bases


def _extent(name: str, tensor: torch.Tensor, storage: int) -> MemoryRange:
    start = int(tensor.storage_offset()) * tensor.element_size()
    window = (tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), start)
    return MemoryRange(name, storage, start, needed_bytes(tensor) or start, window)
