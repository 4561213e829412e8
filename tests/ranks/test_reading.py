"""A restore reads every block once, whoever wants it, and little that nobody wants; it opens only
the files that hold something for it, and keeps little to pass on."""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from crew import Crew
    from reading_tasks import Watch

MIB = 1 << 20
NEEDED_BYTES = 64 * MIB


@pytest.fixture(scope="module")
def saved_by(crew: Crew) -> Iterator[Callable[[int, int | None], Path]]:
    """`saved_by(ranks, cut)`: the run that they saved, cut along that dimension; None: every rank
    holds all."""
    with tempfile.TemporaryDirectory(prefix="laststep-ranks-") as folder:

        def run_of(ranks: int, cut: int | None) -> Path:
            run = Path(folder) / f"{ranks}-{cut}"
            if not run.exists():
                crew("reading_tasks:save_big", ranks, run=str(run), cut=cut)
            return run

        yield run_of


def load(crew: Crew, ranks: int, run: Path, cut: int | None, **options: int) -> list[Watch]:
    return crew("reading_tasks:load_big", ranks, run=str(run), cut=cut, **options)


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ((4, 0), (4, 1)),
        pytest.param((4, 1), (4, 0), marks=pytest.mark.long),
        pytest.param((2, 0), (4, 0), marks=pytest.mark.long),
        pytest.param((2, 0), (4, None), marks=pytest.mark.long),
        ((4, None), (3, 0)),
        ((3, 1), (1, None)),
    ],
    ids=str,
)
def test_every_block_is_read_once(
    crew: Crew,
    saved_by: Callable[..., Path],
    saved: tuple[int, int | None],
    loaded: tuple[int, int | None],
) -> None:
    """Ranks, and the dimension that they cut; None: every rank holds all."""
    found = load(crew, loaded[0], saved_by(*saved), loaded[1])
    assert sum(one.told_bytes for one in found) <= 1.1 * NEEDED_BYTES
    assert sum(len(one.blocks) for one in found) * MIB <= 1.1 * NEEDED_BYTES
    blocks = Counter(block for one in found for block in one.blocks)
    assert set(blocks.values()) == {1}
    most = max(len(one.blocks) for one in found) * MIB
    assert most <= NEEDED_BYTES / len(found) * 1.6  # and by all alike
    assert max(one.most_passed_on for one in found) <= 64 * MIB


def test_a_rank_opens_its_own_index_and_file_and_the_index_that_says_what_there_is(
    crew: Crew, saved_by: Callable[..., Path]
) -> None:
    for rank, one in enumerate(load(crew, 4, saved_by(4, 0), 0)):
        indexes = {"index-r00000", f"index-r{rank:05}"}
        assert set(one.opened) == {*indexes, f"state-r{rank:05}.safetensors"}
        assert set(one.opened.values()) == {1}
        assert len(one.blocks) * MIB == NEEDED_BYTES / 4


@pytest.mark.parametrize(
    "ranks", [3, 5, *(pytest.param(n, marks=pytest.mark.long) for n in (1, 2))]
)
def test_another_number_of_ranks_opens_once_what_it_reads_and_no_other_file(
    crew: Crew, saved_by: Callable[..., Path], ranks: int
) -> None:
    """A rank also needs the indexes of files of which it wants something that others read."""
    for rank, one in enumerate(load(crew, ranks, saved_by(4, 0), 0)):
        first, last = 4 * rank // ranks, -(-4 * (rank + 1) // ranks)
        indexes = {f"index-r{writer:05}" for writer in {0, *range(first, last)}}
        read = {name.rpartition("/")[2] for name, _ in one.blocks}
        assert set(one.opened) == read | indexes
        assert set(one.opened.values()) == {1}


def test_of_many_who_want_the_same_a_few_open_each_file(
    crew: Crew, saved_by: Callable[..., Path]
) -> None:
    """As in a large job: more ranks want every file than there are chunks in it."""
    found = load(crew, 4, saved_by(4, None), None, few=1)
    data = [{name for name in one.opened if name.startswith("state-")} for one in found]
    assert set().union(*data) == {f"state-r{rank:05}.safetensors" for rank in range(4)}
    assert max(Counter(name for names in data for name in names).values()) <= 3
    blocks = Counter(block for one in found for block in one.blocks)
    assert set(blocks.values()) == {1}
    assert max(one.most_passed_on for one in found) <= 64 * MIB
