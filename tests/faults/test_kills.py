"""Trainers and flushers that die: what was handed over is kept, nothing hangs, nothing is left."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

import laststep
from cases import long
from expect import names, raises
from laststep.flush.protocol import Begun
from laststep.flush.saves import Save
from stored import folders
from waiting import PATIENCE_S, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable


def numbers(run: Path) -> tuple[int, float]:
    """What the newest checkpoint holds."""
    state = laststep.load(run)["state"]
    (value,) = state["t"].unique().tolist()
    return state["n"], value


@pytest.mark.parametrize("options", [(), ("--compression", "max", "--size", str(5 << 20))])
def test_a_save_that_was_handed_over_is_committed_though_the_trainer_is_killed(
    start: Callable[..., object], run_folder: Path, options: tuple[str, ...]
) -> None:
    trainer = start(*options)
    trainer.do("save 1")
    trainer.do("wait")
    trainer.stop_helper()
    trainer.do("capture 2")
    trainer.kill()
    assert laststep.open(run_folder).steps() == [1]
    trainer.resume_helper()
    trainer.wait_for_helper()
    assert laststep.open(run_folder).steps() == [1, 2]
    assert numbers(run_folder) == (2, 2.0)
    assert laststep.open(run_folder).latest().verify().damage == ()


def test_a_flusher_that_is_killed_while_it_encodes_leaves_what_was_committed(
    start: Callable[..., object], run_folder: Path
) -> None:
    options = ("--compression", "max", "--size", str(10 << 20))
    for step in (1, 2):
        trainer = start(*options)
        assert trainer.restored == (step - 1 or None)
        trainer.do(f"save {step}")
        trainer.do("wait")
        trainer.tell(f"save {10 + step}")
        trainer.hear("done")
        wait_until(lambda step=step: len(folders(run_folder)) > step)
        trainer.kill_helper()
        trainer.kill()
        trainer.wait_for_helper()
        steps = laststep.open(run_folder).steps()
        assert steps in (list(range(1, step + 1)), [*range(1, step + 1), 10 + step])
        assert all(not stored.verify().damage for stored in laststep.open(run_folder))
        if len(steps) > step:  # it was faster than the signal
            return
        assert numbers(run_folder) == (step, float(step))


def test_a_new_trainer_waits_for_the_flusher_of_the_one_that_was_killed(
    start: Callable[..., object],
) -> None:
    first = start()
    first.do("save 1")
    first.do("wait")
    first.stop_helper()
    first.do("capture 2")
    first.kill()
    second = start(when_it_waits=first.resume_helper)
    assert second.restored == 2
    second.do("save 3")
    second.do("close")


def test_a_new_trainer_waits_for_a_first_save_of_which_nothing_is_in_the_run_yet(
    start: Callable[..., object], run_folder: Path
) -> None:
    first = start()
    first.stop_helper()
    first.do("capture 1")
    first.kill()
    assert folders(run_folder) == []
    second = start(when_it_waits=first.resume_helper)
    assert second.restored == 1
    second.do("save 2")
    second.do("close")
    first.wait_for_helper()
    assert laststep.open(run_folder).steps() == [1, 2]
    assert not list((run_folder / "terms").glob("start-*.lock"))


def test_the_orphan_of_a_dead_trainer_takes_the_run_from_nobody(
    start: Callable[..., object], run_folder: Path
) -> None:
    first = start()
    first.stop_helper()
    first.do("capture 1")
    first.kill()
    second = start("--patience", "0.1")  # it gives up waiting
    assert second.restored is None
    second.do("save 5")
    second.do("wait")
    first.resume_helper()
    first.wait_for_helper()
    for step in (6, 7):
        second.do(f"save {step}")
        second.do("wait")
    second.do("close")
    assert laststep.open(run_folder).steps() == [5, 6, 7]
    assert numbers(run_folder) == (7, 7.0)


def test_what_an_orphan_commits_before_its_successor_saves_is_not_abandoned(
    start: Callable[..., object], run_folder: Path
) -> None:
    first = start()
    first.stop_helper()
    first.do("capture 1")
    first.kill()
    second = start("--patience", "0.1")  # it gives up waiting
    assert second.restored is None
    first.resume_helper()
    first.wait_for_helper()
    second.do("save 5")
    second.tell("wait")
    assert second.hear("failed")[0] == "AbortedError"
    second.do("close")
    third = start()
    assert third.restored == 1
    third.do("save 2")
    third.do("close")
    assert laststep.open(run_folder).steps() == [1, 2]


def test_a_job_whose_flusher_died_before_a_commit_does_not_take_the_run_back(
    run_folder: Path, flusher: Callable[[], int]
) -> None:
    first = laststep.Checkpointer(run_folder, state=state_of(0), host_memory_bytes=64 << 20)
    first.restore()
    pid = flusher()
    os.kill(pid, signal.SIGSTOP)
    first.save(0)
    os.kill(pid, signal.SIGKILL)
    with raises(laststep.StorageError, step=0, found="signal 9"):
        first.wait(PATIENCE_S)
    with laststep.Checkpointer(
        run_folder, state=state_of(5), options=laststep.Options(flush="thread")
    ) as second:
        second.restore()
        second.save(5).wait(PATIENCE_S)
        for step in (1, 2):
            with raises(laststep.AbortedError, step=step, found="step-00000005"):
                first.save(step).wait(PATIENCE_S)
        second.save(6).wait(PATIENCE_S)
    first.close()
    assert laststep.open(run_folder).steps() == [5, 6]


def test_a_job_that_was_taken_over_goes_on_after_a_restore(run_folder: Path) -> None:
    first = laststep.Checkpointer(
        run_folder, state=state_of(0), options=laststep.Options(flush="thread")
    )
    with laststep.Checkpointer(
        run_folder, state=state_of(5), options=laststep.Options(flush="thread")
    ) as second:
        first.restore()
        second.restore()
        second.save(5).wait(PATIENCE_S)
        with raises(laststep.AbortedError, step=0, remedy="restore()"):
            first.save(0).wait(PATIENCE_S)
        assert first.restore().step == 5
        first.save(6).wait(PATIENCE_S)
    first.close()
    assert laststep.open(run_folder).steps() == [5, 6]


@pytest.mark.parametrize("flush", ["thread", "process"])
def test_a_flusher_that_is_not_understood_is_dead_before_anybody_hears_of_it(
    flush: str, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpointer = laststep.Checkpointer(
        run_folder,
        state=state_of(0),
        host_memory_bytes=64 << 20,
        options=laststep.Options(flush=flush),
    )
    checkpointer.save(0).wait(PATIENCE_S)
    helper = checkpointer._client._helper
    hear = Save.hear

    def fail(save: Save, message: object) -> None:
        if isinstance(message, Begun):
            raise ZeroDivisionError("as asked")
        hear(save, message)

    monkeypatch.setattr(Save, "hear", fail)
    with raises(laststep.StorageError, step=1):
        checkpointer.save(1).wait(PATIENCE_S)
    assert helper.join(0)
    if helper.pid is not None:
        assert not Path(f"/proc/{helper.pid}").exists()  # reaped
    monkeypatch.undo()
    checkpointer.save(2).wait(PATIENCE_S)
    checkpointer.close()


def test_the_death_of_a_flusher_is_noticed_though_a_forked_child_holds_its_end(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch, flusher: Callable[[], int]
) -> None:
    popen, children = subprocess.Popen, []
    ended, end = os.pipe()

    def fork_first(*arguments: object, **options: object) -> object:
        child = os.fork()
        if child == 0:
            os.close(end)
            os.read(ended, 1)  # until the test is over
            os._exit(0)
        children.append(child)
        return popen(*arguments, **options)

    monkeypatch.setattr(subprocess, "Popen", fork_first)
    checkpointer = laststep.Checkpointer(run_folder, state=state_of(0), host_memory_bytes=64 << 20)
    try:
        checkpointer.save(0).wait(PATIENCE_S)
        os.kill(flusher(), signal.SIGSTOP)
        checkpointer.save(1)
        os.kill(flusher(), signal.SIGKILL)
        with pytest.raises(laststep.StorageError, match="signal 9"):
            checkpointer.wait(PATIENCE_S)
        monkeypatch.undo()
        checkpointer.save(2).wait(PATIENCE_S)
        checkpointer.close()
    finally:
        os.close(end)
        os.close(ended)
        for child in children:
            os.waitpid(child, 0)


@pytest.mark.parametrize("also_flusher", [pytest.param(False, marks=pytest.mark.long), True])
def test_a_save_in_the_midst_of_its_capture_is_given_up_and_cleaned_up(
    also_flusher: bool, start: Callable[..., object], run_folder: Path
) -> None:
    trainer = start("--capture", "lazy", "--size", str(24 << 20))  # six chunks, four slots
    trainer.do("save 1")
    trainer.do("wait")
    trainer.do("hold 5")
    trainer.tell("save 2")
    assert {trainer.next_words()[0], trainer.next_words()[0]} == {"held", "done"}
    wait_until(lambda: len(folders(run_folder)) == 2)
    if also_flusher:
        trainer.kill_helper()
    trainer.kill()
    trainer.wait_for_helper()
    catalog = laststep.open(run_folder)
    assert catalog.steps() == [1]
    if not also_flusher:
        assert len(folders(run_folder)) == 1
    second = start("--size", str(24 << 20))
    assert second.restored == 1
    second.do("save 2")
    second.do("close")
    assert laststep.open(run_folder).steps() == [1, 2]
    assert len(folders(run_folder)) == 2
    assert numbers(run_folder) == (2, 2.0)


def nobody_listens() -> bool:
    """Whether the death of the flusher was noticed, and told."""
    return all(thread.name != "laststep-receive" for thread in threading.enumerate())


def state_of(n: int) -> dict[str, object]:
    return {"t": torch.full((1000,), float(n)), "n": n}


@pytest.mark.parametrize("flush", [pytest.param("thread", marks=pytest.mark.long), "process"])
def test_who_is_taken_over_hears_by_which_trainer(flush: str, start: Callable[..., object]) -> None:
    first = start()
    first.do("save 0")
    first.do("wait")
    second = start("--flush", flush)
    second.do("save 1")
    second.do("wait")
    first.do("save 2")
    first.tell("wait")
    told = " ".join(first.hear("failed"))
    assert "AbortedError" in told
    assert names(told, f"process {second.pid} on ", "(term 2)")


@pytest.mark.parametrize("moment", ["idle", "saving", "with two saves"])
def test_a_killed_flusher_is_an_error_at_the_next_call_and_the_next_save_works(
    moment: str, run_folder: Path, flusher: Callable[[], int]
) -> None:
    state = state_of(0)
    checkpointer = laststep.Checkpointer(run_folder, state=state, host_memory_bytes=64 << 20)
    checkpointer.save(0).wait(PATIENCE_S)
    pid = flusher()
    if moment == "idle":
        os.kill(pid, signal.SIGKILL)
        wait_until(nobody_listens)
    else:
        os.kill(pid, signal.SIGSTOP)
        checkpointer.save(1)
        if moment == "with two saves":
            checkpointer.save(2)
        os.kill(pid, signal.SIGKILL)
        with raises(laststep.StorageError, found="signal 9"):
            checkpointer.wait(PATIENCE_S)
    state["t"].fill_(5)
    state["n"] = 5
    checkpointer.save(5).wait(PATIENCE_S)
    assert flusher() != pid
    checkpointer.close()
    # The one from before the flusher's death is still an ancestor.
    assert laststep.open(run_folder).steps() == [0, 5]
    assert numbers(run_folder) == (5, 5.0)


def test_a_flusher_killed_again_and_again_loses_nothing_that_was_committed(
    run_folder: Path, flusher: Callable[[], int]
) -> None:
    state = state_of(0)
    checkpointer = laststep.Checkpointer(run_folder, state=state, host_memory_bytes=64 << 20)
    committed = []
    moments = ["at once", "captured", "durable", "committed", "at once", "captured"]
    for step, moment in enumerate(moments):
        state["t"].fill_(step)
        state["n"] = step
        handle = checkpointer.save(step)
        if moment != "at once":
            assert getattr(handle, moment).wait(PATIENCE_S)
        os.kill(flusher(), signal.SIGKILL)
        try:
            handle.wait(PATIENCE_S)
            committed.append(step)
        except laststep.StorageError:
            pass
        wait_until(nobody_listens)
        assert set(committed) <= set(laststep.open(run_folder).steps() if committed else [])
    checkpointer.close()
    assert 3 in committed
    assert numbers(run_folder)[0] >= committed[-1]


def test_a_save_in_the_moment_between_death_and_its_notice_does_not_hang(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch, flusher: Callable[[], int]
) -> None:
    from laststep.flush.client import HelperProcess

    join = HelperProcess.join
    finds_out, saved = threading.Event(), threading.Event()

    def slowly(self: HelperProcess, timeout_s: float) -> bool:
        if timeout_s == 1:  # while it finds out how the flusher ended
            finds_out.set()
            saved.wait(PATIENCE_S)
        return join(self, timeout_s)

    monkeypatch.setattr(HelperProcess, "join", slowly)
    checkpointer = laststep.Checkpointer(run_folder, state=state_of(0), host_memory_bytes=64 << 20)
    checkpointer.save(0).wait(PATIENCE_S)
    os.kill(flusher(), signal.SIGKILL)
    assert finds_out.wait(PATIENCE_S)
    handle = checkpointer.save(1)
    saved.set()
    with pytest.raises(laststep.StorageError):
        handle.wait(PATIENCE_S)
    wait_until(nobody_listens)
    checkpointer.save(2).wait(PATIENCE_S)
    checkpointer.close()


@pytest.mark.parametrize(
    ("flush", "way", "status"),
    [
        pytest.param("process", "return", 0, marks=pytest.mark.long),
        pytest.param("process", "exit", 3, marks=pytest.mark.long),
        ("process", "raise", 1),
        ("thread", "exit", 3),
    ],
)
def test_saves_are_finished_when_the_program_ends_without_close(
    flush: str, way: str, status: int, start: Callable[..., object], run_folder: Path
) -> None:
    trainer = start("--flush", flush, "--size", str(10 << 20))
    trainer.do("save 1")
    trainer.do("save 2")
    trainer.tell(way)
    assert trainer.end() == status
    assert laststep.open(run_folder).steps() == [1, 2]
    assert numbers(run_folder) == (2, 2.0)


def test_a_program_that_ends_the_hard_way_leaves_its_flusher_to_finish(
    start: Callable[..., object], run_folder: Path
) -> None:
    trainer = start()
    trainer.do("capture 1")
    trainer.tell("_exit")
    trainer.end()
    trainer.wait_for_helper()
    assert numbers(run_folder) == (1, 1.0)


@pytest.mark.parametrize("name", ["TERM", "USR1", *long("USR2", "HUP", "XCPU")])
def test_a_terminated_trainer_leaves_its_flusher_to_finish(
    start: Callable[..., object], run_folder: Path, name: str
) -> None:
    number = getattr(signal, f"SIG{name}")
    trainer = start()
    trainer.stop_helper()
    trainer.do("capture 1")
    os.kill(trainer.pid, number)
    os.kill(trainer.helper, number)  # as a scheduler signals all of a job
    assert trainer.end() == -number
    trainer.resume_helper()
    trainer.wait_for_helper()
    assert numbers(run_folder) == (1, 1.0)


def test_forked_workers_that_outlive_a_killed_trainer_do_not_deceive_the_flusher(
    start: Callable[..., object], run_folder: Path
) -> None:
    trainer = start()
    trainer.do("save 1")
    trainer.do("wait")
    trainer.tell("workers")
    trainer.children = [int(word) for word in trainer.hear("workers")]
    assert len(trainer.children) == 2
    for pid in trainer.children:
        os.kill(pid, signal.SIGSTOP)  # so that they surely outlive it
    trainer.stop_helper()
    trainer.do("capture 2")
    trainer.kill()
    trainer.resume_helper()
    trainer.wait_for_helper()  # no orphan
    assert all(Path(f"/proc/{pid}").exists() for pid in trainer.children)
    assert numbers(run_folder) == (2, 2.0)


def test_the_older_of_two_trainers_on_a_run_is_told_and_commits_nothing_more(
    start: Callable[..., object], run_folder: Path
) -> None:
    older = start()
    older.do("save 1")
    older.do("wait")
    newer = start()
    assert newer.restored == 1
    newer.do("save 2")
    newer.do("wait")
    for step in (3, 4):
        older.tell(f"capture {step}")
        older.hear("done")
        older.tell("wait")
        assert older.hear("failed")[0] == "AbortedError"
    newer.do("save 5")
    newer.do("close")
    assert laststep.open(run_folder).steps() == [1, 2, 5]
    older.tell("close")
    older.hear("done")


def test_a_zombie_that_wakes_up_after_its_successor_changes_nothing_of_the_lineage(
    start: Callable[..., object], run_folder: Path
) -> None:
    zombie = start()
    zombie.do("save 1")
    zombie.do("wait")
    zombie.stop_helper()
    zombie.do("capture 2")  # announced, but not begun: the flusher stands still
    newer = start("--patience", "0.1")
    assert newer.restored == 1
    newer.do("save 7")
    newer.do("wait")
    zombie.resume_helper()
    zombie.tell("wait")
    assert zombie.hear("failed")[0] == "AbortedError"
    assert laststep.open(run_folder).steps() == [1, 7]
    newer.do("close")
    assert numbers(run_folder) == (7, 7.0)


def test_close_ends_a_flusher_that_stands_still_and_has_nothing_left_to_do(
    start: Callable[..., object], run_folder: Path
) -> None:
    trainer = start("--end", "0.5")
    trainer.do("save 1")
    trainer.do("wait")
    trainer.stop_helper()
    trainer.do("close")
    trainer.wait_for_helper()
    assert laststep.open(run_folder).steps() == [1]
