"""Who may take a run over: only a start that has missed nothing; what is left if it dies."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING
from unittest.mock import Mock

import msgspec
import pytest

import attempts
from expect import raises, warned
from laststep.catalog.attempt import AttemptName
from laststep.catalog.retention import Keep, plan_prune
from laststep.catalog.run import Run
from laststep.catalog.terms import Seen, Trainer, new_start
from laststep.errors import AbortedError, StorageError
from laststep.storage.directory import DirectoryStore

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from laststep.format.manifest import Commit

    Save = Callable[..., str]


def test_who_missed_a_commit_of_the_epoch_it_saw_cannot_take_over(run: Run, save: Save) -> None:
    term = run.claim_term(None, writer=new_start())
    save(run, 1, term, 1)
    seen = run.newest_point()
    save(run, 2, term, 2)
    plan_prune(run, Keep(last=1)).execute()
    stale = new_start()
    with raises(AbortedError, found="step-00000002.1-2", remedy="restore()"):
        run.claim_term((term, 1), seen=seen, writer=stale)
    assert run.newest_point() == Seen(term=term, commit=(term, 2))
    assert run.claim_term((term, 2), seen=run.newest_point(), writer=stale) == 2


def test_who_missed_the_commit_of_an_orphan_cannot_take_over(run: Run, save: Save) -> None:
    term = run.claim_term(None, writer=new_start())
    save(run, 1, term, 1)
    seen = run.newest_point()
    orphan = run.claim_term((term, 1), seen=seen, writer=new_start(), orphan=True)
    save(run, 2, orphan, 1)
    with pytest.raises(AbortedError, match=r"step-00000002\.2-1"):
        run.claim_term((term, 1), seen=seen, writer=new_start())


def test_attempts_that_were_given_up_since_are_in_nobodys_way(run: Run, save: Save) -> None:
    term = run.claim_term(None, writer=new_start())
    save(run, 1, term, 1)
    seen = run.newest_point()
    attempts.abort(run, run.begin(step=2, term=term, attempt=2).folder, "a disk that was full")
    run.begin(step=2, term=term, attempt=3)
    assert run.claim_term((term, 1), seen=seen, writer=new_start()) == 2


def test_who_continues_a_commit_that_came_while_it_looked_has_seen_it(run: Run, save: Save) -> None:
    term = run.claim_term(None, writer=new_start())
    save(run, 1, term, 1)
    seen = run.newest_point()
    save(run, 2, term, 2)
    assert run.claim_term((term, 2), seen=seen, writer=new_start()) == 2


def test_commits_of_the_same_start_are_not_in_its_way(run: Run, save: Save) -> None:
    start = new_start()
    term = run.claim_term(None, seen=Seen(), writer=start)
    save(run, 1, term, 1)
    assert run.claim_term((term, 1), seen=Seen(), writer=start) == 2


@pytest.mark.parametrize("back_to", [None, 1])
def test_a_start_that_goes_back_and_dies_before_its_first_commit_leaves_nothing_behind(
    run: Run, save: Save, back_to: int | None
) -> None:
    term = run.claim_term(None)
    folders = [save(run, step, term, step) for step in (1, 2, 3)]
    seen = run.newest_point()
    second = run.claim_term(None if back_to is None else (term, back_to), writer=new_start())
    run.begin(step=2, term=second, attempt=1)
    assert [one.folder for one in run.lineage()] == folders
    newest = run.newest()
    assert newest is not None
    assert newest.folder == folders[-1]
    assert plan_prune(run, Keep(last=2)).deletions == (folders[0],)
    # The next start decides anew.
    assert run.newest_point() == Seen(term=second, commit=seen.commit)
    third = run.claim_term((term, 2), writer=new_start())
    own = save(run, 3, third, 1)
    assert [one.folder for one in run.lineage()] == [*folders[:2], own]


def test_an_epoch_that_continues_the_last_commit_and_has_none_is_no_news(
    run: Run, save: Save, caplog: pytest.LogCaptureFixture
) -> None:
    term = run.claim_term(None)
    folder = save(run, 1, term, 1)
    run.claim_term((term, 1))
    assert [one.folder for one in run.lineage()] == [folder]
    assert not caplog.records


def test_a_start_that_continues_what_is_gone_and_has_no_commit_hides_no_other(
    run: Run, save: Save
) -> None:
    term = run.claim_term(None)
    gone, kept = save(run, 1, term, 1), save(run, 2, term, 2)
    second = run.claim_term((term, 1))
    run.store.delete_folder(gone)
    assert [one.folder for one in run.lineage()] == [kept]
    run.check_step_free(2, own=AttemptName(step=2, term=second, attempt=1))
    own = save(run, 2, second, 1)
    assert [one.folder for one in run.lineage()] == [own]


def test_a_damaged_record_of_an_epoch_without_a_commit_harms_no_reader(
    run: Run, save: Save, tmp_path: Path
) -> None:
    folder = save(run, 1, run.claim_term(None), 1)
    second = run.claim_term((1, 1))
    (tmp_path / "run" / "terms" / f"{second:08d}.json").write_bytes(b"{}")
    assert [one.folder for one in Run.open(run.store).lineage()] == [folder]


class _Died(BaseException):
    """The process ends there."""


@pytest.mark.parametrize("fails", [_Died(), StorageError("cannot list", found="EIO")])
@pytest.mark.parametrize("looks_early", [False, True])
def test_a_commit_stays_though_the_successor_ends_before_its_second_look(
    run: Run,
    save: Save,
    commit_of: Callable[..., Commit],
    monkeypatch: pytest.MonkeyPatch,
    fails: BaseException,
    *,
    looks_early: bool,
) -> None:
    """The writer has looked for newer terms before there was one."""
    term = run.claim_term(None, writer=new_start())
    lock = run.lock_term(term)
    save(run, 1, term, 1)
    under_way = run.begin(step=2, term=term, attempt=2).folder
    seen, successor, third = run.newest_point(), new_start(), new_start()
    with monkeypatch.context() as patch:
        patch.setattr(Run, "_end_older", Mock(side_effect=fails))
        with pytest.raises(type(fails)):
            run.claim_term((term, 1), seen=seen, writer=successor)
    early = run.newest_point()
    attempts.commit(run, under_way, commit_of(step=2, term=term, attempt=2))
    assert [one.step for one in run.lineage()] == [1, 2]
    for _ in range(2):
        with pytest.raises(AbortedError, match=r"step-00000002\.1-2"):
            run.claim_term((term, 1), seen=seen, writer=successor)
    newest = max(run._terms.numbers())
    if looks_early:
        early = Seen(term=newest, commit=early.commit)
        with pytest.raises(AbortedError, match=r"step-00000002\.1-2"):
            run.claim_term((term, 1), seen=early, writer=third)
    else:
        save(run, 3, run.claim_term((term, 2), writer=third), 1)
        assert [one.step for one in run.lineage()] == [1, 2, 3]
    assert [one.step for one in run.lineage()][:2] == [1, 2]
    lock.close()


def test_an_orphan_claims_nothing_while_the_newest_writer_lives(run: Run, save: Save) -> None:
    live = run.claim_term(None, writer=new_start())
    lock = run.lock_term(live)
    save(run, 1, live, 1)
    seen, dead = run.newest_point(), new_start()
    with raises(AbortedError, where=run.store.url):
        run.claim_term((live, 1), seen=seen, writer=dead, orphan=True)
    save(run, 2, live, 2)
    seen = run.newest_point()
    lock.close()
    assert run.claim_term((live, 2), seen=seen, writer=dead, orphan=True) == 2


@pytest.mark.parametrize("orphan", [True, False])
def test_of_two_that_claim_at_once_only_one_that_lives_is_in_the_way(
    run: Run, monkeypatch: pytest.MonkeyPatch, *, orphan: bool
) -> None:
    create, faster = DirectoryStore.create, new_start()

    def late(store: DirectoryStore, name: str, data: bytes) -> None:
        monkeypatch.setattr(DirectoryStore, "create", create)
        run.claim_term(None, seen=Seen(), writer=faster, orphan=orphan)
        create(store, name, data)

    monkeypatch.setattr(DirectoryStore, "create", late)
    if orphan:
        assert run.claim_term(None, seen=Seen(), writer=new_start()) == 2
    else:
        with raises(AbortedError, found="(term 1)"):
            run.claim_term(None, seen=Seen(), writer=new_start())


@pytest.mark.parametrize("reaped", [True, False])
def test_an_epoch_whose_trainer_died_while_it_was_claimed_stops_no_successor(
    run: Run, *, reaped: bool
) -> None:
    seen = run.newest_point()
    code = "import msgspec; from laststep.catalog.terms import new_start;"
    code += "print(msgspec.json.encode(new_start()).decode(), flush=True); input()"
    trainer = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with trainer:
        dying = msgspec.json.decode(trainer.stdout.readline(), type=Trainer)
        # Its flusher has found it alive, and claims after that.
        claimed = run.claim_term(None, seen=seen, writer=dying)
        with raises(AbortedError, found=f"process {trainer.pid}"):
            run.claim_term(None, seen=seen, writer=new_start())  # it will start another flusher
        trainer.kill()
        os.waitid(os.P_PID, trainer.pid, os.WEXITED | os.WNOWAIT)
        if reaped:
            trainer.wait()
        lock = run.lock_term(claimed)
        with raises(AbortedError, found=f"process {trainer.pid}"):
            run.claim_term(None, seen=seen, writer=new_start())
        lock.close()
        assert run.claim_term(None, seen=seen, writer=new_start()) == claimed + 1


def test_a_number_of_another_container_says_nothing_about_its_process(run: Run) -> None:
    me = new_start()
    started, _, _ = me.process_started.partition("@")
    inside = msgspec.structs.replace(me, pid=2**22 + 1, process_started=f"{started}@pid:[1]")
    gone = msgspec.structs.replace(me, pid=2**22 + 1)
    run.claim_term(None, seen=Seen(), writer=inside)
    with raises(AbortedError, found=f"process {inside.pid}"):
        run.claim_term(None, seen=Seen(), writer=new_start())
    run.claim_term(None, seen=Seen(term=1), writer=gone)
    assert run.claim_term(None, seen=Seen(term=1), writer=new_start()) == 3


@pytest.mark.parametrize("alive", [True, False])
def test_an_attempt_that_cannot_be_given_up_stops_a_successor_if_its_writer_lives(
    run: Run,
    save: Save,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    *,
    alive: bool,
) -> None:
    term = run.claim_term(None)
    stuck = run.begin(step=1, term=term, attempt=1).folder
    lock = run.lock_term(term)
    if not alive:
        lock.close()
    create = DirectoryStore.create

    def refused(store: DirectoryStore, name: str, data: bytes) -> None:
        if name.startswith(stuck):
            raise StorageError("cannot create", where=name, found="Permission denied")
        create(store, name, data)

    def stays(_store: DirectoryStore, name: str) -> None:
        raise StorageError("cannot delete", where=name, found="Permission denied")

    monkeypatch.setattr(DirectoryStore, "create", refused)
    monkeypatch.setattr(DirectoryStore, "delete_folder", stays)
    if alive:
        with raises(StorageError, where=stuck, found="Permission denied"):
            run.claim_term(None)
        lock.close()
    second = run.claim_term(None)
    assert warned(caplog, stuck, "Permission denied")
    assert [one.folder for one in run.attempts()] == [stuck]
    save(run, 1, second, 1)


def test_what_a_dead_writer_left_goes_though_the_disk_is_full_of_it(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = run.begin(step=1, term=run.claim_term(None), attempt=1).folder
    create = DirectoryStore.create

    def full(store: DirectoryStore, name: str, data: bytes) -> None:
        if left in store.folder_names(""):
            raise StorageError("cannot create", where=name, found="No space left on device")
        create(store, name, data)

    monkeypatch.setattr(DirectoryStore, "create", full)
    assert run.claim_term(None) == 2
    assert left not in run.store.folder_names("")


def test_what_cannot_be_removed_stops_nothing_else_from_being(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    term = run.claim_term(None)
    stuck, other = (run.begin(step=n, term=term, attempt=n).folder for n in (1, 2))
    delete = DirectoryStore.delete_folder

    def refused(store: DirectoryStore, name: str, **more: str) -> None:
        if name == stuck:
            raise StorageError("cannot delete", where=name, found="Permission denied")
        delete(store, name, **more)

    monkeypatch.setattr(DirectoryStore, "delete_folder", refused)
    assert [one.name for one in run.clean()] == [other]
    assert warned(caplog, stuck, "Permission denied")
