"""How many saves may be under way, and what happens to one more."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

import laststep
from expect import names, raises
from laststep.flush import server as serving
from laststep.flush.saves import Save, Saves, SaveState
from laststep.settings import MAX_UNCOMMITTED
from saves_of import lone_save
from waiting import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    WhenOneWaits = Callable[[Callable[[], None]], None]

WAITED_S = 0.1


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Flushes stand still until it is set."""
    event = threading.Event()
    finish = serving.SaveWriter.finish

    def held(flush: object, *arguments: object) -> object:
        event.wait(PATIENCE_S)
        return finish(flush, *arguments)

    monkeypatch.setattr(serving.SaveWriter, "finish", held)
    return event


def fill(checkpointer: laststep.Checkpointer) -> None:
    """As many saves as may be under way, none of which is still being captured."""
    for step in range(MAX_UNCOMMITTED):
        handle = checkpointer.save(step)
        assert handle.captured.wait(PATIENCE_S)
        assert handle.report.skipped is None
        checkpointer._capturer.settle()


@pytest.fixture
def when_one_waits(monkeypatch: pytest.MonkeyPatch) -> WhenOneWaits:
    """`when_one_waits(act)`: once somebody has waited for the end of a save for a while."""
    wait = Save.wait_for

    def prepare(act: Callable[[], None]) -> None:
        def ask(save: Save, state: SaveState, timeout_s: float | None = None) -> bool:
            monkeypatch.setattr(Save, "wait_for", wait)
            threading.Timer(WAITED_S, act).start()
            return wait(save, state, timeout_s)

        monkeypatch.setattr(Save, "wait_for", ask)

    return prepare


def test_small_saves_in_a_tight_loop_do_not_pile_up(
    gate: threading.Event, run_folder: Path, when_one_waits: WhenOneWaits
) -> None:
    with laststep.Checkpointer(
        run_folder, s={"n": 1}, options=laststep.Options(flush="thread")
    ) as checkpointer:
        fill(checkpointer)
        when_one_waits(gate.set)
        handle = checkpointer.save(100)
        assert handle.report.waited_s >= WAITED_S
        assert handle.report.stall_s >= handle.report.waited_s
        assert len(list(run_folder.glob("step-*"))) <= MAX_UNCOMMITTED + 1
    assert laststep.open(run_folder).steps() == [*range(MAX_UNCOMMITTED), 100]


def test_one_too_many_is_skipped_where_that_was_asked_for(
    gate: threading.Event, run_folder: Path
) -> None:
    with laststep.Checkpointer(
        run_folder, s={"n": 1}, options=laststep.Options(flush="thread", on_busy="skip")
    ) as checkpointer:
        fill(checkpointer)
        skipped = checkpointer.save(100)
        assert skipped.report.skipped.startswith(f"{MAX_UNCOMMITTED} ")
        assert skipped.wait() is False
        gate.set()
        checkpointer.wait()
        assert checkpointer.save(101).wait(PATIENCE_S)
    assert laststep.open(run_folder).steps() == [*range(MAX_UNCOMMITTED), 101]


def test_a_failed_save_makes_room_too(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch, when_one_waits: WhenOneWaits
) -> None:
    event = threading.Event()

    def fail(*_: object) -> object:
        event.wait(PATIENCE_S)
        raise laststep.StorageError("the disk is full")

    checkpointer = laststep.Checkpointer(
        run_folder, s={"n": 1}, options=laststep.Options(flush="thread")
    )
    with monkeypatch.context() as patch:
        patch.setattr(serving.SaveWriter, "finish", fail)
        fill(checkpointer)
        when_one_waits(event.set)
        checkpointer.save(100)  # its own call: earlier failures are told by the next one
        with pytest.raises(laststep.StorageError, match="disk is full"):
            checkpointer.wait()
    checkpointer.save(101).wait(PATIENCE_S)
    checkpointer.close()


def test_failed_saves_are_told_with_their_steps_and_the_same_reason_once() -> None:
    gone, no_room = laststep.AbortedError("rank 1 is gone"), laststep.StorageError("no room")
    saves = Saves()
    for step, error in ((4, gone), (9, no_room), (14, gone)):
        save = lone_save(step)
        saves.enter(save)
        save.fail(error)
    saves.take_over()
    with raises(laststep.AbortedError, "rank 1 is gone", step=4) as raised:
        saves.raise_failed()
    assert [
        names(note, *said)
        for note, said in zip(
            raised.value.__notes__, (("step 9", "no room"), ("step 14",)), strict=True
        )
    ] == [True, True]
    saves.raise_failed()  # each is told once
