"""Limits of the process, odd paths, runs that go away under a live Checkpointer."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import torch

import laststep
from expect import raises
from laststep.settings import as_keywords

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

HOW = {"host_memory_bytes": 64 << 20, "progress": False}


# Shared memory counts as a file; a load needs none.
@pytest.mark.parametrize(
    ("limit", "fail"), [("RLIMIT_FSIZE", 2), pytest.param("RLIMIT_AS", 3, marks=pytest.mark.long)]
)
def test_limits_that_leave_no_memory_are_told_with_a_remedy(
    limit: str, fail: int, run_folder: Path
) -> None:
    script = f"""
import resource, torch, laststep
laststep.save({{"n": 1}}, {str(run_folder.parent / "two")!r})
laststep.load({str(run_folder.parent / "two")!r})
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
most = 1 << 20 if "{limit}" == "RLIMIT_FSIZE" else used + (32 << 20)
resource.setrlimit(resource.{limit}, (most, resource.RLIM_INFINITY))
for act in (
    lambda: laststep.Checkpointer({str(run_folder)!r}, s={{"n": 1}}, host_memory_bytes=1 << 30),
    lambda: laststep.save({{"n": 1}}, {str(run_folder / "one")!r}),
    lambda: laststep.load({str(run_folder.parent / "two")!r}),
):
    try:
        act()
    except laststep.StorageError as error:
        assert error.remedy and error.expected and error.found, error
        assert "ulimit" in error.remedy, error
        print("told")
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, fail * "told\n"), done.stderr


def test_a_save_for_which_there_is_too_little_memory_is_told_and_the_next_one_works(
    run_folder: Path,
) -> None:
    script = f"""
import resource, torch, laststep
# A conjugate that is not resolved has to be copied once more.
conjugate = torch.ones(6 << 20, dtype=torch.complex64).conj()
state = {{"w": conjugate, "strided": torch.ones(2048, 1024).t()}}
run = {str(run_folder)!r}
with laststep.Checkpointer(run, s=state, host_memory_bytes=64 << 20) as checkpointer:
    checkpointer.restore()  # which starts all threads
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + (16 << 20), before[1]))
    try:
        checkpointer.save(1)
    except laststep.StorageError as error:
        assert error.found and error.remedy, error
        print("told")
    resource.setrlimit(resource.RLIMIT_AS, before)
    checkpointer.save(1).wait()
print(laststep.open(run).steps())
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "told\n[1]\n"), done.stderr


@pytest.mark.long
def test_too_little_memory_to_look_into_a_run_is_told_and_says_nothing_about_it(
    run_folder: Path,
) -> None:
    script = f"""
import resource, torch, laststep
run = {str(run_folder)!r}
with laststep.Checkpointer(run, s={{"w": torch.ones(32 << 20)}}) as checkpointer:
    checkpointer.save(1).wait()
checkpoint = laststep.open(run).latest()
tensor = checkpoint.tensor("s/w")
tensor[:4]  # whatever is imported and mapped for that
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
before = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (used + (8 << 20), before[1]))
try:
    tensor[:]
except laststep.StorageError as error:
    assert error.remedy, error
    print("told")
resource.setrlimit(resource.RLIMIT_AS, before)
print(tensor[:].sum().item() == 32 << 20)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "told\nTrue\n"), done.stderr


class Greedy:
    """Wants more memory than there is, at times."""

    wants: str | None = None

    def state_dict(self) -> dict[str, int]:
        return self._grow("state_dict")

    def load_state_dict(self, _state: object) -> None:
        self._grow("load_state_dict")

    def _grow(self, method: str) -> dict[str, int]:
        if self.wants == method:
            torch.empty(1 << 46, dtype=torch.uint8)
        return {"n": 1}


def test_too_little_memory_in_code_of_others_says_nothing_about_the_checkpoint(
    run_folder: Path,
) -> None:
    item = Greedy()
    with laststep.Checkpointer(
        run_folder, item=item, **as_keywords({"flush": "thread", **HOW})
    ) as checkpointer:
        checkpointer.save(0).wait()
        item.wants = "state_dict"
        with raises(laststep.StorageError, remedy="ulimit -v"):
            checkpointer.save(1)
        item.wants = "load_state_dict"
        with raises(laststep.StorageError, remedy="ulimit -v"):
            checkpointer.restore()
        item.wants = None
        assert checkpointer.restore().step == 0


def test_what_cannot_be_rebuilt_for_lack_of_memory_is_not_called_damaged(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"t": torch.eye(3).to_sparse()}
    laststep.save(state, run_folder)

    def grow(*_arguments: object, **_more: object) -> object:
        return torch.empty(1 << 46, dtype=torch.uint8)

    monkeypatch.setattr(torch, "sparse_coo_tensor", grow)
    with raises(laststep.StorageError, remedy="ulimit -v"):
        laststep.load(run_folder)


def test_a_file_that_may_not_grow_so_large_fails_its_save_alone(run_folder: Path) -> None:
    state = {"t": torch.zeros(1 << 22, dtype=torch.uint8)}
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with laststep.Checkpointer(
        run_folder, s=state, **as_keywords({"flush": "thread", **HOW})
    ) as checkpointer:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
        try:
            with raises(laststep.StorageError, found="EFBIG", remedy="ulimit -f"):
                checkpointer.save(0).wait()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        checkpointer.save(1).wait()
    assert laststep.open(run_folder).steps() == [1]


@pytest.mark.parametrize(
    "act",
    [
        lambda path: laststep.Checkpointer(path, s={"n": 1}, **as_keywords(HOW)),
        lambda path: laststep.save({"n": 1}, path),
        laststep.load,
        laststep.open,
    ],
    ids=["Checkpointer", "save", "load", "open"],
)
def test_a_path_that_is_no_text_is_refused_at_once(
    act: Callable[[str], object], tmp_path: Path
) -> None:
    path = os.fsdecode(os.fsencode(tmp_path) + b"/\xff")
    with raises(laststep.UsageError, remedy=True) as caught:
        act(path)
    str(caught.value).encode()


@pytest.mark.parametrize("flush", ["thread", "process"])
@pytest.mark.parametrize("how", ["deleted", "renamed", "linked elsewhere"])
def test_a_run_that_goes_away_is_told_and_nothing_is_written_in_its_place(
    how: str, flush: str, tmp_path: Path
) -> None:
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    elsewhere.mkdir()
    if how == "linked elsewhere":
        (tmp_path / "there").mkdir()
        run.symlink_to("there")
    with laststep.Checkpointer(
        run, s={"n": 1}, **as_keywords({"flush": flush, **HOW})
    ) as checkpointer:
        checkpointer.save(0).wait()
        if how == "deleted":
            # At once: a flusher that is cleaning up gives up, in files, what it finds half deleted.
            run.rename(tmp_path / "gone")
            shutil.rmtree(tmp_path / "gone")
        elif how == "renamed":
            run.rename(tmp_path / "other")
        else:
            run.unlink()
            run.symlink_to("elsewhere")
        for step in (1, 2):
            with raises(laststep.NotFoundError, f"step {step}") as caught:
                checkpointer.save(step).wait()
            error = caught.value
            assert all((error.where, error.expected, error.found, error.remedy))
        assert not list(elsewhere.iterdir())
        if how == "renamed":
            (tmp_path / "other").rename(run)
            checkpointer.save(3).wait()


def test_a_metric_larger_than_any_float_is_compared_like_others(
    run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keep = laststep.Keep(last=1, best=1, metric="loss")
    with laststep.Checkpointer(
        run_folder, s={"n": 1}, keep=keep, **as_keywords({"flush": "thread", **HOW})
    ) as ckpt:
        for step, loss in enumerate((0.5, 10**400, 0.25, -(10**5000), float("nan"), 0.75)):
            ckpt.save(step, metrics={"loss": loss}).wait()
    assert laststep.open(run_folder).steps() == [3, 5]
    from laststep.cli import app

    with pytest.raises(SystemExit) as end:
        app(["ls", str(run_folder)])
    assert not end.value.code
    assert "loss=-2^16609…" in capsys.readouterr().out
