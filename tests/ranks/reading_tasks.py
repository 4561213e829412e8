"""What ranks do in the tests of how much a restore reads, opens and passes on."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from tasks import opened
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from wraps import whole

from laststep.constants import BLOCK_BYTES
from laststep.events import Restored
from laststep.plan import who_reads
from laststep.read.blocks import Extent
from laststep.restoring.exchange import Transfer
from laststep.storage.directory import DirectoryStore

if TYPE_CHECKING:
    from collections.abc import Sequence

    from laststep.plan.reads import Chunk
    from laststep.ranks.group import RankMessage
    from laststep.read.blocks import Damage
    from laststep.storage.store import FileReading

TENSORS, SIDE = 4, 2048
"""Four of 16 MiB."""


def big(cut: int | None, *, laid: bool = False) -> dict[str, torch.Tensor]:
    """Without a cut every rank holds all, and has a layout that says so, or plain tensors."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    place = Replicate() if cut is None else Shard(cut)
    found = {}
    for number in range(TENSORS):
        one = torch.arange(number, number + SIDE * SIDE, dtype=torch.float32).view(SIDE, SIDE)
        found[f"w{number}"] = (
            one if cut is None and not laid else distribute_tensor(one, mesh, [place])
        )
    return found


def save_big(run: str, cut: int | None) -> None:
    with opened(run, state=big(cut, laid=True)) as c:
        c.save(1)


class Watch:
    """What this rank does in a restore."""

    def __init__(self) -> None:
        self.told_bytes = 0
        self.blocks: list[tuple[str, int]] = []
        self.opened: Counter[str] = Counter()
        self.most_passed_on = 0


def load_big(run: str, cut: int | None, few: int = who_reads.FEW_READERS) -> Watch:
    """Restore, see that all is there, and tell what was read, opened and passed on."""
    expected, state = big(cut), big(cut)
    for tensor in state.values():
        tensor.zero_()
    seen = Watch()
    fill, open_reader, expect = Extent.fill, DirectoryStore.open_reader, Transfer.expect

    def counting(self: Extent, into: memoryview) -> list[Damage]:
        blocks = range(self.first, self.first - (-self.size_bytes // BLOCK_BYTES))
        seen.blocks.extend((self._layout.where, number) for number in blocks)
        return fill(self, into)

    def opening(self: DirectoryStore, name: str, *, cached: bool = False) -> FileReading:
        reader = open_reader(self, name, cached=cached)
        seen.opened[name.rpartition("/")[2]] += 1
        return reader

    def expecting(
        self: Transfer, chunks: Sequence[Chunk], device: torch.device
    ) -> tuple[dict[int, RankMessage], RankMessage | None]:
        each, to_all = expect(self, chunks, device)
        some = [*each.values(), *([to_all] if to_all is not None else [])]
        passed_on = sum(data.numel() for _, data in some)
        seen.most_passed_on = max(seen.most_passed_on, passed_on)
        return each, to_all

    def note(event: object) -> None:
        if isinstance(event, Restored):
            seen.told_bytes += event.size_bytes

    Extent.fill, DirectoryStore.open_reader, Transfer.expect = counting, opening, expecting
    few, who_reads.FEW_READERS = who_reads.FEW_READERS, few
    try:
        with opened(run, state=state) as c:
            c.subscribe(note)
            c.restore()
    finally:
        Extent.fill, DirectoryStore.open_reader = fill, open_reader
        Transfer.expect, who_reads.FEW_READERS = expect, few
    for name, tensor in expected.items():
        assert torch.equal(whole(state[name]), whole(tensor)), name
    return seen
