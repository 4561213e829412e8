"""Staging that began on a guess: what is known of the last capture, and what was copied again.

Nothing here holds a tensor's memory between saves.
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
    """Which tensors the last capture read, and where they were."""

    def __init__(self, layout: Layout, sources: Sequence[torch.Tensor]) -> None:
        self.layout = layout
        self._known = [(weakref.ref(source), source.data_ptr()) for source in sources]

    def sources_in_place(self) -> list[torch.Tensor] | None:
        """All of them, held, if each is alive and where it was; else None."""
        held: list[torch.Tensor] = []
        for ref, address in self._known:
            source = ref()
            if source is None or source.data_ptr() != address:
                return None
            held.append(source)
        return held

    def same_as(self, layout: Layout, sources: Sequence[torch.Tensor]) -> bool:
        return layout is self.layout and all(
            ref() is source for (ref, _), source in zip(self._known, sources, strict=True)
        )


@dataclass(slots=True)
class Early:
    """Copies that are under way before it is known whether they are the right ones."""

    layout: Layout
    sources: list[torch.Tensor]
    staging: dict[str, torch.Tensor] = field(default_factory=dict)
    events: dict[str, tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=dict)

    def let_go(self, staging: Mapping[str, DeviceStaging]) -> None:
        """The guess was wrong: give the memory back; stream order keeps it until the copies end."""
        for device, buffer in self.staging.items():
            staging[device].give_back(buffer.nbytes)
        self.staging.clear()
