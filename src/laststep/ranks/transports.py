"""Send bytes between ranks: over gloo on the host, or over NCCL between devices.

Knows ranks and bytes, not what they mean. The NCCL group is made for one restore, so that a failure
in it does not break the groups that train. It waits on the host until a deadline and raises; by
default NCCL ends the process when a rank is lost.
"""

from __future__ import annotations

import contextlib
import os
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from laststep.process.threads import WorkerPool

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import ProcessGroup, Work

HOST = torch.device("cpu")
LIMIT_S = 60.0
"""An NCCL call fails after this time; all ranks are present by then."""
T = TypeVar("T")
_WAIT_ON_HOST = "TORCH_NCCL_BLOCKING_WAIT"


class Transit(NamedTuple):
    """Bytes that are being sent and received."""

    works: list[Work]
    came: torch.Tensor

    def wait(self) -> torch.Tensor:
        """Wait for both directions; return what was received."""
        for work in self.works:
            work.wait()
        return self.came


class Transport:
    """A process group and the device of the tensors that it sends and receives."""

    def __init__(self, group: ProcessGroup, device: torch.device = HOST) -> None:
        self.group = group
        self.device = device

    def swap(self, to: int, data: torch.Tensor, source: int, come_bytes: int, tag: int) -> Transit:
        """Start sending bytes to one rank and receiving from another; either may be empty. The two
        other ranks do the same at the same point of their own swaps."""
        came = torch.empty(come_bytes, dtype=torch.uint8, device=self.device)
        both = []
        if data.numel():
            both.append(dist.P2POp(dist.isend, data, group=self.group, tag=tag, group_peer=to))
        if come_bytes:
            both.append(dist.P2POp(dist.irecv, came, group=self.group, tag=tag, group_peer=source))
        return Transit(dist.batch_isend_irecv(both) if both else [], came)

    def broadcast(self, who: int, data: torch.Tensor | None, size_bytes: int) -> torch.Tensor:
        """Return the bytes of rank `who`, on all ranks."""
        if data is None:
            data = torch.empty(size_bytes, dtype=torch.uint8, device=self.device)
        dist.broadcast(data, group_src=who, group=self.group)
        return data

    def close(self) -> None:
        dist.destroy_process_group(self.group)


class DeviceTransport(Transport):
    """NCCL; constructed by all ranks at once, each with a device of its own."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(_new_group(timedelta(seconds=LIMIT_S)), device)
        try:
            with torch.cuda.device(device):  # the first collective connects the ranks
                _within(lambda: dist.all_reduce(torch.zeros(1, device=device), group=self.group))
        except RuntimeError:
            self.abandon()
            raise

    def swap(self, to: int, data: torch.Tensor, source: int, come_bytes: int, tag: int) -> Transit:
        swap = super().swap
        return _within(lambda: swap(to, data, source, come_bytes, tag))

    def broadcast(self, who: int, data: torch.Tensor | None, size_bytes: int) -> torch.Tensor:
        broadcast = super().broadcast
        return _within(lambda: broadcast(who, data, size_bytes))

    def abandon(self) -> None:
        """Destroy the group even if ranks are waiting in it."""

        def abort() -> None:
            self.group._get_backend(self.device).abort()  # noqa: SLF001 (there is no other way)
            self.close()

        with contextlib.suppress(RuntimeError):
            _within(abort)


def has_nccl() -> bool:
    """Return whether the job's own group uses NCCL for its devices."""
    return dist.is_nccl_available() and "nccl" in dist.get_backend_config()


def _within(call: Callable[[], T]) -> T:
    """Call on a thread and abandon it at the limit: NCCL waits forever for a missing rank."""
    device, stream = torch.cuda.current_device(), torch.cuda.current_stream()

    def run() -> T:
        with torch.cuda.device(device), torch.cuda.stream(stream):
            return call()

    try:
        return WorkerPool("nccl", 1).submit(run).result(LIMIT_S)
    except TimeoutError:
        raise RuntimeError(f"NCCL has not answered for {LIMIT_S:g} s") from None


def _new_group(timeout: timedelta) -> ProcessGroup:
    """Return an NCCL group that waits on the host: only an environment variable can say so."""
    before = os.environ.pop(_WAIT_ON_HOST, None)
    os.environ[_WAIT_ON_HOST] = "1"
    try:
        group: ProcessGroup = dist.new_group(backend="nccl", timeout=timeout)
        return group
    finally:
        del os.environ[_WAIT_ON_HOST]
        if before is not None:
            os.environ[_WAIT_ON_HOST] = before
