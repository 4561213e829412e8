"""Runs that earlier versions have written still open, verify and restore, bit for bit."""

from __future__ import annotations

import math
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

import laststep
from laststep.catalog.attempt import read_indexes
from laststep.catalog.run import Run
from laststep.storage.directory import DirectoryStore

sys.path.insert(0, str(Path(__file__).parent))

import contents

if TYPE_CHECKING:
    from collections.abc import Callable

RUNS = Path(__file__).parent / "version-1"
NAMES = sorted(path.name for path in RUNS.iterdir())


@pytest.fixture
def golden(tmp_path: Path) -> Callable[[str], Path]:
    """A copy of a golden run, which a test may write to."""

    def copy(name: str) -> Path:
        return Path(shutil.copytree(RUNS / name, tmp_path / name))

    return copy


def assert_same(found: object, wanted: object, where: str = "state") -> None:
    """Equal by type and bits, at every depth."""
    assert type(found) is type(wanted), where
    if isinstance(wanted, torch.Tensor):
        assert isinstance(found, torch.Tensor)
        assert (found.dtype, found.shape, found.layout) == (
            wanted.dtype,
            wanted.shape,
            wanted.layout,
        ), where
        found, wanted = found.to_dense().contiguous(), wanted.to_dense().contiguous()
        one, other = (t.reshape(-1).view(torch.uint8) for t in (found, wanted))
        assert torch.equal(one, other), where
    elif isinstance(wanted, dict):
        assert list(found) == list(wanted), where  # type: ignore[call-overload]
        for (one, mine), (other, theirs) in zip(found.items(), wanted.items(), strict=True):  # type: ignore[attr-defined]
            assert_same(one, other, f"a key of {where}")
            assert_same(mine, theirs, f"{where}[{one!r}]")
    elif isinstance(wanted, list | tuple) or type(wanted).__name__ == "deque":
        assert len(found) == len(wanted), where  # type: ignore[arg-type]
        for number, (one, other) in enumerate(zip(found, wanted, strict=True)):  # type: ignore[call-overload]
            assert_same(one, other, f"{where}[{number}]")
    elif isinstance(wanted, float):
        assert (found, math.copysign(1, found)) == (wanted, math.copysign(1, wanted)), where  # type: ignore[arg-type]
    else:
        assert found == wanted, where


def zeroed(value: object) -> object:
    """Of the same structure, with zeros in every tensor and in place of every other value."""
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    return {key: zeroed(one) for key, one in value.items()} if type(value) is dict else 0


def restored(run: Path, **items: object) -> laststep.Restored:
    with laststep.Checkpointer(run, **items) as ckpt:
        return ckpt.restore()


@pytest.mark.parametrize("name", NAMES)
def test_every_checkpoint_of_a_golden_run_verifies(name: str) -> None:
    for checkpoint in laststep.open(RUNS / name):
        assert not checkpoint.verify().damage


def test_every_golden_run_is_looked_at() -> None:
    assert NAMES == [
        "borrowed",
        "coded",
        "dcp",
        "fsdp2",
        "groups",
        "one-rank",
        "partial",
        "per-rank",
    ]


def test_one_rank_restores_the_newest_of_its_lineage(golden: Callable[[str], Path]) -> None:
    items = contents.training(None)
    values = zeroed(contents.values())
    found = restored(golden("one-rank"), **items, values=values, rng=laststep.RNG())
    assert torch.equal(torch.get_rng_state(), torch.manual_seed(3).get_state())
    assert (found.step, found.folder, found.skipped) == (3, "step-00000003.2-1", ())
    assert (found.metrics, found.metadata) == ({"loss": 0.75}, {"note": ("golden", 3)})
    assert_same(contents.tensors_of(items), contents.tensors_of(contents.training(13)))
    assert_same(values, contents.values())


def test_one_rank_lists_its_lineage_and_what_was_abandoned() -> None:
    catalog = laststep.open(RUNS / "one-rank")
    assert catalog.steps() == [1, 2, 3]
    loaded = laststep.load(RUNS / "one-rank", step=1)
    assert_same(loaded["values"], contents.values())
    weight = catalog[2].tensor("model/embed.weight")[2:4]
    assert torch.equal(weight, contents.training(2)["model"].embed.weight[2:4])


@pytest.mark.parametrize("name", ["fsdp2", "groups"])
def test_what_several_ranks_wrote_restores_into_one(
    name: str, golden: Callable[[str], Path]
) -> None:
    items = contents.training(None)
    found = restored(golden(name), **items)
    assert (found.step, found.skipped) == (5, ())
    assert_same(contents.tensors_of(items), contents.tensors_of(contents.training(5)))


def test_state_of_each_rank_is_found_by_rank() -> None:
    for rank in (0, 1):
        loaded = laststep.load(RUNS / "per-rank", rank=rank)
        assert_same(loaded["mine"], contents.of_rank(rank))
        assert_same(loaded["shared_state"], {"w": contents.pattern((4,), 3)})


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_dcp_wrote_through_us_loads() -> None:
    import torch.distributed.checkpoint as dcp

    from laststep.dcp import Reader

    wanted = contents.training(9)["model"].state_dict()
    state = {
        "model": {name: torch.zeros_like(tensor) for name, tensor in wanted.items()},
        "step": 0,
        "tensor": torch.zeros(6),
    }
    dcp.load(state, storage_reader=Reader(RUNS / "dcp"), no_dist=True)
    assert_same(state["model"], dict(wanted))
    assert state["step"] == 9
    assert_same(state["tensor"], contents.pattern((6,), 9))


def test_encoded_checkpoints_restore_and_each_stands_alone(tmp_path: Path) -> None:
    run = RUNS / "coded"
    for step in range(4):
        [folder] = run.glob(f"step-{step:08d}.*")
        wanted = {
            name: dict(item.state_dict()) if isinstance(item, torch.nn.Module) else item
            for name, item in contents.coded(step).items()
        }
        alone = Path(shutil.copytree(folder, tmp_path / str(step)))
        loaded = laststep.load(alone)
        assert_same({name: dict(loaded[name]) for name in wanted}, wanted)
    assert laststep.open(run).steps() == [0, 1, 2, 3]


def test_the_encoded_run_has_every_encoding() -> None:
    store, codecs, bases = DirectoryStore(RUNS / "coded"), set(), 0
    for listed in Run.open(store).checkpoints():
        assert listed.commit is not None
        [index] = read_indexes(store, listed.folder, listed.commit)
        for stored in index.layouts:
            for ref in stored.refs():
                encoding = index.encoding(ref.encoding)
                codecs.add(None if encoding is None else encoding.codec)
                bases += ref.base is not None
    assert codecs == {None, "planes", "patches", "subtract"}
    assert bases


def test_checkpoints_that_share_files_restore_and_each_stands_alone(tmp_path: Path) -> None:
    run = RUNS / "borrowed"
    for step in range(3):
        [folder] = run.glob(f"step-{step:08d}.*")
        model, position = contents.borrowed(step)
        alone = Path(shutil.copytree(folder, tmp_path / str(step)))
        assert_same(laststep.load(alone), {"model": model, "position": position})
    shared = [
        listed.commit.written.shared_bytes for listed in Run.open(DirectoryStore(run)).checkpoints()
    ]
    assert [size > 0 for size in shared] == [False, True, False]


def test_an_excerpt_restores_the_item_that_it_has(golden: Callable[[str], Path]) -> None:
    run = golden("partial")
    checkpoint = laststep.open(run).latest()
    assert (checkpoint.items(), checkpoint.omitted_items) == (["model"], ("optimizer",))
    items = contents.training(None)
    with laststep.Checkpointer(run, **items) as ckpt:
        assert ckpt.restore(only=["model"]).step == 5
    found, wanted = (one["model"].state_dict() for one in (items, contents.training(5)))
    assert_same(dict(found), dict(wanted))
