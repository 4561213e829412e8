"""`prune`, `pin` and `unpin`: nothing goes unasked, and each verdict is explained."""

from __future__ import annotations

import io
import sys
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from expect import names

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture
def ten(maker):
    """Ten checkpoints, the best at step 3."""
    for step in range(1, 11):
        maker.save(step, {"loss": abs(step - 3) + 0.5})
    return maker


def steps(maker) -> list[int]:
    return [item.step for item in maker.run.checkpoints()]


def test_prune_keeps_what_any_rule_wants_and_says_why(ten, laststep: Callable) -> None:
    rules = ("--last", 2, "--every", 5, "--best", 2, "--metric", "loss")
    ended = laststep("prune", ten.path, *rules, "--yes")
    assert ended.status == 0
    assert steps(ten) == [3, 4, 5, 9, 10]
    text = {int(line.split()[0]): line for line in ended.out.splitlines()[1:-1]}
    assert "goes" in text[1]
    assert names(text[3], "2", "loss")
    assert names(text[5], "5 steps")
    assert names(text[10], "2", "5 steps")
    assert names(ended.out.splitlines()[-1], "5 checkpoints", "15.07 MB")


def test_a_dry_run_deletes_nothing(ten, laststep: Callable) -> None:
    ended = laststep("prune", ten.path, "--last", 1, "--dry-run")
    assert ended.status == 0
    assert "9 checkpoints" in ended.out.splitlines()[-1]
    assert len(steps(ten)) == 10


def test_a_narrow_terminal_cuts_the_reason_and_never_the_folder(
    maker, laststep: Callable, monkeypatch
) -> None:
    for step in (20, 20, 30):
        maker.save(step)
    maker.run.pin("step-00000020.1-1")

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(io, "StringIO", Terminal)  # to which the command prints
    monkeypatch.setenv("COLUMNS", "60")
    _, *rows, _ = laststep("prune", maker.path, "--last", 1, "--dry-run").out.splitlines()
    for row, folder in zip(rows, ("20.1-1", "20.1-2", "30.1-3"), strict=True):
        assert f"step-000000{folder}  " in row
        assert len(row) <= 60
    assert [row.endswith("…") for row in rows] == [False, True, True]


def test_without_a_terminal_prune_wants_yes(ten, laststep: Callable, monkeypatch) -> None:
    monkeypatch.setattr(sys.stdin, "isatty", lambda: False, raising=False)
    ended = laststep("prune", ten.path, "--last", 1)
    assert ended.status == 2
    assert "9 checkpoints" in ended.err
    assert len(steps(ten)) == 10


def test_at_a_terminal_prune_asks(ten, laststep: Callable, monkeypatch) -> None:
    class Typed:
        """A terminal at which somebody answers."""

        def __init__(self, answer: str) -> None:
            self._answer = answer

        def isatty(self) -> bool:
            return True

        def readline(self, *_: object) -> str:
            return self._answer + "\n"

    monkeypatch.setattr(sys, "stdin", Typed("n"))
    assert laststep("prune", ten.path, "--last", 1).status == 1
    assert len(steps(ten)) == 10
    monkeypatch.setattr(sys, "stdin", Typed("y"))
    assert laststep("prune", ten.path, "--last", 1).status == 0
    assert steps(ten) == [10]


def test_rules_that_make_no_sense_are_refused(ten, laststep: Callable) -> None:
    assert laststep("prune", ten.path, "--yes").status == 2
    assert laststep("prune", ten.path, "--best", 2, "--yes").status == 2
    assert laststep("prune", ten.path, "--last", 0, "--yes").status == 2
    assert laststep("prune", ten.path, "--last", 1, "--mode", "best", "--yes").status == 2
    assert len(steps(ten)) == 10


def test_a_metric_that_no_checkpoint_has_is_told_and_keeps_all(ten, laststep: Callable) -> None:
    ended = laststep("prune", ten.path, "--best", 1, "--metric", "los", "--yes", "--json")
    assert ended.json()["deleted"] == []
    assert names(ended.err, "'los'", "loss")


def test_the_document_of_prune_has_these_fields(ten, laststep: Callable) -> None:
    dry = laststep("prune", ten.path, "--last", 9, "--dry-run", "--json").json()
    assert dry.keys() == {"dry_run", "freed_bytes", "deleted", "copies", "checkpoints"}
    assert (dry["dry_run"], dry["deleted"]) == (True, [])
    assert dry["freed_bytes"] == dry["checkpoints"][0]["size_bytes"]
    assert dry["checkpoints"][0]["keep"] is False
    done = laststep("prune", ten.path, "--last", 9, "--yes", "--json").json()
    assert done["deleted"] == ["step-00000001.1-1"]
    assert done["freed_bytes"] == dry["freed_bytes"]


def test_prune_removes_a_copy_that_nobody_goes_on_with(maker, laststep: Callable) -> None:
    folder = maker.save(1, commit=False)
    (folder / "copying.lock").touch()
    assert laststep("prune", maker.path, "--last", 9, "-y", "--json").json()["copies"] == []
    maker.save(2)
    dry = laststep("prune", maker.path, "--last", 9, "--dry-run")
    assert ("1 interrupted copy" in dry.out, folder.exists()) == (True, True)
    with closing(maker.run.store.lock(f"{folder.name}/copying.lock")):
        laststep("prune", maker.path, "--last", 9, "-y")
        assert folder.exists()
    done = laststep("prune", maker.path, "--last", 9, "-y", "--json").json()
    assert (done["copies"], folder.exists()) == ([folder.name], False)
    assert steps(maker) == [2]


def test_the_one_resumed_from_and_abandoned_ones_stay_until_asked_for(maker, laststep) -> None:
    for step in (10, 20, 30):
        maker.save(step)
    maker.start((1, 1))
    maker.save(15)
    maker.save(25)
    laststep("prune", maker.path, "--last", 1, "--yes")
    assert steps(maker) == [10, 20, 30, 25]
    laststep("prune", maker.path, "--last", 1, "--abandoned", "--yes")
    assert steps(maker) == [10, 25]


def test_a_pinned_checkpoint_stays(ten, laststep: Callable) -> None:
    ended = laststep("pin", ten.path, 4)
    assert (ended.status, names(ended.out, "step 4", "step-00000004.1-4")) == (0, True)
    laststep("prune", ten.path, "--last", 1, "--yes")
    assert steps(ten) == [4, 10]
    assert names(laststep("unpin", ten.path, 10).out, "step 10")
    document = laststep("unpin", ten.path, 4, "--json").json()
    assert document == {"step": 4, "folder": "step-00000004.1-4", "pinned": False}
    laststep("prune", ten.path, "--last", 1, "--yes")
    assert steps(ten) == [10]


def test_pin_and_unpin_print_the_same_kind_of_document_whether_or_not_it_was_pinned(
    ten, laststep: Callable
) -> None:
    for command, pinned in (("unpin", False), ("pin", True), ("pin", True), ("unpin", False)):
        document = laststep(command, ten.path, 4, "--json").json()
        assert document == {"step": 4, "folder": "step-00000004.1-4", "pinned": pinned}
        assert [item.pinned for item in ten.run.checkpoints() if item.step == 4] == [pinned]


def test_a_step_that_is_not_there_cannot_be_pinned(ten, laststep: Callable) -> None:
    ended = laststep("pin", ten.path, 99)
    assert ended.status == 1
    assert "step 99" in ended.err


def test_an_incomplete_checkpoint_counts_for_no_rule_and_a_dry_run_says_so(
    ten, laststep: Callable
) -> None:
    [newest] = ten.path.glob("step-00000010.*")
    with (newest / "model.safetensors").open("r+b") as file:
        file.truncate(100)
    text = laststep("prune", ten.path, "--last", 1, "--dry-run").out.splitlines()
    assert "goes" not in text[9]
    assert "stays" in text[10]
    assert names(text[10], "model.safetensors", "100", "3004096")
    assert laststep("prune", ten.path, "--last", 1, "--yes").status == 0
    assert steps(ten) == [9, 10]
    laststep("prune", ten.path, "--last", 1, "--abandoned", "--yes")
    assert steps(ten) == [9]


def test_with_nothing_whole_left_nothing_is_deleted(ten, laststep: Callable) -> None:
    for file in ten.path.glob("step-*/shared.safetensors"):
        file.unlink()
    ended = laststep("prune", ten.path, "--last", 1, "--abandoned", "--yes")
    assert ended.status == 1
    assert str(ten.path) in ended.err
    assert len(steps(ten)) == 10
