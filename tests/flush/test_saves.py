"""A save under way is in one place, from `save()` until its caller was told how it ended."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

import laststep
from laststep.flush import server as serving
from laststep.flush.protocol import Begin, Drop
from laststep.flush.saves import Saves, SaveUnderWay, Stage
from laststep.plan.files import plan_save
from waiting import PATIENCE_S

if TYPE_CHECKING:
    from pathlib import Path


def test_a_save_that_fails_while_failures_are_looked_for_is_told_by_the_next_call(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = threading.Event()
    is_over, finish = Stage.over, serving.SaveWriter.finish

    def fail(flush: serving.SaveWriter, *arguments: object) -> object:
        if not flush.folder.startswith("step-00000000"):
            return finish(flush, *arguments)
        go.wait(PATIENCE_S)
        raise laststep.StorageError("the disk is full")

    def over_just_after(stage: Stage) -> bool:
        """What was asked for fails as soon as the answer is known."""
        answer = is_over(stage)
        if not answer and stage is handle.committed:
            go.set()
            stage.over_within(PATIENCE_S)
        return answer

    checkpointer = laststep.Checkpointer(run_folder, s={"n": 1}, flush="thread")
    with monkeypatch.context() as patch:
        patch.setattr(serving.SaveWriter, "finish", fail)
        handle = checkpointer.save(0)
        handle.captured.wait(PATIENCE_S)
        patch.setattr(Stage, "over", over_just_after)
        checkpointer.save(1)
    with pytest.raises(laststep.StorageError, match="step 0 failed: the disk is full"):
        checkpointer.wait()
    checkpointer.save(0).wait(PATIENCE_S)
    checkpointer.close()


def test_whoever_hears_first_how_a_save_ended_ends_it_and_nobody_else() -> None:
    saves, save = Saves(), SaveUnderWay(None, 7)  # type: ignore[arg-type]
    saves.enter(save)
    assert saves.find(save.number) is save
    assert saves.end(save.number) is save
    assert saves.end(save.number) is None
    assert saves.find(save.number) is None
    assert saves.all() == [save]  # its caller does not know yet
    assert saves.take_over() == []
    save.handle.fail(laststep.AbortedError("it was given up"))
    assert saves.take_over() == [save]
    assert saves.all() == []
    assert saves.tell() == [save.handle.error]
    assert saves.tell() == []


def test_a_dead_flusher_gets_no_more_saves_until_there_is_another() -> None:
    saves, error = Saves(), laststep.StorageError("the flusher is gone")
    ended, open_one, late = (SaveUnderWay(None, step) for step in range(3))  # type: ignore[arg-type]
    saves.enter(ended)
    saves.enter(open_one)
    saves.end(ended.number)
    assert saves.refuse(error) == [open_one]
    with pytest.raises(laststep.StorageError, match="the flusher is gone"):
        saves.enter(late)
    saves.refusal = None
    saves.enter(late)
    assert saves.to_end() == [open_one, late]
    assert late.number > open_one.number


def test_a_save_that_is_called_off_before_it_began_is_announced_first() -> None:
    """The flusher ignores what is said of a save that it does not know."""
    sent: list[object] = []
    client = SimpleNamespace(send=sent.append, announce=lambda _: None)
    save = SaveUnderWay(client, 7)  # type: ignore[arg-type]
    save.planned(plan_save(()), lambda: None)  # type: ignore[arg-type, return-value]
    save.call_off("the job ends")
    assert [type(message) for message in sent] == [Begin, Drop]
