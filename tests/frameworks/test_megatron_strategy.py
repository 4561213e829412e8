"""Megatron's own save and load calls, through laststep's strategies, on CPU ranks."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import laststep
from frameworks.trained import PATIENCE_S, SCRIPTS, Script, environment

pytest.importorskip("megatron.core", reason="needs laststep[megatron]")


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


def test_what_ranks_have_of_dense_weights_and_of_experts_comes_back(tmp_path):
    folder = tmp_path / "iter_0000012"
    run(folder, "save", ranks=2)
    (stored,) = laststep.open(folder / "laststep")
    assert stored.step == 12
    assert stored.tensor("model/experts.weight").shape == (4, 8, 3)

    run(folder, "load", ranks=2)
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
