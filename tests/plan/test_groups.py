"""Groups of ranks: every rank in one, nobody with too many to hear from."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laststep.format.index import FLAT_RANKS, folder_of
from laststep.plan.receipts import ONE_GROUP_RANKS, Groups, cut

counts = st.integers(1, 300_000)


@given(counts)
def test_groups_are_consecutive_ranks_and_all_of_them(ranks: int) -> None:
    groups = cut(ranks)
    every = [groups.group_of(leader) for leader in groups.leaders]
    assert sum(map(len, every)) == ranks
    assert [group.start for group in every] == list(groups.leaders)
    assert every[-1].stop == ranks
    for rank in {0, ranks // 2, ranks - 1}:
        assert rank in groups.group_of(rank)
        assert groups.leader_of(rank) == groups.group_of(rank)[0]
    if ranks <= ONE_GROUP_RANKS:
        assert len(every) == 1
    else:
        assert max(groups.size, len(every)) <= math.sqrt(ranks) + 2


def test_a_very_large_job_has_some_hundred_groups_of_some_hundred_ranks() -> None:
    groups = cut(131072)
    assert groups == Groups(131072, 362)
    assert len(groups.leaders) == 363


@pytest.mark.parametrize("ranks", [1, 2, FLAT_RANKS, FLAT_RANKS + 1, 8192, 131072, 300_000])
def test_no_folder_has_more_than_about_a_thousand_entries(ranks: int) -> None:
    folders = [folder_of(rank, ranks) for rank in range(ranks)]
    if ranks <= FLAT_RANKS:
        assert set(folders) == {""}
        return
    assert len(set(folders)) <= 1024
    most = max(128, ranks // 1024 + 1)
    assert max(folders.count(folder) for folder in list(dict.fromkeys(folders))[:3]) <= most
    assert all(folder.endswith("/") and folder.count("/") == 1 for folder in set(folders))
