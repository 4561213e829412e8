"""Optional features hear what happens to saves, and cannot cost one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

import laststep
from laststep import events
from laststep.flush.listeners import Listener, Retention
from waiting import PATIENCE_S

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("mib", [0, 20])
def test_the_first_save_tells_once_what_saves_need_and_leaves_no_file(
    mib: int, run_folder: Path
) -> None:
    told: list[events.Event] = []
    with laststep.Checkpointer(
        run_folder,
        state={"t": torch.zeros(1 + (mib << 18))},
        keep=laststep.Keep(last=2),
        options=laststep.Options(flush="thread", subscribers=[told.append]),
    ) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step).wait(PATIENCE_S)
    (need,) = [event for event in told if isinstance(event, events.Preflight)]
    assert need.state_bytes == 4 + (mib << 20)
    assert need.kept_checkpoints == 3
    assert need.needed_disk_bytes == 4 * need.state_bytes


@pytest.mark.parametrize("event", ["begun", "opened", "chunk", "captured", "committed"])
def test_a_listener_that_fails_costs_no_save(
    event: str, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert hasattr(Listener, event)

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(Retention, event, fail)
    with laststep.Checkpointer(
        run_folder, state={"t": torch.zeros(9)}, options=laststep.Options(flush="thread")
    ) as checkpointer:
        assert checkpointer.save(1).wait(PATIENCE_S)
    assert laststep.open(run_folder).steps() == [1]
