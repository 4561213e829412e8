"""The model judges rightly, and can fail; test_short_torture.py has a share of its histories."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from ledger import Entry, Ledger, Rules
from subject import Subject
from tally import Tally, Violation

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def subject(tmp_path: Path) -> Iterator[Subject]:
    made = Subject(tmp_path, Tally())
    yield made
    for writer in made.writers:
        writer.checkpointer._work.close()


def test_a_history_of_saves_restores_and_damage_gives_what_it_must(subject: Subject) -> None:
    subject.open(flush="thread", rules=Rules(last=2), form=0)
    for step in range(4):
        subject.save(0, step=step, loss=0.5, wait=step % 2 == 0)
    subject.restore(0)
    subject.corrupt(9, file=0, how="flip", place=0.5)
    subject.restore(0)
    subject.save(0, step=7, loss=0.25)
    subject.reshape(0, 3)
    subject.save(0, step=8, loss=0.25)
    subject.restore(0, step=7)
    subject.move(copy=True)
    subject.open(flush="thread", rules=None, form=3)
    subject.restore(0)
    subject.prune(Rules(last=1), abandoned=True)
    subject.end()
    assert subject.tally.compared == 4


def test_bytes_that_nobody_saved_are_a_violation(subject: Subject) -> None:
    subject.open(flush="thread", rules=None, form=0)
    subject.save(0, step=0, loss=0.5)
    next(iter(subject.ledger.entries.values())).mark += 1
    with pytest.raises(Violation, match="came back wrong"):
        subject.restore(0)


def test_a_checkpoint_that_is_gone_is_a_violation(subject: Subject) -> None:
    subject.open(flush="thread", rules=None, form=0)
    subject.save(0, step=0, loss=0.5)
    next(subject.path.glob("step-*/manifest.json")).unlink()
    with pytest.raises(Violation, match="is gone"):
        subject.look()


def test_damage_that_goes_unnoticed_is_a_violation(subject: Subject) -> None:
    subject.open(flush="thread", rules=None, form=0)
    subject.save(0, step=0, loss=0.5)
    next(iter(subject.ledger.entries.values())).damage = "flipped"
    with pytest.raises(Violation, match="loads"):
        subject.compare()


def test_after_a_rollback_the_ledger_counts_the_new_branch_alone() -> None:
    ledger = Ledger()
    ledger.terms = {1: None, 2: "a"}
    for folder, step, term in (("a", 0, 1), ("b", 1, 1), ("c", 5, 2)):
        ledger.entries[folder] = Entry(
            folder=folder, step=step, form=0, mark=0, term=term, loss=0.0
        )
    assert [entry.folder for entry in ledger.lineage()] == ["a", "c"]
    assert ledger.of_step(1).folder == "b"
    ledger.entries["d"] = Entry(folder="d", step=1, form=0, mark=0, term=2, loss=0.0)
    assert [entry.folder for entry in ledger.all_of_step(1)] == ["d"]
    ledger.entries["d"].may_go = True
    assert [entry.folder for entry in ledger.all_of_step(1)] == ["d", "b"]
    del ledger.entries["d"]
    assert ledger.retain(Rules(last=1), resumed_from="a", abandoned=False) == set()
    assert ledger.retain(Rules(last=1), resumed_from=None, abandoned=True) == {"a", "b"}


def test_a_replacement_stays_as_long_as_what_it_replaces() -> None:
    ledger = Ledger()
    ledger.terms = {1: None, 2: "a"}
    for folder, step, term in (("a", 7, 1), ("b", 7, 2), ("c", 2, 2)):
        ledger.entries[folder] = Entry(
            folder=folder, step=step, form=0, mark=0, term=term, loss=0.0
        )
    assert ledger.retain(Rules(last=1), resumed_from="a", abandoned=False) == set()
    assert ledger.retain(Rules(last=1), resumed_from=None, abandoned=False) == {"a", "b"}
