"""A training of a few blocks of bf16 weights, which are saved encoded; shared by tests of that."""

from __future__ import annotations

import copy
import subprocess
from typing import TYPE_CHECKING, NamedTuple

import torch

import laststep
from laststep.catalog.attempt import read_decision, read_index
from laststep.constants import BLOCK_BYTES
from laststep.format.manifest import Commit
from laststep.settings import as_keywords
from laststep.storage.directory import DirectoryStore

if TYPE_CHECKING:
    from pathlib import Path

    from laststep.flush.protocol import CodingReport
    from laststep.format.index import BlockRef, Encoding

BLOCK = BLOCK_BYTES // 2
"""Elements of a block."""
BLOCKS = 8


class Place(NamedTuple):
    """Where a block of the weights lies, and how it is encoded there; None: as it is."""

    file: str
    start: int
    size_bytes: int
    encoding: Encoding | None
    base: Place | None = None


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
            self.run,
            model=self.model,
            small=self.small,
            host_memory_bytes=64 << 20,
            **as_keywords({"progress": False, **how}),
        )
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
        commit = read_decision(store, folder.name)
        assert isinstance(commit, Commit)
        index = read_index(store, folder.name, commit, 0)
        stored = index.layout("model.safetensors")
        assert stored is not None

        def place(ref: BlockRef) -> Place:
            return Place(
                index.files[ref.file].name,
                ref.offset,
                ref.size_bytes,
                index.encoding(ref.encoding),
                None if ref.base is None else place(ref.base.block),
            )

        return list(map(place, stored.refs()))

    def codecs(self, step: int) -> list[str]:
        """By which codec each block of the weights is stored."""
        return ["" if p.encoding is None else p.encoding.codec for p in self.places(step)]

    def check(self) -> None:
        """Every step that is there is as it was saved."""
        for stored in laststep.open(self.run):
            assert torch.equal(stored.tensor("model/w")[:], self.saved[stored.step]), stored.step
            assert not stored.verify().damage
