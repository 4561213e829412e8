"""A save whose flusher is gone, or stands still, is given up in the run, or ends with what the run
says was decided."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import attempts
from expect import names, raises
from laststep.catalog.attempt import AttemptName
from laststep.catalog.run import Run
from laststep.commit.rounds import Member, Round
from laststep.errors import AbortedError, LaststepError, StorageError
from laststep.format.manifest import Commit, WrittenIndexes
from laststep.ranks.group import Rank
from laststep.storage.directory import DirectoryStore
from saves_of import flush, lone_save

if TYPE_CHECKING:
    from pathlib import Path

    from laststep.flush.saves import Save


LOST = StorageError("the flusher ended before its work was done")
ERROR = AbortedError("rank 0 did not commit step 7 within 5 s", remedy="see its log")


def durable(lost: LaststepError | None) -> Save:
    save = lone_save(7)
    flush(save)
    save.lost = lost
    return save


def settled(
    path: Path, save: Save, error: LaststepError | None
) -> tuple[LaststepError | None, list[str]]:
    desk = Member(Rank(1, 2), None, None, None, DirectoryStore(path), 5.0, None)  # type: ignore[arg-type]
    one = Round(7, save, None)
    one.place = AttemptName(step=7, term=1, attempt=1)
    found = desk.settle(one, error)
    assert save.over
    return found, [folder for folder in [save.report.folder] if folder is not None]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = Run.open_or_create(DirectoryStore(tmp_path))
    run.begin(step=7, term=run.claim_term(None), attempt=1)
    return run


def commit(run: Run) -> None:
    attempts.commit(
        run,
        "step-00000007.1-1",
        Commit(
            run=run.id,
            step=7,
            term=1,
            attempt=1,
            created_s=1.0,
            laststep="0",
            items=(),
            ranks=2,
            written=WrittenIndexes(indexes=bytes(32)),
        ),
    )


@pytest.mark.parametrize(
    ("lost", "error"), [(LOST, None), (LOST, ERROR), (LOST, LOST), (None, ERROR), (None, None)]
)
def test_what_is_committed_is_reported_so_whatever_else_went_wrong(
    run: Run, tmp_path: Path, lost: LaststepError | None, error: LaststepError | None
) -> None:
    commit(run)
    found, told = settled(tmp_path, durable(lost), error)
    assert found is None
    assert told == ["step-00000007.1-1"]


@pytest.mark.parametrize(
    ("lost", "error", "expected"), [(LOST, None, LOST), (LOST, ERROR, ERROR), (None, ERROR, ERROR)]
)
def test_what_is_not_decided_is_given_up_in_the_run_and_nobody_can_commit_it_later(
    run: Run,
    tmp_path: Path,
    lost: LaststepError | None,
    error: LaststepError | None,
    expected: LaststepError,
) -> None:
    found, told = settled(tmp_path, durable(lost), error)
    assert (str(found), told) == (str(expected.of_save(7)), [])
    with raises(AbortedError, where="step-00000007.1-1") as raised:
        commit(run)
    assert str(expected) in str(raised.value)


def test_what_another_rank_gave_up_has_failed_with_its_reason(run: Run, tmp_path: Path) -> None:
    attempts.abort(run, "step-00000007.1-1", "a test")
    found, told = settled(tmp_path, durable(None), ERROR)
    assert isinstance(found, AbortedError)
    assert (found.what, told) == ("a test", [])


def test_what_befell_this_rank_itself_stays_its_error(run: Run, tmp_path: Path) -> None:
    attempts.abort(run, "step-00000007.1-1", "a test")
    found, told = settled(tmp_path, durable(LOST), None)
    assert (str(found), told) == (str(LOST.of_save(7)), [])


def test_a_folder_that_is_gone_is_given_up(run: Run, tmp_path: Path) -> None:
    run.store.delete_folder("step-00000007.1-1")
    found, told = settled(tmp_path, durable(None), ERROR)
    assert (str(found), told) == (str(ERROR.of_save(7)), [])


def test_a_run_that_cannot_be_read_leaves_it_open(run: Run, tmp_path: Path) -> None:
    (tmp_path / "step-00000007.1-1" / "manifest.json").write_bytes(b"nonsense")
    found, told = settled(tmp_path, durable(LOST), None)
    assert isinstance(found, StorageError)
    assert found.step == 7
    assert names(found.found, LOST.what)
    assert told == []


def test_what_is_over_stays_as_it_is(run: Run, tmp_path: Path) -> None:
    save = durable(LOST)
    save.fail(ERROR)
    commit(run)
    found, told = settled(tmp_path, save, LOST)
    assert (str(found), told) == (str(ERROR.of_save(7)), [])
