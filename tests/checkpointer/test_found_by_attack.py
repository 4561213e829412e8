"""What attackers found: each once, as small as it can be."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

import laststep
from expect import raises

if TYPE_CHECKING:
    from pathlib import Path


def saved(run: Path, state: dict[str, object]) -> dict[str, object]:
    with laststep.Checkpointer(run, state=state, options=laststep.Options(flush="thread")) as ckpt:
        ckpt.save(1).wait()
    return laststep.load(run)["state"]


def test_arrays_that_begin_at_one_address_come_back(run_folder: Path) -> None:
    """Each has a storage of its own length in torch's eyes; the shortest is not that of all."""
    whole = np.arange(1000.0)
    loaded = saved(run_folder, {"head": whole[:10], "all": whole})
    np.testing.assert_array_equal(loaded["all"], whole)
    np.testing.assert_array_equal(loaded["head"], whole[:10])


def test_what_a_slice_holds_is_copied_at_save(run_folder: Path) -> None:
    held: list[object] = [1, 2]
    state = {"s": slice(held, None), "t": torch.zeros(1 << 20)}
    go = threading.Event()
    with laststep.Checkpointer(
        run_folder, state=state, options=laststep.Options(flush="thread")
    ) as ckpt:
        ckpt._capturer._jobs.put(lambda: go.wait(60))  # trees are written down behind this
        handle = ckpt.save(1)
        held.append("later")
        go.set()
        handle.wait()
    assert laststep.load(run_folder)["state"]["s"] == slice([1, 2], None)


@pytest.mark.parametrize("kind", ["freed", "meta"])
def test_a_metric_without_memory_is_refused_by_name(kind: str, run_folder: Path) -> None:
    loss = torch.zeros(1, device="meta" if kind == "meta" else "cpu")
    if kind == "freed":
        loss.untyped_storage().resize_(0)
    with laststep.Checkpointer(
        run_folder, state={"n": 1}, options=laststep.Options(flush="thread")
    ) as ckpt:
        with raises(laststep.UsageError, "'loss'"):
            ckpt.save(1, metrics={"loss": loss})
        ckpt.save(1).wait()


@pytest.mark.parametrize("name", ["x-00001", "x-r00003", "shared-00002"])
def test_an_item_cannot_have_the_name_of_a_part_of_anothers_file(
    name: str, run_folder: Path
) -> None:
    with raises(laststep.UsageError, found=repr(name)):
        laststep.Checkpointer(run_folder, items={"x": {"a": 1}, name: {"b": 2}})


def test_an_items_name_that_is_no_text_is_refused(run_folder: Path) -> None:
    with pytest.raises(laststep.UsageError):
        laststep.Checkpointer(run_folder, items={3: {"a": 1}})  # type: ignore[dict-item]


def test_every_error_has_a_remedy() -> None:
    kinds = [
        laststep.NotFoundError,
        laststep.AlreadyExistsError,
        laststep.CorruptError,
        laststep.StorageError,
        laststep.AbortedError,
        laststep.TornCaptureError,
        laststep.UsageError,
    ]
    for kind in kinds:
        assert kind("something").remedy
        assert kind("something", remedy="do that").remedy == "do that"


def test_odd_arguments_of_looking_are_told(run_folder: Path) -> None:
    with laststep.Checkpointer(
        run_folder, state={"t": torch.arange(6)}, options=laststep.Options(flush="thread")
    ) as ckpt:
        handle = ckpt.save(1)
        with pytest.raises(laststep.UsageError):
            handle.wait("x")  # type: ignore[arg-type]
        with pytest.raises(laststep.UsageError):
            handle.captured.wait(float("nan"))
        handle.wait()
    checkpoint = laststep.open(run_folder).latest()
    with pytest.raises(laststep.UsageError):
        checkpoint.tensor(3)  # type: ignore[arg-type]
    stored = checkpoint.tensor("state/t")
    for index in (slice(None, None, 0), slice("a", "b")):
        with pytest.raises(laststep.UsageError):
            stored[index]


def test_a_path_that_is_not_what_it_says_is_refused() -> None:
    class Odd:
        def __fspath__(self) -> int:
            return 3

    with raises(laststep.UsageError, found="Odd"):
        laststep.Checkpointer(Odd(), n={"a": 1})  # type: ignore[arg-type]
