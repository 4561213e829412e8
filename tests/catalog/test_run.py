"""Runs: opening, writing, zombies, races, cleaning and pruning, on real folders."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

import attempts
from disks import Kind, RecordingDisk
from expect import raises
from laststep.catalog import terms
from laststep.catalog.attempt import Attempt, AttemptName, parse_folder
from laststep.catalog.retention import Keep, RemovalReason, plan_prune
from laststep.catalog.run import Run
from laststep.catalog.terms import this_writer
from laststep.errors import (
    AbortedError,
    AlreadyExistsError,
    CorruptError,
    NotFoundError,
    UsageError,
)
from laststep.format.manifest import Abort, Commit
from laststep.storage.directory import DirectoryStore
from laststep.storage.store import StoreEntry

Save = Callable[..., str]
Saved = Callable[..., list[str]]
Commits = Callable[..., Commit]


def _steps(run: Run) -> list[int]:
    return [item.step for item in run.lineage()]


# Opening


def test_an_empty_place_is_not_a_run(store: DirectoryStore, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        Run.open(store)
    assert not (tmp_path / "run").exists()


def test_a_run_keeps_its_id(store: DirectoryStore) -> None:
    run = Run.open_or_create(store)
    assert len(run.id) == 32
    assert Run.open_or_create(store).id == Run.open(store).id == run.id
    assert run.newest() is None
    assert run.checkpoints() == run.attempts() == ()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"nonsense",
        b"\xff",
        b'{"format":1}',
        b'{"format":0,"run":"%s","created_s":1}' % (b"a" * 32),
        b'{"format":1,"run":"../x","created_s":1}',
        b"[1]",
    ],
)
def test_nonsense_in_the_record_of_a_run_is_corrupt(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "run.json").write_bytes(content)
    with pytest.raises(CorruptError):
        Run.open(DirectoryStore(tmp_path))


def test_folders_copied_by_hand_open_by_step_and_can_be_continued(
    save: Save, saved: Saved, tmp_path: Path
) -> None:
    saved(10, 20, 30)
    copy = tmp_path / "copy"
    copy.mkdir()
    for folder in (tmp_path / "run").glob("step-*"):
        subprocess.run(["cp", "-r", str(folder), str(copy)], check=True)
    copied = Run.open(DirectoryStore(copy))
    known = copied.lineage()[0].commit.run
    assert copied.id == known
    assert _steps(copied) == [10, 20, 30]
    copied = Run.open_or_create(DirectoryStore(copy))
    assert copied.id == known
    number = copied.claim_term((1, 2))
    assert number == 2
    assert _steps(copied) == [10, 20, 30]
    save(copied, 25, number, 1)
    assert _steps(copied) == [10, 20, 25]


# Writing


def test_a_committed_checkpoint_is_listed_with_all_that_is_known(run: Run, save: Save) -> None:
    term = run.claim_term(None)
    folder = save(run, 7, term, 1, metrics={"loss": 0.5})
    (item,) = run.checkpoints()
    assert (item.folder, item.step, item.term, item.attempt) == (folder, 7, 1, 1)
    assert item.commit is not None
    assert item.commit.metrics == {"loss": 0.5}
    assert item.on_lineage
    assert item.error is None
    assert item.size_bytes == 5000  # of its data files: the manifest's own bytes are not in it
    assert item.stored_bytes > 5000
    assert run.newest() == item
    assert not run.attempts()


def test_the_order_of_system_calls_is_that_of_the_format(tmp_path: Path, save: Save) -> None:
    disk = RecordingDisk()
    run = Run.open_or_create(DirectoryStore(tmp_path / "run", disk=disk, direct=False))
    term = run.claim_term(None)
    disk.changes.clear()
    folder = save(run, 1, term, 1)
    shown = [
        (change.kind, Path(change.to or change.path).name.split(".tmp-")[0])
        for change in disk.changes
    ]
    assert shown == [
        (Kind.MAKE_FOLDER, folder),
        (Kind.SYNC_FOLDER, "run"),
        (Kind.CREATE_FILE, "m.safetensors"),
        (Kind.ALLOCATE, "m.safetensors"),
        (Kind.WRITE, "m.safetensors"),
        (Kind.TRUNCATE, "m.safetensors"),
        (Kind.SYNC, "m.safetensors"),
        (Kind.CREATE_FILE, "index-r00000"),
        (Kind.ALLOCATE, "index-r00000"),
        (Kind.WRITE, "index-r00000"),
        (Kind.TRUNCATE, "index-r00000"),
        (Kind.SYNC, "index-r00000"),
        (Kind.SYNC_FOLDER, folder),
        (Kind.CREATE_FILE, "manifest.json"),
        (Kind.WRITE, "manifest.json"),
        (Kind.SYNC, "manifest.json"),
        (Kind.LINK, "manifest.json"),
        (Kind.SYNC_FOLDER, folder),
        (Kind.UNLINK, "manifest.json"),
    ]


def test_a_step_on_the_lineage_is_not_free(run: Run, save: Save) -> None:
    term = run.claim_term(None)
    save(run, 7, term, 1)
    run.check_step_free(8)
    with pytest.raises(AlreadyExistsError, match="step 7"):
        run.check_step_free(7)


def test_a_rollback_leaves_the_branch_behind_and_frees_its_steps(
    run: Run, save: Save, saved: Saved
) -> None:
    saved(10, 20, 30)
    second = run.claim_term((1, 1))
    assert _steps(run) == [10, 20, 30]  # until it has a commit
    run.check_step_free(20, own=AttemptName(step=20, term=second, attempt=1))
    with pytest.raises(AlreadyExistsError, match="step 20"):
        run.check_step_free(20)
    save(run, 20, second, 1)
    assert [(item.step, item.on_lineage) for item in run.checkpoints()] == [
        (10, True),
        (20, False),
        (30, False),
        (20, True),
    ]
    newest = run.newest()
    assert newest is not None
    assert (newest.step, newest.term) == (20, second)


def test_a_step_that_was_saved_again_counts_once(run: Run, save: Save) -> None:
    term = run.claim_term(None)
    old, new = save(run, 7, term, 1), save(run, 7, term, 2)
    assert [item.folder for item in run.lineage()] == [new]
    assert run.checkpoints()[0].superseded_by == new
    assert plan_prune(run, Keep()).execute() == (old,)


def test_a_replaced_checkpoint_is_deleted_before_its_replacement(run: Run, save: Save) -> None:
    term = run.claim_term(None)
    folders = [save(run, step, term, at) for at, step in enumerate((6, 7, 7, 8), start=1)]
    plan = plan_prune(run, Keep(last=1))
    assert plan.deletions == tuple(folders[at] for at in (1, 2, 0))
    run.pin(folders[1])  # since the plan was made: then its replacement stays too
    assert plan.execute() == (folders[0],)
    assert _steps(run) == [7, 8]
    assert run.lineage()[0].folder == folders[2]


def test_a_manifest_that_is_listed_and_cannot_be_read_does_not_hang_a_scan(tmp_path: Path) -> None:
    """Some servers and network filesystems list a file for a while after it was deleted."""

    class Stale(DirectoryStore):
        stale = ""

        def list(self, folder: str) -> list[StoreEntry]:
            gone = StoreEntry(name="manifest.json", is_folder=False, size_bytes=9, modified_s=1.0)
            return [*super().list(folder), *([gone] if folder == self.stale else [])]

    store = Stale(tmp_path)
    run = Run.open_or_create(store)
    store.stale = run.begin(step=5, term=run.claim_term(None), attempt=1).folder
    assert run.checkpoints() == ()
    assert run.newest() is None


def test_an_unreadable_manifest_is_shown_as_an_error_and_blocks_nothing(
    run: Run, save: Save, tmp_path: Path
) -> None:
    term = run.claim_term(None)
    save(run, 1, term, 1)
    bad = save(run, 2, term, 2)
    path = tmp_path / "run" / bad / "manifest.json"
    path.write_bytes(path.read_bytes().replace(b'"step":2', b'"step":3'))
    run = Run.open(run.store)
    item = run.checkpoints()[1]
    assert isinstance(item.error, CorruptError)
    assert item.commit is None
    assert item.on_lineage
    newest = run.newest()
    assert newest is not None
    assert newest.step == 1
    run.check_step_free(2)


def test_a_manifest_in_a_foreign_folder_is_corrupt(run: Run, save: Save, tmp_path: Path) -> None:
    folder = save(run, 1, run.claim_term(None), 1)
    (tmp_path / "run" / folder).rename(tmp_path / "run" / "step-00000009.1-9")
    (item,) = Run.open(run.store).checkpoints()
    assert isinstance(item.error, CorruptError)


def test_a_damaged_epoch_record_is_loud_and_says_what_to_do(
    run: Run, save: Save, tmp_path: Path
) -> None:
    save(run, 1, run.claim_term(None), 1)
    (tmp_path / "run" / "terms" / "00000001.json").write_bytes(b"{}")
    with raises(CorruptError, where="00000001.json", remedy="`terms`"):
        Run.open(run.store).newest()
    (tmp_path / "run" / "terms").rename(tmp_path / "elsewhere")
    assert _steps(Run.open(run.store)) == [1]


def test_an_epoch_number_is_never_used_twice_even_if_its_record_is_lost(
    run: Run, save: Save, tmp_path: Path
) -> None:
    term = run.claim_term(None)
    save(run, 1, term, 1)
    (tmp_path / "run" / "terms" / "00000001.json").unlink()
    assert Run.open(run.store).claim_term((1, 1)) == 2


# Commit, abort and zombies


def test_commit_and_abort_have_exactly_one_winner(
    run: Run, commit_of: Commits, tmp_path: Path
) -> None:
    term = run.claim_term(None)
    seen = set()
    for attempt in range(1, 31):
        folder = run.begin(step=attempt, term=term, attempt=attempt).folder
        commit = commit_of(step=attempt, term=term, attempt=attempt)
        barrier = threading.Barrier(3)
        committed: list[bool] = []
        stands: list[Commit | Abort] = []

        def do_commit(
            folder: str = folder,
            commit: Commit = commit,
            barrier: threading.Barrier = barrier,
            committed: list[bool] = committed,
        ) -> None:
            barrier.wait()
            try:
                attempts.commit(Run.open(DirectoryStore(tmp_path / "run")), folder, commit)
                committed.append(True)
            except AbortedError:
                committed.append(False)

        def do_abort(
            folder: str = folder,
            barrier: threading.Barrier = barrier,
            stands: list[Commit | Abort] = stands,
        ) -> None:
            barrier.wait()
            stands.append(
                attempts.abort(Run.open(DirectoryStore(tmp_path / "run")), folder, "a test")
            )

        threads = [threading.Thread(target=t) for t in (do_commit, do_abort, do_abort)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        decided = attempts.decided(run, folder)
        assert stands == [decided, decided]
        assert committed == [isinstance(decided, Commit)]
        seen.add(type(decided))
    assert seen <= {Commit, Abort}


def test_an_abort_leaves_a_new_copy_of_the_same_name_alone(run: Run) -> None:
    term = run.claim_term(None)
    attempt = run.begin(step=1, term=term, attempt=1)

    class RemovedAndBegunAgain(DirectoryStore):
        def create(self, name: str, data: bytes) -> None:
            raise NotFoundError("the folder was gone", where=name)

    again = Attempt(RemovedAndBegunAgain(run.store.url), attempt.name)
    assert not again.abort("given up")
    assert attempt.folder in run.store.folder_names("")


def test_a_commit_after_an_abort_says_why_it_was_given_up(run: Run, commit_of: Commits) -> None:
    term = run.claim_term(None)
    folder = run.begin(step=1, term=term, attempt=1).folder
    assert isinstance(attempts.abort(run, folder, "rank 3 has no room"), Abort)
    with pytest.raises(AbortedError, match="rank 3 has no room"):
        attempts.commit(run, folder, commit_of(step=1, term=term, attempt=1))
    assert run.checkpoints() == ()
    assert run.attempts() == ()


def test_an_abort_after_a_commit_returns_the_commit(run: Run, save: Save) -> None:
    folder = save(run, 1, run.claim_term(None), 1)
    assert isinstance(attempts.abort(run, folder, "too late"), Commit)
    assert _steps(run) == [1]


def test_a_commit_may_be_repeated_but_not_changed(run: Run, save: Save, commit_of: Commits) -> None:
    folder = save(run, 1, run.claim_term(None), 1)
    attempts.commit(run, folder, commit_of(step=1, term=1, attempt=1))
    with pytest.raises(AlreadyExistsError):
        attempts.commit(run, folder, commit_of(step=1, term=1, attempt=1, metrics={"a": 1.0}))


def test_a_zombie_cannot_begin_after_its_successor_came(store: DirectoryStore) -> None:
    zombie, successor = Run.open_or_create(store), Run.open_or_create(store)
    old = zombie.claim_term(None)
    new = successor.claim_term(None)
    with raises(AbortedError, f"(term {new})", where=store.url, found=f"process {os.getpid()}"):
        zombie.begin(step=1, term=old, attempt=1)
    assert isinstance(attempts.decided(successor, "step-00000001.1-1"), Abort)


def test_a_zombie_cannot_commit_what_its_successor_gave_up(
    store: DirectoryStore, commit_of: Commits
) -> None:
    zombie, successor = Run.open_or_create(store), Run.open_or_create(store)
    elsewhere = msgspec.structs.replace(this_writer(), host="elsewhere", boot="another")
    old = zombie.claim_term(None, writer=elsewhere)
    folder = zombie.begin(step=1, term=old, attempt=1).folder
    successor.claim_term(None)
    with raises(AbortedError, where=folder, found=f"process {os.getpid()}"):
        attempts.commit(zombie, folder, commit_of(step=1, term=old, attempt=1))
    successor.clean(now_s=time.time() + 1e6)
    with raises(AbortedError, where=folder):
        attempts.commit(zombie, folder, commit_of(step=1, term=old, attempt=1))
    assert successor.checkpoints() == ()


def test_the_attempt_of_a_writer_that_died_here_goes_when_another_takes_over(
    store: DirectoryStore, commit_of: Commits
) -> None:
    dead, successor = Run.open_or_create(store), Run.open_or_create(store)
    old = dead.claim_term(None)
    folder = dead.begin(step=1, term=old, attempt=1).folder
    successor.claim_term(None)
    assert folder not in store.folder_names("")
    with raises(AbortedError, where=folder):
        attempts.commit(dead, folder, commit_of(step=1, term=old, attempt=1))


def test_what_is_committed_while_another_takes_over_stays_on_the_lineage(
    store: DirectoryStore, save: Save, commit_of: Commits, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its writer has looked for newer terms before there was one, and is told that it is there."""
    old_run, new_run = Run.open_or_create(store), Run.open_or_create(store)
    old = old_run.claim_term(None)
    save(old_run, 1, old, 1)
    folder = old_run.begin(step=2, term=old, attempt=2).folder
    claim = terms.Terms.claim

    def slowly(self: terms.Terms, *arguments: object, **more: object) -> int:
        monkeypatch.undo()
        number = claim(self, *arguments, **more)
        attempts.commit(old_run, folder, commit_of(step=2, term=old, attempt=2))
        return number

    monkeypatch.setattr(terms.Terms, "claim", slowly)
    with raises(AbortedError, found="step-00000002.1-2"):
        new_run.claim_term((old, 1))
    assert _steps(new_run) == [1, 2]


def test_the_attempt_of_a_live_writer_is_given_up_by_its_successor_and_not_removed(
    store: DirectoryStore, save: Save, commit_of: Commits
) -> None:
    old_run, new_run = Run.open_or_create(store), Run.open_or_create(store)
    old = old_run.claim_term(None)
    lock = old_run.lock_term(old)
    save(old_run, 1, old, 1)
    folder = old_run.begin(step=2, term=old, attempt=2).folder
    writer = new_run.live_writer()
    assert writer is not None
    assert (writer.term, writer.record.pid, writer.attempts) == (old, os.getpid(), (folder,))
    assert new_run.live_writer(below=old) is None
    new = new_run.claim_term((old, 1))
    assert new_run.attempts() == ()
    assert new_run.clean(now_s=time.time() + 1e6) == ()  # its writer may still be at work in it
    assert folder in store.folder_names("")
    with raises(AbortedError, where=folder, found=f"process {os.getpid()}"):
        attempts.commit(old_run, folder, commit_of(step=2, term=old, attempt=2))
    assert [(item.step, item.on_lineage) for item in new_run.checkpoints()] == [(1, True)]
    lock.close()
    assert new_run.live_writer(below=new) is None


def test_an_attempt_in_an_epoch_nobody_claimed_is_refused(run: Run) -> None:
    with raises(NotFoundError, "step 1", where=run.store.url, expected="3"):
        run.begin(step=1, term=3, attempt=1)
    assert not [entry for entry in run.store.list("") if entry.name.startswith("step-")]


def test_an_attempt_cannot_begin_twice(run: Run) -> None:
    term = run.claim_term(None)
    run.begin(step=1, term=term, attempt=1)
    with pytest.raises(AlreadyExistsError):
        run.begin(step=1, term=term, attempt=1)


def test_a_writer_that_was_killed_is_seen_as_dead(run: Run, tmp_path: Path) -> None:
    script = (
        "import sys, time\n"
        "from laststep.catalog.run import Run\n"
        "from laststep.storage.directory import DirectoryStore\n"
        "run = Run.open(DirectoryStore(sys.argv[1]))\n"
        "term = run.claim_term(None)\n"
        "lock = run.lock_term(term)\n"
        "run.begin(step=5, term=term, attempt=1)\n"
        "print('ready', flush=True)\n"
        "time.sleep(600)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "run")],
        stdout=subprocess.PIPE,
        env=environment,
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        writer = run.live_writer()
        assert writer is not None
        assert writer.record.pid == child.pid
        assert [item.alive for item in run.attempts()] == [True]
        child.kill()
    assert run.live_writer() is None
    assert [item.alive for item in run.attempts()] == [False]
    assert [orphan.why for orphan in run.clean()] == [RemovalReason.DEAD_WRITER]
    assert run.attempts() == ()


# Cleaning


def test_clean_removes_what_was_given_up_and_nothing_else(run: Run, save: Save) -> None:
    term = run.claim_term(None)
    save(run, 1, term, 1)
    aborted = run.begin(step=2, term=term, attempt=2).folder
    attempts.abort(run, aborted, "a test")
    undecided = run.begin(step=3, term=term, attempt=3).folder
    orphans = run.orphans()
    assert [(orphan.name, orphan.why) for orphan in orphans] == [
        (aborted, RemovalReason.ABORTED),
        (undecided, RemovalReason.DEAD_WRITER),
    ]
    assert run.clean() == orphans
    assert run.orphans() == ()
    assert _steps(run) == [1]


def test_an_attempt_of_another_machine_must_be_quiet_for_an_hour(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    term = run.claim_term(None)
    folder = run.begin(step=1, term=term, attempt=1).folder
    there = terms.Trainer(host="other", pid=1, boot="other", process_started="1")
    monkeypatch.setattr(terms, "this_writer", lambda: there)
    assert run.orphans() == ()
    assert [item.name for item in run.orphans(now_s=time.time() + 3700)] == [folder]
    os.utime(tmp_path / "run" / folder, (1.0, 1.0))
    assert [item.name for item in run.orphans()] == [folder]
    (tmp_path / "run" / folder / "data").write_bytes(b"1")
    os.utime(tmp_path / "run" / folder, (1.0, 1.0))
    assert run.orphans() == ()


def test_old_temporary_names_are_removed_everywhere(run: Run, save: Save, tmp_path: Path) -> None:
    folder = save(run, 1, run.claim_term(None), 1)
    root = tmp_path / "run"
    names = [
        f"{folder}/manifest.json.tmp-111111111111",
        "run.json.tmp-111111111111",
        "terms/00000001.json.tmp-111111111111",
    ]
    for name in names:
        (root / name).write_bytes(b"1")
    assert run.orphans() == ()
    later = time.time() + 3700
    assert len(run.clean(now_s=later)) == 3
    assert run.orphans(now_s=later) == ()
    assert _steps(run) == [1]
    assert not list(root.rglob("*.tmp-*"))


def test_a_folder_that_is_half_deleted_is_removed_at_once_and_no_other_temporary_one(
    run: Run, save: Save, tmp_path: Path
) -> None:
    save(run, 1, run.claim_term(None), 1)
    names = ("step-00000009.1-9.tmp-111111111111", "mine.tmp-111111111111")
    for name in names:
        (tmp_path / "run" / name).mkdir()
        (tmp_path / "run" / name / "data").write_bytes(b"1")
    assert [one.name for one in run.clean()] == [names[0]]
    assert _steps(run) == [1]


def test_aborting_an_attempt_deletes_its_files_unless_it_is_committed(run: Run, save: Save) -> None:
    term = run.claim_term(None)
    lock = run.lock_term(term)
    committed = save(run, 1, term, 1)
    attempt = run.begin(step=2, term=term, attempt=2)
    assert not attempt.abort("a test")
    name = parse_folder(committed)
    assert name is not None
    assert Attempt(run.store, name).abort("too late")
    assert [entry.name for entry in run.store.list("") if entry.is_folder] == [committed, "terms"]
    lock.close()


# Pruning


def test_prune_deletes_what_the_policy_drops_later_ones_first(run: Run, saved: Saved) -> None:
    folders = saved(1, 2, 3, 4, 5)
    plan = plan_prune(run, Keep(last=2), resumed_from=folders[0])
    assert plan.deletions == (folders[2], folders[1])
    assert plan.sharing().freed_bytes(plan.deletions) > 10_000
    assert _steps(run) == [1, 2, 3, 4, 5]
    assert plan.execute() == plan.deletions
    assert _steps(run) == [1, 4, 5]
    assert plan_prune(run, Keep(last=2), resumed_from=folders[0]).deletions == ()


def test_a_pinned_checkpoint_stays_even_if_pinned_after_the_plan(run: Run, saved: Saved) -> None:
    folders = saved(1, 2, 3, 4)
    run.pin(folders[0])
    run.pin(folders[0])
    plan = plan_prune(run, Keep(last=1), in_use=frozenset({folders[2]}))
    assert plan.deletions == (folders[1],)
    run.pin(folders[1])
    assert plan.execute() == ()
    run.unpin(folders[0])
    run.unpin(folders[0])
    assert plan_prune(run, Keep(last=1)).execute() == (folders[2], folders[0])


def test_only_a_checkpoint_can_be_pinned(run: Run) -> None:
    term = run.claim_term(None)
    folder = run.begin(step=1, term=term, attempt=1).folder
    for name in (folder, "step-00000009.1-9"):
        with pytest.raises(NotFoundError):
            run.pin(name)
    with pytest.raises(UsageError):
        run.unpin("../elsewhere")


def test_a_reader_beside_a_pruner_never_sees_a_part(run: Run, saved: Saved, tmp_path: Path) -> None:
    saved(*range(1, 21))
    stop = threading.Event()
    wrong: list[str] = []

    def look() -> None:
        other = Run.open(DirectoryStore(tmp_path / "run"))
        while not stop.is_set():
            wrong.extend(item.folder for item in other.checkpoints() if item.error is not None)

    thread = threading.Thread(target=look)
    thread.start()
    plan_prune(run, Keep(last=1)).execute()
    stop.set()
    thread.join()
    assert wrong == []
    assert _steps(run) == [20]


def test_records_are_plain_json_for_people(run: Run, tmp_path: Path) -> None:
    run.claim_term(None)
    record = json.loads((tmp_path / "run" / "terms" / "00000001.json").read_bytes())
    assert record["term"]["term"] == 1
    assert json.loads((tmp_path / "run" / "run.json").read_bytes())["run"] == run.id


def test_a_metric_that_nobody_has_is_told_and_deletes_nothing(run: Run, saved: Saved) -> None:
    saved(1, 2, 3, metrics={"loss": 1.0, "acc": 0.5})
    plan = plan_prune(run, Keep(best=1, metric="nope"))
    assert plan.deletions == ()
    assert all(name in plan.lacking for name in ("'nope'", "loss", "acc"))
    assert plan_prune(run, Keep(best=1, metric="loss")).lacking is None


def test_a_link_that_looks_like_an_attempt_is_left_alone_with_all_behind_it(
    run: Run, save: Save, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "mine.txt").write_text("x")
    save(run, 1, run.claim_term(None), 1)
    (tmp_path / "run" / "step-00000002.1-2").symlink_to(outside)
    assert run.attempts() == ()
    run.claim_term((1, 1))
    run.clean(now_s=time.time() + 1e6)
    assert [path.name for path in outside.iterdir()] == ["mine.txt"]
    assert (tmp_path / "run" / "step-00000002.1-2").is_symlink()
