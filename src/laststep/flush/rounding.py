"""Round the tensors that the user allows to be rounded, in the slot, before the digest."""

from __future__ import annotations

from bisect import bisect_right
from fnmatch import fnmatchcase
from operator import itemgetter
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Mapping

    from laststep.format.layout import FileLayout

ROUNDINGS = ("bf16", "int8")


class Rounding:
    """The rounding to apply in one file."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}
        """The rounding of each rounded tensor."""
        self._ranges: list[tuple[int, int, str]] = []
        """Start and stop of each rounded byte range, and its rounding."""

    @classmethod
    def of(cls, layout: FileLayout, lossy: Mapping[str, str]) -> Self | None:
        """Return the rounding of a file, or None. The first pattern of `item/tensor` in `lossy` to
        match wins. Scalars are never rounded: optimizers count their steps in them."""
        rounding = cls()
        for entry in layout.tensors:
            item, name = layout.item, entry.name
            if item is None:
                item, _, name = entry.name.partition("/")
            part = layout.parts.get(entry.name)
            full = f"{item}/{name if part is None else part.tensor}"
            pattern = next((pattern for pattern in lossy if _fits(full, pattern)), None)
            is_scalar = not (entry.shape if part is None else part.shape)
            if pattern is None or entry.dtype != "float32" or is_scalar:
                continue
            if entry.start < entry.stop:
                rounding.names[entry.name] = lossy[pattern]
                rounding._ranges.append((entry.start, entry.stop, lossy[pattern]))
        return rounding if rounding.names else None

    def apply(self, start: int, data: memoryview) -> None:
        """Round in place the lossy part of `data`, which starts at byte `start` of the layout."""
        from laststep.codecs.rounding import ROUNDERS  # numpy is slow to import and rarely needed

        first = bisect_right(self._ranges, start, key=itemgetter(1))
        for begin, stop, how in self._ranges[first:]:
            if begin >= start + len(data):
                break
            low, high = max(begin, start), min(stop, start + len(data))
            ROUNDERS[how](data[low - start : high - start], low)


def _fits(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name.partition("/")[0], pattern)
