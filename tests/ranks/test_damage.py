"""What is wrong for one rank is wrong for all: they pass over the same checkpoints, and nobody
waits for a rank that has given up."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import laststep
from expect import names
from stored import flip

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from crew import Crew


def header_bytes(path: Path) -> int:
    """As safetensors says it: the first 8 bytes are the length of the rest of the header."""
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


def index_beside(path: Path) -> Path:
    """The index of the rank that a data file belongs to."""
    return path.with_name(f"index-{path.stem.rpartition('-')[2]}")


DAMAGE: dict[str, Callable[[Path], object]] = {
    "tensor": lambda path: flip(path, header_bytes(path) + 5),
    "index": lambda path: flip(index_beside(path), 40),
    "no index": lambda path: index_beside(path).unlink(),
    "short": lambda path: path.write_bytes(path.read_bytes()[:-4096]),
    "gone": lambda path: path.unlink(),
    "manifest": lambda path: flip(path.with_name("manifest.json"), 60),
}


def file_of(run: Path, step: int, rank: int) -> Path:
    (found,) = run.glob(f"step-{step:08}*/model-r{rank:05}.safetensors")
    return found


@pytest.fixture(scope="module")
def saved(crew: Crew) -> Iterator[Path]:
    """Two steps of three ranks, to be copied and damaged."""
    with tempfile.TemporaryDirectory(prefix="laststep-ranks-") as folder:
        crew("tasks:save_sharded", 3, run=f"{folder}/run", steps=2)
        yield Path(folder) / "run"


@pytest.mark.parametrize(
    ("how", "ranks"),
    [
        ("tensor", 3),
        ("tensor", 2),
        ("tensor", 1),
        ("index", 2),
        ("no index", 3),
        ("short", 3),
        ("gone", 2),
        ("manifest", 2),
    ],
)
def test_all_ranks_pass_over_what_one_ranks_file_lost(
    crew: Crew, saved: Path, run_folder: Path, how: str, ranks: int
) -> None:
    shutil.copytree(saved, run_folder)
    DAMAGE[how](file_of(run_folder, 2, 1))
    touched = how == "tensor"  # all else is found before anything changes
    for rank, found in enumerate(
        crew("tasks:load_damaged", ranks, run=str(run_folder), touched=touched)
    ):
        assert [("step 2" in warning) for warning in found["warnings"]] == [True] * (rank == 0)
        assert found["named"][0] == "CorruptError"
        assert found["step"] == 1
        assert found["found"] == {1.0}
        ((step, reason),) = found["skipped"]
        assert step == 2
        assert reason


def test_ranks_that_peek_are_offered_the_next_older_one_where_one_rank_finds_damage(
    crew: Crew, run_folder: Path
) -> None:
    crew("tasks:save_sharded", 3, run=str(run_folder), steps=2, plain={"n": 1})
    DAMAGE["tensor"](file_of(run_folder, 2, 1))
    for found in crew("tasks:peek_at_damaged", 3, run=str(run_folder)):
        assert found["steps"] == [2, 1, 1]
        assert found["error"][0] == "CorruptError"
        assert "peek()" in found["error"][1]
        assert found["mixed"] == "UsageError"
        assert found["found"] == {1.0}


def test_a_rank_that_peeks_where_others_restore_is_told(crew: Crew, saved: Path) -> None:
    for kind, text in crew("tasks:peek_or_restore", 3, run=str(saved)):
        assert kind == "UsageError"
        assert names(text, "peek()", "rank 1")


def test_a_damaged_header_hurts_no_restore_and_is_found_by_verify(
    crew: Crew, saved: Path, run_folder: Path
) -> None:
    shutil.copytree(saved, run_folder)
    flip(file_of(run_folder, 2, 1), 40)
    for step, found in crew("tasks:load_newest", 2, run=str(run_folder)):
        assert (step, found) == (2, {2.0})
    (damage,) = laststep.open(run_folder)[2].verify().damage
    assert (damage.file, damage.what) == ("model-r00001.safetensors", "header")


def test_where_nothing_is_good_all_ranks_say_so(crew: Crew, saved: Path, run_folder: Path) -> None:
    shutil.copytree(saved, run_folder)
    for step in (1, 2):
        DAMAGE["tensor"](file_of(run_folder, step, step - 1))
    for kind, message in crew("tasks:load_nothing_good", 3, run=str(run_folder)):
        assert kind == "CorruptError"
        assert "step 2" in message


@pytest.mark.parametrize("where", [0, 2])
def test_what_one_rank_lacks_stops_all_before_anything_changes(
    crew: Crew, saved: Path, where: int
) -> None:
    found = crew("tasks:load_with_more", 3, run=str(saved), where=where)
    for rank, ((kind, message), left) in enumerate(found):
        assert kind == "MismatchError"
        assert "model/extra" in message
        assert ("model/other" in message) == (rank == where)  # others name the first of them
        assert rank == where or names(message, f"rank {where}: ", "2 places", "see its log")
        assert left == {-1.0}
