"""Any layout that was saved, into any that loads: every wanted byte arrives once, every chunk has
one reader, and that is one who wants something of it."""

from __future__ import annotations

import importlib.util
import math
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from laststep.constants import BLOCK_BYTES, CHUNK_BYTES
from laststep.plan import reads, who_reads, who_writes
from laststep.plan.reads import Chunk, FileBox, chunks_of
from laststep.plan.who_reads import (
    Ledger,
    RankRequest,
    ReadRequests,
    decode_request,
    encode_request,
    known_sources,
)
from laststep.state.boxes import Box, whole
from laststep.state.layouts import Layout, Mesh, Replicate, Shard, Sharded

_spec = importlib.util.spec_from_file_location(
    "tables_properties", Path(__file__).with_name("test_layouts_properties.py")
)
jobs = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(jobs)
DTYPES, cut, described, held_by = jobs.DTYPES, jobs.cut, jobs.described, jobs.held_by


Wanted = list[tuple[int, tuple[Box, ...]]]
"""The ranks that want something of a tensor, in order, and which boxes of it."""


def wants_of(rank_requests: list[RankRequest], shapes: list[tuple[int, ...]]) -> ReadRequests:
    """What all ranks want, as they would tell each other."""
    told = [encode_request(rank_request) for rank_request in rank_requests]
    distinct = list(dict.fromkeys(told))
    group_of = {rank: distinct.index(one) for rank, one in enumerate(told)}
    return ReadRequests([decode_request(one) for one in distinct], group_of, shapes)


def read_by(
    rank: int,
    stored: list[FileBox],
    sizes: list[int],
    requests: ReadRequests,
    ledger: Ledger | None = None,
    each: int = 1,
) -> list[Chunk]:
    """The chunks that a rank reads where every rank wrote so many files: of all, or of what a
    ledger says."""
    by_writer: dict[int, list[FileBox]] = {}
    for one in stored:
        by_writer.setdefault(one.file // each, []).append(one)
    found = []
    lengths = dict(enumerate(sizes))
    whose = known_sources(by_writer, requests) if ledger is None else ledger.sources(rank)
    for source in whose:
        if rank in source.readers:
            found += chunks_of(rank, source, by_writer[source.writer], requests, lengths)
    return found


class Saved:
    """A checkpoint as ranks wrote it, in memory: the bytes of files, and what lies where."""

    def __init__(self, ranks: int, tensors: jobs.Described, arrays: list[np.ndarray]) -> None:
        global_layout = self.global_layout = jobs.global_layout_of(
            jobs.local_layouts(ranks, tensors)
        )
        self.files: list[np.ndarray] = []
        self.stored: list[FileBox] = []
        for rank in range(ranks):
            mine = [
                (int(name[1:]), share.box) for (_, name), share in global_layout.assignments(rank)
            ]
            # As files are: large elements first, without holes.
            mine.sort(key=lambda one: -arrays[one[0]].itemsize)
            parts, at = [], 0
            for number, box in mine:
                data = np.ascontiguousarray(cut(arrays[number], box)).reshape(-1).view(np.uint8)
                place = (len(self.files), at, at + data.nbytes)
                self.stored.append(FileBox(number, arrays[number].itemsize, *place, box))
                parts.append(data)
                at += data.nbytes
            self.files.append(np.concatenate(parts) if parts else np.empty(0, np.uint8))
        self.stored.sort(key=lambda one: one.tensor)

    @property
    def sizes(self) -> list[int]:
        return [file.nbytes for file in self.files]


class Loaded:
    """What each rank wants of each tensor, and what has arrived of it."""

    def __init__(self, arrays: list[np.ndarray], requests: dict[int, Wanted]) -> None:
        self.requests = requests
        self.memory = {
            (number, rank, box): np.zeros(box.shape, arrays[number].dtype)
            for number, wanted in requests.items()
            for rank, boxes in wanted
            for box in boxes
        }
        self.times = {key: np.zeros(array.shape, int) for key, array in self.memory.items()}

    def take(self, chunk: Chunk, data: np.ndarray) -> None:
        for stored, box, at in chunk.boxes():
            size = box.volume * stored.itemsize
            assert at >= 0
            assert at + size <= data.nbytes
            for rank, boxes in self.requests.get(stored.tensor, []):
                for wanted in boxes:
                    common = box.meet(wanted)
                    if common is None:
                        continue
                    key = (stored.tensor, rank, wanted)
                    array = self.memory[key]
                    here = data[at : at + size].view(array.dtype).reshape(box.shape)
                    cut(array, common.within(wanted))[...] = cut(here, common.within(box))
                    cut(self.times[key], common.within(wanted))[...] += 1


@given(
    st.integers(1, 24),
    st.integers(1, 24),
    st.sampled_from((1, 64, 8 << 20)),
    st.sampled_from((2, 16)),
    st.booleans(),
    st.sampled_from((16, 48, 64)),
    st.data(),
)
def test_every_wanted_byte_arrives_once_by_one_reader(
    before: int, now: int, least: int, few: int, by_ledger: bool, slot: int, data: st.DataObject
) -> None:
    tensors = data.draw(described(before, most=4))
    # In the order in which the ranks that wrote it count them.
    global_layout = jobs.global_layout_of(jobs.local_layouts(before, tensors))
    tensors = [tensors[int(name[1:])] for _, name in global_layout.keys]
    arrays = [
        np.random.default_rng(n).integers(1, 250, shape).astype(DTYPES[dtype])
        for n, (dtype, shape, _) in enumerate(tensors)
    ]
    requests: dict[int, Wanted] = {}
    rank_requests: list[RankRequest] = [{} for _ in range(now)]
    for number, (_, shape, _) in enumerate(tensors):
        mesh = data.draw(jobs.meshes(now))
        choice = data.draw(st.integers(0, 4))
        if choice == 0:
            continue  # nobody wants it
        plain = tuple(sorted(mesh.ranks()))
        way: Layout | tuple[int, ...] = (
            plain if choice == 1 else data.draw(jobs.layouts(mesh, shape))
        )
        # Now and then not all of a mesh want their part.
        without = data.draw(st.sampled_from((None, None, plain[0])))
        held = [(rank, tuple(held_by(rank, shape, [way]))) for rank in range(now)]
        requests[number] = [(rank, boxes) for rank, boxes in held if boxes and rank != without]
        for rank in plain:
            if rank != without:
                rank_requests[rank][number] = None if choice == 1 else way
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(who_writes, "MIN_ASSIGNMENT_BYTES", least)
        patch.setattr(reads, "BLOCK_BYTES", 16)
        patch.setattr(reads, "CHUNK_BYTES", 64)
        patch.setattr(who_reads, "CHUNK_BYTES", 64)
        patch.setattr(who_reads, "FEW_READERS", few)
        saved = Saved(before, tensors, arrays)
        every = wants_of(rank_requests, [shape for _, shape, _ in tensors])
        assert [name for _, name in saved.global_layout.keys] == [
            f"w{n}" for n in range(len(tensors))
        ]
        ledger = Ledger(saved.global_layout.spreads, every) if by_ledger else None
        read = {
            rank: read_by(rank, saved.stored, saved.sizes, every, ledger) for rank in range(now)
        }
    loaded = Loaded(arrays, requests)
    blocks: Counter[tuple[int, int]] = Counter()
    readers: dict[tuple[int, int], set[int]] = defaultdict(set)
    for rank, chunks in read.items():
        for chunk in (part for all_of_it in chunks for part in all_of_it.cut(slot)):
            readers[chunk.file, chunk.start // 64].add(rank)
            assert chunk.start % 16 == 0
            assert chunk.start < chunk.stop <= saved.sizes[chunk.file]
            assert chunk.stop - chunk.start <= slot
            blocks.update((chunk.file, n) for n in range(chunk.start // 16, -(-chunk.stop // 16)))
            loaded.take(chunk, saved.files[chunk.file][chunk.start : chunk.stop])
    assert all(len(who) == 1 for who in readers.values())
    assert set(blocks.values()) <= {1}
    for (number, rank, box), array in loaded.memory.items():
        assert (loaded.times[number, rank, box] == 1).all()
        assert array.tobytes() == np.ascontiguousarray(cut(arrays[number], box)).tobytes()


def whole_tensor(rank_count: int, shape: tuple[int, ...], dim: int | None) -> ReadRequests:
    mesh = Mesh.of(("r",), (rank_count,), range(rank_count))
    layout = Sharded(shape, mesh, (Replicate() if dim is None else Shard(dim),))
    return wants_of([dict.fromkeys(range(10), layout)] * rank_count, [shape] * 10)


@pytest.mark.parametrize(("ranks", "dim"), [(4, 0), (4, 1), (4, None), (64, 0), (3, 1)])
@pytest.mark.parametrize("files", [1, 4, 6])
@pytest.mark.parametrize("beside", [0, 4096])
def test_ranks_read_about_as_much_each(
    ranks: int, dim: int | None, files: int, beside: int
) -> None:
    """Large tensors in files of each rank, with a small file beside each or not."""
    rows = 12_288
    each = rows // files
    size = each * rows * 4
    stored, sizes = [], []
    for n in range(files):
        box = Box((n * each, 0), ((n + 1) * each, rows))
        stored.append(FileBox(0, 4, len(sizes), 0, size, box))
        sizes += [size, beside] if beside else [size]
    requests = whole_tensor(ranks, (rows, rows), dim)
    each_writes = 2 if beside else 1
    loads = [
        sum(
            chunk.stop - chunk.start
            for chunk in read_by(r, stored, sizes, requests, each=each_writes)
        )
        for r in range(ranks)
    ]
    assert sum(loads) == rows * rows * 4
    mean = sum(loads) / ranks
    assert max(loads) <= mean + 2 * CHUNK_BYTES


def test_what_nobody_wants_is_not_read() -> None:
    shape = (64, BLOCK_BYTES)
    stored = [FileBox(0, 1, 0, 0, math.prod(shape), whole(shape))]
    # Of 32 ranks, which have two rows each, two want theirs.
    mesh = Mesh.of(("r",), (32,), range(32))
    layout = Sharded(shape, mesh, (Shard(0),))
    requests = wants_of([{0: layout} if rank in (1, 10) else {} for rank in range(32)], [shape])
    found = [
        (rank, chunk.start // BLOCK_BYTES, -(-chunk.stop // BLOCK_BYTES))
        for rank in range(32)
        for chunk in read_by(rank, stored, [math.prod(shape)], requests)
    ]
    assert found == [(1, 2, 4), (10, 20, 22)]


def test_tensors_without_elements_take_no_reading() -> None:
    stored = [FileBox(0, 4, 0, 0, 0, whole((3, 0))), FileBox(1, 4, 0, 0, 8, whole((2,)))]
    requests = wants_of([{0: None, 1: None}], [(3, 0), (2,)])
    (chunk,) = read_by(0, stored, [8], requests)
    assert [one.tensor for one, _, _ in chunk.boxes()] == [1]


def test_ranks_that_want_the_same_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of many shards into as many whole copies: not every shard for every copy."""
    ranks, rows = 64, 64 * 64
    mesh = Mesh.of(("r",), (ranks,), range(ranks))
    layout = Sharded((rows, 1024), mesh, (Shard(0),))
    size = 4 * 1024 * rows // ranks
    stored = [
        FileBox(number, 4, rank, number * size, (number + 1) * size, *layout.held(rank))
        for number in range(10)
        for rank in range(ranks)
    ]
    looked = 0
    ranges = reads.requested_ranges

    def counting(one: FileBox, boxes: tuple[Box, ...]) -> object:
        nonlocal looked
        looked += 1
        return ranges(one, boxes)

    monkeypatch.setattr(reads, "requested_ranges", counting)
    requests = whole_tensor(ranks, (rows, 1024), None)
    read_by(5, stored, [10 * size] * ranks, requests)
    assert looked <= 4 * len(stored)


@pytest.mark.parametrize("ranks", [40, 64, 100])
@pytest.mark.parametrize("writers", [16, 64, 256])
def test_of_many_files_that_all_want_each_rank_reads_about_two(ranks: int, writers: int) -> None:
    """Every rank held all and holds all: the files, one for each rank, are of gigabytes."""
    shape = (writers * 16, 8 << 20)
    mesh = Mesh.of(("rank",), (writers,), range(writers))
    spread = who_writes.Spread(4, (Sharded(shape, mesh, (Replicate(),)),))
    requests = wants_of([{0: None}] * ranks, [shape])
    ledger = Ledger([spread], requests)
    sources_of = [list(ledger.sources(rank)) for rank in range(ranks)]
    found = Counter(source.writer for some in sources_of for source in some)
    assert set(found) == set(range(writers))
    assert all(rank in one.readers for rank, some in enumerate(sources_of) for one in some)
    by_writer = {one.writer: one.readers for some in sources_of for one in some}
    assert found == {writer: len(readers) for writer, readers in by_writer.items()}
    most = max(len(some) for some in sources_of)
    assert most <= 2 * -(-writers // ranks) + 1
    assert most - min(len(some) for some in sources_of) <= 1
