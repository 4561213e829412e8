"""What every way of checkpointing looks like to the benchmark, and the ways that ship with PyTorch.

`save` returns when training may go on. Durable means fsync of every file and folder for everybody:
peers that write in the background get theirs when they say that they are done.
"""

from __future__ import annotations

import importlib
import os
import socket
from abc import ABC, abstractmethod
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from bench.files import fsync_tree
from bench.state import Training, tensors_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.distributed.checkpoint.staging import DefaultStager


class Peer(ABC):
    """One way of saving and loading a training's state.

    Per repetition: `open`, some saves each followed by `wait_durable`, `close`; then `load` on a
    new object. `wait_durable` is called on a thread of its own, everything else on the trainer's.
    """

    name: str
    needs: tuple[str, ...] = ()
    """Modules without which this peer is not installed."""
    saves: int = 1
    """Saves between `open` and `close`: two where the first one may differ from the next."""

    def missing(self) -> str | None:
        """Why this peer cannot run here, or None."""
        for module in self.needs:
            try:
                importlib.import_module(module)
            except Exception as error:  # noqa: BLE001 - a broken installation raises whatever it likes
                return f"not installed ({type(error).__name__}: {error})"
        return None

    def open(self, training: Training, folder: Path) -> None:  # noqa: B027 - most need nothing
        """Get ready for saves below `folder`."""

    @abstractmethod
    def save(self, training: Training, path: Path) -> None:
        """Save to `path`, which does not exist yet; return when training may go on."""

    def guard(self) -> AbstractContextManager[object]:
        """What has to surround an update of the state while a save may still read it."""
        return nullcontext()

    def wait_durable(self) -> None:  # noqa: B027 - synchronous peers are durable already
        """Return when the last save would survive a power cut."""

    @abstractmethod
    def load(self, path: Path, into: Training) -> None:
        """Put the state at `path` into a live training."""

    def close(self) -> None:  # noqa: B027 - most hold nothing
        """Give everything back."""


class TorchSave(Peer):
    """One pickle in a zip, written while training waits."""

    name = "torch.save"

    def save(self, training: Training, path: Path) -> None:
        torch.save(training.state(), path)
        fsync_tree(path)

    def load(self, path: Path, into: Training) -> None:
        into.restore(torch.load(path, map_location=into.device, weights_only=True))


class Safetensors(Peer):
    """The tensors under flat names, written while training waits."""

    name = "safetensors"
    needs = ("safetensors.torch",)

    def save(self, training: Training, path: Path) -> None:
        from safetensors.torch import save_file

        save_file(_flat(training), path)
        fsync_tree(path)

    def load(self, path: Path, into: Training) -> None:
        from safetensors.torch import load_file

        loaded = load_file(path, device=str(into.device))
        live = _flat(into)
        with torch.no_grad():
            torch._foreach_copy_(list(live.values()), [loaded[name] for name in live])


def _flat(training: Training) -> dict[str, torch.Tensor]:
    return {f"{i:06d}": tensor for i, tensor in enumerate(tensors_of(training.state()))}


class DCP(Peer):
    """torch.distributed.checkpoint, written by several threads while training waits."""

    name = "dcp"

    def __init__(self, threads: int) -> None:
        self._threads = threads

    def save(self, training: Training, path: Path) -> None:
        from torch.distributed.checkpoint.state_dict_saver import save

        save(training.state(), storage_writer=self._writer(path))
        fsync_tree(path)

    def load(self, path: Path, into: Training) -> None:
        from torch.distributed.checkpoint.state_dict_loader import load

        state = into.state()
        load(state, checkpoint_id=path)
        into.restore(state)  # type: ignore[arg-type]

    def _writer(self, path: Path):  # type: ignore[no-untyped-def]
        from torch.distributed.checkpoint.filesystem import FileSystemWriter

        return FileSystemWriter(path, thread_count=self._threads)


class DCPThread(DCP):
    """DCP in the background. On a GPU with its pinned, asynchronous stager, kept between saves;
    the update waits until the copy has been staged, as its documentation asks."""

    name = "dcp async thread"
    saves = 2
    _shared = False

    def __init__(self, threads: int) -> None:
        super().__init__(threads)
        self._stager: DefaultStager | None = None
        self._staged: Future[None] | None = None
        self._written: Future[object] = Future()
        self._path = Path()

    def open(self, training: Training, folder: Path) -> None:
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        cuda = training.device.type == "cuda"
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=cuda,
                use_shared_memory=self._shared,
                use_async_staging=cuda,
                use_non_blocking_copy=cuda,
            )
        )

    def save(self, training: Training, path: Path) -> None:
        self._path = path
        response = self._start(training, path)
        if isinstance(response, Future):
            self._written = response
        else:
            self._staged = response.staging_completion
            self._written = response.upload_completion

    def guard(self) -> AbstractContextManager[object]:
        if self._staged is not None:
            self._staged.result()
            self._staged = None
        return nullcontext()

    def wait_durable(self) -> None:
        self._written.result()
        fsync_tree(self._path)

    def close(self) -> None:
        if self._stager is not None:
            self._stager.close()
            self._stager = None

    def _start(self, training: Training, path: Path):  # type: ignore[no-untyped-def]
        from torch.distributed.checkpoint.state_dict_saver import async_save

        return async_save(
            training.state(), storage_writer=self._writer(path), async_stager=self._stager
        )


class DCPProcess(DCPThread):
    """DCP in a helper process, over shared memory. Needs a process group, which it gets for as
    long as it is open."""

    name = "dcp async process"
    _shared = True

    def open(self, training: Training, folder: Path) -> None:
        super().open(training, folder)
        # The helper finds its trainer by the environment.
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(_free_port()))
        torch.distributed.init_process_group("gloo", rank=0, world_size=1)

    def close(self) -> None:
        super().close()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()

    def _start(self, training: Training, path: Path):  # type: ignore[no-untyped-def]
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save

        return async_save(
            training.state(),
            storage_writer=self._writer(path),
            async_stager=self._stager,
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
        )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def opened(peer: Peer, training: Training, folder: Path) -> Iterator[Peer]:
    """`peer` between `open` and `close`."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        peer.open(training, folder)
        yield peer
    finally:
        peer.close()
