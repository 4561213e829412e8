"""Real ranks with a tier that takes only some items: each brings its own files, all read them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import laststep
from expect import names

if TYPE_CHECKING:
    from pathlib import Path

    from crew import Crew


@pytest.mark.parametrize("ranks", [3, pytest.param(2, marks=pytest.mark.long)])
def test_sharded_weights_come_back_from_an_excerpt_of_two_ranks(
    crew: Crew, run_folder: Path, ranks: int
) -> None:
    run_folder.mkdir()
    where = {"primary": str(run_folder / "primary"), "weights": str(run_folder / "weights")}
    crew("partial_tasks:replicate", 2, **where)
    [checkpoint] = laststep.open(where["weights"])
    assert (checkpoint.ranks, checkpoint.omitted_items) == (2, ("optimizer",))
    assert not checkpoint.verify().damage
    for refused, *told in crew("partial_tasks:restore", ranks, **where):
        assert names(refused, "UsageError: ", "no whole checkpoint")
        assert told == ["step 1", "exact"]
