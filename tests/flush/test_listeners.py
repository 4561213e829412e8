"""Optional features hear what happens to saves, and cannot cost one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

import laststep
from expect import warned
from laststep.flush.listeners import Listener, Retention
from laststep.storage.directory import DirectoryStore
from waiting import PATIENCE_S

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(("free_bytes", "warnings"), [(0, 1), (1 << 40, 0), (None, 0)])
def test_a_disk_that_is_too_small_is_told_once(
    free_bytes: int | None,
    warnings: int,
    run_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(DirectoryStore, "free_bytes", lambda _: free_bytes)
    state = {"t": torch.zeros(100)}
    options = laststep.Options(flush="thread")
    with laststep.Checkpointer(
        run_folder, state=state, keep=laststep.Keep(last=2), options=options
    ) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step).wait(PATIENCE_S)
    assert len(warned(caplog, run_folder, "need 1600")) == warnings


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
