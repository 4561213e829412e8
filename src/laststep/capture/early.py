"""Staging that started on a guess: the addresses of the last capture, and the copies made from
them.

Concerns only pieces staged on a device. Nothing holds tensor memory between saves.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from laststep.state.tensors import KnownTensors

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from laststep.capture.layout import Layout
    from laststep.capture.staging import DeviceStaging


class Remembered:
    """The tensors that the last capture staged on devices, and their addresses."""

    def __init__(self, layout: Layout, sources: Sequence[torch.Tensor]) -> None:
        self.layout = layout
        self._pieces = _staged_on_devices(layout)
        self._kept = KnownTensors(self._of(sources))

    def in_place(self) -> list[torch.Tensor] | None:
        """Return all of them, held, if each is alive and in place; else None."""
        return self._kept.in_place()

    def are_among(self, sources: Sequence[torch.Tensor], held: Sequence[torch.Tensor]) -> bool:
        """Return whether the held tensors are exactly those that a save of `sources` stages."""
        return all(map(operator.is_, self._of(sources), held))

    def _of(self, sources: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [sources[piece] for piece in self._pieces]


def _staged_on_devices(layout: Layout) -> list[int]:
    return [
        span.piece
        for device, groups in layout.gathers.items()
        if device != "cpu"
        for group in groups
        for span in group.spans
    ]


@dataclass(slots=True)
class Early:
    """Copies that are running before it is known whether they are the right ones."""

    of: Remembered
    sources: list[torch.Tensor]
    """The tensors being copied, held."""
    staging: dict[str, torch.Tensor] = field(default_factory=dict)
    events: dict[str, tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=dict)

    def is_of(self, known: Remembered | None, sources: Sequence[torch.Tensor]) -> bool:
        """Return whether they are exactly what a save of these sources stages."""
        return self.of is known and self.of.are_among(sources, self.sources)

    def let_go(self, staging: Mapping[str, DeviceStaging]) -> None:
        """Return the memory after a wrong guess; stream order keeps it until the copies end."""
        for device, buffer in self.staging.items():
            staging[device].give_back(buffer.nbytes)
        self.staging.clear()
