"""Carry bytes from rank to rank: over gloo on the host, or over NCCL from device to device.

A carrier knows ranks and bytes, not what they mean. The NCCL group is one of our own, made for one
restore: a failure in it leaves the groups that train alone. It waits on the host, until a deadline,
and raises; NCCL's usual way with a lost rank is to take the whole process down.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist

from laststep.process import threads

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import ProcessGroup, Work

HOST = torch.device("cpu")
LIMIT_S = 60.0
"""Whatever is asked of NCCL, all ranks are there; it fails where it takes longer than this."""
T = TypeVar("T")
_WAIT_ON_HOST = "TORCH_NCCL_BLOCKING_WAIT"


class Transit:
    """Bytes that are under way, both ways."""

    def __init__(self, works: list[Work], came: torch.Tensor) -> None:
        self._works = works
        self._came = came

    def wait(self) -> torch.Tensor:
        """What has come, when it is here and what went is gone."""
        for work in self._works:
            work.wait()
        return self._came


class Carrier:
    """A process group, and the device on which it takes bytes and gives them."""

    def __init__(self, group: ProcessGroup, device: torch.device = HOST) -> None:
        self.group = group
        self.device = device

    def swap(self, to: int, data: torch.Tensor, source: int, come_bytes: int, tag: int) -> Transit:
        """Begin to send bytes to one rank and to take bytes from another; either may be none. The
        other two do the same at the same point of their own swaps."""
        came = torch.empty(come_bytes, dtype=torch.uint8, device=self.device)
        both = []
        if data.numel():
            both.append(dist.P2POp(dist.isend, data, group=self.group, tag=tag, group_peer=to))
        if come_bytes:
            both.append(dist.P2POp(dist.irecv, came, group=self.group, tag=tag, group_peer=source))
        return Transit(dist.batch_isend_irecv(both) if both else [], came)

    def tell(self, who: int, data: torch.Tensor | None, size_bytes: int) -> torch.Tensor:
        """One rank's bytes, on all."""
        if data is None:
            data = torch.empty(size_bytes, dtype=torch.uint8, device=self.device)
        dist.broadcast(data, group_src=who, group=self.group)
        return data

    def close(self) -> None:
        """Give the group up."""
        dist.destroy_process_group(self.group)


class DeviceCarrier(Carrier):
    """NCCL; made by all ranks at once, each with a device of its own."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(_new_group(timedelta(seconds=LIMIT_S)), device)
        try:
            _within(lambda: _connect(self.group, device))
        except RuntimeError:
            self.abandon()
            raise

    def swap(self, to: int, data: torch.Tensor, source: int, come_bytes: int, tag: int) -> Transit:
        swap = super().swap
        return _within(lambda: swap(to, data, source, come_bytes, tag))

    def tell(self, who: int, data: torch.Tensor | None, size_bytes: int) -> torch.Tensor:
        tell = super().tell
        return _within(lambda: tell(who, data, size_bytes))

    def abandon(self) -> None:
        """Give the group up although ranks may be waiting in it."""

        def abort() -> None:
            self.group._get_backend(self.device).abort()  # noqa: SLF001 (there is no other way)
            self.close()

        with contextlib.suppress(RuntimeError):
            _within(abort)


def has_nccl() -> bool:
    """Whether the job's own group talks NCCL between its devices."""
    return dist.is_nccl_available() and "nccl" in dist.get_backend_config()


def _connect(group: ProcessGroup, device: torch.device) -> None:
    """The ranks of a group connect when they first do something together."""
    with torch.cuda.device(device):
        dist.all_reduce(torch.zeros(1, device=device), group=group)


def _within(call: Callable[[], T]) -> T:
    """Call on a thread, which is left behind where it takes too long: NCCL waits for ever for a
    rank that does not connect, be it for the first time or to another rank."""
    device, stream = torch.cuda.current_device(), torch.cuda.current_stream()
    done: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            with torch.cuda.device(device), torch.cuda.stream(stream):
                done.put((call(), None))
        except BaseException as error:  # noqa: BLE001 (raised again below)
            done.put((None, error))

    threads.start(threading.Thread(target=run, name="laststep-nccl", daemon=True))
    try:
        result, error = done.get(timeout=LIMIT_S)
    except queue.Empty:
        raise RuntimeError(f"NCCL has not answered for {LIMIT_S:g} s") from None
    if error is not None:
        raise error
    return result  # type: ignore[return-value]


def _new_group(timeout: timedelta) -> ProcessGroup:
    """An NCCL group that waits on the host. The variable is read when a group is made, and there is
    no argument for it."""
    before = os.environ.get(_WAIT_ON_HOST)
    os.environ[_WAIT_ON_HOST] = "1"
    try:
        group: ProcessGroup = dist.new_group(backend="nccl", timeout=timeout)
        return group
    finally:
        if before is None:
            del os.environ[_WAIT_ON_HOST]
        else:
            os.environ[_WAIT_ON_HOST] = before
