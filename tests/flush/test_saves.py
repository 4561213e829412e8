"""A save under way is in one place, from `save()` until its caller was told how it ended."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

import laststep
from expect import raises
from laststep.flush import server as serving
from laststep.flush.protocol import Begin, Decide
from laststep.flush.saves import Save, Saves, SaveState
from saves_of import commit, flush, lone_save
from waiting import PATIENCE_S

if TYPE_CHECKING:
    from pathlib import Path


def test_a_save_that_fails_while_failures_are_looked_for_is_told_by_the_next_call(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = threading.Event()
    is_over, finish = Save.over.fget, serving.SaveWriter.finish

    def fail(flush: serving.SaveWriter, *arguments: object) -> object:
        if not flush.folder.startswith("step-00000000"):
            return finish(flush, *arguments)
        go.wait(PATIENCE_S)
        raise laststep.StorageError("the disk is full")

    def over_just_after(save: Save) -> bool:
        """What was asked for fails as soon as the answer is known."""
        answer = is_over(save)
        if not answer and save.handle is handle:
            go.set()
            save.wait_for(SaveState.COMMITTED, PATIENCE_S)
        return answer

    checkpointer = laststep.Checkpointer(
        run_folder, s={"n": 1}, options=laststep.Options(flush="thread")
    )
    with monkeypatch.context() as patch:
        patch.setattr(serving.SaveWriter, "finish", fail)
        handle = checkpointer.save(0)
        handle.captured.wait(PATIENCE_S)
        patch.setattr(Save, "over", property(over_just_after))
        checkpointer.save(1)
    with raises(laststep.StorageError, "the disk is full", step=0):
        checkpointer.wait()
    checkpointer.save(0).wait(PATIENCE_S)
    checkpointer.close()


def test_whoever_hears_first_how_a_save_ended_ends_it_and_nobody_else() -> None:
    saves, save = Saves(), lone_save(7)
    saves.enter(save)
    assert saves.find(save.number) is save
    save.fail(laststep.AbortedError("it was given up"))
    save.fail(laststep.AbortedError("it was given up twice"))
    commit(save)
    assert save.state is SaveState.FAILED
    assert saves.find(save.number) is None
    assert saves.all() == [save]  # its caller does not know yet
    saves.take_over()
    assert saves.all() == []
    assert saves.untold() == [save.error]
    assert saves.untold() == []
    assert save.error is not None
    assert save.error.what == "it was given up"


def test_a_save_does_not_go_back() -> None:
    save = lone_save(7)
    flush(save)
    with pytest.raises(RuntimeError):
        flush(save)
    commit(save)  # whatever was not heard before
    assert save.handle.captured.done()
    assert save.handle.durable.wait(0)
    save.fail(laststep.AbortedError("too late"))
    assert save.handle.result(0).folder == "step-00000007.1-1"


def test_a_dead_flusher_gets_no_more_saves_until_there_is_another() -> None:
    saves, error = Saves(), laststep.StorageError("the flusher is gone")
    ended, open_one, late = (lone_save(step) for step in range(3))
    saves.enter(ended)
    saves.enter(open_one)
    ended.fail(error)
    assert saves.refuse(error) == [open_one]
    with pytest.raises(laststep.StorageError, match="the flusher is gone"):
        saves.enter(late)
    saves.refusal = None
    saves.enter(late)
    assert saves.under_way() == [open_one, late]
    assert late.number > open_one.number


def test_a_save_that_is_called_off_before_it_began_is_announced_first() -> None:
    """The flusher ignores what is said of a save that it does not know."""
    sent: list[object] = []
    save = lone_save(7, send=sent.append, announce=sent.append)
    save.call_off("the job ends")
    assert [type(message) for message in sent] == [Begin, Decide]
