"""What a rank keeps in shared memory, and when it goes: the newest that all ranks have stays."""

from __future__ import annotations

import mmap
import os
import threading
from typing import TYPE_CHECKING

import pytest
import torch

import laststep
from laststep.catalog.lineage import AttemptName
from laststep.codecs.digests import DIGEST_BYTES
from laststep.flush.keeping import Keeper
from laststep.flush.protocol import Begin, Seal, Unchanged
from laststep.flush.server import RunFacts, Save
from laststep.memory import segments
from laststep.memory.filled import Filled
from laststep.terms import BLOCK_BYTES, CHUNK_BYTES
from laststep.tiers import sealed
from saves_of import bytes_layout
from waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

SLOTS = 8


class Writes:
    """In place of the files of a save: digests what comes."""

    def digests(self, _file: int, _start: int, data: memoryview) -> bytes:
        return bytes(DIGEST_BYTES * -(-len(data) // BLOCK_BYTES))

    def rounded(self, _file: int) -> dict[str, str]:
        return {}


class Rank:
    """The keeper of a rank, and the flusher that it serves."""

    def __init__(self, base: str, rank: int, ranks: int) -> None:
        size = SLOTS * CHUNK_BYTES
        self.segment, self.fd = segments.make(base, "run", rank=rank, ranks=ranks, size_bytes=size)
        self._memory = mmap.mmap(self.fd, size)
        self._pool = memoryview(self._memory)
        self.freed: list[int] = []
        self.told: list[int] = []
        self._next = 0
        self._saves: dict[int, Save] = {}
        self.keeper = Keeper(self.segment, self._pool, self.fd, self)
        self.keeper.start(1)

    def begin(self, number: int, chunks: int = 1) -> Save:
        """A save of so many chunks is announced."""
        file = bytes_layout(chunks * CHUNK_BYTES, "a.safetensors")
        begin = Begin(save=number, step=number, overwrite=False, files=(file,), role="first")
        save = Save(begin=begin, began_s=0.0, at=AttemptName(step=number, epoch=1, attempt=number))
        save.flush = Writes()  # type: ignore[assignment]
        self._saves[number] = save
        self.keeper.begin(save)
        return save

    def seal(self, number: int, chunks: int = 1) -> None:
        """It comes, and is whole."""
        save = self.begin(number, chunks)
        for chunk in range(chunks):
            self.keeper.take(save, Filled(0, chunk * CHUNK_BYTES, CHUNK_BYTES, self._next % SLOTS))
            self._next += 1
        save.seal = Seal(save=number, values={}, items=(), metrics=b"{}", metadata=b"null")
        self.keeper.try_to_seal(save)
        wait_until(lambda: number in self.told)  # which comes last

    def ended(self, number: int, *, committed: bool) -> None:
        self.keeper.stored(self._saves[number], committed=committed)

    def forget(self, committed: int) -> None:
        self.keeper.forget_predecessors(self._saves[committed])

    def steps(self) -> list[int]:
        return [save.at.step for save in sealed.saves_in(self.segment)]

    def close(self) -> None:
        self.keeper.close(for_good=True)
        self._pool.release()
        self._memory.close()
        os.close(self.fd)

    # What it serves

    def free(self, slots: Iterable[int]) -> None:
        self.freed += slots

    def pass_on(self, save: Save, chunk: Filled, sums: bytes) -> None:
        if self.keeper.release(chunk.slot):
            self.freed.append(chunk.slot)

    def facts_of(self, save: Save) -> RunFacts:
        return RunFacts("id", None, ())

    def is_in_memory(self, save: Save) -> None:
        self.told.append(save.begin.save)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[[int], list[Rank]]]:
    """`make(n)`: n ranks of a job, on one node."""
    made: list[Rank] = []

    def go(ranks: int) -> list[Rank]:
        made.extend(Rank(str(tmp_path), rank, ranks) for rank in range(ranks))
        return made

    yield go
    for rank in made:
        rank.close()


def test_of_a_rank_by_itself_the_older_goes_with_the_newer(
    make: Callable[[int], list[Rank]],
) -> None:
    (alone,) = make(1)
    for number in (1, 2, 3):
        alone.seal(number)
        assert alone.steps() == [number]


def test_the_older_stays_until_the_newer_is_on_all_ranks(make: Callable[[int], list[Rank]]) -> None:
    first, other = make(2)
    first.seal(1)
    other.seal(1)
    first.seal(2)
    assert first.steps() == [1, 2]
    assert other.steps() == [1]
    other.seal(2)
    assert other.steps() == [2]
    first.begin(3)
    assert first.steps() == [2]
    assert first.freed == [0]


def test_the_older_goes_with_the_newer_once_it_is_committed(
    make: Callable[[int], list[Rank]],
) -> None:
    first, _ = make(2)
    first.seal(1)
    first.ended(1, committed=True)
    first.seal(2)
    assert first.steps() == [2]


def test_a_newer_one_that_is_given_up_before_all_ranks_have_it_goes_and_the_older_stays(
    make: Callable[[int], list[Rank]],
) -> None:
    first, other = make(2)
    first.seal(1)
    other.seal(1)
    first.seal(2)
    first.ended(1, committed=False)
    assert first.steps() == [1, 2]
    first.ended(2, committed=False)
    assert first.steps() == [1]
    assert first.freed == [1]


def test_what_some_ranks_of_other_nodes_may_have_is_not_waited_for(
    make: Callable[[int], list[Rank]],
) -> None:
    first, other = make(2)
    other.segment.remove()
    first.seal(1)
    first.seal(2)
    assert first.steps() == [2]


def test_a_commit_frees_older_segments_and_not_the_newer_save_of_a_rank_that_died(
    make: Callable[[int], list[Rank]], tmp_path: Path
) -> None:
    earlier = Rank(str(tmp_path), 1, 2)
    earlier.seal(1)
    earlier.close()
    ranks = make(2)
    for number in (2, 3):
        for rank in ranks:
            rank.seal(number)
    dead = ranks.pop()
    dead.close()
    ranks[0].forget(2)
    left = {segment.folder for segment in segments.found(str(tmp_path))}
    assert left == {ranks[0].segment.folder, dead.segment.folder}
    assert dead.steps() == [3]
    ranks[0].seal(4)
    ranks[0].forget(4)
    assert [one.folder for one in segments.found(str(tmp_path))] == [ranks[0].segment.folder]


def test_when_the_trainer_is_gone_nothing_goes_any_more(make: Callable[[int], list[Rank]]) -> None:
    (alone,) = make(1)
    alone.seal(1, chunks=5)
    alone.begin(2, chunks=6)  # there is no room for both
    alone.keeper.nothing_more_comes()
    alone.ended(1, committed=False)
    assert alone.steps() == [1]


def test_where_there_is_no_room_for_two_the_older_goes_when_its_end_is_known(
    make: Callable[[int], list[Rank]],
) -> None:
    first, _ = make(2)
    first.seal(1, chunks=5)
    first.begin(2, chunks=6)
    assert first.steps() == [1]
    first.ended(1, committed=False)
    assert first.steps() == []


def test_what_did_not_change_is_had_from_the_save_that_lends_it_and_from_no_other(
    make: Callable[[int], list[Rank]],
) -> None:
    first, _ = make(2)
    first.seal(1)
    first.seal(2)
    save = first.begin(3)
    said = Unchanged(save=3, of=1, chunks=((0, 0, CHUNK_BYTES),))
    assert first.keeper.inheritable(save, said) == said.chunks
    save.base = 1
    save.seal = Seal(save=3, values={}, items=(), metrics=b"{}", metadata=b"null")
    first.keeper.inherit(save, [(0, 0)])
    slots = {kept.at.step: kept.slots for kept in sealed.saves_in(first.segment)}
    assert slots[3] == slots[1] != slots[2]


def test_a_save_is_in_memory_before_it_is_committed_however_late_those_come_who_digest(
    tmp_path: Path, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    try_to_seal = Keeper.try_to_seal

    def late(keeper: Keeper, save: Save) -> None:
        if threading.current_thread().name == "laststep-finish":
            try_to_seal(keeper, save)

    monkeypatch.setattr(Keeper, "try_to_seal", late)
    tiers = [f"shm://{tmp_path}", str(run_folder)]
    with laststep.Checkpointer(
        tiers=tiers,
        state={"w": torch.ones(1000)},
        flush="thread",
        progress=False,
        host_memory_bytes=128 << 20,
    ) as ckpt:
        ckpt.restore()
        assert set(ckpt.save(1).result().tiers) == {"shm://", str(run_folder)}


def test_a_save_for_which_the_pool_cannot_grow_is_not_kept_and_its_slots_go_back(
    make: Callable[[int], list[Rank]], caplog: pytest.LogCaptureFixture
) -> None:
    (alone,) = make(1)
    save = alone.begin(1, chunks=5)
    for slot in range(3):
        alone.keeper.take(save, Filled(0, slot * CHUNK_BYTES, CHUNK_BYTES, slot))
    alone.keeper.limit(3)
    wait_until(lambda: sorted(alone.freed) == [0, 1, 2])
    assert not alone.keeper.take(save, Filled(0, 3 * CHUNK_BYTES, CHUNK_BYTES, 3))
    assert "does not fit" in caplog.text
    alone.ended(1, committed=True)
    alone.keeper.limit(SLOTS)
    alone.seal(2, chunks=5)
    assert alone.steps() == [2]


def test_where_the_pool_turns_out_too_small_for_two_the_older_goes(
    make: Callable[[int], list[Rank]],
) -> None:
    (alone,) = make(1)
    alone.seal(1, chunks=3)
    alone.ended(1, committed=True)
    alone.begin(2, chunks=3)
    assert alone.steps() == [1]
    alone.keeper.limit(5)
    assert alone.steps() == []
    assert sorted(alone.freed) == [0, 1, 2]
