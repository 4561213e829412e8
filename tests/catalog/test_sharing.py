"""Which checkpoints have files in common, and what deleting some of them gives back."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laststep.catalog.retention import Sharing
from laststep.format.index import StoredFile

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

Held = tuple[str, int, tuple[StoredFile, ...]]
"""A folder, the bytes of all that is in it, and its data files."""


def file(name: str, size: int, origin: str = "") -> StoredFile:
    return StoredFile(name=f"{name}.safetensors", size_bytes=size, origin=origin)


def held(folder: str, *files: StoredFile, other: int = 10) -> Held:
    return folder, sum(one.size_bytes for one in files) + other, files


def sharing_of(held: Iterable[Held]) -> Sharing:
    sharing = Sharing()
    for folder, stored_bytes, files in held:
        sharing.add(folder, stored_bytes, files)
    return sharing


@pytest.fixture
def three() -> Sharing:
    """`a` is shared by all, `b` by the last two, the rest by nobody."""
    return sharing_of(
        [
            held("1", file("a", 1000), file("own", 1)),
            held("2", file("a~1", 1000, "1"), file("b", 100)),
            held("3", file("a~1", 1000, "1"), file("b", 100, "2"), file("own", 1)),
        ]
    )


def test_a_file_goes_with_the_last_checkpoint_that_has_it(three: Sharing) -> None:
    freed = {
        chosen: three.freed_bytes(chosen)
        for count in range(4)
        for chosen in map("".join, itertools.combinations("123", count))
    }
    assert freed == {"": 0, "1": 11, "2": 10, "3": 11, "12": 21, "13": 22, "23": 121, "123": 1132}
    assert three.stored_bytes() == 1132


def test_it_is_known_with_whom_and_how_much_a_checkpoint_shares(three: Sharing) -> None:
    assert [three.sharers(folder) for folder in "123"] == [("2", "3"), ("1", "3"), ("1", "2")]
    assert [three.shared_bytes(folder) for folder in "123"] == [1000, 1100, 1100]


def test_files_of_one_name_and_size_that_were_written_twice_are_two() -> None:
    sharing = sharing_of(
        [held("1", file("a", 50), file("r1", 7), file("r2", 7)), held("2", file("a", 50))]
    )
    assert sharing.sharers("1") == ()
    assert sharing.freed_bytes("1") == 74
    assert sharing.freed_bytes("12") == 134


def test_what_shares_with_checkpoints_that_are_gone_has_its_files_alone() -> None:
    sharing = sharing_of([held("3", file("a~1", 1000, "1"), file("b", 100))])
    assert (sharing.sharers("3"), sharing.shared_bytes("3")) == ((), 0)
    assert sharing.freed_bytes("3") == 1110


def test_a_checkpoint_that_has_lost_shared_files_frees_no_less_than_nothing() -> None:
    lost = "1", 10, (file("a", 1000),)
    assert sharing_of([lost, held("2", file("a", 1000, "1"))]).freed_bytes("1") == 0


@given(
    st.lists(st.frozensets(st.integers(0, 5)), min_size=1, max_size=6),
    st.frozensets(st.integers(0, 5)),
)
def test_what_is_freed_is_what_a_filesystem_that_counts_links_frees(
    folders: Sequence[frozenset[int]], chosen: frozenset[int]
) -> None:
    first = {number: at for at, one in reversed([*enumerate(folders)]) for number in one}
    sharing = sharing_of(
        held(
            str(at),
            *(file(f"f{n}", 1 << n, "" if first[n] == at else str(first[n])) for n in sorted(one)),
            other=0,
        )
        for at, one in enumerate(folders)
    )
    gone = {at for at in chosen if at < len(folders)}
    left = set().union(*(one for at, one in enumerate(folders) if at not in gone))
    before = set().union(*folders)
    wanted = sum(1 << n for n in before - left)
    assert sharing.freed_bytes(map(str, gone)) == wanted
