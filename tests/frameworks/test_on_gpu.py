"""Frameworks on a GPU: killed in the middle of a save, they go on bit for bit there too."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch

from frameworks.trained import Script

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(500),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU with CUDA"),
]


def assert_goes_on(name: str, folder: Path, *arguments: str, step: int) -> None:
    """Losses of a training that is killed in the save of `step` are those of one that is not."""
    whole = Script(name, folder / "whole", *arguments, gpu=True).to_its_end()
    broken = Script(name, folder / "broken", *arguments, gpu=True)
    before = broken.killed_in_save(step)
    after = broken.to_its_end()
    assert min(after) > 1, "it began anew"
    assert {**before, **after} == whole
    assert all(after[same] == before[same] for same in after.keys() & before.keys())


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_hugging_face(precision: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs transformers: make test-frameworks")
    arguments = {"use_cpu": False, "full_determinism": True}
    if precision != "fp32":
        arguments[precision] = True
    options = {"waits": True, "args": arguments}
    assert_goes_on("hf_train.py", tmp_path, json.dumps(options), step=6)


@pytest.mark.parametrize("strategy", ["auto", "deepspeed_stage_2", "deepspeed_stage_3"])
def test_lightning(strategy: str, tmp_path: Path) -> None:
    pytest.importorskip("lightning", reason="needs lightning: make test-frameworks")
    if strategy != "auto":
        pytest.importorskip("deepspeed", reason="needs deepspeed: make test-frameworks")
    options = ("on=gpu", "paced=1", f"strategy={strategy}")
    assert_goes_on("lightning_training.py", tmp_path, *options, step=15)


@pytest.mark.parametrize("way", ["zero1+bf16", "zero2+fp16", "zero3+bf16", "zero3+bf16+offload"])
def test_deepspeed(way: str, tmp_path: Path) -> None:
    pytest.importorskip("deepspeed", reason="needs deepspeed: make test-frameworks")
    assert_goes_on("deepspeed_train.py", tmp_path, way, "10", step=6)


def test_accelerate(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="needs accelerate: make test-frameworks")
    assert_goes_on("accelerate_loop.py", tmp_path, "attach", "plain", "gpu", "15", step=9)
