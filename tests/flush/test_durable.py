"""A flusher reports as committed only what is durable."""

from __future__ import annotations

import errno
import os
import socket
import threading
from typing import TYPE_CHECKING

import pytest
import torch

import laststep
from expect import raises
from laststep.catalog.terms import Seen, new_start
from laststep.flush import server as serving
from laststep.flush.protocol import (
    Begin,
    Bye,
    CaptureDone,
    Connection,
    Continue,
    Decide,
    Ended,
    Instruct,
    Orders,
    in_trainer,
)
from laststep.format.manifest import WrittenIndexes
from laststep.storage.directory import DirectoryStore
from laststep.storage.files import Disk
from waiting import PATIENCE_S

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The folders whose sync fails after their manifest was linked; empty it to mend the disk."""
    folders: list[str] = []
    link, sync_folder = Disk.link, Disk.sync_folder

    def linked(disk: Disk, path: str, new: str) -> None:
        link(path, new)
        if new.endswith("manifest.json") and not folders:
            folders.append(os.path.dirname(new))  # noqa: PTH120 (a path as the store writes it)

    def synced(disk: Disk, path: str) -> None:
        if path in folders:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        sync_folder(disk, path)

    monkeypatch.setattr(Disk, "link", linked)
    monkeypatch.setattr(Disk, "sync_folder", synced)
    return folders


def test_a_commit_that_cannot_be_made_durable_is_no_success_and_the_next_save_works(
    run_folder: Path, failing: list[str]
) -> None:
    state = {"t": torch.zeros(5)}
    with laststep.Checkpointer(
        run_folder, state=state, options=laststep.Options(flush="thread")
    ) as checkpointer:
        with raises(laststep.StorageError, where="step-00000003.1-1", found="EIO"):
            checkpointer.save(3).wait(PATIENCE_S)
        checkpointer.save(4).wait(PATIENCE_S)  # another folder, whose sync works
    assert 4 in laststep.open(run_folder).steps()
    assert len(failing) == 1


def test_a_commit_that_cannot_be_read_back_is_said_to_be_unknown(
    run_folder: Path, failing: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its manifest is there, its name may not be durable, and nobody can look."""
    read = DirectoryStore.read

    def refused(store: DirectoryStore, name: str, *, limit_bytes: int) -> bytes:
        if failing and name.endswith("manifest.json"):
            raise laststep.StorageError("cannot read", found="EIO")
        return read(store, name, limit_bytes=limit_bytes)

    monkeypatch.setattr(DirectoryStore, "read", refused)
    with laststep.Checkpointer(
        run_folder, state={"t": torch.zeros(5)}, options=laststep.Options(flush="thread")
    ) as checkpointer:
        with raises(laststep.StorageError, where="step-00000003.1-1", found="EIO") as caught:
            checkpointer.save(3).wait(PATIENCE_S)
        failing.clear()
    assert "not known whether" in caught.value.what
    assert laststep.open(run_folder).steps() == [3]


def test_what_a_save_continues_from_is_durable_first(
    run_folder: Path, failing: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer of the last checkpoint has died before it could make its name durable."""
    options = laststep.Options(flush="thread")
    state = {"t": torch.zeros(5)}
    with (
        laststep.Checkpointer(run_folder, state=state, options=options) as checkpointer,
        pytest.raises(laststep.StorageError),
    ):
        checkpointer.save(3).wait(PATIENCE_S)
    [folder] = failing
    synced: list[str] = []
    sync_folder = Disk.sync_folder

    def noted(disk: Disk, path: str) -> None:
        synced.append(path)
        sync_folder(disk, path)

    monkeypatch.setattr(Disk, "sync_folder", noted)
    with laststep.Checkpointer(run_folder, state=state, options=options) as checkpointer:
        assert checkpointer.restore().step == 3
        with raises(laststep.StorageError, where=folder, found="EIO"):
            checkpointer.save(4).wait(PATIENCE_S)
        failing[:] = ["elsewhere"]
        checkpointer.save(5).wait(PATIENCE_S)
    assert folder in synced
    assert laststep.open(run_folder).steps() == [3, 5]


def test_the_first_of_several_ranks_does_not_tell_them_of_what_is_not_durable(
    run_folder: Path, failing: list[str]
) -> None:
    ours, theirs = socket.socketpair()
    trainer = Connection(ours)
    flusher = serving.Flusher(
        Connection(theirs),
        memoryview(b""),
        serving.Setup(run=str(run_folder), trainer=new_start(), orders=Orders(writers=1)),
    )
    thread = threading.Thread(target=flusher.serve)
    thread.start()
    trainer.send(Instruct(continues=Continue(seen=Seen())))
    trainer.send(Begin(save=1, step=1, overwrite=False, files=(), role="first"))
    trainer.send(CaptureDone(save=1, values={}, items=(), metrics=b"{}", metadata=b"null"))
    trainer.send(Decide(save=1, ranks=2, written=WrittenIndexes(indexes=bytes(32))))
    while not isinstance(said := trainer.receive(in_trainer), Ended):
        assert said is not None
    assert (said.kind, said.fields["where"]) == ("StorageError", f"{run_folder}/step-00000001.1-1")
    trainer.send(Bye())
    thread.join(PATIENCE_S)
    trainer.close()
    assert len(failing) == 1
