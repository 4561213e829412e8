"""Receipts put together: however the ranks are cut into groups, the outcome is the same."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from laststep.format.manifest import ItemRecord, WrittenIndexes
from laststep.plan.layouts import (
    GlobalLayout,
    LocalItem,
    LocalTensor,
    agree,
    digest_of,
    encode_local_layout,
)
from laststep.plan.receipts import (
    Differing,
    Groups,
    Receipt,
    Shared,
    Summary,
    diverged,
    items_of,
    layout_groups_of,
    objection_to,
    summarise,
)


def global_layout_of(kinds: list[int]) -> GlobalLayout:
    """Each rank holds tensors of its kind, and one that all hold."""
    local_layouts = [
        (
            LocalItem(
                "m",
                "value",
                False,
                (
                    LocalTensor("w", "float32", (4,), None),
                    LocalTensor(f"w{kind}", "float32", (4,), None),
                ),
            ),
            LocalItem("own", "value", True, ()),
        )
        for kind in kinds
    ]
    names = [digest_of(encode_local_layout(local_layout)) for local_layout in local_layouts]
    return agree(names, dict(zip(names, local_layouts, strict=True)))


@st.composite
def jobs(draw: st.DrawFn) -> tuple[GlobalLayout, dict[int, Receipt]]:
    kinds = draw(st.lists(st.integers(0, 2), min_size=1, max_size=9))
    global_layout = global_layout_of(kinds)
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
        agreed = draw(st.sampled_from([global_layout.digest] * 9 + [b"other"]))
        tree = draw(st.sampled_from([bytes([kind])] * 9 + [b"x"]))
        shared = ItemRecord(name="m", kind="value", tensors=2 * wrote, size_bytes=rank * wrote)
        own = ItemRecord(name="own", kind="value", per_rank=True, tensors=1, size_bytes=1)
        receipts[rank] = Receipt(
            global_layout=agreed,
            written=written,
            contents={Shared(global_layout.layout_group_of[rank], "m"): tree},
            items=(shared, own),
        )
    return global_layout, receipts


def cut(global_layout: GlobalLayout, receipts: dict[int, Receipt], size: int) -> list[Summary]:
    groups = Groups(len(receipts), size)
    return [
        summarise({rank: receipts[rank] for rank in groups.group_of(leader)}, global_layout)
        for leader in groups.leaders
    ]


@given(jobs(), st.integers(1, 9))
def test_it_does_not_matter_how_ranks_are_cut_into_groups(
    job: tuple[GlobalLayout, dict[int, Receipt]], size: int
) -> None:
    global_layout, receipts = job
    whole, parts = cut(global_layout, receipts, len(receipts)), cut(global_layout, receipts, size)
    assert items_of(whole, global_layout) == items_of(parts, global_layout)
    assert bool(objection_to(whole, global_layout)) == bool(objection_to(parts, global_layout))
    others = [r for r, receipt in receipts.items() if receipt.global_layout != global_layout.digest]
    if others:
        objection = objection_to(parts, global_layout)
        assert isinstance(objection, str)
        assert f"rank {others[0]}" in objection
    (own,) = [item for item in items_of(parts, global_layout) if item.name == "own"]
    assert own.tensors == len(receipts)


@given(jobs(), st.integers(1, 9))
def test_what_was_written_adds_up_in_the_order_of_ranks(
    job: tuple[GlobalLayout, dict[int, Receipt]], size: int
) -> None:
    global_layout, receipts = job
    total = WrittenIndexes()
    for summary in cut(global_layout, receipts, size):
        total = total.plus(summary.written)
    parts = [receipt.written for receipt in receipts.values()]
    assert total.indexes == b"".join(bytes([rank]) * 16 for rank in receipts)
    assert total.files == sum(part.files for part in parts)
    assert total.size_bytes == sum(part.size_bytes for part in parts)
    assert total.shared_bytes == sum(part.shared_bytes for part in parts)
    assert total.lossy == tuple(sorted({how for part in parts for how in part.lossy}))


def test_ranks_whose_contents_differ_are_found_within_a_group_and_between_groups() -> None:
    global_layout = global_layout_of([0, 1, 0, 1])

    def receipt(rank: int, content: bytes) -> Receipt:
        group = global_layout.layout_group_of[rank]
        contents = {
            Shared(group, "m"): content,
            Shared(group): content,
            Shared(9, ways=bytes([rank])): b"",
        }
        return Receipt(global_layout=global_layout.digest, contents=contents)

    receipts = {rank: receipt(rank, bytes([rank % 2])) for rank in range(4)}
    assert not objection_to(cut(global_layout, receipts, 2), global_layout)
    assert diverged(cut(global_layout, receipts, 2)) is None
    receipts[3] = receipt(3, b"z")
    for size in (1, 2, 3, 4):
        summaries = cut(global_layout, receipts, size)
        found = objection_to(summaries, global_layout)
        assert found == Differing(shared=Shared(1, "m"), ranks=(1, 3))
        assert diverged(summaries) == Differing(shared=Shared(1), ranks=(1, 3))


def test_classes_are_told_by_their_tables_and_few_spans() -> None:
    global_layout = global_layout_of([rank % 4 for rank in range(64)])
    layout_groups = layout_groups_of(global_layout)
    assert [one.spans for one in layout_groups] == [((rank, 16, 4),) for rank in range(4)]
    for one, known in zip(layout_groups, global_layout.layout_groups, strict=True):
        assert tuple(one.ranks) == tuple(known.ranks)
        assert one.local_layout == digest_of(encode_local_layout(known.local_layout)).hex()
