"""A run in a folder of its own, and checkpoints for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import pytest

import attempts
from laststep.catalog.run import Run
from laststep.codecs import objects
from laststep.codecs.digests import block_digests
from laststep.format import index as index_format
from laststep.format.index import folder_of, index_name, written_of
from laststep.format.layout import FileLayout, TensorEntry
from laststep.format.manifest import Commit, ItemRecord, Metric, WrittenIndexes
from laststep.storage.directory import DirectoryStore
from laststep.testing.stores import write_file
from saves_of import whole_index

if TYPE_CHECKING:
    from pathlib import Path

Save = Callable[..., str]
Saved = Callable[..., list[str]]
Checkpoint = tuple[str, Commit]

SIZE = 5000
"""Of the data file of each rank."""
RANKS = 8
"""Of the checkpoints that `write` makes."""


class RankFiles(NamedTuple):
    """What a rank writes, by name within the checkpoint's folder, and what it reports of that."""

    data: str
    index: str
    content: dict[str, bytes]
    written: WrittenIndexes


def make_files(rank: int = 0, ranks: int = 1, origin: str = "") -> RankFiles:
    """A data file of one tensor, and the index of it; with an `origin`, the file is shared."""
    suffix = f"-r{rank:05d}" if ranks > 1 else ""
    name = f"{folder_of(rank, ranks)}m{suffix}.safetensors"
    tensor = bytes(SIZE - 4096)
    layout = FileLayout(
        name=name,
        item="model",
        header_bytes=4096,
        tensor_bytes=len(tensor),
        tensors=(TensorEntry(f"t{rank}", "uint8", (len(tensor),), 0, len(tensor)),),
    )
    tree = {"tree": {"t": objects.TensorRef(f"t{rank}")}, "ties": {}, "views": {}}
    values = {"model": objects.encode(tree)}
    index = whole_index(rank, [layout], [block_digests(memoryview(tensor))], values, [{}])
    if origin:
        file = msgspec.structs.replace(index.files[0], origin=origin, sharers=1)
        index = msgspec.structs.replace(index, files=(file,))
    data = index_format.encode(index)
    there = index_name(rank, ranks)
    content = {name: layout.header() + tensor, there: data}
    return RankFiles(name, there, content, written_of(index, data))


def make_commit(
    *, step: int, term: int, attempt: int, metrics: dict[str, Metric] | None = None
) -> Commit:
    """A sound commit of what `make_files` makes."""
    return Commit(
        run="0" * 32,
        step=step,
        term=term,
        attempt=attempt,
        created_s=1.0 * attempt,
        laststep="0",
        items=(ItemRecord(name="model", kind="t", tensors=1, size_bytes=8),),
        written=make_files().written,
        metrics=metrics or {},
    )


@pytest.fixture
def commit_of() -> Callable[..., Commit]:
    return make_commit


@pytest.fixture
def files_of() -> Callable[..., RankFiles]:
    return make_files


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore(tmp_path / "run")


@pytest.fixture
def run(store: DirectoryStore) -> Run:
    return Run.open_or_create(store)


@pytest.fixture
def save() -> Save:
    """Write and commit one checkpoint; returns its folder."""

    def act(
        run: Run, step: int, term: int, attempt: int, metrics: dict[str, Metric] | None = None
    ) -> str:
        folder = run.begin(step=step, term=term, attempt=attempt).folder
        for name, data in make_files().content.items():
            write_file(run.store, f"{folder}/{name}", data)
        attempts.commit(
            run, folder, make_commit(step=step, term=term, attempt=attempt, metrics=metrics)
        )
        return folder

    return act


@pytest.fixture
def saved(run: Run, save: Save) -> Saved:
    """`saved(10, 20, 30)`: these steps, by a new writer of the run; returns their folders."""

    def act(*steps: int, metrics: dict[str, Metric] | None = None) -> list[str]:
        term = run.claim_term(None)
        return [save(run, step, term, at, metrics) for at, step in enumerate(steps, 1)]

    return act


@pytest.fixture
def write(run: Run, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Checkpoint]:
    """Write and commit a checkpoint of eight ranks; its folder, and its commit. `deep`: the files
    lie in folders, each of four ranks. With an `origin`, the data files of the first two ranks are
    linked from there."""
    term = run.claim_term(None)

    def act(
        step: int = 1, *, deep: bool = False, commit: bool = True, origin: str = ""
    ) -> Checkpoint:
        if deep:
            monkeypatch.setattr(index_format, "FLAT_RANKS", RANKS - 1)
            monkeypatch.setattr(index_format, "_RANKS_PER_FOLDER", RANKS // 2)
        folder = run.begin(step=step, term=term, attempt=step).folder
        for place in {folder_of(rank, RANKS): None for rank in range(RANKS)} if deep else ():
            run.store.make_folder(f"{folder}/{place}".rstrip("/"), parents=False)
        written = WrittenIndexes()
        for rank in range(RANKS):
            linked = origin if rank < 2 else ""
            files = make_files(rank, RANKS, linked)
            for name, data in files.content.items():
                if linked and name == files.data:
                    assert run.store.link(f"{linked}/{name}", f"{folder}/{name}")
                else:
                    write_file(run.store, f"{folder}/{name}", data)
            written = written.plus(files.written)
        decided = make_commit(step=step, term=term, attempt=step)
        decided = msgspec.structs.replace(decided, written=written, ranks=RANKS)
        if commit:
            attempts.commit(run, folder, decided)
        return folder, decided

    return act
