"""A restore reads every block once, whoever wants it, and little that nobody wants."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from crew import Crew

NEEDED_BYTES = 64 << 20


@pytest.mark.parametrize(("saved", "loaded"), [
    ((4, 0), (4, 1)), ((4, 1), (4, 0)), ((2, 0), (4, 0)), ((2, 0), (4, None)), ((4, None), (3, 0)),
    ((3, 1), (1, None)),
], ids=str)  # fmt: skip
def test_every_block_is_read_once(
    crew: Crew, run_folder: Path, saved: tuple[int, int | None], loaded: tuple[int, int | None]
) -> None:
    """Ranks, and the dimension that they cut; None: every rank holds all."""
    crew("tasks:save_big", saved[0], run=str(run_folder), cut=saved[1])
    found = crew("tasks:load_big", loaded[0], run=str(run_folder), cut=loaded[1])
    assert sum(told for told, _, _ in found) <= 1.1 * NEEDED_BYTES
    assert sum(read for _, read, _ in found) <= 1.1 * NEEDED_BYTES
    blocks = Counter(block for _, _, mine in found for block in mine)
    assert set(blocks.values()) == {1}
    most = max(read for _, read, _ in found)
    assert most <= NEEDED_BYTES / len(found) * 1.6  # and by all alike
