"""What is wrong for one rank is wrong for all: they pass over the same checkpoints, and nobody
waits for a rank that has given up."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import laststep

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from crew import Crew


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x40
    path.write_bytes(data)


def header_bytes(path: Path) -> int:
    files = json.loads(path.with_name("manifest.json").read_bytes())["manifest"]["files"]
    return next(int(file["header_bytes"]) for file in files if file["name"] == path.name)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "tensor": lambda path: flip(path, header_bytes(path) + 5),
    "header": lambda path: flip(path, 40),
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


@pytest.mark.parametrize(("how", "ranks"), [
    ("tensor", 3), ("tensor", 2), ("tensor", 1), ("header", 2), ("short", 3), ("gone", 2),
    ("manifest", 2),
])  # fmt: skip
def test_all_ranks_pass_over_what_one_ranks_file_lost(
    crew: Crew, saved: Path, run_folder: Path, how: str, ranks: int
) -> None:
    shutil.copytree(saved, run_folder)
    DAMAGE[how](file_of(run_folder, 2, 1))
    touched = how == "tensor"  # all else is found before anything changes
    for found in crew("tasks:load_damaged", ranks, run=str(run_folder), touched=touched):
        assert found["named"][0] == "Corrupt"
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
        assert found["error"][0] == "Corrupt"
        assert "peek() again" in found["error"][1]
        assert found["mixed"] == "Usage"
        assert found["found"] == {1.0}


def test_a_rank_that_peeks_where_others_restore_is_told(crew: Crew, saved: Path) -> None:
    for kind, text in crew("tasks:peek_or_restore", 3, run=str(saved)):
        assert kind == "Usage"
        assert "peek() of the newest on rank 1" in text


def test_a_damaged_table_is_passed_over_and_found_by_verify(
    crew: Crew, saved: Path, run_folder: Path
) -> None:
    """One process does not need it, and loads all the same."""
    shutil.copytree(saved, run_folder)
    content = laststep.open(run_folder)[2].content()
    (at,) = (
        file.record.header_bytes + entry.start
        for file in content.files
        for entry in file.header.objects
        if entry.name == "~6table"
    )
    content.close()
    (path,) = run_folder.glob("step-00000002*/shared-r00000.safetensors")
    flip(path, at + 3)
    for found in crew("tasks:load_damaged", 3, run=str(run_folder), touched=False):
        assert found["step"] == 1
        ((step, reason),) = found["skipped"]
        assert step == 2
        assert "stored bytes have changed" in reason
    assert laststep.load(run_folder, step=2)
    (damage,) = laststep.open(run_folder)[2].verify().damage
    assert "~6table" in str(damage)


def test_where_nothing_is_good_all_ranks_say_so(crew: Crew, saved: Path, run_folder: Path) -> None:
    shutil.copytree(saved, run_folder)
    for step in (1, 2):
        DAMAGE["tensor"](file_of(run_folder, step, step - 1))
    for kind, message in crew("tasks:load_nothing_good", 3, run=str(run_folder)):
        assert kind == "Corrupt"
        assert "none of the 2 checkpoints" in message


@pytest.mark.parametrize("where", [0, 2])
def test_what_one_rank_lacks_stops_all_before_anything_changes(
    crew: Crew, saved: Path, where: int
) -> None:
    for (kind, message), left in crew("tasks:load_with_more", 3, run=str(saved), where=where):
        assert kind == "Mismatch"
        assert "model/extra" in message
        assert left == {-1.0}
