"""Where tensors lie and in which form, looked at all at once, to be compared with the next look.

Every question is asked of all tensors by one `map`, without a Python call for each: a state has
thousands, and training waits. Holds no tensor, and so no memory, between the looks.
"""

from __future__ import annotations

import operator
import weakref
from itertools import repeat
from typing import TYPE_CHECKING, Final, TypeVar

import torch

from laststep.state.tensors.local_parts import is_dtensor_class

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_T = TypeVar("_T")

_SHAPE: Final = operator.attrgetter("shape")
_DTYPE: Final = operator.attrgetter("dtype")
_NBYTES: Final = operator.attrgetter("nbytes")
_DEVICE: Final = operator.attrgetter("device")
_DATA_PTR: Final = torch.Tensor.data_ptr
_OFFSET: Final = torch.Tensor.storage_offset
_STORAGE: Final = torch.Tensor.untyped_storage
_STORAGE_BYTES: Final = torch.UntypedStorage.nbytes
_IS_CONTIGUOUS: Final = torch.Tensor.is_contiguous
_IS_NEGATIVE: Final = torch.Tensor.is_neg
_IS_CONJUGATE: Final = torch.Tensor.is_conj
_LOCAL: Final = operator.attrgetter("_local_tensor")
_LAYOUT: Final = operator.attrgetter("_spec.mesh", "_spec.placements", "shape")
"""What `laid_of` makes the layout of a DTensor from."""


def in_batches(many: Sequence[_T]) -> Iterator[Sequence[_T]]:
    """The same, some at a time: few enough to stay in the processor's cache while several questions
    are asked of each, which is 1.6 times as fast for 100,000."""
    return (many[first : first + 1024] for first in range(0, len(many), 1024))


class TensorForms:
    """Shapes, dtypes and places of strided tensors. Of what has become something else no question
    need be asked: a nested tensor has no shape, a sparse or MKL-DNN one no address, and says so."""

    def __init__(self, memories: Sequence[torch.Tensor]) -> None:
        self.shapes: list[torch.Size] = []
        self.dtypes: list[torch.dtype] = []
        self.addresses: list[int] = []
        self.storages: list[int] = []
        """How large their storages are, which can shrink under a tensor that keeps its shape."""
        self.contiguous: list[bool] = []
        for some in in_batches(memories):
            self._look_at(some)

    def _look_at(self, some: Sequence[torch.Tensor]) -> None:
        self.shapes += map(_SHAPE, some)
        self.dtypes += map(_DTYPE, some)
        self.addresses += map(_DATA_PTR, some)
        self.storages += map(_STORAGE_BYTES, map(_STORAGE, some))
        self.contiguous += map(_IS_CONTIGUOUS, some)

    def are_those_of(self, memories: Sequence[torch.Tensor]) -> bool:
        """Whether these are of the same forms at the same places."""
        try:
            now = TensorForms(memories)
        except RuntimeError:
            return False
        return (
            now.addresses == self.addresses
            and now.storages == self.storages
            and now.shapes == self.shapes
            and now.dtypes == self.dtypes
            and now.contiguous == self.contiguous
        )


class TensorDescriptions(TensorForms):
    """With what follows from these, and is not compared: sizes, devices, places in storages."""

    def __init__(self, memories: Sequence[torch.Tensor]) -> None:
        self.sizes: list[int] = []
        self.devices: list[str] = []
        self.offsets: list[int] = []
        super().__init__(memories)

    def _look_at(self, some: Sequence[torch.Tensor]) -> None:
        super()._look_at(some)
        self.sizes += map(_NBYTES, some)
        self.offsets += map(_OFFSET, some)  # type: ignore[arg-type]
        devices = list(map(_DEVICE, some))
        names = {device: _device_name(device) for device in set(devices)}
        self.devices += map(names.__getitem__, devices)


def _device_name(device: torch.device) -> str:
    return "cpu" if device.type == "cpu" else str(device)


class TensorPlaces:
    """Where plain tensors lie, and DTensors. Their memory MUST be their values: nothing that is
    only marked as negated or conjugated."""

    def __init__(self, leaves: Sequence[torch.Tensor]) -> None:
        self._kinds = list(map(type, leaves))
        kinds = {kind: is_dtensor_class(kind) for kind in set(self._kinds)}
        self.spread: list[int] = []
        if any(kinds.values()):
            self.spread = [number for number, kind in enumerate(self._kinds) if kinds[kind]]
        self._layouts = [_LAYOUT(leaves[number]) for number in self.spread]
        memories = self.memories(leaves)
        self.memory_kinds = list(map(type, memories)) if self.spread else self._kinds
        self.forms = TensorDescriptions(memories)
        self._complex = [n for n, dtype in enumerate(self.forms.dtypes) if dtype.is_complex]
        # Of these more than address, shape, dtype and being contiguous tells what they are.
        self._odd = [
            number
            for number, (address, contiguous) in enumerate(
                zip(self.forms.addresses, self.forms.contiguous, strict=True)
            )
            if not contiguous or not address
        ]
        self._details = [_details(memories[number]) for number in self._odd]

    def again(self, leaves: Sequence[object]) -> Sequence[torch.Tensor] | None:
        """The memory of each of these, of DTensors the local part, if all are the same bytes in the
        same form as those before were; else None."""
        if list(map(type, leaves)) != self._kinds:
            return None
        tensors: Sequence[torch.Tensor] = leaves  # type: ignore[assignment]
        if [_LAYOUT(tensors[number]) for number in self.spread] != self._layouts:
            return None
        memories = self.memories(tensors)
        same = (
            (memories is leaves or list(map(type, memories)) == self.memory_kinds)
            and self.forms.are_those_of(memories)
            and [_details(memories[number]) for number in self._odd] == self._details
            and self.are_values(memories)
        )
        return memories if same else None

    def are_values(self, memories: Sequence[torch.Tensor]) -> bool:
        """Whether none of these is only marked as negated or conjugated."""
        return not any(map(_IS_NEGATIVE, memories)) and not any(
            _IS_CONJUGATE(memories[number]) for number in self._complex
        )

    def memories(self, leaves: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The memory of each on this rank."""
        if not self.spread:
            return leaves
        memories = list(leaves)
        for number in self.spread:
            memories[number] = _LOCAL(memories[number])
        return memories


def _details(memory: torch.Tensor) -> tuple[object, ...]:
    return memory.stride(), memory.device


class KnownTensors:
    """Tensors to be found again without asking whose they are, if they are alive and in place."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._refs = list(map(weakref.ref, tensors))
        self._forms = TensorForms(tensors)

    def in_place(self) -> list[torch.Tensor] | None:
        """All of them, held, if each is alive and has the form and the memory that it had."""
        alive: list[torch.Tensor | None] = list(map(operator.call, self._refs))
        if any(map(operator.is_, alive, repeat(None))):
            return None
        tensors: list[torch.Tensor] = alive  # type: ignore[assignment]
        return tensors if self._forms.are_those_of(tensors) else None
