"""A run in a folder of its own, and checkpoints for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
import pytest

from laststep.catalog import groups
from laststep.catalog.run import Run
from laststep.format.group import GroupManifest
from laststep.format.manifest import Commit, FileRecord, ItemRecord, Metric
from laststep.storage.directory import DirectoryStore
from laststep.testing.stores import write_file

if TYPE_CHECKING:
    from pathlib import Path

Save = Callable[..., str]
Saved = Callable[..., list[str]]
Written = tuple[str, Commit]

SIZE = 5000
"""Of the file of each rank."""


def make_file(rank: int, *, deep: bool) -> FileRecord:
    """The file of a rank, in a folder of four ranks or beside the manifest."""
    folder = f"r{rank - rank % 4:05d}/" if deep else ""
    return FileRecord(
        name=f"{folder}m-r{rank:05d}.safetensors", size_bytes=SIZE, header_bytes=4096,
        header_digest="xxh3-128:" + "0" * 32, rank=rank,
    )  # fmt: skip


def make_commit(
    *,
    step: int,
    epoch: int,
    attempt: int,
    metrics: dict[str, Metric] | None = None,
    references: tuple[str, ...] = (),
) -> Commit:
    """A sound commit of one small file."""
    return Commit(
        run="0" * 32,
        step=step,
        epoch=epoch,
        attempt=attempt,
        created_s=1.0 * attempt,
        laststep="0",
        items=(ItemRecord(name="model", kind="t", file="m.safetensors", tensors=1, size_bytes=8),),
        files=(
            FileRecord(
                name="m.safetensors",
                size_bytes=5000,
                header_bytes=4096,
                header_digest="xxh3-128:" + "0" * 32,
            ),
        ),
        metrics=metrics or {},
        references=references,
    )


@pytest.fixture
def commit_of() -> Callable[..., Commit]:
    return make_commit


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
        run: Run,
        step: int,
        epoch: int,
        attempt: int,
        metrics: dict[str, Metric] | None = None,
        references: tuple[str, ...] = (),
    ) -> str:
        folder = run.begin(step=step, epoch=epoch, attempt=attempt)
        write_file(run.store, f"{folder}/m.safetensors", bytes([step % 256]) * 5000)
        commit = make_commit(
            step=step, epoch=epoch, attempt=attempt, metrics=metrics, references=references
        )
        run.commit(folder, commit)
        return folder

    return act


@pytest.fixture
def saved(run: Run, save: Save) -> Saved:
    """`saved(10, 20, 30)`: these steps, by a new writer of the run; returns their folders."""

    def act(*steps: int, metrics: dict[str, Metric] | None = None) -> list[str]:
        epoch = run.claim_epoch(None)
        return [save(run, step, epoch, at, metrics) for at, step in enumerate(steps, 1)]

    return act


@pytest.fixture
def file_of() -> Callable[..., FileRecord]:
    return make_file


@pytest.fixture
def write(run: Run) -> Callable[..., Written]:
    """Write and commit a checkpoint of eight ranks in four groups; its folder, and its commit. With
    an `origin`, the files of the first group are linked from there."""
    epoch = run.claim_epoch(None)

    def act(step: int = 1, *, deep: bool = False, commit: bool = True, origin: str = "") -> Written:
        folder = run.begin(step=step, epoch=epoch, attempt=step)
        for place in ("r00000", "r00004") if deep else ():
            run.store.make_folder(f"{folder}/{place}", parents=False)
        records = []
        for first in range(0, 8, 2):
            files = (make_file(first, deep=deep), make_file(first + 1, deep=deep))
            for one in files:
                if origin and first == 0:
                    assert run.store.link(f"{origin}/{one.name}", f"{folder}/{one.name}")
                else:
                    write_file(run.store, f"{folder}/{one.name}", bytes(SIZE))
            if origin and first == 0:
                files = tuple(msgspec.structs.replace(one, origin=origin) for one in files)
            manifest = GroupManifest(
                step=step, epoch=epoch, attempt=step, first=first, ranks=2, files=files
            )
            records.append(groups.write(run.store, folder, manifest))
        decided = make_commit(step=step, epoch=epoch, attempt=step)
        item = msgspec.structs.replace(decided.items[0], file=make_file(0, deep=deep).name)
        decided = msgspec.structs.replace(
            decided, files=(), groups=tuple(records), ranks=8, items=(item,)
        )
        if commit:
            run.commit(folder, decided)
        return folder, decided

    return act
