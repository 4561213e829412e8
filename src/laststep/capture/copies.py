"""How a plan is carried out, as far as that was worked out: ways, layout, tables of addresses.

Made with a plan and replaced with it, so that nothing in it can be of another state. Holds no
memory of the state. Belongs to the training thread.
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
"""How large tensors are on average where an early copy pays: to see that one is in place takes the
training thread a microsecond, in which an H200 copies as much as this."""


class Copies:
    """The copies of a plan."""

    layout: Layout
    """As the last choice of ways has it; known from `go` on."""
    looks: ChunkLooks
    """What was found of its chunks, which is the capture thread's."""

    def __init__(self, plan: SavePlan) -> None:
        self.plan = plan
        self.choice: Choice | None = None
        self.gatherers: dict[str, Gatherer] = {}
        self.routes: dict[str, Route] = {}
        self.remembered: Remembered | None = None
        """What the last capture staged on devices, where that can begin before the next one."""

    def go(self, choice: Choice) -> None:
        """Have every piece go the way that was chosen for it now."""
        before, self.choice = self.choice, choice
        if before is None or before.ways != choice.ways:
            self.layout = lower(self.plan, choice.ways)
            self.gatherers = {d: Gatherer(groups) for d, groups in self.layout.gathers.items()}
            self.looks = ChunkLooks(self.layout)
            self.remembered = None  # those tables of addresses went with their layout

    def remember(self, sources: Sequence[torch.Tensor]) -> None:
        """Keep what an early copy needs to know of a capture, without holding its memory."""
        sizes = {d: size for d, size in self.layout.staging_bytes.items() if d != "cpu"}
        count = sum(len(group.spans) for d in sizes for group in self.layout.gathers[d])
        fit = sizes and all(self.gatherers[device].can_run_again() for device in sizes)
        pays = sum(sizes.values()) >= count * EARLY_PAYS_BYTES
        self.remembered = Remembered(self.layout, sources) if fit and pays else None
