"""Megatron's own save and load calls, through laststep's strategies, on CPU ranks."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import laststep
from frameworks.trained import PATIENCE_S, SCRIPTS, environment

pytest.importorskip("megatron.core", reason="needs laststep[megatron]")


def run(*arguments, ranks):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone",
         f"--nproc-per-node={ranks}", SCRIPTS / "megatron_sharded.py", *arguments],
        env=environment(), timeout=PATIENCE_S, capture_output=True, text=True, check=False,
    )  # fmt: skip
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


def test_damage_is_an_error(tmp_path):
    folder = tmp_path / "iter_0000012"
    run(folder, "save", ranks=1)
    file = max((folder / "laststep").rglob("*.safetensors"), key=lambda file: file.stat().st_size)
    data = bytearray(file.read_bytes())
    data[4200] ^= 1
    file.write_bytes(data)
    with pytest.raises(AssertionError, match="Corrupt"):
        run(folder, "load", ranks=1)
