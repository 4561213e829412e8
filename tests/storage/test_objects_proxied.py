"""A real S3 server behind a proxy that resets, delays, cuts off, and keeps answers to itself."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import fault_proxy
import pytest
import torch

import laststep
from laststep.errors import AlreadyExistsError
from laststep.storage import objects, transfers
from laststep.storage.objects import ObjectStore
from laststep.testing.stores import race_to_create, write_file

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import fake_s3


@pytest.fixture
def proxy(s3: str, endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[fake_s3.Server]:
    monkeypatch.setattr(objects, "_probed", set())
    with fault_proxy.before(endpoint) as state:
        monkeypatch.setenv("AWS_ENDPOINT_URL", state.endpoint)
        yield state


@pytest.mark.parametrize(
    "kind",
    [
        one if one == "lost" else pytest.param(one, marks=pytest.mark.long)
        for one in fault_proxy.KINDS
    ],
)
def test_a_run_is_saved_and_restored_through_faults_of_that_kind(
    proxy: fake_s3.Server, s3: str, tmp_path: Path, kind: str
) -> None:
    url = f"{s3}{tmp_path}"
    state = {"small": torch.rand(1000), "large": torch.rand(6 << 20)}
    with laststep.Checkpointer(
        url, s=state, options=laststep.Options(progress=False, flush="thread")
    ) as c:
        c.save(0).wait()
        for method in ("PUT", "POST", "HEAD", "GET", "DELETE"):
            proxy.fail(kind, method, 2)
        state["large"] += 1
        c.save(1).wait()
    again = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    with laststep.Checkpointer(
        url, s=again, options=laststep.Options(progress=False, flush="thread")
    ) as c:
        proxy.fail(kind, "GET", 4, key=".safetensors")
        assert c.restore().step == 1
    assert all(torch.equal(again[name], state[name]) for name in state)
    hit = {asked.method for asked in proxy.asked if asked.who == kind}
    assert hit >= {"PUT", "POST", "HEAD", "GET"}


def test_of_many_exactly_one_creates_though_answers_get_lost(
    proxy: fake_s3.Server, s3: str, tmp_path: Path
) -> None:
    stores = [ObjectStore(f"{s3}{tmp_path}") for _ in range(4)]
    stores[0].create("first", b"")
    for turn in range(3):
        proxy.fail("lost", "PUT", 2, key=f"x{turn}")
        won, lost = race_to_create(stores, f"x{turn}")
        assert won == [stores[0].read(f"x{turn}", limit_bytes=999)]
        assert {type(error) for error in lost} == {AlreadyExistsError}


def test_an_upload_whose_last_answer_got_lost_is_complete(
    proxy: fake_s3.Server, s3: str, tmp_path: Path
) -> None:
    store = ObjectStore(f"{s3}{tmp_path}")
    data = os.urandom(2 * transfers.PART_BYTES + 1)
    proxy.fail("lost", "POST", 1, query="uploadId")
    write_file(store, "x", data)
    assert store.read("x", limit_bytes=len(data)) == data
