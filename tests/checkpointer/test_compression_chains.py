"""Chains of checkpoints whose blocks are encoded, alone or against each other, in ways that change
from start to start: every step that is kept comes back bit for bit, and stands alone."""

from __future__ import annotations

import random
import shutil
from typing import TYPE_CHECKING

import pytest
import torch

import laststep
from cases import long
from laststep.constants import BLOCK_BYTES
from laststep.flush import base as flush_base
from laststep.flush import encoder

if TYPE_CHECKING:
    from pathlib import Path

DTYPES = (
    torch.bool,
    torch.uint8,
    torch.float8_e4m3fn,
    torch.bfloat16,
    torch.bfloat16,
    torch.int16,
    torch.float32,
    torch.float32,
    torch.int64,
    torch.complex64,
    torch.complex128,
)
MODES = (
    "max",
    "max",
    "max",
    "adaptive",
    "none",
    "planes",
    {"large": "max", "model": "adaptive"},
    {"model": "none", "*": "max"},
)
LARGE = 6
"""Blocks of the largest tensor."""
SIZES = (*range(18), 5_001, BLOCK_BYTES // 2, BLOCK_BYTES + 13, 2 * BLOCK_BYTES + 7)
"""In bytes, of one tensor; rounded up to elements."""


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


class Chain:
    """A run, what should be in it, and a source of chance."""

    def __init__(self, run: Path, seed: int) -> None:
        self.run = run
        self.chance = random.Random(seed)
        self.random = torch.Generator().manual_seed(seed)
        self.items: dict[str, dict[str, torch.Tensor]] = {"large": {}, "model": {}, "small": {}}
        self.kept: dict[str, dict[str, dict[str, torch.Tensor]]] = {}
        """By folder: the tensors of each item."""
        self.step = 0
        self.used: set[str] = set()
        """The codecs of all blocks that were written."""
        for _ in range(5):
            self.add()
        self.items["large"]["w"] = self.drawn(torch.bfloat16, LARGE * BLOCK_BYTES)
        self.open()

    def open(self, step: int | None = None) -> None:
        """A start, with the tensors of the checkpoint that it goes on from."""
        if self.kept and list(laststep.open(self.run)):
            loaded = laststep.load(self.run, step=step)
            self.items = {name: loaded[name] for name in loaded}
        self.ckpt = laststep.Checkpointer(
            self.run,
            items=self.items,
            options=laststep.Options(flush="thread"),
            host_memory_bytes=64 << 20,
            compression=self.chance.choice(MODES),
            keep=laststep.Keep(last=4) if self.chance.random() < 0.3 else None,
        )
        self.ckpt.restore(step=step)

    def drawn(self, dtype: torch.dtype, size_bytes: int) -> torch.Tensor:
        """As training state is, any bits, or all the same."""
        count = -(-size_bytes // dtype.itemsize)
        if dtype is torch.bool:
            return torch.rand(count, generator=self.random) < 0.5
        if self.chance.random() < 0.6 and dtype.is_floating_point:
            return torch.randn(count, generator=self.random).to(dtype)
        most = self.chance.choice([1, 4, 256])
        drawn = torch.randint(0, most, (count * dtype.itemsize,), generator=self.random)
        return drawn.to(torch.uint8).view(dtype)

    def add(self) -> None:
        item = self.chance.choice(["model", "small"])
        tensor = self.drawn(self.chance.choice(DTYPES), self.chance.choice(SIZES))
        self.items[item][f"t{self.chance.randrange(10**6)}"] = tensor

    def drop(self) -> None:
        model = self.items["model"]
        if len(model) > 1:
            del model[self.chance.choice(list(model))]

    def add_item(self) -> None:
        self.ckpt.close()
        self.items[f"item{len(self.items)}"] = {"x": self.drawn(torch.float32, 9_000)}
        self.ckpt = laststep.Checkpointer(
            self.run,
            items=self.items,
            options=laststep.Options(flush="thread"),
            host_memory_bytes=64 << 20,
            compression="max",
            keep=None,
        )
        self.ckpt.restore(strict=False)

    def change(self) -> None:
        """A few elements of some tensors, all of one, or each by a little."""
        every = [tensor for item in self.items.values() for tensor in item.values()]
        for tensor in self.chance.sample(every, min(3, len(every))):
            kind = self.chance.random()
            if kind < 0.15:
                tensor.copy_(self.drawn(tensor.dtype, tensor.nbytes))
            elif kind < 0.35 and tensor.dtype.is_floating_point and tensor.itemsize > 1:
                little = torch.rand(len(tensor), generator=self.random) * 1e-3
                tensor.add_(little.to(tensor.dtype))
            elif kind < 0.8 and tensor.numel():
                raw = tensor.view(torch.uint8)
                for _ in range(self.chance.randrange(1, 40)):
                    raw[self.chance.randrange(len(raw))] ^= 1

        for _ in range(self.chance.randrange(4)):
            self.change_block(self.chance.randrange(LARGE))

    def change_block(self, number: int) -> None:
        """Of the large tensor: a few bits, or all of them."""
        block = self.large.view(torch.uint8)[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES]
        if self.chance.random() < 0.5:
            block[self.chance.randrange(BLOCK_BYTES)] ^= 1
        else:
            block.copy_(self.drawn(torch.bfloat16, BLOCK_BYTES).view(torch.uint8))

    @property
    def large(self) -> torch.Tensor:
        return self.items["large"]["w"]

    def save(self) -> None:
        self.step += 1
        report = self.ckpt.save(self.step).result()
        assert report.folder is not None
        self.used |= {word for file in report.coding for word in file.picked.split(", ")}
        self.kept[report.folder] = {
            item: {name: tensor.clone() for name, tensor in tensors.items()}
            for item, tensors in self.items.items()
        }

    def restart(self) -> None:
        self.ckpt.close()
        self.open()

    def roll_back(self) -> None:
        self.ckpt.close()
        steps = [stored.step for stored in laststep.open(self.run)] if self.kept else []
        self.open(self.chance.choice(steps) if steps else None)

    def check(self) -> None:
        """All of what is kept, and some of it by slices."""
        for folder in self.run.glob("step-*"):
            wanted = self.kept[folder.name]
            loaded = laststep.load(folder)
            assert loaded.keys() == wanted.keys(), folder
            for item, tensors in wanted.items():
                assert loaded[item].keys() == tensors.keys(), folder
                for name, tensor in tensors.items():
                    found = loaded[item][name]
                    assert found.dtype == tensor.dtype
                    assert torch.equal(as_bytes(found), as_bytes(tensor)), (folder, item, name)

    def check_slices(self) -> None:
        for stored in laststep.open(self.run):
            large = self.kept[stored.folder]["large"]["w"]
            low = self.chance.randrange(len(large))
            high = self.chance.randrange(low, len(large) + 1)
            found = stored.tensor("large/w")[low:high]
            assert torch.equal(as_bytes(found), as_bytes(large[low:high]))
            assert not stored.verify().damage


def borrow_and_code_readily(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Small limits are crossed often; what is adaptive encodes, or does not, without a look at what
    is fast here."""
    monkeypatch.setattr(flush_base, "MOST_FILES", 4 + seed % 3)
    monkeypatch.setattr(flush_base, "MAX_SHARERS", 3 + seed % 4)
    monkeypatch.setattr(flush_base, "LEAST_BYTES", 2000)
    monkeypatch.setattr(encoder, "_LEAST_BYTES", 1)
    monkeypatch.setattr(encoder, "_MOST_OF_RAW", 1e9 if seed % 3 else 0.0)


@pytest.mark.parametrize("seed", [12, *long(0, *range(13, 40))])
def test_every_step_of_a_chain_comes_back_however_it_is_encoded(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    borrow_and_code_readily(monkeypatch, seed)
    chain = Chain(tmp_path / "run", seed)
    deeds = [chain.change] * 14 + [chain.add, chain.drop, chain.restart, chain.roll_back]
    deeds += [chain.add_item, lambda: None]
    for _ in range(14):
        chain.chance.choice(deeds)()
        chain.save()
    chain.ckpt.close()
    chain.check()
    copy = tmp_path / "copy"
    shutil.copytree(chain.run, copy)
    shutil.rmtree(chain.run)
    chain.run = copy
    chain.check()
    chain.check_slices()
