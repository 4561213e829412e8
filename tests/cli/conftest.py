"""Runs for the commands to look at, made from the lower layers alone: no torch, no Checkpointer."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import attempts
from laststep import cli
from laststep.catalog.attempt import AttemptName
from laststep.catalog.run import Run
from laststep.codecs import objects
from laststep.codecs.digests import block_digests
from laststep.constants import CHUNK_BYTES
from laststep.format import index as index_format
from laststep.format.index import index_name, written_of
from laststep.format.layout import FileLayout, Part, TensorEntry, header_bytes_of
from laststep.format.manifest import Commit, ItemRecord, WrittenIndexes
from laststep.memory import segments
from laststep.storage.directory import DirectoryStore
from laststep.testing.stores import write_file
from laststep.tiers import snapshots
from saves_of import whole_index

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from laststep.memory.segments import Segment

ROOT = Path(__file__).resolve().parents[2]
OWNER = """
import os, sys
from laststep.memory import segments

base, run, rank, ranks = sys.argv[1:]
segment, fd = segments.make(base, run, rank=int(rank), ranks=int(ranks), size_bytes=16 << 20)
print(segment.folder, flush=True)
sys.stdin.read()
"""

SEALED_BYTES = 3 << 20
WEIGHT_BYTES = 3_000_000
WEIGHT_SHAPE = (750, 1000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a command ended and what it said."""

    status: int
    out: str
    err: str

    def json(self) -> dict[str, object]:
        document = json.loads(self.out)
        assert document.pop("schema") == 1
        return document


class RunMaker:
    """Writes checkpoints of a small made-up state into a run, one after the other."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.run = Run.open_or_create(DirectoryStore(path, direct=False))
        self._term = 0
        self._attempt = 0

    def start(self, continues: tuple[int, int] | None = None) -> int:
        """A new writer."""
        self._term = self.run.claim_term(continues)
        self._attempt = 0
        return self._term

    def save(
        self, step: int, metrics: dict[str, float] | None = None, *, commit: bool = True
    ) -> Path:
        """One checkpoint; its folder."""
        if not self._term:
            self.start()
        self._attempt += 1
        folder = self.run.begin(step=step, term=self._term, attempt=self._attempt).folder
        noise = random.Random(step).randbytes(WEIGHT_BYTES)
        tree = objects.encode({"lr": 0.1, "step": step})
        written = self._write(
            folder,
            {"model": [_row("weight", noise)], None: [_row("optimizer/momentum", noise[:4000])]},
            {"model": objects.encode({}), "optimizer": tree},
        )
        items = (
            ItemRecord(name="model", kind="module", tensors=1, size_bytes=WEIGHT_BYTES),
            ItemRecord(name="optimizer", kind="optimizer", tensors=1, size_bytes=4000),
        )
        if commit:
            self._commit(folder, step, items, written, metrics or {})
        return self.path / folder

    def save_values(self, step: int, values: dict[str, object]) -> Path:
        """One checkpoint of plain values and one small tensor, `w`; its folder."""
        if not self._term:
            self.start()
        self._attempt += 1
        folder = self.run.begin(step=step, term=self._term, attempt=self._attempt).folder
        tensors: dict[str | None, list[MadeTensor]] = {"state": [_row("w", bytes(4))]}
        written = self._write(folder, tensors, {"state": _tree(values, "w")})
        items = (ItemRecord(name="state", kind="value", tensors=1, size_bytes=4),)
        self._commit(folder, step, items, written, {})
        return self.path / folder

    def seal(self, segment: Segment, step: int) -> str:
        """Leave a save in shared memory alone, as a flusher does; its folder in the run."""
        if not self._term:
            self.start()
        self._attempt += 1
        data = bytes(range(256)) * (SEALED_BYTES // 256)
        with Path(segment.pool_path).open("r+b") as pool:
            pool.truncate(CHUNK_BYTES)
            pool.write(data)
        layout = _layout("state.safetensors", "state", [_bytes("w", data)])
        sums = block_digests(memoryview(data))
        stored = snapshots.in_slots(layout, [0], sums, {})
        item = ItemRecord(name="state", kind="value", tensors=1, size_bytes=SEALED_BYTES)
        at = AttemptName(step=step, term=self._term, attempt=self._attempt)
        save = snapshots.SnapshotRecord(
            run=self.run.id,
            at=at,
            created_s=1_700_000_000.0 + step,
            index=snapshots.pool_index(0, [stored], {"state": _tree({}, "w")}),
            items=(item,),
            metrics=objects.encode({}),
            metadata=objects.encode(None),
            continues=None,
        )
        snapshots.put(segment, save)
        return at.folder

    def save_by_ranks(self, step: int, ranks: int = 2) -> Path:
        """One checkpoint of several ranks, as they would write it; its folder.

        `model/weight`, of `WEIGHT_SHAPE`, is cut into rows. Of `place` each rank has its own: its
        position, `seen`, which is as long as the rank's number and one more, and `alike`.
        """
        if not self._term:
            self.start()
        self._attempt += 1
        folder = self.run.begin(step=step, term=self._term, attempt=self._attempt).folder
        written = WrittenIndexes()
        for rank in range(ranks):
            trees = {"place": _tree({"position": 10 + rank}, "seen", "alike")}
            if rank == 0:
                trees["model"] = _tree({}, "weight")
            place = [_row("place/seen", _floats(rank, rank + 1)), _row("place/alike", bytes(40))]
            tensors = {"model": [_rows_of_weight(rank, ranks)], None: place}
            written = written.plus(self._write(folder, tensors, trees, (rank, ranks)))
        sizes = [4 * (rank + 1) + 40 for rank in range(ranks)]
        items = (
            ItemRecord(name="model", kind="module", tensors=1, size_bytes=WEIGHT_BYTES),
            ItemRecord(
                name="place", kind="value", tensors=2 * ranks, size_bytes=sum(sizes), per_rank=True
            ),
        )
        self._commit(folder, step, items, written, {}, ranks=ranks)
        return self.path / folder

    def _commit(
        self,
        folder: str,
        step: int,
        items: tuple[ItemRecord, ...],
        written: WrittenIndexes,
        metrics: dict[str, float],
        ranks: int = 1,
    ) -> None:
        commit = Commit(
            run=self.run.id,
            step=step,
            term=self._term,
            attempt=self._attempt,
            created_s=1_700_000_000.0 + step,
            laststep="0.1.0",
            items=items,
            written=written,
            metrics=dict(metrics),
            metadata={"note": "made for a test"},
            ranks=ranks,
        )
        attempts.commit(self.run, folder, commit)

    def _write(
        self,
        folder: str,
        tensors: dict[str | None, list[MadeTensor]],
        trees: dict[str, bytes],
        rank: tuple[int, int] = (0, 1),
    ) -> WrittenIndexes:
        """The data files of one rank, by item, and its index."""
        layouts, digests = [], []
        for item, made in tensors.items():
            mine = f"-r{rank[0]:05d}" if rank[1] > 1 else ""
            layouts.append(_layout(f"{item or 'shared'}{mine}.safetensors", item, made))
            area = b"".join(tensor.data for tensor in made)
            digests.append(block_digests(memoryview(area)))
            write_file(self.run.store, f"{folder}/{layouts[-1].name}", layouts[-1].header() + area)
        index = whole_index(rank[0], layouts, digests, trees, [{}] * len(layouts))
        data = index_format.encode(index)
        write_file(self.run.store, f"{folder}/{index_name(*rank)}", data)
        return written_of(index, data)


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeTensor:
    """A tensor as it is written to a file, or a part of one."""

    name: str
    data: bytes
    shape: tuple[int, ...]
    dtype: str = "float32"
    part: Part | None = None


def _layout(name: str, item: str | None, tensors: list[MadeTensor]) -> FileLayout:
    at, entries = 0, []
    for tensor in tensors:
        stop = at + len(tensor.data)
        entries.append(TensorEntry(tensor.name, tensor.dtype, tensor.shape, at, stop))
        at = stop
    return FileLayout(
        name=name,
        item=item,
        header_bytes=header_bytes_of(entries),
        tensor_bytes=at,
        tensors=tuple(entries),
        parts={tensor.name: tensor.part for tensor in tensors if tensor.part is not None},
    )


def _bytes(name: str, data: bytes) -> MadeTensor:
    return MadeTensor(name=name, data=data, shape=(len(data),), dtype="uint8")


def _row(name: str, data: bytes) -> MadeTensor:
    return MadeTensor(name=name, data=data, shape=(len(data) // 4,))


def _floats(first: int, count: int) -> bytes:
    return struct.pack(f"<{count}f", *range(first, first + count))


def _rows_of_weight(rank: int, ranks: int) -> MadeTensor:
    rows, columns = WEIGHT_SHAPE
    first, last = rows * rank // ranks, rows * (rank + 1) // ranks
    return MadeTensor(
        name=f"weight~6at{first},0",
        data=_floats(first * columns, (last - first) * columns),
        shape=(last - first, columns),
        part=Part("weight", WEIGHT_SHAPE, (first, 0)),
    )


def _tree(values: dict[str, object], *tensors: str) -> bytes:
    tree = {**values, **{name: objects.TensorRef(name) for name in tensors}}
    return objects.encode({"tree": tree, "ties": {}, "views": {}})


@pytest.fixture
def maker(run_folder: Path) -> RunMaker:
    """An empty run to write checkpoints into."""
    return RunMaker(run_folder)


@pytest.fixture
def laststep(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ended]:
    """Run a command as a shell would, but in this process: through `main`, with both streams."""

    def run(*arguments: object) -> Ended:
        out, err = io.StringIO(), io.StringIO()
        monkeypatch.setattr(sys, "argv", ["laststep", *map(str, arguments)])
        status = 0
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                cli.main()
            except SystemExit as end:
                status = end.code if isinstance(end.code, int) else int(end.code is not None)
        return Ended(status=status, out=out.getvalue(), err=err.getvalue())

    return run


@pytest.fixture
def base(tmp_path: Path) -> str:
    """Where shared memory lies; any folder will do."""
    place = tmp_path / "shm"
    place.mkdir()
    return str(place)


class Owner:
    """A process that has a segment, until it is killed."""

    def __init__(self, base: str, run: Path, rank: int, ranks: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", OWNER, base, str(run), str(rank), str(ranks)],
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self.process.stdout is not None
        self.segment = segments.opened(self.process.stdout.readline().strip())

    def die(self) -> Segment:
        self.process.kill()
        self.process.communicate()
        return self.segment


@pytest.fixture
def own(base: str, maker: RunMaker) -> Iterator[Callable[..., Owner]]:
    """Start a process that has a segment of the run."""
    owners: list[Owner] = []

    def start(rank: int = 0, ranks: int = 1) -> Owner:
        owners.append(Owner(base, maker.path, rank, ranks))
        return owners[-1]

    yield start
    for owner in owners:
        owner.die()
