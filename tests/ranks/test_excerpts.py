"""Real ranks with a tier that takes only some items: each brings its own files, all read them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import laststep

if TYPE_CHECKING:
    from pathlib import Path

    from crew import Crew


@pytest.mark.parametrize("ranks", [2, 3])
def test_sharded_weights_come_back_from_an_excerpt_of_two_ranks(
    crew: Crew, run_folder: Path, ranks: int
) -> None:
    run_folder.mkdir()
    where = {"home": str(run_folder / "home"), "weights": str(run_folder / "weights")}
    crew("excerpt_tasks:drain", 2, **where)
    [checkpoint] = laststep.open(where["weights"])
    assert (checkpoint.ranks, checkpoint.left_out) == (2, ("optimizer",))
    assert not checkpoint.verify().damage
    told = ["MismatchError: the checkpoint is an excerpt, without optimizer", "step 1", "exact"]
    assert crew("excerpt_tasks:restore", ranks, **where) == [told] * ranks
    assert laststep.open(where["home"]).steps() == [2]
    assert laststep.open(where["weights"]).steps() == [1, 2]
