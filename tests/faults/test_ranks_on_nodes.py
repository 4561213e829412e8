"""Ranks on several nodes, each with shared memory of its own: all restore out of it, or none does.

A node is a folder here: nobody finds the memory of another.
"""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest
from rank_jobs import check, wait_for_end

import laststep
from laststep.memory import segments
from waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from rank_jobs import Job, Process

NODES = (0, 0, 1, 1)
"""Where each rank is."""


class Nodes:
    """The starts of one job, one after the other, on two nodes."""

    def __init__(self, start_job: Callable[..., Job], folder: Path, run: Path) -> None:
        self._start_job = start_job
        self._store: Process | None = None
        self._count = 0
        self.bases = [folder / "node0", folder / "node1"]
        for base in self.bases:
            base.mkdir()
        self.run = run

    def __call__(self, nodes: Sequence[int] = NODES, **options: object) -> Job:
        self._count += 1
        job = self._start_job(len(nodes), store=self._store, start=f"start{self._count}")
        self._store = job.store
        how = {"host_memory_bytes": 160 << 20, **options}
        only = {rank: {"memory": str(self.bases[node]), **how} for rank, node in enumerate(nodes)}
        job.open(self.run, only=only)
        return job

    def lose_the_home(self) -> None:
        """Its data files are there, and damaged."""
        for path in self.run.rglob("*.safetensors"):
            path.write_bytes(bytes(path.stat().st_size))

    def left(self) -> list[int]:
        return [len(segments.found(str(base))) for base in self.bases]


@pytest.fixture
def nodes(start_job: Callable[..., Job], tmp_path: Path, run_folder: Path) -> Nodes:
    return Nodes(start_job, tmp_path, run_folder)


def kill(job: Job) -> None:
    pids = [pid for rank in job.ranks for pid in (rank.pid, *rank.flushers)]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    for rank in job.ranks:
        rank.end()
        for pid in rank.flushers:
            wait_for_end(pid)


def restored_by(job: Job, item: str = "") -> int:
    """The step that all ranks have restored, bit for bit; or one item of theirs."""
    job.tell(f"restore {item}")
    (found,) = {rank.hear("restored") for rank in job.ranks}
    job.tell(f"exact {found} {item}")
    assert {rank.hear("exact") for rank in job.ranks} == {"True"}
    return int(found)


@pytest.mark.parametrize("sharded", [True, pytest.param(False, marks=pytest.mark.long)])
def test_ranks_that_come_back_to_their_nodes_read_what_lies_there(
    nodes: Nodes, *, sharded: bool
) -> None:
    """What is sharded is read by whom it is for, the rest by one of its node, who passes it on."""
    job = nodes(sharded=sharded)
    job.save(1)
    kill(job)
    nodes.lose_the_home()
    again = nodes(sharded=sharded)
    assert restored_by(again) == 1
    again.save(2)
    again.close()
    assert nodes.left() == [0, 0]
    assert laststep.open(nodes.run).steps() == [1, 2]


@pytest.mark.parametrize("then", [(1, 1, 0, 0), pytest.param((1, 0), marks=pytest.mark.long)])
def test_what_lies_on_another_node_is_read_there_and_passed_on(
    nodes: Nodes, then: tuple[int, ...]
) -> None:
    job = nodes()
    job.save(1)
    kill(job)
    nodes.lose_the_home()
    again = nodes(then)
    assert restored_by(again, "state") == 1
    again.close()


def test_what_is_wanted_of_another_node_comes_out_of_the_home_for_all(nodes: Nodes) -> None:
    """Each rank has something for itself alone, and is elsewhere now."""
    job = nodes()
    job.save(1)
    kill(job)
    again = nodes((1, 1, 0, 0))
    assert restored_by(again) == 1
    assert "step-00000001" in again.ranks[0].log.read_text()
    again.save(2)
    again.close()
    check(nodes.run, [1, 2], ranks=4)
    assert nodes.left() == [0, 0]


def test_fewer_ranks_free_the_memory_of_vanished_ranks_on_their_node(nodes: Nodes) -> None:
    """Rank 2 was on the second node, where only rank 1 runs now."""
    job = nodes((0, 1, 1))
    job.save(1)
    kill(job)
    kill(nodes((0, 1)))  # without a save: what it leaves is freed at the next start
    again = nodes((0, 1))
    assert restored_by(again, "state") == 1
    wait_until(lambda: nodes.left() == [1 + 1, 2 + 1])
    again.save(2)
    again.close()
    assert nodes.left() == [0, 0]


def test_where_a_node_is_gone_the_home_counts(nodes: Nodes) -> None:
    job = nodes()
    job.save(1)
    kill(job)
    for segment in segments.found(str(nodes.bases[1])):
        segment.remove()
    again = nodes()
    assert restored_by(again) == 1
    again.close()


def test_what_the_home_has_not_does_not_come_back_from_several_nodes(nodes: Nodes) -> None:
    """Nobody could store it: each node has a part."""
    job = nodes()
    job.save(1)
    job.stand_at("decide", 2)
    kill(job)
    again = nodes()
    assert restored_by(again) == 1
    again.save(2)
    again.close()
    check(nodes.run, [1, 2], ranks=4)
    assert nodes.left() == [0, 0]


def test_damage_on_one_node_gives_way_to_the_home_on_all(nodes: Nodes) -> None:
    job = nodes()
    job.save(1)
    kill(job)
    for segment in segments.found(str(nodes.bases[1])):
        with open(segment.pool_path, "r+b") as pool:  # noqa: PTH123 (it is a str)
            pool.write(b"\x01" * 5000)
    again = nodes()
    assert restored_by(again) == 1
    again.close()
    check(nodes.run, [1], ranks=4)
