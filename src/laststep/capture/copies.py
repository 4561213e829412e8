"""How a plan is carried out: capture modes, layout and address tables.

Made with a plan and replaced with it, so it never describes another state. Holds no memory of the
state. Belongs to the training thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from laststep.capture.early import Remembered
from laststep.capture.gather import Gatherer
from laststep.capture.layout import lower
from laststep.capture.unchanged import ChunkLooks

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from laststep.capture.layout import Layout
    from laststep.capture.ring import Route
    from laststep.capture.ways import Choice
    from laststep.plan.files import SavePlan


EARLY_PAYS_BYTES: Final = 2 << 20
"""Average tensor size from which an early copy pays off: checking that a tensor is in place takes
the training thread a microsecond, in which an H200 copies this much."""


class Copies:
    """The copies of a plan."""

    layout: Layout
    """The layout of the last choice of modes; set by `go`."""
    looks: ChunkLooks
    """Digests of its chunks in earlier saves; used by the capture thread."""

    def __init__(self, plan: SavePlan) -> None:
        self.plan = plan
        self.choice: Choice | None = None
        self.gatherers: dict[str, Gatherer] = {}
        self.routes: dict[str, Route] = {}
        self.remembered: Remembered | None = None
        """What the last capture staged on devices, if the next one may start early."""

    def go(self, choice: Choice) -> None:
        """Apply a choice of capture modes."""
        before, self.choice = self.choice, choice
        if before is None or before.ways != choice.ways:
            self.layout = lower(self.plan, choice.ways)
            self.gatherers = {d: Gatherer(groups) for d, groups in self.layout.gathers.items()}
            self.looks = ChunkLooks(self.layout)
            self.remembered = None  # those tables of addresses went with their layout

    def remember(self, sources: Sequence[torch.Tensor]) -> None:
        """Remember what an early copy needs, without holding tensor memory."""
        sizes = {d: size for d, size in self.layout.staging_bytes.items() if d != "cpu"}
        count = sum(len(group.spans) for d in sizes for group in self.layout.gathers[d])
        fit = sizes and all(self.gatherers[device].can_run_again() for device in sizes)
        pays = sum(sizes.values()) >= count * EARLY_PAYS_BYTES
        self.remembered = Remembered(self.layout, sources) if fit and pays else None
