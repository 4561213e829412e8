"""Runs for the commands to look at, made from the lower layers alone: no torch, no Checkpointer."""

from __future__ import annotations

import contextlib
import io
import json
import random
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from laststep import cli
from laststep.catalog.run import Run
from laststep.codecs import objects
from laststep.codecs.digests import block_digests, digest, digest_text
from laststep.format.header import (
    Header,
    ObjectEntry,
    TensorEntry,
    encode_header,
    reserve_bytes,
)
from laststep.format.manifest import Commit, FileRecord, ItemRecord
from laststep.storage.directory import DirectoryStore

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

WEIGHT_BYTES = 3_000_000


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
        model = self._file(folder, "model", {"weight": noise}, {})
        tree = objects.encode({"lr": 0.1, "step": step})
        trees = {"model/~4tree": objects.encode({}), "optimizer/~4tree": tree}
        shared = self._file(folder, None, {"optimizer/momentum": noise[:4000]}, trees)
        if commit:
            self.run.commit(
                folder,
                Commit(
                    run=self.run.id,
                    step=step,
                    epoch=self._epoch,
                    attempt=self._attempt,
                    created_s=1_700_000_000.0 + step,
                    laststep="0.1.0",
                    items=(
                        ItemRecord(
                            name="model",
                            kind="module",
                            file=model.name,
                            tensors=1,
                            size_bytes=WEIGHT_BYTES,
                        ),
                        ItemRecord(
                            name="optimizer",
                            kind="optimizer",
                            file=shared.name,
                            tensors=1,
                            size_bytes=4000,
                        ),
                    ),
                    files=(model, shared),
                    metrics=dict(metrics or {}),
                    metadata={"note": "made for a test"},
                ),
            )
        return self.path / folder

    def _file(
        self, folder: str, item: str | None, tensors: dict[str, bytes], trees: dict[str, bytes]
    ) -> FileRecord:
        """A data file of float32 tensors and objects."""
        at = 0
        entries, stored = [], []
        for name, data in tensors.items():
            shape = (len(data) // 4,)
            stop = at + len(data)
            entries.append(
                TensorEntry(name=name, dtype="float32", shape=shape, start=at, stop=stop)
            )
            at = stop
        tensor_bytes = at
        for name, data in trees.items():
            stop = at + len(data)
            stored.append(ObjectEntry(name=name, start=at, stop=stop, digest=digest(data)))
            at = stop
        area = b"".join(tensors.values())
        region_bytes = reserve_bytes(
            item=item, tensors=entries, object_names=trees, tensor_bytes=tensor_bytes
        )
        header = Header(
            item=item,
            tensors=tuple(entries),
            objects=tuple(stored),
            tensor_bytes=tensor_bytes,
            blocks=block_digests(memoryview(area)),
        )
        region = encode_header(header, region_bytes=region_bytes)
        name = f"{item or 'shared'}.safetensors"
        whole = region + area + b"".join(trees.values())
        writer = self.run.store.open_writer(f"{folder}/{name}", expected_bytes=len(whole))
        writer.write_at(0, memoryview(whole))
        writer.finish(len(whole))
        return FileRecord(
            name=name,
            size_bytes=len(whole),
            header_bytes=region_bytes,
            header_digest=digest_text(region),
        )


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
