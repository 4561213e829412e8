"""What a rank keeps in shared memory, and when it goes: the newest that all ranks have stays."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch

import laststep
from expect import warned
from laststep.catalog.attempt import Attempt, AttemptName
from laststep.codecs.digests import DIGEST_BYTES
from laststep.constants import BLOCK_BYTES, CHUNK_BYTES
from laststep.flush.listeners import FlusherSave, SlotHolds
from laststep.flush.memory_tier import MemoryTier
from laststep.flush.protocol import Begin, CaptureDone, Unchanged
from laststep.memory import segments
from laststep.memory.pool import Filled
from laststep.storage.directory import DirectoryStore
from laststep.tiers import snapshots
from saves_of import bytes_layout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

SLOTS = 8


class Writes:
    """In place of the files of a save."""

    def lossy(self, file: int) -> dict[str, str]:
        return {}


class Rank:
    """The memory tier of a rank, told what a flusher tells it."""

    def __init__(self, base: str, rank: int, ranks: int) -> None:
        size = SLOTS * CHUNK_BYTES
        self.segment, self.fd = segments.make(base, "run", rank=rank, ranks=ranks, size_bytes=size)
        self.freed: list[int] = []
        self._next = 0
        self._saves: dict[int, FlusherSave] = {}
        self.slots = SlotHolds(lambda message: self.freed.extend(message.slots))
        self._store = DirectoryStore(f"{base}/run")
        self.tier = MemoryTier(
            self.segment.folder,
            self._store,
            SimpleNamespace(run=SimpleNamespace(id="id"), last_folder=None, records=tuple),  # type: ignore[arg-type]
            self.slots,
            lambda _message: None,
            slots_there=SLOTS,
            is_gone=lambda: True,
            pool_fd=self.fd,
        )

    def begin(self, number: int, chunks: int = 1) -> FlusherSave:
        """A save of so many chunks is announced."""
        file = bytes_layout(chunks * CHUNK_BYTES, "a.safetensors")
        begin = Begin(save=number, step=number, overwrite=False, files=(file,), role="first")
        name = AttemptName(step=number, term=1, attempt=number)
        save = FlusherSave(begin=begin, attempt=Attempt(self._store, name))
        save.writer = Writes()  # type: ignore[assignment]
        self._saves[number] = save
        self.tier.begun(save)
        return save

    def take(self, save: FlusherSave, chunk: int, slot: int) -> None:
        """A chunk is digested, and then written."""
        self.slots.hold([slot])
        filled = Filled(0, chunk * CHUNK_BYTES, CHUNK_BYTES, slot)
        self.tier.chunk(save, filled, bytes(DIGEST_BYTES * (CHUNK_BYTES // BLOCK_BYTES)))
        self.slots.release([slot])

    def seal(self, number: int, chunks: int = 1) -> None:
        """It comes, and is whole."""
        save = self.begin(number, chunks)
        for chunk in range(chunks):
            self.take(save, chunk, self._next % SLOTS)
            self._next += 1
        save.captured = CaptureDone(
            save=number, values={}, items=(), metrics=b"{}", metadata=b"null"
        )
        self.tier.captured(save)

    def ended(self, number: int, *, committed: bool) -> None:
        (self.tier.committed if committed else self.tier.failed)(self._saves[number])

    def steps(self) -> list[int]:
        return [save.at.step for save in snapshots.records_in(self.segment)]

    def close(self) -> None:
        self.tier.close(at_once=False)
        os.close(self.fd)


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
    ranks[0].ended(2, committed=True)
    left = {segment.folder for segment in segments.found(str(tmp_path))}
    assert left == {ranks[0].segment.folder, dead.segment.folder}
    assert dead.steps() == [3]
    ranks[0].seal(4)
    ranks[0].ended(4, committed=True)
    assert [one.folder for one in segments.found(str(tmp_path))] == [ranks[0].segment.folder]


def test_when_the_trainer_is_gone_nothing_goes_any_more(make: Callable[[int], list[Rank]]) -> None:
    (alone,) = make(1)
    alone.seal(1, chunks=5)
    alone.begin(2, chunks=6)  # there is no room for both
    alone.tier.ending()
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
    assert first.tier.reusable(save, said) == said.chunks
    save.base = 1
    save.captured = CaptureDone(save=3, values={}, items=(), metrics=b"{}", metadata=b"null")
    first.tier.reuse(save, said.chunks)
    slots = {kept.at.step: kept.needed_slots for kept in snapshots.records_in(first.segment)}
    assert slots[3] == slots[1] != slots[2]


def test_a_save_of_nothing_is_in_memory_before_it_is_committed(
    tmp_path: Path, run_folder: Path
) -> None:
    tiers = [f"shm://{tmp_path}", str(run_folder)]
    with laststep.Checkpointer(
        tiers=tiers,
        state={"w": torch.ones(0)},
        options=laststep.Options(flush="thread", progress=False),
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
        alone.take(save, slot, slot)
    assert alone.freed == []
    alone.tier.limit(3)
    assert sorted(alone.freed) == [0, 1, 2]
    alone.take(save, 3, 3)
    assert sorted(alone.freed) == [0, 1, 2, 3]
    assert warned(caplog, 5 * CHUNK_BYTES)
    alone.ended(1, committed=True)
    alone.tier.limit(SLOTS)
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
    alone.tier.limit(5)
    assert alone.steps() == []
    assert sorted(alone.freed) == [0, 1, 2]
