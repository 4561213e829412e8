"""The last checkpoint as a base: which files are used again, and what is likely to change."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from laststep.constants import BLOCK_BYTES
from laststep.flush import base as bases
from laststep.flush.base import (
    LEAST_BYTES,
    LEAST_LIVE,
    MAX_SHARERS,
    MOST_CHANGED,
    MOST_FILES,
    MOST_HELD,
    Base,
    BaseLayout,
)
from laststep.format.index import (
    BaseRef,
    BlockRef,
    Encoding,
    Index,
    StoredFile,
    StoredLayout,
    in_place,
    runs_of,
)
from saves_of import MODEL, History, bytes_layout, layout_of

if TYPE_CHECKING:
    from pathlib import Path

FOLDER = "step-00000007.2-3"


def digests_of(count: int, changed: frozenset[int] | set[int] = frozenset()) -> bytes:
    """The digests of so many blocks, some of which are others now."""
    numbered = (n + (1 << 40 if n in changed else 0) for n in range(count))
    return b"".join(number.to_bytes(16, "little") for number in numbered)


def base_of(
    files: list[StoredFile], refs: list[BlockRef], changed: frozenset[int] | None = None
) -> tuple[Base, list[BaseLayout]]:
    """A base of one layout whose blocks lie there."""
    layout = bytes_layout(len(refs) * BLOCK_BYTES)
    stored = StoredLayout(layout=layout, digests=digests_of(len(refs)), runs=runs_of(refs))
    history = {} if changed is None else {layout.name: changed}
    encodings = (Encoding("planes", 2), Encoding("patches", 2))
    index = Index(files=tuple(files), encodings=encodings, layouts=(stored,))
    base = Base(index, FOLDER, history)
    found = base.layout(layout)
    assert found is not None
    assert found.refs == refs
    return base, [found]


def file_of(number: int, blocks: float, *, origin: str = "", sharers: int = 0) -> StoredFile:
    size = int(blocks * BLOCK_BYTES)
    return StoredFile(name=f"f{number}.pack", size_bytes=size, origin=origin, sharers=sharers)


@st.composite
def some_bases(draw: st.DrawFn) -> tuple[Base, list[BaseLayout]]:
    """Blocks that lie anywhere in some files, of which more or less is needed."""
    count = draw(st.integers(1, 24))
    blocks = draw(st.integers(1, 60))
    places = draw(st.lists(st.integers(0, count - 1), min_size=blocks, max_size=blocks))
    refs, sizes = [], [0] * count
    for file in places:
        refs.append(BlockRef(file, sizes[file], BLOCK_BYTES))
        sizes[file] += BLOCK_BYTES
    files = [
        StoredFile(
            name=f"f{n}.pack",
            size_bytes=int(size * draw(st.floats(1, 6))) + draw(st.integers(1, 9)),
            origin=draw(st.sampled_from(["", "step-00000001.1-1"])),
            sharers=draw(st.sampled_from([0, 1, MAX_SHARERS - 1, MAX_SHARERS])),
        )
        for n, size in enumerate(sizes)
    ]
    changed = draw(st.none() | st.frozensets(st.integers(0, blocks - 1)))
    return base_of(files, refs, changed)


# Retired files


@given(some_bases())
def test_the_files_that_stay_are_few_and_well_used(made: tuple[Base, list[BaseLayout]]) -> None:
    base, layouts = made
    retired = base.retired(layouts)
    files = base.index.files
    live = [0] * len(files)
    for ref in layouts[0].refs:
        live[ref.file] += ref.size_bytes
    stay = set(range(len(files))) - retired
    assert len(stay) <= MOST_FILES
    assert all(files[number].sharers < MAX_SHARERS for number in stay)
    assert all(live[number] >= LEAST_LIVE * files[number].size_bytes for number in stay)
    assert sum(files[number].size_bytes for number in stay) <= MOST_HELD * sum(live)


@given(some_bases())
def test_files_go_in_the_order_of_how_little_is_needed_of_them(
    made: tuple[Base, list[BaseLayout]],
) -> None:
    base, layouts = made
    live = [0] * len(base.index.files)
    for ref in layouts[0].refs:
        live[ref.file] += ref.size_bytes
    share = [live[n] / max(file.size_bytes, 1) for n, file in enumerate(base.index.files)]
    retired = base.retired(layouts) - base.shared_too_often()
    stay = set(range(len(share))) - retired - base.shared_too_often()
    most = max((share[n] for n in retired), default=0)
    assert most <= min((share[n] for n in stay), default=most)


@given(counts=st.lists(st.integers(1, 9), min_size=1, max_size=MOST_FILES), changed=st.booleans())
def test_files_that_are_needed_whole_stay(counts: list[int], changed: bool) -> None:
    """Also if all that the last save wrote changes again."""
    files = [file_of(n, count, origin="step-1" if n else "") for n, count in enumerate(counts)]
    refs = [
        BlockRef(file, at * BLOCK_BYTES, BLOCK_BYTES)
        for file, count in enumerate(counts)
        for at in range(count)
    ]
    base, layouts = base_of(files, refs, frozenset(range(counts[0])) if changed else None)
    assert base.retired(layouts) == frozenset()


def test_the_least_used_files_are_retired_where_there_are_too_many() -> None:
    count = MOST_FILES + 2
    files = [file_of(n, 1.5 if n in (3, 5) else 1, origin="x") for n in range(count)]
    refs = [BlockRef(n, 0, BLOCK_BYTES) for n in range(count)]
    base, layouts = base_of(files, refs)
    assert base.retired(layouts) == {3, 5}


def test_a_file_that_as_many_checkpoints_share_as_may_is_retired() -> None:
    files = [
        file_of(0, 1, origin="x", sharers=MAX_SHARERS - 1),
        file_of(1, 1, origin="x", sharers=MAX_SHARERS),
    ]
    base, layouts = base_of(files, [BlockRef(n, 0, BLOCK_BYTES) for n in range(2)])
    assert base.shared_too_often() == {1}
    assert base.retired(layouts) == {1}


def test_a_file_is_needed_for_the_bases_in_it() -> None:
    base_block = BaseRef(BlockRef(1, 0, 90, 1), bytes(16))
    refs = [
        BlockRef(0, 10 * n, 10, 2, base_block._replace(block=BlockRef(1, 90 * n, 90, 1)))
        for n in range(3)
    ]
    files = [
        StoredFile(name="f0.pack", size_bytes=30),
        StoredFile(name="f1.pack", size_bytes=270, origin="x"),
    ]
    base, layouts = base_of(files, refs)
    assert base.retired(layouts) == frozenset()
    assert layouts[0].reusable(frozenset()).keys() == {0, 1, 2}
    assert not layouts[0].reusable(frozenset({1}))
    files[1] = structs.replace(files[1], size_bytes=2000)
    base, layouts = base_of(files, refs)
    assert base.retired(layouts) == {1}


def test_what_several_files_of_the_last_save_hold_is_not_counted_twice() -> None:
    """Two layouts change all the time; a third shares an old file."""
    layouts = [
        bytes_layout(size * BLOCK_BYTES, f"{name}.safetensors")
        for name, size in (("a", 1), ("b", 10), ("c", 1))
    ]
    files = [
        StoredFile(name=one.name, size_bytes=one.size_bytes, origin="x" * (n == 2))
        for n, one in enumerate(layouts)
    ]
    stored = [
        StoredLayout(layout=one, digests=digests_of(one.block_count), runs=in_place(one, n))
        for n, one in enumerate(layouts)
    ]
    index = Index(files=tuple(files), layouts=tuple(stored))
    changed = {one.name: frozenset(range(one.block_count)) for one in layouts[:2]}
    base = Base(index, FOLDER, changed)
    found = [base.layout(one) for one in layouts]
    assert base.retired([one for one in found if one is not None]) == frozenset()


def test_layouts_that_are_gone_need_nothing() -> None:
    base, _ = base_of(
        [file_of(0, 4)], [BlockRef(0, n * BLOCK_BYTES, BLOCK_BYTES) for n in range(4)]
    )
    assert base.retired([]) == {0}


# Likely changes


def likely(layout: BaseLayout, first: int, same: list[bool]) -> float:
    """The estimate for blocks that are the same as before, or not."""
    changed = {first + n for n, is_same in enumerate(same) if not is_same}
    digests = digests_of(first + len(same), changed)[16 * first :]
    return layout.likely_change(first, digests)


def layout_with(count: int, recent: set[int] | None = None) -> BaseLayout:
    layout = bytes_layout(count * BLOCK_BYTES)
    stored = StoredLayout(layout=layout, digests=digests_of(count), runs=in_place(layout, 0))
    changed = None if recent is None else frozenset(recent)
    return BaseLayout(stored, changed)


@st.composite
def looks(draw: st.DrawFn) -> tuple[BaseLayout, int, list[bool]]:
    """A layout, and some blocks of it that come."""
    count = draw(st.integers(1, 40))
    recent = draw(st.none() | st.sets(st.integers(0, count - 1)))
    first = draw(st.integers(0, count - 1))
    same = draw(st.lists(st.booleans(), min_size=1, max_size=count - first))
    return layout_with(count, recent), first, same


@given(look=looks())
def test_an_estimate_is_a_share(look: tuple[BaseLayout, int, list[bool]]) -> None:
    layout, first, same = look
    assert 0 <= likely(layout, first, same) <= 1


@given(look=looks(), data=st.data())
def test_one_more_changed_block_never_makes_less_change_likely(
    look: tuple[BaseLayout, int, list[bool]], data: st.DataObject
) -> None:
    layout, first, same = look
    at = data.draw(st.integers(0, len(same) - 1))
    less, more = [*same], [*same]
    less[at], more[at] = True, False
    assert likely(layout, first, less) <= likely(layout, first, more)


@given(look=looks())
def test_of_a_layout_that_has_come_whole_the_share_is_known(
    look: tuple[BaseLayout, int, list[bool]],
) -> None:
    layout, _, _ = look
    count = len(layout.refs)
    chance = random.Random(count)
    same = [chance.random() < 0.5 for _ in range(count)]
    assert likely(layout, 0, same) == pytest.approx(same.count(False) / count)


def test_blocks_that_changed_the_last_time_are_taken_to_change_again() -> None:
    layout = layout_with(10, {0, 1, 2, 3, 4, 5})
    assert likely(layout, 0, [False, False]) == 0.6
    assert likely(layout, 0, [True, True]) == 0.0
    assert likely(layout, 0, [True, False]) == pytest.approx(0.3)
    assert likely(layout, 8, [True, True]) == 0.6  # these say nothing about the others
    assert likely(layout, 8, [False, True]) == pytest.approx(0.7)


@pytest.mark.parametrize("recent", [None, set()])
def test_after_a_save_of_nothing_new_the_first_blocks_speak_for_all(
    recent: set[int] | None,
) -> None:
    layout = layout_with(10, recent)
    assert likely(layout, 0, [True, False]) == 0.5
    assert likely(layout, 0, [True, True]) == 0.0
    assert likely(layout, 0, [False]) == 1.0 > MOST_CHANGED


@given(count=st.integers(1, 20), data=st.data())
def test_blocks_are_compared_by_their_digests(count: int, data: st.DataObject) -> None:
    layout = layout_with(count)
    changed = data.draw(st.sets(st.integers(0, count - 1)))
    first = data.draw(st.integers(0, count - 1))
    last = data.draw(st.integers(first, count))
    part = digests_of(count, changed)[16 * first : 16 * last]
    assert layout.same(first, part) == [n not in changed for n in range(first, last)]


@pytest.mark.parametrize(("size", "is_usable"), [(LEAST_BYTES - 1, False), (LEAST_BYTES, True)])
def test_small_layouts_are_always_written(size: int, is_usable: bool) -> None:
    layout = bytes_layout(size)
    stored = StoredLayout(layout=layout, digests=digests_of(1), runs=in_place(layout, 0))
    assert (Base(Index(layouts=(stored,)), FOLDER).layout(layout) is not None) == is_usable


# Names, numbers and what is found on the disk


def test_a_layout_is_found_only_if_it_is_the_same() -> None:
    base, (found,) = base_of(
        [file_of(0, 2)], [BlockRef(0, n * BLOCK_BYTES, BLOCK_BYTES) for n in range(2)]
    )
    again = base.layout(bytes_layout(2 * BLOCK_BYTES))
    assert again is not None
    assert again.stored is found.stored
    assert base.layout(bytes_layout(2 * BLOCK_BYTES - 1)) is None
    assert base.layout(bytes_layout(2 * BLOCK_BYTES, "other.safetensors")) is None
    assert base.layout(layout_of(("u", "uint8", 2 * BLOCK_BYTES))) is None


@pytest.mark.parametrize(
    ("name", "origin", "elsewhere"),
    [
        (MODEL, "", "model~2-3.safetensors"),
        (MODEL, "step-00000001.1-1", "model~1-1.safetensors"),
        ("model~1-1.safetensors", "step-00000001.1-1", "model~1-1.safetensors"),
        ("r00128/m-r00130.safetensors", "", "r00128/m-r00130~2-3.safetensors"),
        ("blocks-r00000.pack", "", "blocks-r00000~2-3.pack"),
        (MODEL, "elsewhere", None),
    ],
)
def test_a_shared_file_is_named_after_the_attempt_that_wrote_it(
    name: str, origin: str, elsewhere: str | None
) -> None:
    file = StoredFile(name=name, size_bytes=1, origin=origin)
    assert Base(Index(), FOLDER).name_elsewhere(file) == elsewhere


def test_a_committed_checkpoint_is_a_base_if_its_index_can_be_read(tmp_path: Path) -> None:
    history = History(tmp_path, bytes_layout(3 * BLOCK_BYTES))
    index = history.save(bytes(3 * BLOCK_BYTES))
    found = bases.of_checkpoint(history.store, history.folder, 0)
    assert found is not None
    assert (found.index, found.folder) == (index, history.folder)
    assert bases.of_checkpoint(history.store, history.folder, 1) is None
    assert bases.of_checkpoint(history.store, "step-00000099.1-1", 0) is None
    path = tmp_path / history.folder / "index-r00000"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert bases.of_checkpoint(history.store, history.folder, 0) is None


def test_an_attempt_that_is_not_committed_is_no_base(tmp_path: Path) -> None:
    history = History(tmp_path, bytes_layout(BLOCK_BYTES))
    history.finish(history.write(bytes(BLOCK_BYTES)))
    assert bases.of_checkpoint(history.store, history.folder, 0) is None
