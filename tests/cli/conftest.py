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

from laststep import cli
from laststep.catalog.names import AttemptName
from laststep.catalog.run import Run
from laststep.codecs import objects
from laststep.codecs.digests import block_digests, digest, digest_text
from laststep.format.header import Header, ObjectEntry, PartEntry, encode_header, reserve_bytes
from laststep.format.manifest import Commit, FileRecord, ItemRecord
from laststep.format.safetensors import TensorEntry
from laststep.memory import segments
from laststep.plan.files import tree_name
from laststep.storage.directory import DirectoryStore
from laststep.terms import CHUNK_BYTES
from laststep.tiers import sealed

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
        self._epoch = 0
        self._attempt = 0

    def start(self, continues: tuple[int, int] | None = None) -> int:
        """A new writer."""
        self._epoch = self.run.claim_epoch(continues)
        self._attempt = 0
        return self._epoch

    def save(
        self, step: int, metrics: dict[str, float] | None = None, *, commit: bool = True
    ) -> Path:
        """One checkpoint; its folder."""
        if not self._epoch:
            self.start()
        self._attempt += 1
        folder = self.run.begin(step=step, epoch=self._epoch, attempt=self._attempt)
        noise = random.Random(step).randbytes(WEIGHT_BYTES)
        model = self._file(folder, "model", [_row("weight", noise)])
        tree = objects.encode({"lr": 0.1, "step": step})
        trees = {tree_name("model"): objects.encode({}), tree_name("optimizer"): tree}
        shared = self._file(folder, None, [_row("optimizer/momentum", noise[:4000])], trees)
        items = (
            ItemRecord(
                name="model", kind="module", file=model.name, tensors=1, size_bytes=WEIGHT_BYTES
            ),
            ItemRecord(
                name="optimizer", kind="optimizer", file=shared.name, tensors=1, size_bytes=4000
            ),
        )
        if commit:
            self._commit(folder, step, items, (model, shared), metrics or {})
        return self.path / folder

    def seal(self, segment: Segment, step: int) -> str:
        """Leave a save in shared memory alone, as a flusher does; its folder in the run."""
        if not self._epoch:
            self.start()
        self._attempt += 1
        data = bytes(range(256)) * (SEALED_BYTES // 256)
        with Path(segment.pool_path).open("r+b") as pool:
            pool.truncate(CHUNK_BYTES)
            pool.write(data)
        entry = TensorEntry(
            name="w", dtype="uint8", shape=(SEALED_BYTES,), start=0, stop=SEALED_BYTES
        )
        file = sealed.SealedFile(
            name="state.safetensors", item="state", region_bytes=4096, tensor_bytes=SEALED_BYTES,
            entries=(entry,), parts={}, chunks=((0, 0),), digests=block_digests(memoryview(data)),
            objects=((tree_name("state"), _tree({}, "w")),),
        )  # fmt: skip
        item = ItemRecord(
            name="state", kind="value", file=file.name, tensors=1, size_bytes=SEALED_BYTES
        )
        at = AttemptName(step=step, epoch=self._epoch, attempt=self._attempt)
        save = sealed.SealedSave(
            run=self.run.id, at=at, created_s=1_700_000_000.0 + step, files=(file,), items=(item,),
            metrics=objects.encode({}), metadata=objects.encode(None), continues=None,
        )  # fmt: skip
        sealed.put(segment, save)
        return at.folder

    def save_by_ranks(self, step: int, ranks: int = 2) -> Path:
        """One checkpoint of several ranks, as they would write it; its folder.

        `model/weight`, of `WEIGHT_SHAPE`, is cut into rows. Of `place` each rank has its own: its
        position, `seen`, which is as long as the rank's number and one more, and `alike`.
        """
        if not self._epoch:
            self.start()
        self._attempt += 1
        folder = self.run.begin(step=step, epoch=self._epoch, attempt=self._attempt)
        files = []
        for rank in range(ranks):
            weight = _rows_of_weight(rank, ranks)
            trees = {tree_name("place"): _tree({"position": 10 + rank}, "seen", "alike")}
            if rank == 0:
                trees[tree_name("model")] = _tree({}, "weight")
            place = [_row("place/seen", _floats(rank, rank + 1)), _row("place/alike", bytes(40))]
            files.append(self._file(folder, "model", [weight], rank=rank))
            files.append(self._file(folder, None, place, trees, rank=rank))
        sizes = [4 * (rank + 1) + 40 for rank in range(ranks)]
        items = (
            ItemRecord(
                name="model", kind="module", file=files[0].name, tensors=1, size_bytes=WEIGHT_BYTES
            ),
            ItemRecord(
                name="place", kind="value", file=files[1].name, tensors=2 * ranks,
                size_bytes=sum(sizes), per_rank=True,
            ),
        )  # fmt: skip
        self._commit(folder, step, items, tuple(files), {}, ranks=ranks)
        return self.path / folder

    def _commit(
        self,
        folder: str,
        step: int,
        items: tuple[ItemRecord, ...],
        files: tuple[FileRecord, ...],
        metrics: dict[str, float],
        ranks: int = 1,
    ) -> None:
        commit = Commit(
            run=self.run.id,
            step=step,
            epoch=self._epoch,
            attempt=self._attempt,
            created_s=1_700_000_000.0 + step,
            laststep="0.1.0",
            items=items,
            files=files,
            metrics=dict(metrics),
            metadata={"note": "made for a test"},
            ranks=ranks,
        )
        self.run.commit(folder, commit)

    def _file(
        self,
        folder: str,
        item: str | None,
        tensors: list[Written],
        trees: dict[str, bytes] | None = None,
        *,
        rank: int | None = None,
    ) -> FileRecord:
        """A data file of float32 tensors and objects."""
        trees = trees or {}
        at = 0
        entries, stored = [], []
        for one in tensors:
            stop = at + len(one.data)
            entries.append(
                TensorEntry(name=one.name, dtype="float32", shape=one.shape, start=at, stop=stop)
            )
            at = stop
        parts = {one.name: one.part for one in tensors if one.part is not None}
        tensor_bytes = at
        for name, data in trees.items():
            stop = at + len(data)
            stored.append(ObjectEntry(name=name, start=at, stop=stop, digest=digest(data)))
            at = stop
        area = b"".join(one.data for one in tensors)
        region_bytes = reserve_bytes(
            item=item, tensors=entries, object_names=trees, tensor_bytes=tensor_bytes, parts=parts
        )
        header = Header(
            item=item,
            tensors=tuple(entries),
            objects=tuple(stored),
            tensor_bytes=tensor_bytes,
            blocks=block_digests(memoryview(area)),
            parts=parts,
        )
        region = encode_header(header, region_bytes=region_bytes)
        name = f"{item or 'shared'}{'' if rank is None else f'-r{rank:05d}'}.safetensors"
        whole = region + area + b"".join(trees.values())
        writer = self.run.store.open_writer(f"{folder}/{name}", expected_bytes=len(whole))
        writer.write_at(0, memoryview(whole))
        writer.finish(len(whole))
        return FileRecord(
            name=name,
            size_bytes=len(whole),
            header_bytes=region_bytes,
            header_digest=digest_text(region),
            rank=rank or 0,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A tensor as it is written to a file, or a part of one."""

    name: str
    data: bytes
    shape: tuple[int, ...]
    part: PartEntry | None = None


def _row(name: str, data: bytes) -> Written:
    return Written(name=name, data=data, shape=(len(data) // 4,))


def _floats(first: int, count: int) -> bytes:
    return struct.pack(f"<{count}f", *range(first, first + count))


def _rows_of_weight(rank: int, ranks: int) -> Written:
    rows, columns = WEIGHT_SHAPE
    first, last = rows * rank // ranks, rows * (rank + 1) // ranks
    return Written(
        name=f"weight~6at{first},0",
        data=_floats(first * columns, (last - first) * columns),
        shape=(last - first, columns),
        part=PartEntry("weight", WEIGHT_SHAPE, (first, 0)),
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
            [sys.executable, "-c", OWNER, base, str(run), str(rank), str(ranks)], text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
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
