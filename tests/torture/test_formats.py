"""A short share of the format fuzz with every test run; the long one is `make torture`."""

from __future__ import annotations

import importlib
import random
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import laststep

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

HERE = Path(__file__).parent


@pytest.fixture
def formats(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module, which finds its neighbours by path, as torture.py lets it."""
    monkeypatch.syspath_prepend(str(HERE))
    yield importlib.import_module("formats")
    for name in ("formats", "forging", "mutating", "trials"):
        sys.modules.pop(name, None)


def test_what_is_not_changed_is_sound_for_everybody(formats: ModuleType, run_folder: Path) -> None:
    """The first of all: the processes of trials are forked from this one, which then has imported
    what they need."""
    run_folder.mkdir()
    formats.make(run_folder)
    trials = importlib.import_module("trials")
    for run in formats.RUNS:
        tally = trials.Tally()
        for name, look in formats.looks(run_folder, run_folder / run, random.Random(0)):
            if run != "ranks" or name in ("ls", "show", "verify", "open"):
                formats._look(name, look, "nothing", tally)
        assert set(tally.notes) == {"looks that found nothing wrong"}, tally.notes


@pytest.mark.parametrize("tables", [False, pytest.param(True, marks=pytest.mark.long)])
def test_lies_with_valid_digests_give_our_errors_or_none(
    formats: ModuleType, run_folder: Path, monkeypatch: pytest.MonkeyPatch, *, tables: bool
) -> None:
    monkeypatch.setattr(formats, "CHANGES", 4)
    if tables:
        monkeypatch.setattr(formats, "CHANGE", (formats.in_a_table,))
    trials = importlib.import_module("trials")
    done = trials.run("formats", formats.trial, run_folder, seed=1000, trials=1)
    assert not done.findings, "\n".join(map(str, done.findings))
    assert sum(done.faults.values()) == 4


def test_an_error_that_is_not_ours_is_a_finding(
    formats: ModuleType, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def careless(*_: object, **__: object) -> None:
        raise KeyError("groups")

    monkeypatch.setattr(formats, "CHANGES", 1)
    monkeypatch.setattr(formats, "_restore", careless)
    monkeypatch.setattr(formats, "CHANGE", (formats.in_a_tree,))
    trials = importlib.import_module("trials")
    done = trials.run("formats", formats.trial, run_folder, seed=1, trials=1)
    assert [finding.kind for finding in done.findings] == ["foreign error"]


def test_a_lie_reaches_the_reader_with_all_digests_right(
    formats: ModuleType, run_folder: Path
) -> None:
    forging = importlib.import_module("forging")
    laststep.save({"a": 1}, run_folder)

    def change(stored: dict[str, object]) -> dict[str, object]:
        return {**stored, "tree": {"a": 2}}

    forging.change_tree(run_folder, "state", change)
    assert laststep.load(run_folder) == {"a": 2}
