"""Blocks that are kept in memory: found again by their content, and never more than may be."""

from __future__ import annotations

import threading

from hypothesis import given
from hypothesis import strategies as st

from laststep.codecs.digests import digest
from laststep.flush import encoder
from laststep.flush.encoder import Earlier


def keep(kept: Earlier, file: str, number: int, data: bytes) -> None:
    kept.keep(file, number, digest(data), memoryview(data))


def found(kept: Earlier, file: str, number: int, data: bytes) -> bool:
    view = kept.find(file, number, digest(data))
    assert view is None or bytes(view) == data
    return view is not None


def test_a_block_is_found_with_just_its_content() -> None:
    kept = Earlier(100)
    assert not kept.has("a")
    keep(kept, "a", 3, b"old")
    assert kept.has("a")
    assert found(kept, "a", 3, b"old")
    assert not found(kept, "a", 3, b"new")
    assert not found(kept, "a", 4, b"old")
    assert not found(kept, "b", 3, b"old")
    keep(kept, "a", 3, b"new")
    assert found(kept, "a", 3, b"new")
    assert not found(kept, "a", 3, b"old")


def test_what_is_kept_does_not_change_with_the_memory_that_it_came_from() -> None:
    kept, data = Earlier(100), bytearray(b"data")
    kept.keep("a", 0, digest(data), memoryview(data))
    data[:] = b"else"
    assert found(kept, "a", 0, b"data")


def test_nothing_more_is_kept_where_there_is_no_room() -> None:
    kept = Earlier(10)
    keep(kept, "a", 0, b"123456")
    keep(kept, "a", 1, b"12345")
    assert not found(kept, "a", 1, b"12345")
    keep(kept, "b", 0, b"1234")
    assert found(kept, "b", 0, b"1234")
    keep(kept, "a", 0, b"1234567")  # longer than what it takes the place of
    assert not kept.has("a")
    keep(kept, "a", 0, b"654321")
    assert found(kept, "a", 0, b"654321")
    kept.forget("b")
    keep(kept, "a", 1, b"1234")
    assert found(kept, "a", 1, b"1234")


def test_blocks_of_a_file_for_which_it_does_not_pay_are_let_go() -> None:
    kept = Earlier(1000)
    keep(kept, "a", 0, b"a")
    keep(kept, "b", 0, b"b")
    for number in range(encoder._TRIED_BLOCKS - 1):
        kept.tried("a", paid=number < 10)
        kept.tried("b", paid=number < 20)
    assert kept.has("a")
    for file in ("a", "b"):
        kept.tried(file, paid=False)
    assert not kept.has("a")
    assert kept.has("b")
    keep(kept, "a", 0, b"a")
    assert not kept.has("a")
    kept.forget("a")  # its tensors are others: it may pay now
    keep(kept, "a", 0, b"a")
    assert kept.has("a")


@given(
    most=st.integers(0, 40),
    deeds=st.lists(
        st.tuples(
            st.sampled_from(["keep", "keep", "keep", "tried", "forget"]),
            st.sampled_from("ab"),
            st.integers(0, 5),
            st.integers(0, 20),
        ),
        max_size=200,
    ),
)
def test_what_is_kept_is_never_more_than_may_be(
    most: int, deeds: list[tuple[str, str, int, int]]
) -> None:
    kept = Earlier(most)
    for what, file, number, size in deeds:
        if what == "keep":
            keep(kept, file, number, bytes([number]) * size)
        elif what == "tried":
            kept.tried(file, paid=bool(size % 2))
        else:
            kept.forget(file)
        there = sum(len(b) for blocks in kept._kept.values() for _, b in blocks.values())
        assert there == kept._bytes <= most


def test_several_threads_keep_and_find_at_once() -> None:
    kept, wrong = Earlier(5000), []

    def go(seed: int) -> None:
        for number in range(400):
            data = bytes([seed, number % 7]) * 50
            keep(kept, "a", number % 7, data)
            view = kept.find("a", number % 7, digest(data))
            if view is not None and bytes(view) != data:
                wrong.append(number)
            if number % 50 == seed:
                kept.forget("a")

    threads = [threading.Thread(target=go, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert sum(len(b) for _, b in kept._kept.get("a", {}).values()) == kept._bytes
