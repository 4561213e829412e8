"""When the flusher starts: with a restore, a step or a save, and whatever comes of it."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

import laststep
from expect import raises
from laststep import running
from laststep.ranks.group import Rank, leaves_cores
from waiting import PATIENCE_S, wait_until

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The processes that were started."""
    found: list[int] = []
    popen = subprocess.Popen

    def start(*arguments: object, **options: object) -> subprocess.Popen[bytes]:
        process = popen(*arguments, **options)
        found.append(process.pid)
        return process

    monkeypatch.setattr(subprocess, "Popen", start)
    return found


def test_it_runs_when_a_restore_returns_and_goes_with_who_only_restored(
    run_folder: Path, starts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "_START_S", PATIENCE_S)  # no machine is so slow
    state = {"t": torch.ones(1000)}
    with laststep.Checkpointer(
        run_folder, state=state, options=laststep.Options(flush="thread")
    ) as checkpointer:
        checkpointer.save(3)
    before = sorted(path.name for path in run_folder.rglob("*"))
    with laststep.Checkpointer(run_folder, state=state) as checkpointer:
        assert starts == []
        assert checkpointer.restore().step == 3
        assert checkpointer._client.up.is_set()
        assert checkpointer.restore().step == 3
        assert len(starts) == 1
        assert not _is_gone(starts[0])
    assert _is_gone(starts[0])
    assert sorted(path.name for path in run_folder.rglob("*")) == before


def test_the_save_after_a_restore_continues_by_the_flusher_that_runs(
    run_folder: Path, starts: list[int]
) -> None:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with laststep.Checkpointer(
        run_folder, model=model, options=laststep.Options(flush="thread")
    ) as checkpointer:
        checkpointer.save(0)
    with laststep.Checkpointer(run_folder, model=model) as checkpointer:
        checkpointer.restore()
        model(torch.ones(3)).sum().backward()
        optimizer.step()
        checkpointer.save(1)
    assert len(starts) == 1
    assert laststep.open(run_folder).steps() == [0, 1]


def test_where_ranks_leave_no_core_free_it_starts_when_all_is_read(
    run_folder: Path, starts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    state, before_the_end = {"t": torch.ones(1000)}, list[int]()
    with laststep.Checkpointer(
        run_folder, state=state, options=laststep.Options(flush="thread")
    ) as checkpointer:
        checkpointer.save(0)
    monkeypatch.setattr("laststep.checkpointer.leaves_cores", lambda _: False)
    with laststep.Checkpointer(run_folder, state=state) as checkpointer:
        checkpointer.subscribe(lambda _: before_the_end.append(len(starts)))
        checkpointer.restore()
        assert before_the_end == [0]
        assert len(starts) == 1
        checkpointer.save(1)
    assert len(starts) == 1
    assert laststep.open(run_folder).steps() == [0, 1]


@pytest.mark.parametrize(
    ("ranks", "cores", "leaves"), [(1, 1, True), (2, 2, False), (2, 4, True), (4, 2, False)]
)
def test_one_rank_or_fewer_than_there_are_cores_leave_one_for_it(
    ranks: int, cores: int, leaves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    assert leaves_cores(Rank(0, ranks)) is leaves


def test_without_a_restore_the_first_optimizer_step_starts_it(
    run_folder: Path, starts: list[int]
) -> None:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with laststep.Checkpointer(run_folder, model=model) as checkpointer:
        model(torch.ones(3)).sum().backward()
        assert starts == []
        optimizer.step()
        wait_until(lambda: len(starts) == 1)
        checkpointer.save(1)
    assert len(starts) == 1


def test_a_restore_does_not_fail_where_no_flusher_can_be_started(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    with laststep.Checkpointer(run_folder, state={"a": 1}) as checkpointer:
        monkeypatch.setattr(subprocess, "Popen", fail)
        assert checkpointer.restore().step is None


def test_the_helper_needs_nothing_of_the_environment_to_find_its_packages(
    run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("queue", "msgspec", "laststep"):  # what lies in the current folder is not meant
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong one')")
    monkeypatch.chdir(tmp_path)
    with laststep.Checkpointer(run_folder, state={"a": 1}) as checkpointer:
        checkpointer.save(0).wait(PATIENCE_S)


def test_a_start_that_fails_is_reported_by_the_save_and_the_next_one_works(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with laststep.Checkpointer(run_folder, model=model) as checkpointer:
        with monkeypatch.context() as patched:
            patched.setattr(subprocess, "Popen", fail)
            model(torch.ones(3)).sum().backward()
            optimizer.step()
            with raises(laststep.StorageError, found="Resource temporarily unavailable"):
                checkpointer.save(0)
        checkpointer.save(0).wait(PATIENCE_S)
    assert laststep.open(run_folder).steps() == [0]


def test_too_many_open_files_are_reported_with_the_limit_to_raise(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", fail)
    with pytest.raises(laststep.StorageError, match="Too many open files") as caught:
        laststep.Checkpointer(
            run_folder, state=torch.ones(3), options=laststep.Options(flush="thread")
        )
    assert "ulimit -n" in caught.value.remedy


def test_a_flusher_on_a_thread_that_fails_to_start_does_not_advise_a_thread(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with laststep.Checkpointer(
        run_folder, state={"a": 1}, options=laststep.Options(flush="thread")
    ) as checkpointer:
        monkeypatch.setattr(socket, "socketpair", fail)
        with pytest.raises(laststep.StorageError, match="Too many open files") as caught:
            checkpointer.save(0)
        monkeypatch.undo()
        assert "flush='thread'" not in caught.value.remedy
        checkpointer.save(0).wait(PATIENCE_S)


def test_closing_while_it_starts_leaves_no_process(run_folder: Path, starts: list[int]) -> None:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        checkpointer = laststep.Checkpointer(run_folder, model=model)
        model(torch.ones(3)).sum().backward()
        optimizer.step()
        checkpointer.close()
    for pid in starts:
        wait_until(lambda pid=pid: _is_gone(pid))


def _is_gone(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:  # noqa: PTH123 (a moment's look)
            return file.read().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True
