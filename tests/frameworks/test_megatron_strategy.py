"""Megatron's own save and load calls, through laststep's strategies, on CPU ranks."""

from __future__ import annotations

import enum
import json
import subprocess
import sys
from argparse import Namespace
from importlib.metadata import version

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import laststep
from expect import raises
from frameworks.trained import PATIENCE_S, SCRIPTS, Script, environment

pytest.importorskip("megatron.core", reason="needs laststep[megatron]")
pytestmark = pytest.mark.filterwarnings("ignore")  # of Megatron

from megatron.core import dist_checkpointing  # noqa: E402
from megatron.core.dist_checkpointing import ShardedTensor, serialization  # noqa: E402
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config  # noqa: E402

from laststep.megatron import LoadStrategy, SaveStrategy  # noqa: E402

RELEASE = tuple(map(int, version("megatron-core").split(".")[:2]))


def run(*arguments, ranks):
    done = subprocess.run(
        [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={ranks}",
            SCRIPTS / "megatron_sharded.py",
            *arguments,
        ],
        env=environment(),
        timeout=PATIENCE_S,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.parametrize("way", ["plain", "parallel"])
def test_what_ranks_have_of_dense_weights_and_of_experts_comes_back(way, tmp_path):
    folder = tmp_path / "iter_0000012"
    run(folder, "save", way, ranks=2)
    (stored,) = laststep.open(folder / "laststep")
    assert stored.step == 12
    assert stored.tensor("model/experts.weight").shape == (4, 8, 3)

    run(folder, "load", way, ranks=2)
    run(folder, "others", ranks=1)
    for rank in range(2):
        same, rng, step, args, keys = json.loads(
            (tmp_path / f"{folder.name}.load{rank}.json").read_text()
        )
        assert (same, rng, step, args) == (True, {"of": rank}, 12, {"lr": 0.5})
        assert {"dense.weight", "experts.optimizer.exp_avg", "rng/shard_0_2"} <= set(keys)
    same, *_ = json.loads((tmp_path / f"{folder.name}.others0.json").read_text())
    assert same, "one rank has all experts"


WAYS = {"tensors cut": ("tp", 2), "experts": ("moe+ep+bf16", 2), "half": ("bf16", 1)}


@pytest.mark.parametrize("way", WAYS)
def test_a_training_that_is_killed_in_a_save_goes_on_bit_for_bit(way, tmp_path):
    words, ranks = WAYS[way]
    arguments = ("megatron_gpt.py", tmp_path / "whole", words, "8")
    whole = Script(*arguments, ranks=ranks).to_its_end()
    script = Script("megatron_gpt.py", tmp_path / "killed", words, "8", ranks=ranks)
    script.killed_in_save(6)
    rest = script.to_its_end()
    assert min(rest) in (4, 7)
    assert rest == {step: whole[step] for step in rest}


@pytest.mark.parametrize("ranks", [(2, 1), (1, 2)])
def test_another_number_of_ranks_goes_on(ranks, tmp_path):
    """With the same weights, and nearly the same numbers, which are added in another order."""
    before, after = ranks
    whole = Script("megatron_gpt.py", tmp_path / "whole", "tp", "6", ranks=after).to_its_end()
    script = Script("megatron_gpt.py", tmp_path, "tp")
    script.to_its_end("3", ranks=before)
    rest = script.to_its_end("6", ranks=after)
    assert sorted(rest) == [4, 5, 6]
    for step, loss in rest.items():
        assert float.fromhex(loss) == pytest.approx(float.fromhex(whole[step]), rel=1e-2)


@pytest.mark.parametrize("ways", [("fused", "plain"), ("plain", "fused")])
def test_the_state_of_fused_adam_goes_on_in_adamw_and_back(ways, tmp_path):
    """They compute the same here, so that losses are the same to the bit."""
    before, after = ways
    whole = Script("megatron_gpt.py", tmp_path / "whole", before, "6").to_its_end()
    script = Script("megatron_gpt.py", tmp_path)
    script.to_its_end(before, "3")
    rest = script.to_its_end(after, "6")
    assert rest == {step: whole[step] for step in (4, 5, 6)}


def test_damage_is_an_error(tmp_path):
    folder = tmp_path / "iter_0000012"
    run(folder, "save", ranks=1)
    file = max((folder / "laststep").rglob("*.safetensors"), key=lambda file: file.stat().st_size)
    data = bytearray(file.read_bytes())
    data[4200] ^= 1
    file.write_bytes(data)
    with pytest.raises(AssertionError, match="CorruptError"):
        run(folder, "load", ranks=1)


@pytest.fixture
def alone():
    """This process as the only rank of a job."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def folder(alone, tmp_path):
    folder = tmp_path / "iter_0000012"
    folder.mkdir()
    return folder


def described(*, empty=False, **common):
    """A weight, and common state."""
    data = torch.zeros(4, 3) if empty else torch.arange(12.0).view(4, 3)
    return {"w": ShardedTensor.from_rank_offsets("w", data), **common}


def save(folder, **common):
    dist_checkpointing.save(described(**common), folder, sharded_strategy=SaveStrategy())


def load(folder, **options):
    state = described(empty=True)
    return dist_checkpointing.load(state, folder, sharded_strategy=LoadStrategy(), **options)


def test_megatron_does_not_replace_the_strategy(folder):
    save(folder, args=Namespace(lr=0.5))
    assert {file.name for file in folder.iterdir()} == {"common.pt", "laststep", "metadata.json"}
    assert json.loads((folder / "metadata.json").read_text())["sharded_backend"] == "laststep"
    stored = serialization.load_sharded_metadata(folder, LoadStrategy())
    assert [entry.key for entry in stored.values()] == ["w"], "no common state, as in all releases"
    loaded = load(folder)
    assert loaded["args"] == Namespace(lr=0.5)
    assert torch.equal(loaded["w"], described()["w"].data)


def test_a_save_replaces_an_earlier_one(folder):
    save(folder, iteration=1)
    save(folder, iteration=2)
    assert load(folder)["iteration"] == 2


def test_a_strict_load_finds_nothing_missing_or_unexpected(folder):
    save(folder, iteration=12)
    loaded, missing, unexpected = load(folder, strict="return_all")
    assert (loaded["iteration"], missing, unexpected) == (12, set(), set())
    metadata = serialization.load_tensors_metadata(folder, LoadStrategy())
    assert metadata["w"].global_shape == (4, 3)
    assert metadata["w"].dtype == torch.float32


def test_an_asynchronous_save_is_refused(folder):
    """Without that, Megatron's own strategy would save, under the name of this one."""
    with raises(laststep.UsageError, "async"):
        dist_checkpointing.save(
            described(), folder, sharded_strategy=SaveStrategy(), async_sharded_save=True
        )
    assert not (folder / "metadata.json").exists()


def test_a_checkpoint_of_megatrons_own_strategy_is_refused(folder):
    dcp.save({"w": torch.ones(4, 3)}, checkpoint_id=folder)  # Megatron itself needs a GPU for it
    torch.save({"iteration": 12}, folder / "common.pt")
    save_config(CheckpointingConfig("torch_dist"), folder)
    with raises(laststep.MismatchError, found=".metadata"):
        load(folder)
    with raises(laststep.MismatchError, found=".metadata"):
        serialization.load_sharded_metadata(folder, LoadStrategy())


@pytest.mark.skipif(RELEASE < (0, 19), reason="Megatron itself writes the common state")
def test_common_state_that_cannot_be_loaded_is_refused(folder):
    class Odd(enum.Enum):
        ONE = 1

    globals()["Odd"], Odd.__qualname__ = Odd, "Odd"  # else it cannot be pickled at all
    with pytest.raises(dcp.api.CheckpointException, match=r"UsageError.*Odd"):
        save(folder, odd=Odd.ONE)
    assert not (folder / "metadata.json").exists()
    with torch.serialization.safe_globals([Odd]):
        save(folder, odd=Odd.ONE)
        assert load(folder)["odd"] is Odd.ONE


def test_a_load_without_strategy_never_returns_a_part(folder):
    """Up to 0.16 Megatron chooses the strategy by the folder; since then it takes its own."""
    save(folder, iteration=12)
    state = described(empty=True)
    if RELEASE < (0, 17):
        assert torch.equal(dist_checkpointing.load(state, folder)["w"], described()["w"].data)
    else:
        with pytest.raises(dcp.api.CheckpointException, match="metadata"):
            dist_checkpointing.load(state, folder)
