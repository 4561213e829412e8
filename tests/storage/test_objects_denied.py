"""A bucket that denies access, as after a token has expired: that is no damage."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import fake_s3
import pytest
import torch
from typer.testing import CliRunner

import laststep
from laststep import events
from laststep.cli import app
from laststep.errors import StorageError
from laststep.tiers import replicating

sys.path.insert(0, str(Path(__file__).parents[1]))
from waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

URL = "s3://bucket/run"
ALWAYS = 1 << 20


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[fake_s3.Server]:
    """A server with a run of one step."""
    with fake_s3.named(monkeypatch) as state:
        with laststep.Checkpointer(
            URL, s=torch.ones(100), options=laststep.Options(progress=False, flush="thread")
        ) as ckpt:
            ckpt.save(1).result()
        yield state


def test_verify_reports_the_denial_and_no_damage(server: fake_s3.Server) -> None:
    server.fail("denied", "GET", ALWAYS, key=".safetensors")
    with pytest.raises(StorageError):
        laststep.open(URL).latest().verify()
    ended = CliRunner().invoke(app, ["verify", URL])
    assert isinstance(ended.exception, StorageError)
    assert "DAMAGED" not in ended.output


@pytest.mark.parametrize("after", [0, 1])  # the first read is that of the header
def test_copy_reports_the_denial_and_no_damage(
    server: fake_s3.Server, tmp_path: Path, after: int
) -> None:
    server.fail("denied", "GET", ALWAYS, key=".safetensors", after=after)
    with pytest.raises(StorageError):
        laststep.copy(URL, tmp_path / "copy")
    server.faults.clear()
    laststep.copy(URL, tmp_path / "copy")
    assert laststep.open(tmp_path / "copy").latest().verify().damage == ()


def test_a_replication_that_was_denied_is_tried_again(
    server: fake_s3.Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicating, "_FIRST_PAUSE_S", 0.01)
    heard: list[events.Event] = []
    replica = tmp_path / "replica"
    with laststep.Checkpointer(
        tiers=[URL, str(replica)],
        s=torch.zeros(100),
        options=laststep.Options(progress=False, flush="thread", subscribers=[heard.append]),
    ) as ckpt:
        ckpt.restore()
        wait_until(lambda: any(is_of(event, 1) for event in heard))
        server.fail("denied", "GET", 2, key="step-00000002.2-1/shared.safetensors", after=1)
        ckpt.save(2).result()
        wait_until(lambda: any(isinstance(event, events.TierLags) for event in heard))
        wait_until(lambda: any(is_of(event, 2) for event in heard))
    assert 2 in laststep.open(replica).steps()


def is_of(event: events.Event, step: int) -> bool:
    return isinstance(event, events.TierHolds) and event.step == step
