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

from laststep.plan import gather, shares
from laststep.plan.gather import Chunk, Stored, Wanted, chunks_of
from laststep.state.layouts import Box, Mesh, Replicate, Shard, Sharded, whole
from laststep.terms import BLOCK_BYTES, CHUNK_BYTES

_spec = importlib.util.spec_from_file_location(
    "job_properties", Path(__file__).with_name("test_job_properties.py")
)
jobs = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(jobs)
DTYPES, cut, described, held_by = jobs.DTYPES, jobs.cut, jobs.described, jobs.held_by


class Saved:
    """A checkpoint as ranks wrote it, in memory: the bytes of files, and what lies where."""

    def __init__(self, ranks: int, tensors: jobs.Described, arrays: list[np.ndarray]) -> None:
        agreement = jobs.agreement_of(jobs.tables(ranks, tensors))
        self.files: list[np.ndarray] = []
        self.stored: list[Stored] = []
        for rank in range(ranks):
            mine = [(int(name[1:]), share.box) for (_, name), share in agreement.shares(rank)]
            # As files are: large elements first, without holes.
            mine.sort(key=lambda one: -arrays[one[0]].itemsize)
            parts, at = [], 0
            for number, box in mine:
                data = np.ascontiguousarray(cut(arrays[number], box)).reshape(-1).view(np.uint8)
                place = (len(self.files), at, at + data.nbytes)
                self.stored.append(Stored(number, arrays[number].itemsize, *place, box))
                parts.append(data)
                at += data.nbytes
            if parts:
                self.files.append(np.concatenate(parts))
        self.stored.sort(key=lambda one: one.tensor)

    @property
    def sizes(self) -> list[int]:
        return [file.nbytes for file in self.files]


class Loaded:
    """What each rank wants of each tensor, and what has arrived of it."""

    def __init__(self, arrays: list[np.ndarray], wants: dict[int, Wanted]) -> None:
        self.wants = wants
        self.memory = {
            (number, rank, box): np.zeros(box.shape, arrays[number].dtype)
            for number, wanted in wants.items() for rank, boxes in wanted for box in boxes
        }  # fmt: skip
        self.times = {key: np.zeros(array.shape, int) for key, array in self.memory.items()}

    def take(self, chunk: Chunk, data: np.ndarray) -> None:
        for stored, box, at in chunk.boxes():
            size = box.volume * stored.itemsize
            assert at >= 0
            assert at + size <= data.nbytes
            for rank, boxes in self.wants.get(stored.tensor, []):
                for wanted in boxes:
                    common = box.meet(wanted)
                    if common is None:
                        continue
                    key = (stored.tensor, rank, wanted)
                    array = self.memory[key]
                    here = data[at : at + size].view(array.dtype).reshape(box.shape)
                    cut(array, common.within(wanted))[...] = cut(here, common.within(box))
                    cut(self.times[key], common.within(wanted))[...] += 1


def wants_bytes(saved: Saved, wants: dict[int, Wanted], rank: int) -> set[tuple[int, int]]:
    """Every byte of a file from the first to the last element that a rank wants of a stored box."""
    found: set[tuple[int, int]] = set()
    for one in saved.stored:
        for who, boxes in wants.get(one.tensor, []):
            for box in boxes if who == rank else ():
                common = one.box.meet(box)
                if common is not None and common.volume:
                    numbers = cut(np.arange(one.box.volume).reshape(one.box.shape),
                                  common.within(one.box))  # fmt: skip
                    low, high = int(numbers.min()), int(numbers.max()) + 1
                    start = one.start + low * one.itemsize
                    stop = one.start + high * one.itemsize
                    found.update((one.file, byte) for byte in range(start, stop))
    return found


@given(st.integers(1, 24), st.integers(1, 24), st.sampled_from((1, 64, 8 << 20)), st.data())
def test_every_wanted_byte_arrives_once_by_one_reader_who_wants_some(
    before: int, now: int, least: int, data: st.DataObject
) -> None:
    tensors = data.draw(described(before, most=4))
    arrays = [
        np.random.default_rng(n).integers(1, 250, shape).astype(DTYPES[dtype])
        for n, (dtype, shape, _) in enumerate(tensors)
    ]
    wants: dict[int, Wanted] = {}
    for number, (_, shape, _) in enumerate(tensors):
        mesh = data.draw(jobs.meshes(now))
        choice = data.draw(st.integers(0, 4))
        if choice == 0:
            continue  # nobody wants it
        plain = tuple(sorted(mesh.ranks()))
        ways = [plain if choice == 1 else data.draw(jobs.layouts(mesh, shape))]
        held = [(rank, tuple(held_by(rank, shape, ways))) for rank in range(now)]
        wants[number] = [(rank, boxes) for rank, boxes in held if boxes]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shares, "MIN_SHARE_BYTES", least)
        patch.setattr(gather, "BLOCK_BYTES", 16)
        patch.setattr(gather, "CHUNK_BYTES", 64)
        saved = Saved(before, tensors, arrays)
        read = {
            rank: chunks_of(rank, saved.stored, lambda n: wants.get(n, []), saved.sizes)
            for rank in range(now)
        }
    loaded = Loaded(arrays, wants)
    blocks: Counter[tuple[int, int]] = Counter()
    readers: dict[tuple[int, int], set[int]] = defaultdict(set)
    for rank, chunks in read.items():
        mine = wants_bytes(saved, wants, rank) if chunks else set()
        for chunk in chunks:
            readers[chunk.file, chunk.start // 64].add(rank)
            assert chunk.start % 16 == 0
            assert chunk.start < chunk.stop <= saved.sizes[chunk.file]
            assert any((chunk.file, byte) in mine for byte in range(chunk.start, chunk.stop))
            blocks.update((chunk.file, n) for n in range(chunk.start // 16, -(-chunk.stop // 16)))
            loaded.take(chunk, saved.files[chunk.file][chunk.start : chunk.stop])
    assert all(len(who) == 1 for who in readers.values())
    assert set(blocks.values()) <= {1}
    for (number, rank, box), array in loaded.memory.items():
        assert (loaded.times[number, rank, box] == 1).all()
        assert array.tobytes() == np.ascontiguousarray(cut(arrays[number], box)).tobytes()
    alone = {
        (chunk.file, chunk.start): rank
        for rank, chunks in read.items() for chunk in chunks if chunk.alone
    }  # fmt: skip
    for (file, start), rank in alone.items():
        for stored in (one for one in saved.stored if one.file == file):
            for who, boxes in wants.get(stored.tensor, []):
                if who != rank and stored.start < start + 64 and start < stored.stop:
                    within = wants_bytes(saved, wants, who)
                    chunk_bytes = range(start, start // 64 * 64 + 64)
                    assert not any((file, byte) in within for byte in chunk_bytes), boxes


def whole_tensor(rank_count: int, shape: tuple[int, ...], dim: int | None) -> Wanted:
    mesh = Mesh.of(("r",), (rank_count,), range(rank_count))
    layout = Sharded(shape, mesh, (Replicate() if dim is None else Shard(dim),))
    return [(rank, layout.held(rank)) for rank in range(rank_count)]


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
        stored.append(Stored(0, 4, len(sizes), 0, size, box))
        sizes += [size, beside] if beside else [size]
    wanted = whole_tensor(ranks, (rows, rows), dim)
    loads = [
        sum(chunk.stop - chunk.start for chunk in chunks_of(r, stored, lambda _: wanted, sizes))
        for r in range(ranks)
    ]
    assert sum(loads) == rows * rows * 4
    mean = sum(loads) / ranks
    assert max(loads) <= mean + 2 * CHUNK_BYTES


def test_what_nobody_wants_is_not_read() -> None:
    shape = (64, BLOCK_BYTES)
    stored = [Stored(0, 1, 0, 0, math.prod(shape), whole(shape))]
    wanted: Wanted = [(0, (Box((3, 0), (5, BLOCK_BYTES)),)), (1, (Box((20, 5), (21, 9)),))]
    found = [
        (rank, chunk.start // BLOCK_BYTES, -(-chunk.stop // BLOCK_BYTES))
        for rank in range(3)
        for chunk in chunks_of(rank, stored, lambda _: wanted, [math.prod(shape)])
    ]
    assert found == [(0, 3, 5), (1, 20, 21)]


def test_tensors_without_elements_take_no_reading() -> None:
    stored = [Stored(0, 4, 0, 0, 0, whole((3, 0))), Stored(1, 4, 0, 0, 8, whole((2,)))]
    wants = {0: [(0, (whole((3, 0)),))], 1: [(0, (whole((2,)),))]}
    (chunk,) = chunks_of(0, stored, lambda n: wants[n], [8])
    assert [one.tensor for one, _, _ in chunk.boxes()] == [1]


def test_ranks_that_want_the_same_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of many shards into as many whole copies: not every shard for every copy."""
    ranks, rows = 64, 64 * 64
    mesh = Mesh.of(("r",), (ranks,), range(ranks))
    layout = Sharded((rows, 1024), mesh, (Shard(0),))
    size = 4 * 1024 * rows // ranks
    stored = [
        Stored(number, 4, rank, number * size, (number + 1) * size, *layout.held(rank))
        for number in range(10)
        for rank in range(ranks)
    ]
    looked = 0
    ranges = gather._ranges

    def counting(one: Stored, boxes: tuple[Box, ...]) -> object:
        nonlocal looked
        looked += 1
        return ranges(one, boxes)

    monkeypatch.setattr(gather, "_ranges", counting)
    wanted = whole_tensor(ranks, (rows, 1024), None)
    chunks_of(5, stored, lambda _: wanted, [10 * size] * ranks)
    assert looked <= 4 * len(stored)
