"""A training of a few blocks of bf16 weights, which are saved encoded; shared by tests of that."""

from __future__ import annotations

import copy
import subprocess
from typing import TYPE_CHECKING, NamedTuple

import torch

import laststep
from laststep.catalog import decision
from laststep.format.manifest import Commit
from laststep.read.files import open_file
from laststep.storage.directory import DirectoryStore
from laststep.terms import BLOCK_BYTES

if TYPE_CHECKING:
    from pathlib import Path

    from laststep.flush.protocol import CodingReport
    from laststep.format.coding import CodedBlock

BLOCK = BLOCK_BYTES // 2
"""Elements of a block."""
BLOCKS = 8


class Place(NamedTuple):
    """Where a block of an image lies, and how it is coded there; None: as it is."""

    file: str
    coded: CodedBlock | None
    start: int
    """In that file."""


class CodedTraining:
    """The state, and copies of what it was at each step."""

    def __init__(
        self, run: Path, *, small: dict[str, object] | None = None, **settings: object
    ) -> None:
        self.run = run
        self.random = torch.Generator().manual_seed(1)
        self.model = {
            "w": torch.cat([self.drawn() for _ in range(BLOCKS)] + [torch.ones(3)]).bfloat16()
        }
        self.small = {"n": 0} if small is None else small
        self.saved: dict[int, torch.Tensor] = {}
        self.start(**settings)

    def start(self, **settings: object) -> None:
        how = {"flush": "thread", "compression": "max", "keep": None, **settings}
        self.ckpt = laststep.Checkpointer(
            self.run, model=self.model, small=self.small, host_memory_bytes=64 << 20,
            progress=False, **how,
        )  # fmt: skip
        self.ckpt.restore()

    def copied(self, run: Path) -> CodedTraining:
        """The same, closed, with a run of its own in which files have as many names."""
        subprocess.run(["cp", "-a", self.run, run], check=True)
        made = copy.copy(self)
        made.run, made.model = run, {"w": self.model["w"].clone()}
        made.small, made.saved = dict(self.small), dict(self.saved)
        return made

    def drawn(self) -> torch.Tensor:
        return torch.randn(BLOCK, generator=self.random)

    def block(self, number: int) -> torch.Tensor:
        return self.model["w"][number * BLOCK : (number + 1) * BLOCK]

    def redraw(self, *blocks: int) -> None:
        """Other numbers: no difference to what was before is small."""
        for number in blocks:
            self.block(number).copy_(self.drawn())

    def touch(self, *blocks: int) -> None:
        """One number of a block is another."""
        for number in blocks:
            self.block(number)[7] += 1

    def save(self, step: int) -> tuple[CodingReport, ...]:
        self.small["n"] = step
        self.report = self.ckpt.save(step).result()
        self.saved[step] = self.model["w"].clone()
        return self.report.coding

    def folder(self, step: int) -> Path:
        [found] = self.run.glob(f"step-{step:08d}.*")
        return found

    def places(self, step: int) -> list[Place]:
        """Of each block of the weights."""
        folder = self.folder(step)
        store = DirectoryStore(folder.parent)
        commit = decision.read(store, folder.name)
        assert isinstance(commit, Commit)
        records = {record.name: record for record in commit.files}
        file = open_file(store, folder.name, records["model.safetensors"], records).sound()
        file.close()
        lies = [(0, number) for number in range(BLOCKS + 1)]
        if file.lies is not None:
            stretches = [stretch for _, stretch in file.lies.cut(0, BLOCKS + 1)]
            lies = [(s.file, s.first + n) for s in stretches for n in range(s.blocks)]
        found = []
        for where, number in lies:
            held = file.files[where]
            coded = None if held.header.coded is None else held.header.coded[number]
            at = number * BLOCK_BYTES if coded is None else coded.start
            found.append(Place(held.record.name, coded, held.record.header_bytes + at))
        return found

    def codecs(self, step: int) -> list[str]:
        """By which codec each block of the weights is stored."""
        return ["" if p.coded is None else p.coded.way.codec for p in self.places(step)]

    def check(self) -> None:
        """Every step that is there is as it was saved."""
        for stored in laststep.open(self.run):
            assert torch.equal(stored.tensor("model/w")[:], self.saved[stored.step]), stored.step
            assert not stored.verify().damage
