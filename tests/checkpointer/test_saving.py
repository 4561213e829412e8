"""What save() promises: the state as it is now, errors told once, order, retention, no leaks."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from torch import nn

import laststep
from cases import long
from disks import FailingDisk, Kind
from expect import raises, warned
from laststep.flush import server as serving
from laststep.settings import as_keywords
from laststep.storage.directory import DirectoryStore
from waiting import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Callable

POOL_BYTES = 64 << 20


@pytest.mark.parametrize(
    ("flush", "size"),
    [("thread", 10), ("process", 9 << 20), *long(("process", 10), ("thread", 9 << 20))],
)
def test_nothing_that_changes_after_save_gets_into_the_checkpoint(
    flush: str, size: int, run_folder: Path
) -> None:
    tensor, array = torch.full((size,), 1.0), np.full(size, 1.0)
    sparse = torch.eye(3).to_sparse()
    base = torch.full((40,), 1.0)
    state = {
        "tensor": tensor,
        "strided": base[::2],
        "array": array,
        "backwards": array[::-1],
        "list": [1, [1, {"deep": [1]}]],
        "bytes": b"1" * 10_000,
        "bytearray": bytearray(b"1"),
        "set": {1},
        "sparse": sparse,
        "conj": torch.tensor([1 + 1j]).conj(),
        "own": Counting(),
    }
    with laststep.Checkpointer(
        run_folder, state=state, options=laststep.Options(flush=flush), host_memory_bytes=POOL_BYTES
    ) as checkpointer:
        checkpointer.save(0)
        tensor.fill_(9)
        base.fill_(9)
        array.fill(9)
        state["list"][1][1]["deep"][0] = 9
        state["list"].append(9)
        state["bytes"] = b"9" * 10_000
        state["bytearray"][0] = 57
        state["set"].add(9)
        sparse._values().fill_(9)
        state["own"].value["list"][0] = 9
        state["own"].value["t"].fill_(9)
    loaded = laststep.load(run_folder)["state"]
    assert bool((loaded["tensor"] == 1).all())
    assert bool((loaded["strided"] == 1).all())
    assert (loaded["array"] == 1).all()
    assert (loaded["backwards"] == 1).all()
    assert loaded["list"] == [1, [1, {"deep": [1]}]]
    assert loaded["bytes"] == b"1" * 10_000
    assert loaded["bytearray"] == bytearray(b"1")
    assert loaded["set"] == {1}
    assert torch.equal(loaded["sparse"].to_dense(), torch.eye(3))
    assert loaded["own"]["list"] == [1]
    assert loaded["own"]["t"].tolist() == [1]


class Counting:
    def __init__(self) -> None:
        self.value = {"list": [1], "t": torch.ones(1)}

    def state_dict(self) -> dict[str, object]:
        return self.value

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.value = state


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.suffix == ".safetensors"}


def test_a_flusher_on_a_thread_writes_the_same_bytes_as_a_process(
    training: object, tmp_path: Path
) -> None:
    training.become(3)
    found = []
    for flush in ("thread", "process"):
        with laststep.Checkpointer(
            tmp_path / flush,
            items=training.items(),
            options=laststep.Options(flush=flush),
            host_memory_bytes=POOL_BYTES,
        ) as checkpointer:
            checkpointer.save(7, metrics={"loss": 0.5})
        found.append(contents(tmp_path / flush / "step-00000007.1-1"))
    assert found[0] == found[1]
    assert len(found[0]) == 3


def test_the_same_step_twice_exists(
    opened: object, training: object, saved: Callable[..., Path], fresh: object
) -> None:
    saved(1, 2)
    with opened(training) as checkpointer:
        checkpointer.restore()
        for step in (1, 2):
            with pytest.raises(laststep.AlreadyExistsError, match=f"step {step}"):
                checkpointer.save(step)
        training.become(3)
        checkpointer.save(3)
        with pytest.raises(laststep.AlreadyExistsError, match="overwrite=True"):
            checkpointer.save(3)
    with opened(fresh) as checkpointer:
        checkpointer.continue_newest()  # knows the steps only from the disk
        checkpointer.save(3)
        with pytest.raises(laststep.AlreadyExistsError, match="step 3"):
            checkpointer.wait()


def test_overwriting_keeps_the_old_until_the_new_is_committed(
    opened: object,
    training: object,
    fresh: object,
    run_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with opened(training) as checkpointer:
        training.become(1)
        checkpointer.save(5).wait()
        training.become(2)
        with monkeypatch.context() as patch:
            patch.setattr(serving.SaveWriter, "finish", _no_space)
            checkpointer.save(5, overwrite=True)
            with pytest.raises(laststep.StorageError, match="full"):
                checkpointer.wait()
        assert laststep.open(run_folder).steps() == [5]
        assert laststep.open(run_folder)[5].tensor("model/0.bias")[:].tolist() == [1] * 4
        checkpointer.save(5, overwrite=True).wait()
        assert laststep.open(run_folder).steps() == [5]
    with opened(fresh) as checkpointer:
        assert checkpointer.restore(5).step == 5
        assert fresh.is_wholly(2)


def _no_space(*_: object) -> object:
    raise laststep.StorageError("the disk is full")


@pytest.mark.parametrize("step", [-1, 1.5, "3", None, True, 1 << 62])
def test_a_step_that_is_no_number_is_refused(
    step: object, opened: object, training: object
) -> None:
    with opened(training) as checkpointer, pytest.raises(laststep.UsageError, match="step"):
        checkpointer.save(step)


@pytest.mark.parametrize("call", ["save", "wait", "close"])
def test_a_failed_save_is_told_once_at_the_next_call_and_training_goes_on(
    call: str, opened: object, training: object, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpointer = opened(training)
    with monkeypatch.context() as patch:
        patch.setattr(serving.SaveWriter, "finish", _no_space)
        checkpointer.save(0).committed.over_within(PATIENCE_S)
    with pytest.raises(laststep.StorageError, match="disk is full"):
        {
            "save": lambda: checkpointer.save(1),
            "wait": checkpointer.wait,
            "close": checkpointer.close,
        }[call]()
    if call != "close":
        checkpointer.wait()
        checkpointer.save(0).wait()
        checkpointer.save(1).wait()
        checkpointer.close()
        assert laststep.open(run_folder).steps() == [0, 1]
    checkpointer.close()
    assert not list(run_folder.glob("step-*/*.tmp-*"))


def test_with_on_error_warn_a_failed_save_is_only_logged(
    opened: object,
    training: object,
    run_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with opened(training, on_error="warn") as checkpointer:
        with monkeypatch.context() as patch:
            patch.setattr(serving.SaveWriter, "finish", _no_space)
            failed = checkpointer.save(0)
            assert not checkpointer.wait()
            assert checkpointer.wait()
        assert len(warned(caplog, "step 0", "disk is full")) == 1
        assert len(warned(caplog, "training continues", "step 0")) == 1
        with raises(laststep.StorageError):
            failed.result()
        checkpointer.save(1)
        with raises(laststep.UsageError):
            checkpointer.save(-1)
    assert laststep.open(run_folder).steps() == [1]


def test_saving_can_be_turned_off(
    opened: object,
    training: object,
    run_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with opened(training) as checkpointer:
        checkpointer.save(0)
    monkeypatch.setenv("LASTSTEP_DISABLED", "1")
    with opened(training, every=1) as checkpointer:
        assert checkpointer.restore().step == 0
        handle = checkpointer.save(1)
        assert not handle.wait()
        assert "LASTSTEP_DISABLED" in handle.report.skipped
        assert checkpointer.step(2) is None
    assert laststep.open(run_folder).steps() == [0]
    assert warned(caplog, "LASTSTEP_DISABLED", run_folder)
    monkeypatch.setenv("LASTSTEP_DISABLED", "0")
    with opened(training) as checkpointer:
        checkpointer.restore()
        checkpointer.save(1)
    assert laststep.open(run_folder).steps() == [0, 1]


def test_what_a_caller_saw_at_the_handle_is_not_told_again(
    opened: object, training: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(training) as checkpointer:
        with monkeypatch.context() as patch:
            patch.setattr(serving.SaveWriter, "finish", _no_space)
            with pytest.raises(laststep.StorageError):
                checkpointer.save(0).wait(PATIENCE_S)
        checkpointer.save(1).wait()


def with_disk(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[], FailingDisk]
) -> list[FailingDisk]:
    """Give the next flusher on a thread a disk that fails."""
    disks: list[FailingDisk] = []

    def store(path: str) -> DirectoryStore:
        disks.append(make())
        return DirectoryStore(path, disk=disks[-1])

    monkeypatch.setattr(serving, "open_store", store)
    return disks


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, *long(errno.EROFS, errno.EDQUOT)])
@pytest.mark.parametrize("kind", [Kind.WRITE, Kind.SYNC, Kind.LINK, Kind.CREATE_FILE])
def test_a_disk_that_fails_once_fails_one_save_loudly_and_the_next_one_works(
    number: int,
    kind: Kind,
    opened: object,
    training: object,
    run_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with opened(training) as checkpointer:
        checkpointer.save(0)  # makes the run
    disks = with_disk(
        monkeypatch,
        # Past what a new writer does to become one.
        lambda: FailingDisk({Kind.CREATE_FILE: 3}.get(kind, 2), number, kinds=frozenset({kind})),
    )
    with opened(training) as checkpointer:
        checkpointer.restore()
        training.become(1)  # or it would be borrowed, where a link that fails fails nothing
        checkpointer.save(1)
        with pytest.raises(laststep.StorageError, match=os.strerror(number)):
            checkpointer.wait()
        assert disks[0].calls >= 2
        assert laststep.open(run_folder).steps()[0] == 0
        training.become(2)
        checkpointer.save(2).wait()
    catalog = laststep.open(run_folder)
    assert catalog.latest().step == 2
    assert catalog.latest().verify().damage == ()


def test_a_disk_that_is_gone_for_good_fails_every_save_and_never_hangs(
    opened: object, training: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_disk(monkeypatch, lambda: FailingDisk(1, errno.EIO, lasting=True))
    checkpointer = opened(training)
    for step in range(3):
        checkpointer.save(step)
        with pytest.raises(laststep.StorageError):
            checkpointer.wait(PATIENCE_S)
    checkpointer.close()


def test_retention_is_applied_after_each_commit(
    saved: Callable[..., Path], opened: object, fresh: object
) -> None:
    run = saved(*range(7), keep=laststep.Keep(last=2, every=3))
    assert laststep.open(run).steps() == [0, 3, 5, 6]
    removed: list[object] = []
    with opened(fresh, keep=laststep.Keep(last=1), subscribers=[removed.append]) as checkpointer:
        checkpointer.restore(5)
        checkpointer.save(8).wait()
        checkpointer.save(9).wait()
    # The one that was resumed from stays.
    assert laststep.open(run).steps() == [5, 9]
    assert {e.step for e in removed if type(e).__name__ == "Pruned"} == {0, 3, 8}


def test_the_best_are_kept_by_their_metric(
    opened: object, training: object, run_folder: Path
) -> None:
    keep = laststep.Keep(best=2, metric="loss")
    with opened(training, keep=keep) as checkpointer:
        for step, loss in enumerate([5.0, 1.0, 4.0, 2.0, 3.0]):
            checkpointer.save(step, metrics={"loss": torch.tensor(loss)})
    assert laststep.open(run_folder).steps() == [1, 3, 4]


@pytest.mark.parametrize(
    ("names", "in_all"),
    [(["loss", "loss", "val_loss"], 0), (["loss", "loss"], 1), (["loss"] * 12, 1)],
    ids=["evaluated-later", "never", "never-in-many"],
)
def test_a_missing_metric_is_logged_once(
    opened: object,
    training: object,
    names: list[str],
    in_all: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    keep = laststep.Keep(best=1, metric="val_loss")
    with opened(training, keep=keep) as checkpointer:
        for step, name in enumerate(names):
            checkpointer.save(step, metrics={name: 1.0}).wait(PATIENCE_S)
    assert len(warned(caplog, "val_loss")) == in_all


def test_a_failing_retention_costs_no_checkpoint(
    opened: object, training: object, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_disk(
        monkeypatch,
        lambda: FailingDisk(
            1, errno.EIO, lasting=True, kinds=frozenset({Kind.REMOVE_FOLDER, Kind.RENAME})
        ),
    )
    with opened(training, keep=laststep.Keep(last=1)) as checkpointer:
        for step in range(3):
            checkpointer.save(step)
    assert laststep.open(run_folder).latest().step == 2


def test_an_interrupted_save_does_not_hold_up_the_next(
    opened: object, training: object, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(training, capture="blocking") as checkpointer:
        checkpointer.save(0).wait()
        with monkeypatch.context() as patch:
            patch.setattr(checkpointer._capturer, "_stage", _interrupt)
            with pytest.raises(KeyboardInterrupt):
                checkpointer.save(1)
        training.become(2)
        assert checkpointer.save(1).wait(PATIENCE_S)
    assert laststep.open(run_folder).steps() == [0, 1]


def test_an_interrupt_while_memory_is_filled_gives_the_memory_back(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"t": torch.zeros(80 << 20, dtype=torch.uint8)}
    with laststep.Checkpointer(
        run_folder,
        state=state,
        options=laststep.Options(flush="thread"),
        host_memory_bytes=POOL_BYTES,
    ) as checkpointer:
        capturer = checkpointer._capturer
        lease = capturer._mover.lease
        for step in range(3):
            left = iter(range(2))

            def third_is_interrupted(job: object, left: object = left) -> int:
                slot = lease(job)
                if next(left, None) is None:
                    raise KeyboardInterrupt
                return slot

            with monkeypatch.context() as patch:
                patch.setattr(capturer._mover, "lease", third_is_interrupted)
                with pytest.raises(KeyboardInterrupt):
                    checkpointer.save(step)
        assert checkpointer.save(5).wait(PATIENCE_S)
    assert laststep.open(run_folder).steps() == [5]


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_an_error_in_the_body_is_not_hidden_by_a_failed_save(
    opened: object,
    training: object,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def body() -> None:
        with opened(training) as checkpointer:
            patch.setattr(serving.SaveWriter, "finish", _no_space)
            checkpointer.save(0)
            raise ZeroDivisionError

    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        body()
    assert warned(caplog, "step 0")


def test_a_closed_checkpointer_says_so_and_closes_twice(opened: object, training: object) -> None:
    checkpointer = opened(training)
    checkpointer.close()
    checkpointer.close()
    with raises(laststep.UsageError, remedy=True):
        checkpointer.save(0)
    with raises(laststep.UsageError, remedy=True):
        checkpointer.restore()


def test_a_forked_child_can_neither_save_nor_hurt(
    opened: object, training: object, run_folder: Path
) -> None:
    with opened(training, flush="process") as checkpointer:
        checkpointer.save(0).wait()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                checkpointer.save(1)
            except laststep.UsageError:
                status = 42
            checkpointer.close()
            os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 42
        checkpointer.save(1).wait(PATIENCE_S)
    assert laststep.open(run_folder).steps() == [0, 1]


def test_ranks_that_do_not_know_each_other_are_refused(
    opened: object, training: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(laststep.UsageError, match="init_process_group"):
        opened(training)


def leftovers() -> set[str]:
    """Threads, descriptors and children of this process."""
    threads = {f"thread {thread.name}" for thread in threading.enumerate()}
    fds = set()
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            fds.add(f"fd {path.name} {path.readlink()}")
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return threads | fds | {f"child {pid}" for pid in children}


@pytest.mark.parametrize("flush", ["thread", "process"])
def test_nothing_is_left_behind_by_a_closed_checkpointer(
    flush: str, opened: object, training: object
) -> None:
    with opened(training, flush=flush) as checkpointer:
        checkpointer.save(0)
    gc.collect()  # what earlier tests left to it
    before = leftovers()
    with opened(training, flush=flush) as checkpointer:
        checkpointer.restore()
        checkpointer.save(1)
        assert leftovers() - before
    assert leftovers() - before == set()


def test_nothing_is_left_behind_in_the_folder(saved: Callable[..., Path]) -> None:
    run = saved(1, 2)
    names = {path.name for path in run.iterdir()}
    assert names == {"run.json", "terms", "step-00000001.1-1", "step-00000002.1-2"}


@pytest.mark.parametrize(
    ("count", "flush"),
    [
        (20_000, "process"),
        pytest.param(100_000, "thread", marks=pytest.mark.long),
        pytest.param(100_000, "process", marks=pytest.mark.long),
    ],
)
def test_many_thousand_tensors_pass_through_the_sockets(
    count: int, flush: str, run_folder: Path
) -> None:
    flat = torch.arange(count)
    state = {f"layer{n}": flat[n : n + 1] for n in range(count)}
    with laststep.Checkpointer(
        run_folder, state=state, options=laststep.Options(flush=flush), host_memory_bytes=POOL_BYTES
    ) as checkpointer:
        assert checkpointer.save(0).wait(PATIENCE_S)
        flat.zero_()
        checkpointer.restore()
    assert torch.equal(flat, torch.arange(count))


def test_a_module_changes_its_shape_between_saves(run_folder: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    with laststep.Checkpointer(
        run_folder,
        model=model,
        options=laststep.Options(flush="thread"),
        host_memory_bytes=POOL_BYTES,
    ) as checkpointer:
        checkpointer.save(0)
        model.append(nn.Linear(2, 5))
        checkpointer.save(1)
        model[1] = nn.Identity()
        checkpointer.save(2)
    catalog = laststep.open(run_folder)
    counts = [len(checkpoint.tensors()) for checkpoint in catalog]
    assert counts == [2, 4, 2]


def test_settings_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    for wrong in (
        {"capture": "sometimes"},
        {"flush": "never"},
        {"on_busy": "cry"},
        {"writers": 0},
        {"host_memory_bytes": 5},
        {"device_margin_bytes": -1},
    ):
        with pytest.raises(laststep.UsageError):
            laststep.Checkpointer(tmp_path / "run", s={"a": 1}, **as_keywords(wrong))
    assert not (tmp_path / "run").exists()


def test_a_manifest_that_no_reader_would_take_is_not_committed(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("laststep.catalog.attempt.MANIFEST_LIMIT_BYTES", 20_000)
    with laststep.Checkpointer(
        run_folder, s={"a": 1}, options=laststep.Options(flush="thread")
    ) as checkpointer:
        checkpointer.save(0).result()
        with raises(laststep.UsageError, step=1, expected="20000"):
            checkpointer.save(1, metadata="x" * 30_000).result()
        checkpointer.save(2).result()
    assert laststep.open(run_folder).steps() == [0, 2]


def test_a_folder_alone_may_have_as_large_a_manifest_as_one_in_a_run(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with laststep.Checkpointer(
        run_folder, s={"a": 1}, options=laststep.Options(flush="thread")
    ) as checkpointer:
        folder = checkpointer.save(0, metadata="x" * 30_000).result().folder
    for path in (run_folder, run_folder / folder):
        assert laststep.load(path) == {"s": {"a": 1}}
        with monkeypatch.context() as patch:
            patch.setattr("laststep.catalog.attempt.MANIFEST_LIMIT_BYTES", 20_000)
            with pytest.raises(laststep.CorruptError, match="20000"):
                laststep.load(path)
