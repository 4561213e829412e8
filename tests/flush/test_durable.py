"""A flusher reports as committed what is durable, and as failed what is not there."""

from __future__ import annotations

import errno
import os
import socket
import threading
from typing import TYPE_CHECKING

import pytest
import torch

import laststep
from laststep.catalog.epochs import new_start
from laststep.catalog.lineage import Seen
from laststep.flush import server as serving
from laststep.flush.protocol import (
    Begin,
    Bye,
    Connection,
    Continue,
    Decide,
    Decided,
    Failed,
    Orders,
    Seal,
)
from laststep.format.manifest import WrittenIndexes
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
        link(disk, path, new)
        if new.endswith("manifest.json") and not folders:
            folders.append(os.path.dirname(new))  # noqa: PTH120 (a path as the store writes it)

    def synced(disk: Disk, path: str) -> None:
        if path in folders:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        sync_folder(disk, path)

    monkeypatch.setattr(Disk, "link", linked)
    monkeypatch.setattr(Disk, "sync_folder", synced)
    return folders


def test_a_save_that_was_reported_as_failed_is_not_there_and_can_be_made_again(
    run_folder: Path, failing: list[str]
) -> None:
    state = {"t": torch.zeros(5)}
    with laststep.Checkpointer(run_folder, state=state, flush="thread") as checkpointer:
        with pytest.raises(laststep.StorageError, match="taken back"):
            checkpointer.save(3).wait(PATIENCE_S)
        assert list(laststep.open(run_folder)) == []
        checkpointer.save(3).wait(PATIENCE_S)  # another folder, whose sync works
    assert laststep.open(run_folder).steps() == [3]
    assert len(failing) == 1


def test_the_first_of_several_ranks_does_not_tell_them_of_what_is_not_durable(
    run_folder: Path, failing: list[str]
) -> None:
    ours, theirs = socket.socketpair()
    trainer = Connection(ours)
    flusher = serving.Flusher(
        Connection(theirs),
        memoryview(b""),
        run=str(run_folder),
        trainer=new_start(),
        orders=Orders(writers=1),
    )
    flusher.start()
    thread = threading.Thread(target=flusher.serve)
    thread.start()
    trainer.send(Continue(seen=Seen()))
    trainer.send(Begin(save=1, step=1, overwrite=False, files=(), role="first"))
    trainer.send(Seal(save=1, values={}, items=(), metrics=b"{}", metadata=b"null"))
    trainer.send(Decide(save=1, ranks=2, written=WrittenIndexes(indexes=bytes(32))))
    while not isinstance(said := trainer.receive_in_trainer(), Decided | Failed):
        assert said is not None
    assert isinstance(said, Failed)
    assert "taken back" in (said.fields["what"] or "")
    assert list(run_folder.glob("step-*")) == []
    trainer.send(Bye())
    thread.join(PATIENCE_S)
    trainer.close()
    assert len(failing) == 1
