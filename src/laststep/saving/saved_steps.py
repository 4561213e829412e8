"""The steps that the lineage has, as far as this job knows: which of them a save may have.

Belongs to the training thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from laststep.errors import Exists

if TYPE_CHECKING:
    from collections.abc import Iterable

    from laststep.flush.saves import Saves


class SavedSteps:
    """Steps of the lineage."""

    def __init__(self) -> None:
        self._committed: set[int] = set()
        self._ahead: set[int] = set()
        """Those beyond the one that was restored: saving them replaces them."""

    def restored(self, step: int, steps: Iterable[int] = ()) -> None:
        """Saves go on from that step of a lineage that has these."""
        every = set(steps)
        self._ahead = {one for one in every if one > step}
        self._committed = every - self._ahead

    def add(self, steps: Iterable[int]) -> None:
        """These are committed."""
        self._committed.update(steps)

    def take_over(self, saves: Saves) -> None:
        """Saves that are over are no longer under way."""
        over = [save.handle for save in saves.take_over()]
        self.add(handle.step for handle in over if handle.error is None)

    def newest(self) -> int | None:
        """The last that is committed."""
        return max(self._committed, default=None)

    def replaces(self, step: int, under_way: Iterable[int], where: str, *, overwrite: bool) -> bool:
        """Whether a save of that step may replace one; `Exists` where it would and may not."""
        taken = self._committed.union(under_way)
        if step in taken and not overwrite:
            raise Exists(
                f"step {step} has been saved already", where=where,
                remedy="save with overwrite=True to replace it, or restore an earlier step",
            )  # fmt: skip
        return overwrite or step in self._ahead - taken
