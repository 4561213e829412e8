"""A save whose flusher is gone, or stands still, is given up in the run, or ends with what the run
says was decided."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from laststep.catalog.lineage import AttemptName
from laststep.catalog.run import Run
from laststep.commit.round import Round, RoundContext
from laststep.errors import AbortedError, LaststepError, StorageError
from laststep.flush.saves import SaveHandle
from laststep.format.manifest import Commit, WrittenIndexes
from laststep.ranks.rank import Rank
from laststep.storage.directory import DirectoryStore

if TYPE_CHECKING:
    from pathlib import Path

    from laststep.flush.protocol import Decided

LOST = StorageError("the flusher ended before its work was done")
ERROR = AbortedError("rank 0 did not commit step 7 within 5 s", remedy="see its log")


class Link:
    """Of a save that is durable."""

    number = 3

    def __init__(self, lost: LaststepError | None) -> None:
        self.handle = SaveHandle(7)
        self.handle.durable.reach()
        self.lost = lost

    def failed(self, error: LaststepError) -> None:
        self.handle.fail(error)


def settled(
    path: Path, link: Link, error: LaststepError | None
) -> tuple[LaststepError | None, list[Decided]]:
    told: list[Decided] = []

    def decided(message: Decided) -> None:
        told.append(message)
        link.handle.committed.reach()

    desk = RoundContext(
        Rank(1, 2),
        None,
        SimpleNamespace(decided=decided),
        None,
        DirectoryStore(path),
        deadline_s=5.0,
    )  # type: ignore[arg-type]
    one = Round(7, link, None)  # type: ignore[arg-type]
    one.place = AttemptName(step=7, epoch=1, attempt=1)
    found = desk.settle(one, error)
    assert link.handle.committed.over()
    return found, told


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = Run.open_or_create(DirectoryStore(tmp_path))
    run.begin(step=7, epoch=run.claim_epoch(None), attempt=1)
    return run


def commit(run: Run) -> None:
    run.commit(
        "step-00000007.1-1",
        Commit(
            run=run.id,
            step=7,
            epoch=1,
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
    found, told = settled(tmp_path, Link(lost), error)
    assert found is None
    (message,) = told
    assert (message.save, message.at.point) == (3, (1, 1))
    assert message.at.folder == "step-00000007.1-1"


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
    found, told = settled(tmp_path, Link(lost), error)
    assert (str(found), told) == (str(expected.of_save(7)), [])
    with pytest.raises(AbortedError, match="the save was given up") as raised:
        commit(run)
    assert str(expected) in str(raised.value)


def test_what_another_rank_gave_up_has_failed_with_its_reason(run: Run, tmp_path: Path) -> None:
    run.abort("step-00000007.1-1", "a test")
    found, told = settled(tmp_path, Link(None), ERROR)
    assert isinstance(found, AbortedError)
    assert (found.what, told) == ("a test", [])


def test_what_befell_this_rank_itself_stays_its_error(run: Run, tmp_path: Path) -> None:
    run.abort("step-00000007.1-1", "a test")
    found, told = settled(tmp_path, Link(LOST), None)
    assert (str(found), told) == (str(LOST.of_save(7)), [])


def test_a_folder_that_is_gone_is_given_up(run: Run, tmp_path: Path) -> None:
    run.abort("step-00000007.1-1", "a test")
    run.discard("step-00000007.1-1")
    found, told = settled(tmp_path, Link(None), ERROR)
    assert (str(found), told) == (str(ERROR.of_save(7)), [])


def test_a_run_that_cannot_be_read_leaves_it_open(run: Run, tmp_path: Path) -> None:
    (tmp_path / "step-00000007.1-1" / "manifest.json").write_bytes(b"nonsense")
    found, told = settled(tmp_path, Link(LOST), None)
    assert "it is not known whether step 7 is committed" in str(found)
    assert told == []


def test_what_is_over_stays_as_it_is(run: Run, tmp_path: Path) -> None:
    link = Link(LOST)
    link.handle.fail(ERROR)
    commit(run)
    found, told = settled(tmp_path, link, LOST)
    assert (str(found), told) == (str(ERROR.of_save(7)), [])
