"""Runs of real ranks in object stores."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import laststep

sys.path.insert(0, str(Path(__file__).parents[1] / "storage"))
import fake_s3
import weed

if TYPE_CHECKING:
    import pytest
    from crew import Crew


def test_two_ranks_with_flushers_of_their_own_save_to_s3_and_come_back(
    crew: Crew, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with weed.running(tmp_path) as endpoint:
        settings = {**weed.KEYS, "AWS_ENDPOINT_URL": endpoint, "AWS_REGION": "x"}
        run = f"s3://{weed.BUCKET}/two/ranks"
        assert crew("object_tasks:save_and_come_back", 2, run=run, settings=settings) == [2, 2]
        for name, value in settings.items():
            monkeypatch.setenv(name, value)
        assert laststep.open(run).steps() == [1, 2]


def test_a_job_of_another_size_reads_each_block_once_and_no_file_whole(crew: Crew) -> None:
    with fake_s3.running() as server:
        settings = {
            "AWS_ACCESS_KEY_ID": "me",
            "AWS_SECRET_ACCESS_KEY": "x",
            "AWS_ENDPOINT_URL": server.endpoint,
            "AWS_REGION": "x",
        }
        run = "s3://bucket/run"
        crew("object_tasks:save_and_come_back", 2, run=run, settings=settings)
        two = crew("object_tasks:come_back", 2, run=run, settings=settings)
        server.asked.clear()
        three = crew("object_tasks:come_back", 3, run=run, settings=settings)
    assert two[0] == three[0] == three[2]
    spans = Counter(
        (asked.key, asked.span)
        for asked in server.asked
        if asked.method == "GET" and "/model-r" in asked.key
    )
    assert all(span for _, span in spans), "a file was read whole"
    tensors = {at: count for at, count in spans.items() if not at[1].startswith("bytes=0-")}
    assert set(tensors.values()) == {1}, "a rank read what another one had read"
    assert len({key for key, _ in tensors}) == 2, "of each rank that has saved"


def test_no_rank_but_the_first_lists_and_probes(crew: Crew) -> None:
    with fake_s3.running() as server:
        settings = {
            "AWS_ACCESS_KEY_ID": "rank",
            "AWS_SECRET_ACCESS_KEY": "x",
            "AWS_ENDPOINT_URL": server.endpoint,
            "AWS_REGION": "x",
        }
        steps = crew("object_tasks:save_and_come_back", 3, run="s3://bucket/run", settings=settings)
    assert steps == [2] * 3
    assert {asked.who for asked in server.asked} >= {f"rank{number}" for number in range(3)}
    lists = Counter(asked.who for asked in server.asked if asked.lists)
    assert set(lists) == {"rank0"}, lists
    assert {asked.who for asked in server.asked if ".probe-" in asked.key} == {"rank0"}
