"""What settings come to on a machine."""

from __future__ import annotations

import pytest

from laststep.settings import Settings


@pytest.mark.parametrize(
    ("cores", "ranks", "threads"),
    [(1, 1, 2), (2, 1, 2), (2, 4, 2), (8, 1, 8), (8, 2, 4), (64, 1, 16), (64, 8, 2)],
)
def test_as_many_threads_read_as_there_are_cores_two_in_each_rank_at_the_least(
    cores: int, ranks: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    assert Settings().readers(ranks) == threads


def test_threads_that_wait_for_a_server_need_no_core_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    assert [Settings().readers(ranks, remote=True) for ranks in (1, 2, 8)] == [8, 4, 2]
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    assert Settings().readers(1, remote=True) == Settings().readers(1)
