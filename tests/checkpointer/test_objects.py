"""A run in an object store, from end to end: `Checkpointer("s3://…")` by itself."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

import laststep
from cases import long
from waiting import PATIENCE_S

sys.path.insert(0, str(Path(__file__).parents[1] / "storage"))
import fake_s3

if TYPE_CHECKING:
    from collections.abc import Iterator

RUN = "s3://bucket/run"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[fake_s3.Server]:
    with fake_s3.named(monkeypatch) as state:
        yield state


def parts() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {"small": torch.rand(1 << 10), "large": torch.rand(6 << 20)}


@pytest.mark.parametrize("flush", ["process", *long("thread")])
def test_a_run_is_saved_to_and_restored_from_an_object_store(
    server: fake_s3.Server, flush: str
) -> None:
    state, keep = parts(), laststep.Keep(last=1)
    with laststep.Checkpointer(
        RUN, s=state, options=laststep.Options(progress=False, flush=flush), keep=keep
    ) as c:
        assert c.restore().next_step == 0
        for step in range(3):
            state["large"] += 1
            c.save(step).wait()
    again = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    with laststep.Checkpointer(
        RUN, s=again, options=laststep.Options(progress=False, flush=flush)
    ) as c:
        assert c.restore().next_step == 3
    assert all(torch.equal(again[name], state[name]) for name in state)
    assert laststep.open(RUN).steps() == [2], "retention kept more than it was told"
    assert server.uploads == {}
    witnesses = [asked for asked in server.asked if "/start-" in asked.key and "lock" in asked.key]
    assert not witnesses, "marks that nobody sees were paid for"
    assert not [kept for kept in server.objects.values() if b"hidden-from-all" in kept.data]


def test_a_part_of_a_checkpoint_is_read_by_the_ranges_that_hold_it(server: fake_s3.Server) -> None:
    state = parts()
    with laststep.Checkpointer(
        RUN, s=state, options=laststep.Options(progress=False, flush="thread")
    ) as c:
        c.save(1).wait()
    server.asked.clear()
    found = laststep.open(RUN)[1].tensor("s/small")[:]
    assert torch.equal(found, state["small"])
    read = sum(asked.sent_bytes for asked in server.asked)
    assert 4096 <= read < 3 << 20, f"{read} bytes of 24 MiB for 4 KiB, in whole blocks of 1 MiB"


def test_a_restore_of_one_tensor_reads_its_ranges_and_headers_and_nothing_else(
    server: fake_s3.Server,
) -> None:
    state = {f"w{number}": torch.rand(1 << 20) for number in range(6)}  # 4 MiB each
    with laststep.Checkpointer(
        RUN, s=state, options=laststep.Options(progress=False, flush="thread")
    ) as c:
        c.save(1).wait()
    again = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    with laststep.Checkpointer(
        RUN, s=again, options=laststep.Options(progress=False, flush="thread")
    ) as c:
        server.asked.clear()
        c.restore(only=["s/w3"])
    assert torch.equal(again["w3"], state["w3"])
    assert not again["w2"].any()
    data = [asked for asked in server.asked if asked.key.endswith(".safetensors")]
    assert all(asked.span for asked in data if asked.method == "GET"), "a file was read whole"
    read = sum(asked.sent_bytes for asked in data)
    assert 4 << 20 <= read <= (4 << 20) + (64 << 10)


def test_a_restore_reads_data_in_ranges_of_8_mib_each_once(server: fake_s3.Server) -> None:
    state = {"w": torch.rand(6 << 20)}
    with laststep.Checkpointer(
        RUN, s=state, options=laststep.Options(progress=False, flush="thread")
    ) as c:
        c.save(1).wait()
    with laststep.Checkpointer(
        RUN, s=state, options=laststep.Options(progress=False, flush="thread")
    ) as c:
        server.asked.clear()
        c.restore()
    data = [asked for asked in server.asked if asked.key.endswith("/s.safetensors")]
    spans = [asked.span for asked in data if asked.method == "GET"]
    assert len(spans) == len(set(spans))
    assert [asked.sent_bytes for asked in data if asked.sent_bytes > 1 << 20] == [8 << 20] * 3


def test_what_a_storm_of_errors_hits_is_saved_all_the_same(server: fake_s3.Server) -> None:
    state = parts()
    with laststep.Checkpointer(
        RUN, s=state, options=laststep.Options(progress=False, flush="thread")
    ) as c:
        c.save(0).wait()
        for kind in ("503", "reset", "lost"):
            for method in ("PUT", "POST", "HEAD", "GET"):
                server.fail(kind, method)
        c.save(1).wait()
    again = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    with laststep.Checkpointer(
        RUN, s=again, options=laststep.Options(progress=False, flush="thread")
    ) as c:
        assert c.restore().step == 1
    assert all(torch.equal(again[name], state[name]) for name in state)


def test_saving_asks_the_server_nothing_on_the_training_thread(
    server: fake_s3.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    import threading

    from laststep.storage.bucket import Bucket

    state = parts()
    asking: set[str] = set()
    once = Bucket._once

    def noting(self: Bucket, call: object) -> object:
        asking.add(threading.current_thread().name)
        return once(self, call)  # type: ignore[arg-type]

    with laststep.Checkpointer(RUN, s=state, options=laststep.Options(progress=False)) as c:
        c.restore()
        monkeypatch.setattr(Bucket, "_once", noting)
        c.save(0)
        c.save(1)
        assert threading.current_thread().name not in asking
        monkeypatch.undo()


def test_a_server_that_keeps_no_promise_fails_the_first_save(server: fake_s3.Server) -> None:
    server.lacks.add("if-none-match")
    checkpointer = laststep.Checkpointer(RUN, s=parts(), options=laststep.Options(progress=False))
    with pytest.raises(laststep.StorageError, match="If-None-Match"), checkpointer as c:
        c.save(1).wait()
    assert server.objects == {}


def test_a_save_that_is_under_way_when_the_program_ends_is_finished(server: fake_s3.Server) -> None:
    """By a flusher in a thread of it, when no pool of threads takes on work any more."""
    program = (
        "import torch, laststep\n"
        f"c = laststep.Checkpointer({RUN!r}, s={{'w': torch.ones(9 << 20)}}, \n"
        "    options=laststep.Options(progress=False, flush='thread'))\n"
        "c.save(7)\n"
    )
    subprocess.run([os.environ["WARM_PYTHON"], "-c", program], check=True, timeout=PATIENCE_S)
    assert laststep.open(RUN).steps() == [7]


def test_a_run_goes_on_after_its_flusher_was_killed_in_an_upload(server: fake_s3.Server) -> None:
    state = {"w": torch.rand(9 << 20)}
    c = laststep.Checkpointer(RUN, s=state, options=laststep.Options(progress=False))
    c.save(1).wait()
    state["w"] += 1
    server.fail("held", "PUT", 1, query="partNumber=2")
    handle = c.save(2)
    assert server.holding.wait(PATIENCE_S)
    assert c._client.helper_pid is not None
    os.kill(c._client.helper_pid, signal.SIGKILL)
    with pytest.raises(laststep.StorageError):
        handle.wait(PATIENCE_S)
    with contextlib.suppress(laststep.LaststepError):
        c.close()
    server.released.set()
    with laststep.Checkpointer(RUN, s=state, options=laststep.Options(progress=False)) as c:
        assert c.restore().step == 1
        c.save(2).wait()
    assert laststep.open(RUN).steps() == [1, 2]
    folders = {key.split("/")[1] for key in server.objects if key.startswith("run/step-")}
    assert len(folders) == 2, folders
