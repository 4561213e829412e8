"""Where tensors lie and in which form, looked at all at once, to be compared with the next look.

Every question is asked of all tensors by one `map`, without a Python call for each: a state has
thousands, and training waits. Holds no tensor, and so no memory, between the looks.
"""

from __future__ import annotations

import operator
import weakref
from itertools import repeat
from typing import TYPE_CHECKING, Final

import torch

from laststep.state.tensors.local_parts import is_dtensor_class

if TYPE_CHECKING:
    from collections.abc import Sequence

_SHAPE: Final = operator.attrgetter("shape")
_DTYPE: Final = operator.attrgetter("dtype")
_NBYTES: Final = operator.attrgetter("nbytes")
_DEVICE: Final = operator.attrgetter("device")
_DATA_PTR: Final = torch.Tensor.data_ptr
_IS_CONTIGUOUS: Final = torch.Tensor.is_contiguous
_IS_NEGATIVE: Final = torch.Tensor.is_neg
_IS_CONJUGATE: Final = torch.Tensor.is_conj
_LOCAL: Final = operator.attrgetter("_local_tensor")
_LAYOUT: Final = operator.attrgetter("_spec.mesh", "_spec.placements", "shape")
"""What `laid_of` makes the layout of a DTensor from."""


class TensorForms:
    """Shapes, dtypes and places of strided tensors. Of what has become something else no question
    need be asked: a nested tensor has no shape, a sparse or MKL-DNN one no address, and says so."""

    def __init__(self, memories: Sequence[torch.Tensor]) -> None:
        self.shapes = list(map(_SHAPE, memories))
        self.dtypes = list(map(_DTYPE, memories))
        self.addresses = list(map(_DATA_PTR, memories))
        self.storages = _storages(memories)
        self.contiguous = list(map(_IS_CONTIGUOUS, memories))

    def are_those_of(self, memories: Sequence[torch.Tensor]) -> bool:
        """Whether these are of the same forms at the same places."""
        try:
            return (
                list(map(_SHAPE, memories)) == self.shapes
                and list(map(_DTYPE, memories)) == self.dtypes
                and list(map(_DATA_PTR, memories)) == self.addresses
                and _storages(memories) == self.storages
                and list(map(_IS_CONTIGUOUS, memories)) == self.contiguous
            )
        except RuntimeError:
            return False


class TensorDescriptions(TensorForms):
    """With what follows from these, and is not compared: their sizes and devices."""

    def __init__(self, memories: Sequence[torch.Tensor]) -> None:
        super().__init__(memories)
        self.sizes = list(map(_NBYTES, memories))
        self.devices = list(map(_DEVICE, memories))


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


def _storages(memories: Sequence[torch.Tensor]) -> list[int]:
    """How large their storages are, which can shrink under a tensor that keeps its shape."""
    return list(map(torch.UntypedStorage.nbytes, map(torch.Tensor.untyped_storage, memories)))


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
