"""What lies in the shared memory of several nodes, as all ranks of a job see it together.

Each node says what the dead have left there: small records. From those of all nodes follow the
files of a save and its manifest, on every rank; the bytes of tensors are read where they lie, by
ranks of that node, and passed on. For saves that the run has too: who would store the others?
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from laststep.errors import StorageError
from laststep.memory import segments
from laststep.process.system import boot
from laststep.tiers.sealed import SealedSave, saves_in

if TYPE_CHECKING:
    from collections.abc import Sequence

    from laststep.memory.segments import Segment
    from laststep.tiers.sealed import SealedByRanks


class NodePart(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A rank's part of a save, in a segment of one node."""

    folder: str
    rank: int
    ranks: int
    save: SealedSave


Readers = Mapping[int, frozenset[int]]
"""By each rank that wrote: the ranks of this job that are where its files lie."""


def node_of(base: str) -> str:
    """A name of this node's shared memory that no other has."""
    try:
        place = os.stat(base)  # noqa: PTH116 (the flusher has no pathlib)
    except OSError:
        return f"{boot()}/none"
    return f"{boot()}/{place.st_dev}/{place.st_ino}"


def left_here(there: Sequence[Segment]) -> tuple[NodePart, ...]:
    """What the dead have left in these segments."""
    return tuple(
        NodePart(folder=one.folder, rank=one.owner.rank, ranks=one.owner.ranks, save=save)
        for one in there
        if not one.is_alive()
        for save in saves_in(one)
    )


def put_together(
    nodes: Sequence[str], parts: Mapping[str, Sequence[NodePart]], mine: str
) -> list[tuple[SealedByRanks, Readers]]:
    """The saves of which all parts lie somewhere, with the segments that a rank of the node `mine`
    can open; `nodes` are those of all ranks, `parts` what lies on each."""
    found: dict[tuple[str, str, int], dict[int, tuple[str, NodePart]]] = {}
    for node, some in parts.items():
        for part in some:
            key = part.save.run, part.save.at.folder, part.ranks
            found.setdefault(key, {})[part.rank] = node, part
    whole = [by_rank for key, by_rank in found.items() if by_rank.keys() == set(range(key[2]))]
    return [
        (
            [_opened(*by_rank[rank], mine) for rank in range(len(by_rank))],
            {rank: _ranks_on(node, nodes) for rank, (node, _) in by_rank.items()},
        )
        for by_rank in whole
    ]


def _ranks_on(node: str, nodes: Sequence[str]) -> frozenset[int]:
    return frozenset(rank for rank, name in enumerate(nodes) if name == node)


def _opened(node: str, part: NodePart, mine: str) -> tuple[Segment | None, SealedSave]:
    segment = None
    if node == mine:
        with contextlib.suppress(StorageError):  # it has gone since
            segment = segments.opened(part.folder)
    return segment, part.save
