"""Put verified bytes into tensors, wherever they live.

Called on reading threads, on several at once: parts of different reads never overlap. Memory may be
reused when `deliver` returns, so copies to a device are waited for, one chunk's at a time, while
the other threads read on.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from laststep.capture.device import CopyStreams
from laststep.capture.exact import copy_each
from laststep.capture.gather import bytes_of
from laststep.read.reader import Room

if TYPE_CHECKING:
    from collections.abc import Sequence

    from laststep.plan.load import Read, ReadPart

MANY = 16
"""From so many small parts on, a chunk is moved to the device whole and scattered there."""


class TensorRoom(Room, Protocol):
    """Where reads land that go into tensors."""

    slot_bytes: int


def tensor_over(chunk: memoryview) -> torch.Tensor:
    """Bytes as a tensor, not copied. Nobody may write into it where the bytes are read-only: torch
    has no such tensors, and would warn."""
    if not chunk.readonly:
        return torch.frombuffer(chunk, dtype=torch.uint8)
    there = np.frombuffer(chunk, np.uint8)
    alias = (ctypes.c_uint8 * chunk.nbytes).from_address(there.ctypes.data)
    alias.source = there  # type: ignore[attr-defined] # which keeps the bytes
    return torch.frombuffer(alias, dtype=torch.uint8)


class Placer:
    """Delivers reads into targets; targets MUST be contiguous."""

    def __init__(self, targets: Sequence[torch.Tensor]) -> None:
        self._bytes = [bytes_of(target) for target in targets]
        self._devices = [target.device for target in targets]
        self._streams = CopyStreams(self._devices)

    def deliver(self, read: Read, data: memoryview) -> None:
        """Copy a read's parts to where they belong; its memory is free afterwards."""
        by_device: dict[torch.device, list[ReadPart]] = {}
        for part in read.parts:
            by_device.setdefault(self._devices[part.target], []).append(part)
        chunk = tensor_over(data)
        for device, parts in by_device.items():
            with self._streams.copying(device):
                source = chunk
                if device.type == "cuda" and len(parts) > MANY:
                    source = chunk[: read.stop - read.start].to(device, non_blocking=True)
                self._scatter(source, parts)

    def finish(self) -> None:
        """Make the streams that training uses wait for all copies."""
        self._streams.lead()

    def _scatter(self, chunk: torch.Tensor, parts: list[ReadPart]) -> None:
        into = [self._bytes[p.target][p.target_at : p.target_at + p.size_bytes] for p in parts]
        source = [chunk[p.at : p.at + p.size_bytes] for p in parts]
        copy_each(into, source, non_blocking=True)
