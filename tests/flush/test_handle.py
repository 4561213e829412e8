"""Stages of a save: reached in order, failed together, never reached after an error."""

from __future__ import annotations

import copy
import pickle
import threading
from typing import TYPE_CHECKING

import pytest
import torch

import laststep
from laststep.errors import Aborted, Usage
from laststep.flush.handle import SaveHandle

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def test_a_failure_reaches_every_stage_that_was_not_reached() -> None:
    handle = SaveHandle(1)
    handle.captured.reach()
    handle.fail(Aborted("gone"))
    assert handle.captured.done()
    assert not handle.durable.done()
    assert handle.durable.over()
    handle.durable.reach()
    handle.committed.reach()
    assert not handle.durable.done()
    assert not handle.committed.done()
    assert not handle.seen
    with pytest.raises(Aborted, match="gone"):
        handle.wait()
    assert handle.seen
    assert "failed" in repr(handle) or "captured" in repr(handle)


def test_waiting_is_bounded_by_its_timeout() -> None:
    handle = SaveHandle(1)
    assert handle.wait(0.01) is False
    threading.Timer(0.05, handle.committed.reach).start()
    assert handle.wait(20) is True


@pytest.mark.parametrize("flush", ["thread", "process"])
def test_stages_are_reached_in_their_order(flush: str, tmp_path: Path) -> None:
    order: list[tuple[str, int]] = []
    wrong: list[str] = []

    def see(event: object) -> None:
        name = type(event).__name__
        if name in ("Captured", "Durable", "Committed"):
            order.append((name, event.step))
            handle = handles.get(event.step)
            if handle is not None:
                done = [handle.captured.done(), handle.durable.done(), handle.committed.done()]
                if done != sorted(done, reverse=True):
                    wrong.append(f"{name}: {done}")

    handles: dict[int, SaveHandle] = {}
    with laststep.Checkpointer(
        tmp_path / "run", s={"t": torch.zeros(100)}, flush=flush, subscribers=[see],
        host_memory_bytes=64 << 20,
    ) as checkpointer:  # fmt: skip
        for step in range(8):
            handles[step] = checkpointer.save(step)
    assert wrong == []
    for step in range(8):
        mine = [name for name, at in order if at == step]
        assert mine == ["Captured", "Durable", "Committed"]
    assert [at for name, at in order if name == "Committed"] == list(range(8))


@pytest.mark.parametrize("act", [copy.copy, copy.deepcopy, pickle.dumps])
@pytest.mark.parametrize("part", [lambda handle: handle, lambda handle: handle.committed])
def test_neither_a_handle_nor_a_stage_of_it_can_be_copied(
    act: Callable[[object], object], part: Callable[[SaveHandle], object]
) -> None:
    with pytest.raises(Usage, match="cannot be copied or pickled"):
        act(part(SaveHandle(1)))
