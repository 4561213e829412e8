"""`laststep prune` on a run whose newest checkpoint is damaged."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from typer.testing import CliRunner

import laststep
from laststep.cli import app
from laststep.errors import CorruptError

if TYPE_CHECKING:
    from pathlib import Path


def test_prune_deletes_nothing_when_what_would_stay_is_damaged(run_folder: Path) -> None:
    state = {"a": torch.zeros(300_000)}
    with laststep.Checkpointer(
        run_folder, state=state, options=laststep.Options(flush="thread")
    ) as checkpointer:
        for step in range(3):
            checkpointer.save(step)
    newest = next(run_folder.glob("step-00000002*")) / "state.safetensors"
    data = bytearray(newest.read_bytes())
    data[-5] ^= 1
    newest.write_bytes(data)
    result = CliRunner().invoke(app, ["prune", str(run_folder), "--last", "1", "--yes"])
    assert isinstance(result.exception, CorruptError)
    assert len(list(run_folder.glob("step-*"))) == 3
