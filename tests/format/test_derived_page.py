"""The second reader, written from docs/format.md, reads derived blocks."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import laststep

sys.path.insert(0, str(Path(__file__).parent))

import second_codecs
import second_reader


def test_the_second_reader_reads_derived_blocks(run_folder: Path) -> None:
    torch.manual_seed(0)
    sizes = (700_000, 3, 40, 300_000)
    masters = {f"w{n}": torch.randn(size) for n, size in enumerate(sizes)}
    model = {
        name: master.to(torch.float16 if name == "w3" else torch.bfloat16)
        for name, master in masters.items()
    }
    model["w2"] += 1  # is not the rounding of its master
    model["norm"] = torch.randn(9)
    with laststep.Checkpointer(
        run_folder,
        model=model,
        masters=masters,
        options=laststep.Options(derived=True, flush="thread", progress=False),
    ) as ckpt:
        ckpt.save(1)
    [pack] = run_folder.glob("step-*/blocks-r00000.pack")
    assert pack.stat().st_size < 10_000
    found = second_reader.read(run_folder)
    for item, tensors in (("model", model), ("masters", masters)):
        assert found[item].keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert found[item][name].data == tensor.view(torch.uint8).numpy().tobytes(), name


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_page_rounds_as_torch_does(dtype: str) -> None:
    """Of every exponent some values, with ties, and what is not finite."""
    high = torch.arange(1 << 16, dtype=torch.int64) << 16
    low = torch.tensor([0, 1, 0x0FFF, 0x1000, 0x1001, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    bits = (high[:, None] + low).flatten().to(torch.int32)
    found = second_codecs.rounded(bits.numpy().tobytes(), dtype)
    wanted = bits.view(torch.float32).to(getattr(torch, dtype))
    assert found == wanted.view(torch.int16).numpy().tobytes()
