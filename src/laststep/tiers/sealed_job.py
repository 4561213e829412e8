"""Put together what the ranks of a job have noted of a save that is whole in shared memory.

The first rank would have gathered their receipts, and objected or committed: from the same receipts
the same follows without it (`plan.receipts`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from laststep.codecs.digests import digest
from laststep.errors import CorruptError
from laststep.format.manifest import ClassRecord
from laststep.format.spans import spans_of
from laststep.plan.files import TABLE_NAME
from laststep.plan.receipts import Receipt, classes_of, items_of, objection_to, summarise
from laststep.read.content import agreement_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from laststep.format.manifest import ItemRecord
    from laststep.tiers.sealed import SealedSave


def agreed_on(
    saves: Sequence[SealedSave], where: str
) -> tuple[tuple[ItemRecord, ...], tuple[ClassRecord, ...]]:
    """The items of all ranks, whose saves these are in their order, and which ranks hold the same;
    `CorruptError` where they differ in what they should have in common."""
    decode = msgspec.msgpack.Decoder(Receipt).decode
    receipts = {rank: decode(save.receipt) for rank, save in enumerate(saves)}
    members: dict[int, list[int]] = {}
    for rank, receipt in receipts.items():
        members.setdefault(receipt.rank_class, []).append(rank)
    tables = [_table(saves[ranks[0]]) for ranks in members.values()]
    classes = [
        ClassRecord(table=digest(table).hex(), spans=spans_of(ranks))
        for table, ranks in zip(tables, members.values(), strict=True)
    ]
    agreement = agreement_of(tables, classes, len(saves), where)
    summary = summarise(receipts, agreement)
    if objection := objection_to([summary], agreement):
        raise CorruptError(
            "the ranks of a save in shared memory do not fit together",
            where=where,
            found=str(objection),
        )
    return items_of([summary], agreement), classes_of(agreement)


def _table(save: SealedSave) -> bytes:
    """How the first rank of a class described what it held; nothing where it is no such rank."""
    return save.decode_index().values.get(TABLE_NAME, b"")
