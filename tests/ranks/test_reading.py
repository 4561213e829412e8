"""A restore reads every block once, whoever wants it, and little that nobody wants; it opens only
the files that hold something for it, and keeps little to pass on."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from crew import Crew
    from reading_tasks import Watch

MIB = 1 << 20
NEEDED_BYTES = 64 * MIB


def load(crew: Crew, ranks: int, run: Path, cut: int | None, **options: int) -> list[Watch]:
    return crew("reading_tasks:load_big", ranks, run=str(run), cut=cut, **options)


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ((4, 0), (4, 1)),
        ((4, 1), (4, 0)),
        ((2, 0), (4, 0)),
        ((2, 0), (4, None)),
        ((4, None), (3, 0)),
        ((3, 1), (1, None)),
    ],
    ids=str,
)
def test_every_block_is_read_once(
    crew: Crew, run_folder: Path, saved: tuple[int, int | None], loaded: tuple[int, int | None]
) -> None:
    """Ranks, and the dimension that they cut; None: every rank holds all."""
    crew("reading_tasks:save_big", saved[0], run=str(run_folder), cut=saved[1])
    found = load(crew, loaded[0], run_folder, loaded[1])
    assert sum(one.told_bytes for one in found) <= 1.1 * NEEDED_BYTES
    assert sum(len(one.blocks) for one in found) * MIB <= 1.1 * NEEDED_BYTES
    blocks = Counter(block for one in found for block in one.blocks)
    assert set(blocks.values()) == {1}
    most = max(len(one.blocks) for one in found) * MIB
    assert most <= NEEDED_BYTES / len(found) * 1.6  # and by all alike
    assert max(one.most_passed_on for one in found) <= 64 * MIB


def test_a_rank_opens_its_own_index_and_file_and_the_index_that_says_what_there_is(
    crew: Crew, run_folder: Path
) -> None:
    crew("reading_tasks:save_big", 4, run=str(run_folder), cut=0)
    for rank, one in enumerate(load(crew, 4, run_folder, 0)):
        indexes = {"index-r00000", f"index-r{rank:05}"}
        assert set(one.opened) == {*indexes, f"state-r{rank:05}.safetensors"}
        assert set(one.opened.values()) == {1}
        assert len(one.blocks) * MIB == NEEDED_BYTES / 4


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_another_number_of_ranks_opens_once_what_it_reads_and_no_other_file(
    crew: Crew, run_folder: Path, ranks: int
) -> None:
    """A rank also needs the indexes of files of which it wants something that others read."""
    crew("reading_tasks:save_big", 4, run=str(run_folder), cut=0)
    for rank, one in enumerate(load(crew, ranks, run_folder, 0)):
        first, last = 4 * rank // ranks, -(-4 * (rank + 1) // ranks)
        indexes = {f"index-r{writer:05}" for writer in {0, *range(first, last)}}
        read = {name.rpartition("/")[2] for name, _ in one.blocks}
        assert set(one.opened) == read | indexes
        assert set(one.opened.values()) == {1}


def test_of_many_who_want_the_same_a_few_open_each_file(crew: Crew, run_folder: Path) -> None:
    """As in a large job: more ranks want every file than there are chunks in it."""
    crew("reading_tasks:save_big", 4, run=str(run_folder), cut=None)
    found = load(crew, 4, run_folder, None, few=1)
    data = [{name for name in one.opened if name.startswith("state-")} for one in found]
    assert set().union(*data) == {f"state-r{rank:05}.safetensors" for rank in range(4)}
    assert max(Counter(name for names in data for name in names).values()) <= 3
    blocks = Counter(block for one in found for block in one.blocks)
    assert set(blocks.values()) == {1}
    assert max(one.most_passed_on for one in found) <= 64 * MIB
