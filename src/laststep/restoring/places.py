"""What all ranks see of a run, wherever it lies: in shared memory, in the run, at further tiers.

The first rank looks, and says what the others are to see. Collective: every rank calls the same, in
the same order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from laststep.catalog.run import newest_point
from laststep.ranks.group import together
from laststep.restoring.fit import selection
from laststep.storage.registry import open_store
from laststep.tiers.further import look_further, only_there
from laststep.tiers.nearest import NearestStore
from laststep.tiers.nodes import NodePart

if TYPE_CHECKING:
    from collections.abc import Sequence

    from laststep.catalog.lineage import Seen
    from laststep.ranks.group import Ranks
    from laststep.restoring.restore import RestoreRequest
    from laststep.storage.store import Store
    from laststep.tiers.further import TierHas

_RECORDS_BYTES = 64 << 20
"""Of more than so much, which is a job of very many ranks, nodes do not tell each other."""


def look_at_tiers(store: Store, wanted: RestoreRequest, ranks: Ranks) -> list[TierHas]:
    """Have all ranks see, beside what is nearer, the checkpoints that only further tiers have.
    Returns what these have, on the first rank."""
    found: list[TierHas] = []
    if not isinstance(store, NearestStore) or not wanted.tiers:
        return found

    def look() -> dict[str, str]:
        if not ranks.rank.is_first:
            return {}
        found[:] = look_further(store, wanted.tiers)
        return only_there(store, found, wanted.step, lambda item: selection(wanted.only, item)[0])

    told = ranks.tell(0, msgspec.msgpack.encode(together(ranks, look)))
    places = msgspec.msgpack.decode(told, type=dict[str, str])
    stores = together(ranks, lambda: {url: open_store(url) for url in {*places.values()}})
    for folder, url in places.items():
        store.stand_in(folder, stores[url])
    return found


def look_into_memory(store: Store, ranks: Ranks) -> None:
    """Have all ranks see the same in shared memory: what the first rank finds there, as far as
    every other one can open it; or what all nodes have together."""
    if not isinstance(store, NearestStore) or not store.in_memory:
        return
    nodes = [note.decode() for note in ranks.gather(store.node.encode())]
    if len(set(nodes)) > 1:
        _look_into_nodes(store, nodes, ranks)
        return
    found = together(ranks, lambda: store.look() if ranks.rank.is_first else {})
    if ranks.size == 1:
        return
    places = {folder: checkpoint.segments for folder, checkpoint in found.items()}
    told = ranks.tell(0, msgspec.msgpack.encode(places))
    named = msgspec.msgpack.decode(told, type=dict[str, tuple[str, ...]])
    together(ranks, lambda: None if ranks.rank.is_first else store.open(named))
    notes = ranks.gather(msgspec.msgpack.encode(list(store.look())))
    store.keep(set.intersection(*(set(msgspec.msgpack.decode(note)) for note in notes)))


def _look_into_nodes(store: NearestStore, nodes: Sequence[str], ranks: Ranks) -> None:
    """The same where ranks are on several nodes: the first of each says what is there."""
    leaders = {node: nodes.index(node) for node in nodes}
    leads = ranks.rank.number in leaders.values()
    encode, decode = msgspec.msgpack.encode, msgspec.msgpack.Decoder(tuple[NodePart, ...]).decode
    note = together(ranks, lambda: encode(store.left_here()) if leads else b"")
    sizes = ranks.gather(encode(len(note)))
    parts: dict[str, tuple[NodePart, ...]] = {}
    if sum(map(msgspec.msgpack.decode, sizes)) <= _RECORDS_BYTES:
        parts = {node: decode(ranks.tell(leader, note)) for node, leader in leaders.items()}
    together(ranks, lambda: store.open_parts(nodes, parts))
    committed = together(ranks, lambda: store.committed() if ranks.rank.is_first else [])
    stored = set(msgspec.msgpack.decode(ranks.tell(0, encode(committed))))
    notes = ranks.gather(encode(list(store.look())))
    store.keep(stored.intersection(*(msgspec.msgpack.decode(note) for note in notes)))


def seen_in(store: Store) -> Seen:
    """What was newest, in the run and in memory: what tiers have is of its past."""
    return newest_point(store.without_tiers() if isinstance(store, NearestStore) else store)
