"""A plain loop with torchdata's loader resumes bit for bit, whatever its workers draw."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

import laststep
from expect import raises, warned

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

stateful = pytest.importorskip("torchdata.stateful_dataloader")
stateful_sampler = pytest.importorskip("torchdata.stateful_dataloader.sampler")
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")

EPOCHS, BATCHES, BATCH = 3, 4, 3


class Drawing(torch.utils.data.Dataset):
    """Samples that depend on every generator, as augmentations do."""

    def __len__(self) -> int:
        return BATCHES * BATCH

    def __getitem__(self, index: int) -> torch.Tensor:
        drawn = (torch.rand(()).item(), random.gauss(0, 1), np.random.rand())  # noqa: NPY002
        return torch.tensor([index, *drawn], dtype=torch.float64)


class Counting(Drawing):
    """Has a state of its own, which is part of the samples."""

    def __init__(self) -> None:
        self.count = 0

    def __getitem__(self, index: int) -> torch.Tensor:
        self.count += 1
        return torch.cat([super().__getitem__(index), torch.tensor([float(self.count)])])

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


class Stream(torch.utils.data.IterableDataset):
    """torchdata replays it up to the position."""

    def __iter__(self) -> object:
        info = torch.utils.data.get_worker_info()
        for index in range(
            info.id if info else 0, BATCHES * BATCH, info.num_workers if info else 1
        ):
            yield Drawing()[index]


class StatefulStream(Stream):
    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


def loader(dataset: object, *, own: bool = False, **how: object) -> object:
    how.setdefault("num_workers", 2)
    if not isinstance(dataset, Stream):
        how.setdefault("shuffle", True)
    generator = torch.Generator().manual_seed(3) if own else None
    return stateful.StatefulDataLoader(dataset, BATCH, generator=generator, **how)


def train(run: Path, make: Callable[[], object], save_at: int, resumed: list[object]) -> list:
    """Train through all epochs, or from where the run is; return the batches with what training
    itself draws. Appends to `resumed` the number of batches that were not trained again."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    data, progress = make(), {"epoch": 0, "step": 0}
    options = laststep.Options(flush="thread", progress=False)
    batches = []
    with laststep.Checkpointer(
        run, items={"loader": data, "progress": progress, "rng": laststep.RNG()}, options=options
    ) as ckpt:
        ckpt.restore()
        resumed.append(progress["step"])
        for epoch in range(progress["epoch"], EPOCHS):
            progress["epoch"] = epoch
            for batch in data:
                batches.append(torch.cat([batch.flatten(), torch.rand(2, dtype=torch.float64)]))
                progress["step"] += 1
                if progress["step"] == save_at:
                    ckpt.save(save_at)
    return batches


@pytest.mark.parametrize("save_at", [2, BATCHES + 1])
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: loader(Drawing()), id="workers"),
        pytest.param(lambda: loader(Drawing(), own=True), id="generator"),
        pytest.param(lambda: loader(Drawing(), persistent_workers=True), id="persistent"),
        pytest.param(lambda: loader(Drawing(), num_workers=0), id="no-workers"),
        pytest.param(lambda: loader(Drawing(), num_workers=0, own=True), id="no-workers-generator"),
        pytest.param(lambda: loader(Counting()), id="own-state"),
        pytest.param(lambda: loader(Stream()), id="stream"),
    ],
)
def test_a_resumed_loop_sees_the_same_numbers(
    make: Callable[[], object], save_at: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    resumed: list[object] = []
    whole = train(tmp_path / "run", make, save_at, resumed)
    rest = train(tmp_path / "run", make, 0, resumed)
    assert resumed == [0, save_at]
    assert len(rest) == len(whole) - save_at
    for again, before in zip(rest, whole[save_at:], strict=True):
        assert torch.equal(again, before)
    assert not warned(caplog, "workers")


@pytest.mark.parametrize(
    "sampler",
    [
        torch.utils.data.WeightedRandomSampler([1.0] * 12, 12),
        torch.utils.data.RandomSampler(range(12)),
        stateful_sampler.RandomSampler(range(12), replacement=True),
    ],
    ids=["weighted", "torch", "replacement"],
)
def test_an_order_that_cannot_be_restored_is_told(
    sampler: object, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = loader(Drawing(), sampler=sampler, shuffle=None, num_workers=0)
    laststep.Checkpointer(tmp_path / "run", loader=data).close()
    assert len(warned(caplog, type(sampler).__name__, "order")) == 1


def test_another_number_of_workers_is_a_mismatch(tmp_path: Path) -> None:
    train(tmp_path / "run", lambda: loader(Drawing()), 2, [])
    for workers in (0, 1):
        with raises(laststep.MismatchError, f"num_workers=2, here it is {workers}"):
            train(tmp_path / "run", lambda: loader(Drawing(), num_workers=workers), 0, [])  # noqa: B023


def test_what_cannot_be_restored_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def make() -> object:
        return loader(StatefulStream())

    train(tmp_path / "run", make, 2, [])
    assert len(warned(caplog, "2 workers", "epoch")) == 1


def test_several_checkpointers_may_save_one_loader(tmp_path: Path) -> None:
    data, calls = loader(Drawing()), []
    data.worker_init_fn = calls.append
    for name in "ab":
        laststep.Checkpointer(tmp_path / name, loader=data).close()
    assert data.worker_init_fn.args == (calls.append,)


@dataclass(frozen=True)
class Frozen(Drawing):
    """Sets no attributes by the usual way."""

    size: int = BATCHES * BATCH


class WithProperty(Drawing):
    @property
    def state_dict(self) -> None:
        return None


@pytest.mark.parametrize("dataset", [Frozen(), WithProperty()], ids=["frozen", "property"])
def test_a_dataset_that_takes_no_methods_is_loaded_all_the_same(
    dataset: object, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    batches = train(tmp_path / "run", lambda: loader(dataset), 2, [])
    assert len(batches) == EPOCHS * BATCHES
    assert bool(warned(caplog, "workers")) == isinstance(dataset, WithProperty)
