"""What the commands say of weights that are derived from their masters."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file

from expect import names
from laststep import Checkpointer, Options

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

COUNT = 700_000


@pytest.fixture
def run(run_folder: Path) -> Path:
    torch.manual_seed(0)
    masters = {"w": torch.randn(COUNT)}
    model = {"w": masters["w"].to(torch.bfloat16)}
    with Checkpointer(
        run_folder,
        model=model,
        masters=masters,
        options=Options(derived=True, flush="thread", progress=False),
    ) as ckpt:
        ckpt.save(1)
    return run_folder


def test_show_says_which_weights_are_stored_as_the_rounding_of_others(
    run: Path, laststep: Callable
) -> None:
    out = laststep("show", run).out
    assert names(out, "model.safetensors", "rounded")
    document = laststep("show", run, "--json").json()
    files = {file["name"]: (file["used_by"], file["codecs"]) for file in document["files"]}
    assert files == {
        "masters.safetensors": (["masters.safetensors"], []),
        "blocks-r00000.pack": (["model.safetensors"], ["rounded"]),
    }
    model = next(item for item in document["items"] if item["name"] == "model")
    assert model["files"] == ["blocks-r00000.pack"]


def test_what_is_derived_from_others_is_exported(
    run: Path, laststep: Callable, tmp_path: Path
) -> None:
    laststep("export", run, tmp_path / "out", "--format", "hf", "--item", "model")
    torch.manual_seed(0)
    expected = torch.randn(COUNT).to(torch.bfloat16)
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["w"], expected)


def test_verify_names_master_and_weight_where_a_master_is_damaged(
    run: Path, laststep: Callable
) -> None:
    [path] = run.glob("step-*/masters.safetensors")
    stored = bytearray(path.read_bytes())
    stored[-1] ^= 0x40
    path.write_bytes(stored)
    ended = laststep("verify", run)
    assert ended.status != 0
    assert "masters/w" in ended.out + ended.err
    assert "model/w" in ended.out + ended.err
