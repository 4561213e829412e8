"""Staging that began on a guess: what is known of the last capture, and what was copied again.

Only pieces that are staged on a device matter here. Nothing holds a tensor's memory between saves.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from laststep.engine.copy.layout import Layout
    from laststep.engine.copy.staging import DeviceStaging


class Remembered:
    """Which tensors the last capture staged on devices, and where they were."""

    def __init__(self, layout: Layout, sources: Sequence[torch.Tensor]) -> None:
        self.layout = layout
        self._known = [
            (piece, weakref.ref(sources[piece]), sources[piece].data_ptr())
            for piece in _staged_on_devices(layout)
        ]

    def sources_in_place(self) -> dict[int, torch.Tensor] | None:
        """All of them by piece, held, if each is alive and where it was; else None."""
        held: dict[int, torch.Tensor] = {}
        for piece, ref, address in self._known:
            source = ref()
            if source is None or source.data_ptr() != address:
                return None
            held[piece] = source
        return held

    def same_as(self, layout: Layout, sources: Sequence[torch.Tensor]) -> bool:
        return layout is self.layout and all(
            ref() is sources[piece] and sources[piece].data_ptr() == address
            for piece, ref, address in self._known
        )


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
    """Copies that are under way before it is known whether they are the right ones."""

    layout: Layout
    sources: dict[int, torch.Tensor]
    staging: dict[str, torch.Tensor] = field(default_factory=dict)
    events: dict[str, tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=dict)

    def let_go(self, staging: Mapping[str, DeviceStaging]) -> None:
        """The guess was wrong: give the memory back; stream order keeps it until the copies end."""
        for device, buffer in self.staging.items():
            staging[device].give_back(buffer.nbytes)
        self.staging.clear()
