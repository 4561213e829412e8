"""Take a state apart into its tree of plain values, its tensors as pieces, and shared memory.

Copies no data of a tensor that training may change: `capture` does that.

Between two saves a training run keeps its tensors and changes its numbers. A walk through a state
therefore records a trace: the containers and keys of its tensors, in order. If a state leaves the
same trace as the last one, and its tensors have the same forms and addresses, only its plain values
are new. Traces and forms are lists that are filled and compared as a whole, because this runs while
training waits. No tensor is held between saves.
"""

from __future__ import annotations

import contextlib
import math
import pickle
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass, replace
from itertools import chain, compress, repeat
from operator import attrgetter, not_
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from laststep.codecs.objects import Tagged, TensorRef
from laststep.constants import with_article
from laststep.errors import UsageError
from laststep.state import tensors
from laststep.state.boxes import MemoryRange, find_overlaps, find_ties
from laststep.state.tree import (
    MAX_DEPTH,
    OWNED,
    PLAIN,
    Collected,
    Owned,
    Path,
    Piece,
    View,
    name_of,
    names_in,
    show_path,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from laststep.state.layouts import Layout

_Part = dict[object, object]
"""The tree of a container of tensors, or of such containers; never changed, so saves share it."""

_CONTAINERS: Final = frozenset({dict, OrderedDict, list, tuple, Owned})
_EXACT: Final = frozenset({str, int, bool, bytes, type(None)})
"""Key types for which equal keys are identical, unlike 0.0 and -0.0, or (1,) and (True,)."""
_SMALL_BYTES = 4096
_ARRAYS: Final = frozenset({np.ndarray, np.memmap})
"""Array types that consist of their elements only, unlike masked arrays."""
_INTEGERS = ("u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8")
_ARRAY_DTYPES: Final = set(map(np.dtype, ("?", *_INTEGERS, "f2", "f4", "f8", "c8", "c16")))
_SPARSE: Final = {"sparse_coo", *tensors.COMPRESSED}
_BASE_ALIGN = 16
"""The size of the largest element, so that every view of a base is aligned."""


class _Different(Exception):
    """The state is not the known one; never leaves this module."""


class _Walk:
    """One walk through a state: copies its containers and plain values, and notes its tensors.

    In bulk, containers of plain tensors and DTensors are noted without a look at each tensor. With
    `known`, the parts of the tree of a known state, only the trace and the tensors are noted.
    """

    def __init__(
        self,
        volatile: frozenset[Path],
        *,
        allow_pickle: bool,
        in_bulk: bool = True,
        known: Iterator[_Part] | None = None,
    ) -> None:
        self._volatile = volatile
        self._allow_pickle = allow_pickle
        self._in_rows = (
            tensors.PLAIN_TENSORS | {tensors.dtensor_class()} if in_bulk else frozenset()
        )
        self._known = known
        self.names: list[str] = []
        self.leaves: list[torch.Tensor] = []
        self.keys: list[object] = []
        """For every row of tensors, or rows under several names: the path, the names, the keys."""
        self.sizes: list[int] = []
        """How many of each."""
        self.parts: list[_Part] = []
        self.is_common = True
        """False if a leaf was met that cannot be noted in bulk."""
        self.volatile_names: set[str] = set()
        self.trained_names: set[str] = set()
        self.layouts: dict[str, Layout] = {}
        self.owners: dict[str, object] = {}

    def copy(self, value: Any, path: Path) -> object:
        """Return the tree of a value, with a `TensorRef` or `Tagged` for every leaf."""
        kind = type(value)
        if kind in PLAIN or (kind is bytes and len(value) <= _SMALL_BYTES):
            return value
        if kind is Owned:
            return Tagged(OWNED, [value.owner, self.copy(value.state, path)])
        if kind not in _CONTAINERS:
            return self._leaf(value, path)
        if len(path) > MAX_DEPTH:
            raise _too_deep(path)
        if kind is dict:
            return self._entries(value, path)
        if kind is OrderedDict:
            return OrderedDict(self._entries(dict(value), path))
        return kind(self._entries(dict(enumerate(value)), path).values())

    def _entries(self, named: dict[object, Any], path: Path) -> dict[object, object]:
        kinds = set(map(type, named.values()))
        if kinds <= PLAIN:
            return dict(named)
        if kinds <= self._in_rows:
            return self._note(path, (), (named,))
        if kinds == {dict}:  # optimizer state: thousands of dicts
            rows = named.values()
            inner = set(map(type, chain.from_iterable(map(dict.values, rows))))
            if inner and inner <= self._in_rows:
                if len(path) == MAX_DEPTH:
                    raise _too_deep((*path, None))
                return self._note(path, named, rows)
        copied: dict[object, object] = {}
        for key, value in named.items():
            kind = type(value)
            if kind in PLAIN:
                copied[key] = value
            elif kind in self._in_rows:
                copied[key] = self._note(path, (), ({key: value},)).get(key)
            else:
                copied[key] = self.copy(value, (*path, key))
        return copied

    def _note(
        self, path: Path, names: Collection[object], rows: Collection[dict[object, Any]]
    ) -> _Part:
        """Note one container of tensors, or all those in `names`, and return its tree."""
        self.leaves += chain.from_iterable(map(dict.values, rows))
        self.keys += path
        self.keys += names
        self.keys += chain.from_iterable(rows)
        self.sizes += (len(path), len(names), len(rows))
        self.sizes += map(len, rows)
        if self._known is not None:
            part = next(self._known, None)
            if part is None:
                raise _Different
            return part
        trees: list[_Part] = []
        paths = map(path.__add__, zip(names)) if names else (path,)  # zip: keys as paths of one
        for row_path, row in zip(paths, rows, strict=True):
            own = names_in(row_path, row)
            self.names += own
            if self._volatile:
                is_volatile = map(self._volatile.__contains__, map(row_path.__add__, zip(row)))
                self.volatile_names.update(compress(own, is_volatile))
            trees.append(dict(zip(row, map(TensorRef, own), strict=True)))
        self.parts.append(dict(zip(names, trees, strict=True)) if names else trees[0])
        return self.parts[-1]

    def _leaf(self, value: Any, path: Path) -> object:
        if self._known is not None:
            raise _Different
        self.is_common = False
        kind = type(value)
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        if kind is tensors.LocalShard:
            return self._local_shard(value, value, path)
        if kind in _ARRAYS and value.dtype.newbyteorder("=") in _ARRAY_DTYPES:
            return Tagged("ndarray", [value.dtype.str, self._keep(_tensor_of(value), path)])
        if isinstance(value, np.generic) and not value.dtype.hasobject and value.dtype.kind != "V":
            return Tagged("scalar", [value.dtype.str, value.tobytes()])
        if kind is Counter:  # MultiStepLR keeps its milestones in a Counter
            return Tagged("counter", self.copy(dict(value), path))
        if kind is bytes:  # larger ones than the tree keeps as text
            return Tagged(
                "bytes", self._keep(torch.frombuffer(bytearray(value), dtype=torch.uint8), path)
            )
        if isinstance(value, torch.dtype):
            return Tagged("dtype", str(value).removeprefix("torch."))
        if isinstance(value, torch.device):
            return Tagged("device", str(value))
        if isinstance(value, torch.Size):
            return Tagged("size", tuple(value))
        return self._uncommon(value, path)

    def _uncommon(self, value: Any, path: Path) -> object:
        if len(path) > MAX_DEPTH:
            raise _too_deep(path)
        kind = type(value)
        if kind is deque:
            entries = [self.copy(inner, (*path, i)) for i, inner in enumerate(value)]
            return deque(entries, value.maxlen)
        if kind in (set, frozenset, bytearray):
            return kind(value)
        if isinstance(value, tuple) and hasattr(value, "_fields") and hasattr(value, "_make"):
            named = zip(value._fields, value, strict=True)
            return value._make([self.copy(inner, (*path, name)) for name, inner in named])
        if kind is slice:
            ends = enumerate((value.start, value.stop, value.step))
            return slice(*[self.copy(end, (*path, i)) for i, end in ends])
        why = None
        if self._allow_pickle:
            try:
                return Tagged("pickle", pickle.dumps(value, protocol=4))
            except Exception as error:  # noqa: BLE001 (a user's class may raise anything)
                why = str(error)
        raise UsageError(
            f"cannot save {with_article(f'{kind.__module__}.{kind.__qualname__}')}",
            where=show_path(path),
            expected="tensors, arrays, containers, plain values, or objects to pickle",
            found=why,
            remedy="leave it out, add state_dict() and load_state_dict() to its class, or pass "
            "allow_pickle=True",
        )

    def _keep(self, tensor: torch.Tensor, path: Path) -> TensorRef:
        name = name_of(path)
        self.names.append(name)
        self.leaves.append(tensor)
        if path in self._volatile:
            self.volatile_names.add(name)
        return TensorRef(name)

    def _tensor(self, tensor: torch.Tensor, path: Path) -> object:
        if type(tensor) not in tensors.PLAIN_TENSORS:
            return self._subclass(tensor, path)
        layout = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
        if layout in _SPARSE:
            return self._sparse(tensor.detach(), layout, path)
        if layout != "strided" or tensor.is_meta or tensor.dtype not in tensors.DTYPE_NAMES:
            raise _refused(
                f"a {layout} {tensor.device.type} tensor of {tensor.dtype}",
                path,
                "materialise it with to_empty(), dequantise it, make it dense, or save its parts",
                expected="a strided or sparse tensor of a plain dtype, with data",
            )
        if not tensors.is_backed(tensor):
            size_bytes = tensor.untyped_storage().nbytes() if tensor.data_ptr() else 0
            raise UsageError(
                "cannot copy a tensor: its memory was freed, or its storage is too small",
                where=show_path(path),
                expected=f"a storage of at least {tensors.needed_bytes(tensor)} bytes",
                found=f"{size_bytes} bytes",
                remedy="bring its data back first, e.g. unshard or reload what was offloaded",
            )
        detached = tensor.detach() if tensor.requires_grad else tensor
        if tensor.is_conj() or tensor.is_neg():
            detached = detached.resolve_conj().resolve_neg()
        ref = self._keep(detached, path)
        if tensor.requires_grad:
            self.trained_names.add(ref.name)
        return ref

    def _local_shard(self, shard: tensors.LocalShard, owner: object, path: Path) -> object:
        ref = self._tensor(shard.local.detach(), path)
        if not isinstance(ref, TensorRef):
            raise _refused("a shard of a tensor that is not plain", path)
        if getattr(owner, "requires_grad", False):
            self.trained_names.add(ref.name)
        self.layouts[ref.name] = shard.layout
        self.owners[ref.name] = owner
        return ref

    def _subclass(self, tensor: torch.Tensor, path: Path) -> object:
        if tensors.is_dtensor(tensor):
            return self._local_shard(tensors.local_shard_of(tensor, show_path(path)), tensor, path)  # type: ignore[arg-type]
        handler = tensors.handler_for(type(tensor))
        if handler is not None:
            return Tagged("subclass", [handler.name, self.copy(handler.to_parts(tensor), path)])
        raise _refused(
            f"the tensor subclass {type(tensor).__qualname__}",
            path,
            "run one forward pass first if it is an uninitialised parameter, or teach laststep its "
            "parts with laststep.register_tensor_type",
        )

    def _sparse(self, tensor: torch.Tensor, layout: str, path: Path) -> object:
        parts: dict[str, object]
        if layout == "sparse_coo":
            # indices() and values() would require coalescing, which changes the stored tensor.
            parts = {"indices": tensor._indices(), "values": tensor._values()}
            parts["coalesced"] = tensor.is_coalesced()
        else:
            parts = {
                name: getattr(tensor, f"{name}_indices")() for name in tensors.COMPRESSED[layout]
            }
            parts["values"] = tensor.values()
        return Tagged("sparse", [layout, tuple(tensor.shape), self.copy(parts, path)])


def _refused(
    what: str, path: Path, remedy: str | None = None, *, expected: str | None = None
) -> UsageError:
    return UsageError(
        f"cannot save {what}", where=show_path(path), expected=expected, remedy=remedy
    )


def _too_deep(path: Path) -> UsageError:
    what = "a state nested this deeply, or that contains itself"
    return _refused(what, (*path[:8], ...), expected=f"at most {MAX_DEPTH} levels")


def _tensor_of(array: np.ndarray) -> torch.Tensor:
    # torch has no foreign byte order, no read-only memory, and no strides that are negative or not
    # a whole number of elements: copy such an array in native order.
    has_odd_strides = min(array.strides, default=0) < 0 or math.gcd(*array.strides) % array.itemsize
    if not array.flags.writeable or not array.dtype.isnative or has_odd_strides:
        array = array.astype(array.dtype.newbyteorder("="), copy=True)
    return torch.from_numpy(array)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    """The last state of an item, without its tensors, to recognise it at the next save."""

    volatile: frozenset[Path]
    keys: list[object]
    key_kinds: list[type]
    """Equal keys of different types, such as 1 and True, have different names."""
    inexact: dict[int, str]
    """The names of keys that may be equal without being identical, by their position."""
    sizes: list[int]
    parts: list[_Part]
    kinds: list[type]
    dtensors: list[object]
    forms: tensors.TensorForms
    own: list[bool]
    """True for each tensor that is a piece, and not tied to an earlier one."""
    collected: Collected


@dataclass(slots=True)
class CollectCache:
    """The result of the last save of an item; holds no tensor memory."""

    last: _Known | None = None


def collect(
    value: object,
    *,
    volatile: frozenset[Path] = frozenset(),
    allow_pickle: bool = False,
    cache: CollectCache | None = None,
) -> Collected:
    """Take a state apart. With a `cache`, tensors are described in bulk; if all still have the form
    and memory of the last save, the state is only walked."""
    if cache is not None:
        with contextlib.suppress(_Different, RuntimeError, UsageError):
            return _recognise(cache.last, value, volatile)
        cache.last = None
        # A sparse or nested tensor raises, or the walk below raises the error with its path.
        with contextlib.suppress(_Different, RuntimeError, UsageError):
            return _collect_in_bulk(value, volatile, cache, allow_pickle=allow_pickle)
    walk = _Walk(volatile, allow_pickle=allow_pickle, in_bulk=False)
    tree = walk.copy(value, ())
    named = dict(zip(walk.names, walk.leaves, strict=True))
    return _describe(walk, tree, named, tensors.forms_of(list(named.values())))


def _recognise(known: _Known | None, value: object, volatile: frozenset[Path]) -> Collected:
    """Take apart a state that differs from the known one only in plain values. Raise `_Different`,
    `RuntimeError` or `UsageError` for any other."""
    if known is None or volatile != known.volatile:
        raise _Different
    walk = _Walk(volatile, allow_pickle=False, known=iter(known.parts))
    tree = walk.copy(value, ())
    if (
        walk.sizes != known.sizes
        or list(map(type, walk.keys)) != known.key_kinds
        or walk.keys != known.keys
        or any(name_of((walk.keys[at],)) != name for at, name in known.inexact.items())
    ):
        raise _Different
    memories, dtensors = _memories(walk.leaves)
    if (
        list(map(type, memories)) != known.kinds
        or dtensors != known.dtensors
        or tensors.forms_of(memories) != known.forms
    ):
        raise _Different
    return replace(known.collected, tree=tree, sources=tuple(compress(memories, known.own)))


def _collect_in_bulk(
    value: object, volatile: frozenset[Path], cache: CollectCache, *, allow_pickle: bool
) -> Collected:
    """Take apart a state of common tensors, without a look at each of them, and remember it if it
    can be recognised. Raise `_Different`, `RuntimeError` or `UsageError` for any other."""
    walk = _Walk(volatile, allow_pickle=allow_pickle)
    tree = walk.copy(value, ())
    memories, dtensors = _memories(walk.leaves)
    forms = tensors.forms_of(memories)
    named = dict(zip(walk.names, memories, strict=True))
    if len(named) != len(memories) or not _are_common(memories, forms):
        raise _Different
    # Not detached: the tensors outlive this save, so that early copies recognise them.
    walk.trained_names.update(compress(walk.names, map(attrgetter("requires_grad"), walk.leaves)))
    for number, *_spec in dtensors:
        walk.layouts[walk.names[number]] = tensors.local_shard_of(walk.leaves[number], "").layout
    collected = _describe(walk, tree, named, forms)
    if walk.is_common and walk.leaves and not collected.views:
        odd = {at: key for at, key in enumerate(walk.keys) if type(key) not in _EXACT}
        cache.last = _Known(
            volatile=volatile,
            keys=walk.keys,
            key_kinds=list(map(type, walk.keys)),
            inexact={at: name_of((key,)) for at, key in odd.items()},
            sizes=walk.sizes,
            parts=walk.parts,
            kinds=list(map(type, memories)),
            dtensors=dtensors,
            forms=forms,
            own=list(map(not_, map(collected.ties.__contains__, walk.names))),
            collected=replace(collected, tree=None, sources=(), tensors={}),
        )
    return collected


def _memories(leaves: Sequence[torch.Tensor]) -> tuple[Sequence[torch.Tensor], list[Any]]:
    """Return each tensor's memory; for DTensors also positions and what layouts depend on."""
    kind = tensors.dtensor_class()
    if kind not in set(map(type, leaves)):
        return leaves, []
    memories, dtensors = list(leaves), []
    for number, leaf in enumerate(leaves):
        if type(leaf) is kind:
            memories[number] = leaf._local_tensor  # type: ignore[attr-defined]
            spec = leaf._spec  # type: ignore[attr-defined]
            dtensors.append((number, spec.mesh, spec.placements, leaf.shape))
    return memories, dtensors


def _are_common(memories: Sequence[torch.Tensor], forms: tensors.TensorForms) -> bool:
    if (
        forms.marked
        or not tensors.PLAIN_TENSORS.issuperset(map(type, memories))
        or not tensors.DTYPE_NAMES.keys() >= set(forms.dtypes)
    ):
        return False
    sizes, offsets = map(_NBYTES, memories), map(torch.Tensor.storage_offset, memories)
    for memory, size, storage, offset, address, contiguous in zip(
        memories, sizes, forms.storages, offsets, forms.addresses, forms.contiguous, strict=True
    ):
        # Most have an address, start at offset 0 of their storage and are contiguous.
        is_odd = size > storage or offset or not address or not contiguous
        if is_odd and (memory.is_meta or not tensors.is_backed(memory)):
            return False
    return True


_NBYTES: Final = attrgetter("nbytes")


def _describe(
    walk: _Walk, tree: object, named: dict[str, torch.Tensor], forms: tensors.TensorForms
) -> Collected:
    ties, views, bases = _sharing(named, forms)
    own, volatile = named, walk.volatile_names
    if ties or views:
        own = {n: t for n, t in named.items() if n not in ties and n not in views} | bases
        forms = tensors.forms_of(list(own.values()))
        volatile = volatile | {view.base for name, view in views.items() if name in volatile}
    devices = list(map(attrgetter("device"), own.values()))
    texts: dict[torch.device, str] = {}
    for device in set(devices):
        texts[device] = "cpu" if device.type == "cpu" else str(device)
    pieces = zip(
        own,
        map(tensors.DTYPE_NAMES.__getitem__, forms.dtypes),
        map(tuple, forms.shapes),
        map(_NBYTES, own.values()),
        map(texts.__getitem__, devices),
        forms.contiguous,
        map(volatile.__contains__, own),
        repeat(None),
        map(walk.trained_names.__contains__, own),
    )
    return Collected(
        tree=tree,
        pieces=tuple(map(Piece._make, pieces)),
        sources=tuple(own.values()),
        ties=ties,
        views=views,
        tensors=named,
        layouts=walk.layouts,
        owners=walk.owners,
    )


def _sharing(
    named: dict[str, torch.Tensor], forms: tensors.TensorForms
) -> tuple[dict[str, str], dict[str, View], dict[str, torch.Tensor]]:
    """Return ties, views and base tensors; the common case (nothing shared) takes one pass."""
    if all(forms.contiguous):
        starts = np.array(forms.addresses, dtype=np.int64)
        sizes = np.fromiter(map(_NBYTES, named.values()), dtype=np.int64, count=len(named))
        order = np.argsort(starts)
        ends = (starts + sizes)[order]
        if not (starts[order][1:] < ends[:-1]).any():
            return {}, {}, {}
    storages = {name: tensor.untyped_storage().data_ptr() for name, tensor in named.items()}
    if len(set(storages.values())) == len(storages):
        return {}, {}, {}
    extents: list[MemoryRange] = []
    for name, tensor in named.items():
        start = int(tensor.storage_offset()) * tensor.element_size()
        stop = tensors.needed_bytes(tensor) or start
        window = (tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), start)
        extents.append(MemoryRange(name, storages[name], start, stop, window))
    ties = find_ties(extents)
    views: dict[str, View] = {}
    bases: dict[str, torch.Tensor] = {}
    for overlap in find_overlaps([extent for extent in extents if extent.name not in ties]):
        base_name = f"~6base{len(bases)}"
        # NumPy arrays at the same address each have their own storage, of the size of the array.
        storage = max(
            (named[member.name].untyped_storage() for member in overlap),
            key=torch.UntypedStorage.nbytes,
        )
        whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        start = overlap[0].start // _BASE_ALIGN * _BASE_ALIGN
        bases[base_name] = whole[start : max(member.stop for member in overlap)]
        for member in overlap:
            tensor = named[member.name]
            views[member.name] = View(
                base=base_name,
                dtype=tensors.DTYPE_NAMES[tensor.dtype],
                shape=tuple(tensor.shape),
                stride=tuple(tensor.stride()),
                offset_bytes=int(tensor.storage_offset()) * tensor.element_size() - start,
            )
    return ties, views, bases
