"""Who waits for ranks that do not make a call says so in the log."""

from __future__ import annotations

import contextlib
import logging
import threading
from typing import TYPE_CHECKING

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d

from laststep.ranks import key_value
from laststep.ranks.group import Rank
from waiting import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Iterator


class Told(logging.Handler):
    """What was said, and that something was."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.came = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        self.came.set()


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[Told]:
    """All ranks are this process, meet in one store, and have patience unless a test says so."""
    monkeypatch.setattr(key_value, "PATIENCE_S", 600.0)
    store = dist.HashStore()
    monkeypatch.setattr(distributed_c10d, "_get_default_store", lambda: store)
    handler = Told()
    key_value.log.addHandler(handler)
    yield handler
    key_value.log.removeHandler(handler)


@pytest.mark.parametrize(
    ("come", "late"), [([2, 0], "rank 1"), ([0], "rank 1, rank 2"), ([2, 1], "rank 0")]
)
def test_the_last_who_comes_says_who_has_not_come(
    come: list[int], late: str, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first rank says so for all; the others only that they wait for the first."""
    with contextlib.ExitStack() as stack:
        for number in come:
            if number == come[-1]:
                monkeypatch.setattr(key_value, "PATIENCE_S", 0.0)
            stack.enter_context(key_value.awaited(Rank(number, 3), "restore()", "call", 150))
        assert told.came.wait(PATIENCE_S)
    [said] = told.lines
    assert said.startswith("restore()")
    assert late in said
    assert said.count("rank ") == late.count("rank ") + 1  # "every rank has to call it"


def test_a_rank_that_waits_for_others_than_the_first_says_nothing(
    told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    with key_value.awaited(Rank(0, 3), "restore()", "call", 150):
        before = set(threading.enumerate())
        monkeypatch.setattr(key_value, "PATIENCE_S", 0.0)
        with key_value.awaited(Rank(2, 3), "restore()", "call", 150):
            for looks in set(threading.enumerate()) - before:
                looks.join(PATIENCE_S)
    assert told.lines == []


def test_nobody_is_named_when_the_wait_is_over_in_time(told: Told) -> None:
    with key_value.awaited(Rank(0, 3), "restore()", "call", 150):
        pass
    assert told.lines == []
