"""A writer in a bucket that is paused while another one takes the run over."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import fake_s3
import pytest
import torch

import laststep
from laststep.catalog.run import Run
from laststep.errors import AbortedError
from laststep.storage.objects import ObjectStore

sys.path.insert(0, str(Path(__file__).parents[1]))
from waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

URL = "s3://bucket/run"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[fake_s3.Server]:
    with fake_s3.named(monkeypatch) as state:
        yield state


@pytest.mark.parametrize("size", [100, 5 << 20])  # a file of one part, and one of several
def test_a_writer_that_was_taken_over_in_the_middle_of_a_file_is_told_so(
    server: fake_s3.Server, size: int
) -> None:
    ckpt = laststep.Checkpointer(
        URL, s=torch.ones(size), options=laststep.Options(progress=False, flush="thread")
    )
    ckpt.restore()
    server.fail("held", "PUT", 1, key=".safetensors")
    handle = ckpt.save(1)
    wait_until(server.holding.is_set)
    with server.mutex:  # its lease ends, as if it had slept for long
        del server.objects["run/terms/00000001.lock"]
    Run.open(ObjectStore(URL)).claim_term(None)
    server.released.set()
    with pytest.raises(AbortedError):
        handle.result()
    ckpt.close()
