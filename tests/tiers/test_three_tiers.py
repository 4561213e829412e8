"""Shared memory, a folder and an object store at once: the nearest that is still there gives it."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

import laststep
from cases import long
from expect import raises
from laststep.memory import segments
from waiting import wait_until

sys.path.insert(0, str(Path(__file__).parents[1] / "storage"))
import fake_s3

if TYPE_CHECKING:
    from collections.abc import Iterator

BUCKET = "s3://bucket/run"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[fake_s3.Server]:
    with fake_s3.named(monkeypatch) as state:
        yield state


class Job:
    """A job that ends in the middle, and is started again."""

    def __init__(self, folder: Path) -> None:
        self.base, self.primary = folder / "shm", folder / "primary"
        self.base.mkdir(parents=True)
        self.state = {"w": torch.zeros(5 << 20), "s": torch.zeros(3)}

    def opened(self) -> laststep.Checkpointer:
        tiers = [f"shm://{self.base}", str(self.primary), BUCKET]
        return laststep.Checkpointer(
            tiers=tiers,
            state=self.state,
            host_memory_bytes=160 << 20,
            options=laststep.Options(progress=False),
        )

    def trains(self, steps: range) -> None:
        """Saves these steps, and fails when all tiers have the last."""
        with self.opened() as ckpt:
            ckpt.restore()
            for step in steps:
                for tensor in self.state.values():
                    tensor.fill_(step)
                handle = ckpt.save(step)
                handle.result()
            wait_until(lambda: BUCKET in handle.report.tiers)
            raise ZeroDivisionError

    def comes_back(self) -> int | None:
        """The step that it comes back at, all of whose bits are right."""
        for tensor in self.state.values():
            tensor.fill_(-1)
        with self.opened() as ckpt:
            restored = ckpt.restore()
        assert all(bool((tensor == restored.step).all()) for tensor in self.state.values())
        return restored.step


@pytest.mark.parametrize("lost", ["memory and disk", *long("nothing", "memory", "disk")])
def test_a_run_comes_back_from_what_is_left(
    server: fake_s3.Server, run_folder: Path, lost: str
) -> None:
    job = Job(run_folder)
    with pytest.raises(ZeroDivisionError):
        job.trains(range(3))
    if "memory" in lost:
        for segment in segments.found(str(job.base)):
            segment.remove()
    if "disk" in lost:
        shutil.rmtree(job.primary)
    if lost == "disk":  # the snapshot in memory is of a run that is gone: the user has to decide
        with raises(laststep.UsageError, "laststep recover"):
            job.comes_back()
        assert laststep.recover(job.primary, base=job.base).ok
    assert job.comes_back() == 2
    assert laststep.open(BUCKET).steps()[-1] == 2
    assert laststep.open(BUCKET).latest().verify().damage == ()
