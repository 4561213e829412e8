"""peek(): the checkpoint to come is known before the state exists, and stays the same one."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

import laststep
from expect import raises
from laststep.settings import as_keywords
from stored import flip
from waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MB = 1 << 20


def file_of(run: Path, step: int, name: str) -> Path:
    (found,) = run.glob(f"step-{step:08}*/{name}")
    return found


def damage(run: Path, step: int) -> None:
    """In the midst of the blob, which only reading all of it finds."""
    flip(file_of(run, step, "blob.safetensors"), 2 * MB)


def test_what_is_to_come_is_known_before_any_of_it_is_made_or_read(
    run_folder: Path, training: object, opened: object, bytes_read: dict[str, int]
) -> None:
    with opened(training) as ckpt:
        ckpt.save(3, metrics={"loss": 0.5}, metadata={"term": 2})

    def too_early() -> object:
        raise AssertionError

    bytes_read.clear()
    late = {name: laststep.Deferred(too_early) for name in training.items()}
    with laststep.Checkpointer(
        run_folder, items=late, options=laststep.Options(flush="thread", progress=False)
    ) as ckpt:
        found = ckpt.peek()
    assert (found.step, found.next_step, found.skipped) == (3, 4, ())
    assert (found.metrics, found.metadata) == ({"loss": 0.5}, {"term": 2})
    assert (run_folder / found.folder / "manifest.json").exists()
    assert "index-r00000" in bytes_read
    assert not [name for name in bytes_read if name.endswith(".safetensors")]


def test_there_is_nothing_in_a_new_run_and_saves_begin_it(training: object, opened: object) -> None:
    with opened(training) as ckpt:
        assert ckpt.peek() is None
        assert ckpt.restore().step is None
        ckpt.save(0)
        ckpt.wait()
        assert ckpt.peek().step == 0


def test_all_that_follows_is_of_that_one_though_there_is_a_newer_one_by_now(
    saved: Callable[..., Path], opened: object, fresh: object, training: object
) -> None:
    run = saved(1, 2)
    with opened(fresh) as ckpt:
        assert ckpt.peek().step == 2
        assert ckpt.restore(only="model").step == 2
        with opened(training) as other:
            other.restore()
            other.save(3)
        assert ckpt.restore(only=["optimizer", "plain"]).step == 2
        assert ckpt.restore(only="blob").step == 2
        assert fresh.is_wholly(2)
        with pytest.raises(laststep.AbortedError):
            ckpt.save(3).result()
        assert ckpt.restore().step == 3
        ckpt.save(4).result()
    assert laststep.open(run).steps() == [1, 2, 3, 4]


@pytest.mark.parametrize("bound", [True, False])
def test_steps_that_another_job_saved_after_the_look_are_not_abandoned(
    saved: Callable[..., Path], opened: object, fresh: object, training: object, bound: bool
) -> None:
    run = saved(1, 2)
    with opened(fresh) as ckpt, opened(training) as other:
        look = ckpt.peek if bound else ckpt.restore
        assert look().step == 2
        other.restore()
        other.save(3).result()
        other.save(4).result()
        if bound:
            assert ckpt.restore().step == 2
        with pytest.raises(laststep.AbortedError):
            ckpt.save(3).result()
    assert laststep.open(run).steps() == [1, 2, 3, 4]


def test_a_run_that_was_empty_at_the_peek_is_not_begun_a_second_time(
    run_folder: Path, opened: object, fresh: object, training: object
) -> None:
    with opened(fresh) as ckpt, opened(training) as other:
        assert ckpt.peek() is None
        other.save(0).result()
        with pytest.raises(laststep.UsageError):
            ckpt.save(0)
        assert ckpt.restore().step == 0
        ckpt.save(1).result()
    assert laststep.open(run_folder).steps() == [0, 1]


def test_damage_that_a_part_finds_is_an_error_and_the_next_older_one_is_offered(
    saved: Callable[..., Path], opened: object, fresh: object
) -> None:
    run = saved(1, 2, 3)
    damage(run, 3)
    with opened(fresh) as ckpt:
        assert ckpt.peek().step == 3
        assert ckpt.restore(only=["model", "plain"]).step == 3
        with raises(laststep.CorruptError, remedy="peek()"):
            ckpt.restore(only="blob")
        assert ckpt.peek().step == 2
        parts = ["optimizer", "model", "plain", "blob"]
        for part in parts:
            with raises(laststep.UsageError, remedy="restore()"):
                ckpt.save(9)
            ckpt.peek()
            for one in parts[: parts.index(part) + 1]:
                assert ckpt.restore(only=one).step == 2
        assert fresh.is_wholly(2)
        ckpt.save(3).result()
    assert laststep.open(run).latest().verify().damage == ()


def test_what_does_not_open_is_passed_over_and_told(
    saved: Callable[..., Path], opened: object, fresh: object
) -> None:
    run = saved(1, 2, 3)
    flip(file_of(run, 3, "manifest.json"), 60)
    flip(file_of(run, 2, "index-r00000"), 40)
    with opened(fresh) as ckpt:
        found = ckpt.peek()
        assert (found.step, [one.step for one in found.skipped]) == (1, [3, 2])
        assert ckpt.restore().skipped == found.skipped
    assert fresh.is_wholly(1)


def test_none_of_several_that_can_be_opened_is_an_error(
    saved: Callable[..., Path], opened: object, fresh: object
) -> None:
    flip(file_of(saved(1), 1, "manifest.json"), 60)
    with opened(fresh) as ckpt, raises(laststep.CorruptError, found="step 1"):
        ckpt.peek()


def test_a_run_of_which_all_was_found_damaged_is_not_taken_for_a_new_one(
    saved: Callable[..., Path], opened: object, fresh: object
) -> None:
    damage(saved(1), 1)
    with opened(fresh) as ckpt:
        ckpt.peek()
        with pytest.raises(laststep.CorruptError):
            ckpt.restore()
        with raises(laststep.CorruptError, remedy="a copy of the run"):
            ckpt.peek()


def test_one_that_is_gone_by_then_is_an_error_and_another_is_offered(
    saved: Callable[..., Path], opened: object, fresh: object
) -> None:
    run = saved(1, 2)
    with opened(fresh) as ckpt:
        ckpt.peek()
        shutil.rmtree(next(run.glob("step-00000002*")))
        with raises(laststep.NotFoundError, where="step-00000002"):
            ckpt.restore(only="model")
        assert ckpt.peek().step == 1
        assert ckpt.restore().step == 1


def test_parts_of_two_that_were_peeked_at_one_after_the_other_are_not_saved(
    saved: Callable[..., Path], opened: object, fresh: object, training: object
) -> None:
    saved(1)
    with opened(fresh) as ckpt:
        ckpt.peek()
        ckpt.restore(only="model")
        with opened(training) as other:
            other.restore()
            other.save(2)
        assert ckpt.peek().step == 2
        ckpt.restore(only=["blob", "optimizer", "plain"])
        with raises(laststep.UsageError, remedy="restore()"):
            ckpt.save(3)
        ckpt.restore(only="model")
        ckpt.save(3)


@pytest.mark.parametrize("loss", ["is gone", "rots"])
def test_parts_of_one_that_is_lost_midway_are_not_saved_beside_parts_of_another(
    saved: Callable[..., Path], opened: object, fresh: object, loss: str
) -> None:
    run = saved(1, 2)
    with opened(fresh) as ckpt:
        ckpt.peek()
        ckpt.restore(only="model")
        if loss == "is gone":
            shutil.rmtree(next(run.glob("step-00000002*")))
        else:
            flip(file_of(run, 2, "index-r00000"), 40)
        with pytest.raises(laststep.NotFoundError if loss == "is gone" else laststep.CorruptError):
            ckpt.restore(only=["blob", "optimizer", "plain"])
        assert ckpt.peek().step == 1
        ckpt.restore(only=["blob", "optimizer", "plain"])
        with raises(laststep.UsageError, remedy="restore()"):
            ckpt.save(2)
        ckpt.restore(only="model")
        assert fresh.is_wholly(1)
        ckpt.save(2)


def test_what_was_never_restored_need_not_be_after_damage(
    saved: Callable[..., Path], opened: object, fresh: object
) -> None:
    """As a framework leaves out its loader where there are other ranks now."""
    damage(saved(1, 2), 2)
    wanted = ["blob", "model", "optimizer"]
    with opened(fresh) as ckpt:
        ckpt.peek()
        with pytest.raises(laststep.CorruptError):
            ckpt.restore(only=wanted)
        ckpt.peek()
        ckpt.restore(only=wanted[:2])
        with raises(laststep.UsageError, remedy="restore()"):
            ckpt.save(2)
        ckpt.restore(only=wanted[2:])
        ckpt.save(2)
    assert fresh.values() == {"blob": {1}, "model": {1}, "optimizer": {1}, "plain": {-1}}


def test_a_part_of_another_one_is_not_saved_beside_a_whole_one(
    saved: Callable[..., Path], opened: object, fresh: object, training: object
) -> None:
    saved(1)
    with opened(fresh) as ckpt:
        ckpt.peek()
        ckpt.restore()
        with opened(training) as other:
            other.restore()
            other.save(2)
        ckpt.peek()
        ckpt.restore(only="model")
        with raises(laststep.UsageError, remedy="restore()"):
            ckpt.save(3)
        ckpt.restore()
        ckpt.save(3)


class Fragile(laststep.StateProvider):
    """Breaks when it is told to."""

    breaks = False

    def describe(self) -> laststep.State:
        return laststep.State(value={"n": 1})

    def restore(self, value: object) -> None:
        if self.breaks:
            raise RuntimeError("broken")


def test_an_item_whose_second_restore_fails_counts_as_not_restored(run_folder: Path) -> None:
    items = {"fragile": Fragile(), "plain": {"n": 1}}
    how = {"flush": "thread", "progress": False}
    with laststep.Checkpointer(run_folder, items=items, **as_keywords(how)) as ckpt:
        ckpt.save(1)
    with laststep.Checkpointer(run_folder, items=items, **as_keywords(how)) as ckpt:
        ckpt.peek()
        ckpt.restore(only="fragile")
        items["fragile"].breaks = True
        with pytest.raises(RuntimeError, match="broken"):
            ckpt.restore(only="fragile")
        ckpt.restore(only="plain")
        with raises(laststep.UsageError, remedy="restore()"):
            ckpt.save(2)
        items["fragile"].breaks = False
        ckpt.restore(only="fragile")
        ckpt.save(2)


def test_a_step_that_is_named_counts_more(
    saved: Callable[..., Path], opened: object, fresh: object
) -> None:
    saved(1, 2)
    with opened(fresh) as ckpt:
        ckpt.peek()
        assert ckpt.restore(1).step == 1
        assert ckpt.restore().step == 2


class Made:
    """A model and an optimizer that a framework makes late."""

    model: nn.Module | None = None
    optimizer: torch.optim.Optimizer | None = None

    def make(self, value: float) -> None:
        self.model = nn.Linear(3, 2)
        nn.init.constant_(self.model.weight, value)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.model(torch.ones(3)).sum().backward()

    def items(self) -> dict[str, object]:
        return {
            "optimizer": laststep.Deferred(lambda: self.optimizer),
            "model": laststep.Deferred(lambda: self.model),
        }


def test_items_that_are_made_late_are_saved_and_restored_as_others_are(run_folder: Path) -> None:
    how = {"flush": "thread", "progress": False, "host_memory_bytes": 64 * MB}
    first = Made()
    with laststep.Checkpointer(run_folder, items=first.items(), **as_keywords(how)) as ckpt:
        assert ckpt.restore().step is None
        first.make(1.0)
        first.optimizer.step()
        ckpt.save(1)
    stored = laststep.open(run_folder).latest().tensors()
    assert "optimizer/state/weight/exp_avg" in stored  # by the names of the model, made after it
    second, third = Made(), Made()
    with laststep.Checkpointer(run_folder, items=second.items(), **as_keywords(how)) as ckpt:
        assert ckpt.peek().step == 1
        second.make(2.0)
        assert ckpt.restore().step == 1
    assert torch.equal(second.model.weight, first.model.weight)
    third.make(3.0)
    plain = {"model": third.model, "optimizer": third.optimizer}
    with laststep.Checkpointer(run_folder, items=plain, **as_keywords(how)) as ckpt:
        ckpt.restore()
    moments = [s["exp_avg"] for one in (first, third) for s in one.optimizer.state.values()]
    assert torch.equal(moments[0], moments[2])


def test_a_late_item_is_a_function() -> None:
    with raises(laststep.UsageError, remedy="lambda"):
        laststep.Deferred(nn.Linear(2, 2).state_dict())  # type: ignore[arg-type]


def test_a_late_item_that_is_another_each_time_is_refused(run_folder: Path) -> None:
    """Nothing of it could be restored: the next look would be at another one."""
    late = laststep.Deferred(lambda: nn.Linear(2, 2))
    with (
        laststep.Checkpointer(
            run_folder, late=late, options=laststep.Options(flush="thread", progress=False)
        ) as ckpt,
        raises(laststep.UsageError, remedy="lambda:"),
    ):
        ckpt.save(0)


def test_a_late_item_that_is_replaced_is_saved_as_what_it_is_then(run_folder: Path) -> None:
    made = Made()
    made.make(1.0)
    with laststep.Checkpointer(
        run_folder, items=made.items(), options=laststep.Options(flush="thread")
    ) as ckpt:
        ckpt.save(1).result()
        made.make(2.0)
        ckpt.save(2).result()
        made.optimizer.step()
        ckpt.save(3).result()
        made.make(4.0)
        ckpt.restore(3)
        restored = made.model.weight.clone()
    run = laststep.open(run_folder)
    stored = [run[step].tensor("model/weight")[:] for step in (1, 2, 3)]
    assert [weight.mean().item() for weight in stored[:2]] == [1.0, 2.0]
    assert torch.equal(restored, stored[2])
    assert not torch.equal(stored[1], stored[2])


def test_what_is_made_of_a_late_item_is_made_once_for_each(run_folder: Path) -> None:
    made, calls = Made(), []
    made.make(1.0)
    made.model.bias.requires_grad_(False)

    def trained(model: nn.Module) -> object:
        calls.append(model)
        return laststep.trainable(model)

    late = laststep.Deferred(lambda: made.model, trained)
    with laststep.Checkpointer(
        run_folder, model=late, options=laststep.Options(flush="thread")
    ) as ckpt:
        ckpt.save(1)
        ckpt.save(2).result()
        made.make(2.0)
        ckpt.save(3).result()
    assert len(calls) == 2
    stored = [list(laststep.open(run_folder)[step].tensors()) for step in (2, 3)]
    assert stored == [["model/weight"], ["model/weight", "model/bias"]]


def test_memory_is_made_ready_once_a_late_item_is_there(run_folder: Path) -> None:
    """The first save finds it, as if the items had been there from the beginning."""
    made, size = Made(), 3 * 8 * MB
    items = {"model": laststep.Deferred(lambda: made.model)}
    with laststep.Checkpointer(run_folder, items=items, host_memory_bytes=256 * MB) as ckpt:
        made.model = nn.Linear(1024, size // 4096, bias=False)
        optimizer = torch.optim.SGD(made.model.parameters())
        for _ in range(3):
            optimizer.step()
        wait_until(lambda: ckpt._pool.ready_bytes >= size)


def test_a_late_item_that_is_not_made_by_then_is_told(run_folder: Path) -> None:
    items = {"state": {"n": 1}, "late": laststep.Deferred(lambda: None)}
    how = {"flush": "thread", "progress": False}
    with (
        laststep.Checkpointer(run_folder, items=items, **as_keywords(how)) as ckpt,
        raises(laststep.UsageError, where="late"),
    ):
        ckpt.save(0)


def test_a_late_item_has_the_kind_of_what_it_became(run_folder: Path) -> None:
    model = nn.Linear(2, 2)
    late = laststep.PerRank(laststep.Deferred(lambda: model))
    with laststep.Checkpointer(
        run_folder, late=late, options=laststep.Options(flush="thread", progress=False)
    ) as ckpt:
        ckpt.save(0).result()
    content = laststep.open(run_folder).latest().content()
    assert content.items["late"].kind == "module"
