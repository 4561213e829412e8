"""Chains of checkpoints that borrow of each other, with everything that happens to a run between:
every step that is kept comes back bit for bit, and stands alone."""

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

if TYPE_CHECKING:
    from pathlib import Path

BLOCK = BLOCK_BYTES // 4


class Chain:
    """A run, what should be in it, and a source of chance."""

    def __init__(self, run: Path, seed: int) -> None:
        self.run = run
        self.chance = random.Random(seed)
        self.random = torch.Generator().manual_seed(seed)
        self.model: dict[str, torch.Tensor] = {}
        self.other = {"count": 0, "t": torch.zeros(20_000)}
        self.kept: dict[str, tuple[int, dict[str, torch.Tensor], int]] = {}
        """By folder: the step, the tensors, the count."""
        self.step = 0
        for _ in range(3):
            self.add()
        self.open()

    def open(self, step: int | None = None) -> None:
        """A start, with the tensors of the checkpoint that it goes on from."""
        if self.kept and list(laststep.open(self.run)):
            loaded = laststep.load(self.run, step=step)
            self.model = loaded["model"]
        keep = laststep.Keep(last=4) if self.chance.random() < 0.5 else None
        self.ckpt = laststep.Checkpointer(
            self.run,
            model=self.model,
            other=self.other,
            options=laststep.Options(flush="thread"),
            keep=keep,
        )
        self.ckpt.restore(step=step)

    def add(self) -> None:
        """A tensor of some size and dtype, that may fill a part of a block or several."""
        dtype = self.chance.choice([torch.float32, torch.bfloat16, torch.int64, torch.uint8])
        size = self.chance.choice([1, 5_000, BLOCK // 2, BLOCK + 3, 3 * BLOCK])
        tensor = torch.randint(0, 100, (size,), generator=self.random).to(dtype)
        self.model[f"t{self.chance.randrange(10**6)}"] = tensor

    def drop(self) -> None:
        if len(self.model) > 1:
            del self.model[self.chance.choice(list(self.model))]

    def change(self) -> None:
        """A few elements of a few tensors, or all of one."""
        for name in self.chance.sample(list(self.model), min(2, len(self.model))):
            tensor = self.model[name]
            if self.chance.random() < 0.15:
                tensor += 1
            for _ in range(self.chance.randrange(3)):
                tensor[self.chance.randrange(len(tensor))] += 1

    def save(self) -> None:
        self.step += 1
        self.other["count"] = self.chance.randrange(3)
        handle = self.ckpt.save(self.step)
        handle.wait()
        folder = handle.report.folder
        assert folder is not None
        copies = {name: tensor.clone() for name, tensor in self.model.items()}
        self.kept[folder] = (self.step, copies, self.other["count"])

    def restart(self) -> None:
        self.ckpt.close()
        self.open()

    def roll_back(self) -> None:
        if not self.kept:
            return
        self.ckpt.close()
        steps = [stored.step for stored in laststep.open(self.run)]
        self.open(self.chance.choice(steps) if steps else None)

    def delete(self) -> None:
        """By hand, as people do."""
        folders = sorted(self.run.glob("step-*"))
        if len(folders) > 2:
            shutil.rmtree(self.chance.choice(folders), ignore_errors=True)

    def check(self) -> None:
        for folder in self.run.glob("step-*"):
            step, tensors, count = self.kept[folder.name]
            loaded = laststep.load(folder)
            assert loaded["other"]["count"] == count, (folder, step)
            assert loaded["model"].keys() == tensors.keys(), folder
            for name, tensor in tensors.items():
                found = loaded["model"][name]
                assert found.dtype == tensor.dtype
                assert torch.equal(found, tensor), (folder, name)


@pytest.mark.parametrize("seed", [3, 5, 6, 7, *long(0, 1, 2, 4, 8, 9)])
def test_every_step_of_a_chain_comes_back_whatever_happens_between(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flush_base, "MOST_FILES", 3 + seed % 2)
    monkeypatch.setattr(flush_base, "MAX_SHARERS", 3 + seed % 3)
    chain = Chain(tmp_path / "run", seed)
    deeds = [chain.change] * 6 + [chain.add, chain.drop, chain.restart, chain.roll_back]
    deeds += [chain.delete, lambda: None]
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
    for stored in laststep.open(copy):
        assert not stored.verify().damage
