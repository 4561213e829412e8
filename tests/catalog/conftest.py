"""A run in a folder of its own, and checkpoints for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from laststep.catalog.run import Run
from laststep.format.manifest import Commit, FileRecord, ItemRecord, Metric
from laststep.storage.directory import DirectoryStore
from laststep.testing.stores import write_file

if TYPE_CHECKING:
    from pathlib import Path

Save = Callable[..., str]
Saved = Callable[..., list[str]]


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
