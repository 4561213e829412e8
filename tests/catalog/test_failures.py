"""How often a run has failed, told from its records."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec
import pytest

from expect import warned
from laststep.catalog import terms
from laststep.catalog.instances import UNPROVEN_S, Ending, Past, Start, ending_name, past_of
from laststep.catalog.terms import term_record_name
from laststep.errors import StorageError
from laststep.testing.stores import write_file

if TYPE_CHECKING:
    from collections.abc import Callable

    from laststep.catalog.run import Run
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


def end(store: DirectoryStore, start: str, at_s: float) -> None:
    store.create(ending_name(start), msgspec.json.encode(Ending(ended_s=at_s)))


def name(number: int) -> str:
    return f"{number:016x}"


def test_a_new_run_has_no_past(store: DirectoryStore) -> None:
    assert past_of(store, name(9)) == Past(0, 0.0)


def test_a_start_runs_until_the_next_but_no_longer_than_is_usual(
    run: Run, claim: Callable[..., None]
) -> None:
    now_s = time.time()
    for term, hours_ago in enumerate((707, 705, 703, 7, 3), 1):
        claim(term, name(term), now_s - hours_ago * HOUR)
    failures, uptime_s = past_of(run.store, name(9))
    assert failures == 5
    assert uptime_s == pytest.approx((2 + 2 + 3 + 3 + 3) * HOUR, abs=60)  # of 2, 2, 696, 4 and 3


def test_a_start_that_ended_well_is_no_failure(run: Run, claim: Callable[..., None]) -> None:
    claim(1, name(1), time.time() - 2 * HOUR)
    end(run.store, name(1), 4 * HOUR)
    claim(2, name(2), time.time() - HOUR)
    assert past_of(run.store, name(9)).failures == 1


def test_epochs_of_one_start_and_of_its_orphan_are_one_start(
    run: Run, claim: Callable[..., None]
) -> None:
    now_s = time.time()
    claim(1, name(1), now_s - 3 * HOUR)
    claim(2, name(1), now_s - 2 * HOUR)  # it has gone back to an earlier step
    claim(3, name(1), now_s - 1 * HOUR, orphan=True)
    failures, uptime_s = past_of(run.store, name(9))
    assert (failures, uptime_s) == (1, pytest.approx(3 * HOUR, abs=60))


def test_the_start_that_asks_is_not_counted(run: Run, claim: Callable[..., None]) -> None:
    claim(1, name(1), 0.0)
    assert past_of(run.store, name(1)) == Past(0, 0.0)


@pytest.mark.parametrize(("began_s", "uptime_s"), [(0.0, UNPROVEN_S), (1e12, 0.0)])
def test_a_clock_that_was_set_counts_no_more_than_is_credible(
    run: Run, claim: Callable[..., None], began_s: float, uptime_s: float
) -> None:
    claim(1, name(1), began_s)
    assert past_of(run.store, name(9)) == Past(1, uptime_s)


def test_what_cannot_be_read_is_passed_over(run: Run, claim: Callable[..., None]) -> None:
    claim(1, name(1), 0.0)
    write_file(run.store, term_record_name(2), b"nonsense")
    assert past_of(run.store, name(9)).failures == 1


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
