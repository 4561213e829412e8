"""What befalls one rank in a restore of several: the cause is told to all, and a checkpoint that is
sound is never passed over for it."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from restoring_tasks import FOR_EVER

if TYPE_CHECKING:
    from collections.abc import Iterator

    from crew import Crew


@pytest.fixture(scope="module")
def saved(crew: Crew) -> Iterator[Path]:
    """Three steps of three ranks."""
    with tempfile.TemporaryDirectory(prefix="laststep-ranks-") as folder:
        crew("tasks:save_sharded", 3, run=f"{folder}/run", steps=3)
        yield Path(folder) / "run"


@pytest.fixture
def run(saved: Path, run_folder: Path) -> str:
    """A copy of it with the first two steps; the third lies aside."""
    shutil.copytree(saved, run_folder)
    aside = run_folder.with_name("aside")
    aside.mkdir()
    for one in run_folder.glob("step-00000003*"):
        one.rename(aside / one.name)
    return str(run_folder)


@pytest.mark.parametrize(("who", "how"), [(0, "EIO"), (1, "EIO"), (1, "ESTALE"), (1, "memory")])
def test_a_rank_that_cannot_read_is_named_and_no_older_checkpoint_is_taken(
    crew: Crew, run: str, who: int, how: str
) -> None:
    said = {"EIO": "Input/output error", "ESTALE": "Stale file handle", "memory": "MemoryError"}
    for rank, one in enumerate(
        crew("restoring_tasks:load_with_read_error", 2, run=run, who=who, how=how)
    ):
        kind, message = one["error"]
        assert kind == "StorageError"
        assert said[how] in message
        assert rank == who or f"rank {who}" in message
        assert one["mixed"] == "UsageError"
        assert (one["step"], one["skipped"], one["found"]) == (2, (), {2.0})


@pytest.mark.parametrize("who", [1, 2])
def test_a_rank_that_sees_a_checkpoint_late_restores_it_with_the_others(
    crew: Crew, run: str, who: int
) -> None:
    for rank, one in enumerate(crew("restoring_tasks:load_blindly", 3, run=run, who=who, times=6)):
        assert (one["error"], one["step"], one["skipped"]) == (("", ""), 2, ())
        assert one["state"] == {2.0}
        told = [text for text in one["warnings"] if "than rank 0" in text]
        assert bool(told) == (rank == 0)


def test_a_rank_that_never_sees_a_checkpoint_makes_all_say_so(crew: Crew, run: str) -> None:
    for one in crew("restoring_tasks:load_blindly", 3, run=run, who=1, times=FOR_EVER):
        kind, message = one["error"]
        assert kind == "StorageError"
        assert "rank 1" in message
        assert "step-00000002" in message
        assert one["step"] is None
        assert one["state"] == {-1.0}


def test_a_first_rank_that_sees_no_run_where_others_do_starts_nothing_new(
    crew: Crew, run: str
) -> None:
    for kind, message in crew("restoring_tasks:load_without_a_run", 3, run=run, who=2):
        assert kind == "StorageError"
        assert "rank 2" in message


@pytest.mark.parametrize("who", [0, 2])
def test_what_retention_takes_in_mid_restore_is_listed_again_by_all(
    crew: Crew, run: str, who: int
) -> None:
    aside = str(Path(run).with_name("aside"))
    for one in crew("restoring_tasks:load_pruned", 3, run=run, aside=aside, who=who):
        assert one == {"step": 3, "skipped": (), "found": {3.0}, "saved": ("", "")}


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("step", ("step=1", "rank 0", "step=2", "rank 1")),
        ("newest", ("step=None", "rank 0", "step=1", "rank 1")),
        ("only", ("only=None", "rank 0", "only=['model/weight']", "rank 1")),
        ("strict", ("strict=False", "rank 0", "strict=True", "rank 1")),
    ],
)
def test_ranks_that_ask_for_different_things_are_named(
    crew: Crew, run: str, what: str, said: tuple[str, ...]
) -> None:
    for kind, message in crew("restoring_tasks:ask_apart", 2, run=run, what=what):
        assert kind == "UsageError"
        assert all(text in message for text in said), message


@pytest.mark.parametrize("who", [0, 1])
def test_a_save_that_failed_unseen_by_one_rank_is_told_to_all(
    crew: Crew, run_folder: Path, who: int
) -> None:
    """And all can restore again."""
    path = str(run_folder)
    for rank, one in enumerate(crew("restoring_tasks:load_after_a_failure", 2, run=path, who=who)):
        kind, message = one["error"]
        assert kind == "AbortedError"
        assert rank == who or message.startswith(f"rank {who}: ")
        assert (one["step"], one["n"]) == (0, 0)


@pytest.mark.parametrize(("where", "told"), [(None, [0]), (1, [1]), (0, [0])])
def test_a_warning_that_is_the_same_on_all_ranks_is_told_by_one(
    crew: Crew, run_folder: Path, where: int | None, told: list[int]
) -> None:
    found = crew("tasks:restore_a_part", 3, run=f"{run_folder}/run", where=where)
    for rank, warnings in enumerate(found):
        assert sum("notes.txt" in warning for warning in warnings) == (rank == 0)
        assert sum("own/more" in warning for warning in warnings) == (rank in told)


@pytest.mark.parametrize("kind", ["module", "plain"])
def test_what_one_rank_alone_has_replaces_nothing_on_the_others(
    crew: Crew, run_folder: Path, kind: str
) -> None:
    assert crew("restoring_tasks:average_on_one", 2, run=str(run_folder), kind=kind) == [None, None]


def test_stages_that_are_items_of_different_names_get_their_optimizer_state(
    crew: Crew, run_folder: Path
) -> None:
    momenta = crew("restoring_tasks:stages_as_items", 2, run=str(run_folder))
    assert momenta == [[5.0, 5.0], [6.0, 6.0]]


def test_a_save_that_lacks_an_item_on_all_ranks_is_refused_on_all(
    crew: Crew, run_folder: Path
) -> None:
    told = crew("restoring_tasks:lacking", 2, run=str(run_folder))
    assert all(len(each) == 1 and "more" in each[0] for each in told)
