"""Which files an excerpt of some items needs, and what its manifest says."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laststep.codecs.digests import digest_text
from laststep.errors import NotFound
from laststep.format import group, manifest
from laststep.format.manifest import Commit, FileRecord, ItemRecord
from laststep.plan.excerpts import HeldItems, is_excerpt, left_out_of, needed_files, only_items

ITEMS = ("a", "b", "c")


def file(name: str, rank: int = 0) -> FileRecord:
    return FileRecord(
        name=f"{name}.safetensors", size_bytes=5000, header_bytes=4096,
        header_digest=digest_text(name.encode()), rank=rank,
    )  # fmt: skip


FILES = (*map(file, ITEMS), file("shared"))
WHOLE = Commit(
    run="r", step=1, epoch=1, attempt=1, created_s=1.0, laststep="0", files=FILES,
    metrics={"loss": float("nan")},
    items=tuple(
        ItemRecord(name=name, kind="value", file=f"{name}.safetensors", tensors=1, size_bytes=9)
        for name in ITEMS
    ),
)  # fmt: skip
SHARED = HeldItems("shared.safetensors", frozenset(ITEMS))


def held(**needs: dict[str, tuple[str, ...]]) -> list[HeldItems]:
    own = [HeldItems(f"{n}.safetensors", frozenset({n}), **needs.get(n, {})) for n in ITEMS]
    return [*own, SHARED]


some_items = st.sets(st.sampled_from(ITEMS), min_size=1)


def excerpt_of(whole: Commit, items: set[str]) -> Commit:
    needed = needed_files(whole, held(), items, "")
    files = tuple(one for one in whole.files if one.name in needed)
    return only_items(whole, files, items)[0]


@given(items=some_items)
def test_an_excerpt_has_the_files_of_its_items_and_what_items_share(items: set[str]) -> None:
    excerpt = excerpt_of(WHOLE, items)
    wanted = {f"{item}.safetensors" for item in items} | {"shared.safetensors"}
    assert {one.name for one in excerpt.files} == wanted
    assert {one.name for one in excerpt.items} == items
    assert excerpt.left_out == tuple(sorted(set(ITEMS) - items))
    assert excerpt.format == (4 if excerpt.left_out else 1)
    assert isinstance(manifest.decode(manifest.encode(excerpt), where=""), Commit)


@given(items=some_items, fewer=some_items)
def test_an_excerpt_of_an_excerpt_is_one_of_the_whole(items: set[str], fewer: set[str]) -> None:
    both = items | fewer
    assert manifest.encode(excerpt_of(excerpt_of(WHOLE, both), fewer)) == manifest.encode(
        excerpt_of(WHOLE, fewer)
    )


@given(items=some_items, others=some_items)
def test_an_excerpt_is_known_by_what_it_lacks(items: set[str], others: set[str]) -> None:
    left_out = left_out_of(WHOLE, others)
    assert is_excerpt(excerpt_of(WHOLE, items), WHOLE, left_out) is (items == others)


def test_lent_files_come_with_those_that_borrow() -> None:
    files = held(a={"lent": ("old~1.safetensors",)}, b={"lent": ("old~2.safetensors",)})
    needed = needed_files(WHOLE, files, {"a"}, "")
    assert needed == {"a.safetensors", "shared.safetensors", "old~1.safetensors"}


def test_what_follows_from_what_is_left_out_is_refused() -> None:
    files = held(a={"masters": ("b.safetensors",)})
    assert "b.safetensors" in needed_files(WHOLE, files, {"a", "b"}, "")
    with pytest.raises(NotFound, match=r"a\.safetensors follow"):
        needed_files(WHOLE, files, {"a"}, "")


def test_masters_in_a_file_that_comes_anyway_are_no_obstacle() -> None:
    files = held(a={"masters": ("shared.safetensors",)})
    assert needed_files(WHOLE, files, {"a"}, "") == {"a.safetensors", "shared.safetensors"}


def test_groups_of_ranks_list_what_is_left_of_their_files() -> None:
    files = tuple(file(f"{name}-{rank}", rank) for rank in range(4) for name in ("a", "b"))
    records = [
        group.encode(
            group.GroupManifest(
                step=1, epoch=1, attempt=1, first=first, ranks=2,
                files=tuple(one for one in files if one.rank in (first, first + 1)),
            )
        )[0]
        for first in (0, 2)
    ]  # fmt: skip
    items = tuple(
        ItemRecord(name=name, kind="value", file=f"{name}-0.safetensors", tensors=1, size_bytes=9)
        for name in ("a", "b")
    )
    whole = Commit(
        run="r", step=1, epoch=1, attempt=1, created_s=1.0, laststep="0", items=items, ranks=4,
        groups=tuple(records),
    )  # fmt: skip
    kept = tuple(one for one in files if one.name.startswith("a"))
    excerpt, documents = only_items(whole, kept, {"a"})
    assert [record.files for record in excerpt.groups] == [2, 2]
    for record in excerpt.groups:
        listed = group.decode(documents[record.name], record, where="")
        assert all(one.name.startswith("a") for one in listed.files)
    assert is_excerpt(excerpt, whole, ("b",))
