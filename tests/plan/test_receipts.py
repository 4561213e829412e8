"""Receipts put together: however the ranks are cut into groups, the outcome is the same."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from laststep.format.manifest import WrittenIndexes
from laststep.plan.receipts import (
    Differing,
    Groups,
    ItemTally,
    Receipt,
    Summary,
    classes_of,
    items_of,
    objection_to,
    summarise,
)
from laststep.plan.tables import Agreement, TableItem, TableTensor, agree, digest_of, encode_table


def agreement_of(kinds: list[int]) -> Agreement:
    """Each rank holds tensors of its kind, and one that all hold."""
    tables = [
        (
            TableItem(
                "m",
                "value",
                False,
                (
                    TableTensor("w", "float32", (4,), None),
                    TableTensor(f"w{kind}", "float32", (4,), None),
                ),
            ),
            TableItem("own", "value", True, ()),
        )
        for kind in kinds
    ]
    names = [digest_of(encode_table(table)) for table in tables]
    return agree(names, dict(zip(names, tables, strict=True)))


@st.composite
def jobs(draw: st.DrawFn) -> tuple[Agreement, dict[int, Receipt]]:
    kinds = draw(st.lists(st.integers(0, 2), min_size=1, max_size=9))
    agreement = agreement_of(kinds)
    receipts = {}
    for rank, kind in enumerate(kinds):
        wrote = draw(st.booleans())
        written = WrittenIndexes(
            indexes=bytes([rank]) * 16,
            files=int(wrote),
            size_bytes=8192 * wrote,
            shared_bytes=rank * wrote,
            lossy=draw(st.sampled_from([(), ("bf16",), ("int8",)])),
        )
        agreed = draw(st.sampled_from([agreement.digest] * 9 + [b"other"]))
        tree = draw(st.sampled_from([bytes([kind])] * 9 + [b"x"]))
        shared = ItemTally(kind="value", per_rank=False, tensors=2 * wrote, size_bytes=rank * wrote)
        own = ItemTally(kind="value", per_rank=True, tensors=1, size_bytes=1)
        receipts[rank] = Receipt(
            agreement=agreed, written=written, trees={"m": tree}, items={"m": shared, "own": own}
        )
    return agreement, receipts


def cut(agreement: Agreement, receipts: dict[int, Receipt], size: int) -> list[Summary]:
    groups = Groups(len(receipts), size)
    return [
        summarise({rank: receipts[rank] for rank in groups.group_of(leader)}, agreement)
        for leader in groups.leaders
    ]


@given(jobs(), st.integers(1, 9))
def test_it_does_not_matter_how_ranks_are_cut_into_groups(
    job: tuple[Agreement, dict[int, Receipt]], size: int
) -> None:
    agreement, receipts = job
    whole, parts = cut(agreement, receipts, len(receipts)), cut(agreement, receipts, size)
    assert items_of(whole, agreement) == items_of(parts, agreement)
    assert bool(objection_to(whole, agreement)) == bool(objection_to(parts, agreement))
    others = [r for r, receipt in receipts.items() if receipt.agreement != agreement.digest]
    if others:
        objection = objection_to(parts, agreement)
        assert isinstance(objection, str)
        assert f"rank {others[0]} describes the state otherwise" in objection
    (own,) = [item for item in items_of(parts, agreement) if item.name == "own"]
    assert own.tensors == len(receipts)


@given(jobs(), st.integers(1, 9))
def test_what_was_written_adds_up_in_the_order_of_ranks(
    job: tuple[Agreement, dict[int, Receipt]], size: int
) -> None:
    agreement, receipts = job
    total = WrittenIndexes()
    for summary in cut(agreement, receipts, size):
        total = total.plus(summary.written)
    parts = [receipt.written for receipt in receipts.values()]
    assert total.indexes == b"".join(bytes([rank]) * 16 for rank in receipts)
    assert total.files == sum(part.files for part in parts)
    assert total.size_bytes == sum(part.size_bytes for part in parts)
    assert total.shared_bytes == sum(part.shared_bytes for part in parts)
    assert total.lossy == tuple(sorted({how for part in parts for how in part.lossy}))


def test_ranks_whose_plain_values_differ_are_found_within_a_group_and_between_groups() -> None:
    agreement = agreement_of([0, 1, 0, 1])
    receipts = {
        rank: Receipt(agreement=agreement.digest, trees={"m": bytes([rank % 2])})
        for rank in range(4)
    }
    assert not objection_to(cut(agreement, receipts, 2), agreement)
    receipts[3] = Receipt(agreement=agreement.digest, trees={"m": b"z"})
    for size in (1, 2, 3, 4):
        found = objection_to(cut(agreement, receipts, size), agreement)
        assert found == Differing(item="m", ranks=(1, 3))


def test_classes_are_told_by_their_tables_and_few_spans() -> None:
    agreement = agreement_of([rank % 4 for rank in range(64)])
    classes = classes_of(agreement)
    assert [one.spans for one in classes] == [((rank, 16, 4),) for rank in range(4)]
    for one, known in zip(classes, agreement.classes, strict=True):
        assert tuple(one.ranks) == tuple(known.ranks)
        assert one.table == digest_of(encode_table(known.table)).hex()
