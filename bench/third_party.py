"""Peers from other packages, each imported only when it is used."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING

from bench.files import fsync_tree
from bench.peers import Peer

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from bench.state import Training


class TorchSnapshot(Peer):
    """torchsnapshot's `async_take`: staged while training waits, written by threads after."""

    name = "torchsnapshot"
    needs = ("torchsnapshot",)
    saves = 2

    def __init__(self) -> None:
        self._pending: object = None
        self._path = Path()

    def save(self, training: Training, path: Path) -> None:
        from torchsnapshot import Snapshot

        self._path = path
        self._pending = Snapshot.async_take(str(path), dict(training.items()))

    def wait_durable(self) -> None:
        self._pending.wait()  # type: ignore[attr-defined]
        fsync_tree(self._path)

    def load(self, path: Path, into: Training) -> None:
        from torchsnapshot import Snapshot

        Snapshot(str(path)).restore(dict(into.items()))


class TorchCheckpointing(Peer):
    """Meta's torch_checkpointing: staged during the next iteration, written by a process.

    Its default, O_DIRECT over Python's buffered files, fails on ext4, so writes are buffered. Its
    lock MUST surround every update, or it stores the next step's state.
    """

    name = "torch_checkpointing"
    needs = ("torch_checkpointing",)
    saves = 2

    def __init__(self) -> None:
        self._manager: object = None
        self._written: Future[object] = Future()
        self._path = Path()

    def open(self, training: Training, folder: Path) -> None:
        from torch_checkpointing import AsyncCheckpointSaverConfig, CheckpointManager
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        self._manager = CheckpointManager(
            CheckpointManager.Config(
                save=AsyncCheckpointSaverConfig(),
                storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
            )
        )

    def save(self, training: Training, path: Path) -> None:
        self._path = path
        self._written = self._manager.save(str(path), training.state())  # type: ignore[attr-defined]

    def guard(self) -> AbstractContextManager[object]:
        return self._manager.lock()  # type: ignore[attr-defined,no-any-return]

    def wait_durable(self) -> None:
        self._written.result()
        fsync_tree(self._path)

    def load(self, path: Path, into: Training) -> None:
        from torch_checkpointing import CheckpointManager
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        config = CheckpointManager.Config.with_sync_save()
        config.storage_config = LocalFileSystemStorageConfig(use_direct_io=False)
        manager = CheckpointManager(config)
        state = into.state()
        into.restore(manager.load(str(path), into=state))
        manager.close()

    def close(self) -> None:
        if self._manager is not None:
            self._manager.close()  # type: ignore[attr-defined]
            self._manager = None
