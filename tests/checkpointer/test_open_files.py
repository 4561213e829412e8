"""Runs that fail leave no file open in their process, even if no garbage is ever collected."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import signal
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

import laststep
from disks import FailingDisk, Kind
from laststep.flush import server
from laststep.storage.directory import DirectoryStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture
def no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def open_files() -> Counter[str]:
    """What the descriptors of this process are open for."""
    found: Counter[str] = Counter()
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # that of the listing
            found[str(link.readlink())] += 1
    return found


def run_and_fail(folder: Path, flush: str, act: Callable[[laststep.Checkpointer], object]) -> None:
    """Save twice, so that the second save shares blocks with the first, and see it fail."""
    tiers = [f"shm://{folder.parent}", str(folder)]
    state = {"weight": torch.ones(5 << 20)}

    def train() -> None:
        with laststep.Checkpointer(
            tiers=tiers,
            state=state,
            options=laststep.Options(flush=flush, progress=False),
            host_memory_bytes=128 << 20,
        ) as ckpt:
            ckpt.restore()
            ckpt.save(1).result()
            state["weight"][:9] = 2
            act(ckpt)
            ckpt.save(2).result()

    with pytest.raises(laststep.StorageError):
        train()


def compare(folder: Path, fail: Callable[[Path], None], runs: int) -> None:
    fail(folder / "warm")
    before = open_files()
    for number in range(runs):
        fail(folder / str(number))
    assert open_files() - before == Counter()


@pytest.mark.parametrize("kind", [Kind.CREATE_FILE, Kind.WRITE, Kind.SYNC, Kind.LINK])
@pytest.mark.usefixtures("no_collection")
def test_failed_saves_leave_no_file_open(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind
) -> None:
    run_folder.mkdir()
    disks: list[FailingDisk] = []

    def open_failing(path: str) -> DirectoryStore:
        disks.append(FailingDisk(1 << 30, errno.EIO, lasting=True, kinds=frozenset({kind})))
        return DirectoryStore(path, disk=disks[-1])

    def fail_from_now_on(_: laststep.Checkpointer) -> None:
        disks[-1]._n = disks[-1].calls + 1

    monkeypatch.setattr(server, "open_store", open_failing)
    compare(run_folder, lambda folder: run_and_fail(folder, "thread", fail_from_now_on), 2)


@pytest.mark.usefixtures("no_collection")
def test_runs_whose_flusher_dies_leave_no_file_open(run_folder: Path) -> None:
    run_folder.mkdir()

    def stop_and_kill(ckpt: laststep.Checkpointer) -> None:
        pid = ckpt._client.helper_pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        handle = ckpt.save(2)
        os.kill(pid, signal.SIGKILL)
        handle.result()

    compare(run_folder, lambda folder: run_and_fail(folder, "process", stop_and_kill), 2)
