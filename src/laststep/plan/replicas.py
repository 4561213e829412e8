"""Find the tensors that several ranks hold whole though nothing says that they are equal.

Pure. What the ranks have of these can be compared by one digest for each set of ranks that hold the
same tensors; there are as many sets as there are ways in which classes of ranks overlap: few.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from laststep.plan.tables import Replicas

if TYPE_CHECKING:
    from laststep.plan.tables import Agreement, Key


class ReplicatedTensors(NamedTuple):
    """Tensors that the ranks of the same classes hold, and the lowest of these ranks, whose are
    stored."""

    classes: tuple[int, ...]
    keys: tuple[Key, ...]
    lowest: int


def held_alike(agreement: Agreement) -> tuple[ReplicatedTensors, ...]:
    """All that should be equal on several ranks, in an order that is the same for everybody."""
    holders: dict[Key, list[int]] = {}
    for number, alike in enumerate(agreement.classes):
        for item in alike.table:
            for tensor in () if item.per_rank else item.tensors:
                if tensor.replicas is Replicas.UNPROVEN:
                    holders.setdefault((item.name, tensor.name), []).append(number)
    held: dict[tuple[int, ...], list[Key]] = {}
    for key, numbers in holders.items():
        if sum(len(agreement.classes[number].ranks) for number in numbers) > 1:
            held.setdefault(tuple(numbers), []).append(key)
    return tuple(
        ReplicatedTensors(
            numbers, tuple(keys), min(agreement.classes[number].ranks[0] for number in numbers)
        )
        for numbers, keys in held.items()
    )
