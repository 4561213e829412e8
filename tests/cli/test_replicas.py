"""`laststep ls --tiers`: how far each tier of a run has come, and what is lost with nearer ones."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from expect import names, warned

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture
def tiers(maker, laststep, base: str) -> Callable[..., dict[str, tuple[object, ...]]]:
    """What is said of each tier: newest step, how many, steps and seconds behind."""

    def ask(*urls: object, status: int = 0) -> dict[str, tuple[object, ...]]:
        told = laststep("ls", "--tiers", maker.path, f"shm://{base}", *urls, "--json")
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


def test_shared_memory_is_the_nearest_tier(maker, own, tiers, base: str) -> None:
    maker.save(10)
    assert list(tiers()) == [str(maker.path)]
    owner = own()
    assert tiers() == {f"shm://{base}": (None, 0, None, None), str(maker.path): (10, 1, 0, 0.0)}
    maker.seal(owner.segment, 12)
    maker.seal(owner.segment, 15)
    assert tiers() == {f"shm://{base}": (15, 2, 0, 0.0), str(maker.path): (10, 1, 5, 5.0)}
    maker.start()
    maker.save(11)  # goes on without what is in memory
    assert tiers() == {f"shm://{base}": (None, 0, None, None), str(maker.path): (11, 1, 0, 0.0)}


def test_of_several_ranks_in_memory_a_save_counts_that_all_of_them_hold(
    maker, own, tiers, base: str
) -> None:
    maker.save(10)
    first, second = own(rank=0, ranks=2), own(rank=1, ranks=2)
    maker.seal(first.segment, 12)
    assert tiers()[f"shm://{base}"] == (None, 0, None, None)
    for name in first.segment.records():
        second.segment.put(name, first.segment.read(name))
    assert tiers()[f"shm://{base}"] == (12, 1, 0, 0.0)


def test_the_tiers_that_a_run_knows_need_not_be_named(
    maker, tiers, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    maker.save(10)
    replica = tmp_path / "replica"
    shutil.copytree(maker.path, replica)
    (maker.path / "tiers.json").write_text(json.dumps({"tiers": [str(replica)]}))
    assert list(tiers()) == list(tiers(replica)) == [str(maker.path), str(replica)]
    for damaged in (b"no record", b'{"tiers":["/\xf2"]}'):
        caplog.clear()
        (maker.path / "tiers.json").write_bytes(damaged)
        assert list(tiers()) == [str(maker.path)]
        assert warned(caplog, "tiers.json")


def test_a_tier_that_cannot_be_looked_at_is_told_beside_the_others(maker, laststep, tiers) -> None:
    maker.save(10)
    found = tiers("nowhere://bucket", status=1)
    assert found == {str(maker.path): (10, 1, 0, 0.0), "nowhere://bucket": (None, 0, None, None)}
    told = laststep("ls", "--tiers", maker.path, "nowhere://bucket")
    assert (told.status, names(told.out, "nowhere://bucket", "nowhere://")) == (1, True)


def test_shared_memory_that_others_can_look_into_is_told(maker, own, tiers, base: str) -> None:
    maker.save(10)
    Path(own().segment.folder).parent.chmod(0o755)
    assert list(tiers(status=1)) == [f"shm://{base}", str(maker.path)]


def test_further_places_are_for_tiers_alone(maker, laststep, tmp_path: Path) -> None:
    maker.save(10)
    told = laststep("ls", maker.path, tmp_path)
    assert (told.status, "--tiers" in told.err) == (2, True)
