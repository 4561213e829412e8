"""A run in shared memory alone, `shm://name`: a folder that nobody else can look into."""

from __future__ import annotations

import os
import shutil
import stat
from typing import TYPE_CHECKING

import pytest
import torch

import laststep
from expect import raises
from laststep.errors import StorageError, UsageError
from laststep.memory import segments
from laststep.storage import shared_memory
from laststep.storage.registry import open_parent, open_store
from laststep.storage.shared_memory import SharedMemoryStore
from laststep.testing.stores import SharedStoreConformance

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from laststep.storage.store import Store


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What /dev/shm is for this process and those that it forks."""
    place = tmp_path / "base"
    place.mkdir()
    monkeypatch.setattr(shared_memory, "BASE", str(place))
    return place


@pytest.mark.usefixtures("base")
class TestSharedMemory(SharedStoreConformance):
    def make_store(self, folder: Path) -> Store:
        return open_store(f"shm:/{folder}")


@pytest.fixture
def url() -> Iterator[str]:
    """A run in the shared memory of this machine, for processes that do not know of tests."""
    name = f"test-{os.getpid()}-{os.urandom(4).hex()}"
    yield f"shm://{name}"
    shutil.rmtree(f"{shared_memory.BASE}/laststep-{os.getuid()}/{shared_memory.RUNS}/{name}")


def test_a_run_in_shared_memory_is_saved_by_a_flusher_and_restored(url: str) -> None:
    state = {"w": torch.arange(6.0)}
    with laststep.Checkpointer(url, s=state, options=laststep.Options(progress=False)) as ckpt:
        assert ckpt.path == url
        ckpt.restore()
        ckpt.save(3).result()
        assert ckpt._client.helper_pid is not None
    assert laststep.open(url).steps() == [3]
    found = {"w": torch.zeros(6)}
    with laststep.Checkpointer(url, s=found, options=laststep.Options(progress=False)) as ckpt:
        assert ckpt.restore().next_step == 4
    assert torch.equal(found["w"], state["w"])
    alone = laststep.load(f"{url}/{laststep.open(url).latest().folder}")
    assert torch.equal(alone["s"]["w"], state["w"])


def test_it_lies_in_a_folder_that_nobody_else_can_look_into(base: Path) -> None:
    store = SharedMemoryStore("shm://team/gpt")
    assert store.list("") == []
    assert list(base.iterdir()) == []  # looking makes nothing
    store.create("x", b"1")
    (own,) = base.iterdir()
    assert stat.S_IMODE(own.stat().st_mode) == 0o700
    assert (own / "runs" / "team" / "gpt" / "x").read_bytes() == b"1"
    own.chmod(0o755)
    with raises(StorageError, where=base, expected="700"):
        SharedMemoryStore("shm://team/gpt")


def test_a_run_is_no_segment(base: Path) -> None:
    SharedMemoryStore("shm://owner.json").create("x", b"1")
    assert segments.found(str(base)) == []


def test_a_machine_without_shared_memory_says_so(base: Path) -> None:
    base.rmdir()
    store = SharedMemoryStore("shm://gpt")
    with raises(StorageError, where=base):
        store.create("x", b"1")


@pytest.mark.parametrize("url", ["shm://", "shm:///mnt/tmpfs/gpt", "shm://a/../../b", "shm://a//b"])
def test_what_names_no_run_is_refused(url: str) -> None:
    with raises(UsageError, expected="shm://"):
        open_store(url)


def test_a_checkpoint_lies_in_its_run(base: Path) -> None:
    store, folder = open_parent("shm://gpt/step-00000003.1-1")
    assert (store.url, folder) == ("shm://gpt", "step-00000003.1-1")
