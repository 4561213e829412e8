"""What of an index and of a manifest a partial checkpoint of some items has."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from expect import raises
from laststep.errors import NotFoundError
from laststep.format import index as index_format
from laststep.format import manifest
from laststep.format.index import BlockRun, Encoding, Index, StoredFile, StoredLayout, in_place
from laststep.format.manifest import Commit, ItemRecord, WrittenIndexes
from laststep.plan.files import is_partial, omitted_items_of, only_items, partial_of
from saves_of import layout_of, whole_index

ITEMS = ("a", "b", "c")
SHARED = "shared.safetensors"
SHARED_LAYOUT = layout_of(("a/s", "uint8", 3), ("b/s", "uint8", 3), name=SHARED, item=None)
"""Small tensors of two of the three items."""
some_items = st.sets(st.sampled_from(ITEMS), min_size=1)


def file_of(item: str) -> str:
    return f"{item}.safetensors"


LAYOUTS = [layout_of(("t", "bfloat16", 100), name=file_of(item), item=item) for item in ITEMS]
WHOLE = whole_index(
    3, [*LAYOUTS, SHARED_LAYOUT], [bytes(16)] * 4, {name: name.encode() for name in ITEMS}, [{}] * 4
)
COMMIT = Commit(
    run="r",
    step=1,
    term=1,
    attempt=1,
    created_s=1.0,
    laststep="0",
    written=index_format.written_of(WHOLE, index_format.encode(WHOLE)),
    metrics={"loss": float("nan")},
    items=tuple(ItemRecord(name=name, kind="value", tensors=1, size_bytes=9) for name in ITEMS),
)


def names(index: Index) -> tuple[set[str], set[str]]:
    """The files of an index, and its layouts."""
    return {one.name for one in index.files}, {one.layout.name for one in index.layouts}


def partial(commit: Commit, index: Index, items: set[str]) -> tuple[Commit, Index]:
    part = only_items(index, items)
    return partial_of(commit, items, index_format.written_of(part, index_format.encode(part))), part


@given(items=some_items)
def test_an_excerpt_has_the_files_of_its_items_and_what_they_share(items: set[str]) -> None:
    commit, index = partial(COMMIT, WHOLE, items)
    wanted = {file_of(item) for item in items} | ({SHARED} if items & {"a", "b"} else set())
    assert names(index) == (wanted, wanted)
    assert index.rank == WHOLE.rank
    assert index.values == {item: item.encode() for item in items}
    assert {one.name for one in commit.items} == items
    assert commit.omitted_items == tuple(sorted(set(ITEMS) - items))
    assert (commit.written.files, commit.written.size_bytes) == (len(wanted), index.size_bytes)
    assert isinstance(manifest.decode(manifest.encode(commit), where=""), Commit)


@given(items=some_items)
def test_blocks_are_found_in_the_files_that_they_were_in(items: set[str]) -> None:
    _, index = partial(COMMIT, WHOLE, items)
    for stored in index.layouts:
        before = WHOLE.layout(stored.layout.name)
        assert before is not None
        assert (stored.layout, stored.digests) == (before.layout, before.digests)
        assert [(index.files[run.file], run.offset) for run in stored.runs] == [
            (WHOLE.files[run.file], run.offset) for run in before.runs
        ]


@given(items=some_items, fewer=some_items)
def test_an_excerpt_of_an_excerpt_is_one_of_the_whole(items: set[str], fewer: set[str]) -> None:
    commit, index = partial(*partial(COMMIT, WHOLE, items | fewer), fewer)
    direct, direct_index = partial(COMMIT, WHOLE, fewer)
    assert manifest.encode(commit) == manifest.encode(direct)
    assert index_format.encode(index) == index_format.encode(direct_index)


@given(items=some_items, others=some_items)
def test_an_excerpt_is_known_by_what_it_lacks(items: set[str], others: set[str]) -> None:
    omitted_items = omitted_items_of(COMMIT, others)
    assert is_partial(partial(COMMIT, WHOLE, items)[0], COMMIT, omitted_items) is (items == others)


def test_an_item_that_is_not_there_is_named() -> None:
    with raises(NotFoundError, "'x'", "step 1", found="a, b, c"):
        omitted_items_of(COMMIT, ["a", "x"])
    part = partial(COMMIT, WHOLE, {"a"})[0]
    with raises(NotFoundError, "'b'", found="b, c"):
        omitted_items_of(part, ["b"])


def test_all_items_are_no_excerpt() -> None:
    commit, index = partial(COMMIT, WHOLE, set(ITEMS))
    assert index == WHOLE
    assert commit == structs.replace(COMMIT, metrics=commit.metrics)  # nan is not itself
    assert omitted_items_of(COMMIT, ITEMS) == ()


def test_a_layout_without_bytes_keeps_its_file() -> None:
    layouts = [layout_of(("t", "uint8", 0), name=file_of(item), item=item) for item in ITEMS]
    index = whole_index(0, layouts, [b""] * 3, {}, [{}] * 3)
    assert names(only_items(index, {"b"})) == ({file_of("b")}, {file_of("b")})


def shared_index() -> Index:
    """Files of earlier checkpoints: a block of `a` in an old pack, one of `b` encoded against a
    block in another."""
    files = tuple(
        StoredFile(name=name, size_bytes=500, origin=origin)
        for name, origin in [
            ("blocks-r00000.pack", ""),
            ("blocks-r00000~1-1.pack", "x"),
            ("blocks-r00000~1-2.pack", "y"),
            (file_of("c"), ""),
        ]
    )
    base = BlockRun(1, 2, 0)
    sizes = (50).to_bytes(4, "little")
    runs = [
        (BlockRun(1, 1, 7),),
        (BlockRun(1, 0, 3, 1, sizes, (base,), bytes(16)),),
        in_place(LAYOUTS[2], 3),
    ]
    files = (*files[:3], structs.replace(files[3], size_bytes=LAYOUTS[2].size_bytes))
    return Index(
        files=files,
        encodings=(Encoding("patches", 2),),
        layouts=tuple(
            StoredLayout(layout=layout, digests=bytes(16), runs=some)
            for layout, some in zip(LAYOUTS, runs, strict=True)
        ),
    )


@pytest.mark.parametrize(
    ("item", "files"),
    [
        ("a", ["blocks-r00000~1-1.pack"]),
        ("b", ["blocks-r00000.pack", "blocks-r00000~1-2.pack"]),
        ("c", [file_of("c")]),
    ],
)
def test_files_of_blocks_and_of_their_bases_come_along(item: str, files: list[str]) -> None:
    whole = shared_index()
    index_format.encode(whole)
    part = only_items(whole, {item})
    assert [file.name for file in part.files] == files
    index_format.encode(part)  # which checks it
    (run,), (before,) = part.layouts[0].runs, whole.layout(file_of(item)).runs
    used = [(part.files[one.file].name, one.offset) for one in (run, *run.bases)]
    assert used == [(whole.files[one.file].name, one.offset) for one in (before, *before.bases)]


def test_an_excerpt_says_nothing_of_classes_of_ranks() -> None:
    spans = (manifest.Span(0, 1),)
    whole = structs.replace(
        COMMIT, layout_groups=(manifest.LayoutGroupRecord(local_layout="0" * 32, spans=spans),)
    )
    assert partial_of(whole, {"a"}, WrittenIndexes(indexes=bytes(16))).layout_groups == ()
