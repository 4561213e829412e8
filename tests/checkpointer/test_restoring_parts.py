"""Restoring a part of a checkpoint: what is read, what is changed, and what is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

import laststep
from expect import raises

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def test_a_part_by_item_reads_only_what_it_needs_and_leaves_the_rest_alone(
    saved: Callable[..., Path], opened: object, fresh: object, bytes_read: dict[str, int]
) -> None:
    saved(1)
    fresh.become(7)
    bytes_read.clear()
    with opened(fresh) as checkpointer:
        checkpointer.restore(only=["model", "plain"])
    values = fresh.values()
    assert (values["model"], values["plain"]) == ({1}, {1})
    assert (values["optimizer"], values["blob"]) == ({7}, {7})
    assert bytes_read["model.safetensors"] > 0
    assert "blob.safetensors" not in bytes_read


def test_a_part_needs_only_its_own_files(
    saved: Callable[..., Path], opened: object, fresh: object
) -> None:
    folder = saved(1)
    fresh.become(7)
    (path,) = folder.rglob("blob.safetensors")
    path.unlink()
    with opened(fresh) as checkpointer:
        with raises(laststep.CorruptError, "blob.safetensors"):
            checkpointer.restore()
        assert fresh.is_wholly(7), "that is noticed before anything is read"
        checkpointer.restore(only=["model", "optimizer"])
    values = fresh.values()
    assert (values["model"], values["optimizer"], values["blob"]) == ({1}, {1}, {7})


def test_a_part_by_glob_reads_only_the_blocks_of_its_tensors_and_no_plain_values(
    opened: object, fresh: object, training: object, bytes_read: dict[str, int]
) -> None:
    def grow(one: object) -> None:
        for n in range(6):
            one.blob[f"part{n}"] = torch.full((1 << 20,), 7, dtype=torch.uint8)
        one.blob["plain"] = 7

    grow(training)
    with opened(training) as checkpointer:
        training.become(1)
        for n in range(6):
            training.blob[f"part{n}"].fill_(1)
        training.blob["plain"] = 1
        checkpointer.save(1)
    fresh.become(7)
    grow(fresh)
    bytes_read.clear()
    with opened(fresh) as checkpointer:
        checkpointer.restore(only=["blob/part[13]", "optimizer/*momentum*"])
    assert bytes_read["blob.safetensors"] <= 4 * (1 << 20)
    assert [int(fresh.blob[f"part{n}"][0]) for n in range(6)] == [7, 1, 7, 1, 7, 7]
    assert fresh.blob["plain"] == 7
    assert fresh.plain["n"] == 7
    assert fresh.optimizer.param_groups[0]["lr"] == 7
    momenta = [s["momentum_buffer"].unique().tolist() for s in fresh.optimizer.state.values()]
    assert momenta == [[1]] * 4


@pytest.mark.parametrize(
    "only", [["modle"], ["model", "optimzer"], ["model/nothing*"], ["x*"], ["model", "blob/nope"]]
)
def test_a_part_that_picks_nothing_is_an_error_and_nothing_is_touched(
    only: list[str], saved: Callable[..., Path], opened: object, fresh: object
) -> None:
    saved(1)
    fresh.become(7)
    with opened(fresh) as checkpointer, raises(laststep.NotFoundError, expected=only[-1]):
        checkpointer.restore(only=only)
    assert fresh.is_wholly(7)


def test_state_that_is_handed_over_whole_cannot_be_restored_in_part(tmp_path: Path) -> None:
    with laststep.Checkpointer(
        tmp_path / "run", rng=laststep.RNG(), options=laststep.Options(flush="thread")
    ) as checkpointer:
        checkpointer.save(0).wait()
        with raises(laststep.UsageError, "rng/", remedy="only=['rng']"):
            checkpointer.restore(only=["rng/torch/*"])
        checkpointer.restore(only=["rng"])


def test_a_part_of_an_older_checkpoint_does_not_turn_the_run_back(run_folder: Path) -> None:
    state = {"a": torch.zeros(3), "b": torch.zeros(3)}
    with laststep.Checkpointer(
        run_folder, items={"one": state}, options=laststep.Options(flush="thread")
    ) as checkpointer:
        for step in range(3):
            state["a"].fill_(step)
            state["b"].fill_(step)
            checkpointer.save(step)
        checkpointer.restore(step=0, only=["one/a"])
        assert state["a"].tolist() == [0, 0, 0]
        assert state["b"].tolist() == [2, 2, 2]
        checkpointer.save(3)
    assert laststep.open(run_folder).steps() == [0, 1, 2, 3]


def test_a_pattern_that_is_a_stored_name_means_that_one_alone(tmp_path: Path) -> None:
    state = {name: torch.ones(2) for name in ("a[0]", "a0", "b*", "bc")}
    with laststep.Checkpointer(
        tmp_path / "run", state=state, options=laststep.Options(flush="thread")
    ) as checkpointer:
        checkpointer.save(0).wait()
        for tensor in state.values():
            tensor.zero_()
        checkpointer.restore(only=["state/a[0]", "state/b*"])
        assert [name for name, tensor in state.items() if tensor.any()] == ["a[0]", "b*"]
        checkpointer.restore(only="state/a[01]")
        assert [name for name, tensor in state.items() if tensor.any()] == ["a[0]", "a0", "b*"]


def test_a_save_that_lacks_items_of_the_run_is_refused(
    saved: Callable[..., Path], run_folder: Path, fresh: object
) -> None:
    saved(1)
    with laststep.Checkpointer(run_folder, model=fresh.model) as checkpointer:
        checkpointer.restore(only=["model"])
        with raises(laststep.UsageError, found="model", expected="blob, optimizer, plain"):
            checkpointer.save(2)
        checkpointer.restore(strict=False)
        with raises(laststep.UsageError, remedy="new_lineage=True"):
            checkpointer.save(2)
    assert laststep.open(run_folder).steps() == [1]


def test_new_lineage_continues_a_run_without_some_of_its_items(
    saved: Callable[..., Path], run_folder: Path, fresh: object
) -> None:
    saved(1)
    with laststep.Checkpointer(run_folder, model=fresh.model, new_lineage=True) as checkpointer:
        checkpointer.restore(only=["model"])
        checkpointer.save(2)
    assert laststep.open(run_folder)[2].items() == ["model"]


def test_a_run_whose_part_was_restored_may_gain_items(
    saved: Callable[..., Path], run_folder: Path, opened: object, fresh: object
) -> None:
    saved(1)
    items = {**fresh.items(), "more": {"n": 1}}
    with laststep.Checkpointer(run_folder, items=items) as checkpointer:
        checkpointer.restore(only=["model"])
        checkpointer.save(2)
    assert "more" in laststep.open(run_folder)[2].items()
