"""A Checkpointer that is dropped, copied, or called from several threads."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

import laststep
from expect import raises, warned
from laststep.settings import as_keywords
from waiting import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Callable

HOW = {"host_memory_bytes": 64 << 20, "progress": False}


def end_of_all_threads() -> None:
    """Wait for all that laststep runs beside this thread; at the end there is nothing of it, nor
    of what other tests have left to the collector."""
    gc.collect()
    for thread in threading.enumerate():
        if thread.name.startswith("laststep"):
            thread.join(PATIENCE_S)
            assert not thread.is_alive(), thread.name


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize(
    "act", [copy.copy, copy.deepcopy, pickle.dumps], ids=["copy", "deepcopy", "pickle"]
)
def test_a_copy_is_refused_and_the_original_goes_on(
    act: Callable[[object], object], run_folder: Path
) -> None:
    with laststep.Checkpointer(
        run_folder, state={"n": 1}, **as_keywords({"flush": "thread", **HOW})
    ) as ckpt:
        with raises(laststep.UsageError, "Checkpointer"):
            act(ckpt)
        ckpt.save(0).wait()
    checkpoint = laststep.open(run_folder).latest()
    with raises(laststep.UsageError, "Checkpoint"):
        act(checkpoint)


@pytest.mark.parametrize("flush", ["thread", "process"])
@pytest.mark.parametrize("trains", [False, True])
def test_what_was_saved_before_it_was_dropped_is_committed_and_all_is_given_back(
    run_folder: Path, flush: str, caplog: pytest.LogCaptureFixture, *, trains: bool
) -> None:
    end_of_all_threads()
    files = open_files()
    model = nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    ckpt = laststep.Checkpointer(
        run_folder, model=model, optimizer=optimizer, **as_keywords({"flush": flush, **HOW})
    )
    for step in range(3):
        if trains:
            model(torch.ones(2, 64)).sum().backward()
            optimizer.step()
        handle = ckpt.save(step)
    with caplog.at_level(logging.WARNING, "laststep"):
        del ckpt
        end_of_all_threads()
    assert handle.committed.done()
    assert open_files() <= files  # fewer where one of a test before was still open
    assert laststep.open(run_folder).steps() == [0, 1, 2]
    optimizer.step()  # the hook of the one that is gone does not mind


def test_a_hundred_that_never_saved_keep_nothing(run_folder: Path) -> None:
    state = {"t": torch.zeros(1 << 18)}
    end_of_all_threads()
    files = open_files()
    for number in range(100):
        laststep.Checkpointer(
            run_folder / str(number % 3), state=state, **as_keywords({"flush": "thread", **HOW})
        )
    end_of_all_threads()
    assert open_files() == files


def test_nothing_but_its_user_keeps_it_alive(run_folder: Path) -> None:
    gone: list[str] = []

    class Watched(laststep.Checkpointer):
        def __del__(self) -> None:
            gone.append("gone")

    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gc.disable()  # a cycle would keep it until somebody looks for cycles
    try:
        ckpt = Watched(
            run_folder, model=model, optimizer=optimizer, **as_keywords({"flush": "thread", **HOW})
        )
        ckpt.restore()
        ckpt.save(0).wait()
        ckpt.restore()
        del ckpt
        assert gone == ["gone"]
    finally:
        gc.enable()
    end_of_all_threads()


def test_a_failure_that_nobody_was_told_of_is_logged(
    run_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ckpt = laststep.Checkpointer(
        run_folder, state={"n": 1}, **as_keywords({"flush": "thread", **HOW})
    )
    ckpt.save(0).wait()
    other = laststep.Checkpointer(
        run_folder, state={"n": 1}, **as_keywords({"flush": "thread", **HOW})
    )
    other.restore()
    other.save(1).wait()  # takes over
    ckpt.save(2)
    del ckpt
    other.close()
    end_of_all_threads()
    assert warned(caplog, "step 2")


def test_threads_that_save_the_same_steps_commit_each_once(run_folder: Path) -> None:
    state = {"t": torch.zeros(1000)}
    refused: list[int] = []
    start = threading.Barrier(3)
    with laststep.Checkpointer(
        run_folder, state=state, **as_keywords({"flush": "thread", **HOW})
    ) as ckpt:

        def save() -> None:
            start.wait()
            for step in range(12):
                try:
                    ckpt.save(step)
                except laststep.AlreadyExistsError:
                    refused.append(step)

        threads = [threading.Thread(target=save) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(refused) == sorted([*range(12), *range(12)])
    folders = [one.name for one in run_folder.glob("step-*")]
    assert len(folders) == 12
    assert sorted(laststep.open(run_folder).steps()) == list(range(12))


def test_steps_beyond_the_one_restored_are_replaced_when_training_comes_to_them_again(
    run_folder: Path,
) -> None:
    state = {"n": 0}
    with laststep.Checkpointer(
        run_folder, state=state, **as_keywords({"flush": "thread", **HOW})
    ) as ckpt:
        for step in (0, 4, 3):
            state["n"] = step
            ckpt.save(step, overwrite=True).wait()
    with laststep.Checkpointer(
        run_folder, state=state, **as_keywords({"flush": "thread", **HOW})
    ) as ckpt:
        restored = ckpt.restore()
        assert (restored.step, restored.next_step) == (3, 4)
        state["n"] = 44
        ckpt.save(restored.next_step).wait()
        with pytest.raises(laststep.AlreadyExistsError):
            ckpt.save(restored.next_step)
        with pytest.raises(laststep.AlreadyExistsError):
            ckpt.save(3)
    assert laststep.load(run_folder, step=4)["state"] == {"n": 44}  # type: ignore[index]
    assert laststep.load(run_folder)["state"] == {"n": 44}  # type: ignore[index]
