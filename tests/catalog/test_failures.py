"""How often a run has failed, told from its records."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

import attempts
from expect import warned
from laststep.catalog import terms
from laststep.catalog.attempt import AttemptName
from laststep.catalog.instances import UNPROVEN_S, Ending, Past, Start, ending_name, past_of
from laststep.catalog.terms import term_record_name
from laststep.errors import StorageError
from laststep.testing.stores import write_file

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import RankFiles
    from laststep.catalog.run import Run
    from laststep.format.manifest import Commit
    from laststep.storage.directory import DirectoryStore

HOUR = 3600.0


@pytest.fixture
def claim(run: Run) -> Callable[..., None]:
    """`claim(term, start, began_s)`: the record of a term of that start."""
    terms.make_folder(run.store)

    def act(term: int, start: str, began_s: float, *, orphan: bool = False, **process: str) -> None:
        writer = msgspec.structs.replace(terms.this_writer(), start=start, **process)
        record = terms.TermRecord(
            format=1,
            term=term,
            continues=None,
            created_s=began_s,
            orphan=orphan,
            **msgspec.structs.asdict(writer),
        )
        run.store.create(term_record_name(term), terms.encode(record))

    return act


@pytest.fixture
def commit(
    run: Run, commit_of: Callable[..., Commit], files_of: Callable[..., RankFiles]
) -> Callable[..., str]:
    """`commit(term, attempt, at_s)`: a checkpoint of that term, at that time."""

    def act(term: int, attempt: int, at_s: float) -> str:
        folder = AttemptName(step=10 * term + attempt, term=term, attempt=attempt).folder
        run.store.make_folder(folder)
        for name, data in files_of().content.items():
            write_file(run.store, f"{folder}/{name}", data)
        made = commit_of(step=10 * term + attempt, term=term, attempt=attempt)
        attempts.commit(run, folder, msgspec.structs.replace(made, created_s=at_s))
        return folder

    return act


def end(store: DirectoryStore, start: str, at_s: float) -> None:
    store.create(ending_name(start), msgspec.json.encode(Ending(ended_s=at_s)))


def name(number: int) -> str:
    return f"{number:016x}"


def test_a_new_run_has_no_past(store: DirectoryStore) -> None:
    assert past_of(store, name(9)) == Past(0, 0.0)


def test_a_start_runs_from_its_first_save_to_its_last_commit(
    run: Run, claim: Callable[..., None], commit: Callable[..., str]
) -> None:
    claim(1, name(1), 10 * HOUR)
    commit(1, 1, 10 * HOUR)
    commit(1, 2, 12 * HOUR)
    claim(2, name(2), 500 * HOUR)  # nothing ran for three weeks
    commit(2, 1, 501 * HOUR)
    run.store.make_folder(AttemptName(step=99, term=2, attempt=2).folder)  # it died there
    assert past_of(run.store, name(9)) == Past(2, 3 * HOUR)


def test_a_start_that_ended_well_is_no_failure(
    run: Run, claim: Callable[..., None], commit: Callable[..., str]
) -> None:
    claim(1, name(1), 0.0)
    commit(1, 1, 1 * HOUR)
    end(run.store, name(1), 4 * HOUR)
    claim(2, name(2), 5 * HOUR)
    commit(2, 1, 6 * HOUR)
    assert past_of(run.store, name(9)) == Past(1, 5 * HOUR)


def test_epochs_of_one_start_and_of_its_orphan_are_one_start(
    run: Run, claim: Callable[..., None], commit: Callable[..., str]
) -> None:
    claim(1, name(1), 0.0)
    claim(2, name(1), 1 * HOUR)  # it has gone back to an earlier step
    claim(3, name(1), 2 * HOUR, orphan=True)
    commit(3, 1, 3 * HOUR)
    assert past_of(run.store, name(9)) == Past(1, 3 * HOUR)


def test_the_start_that_asks_is_not_counted(
    run: Run, claim: Callable[..., None], commit: Callable[..., str]
) -> None:
    claim(1, name(1), 0.0)
    commit(1, 1, 1 * HOUR)
    assert past_of(run.store, name(1)) == Past(0, 0.0)


def test_of_starts_without_a_checkpoint_left_a_long_pause_does_not_count(
    run: Run, claim: Callable[..., None], commit: Callable[..., str]
) -> None:
    for term, began_s in enumerate((0.0, 2 * HOUR, 4 * HOUR, 700 * HOUR, 703 * HOUR), 1):
        claim(term, name(term), began_s)
    commit(5, 1, 704 * HOUR)
    usual_s = 2.5 * HOUR  # the median of 2, 2, 3 and 696
    assert past_of(run.store, name(9)) == Past(5, 2 * HOUR + 2 * HOUR + usual_s + usual_s + HOUR)


def test_a_clock_that_was_set_back_counts_nothing_below_zero(
    run: Run, claim: Callable[..., None], commit: Callable[..., str]
) -> None:
    claim(1, name(1), 5 * HOUR)
    commit(1, 1, 1 * HOUR)
    assert past_of(run.store, name(9)) == Past(1, 0.0)


@pytest.mark.parametrize(("began_s", "seen_s"), [(0.0, 500_000 * HOUR), (500_000 * HOUR, 1e12)])
def test_a_clock_that_was_set_ahead_counts_no_more_than_is_credible(
    run: Run, claim: Callable[..., None], commit: Callable[..., str], began_s: float, seen_s: float
) -> None:
    claim(1, name(1), began_s)
    commit(1, 1, seen_s)
    assert past_of(run.store, name(9)) == Past(1, UNPROVEN_S)
    claim(2, name(2), began_s)  # nothing is left of this one but its begin, and the next one's
    claim(3, name(3), seen_s)
    commit(3, 1, seen_s + HOUR)
    assert past_of(run.store, name(9)) == Past(3, 2 * UNPROVEN_S + HOUR)


def test_a_start_that_ended_well_ran_as_long_as_its_own_clock_says(
    run: Run, claim: Callable[..., None], commit: Callable[..., str]
) -> None:
    claim(1, name(1), 0.0)
    commit(1, 1, 500_000 * HOUR)
    ending = Ending(ended_s=500_000 * HOUR, ran_s=2 * HOUR)
    run.store.create(ending_name(name(1)), msgspec.json.encode(ending))
    assert past_of(run.store, name(9)) == Past(0, 2 * HOUR)


def test_what_cannot_be_read_is_passed_over(
    run: Run, claim: Callable[..., None], commit: Callable[..., str]
) -> None:
    claim(1, name(1), 0.0)
    folder = commit(1, 1, 1 * HOUR)
    commit(1, 2, 2 * HOUR)
    run.store.delete(f"{folder}/manifest.json")
    write_file(run.store, f"{folder}/manifest.json", b"{")
    write_file(run.store, term_record_name(2), b"nonsense")
    write_file(run.store, ending_name(name(1)), b"nonsense")
    assert past_of(run.store, name(9)) == Past(1, 2 * HOUR)


def test_a_store_that_fails_is_no_error(
    store: DirectoryStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(*_: object) -> None:
        raise StorageError("cannot list")

    monkeypatch.setattr(store, "file_names", failing)
    assert past_of(store, name(9)) == Past(0, 0.0)
    assert warned(caplog, "cannot list")


def test_a_start_leaves_a_note_that_it_ended_well(run: Run) -> None:
    start = Start(run.store)
    start.ended_well()  # nobody has saved: there is no place for it, and no need
    assert start.past() == Past(0, 0.0)
    run.claim_term(None, writer=start.writer)
    assert Start(run.store).past().failures == 1
    start.ended_well()
    assert Start(run.store).past().failures == 0
    assert run.orphans(now_s=1e12) == ()  # no cleaning takes it away
