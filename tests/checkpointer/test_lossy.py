"""Tensors that are rounded when they are saved: on request only, marked, and refused on request."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

import laststep
from expect import raises
from laststep.settings import as_keywords

if TYPE_CHECKING:
    from pathlib import Path

LOSSY = {"optimizer/*exp_avg": "int8", "optimizer/*exp_avg_sq": "bf16"}


class Training:
    """A small network that learns to copy, and its optimizer."""

    def __init__(self) -> None:
        self.random = torch.Generator().manual_seed(7)
        torch.manual_seed(3)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(32, 256), torch.nn.Tanh(), torch.nn.Linear(256, 32)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def train(self, steps: int) -> float:
        for _ in range(steps):
            batch = torch.randn(64, 32, generator=self.random)
            loss = (self.model(batch) - batch).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return loss.item()

    def moments(self, name: str) -> list[torch.Tensor]:
        return [state[name].clone() for state in self.optimizer.state.values()]

    def checkpointer(self, run: Path, **settings: object) -> laststep.Checkpointer:
        return laststep.Checkpointer(
            run,
            model=self.model,
            optimizer=self.optimizer,
            **as_keywords({"flush": "thread", **settings}),
        )


def test_what_is_asked_for_is_rounded_and_all_else_is_exact(run_folder: Path) -> None:
    training = Training()
    training.train(20)
    weights = [p.detach().clone() for p in training.model.parameters()]
    first, second = training.moments("exp_avg"), training.moments("exp_avg_sq")
    with training.checkpointer(run_folder, lossy=LOSSY) as checkpointer:
        report = checkpointer.save(1).result()
    assert report.written_bytes < 0.7 * report.size_bytes
    other = Training()
    other.train(1)
    with other.checkpointer(run_folder) as checkpointer:
        checkpointer.restore()
    assert all(map(torch.equal, other.model.parameters(), weights))
    rounded = [moment.bfloat16().float() for moment in second]
    assert all(map(torch.equal, other.moments("exp_avg_sq"), rounded))
    for was, now in zip(first, other.moments("exp_avg"), strict=True):
        assert not torch.equal(was, now)
        assert (was - now).abs().max() <= was.abs().max() / 127


def test_training_goes_on_from_a_rounded_checkpoint_as_from_an_exact_one(
    run_folder: Path, record_property: pytest.RecordProperty
) -> None:
    losses = {}
    for name, lossy in (("exact", None), ("rounded", LOSSY)):
        training = Training()
        training.train(100)
        with training.checkpointer(run_folder / name, lossy=lossy) as checkpointer:
            checkpointer.save(100)
        resumed = Training()
        resumed.train(1)
        with resumed.checkpointer(run_folder / name) as checkpointer:
            checkpointer.restore()
        resumed.random.manual_seed(11)
        losses[name] = resumed.train(100)
    difference = losses["rounded"] / losses["exact"] - 1
    record_property("loss_differs_by", difference)
    assert losses["rounded"] != losses["exact"]  # it was rounded
    assert abs(difference) < 0.02


def test_a_restore_that_must_be_exact_refuses_rounded_tensors_and_takes_the_others(
    run_folder: Path,
) -> None:
    training = Training()
    training.train(2)
    with training.checkpointer(run_folder, lossy={"optimizer/*exp_avg": "bf16"}) as checkpointer:
        checkpointer.save(1)
        with raises(
            laststep.MismatchError, found="optimizer/state/0.weight/exp_avg, rounded to bf16"
        ):
            checkpointer.restore(exact=True)
        assert checkpointer.restore(exact=True, only=["model"]).step == 1
        assert checkpointer.restore(exact=True, only=["optimizer/*exp_avg_sq"]).step == 1
        assert checkpointer.restore().step == 1
    with training.checkpointer(run_folder) as checkpointer:
        checkpointer.restore()
        training.train(1)
        checkpointer.save(2)
        assert checkpointer.restore(exact=True).step == 2


def test_unchanged_tensors_stay_unwritten_when_they_are_rounded(run_folder: Path) -> None:
    state = {"a": torch.randn(1 << 20), "b": torch.randn(1 << 20)}
    with laststep.Checkpointer(
        run_folder, state=state, options=laststep.Options(lossy={"state/*": "bf16"}, flush="thread")
    ) as checkpointer:
        checkpointer.save(1).result()
        assert checkpointer.save(2).result().written_bytes < 100_000
        state["b"] += 1
        assert 0 < checkpointer.save(3).result().written_bytes < 0.4 * (8 << 20)
        wanted = {name: tensor.bfloat16().float() for name, tensor in state.items()}
        checkpointer.restore()
    assert all(torch.equal(state[name], wanted[name]) for name in state)


@pytest.mark.parametrize(
    ("lossy", "message"),
    [
        ({"*exp_avg": "bf16"}, "'*exp_avg'"),
        ({"optimizer/*": "fp8"}, "'fp8'"),
        ({"optimiser/*": "bf16"}, "'optimizer'"),
        ({"optimizer/*": 8}, "lossy"),
        ("bf16", "lossy"),
    ],
)
def test_what_cannot_be_meant_is_refused(run_folder: Path, lossy: object, message: str) -> None:
    with raises(laststep.UsageError, message):
        Training().checkpointer(run_folder, lossy=lossy)
