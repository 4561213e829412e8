"""`rm` and `rollback`: chosen checkpoints go, and it is clear which one is the newest then."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

import pytest

import laststep as library
from expect import names
from laststep.cli import deleting, output

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture
def run(maker):
    """Steps 10 to 40, then a branch from 20 with steps 25 and 35."""
    for step in (10, 20, 30, 40):
        maker.save(step)
    maker.start((1, 2))
    for step in (25, 35):
        maker.save(step)
    return maker


def steps(maker) -> list[int]:
    return [item.step for item in maker.run.checkpoints()]


def test_rm_deletes_one_step_and_names_the_newest(run, laststep: Callable) -> None:
    ended = laststep("rm", run.path, 25, "--yes")
    assert ended.status == 0
    assert names(ended.out, "step-00000025.2-1", "1 checkpoint", "step 35")
    assert steps(run) == [10, 20, 30, 40, 35]


def test_rm_deletes_what_a_step_had_replaced_too(maker, laststep: Callable) -> None:
    for step in (10, 20, 20):
        maker.save(step)
    laststep("rm", maker.path, 20, "--yes")
    assert steps(maker) == [10]


def test_rm_refuses_to_bring_an_abandoned_branch_back(run, laststep: Callable) -> None:
    laststep("rm", run.path, 25, "--yes")
    ended = laststep("rm", run.path, 35, "--yes")
    assert (ended.status, names(ended.err, "step 40", "rollback")) == (2, True)
    assert steps(run) == [10, 20, 30, 40, 35]
    laststep("rollback", run.path, 20, "--yes")
    assert steps(run) == [10, 20]


def test_rollback_makes_a_step_the_newest(run, laststep: Callable) -> None:
    dry = laststep("rollback", run.path, 20, "--dry-run", "--json").json()
    assert (dry["deleted"], dry["newest"]) == ([], 20)
    assert [name.split(".")[0] for name in dry["to_delete"]] == [
        "step-00000035",
        "step-00000025",
        "step-00000040",
        "step-00000030",
    ]
    assert len(steps(run)) == 6
    ended = laststep("rollback", run.path, 20, "--yes")
    assert names(ended.out, "4 checkpoints", "step 20")
    assert steps(run) == [10, 20]
    assert library.open(run.path).latest().step == 20


def test_rollback_to_the_newest_deletes_nothing(run, laststep: Callable) -> None:
    assert "0 checkpoints" in laststep("rollback", run.path, 35, "--yes").out
    assert len(steps(run)) == 6


@pytest.mark.parametrize("command", ["rm", "rollback"])
def test_a_missing_step_is_answered_with_its_neighbours(run, laststep, command: str) -> None:
    ended = laststep(command, run.path, 21, "--yes")
    assert (ended.status, names(ended.err, "step 21", "20", "25")) == (1, True)
    assert len(steps(run)) == 6


def test_an_abandoned_step_is_no_place_to_roll_back_to(run, laststep: Callable) -> None:
    ended = laststep("rollback", run.path, 40, "--yes")
    assert (ended.status, names(ended.err, "step 40", "lineage")) == (1, True)
    assert len(steps(run)) == 6


def test_a_pinned_checkpoint_stops_both(run, laststep: Callable) -> None:
    laststep("pin", run.path, 30)
    for command in (("rm", run.path, 30), ("rollback", run.path, 20)):
        ended = laststep(*command, "--yes")
        assert (ended.status, names(ended.err, "30", "unpin")) == (2, True)
    assert len(steps(run)) == 6


def test_a_running_job_stops_both(run, laststep: Callable) -> None:
    with closing(run.run.lock_term(2)):
        for command in (("rm", run.path, 10), ("rollback", run.path, 20)):
            ended = laststep(*command, "--yes")
            assert (ended.status, "live writer" in ended.err) == (2, True)
    assert len(steps(run)) == 6


def test_nothing_is_deleted_if_the_newest_that_stays_is_damaged(run, laststep: Callable) -> None:
    path = run.path / "step-00000020.1-2" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    ended = laststep("rollback", run.path, 20, "--yes")
    assert (ended.status, names(ended.err, "step 20", "damaged")) == (1, True)
    assert len(steps(run)) == 6


def test_rm_asks_about_a_step_and_its_folder(run, laststep: Callable) -> None:
    ended = laststep("rm", run.path, 25)
    assert ended.status == 2
    assert names(ended.err, "step 25", "step-00000025.2-1", "MB", "step 35")


def test_the_question_keeps_the_case_of_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("typer.confirm", lambda question, **_: asked.append(question))
    output.confirm("delete a/B (1.00 kB)")
    assert asked == ["Delete a/B (1.00 kB)?"]


def test_both_ask_for_confirmation(run, laststep: Callable) -> None:
    ended = laststep("rollback", run.path, 20)
    assert (ended.status, names(ended.err, "4 checkpoints", "step 20", "--yes")) == (2, True)
    assert len(steps(run)) == 6


@pytest.mark.parametrize("command", [("rm", 10), ("rollback", 20)])
def test_a_job_that_saves_while_the_user_is_asked_stops_both(
    run, laststep: Callable, monkeypatch: pytest.MonkeyPatch, command: tuple[str, int]
) -> None:
    def meanwhile(what: str) -> None:
        run.start((2, 2))
        run.save(50)

    monkeypatch.setattr("laststep.cli.output.confirm", meanwhile)
    ended = laststep(command[0], run.path, command[1])
    assert (ended.status, "meanwhile" in ended.err) == (2, True)
    assert len(steps(run)) == 7


def test_checkpoints_in_memory_stop_both_until_they_are_recovered(
    run, own: Callable, laststep: Callable, base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deleting, "BASE", base)
    run.seal(own().die(), 60)
    ended = laststep("rollback", run.path, 20, "--yes")
    assert (ended.status, "laststep recover" in ended.err) == (2, True)
    assert len(steps(run)) == 6
