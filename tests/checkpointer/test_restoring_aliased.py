"""What is stored as two tensors and is one in the live state: how much is read, what a failure
leaves behind."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

import laststep
from expect import names, raises

if TYPE_CHECKING:
    from pathlib import Path

SIZE = 1 << 20
"""Of one weight, in bytes: as large as the blocks that files are read by."""


class Ends(nn.Module):
    """The two ends of a model, and what lies between them."""

    def __init__(self, value: int, *, tied: bool) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.full((SIZE // 4,), float(value)))
        self.last = self.first if tied else nn.Parameter(self.first.detach().clone())
        self.middle = nn.Parameter(torch.full((SIZE // 4,), float(value)))


def opened(run: Path, model: nn.Module) -> laststep.Checkpointer:
    return laststep.Checkpointer(
        run, model=model, options=laststep.Options(flush="thread", progress=False)
    )


def save(run: Path, model: nn.Module) -> None:
    with opened(run, model) as checkpointer:
        checkpointer.save(1)


@pytest.mark.parametrize(("stored", "live"), [(True, True), (True, False), (False, False)])
def test_nothing_is_read_twice_where_there_are_no_twins(
    run_folder: Path, bytes_read: dict[str, int], *, stored: bool, live: bool
) -> None:
    save(run_folder, Ends(1, tied=stored))
    bytes_read.clear()
    with opened(run_folder, model := Ends(2, tied=live)) as checkpointer:
        checkpointer.restore()
    held = (2 if stored else 3) * SIZE
    assert held <= sum(bytes_read.values()) < held + SIZE // 2
    assert {*model.first.tolist(), *model.last.tolist(), *model.middle.tolist()} == {1.0}


def test_a_twin_is_read_once(run_folder: Path, bytes_read: dict[str, int]) -> None:
    save(run_folder, Ends(1, tied=False))
    bytes_read.clear()
    with opened(run_folder, model := Ends(2, tied=True)) as checkpointer:
        checkpointer.restore()
    assert 3 * SIZE <= sum(bytes_read.values()) < 3 * SIZE + SIZE // 2
    assert set(model.first.tolist()) == {1.0}


def test_a_state_of_which_two_twins_differ_is_mixed_until_the_first_is_taken(
    run_folder: Path,
) -> None:
    source = Ends(1, tied=False)
    with torch.no_grad():
        source.last[-1] = 3
    save(run_folder, source)
    with opened(run_folder, model := Ends(2, tied=True)) as checkpointer:
        with raises(laststep.MismatchError, "model/last", "first"):
            checkpointer.restore()
        with raises(laststep.UsageError, found="failed", remedy="restore()"):
            checkpointer.save(2)
        restored = checkpointer.restore(strict=False)
        assert names(restored.problems.mismatched[0], "model/last", "first")
        assert {*model.first.tolist(), *model.middle.tolist()} == {1.0}
        checkpointer.save(2).wait()


def test_load_into_a_state_compares_twins_too(tmp_path: Path) -> None:
    laststep.save({"a": torch.ones(3), "b": torch.ones(3)}, tmp_path / "same")
    laststep.save({"a": torch.ones(3), "b": torch.zeros(3)}, tmp_path / "other")
    both = torch.full((3,), 7.0)
    laststep.load(tmp_path / "same", {"a": both, "b": both})
    assert both.tolist() == [1, 1, 1]
    with raises(laststep.MismatchError, "state/b"):
        laststep.load(tmp_path / "other", {"a": both, "b": both})
    laststep.load(tmp_path / "other", {"a": both, "b": both}, strict=False)
    assert both.tolist() == [1, 1, 1]


def test_twins_of_one_element_may_have_any_stride(run_folder: Path) -> None:
    apart = {"a": torch.tensor([5.0]), "b": torch.tensor([5.0])}
    with laststep.Checkpointer(
        run_folder, state=apart, options=laststep.Options(flush="thread", progress=False)
    ) as ckpt:
        ckpt.save(1)
    one = torch.zeros(10)[::10]
    tied = {"a": one, "b": one}
    with laststep.Checkpointer(
        run_folder, state=tied, options=laststep.Options(flush="thread", progress=False)
    ) as ckpt:
        ckpt.restore()
    assert one.tolist() == [5.0]
