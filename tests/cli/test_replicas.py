"""`laststep ls --tiers`: how far each tier of a run has come, and what is lost with nearer ones."""

from __future__ import annotations

import re
import shutil
from typing import TYPE_CHECKING

import pytest

from expect import names

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture
def tiers(maker, laststep) -> Callable[..., dict[str, tuple[object, ...]]]:
    """What is said of each tier: newest step, how many, steps and seconds behind."""

    def ask(*urls: object, status: int = 0) -> dict[str, tuple[object, ...]]:
        told = laststep("ls", "--tiers", maker.path, *urls, "--json")
        assert told.status == status
        names = ("step", "checkpoints", "behind_steps", "behind_s")
        document = told.json()
        assert document["run"] == str(maker.path)
        return {one["tier"]: tuple(one[name] for name in names) for one in document["tiers"]}

    return ask


def test_a_tier_that_is_behind_says_what_is_at_risk(maker, laststep, tiers, tmp_path: Path) -> None:
    for step in (10, 20):
        maker.save(step)
    replica = tmp_path / "replica"
    shutil.copytree(maker.path, replica)
    maker.save(50)
    assert tiers(replica, tmp_path / "nothing") == {
        str(maker.path): (50, 3, 0, 0.0),
        str(replica): (20, 2, 30, 30.0),
        str(tmp_path / "nothing"): (None, 0, None, None),
    }
    said = laststep("ls", maker.path, replica, tmp_path / "nothing", "--tiers").out
    told = [line.rstrip() for line in said.splitlines()]
    assert [line.split()[0] for line in told] == [
        "tier",
        str(maker.path),
        str(replica),
        str(tmp_path / "nothing"),
    ]
    assert told[1].endswith("nothing")
    assert told[2].endswith("30 steps, 30 s")
    assert told[3].endswith("everything")
    assert re.search(r" 20 +[0-9.]+ d +2 ", told[2])


def test_where_the_run_itself_is_lost_other_places_are_listed(maker, tiers, tmp_path: Path) -> None:
    maker.save(10)
    replica = tmp_path / "replica"
    shutil.move(maker.path, replica)
    assert tiers(replica) == {str(maker.path): (None, 0, None, None), str(replica): (10, 1, 0, 0.0)}


def test_a_tier_that_cannot_be_looked_at_is_told_beside_the_others(maker, laststep, tiers) -> None:
    maker.save(10)
    found = tiers("nowhere://bucket", status=1)
    assert found == {str(maker.path): (10, 1, 0, 0.0), "nowhere://bucket": (None, 0, None, None)}
    told = laststep("ls", "--tiers", maker.path, "nowhere://bucket")
    assert (told.status, names(told.out, "nowhere://bucket", "nowhere://")) == (1, True)


def test_further_places_are_for_tiers_alone(maker, laststep, tmp_path: Path) -> None:
    maker.save(10)
    told = laststep("ls", maker.path, tmp_path)
    assert (told.status, "--tiers" in told.err) == (2, True)
