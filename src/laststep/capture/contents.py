"""Digests of tensors at one moment, to compare replicas on several ranks.

Host tensors are digested at once. On a device a fingerprint is enqueued on the current stream, so
it is also of that moment, and another thread reads it later. Only contents that were digested in
the same way can be compared (`ways`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from laststep.capture.gather import flat
from laststep.capture.kernels import Fingerprint, kernels_on
from laststep.capture.mover import host_digest
from laststep.codecs.digests import digest

if TYPE_CHECKING:
    from collections.abc import Sequence

_SMALL_BYTES = 16 << 20
"""Strided device tensors up to this size are copied to be digested."""
_EMPTY, _ON_HOST, _ON_DEVICE = b"\0", b"\1", b"\2"
"""The first byte of a digest: the way in which the tensor was digested."""


class _OnDevice(NamedTuple):
    numbers: list[int]
    tensors: list[torch.Tensor]
    fingerprint: Fingerprint
    rows: torch.Tensor
    done: torch.cuda.Event


class Contents:
    """The contents of some tensors now. Made on the training thread; read from any."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._digests: dict[int, bytes] = {}
        self._under_way: list[_OnDevice] = []
        self._known = True
        """All tensors could be digested; some would need too much device memory or time."""
        devices: dict[torch.device, list[int]] = {}
        with torch.no_grad():
            for number, tensor in enumerate(tensors):
                if tensor.numel() == 0:
                    self._digests[number] = _EMPTY
                elif tensor.device.type == "cpu":
                    whole = flat(tensor)
                    self._digests[number] = _ON_HOST + host_digest(whole.data_ptr(), whole.nbytes)
                else:
                    devices.setdefault(tensor.device, []).append(number)
            for device, numbers in devices.items():
                self._begin(device, numbers, [tensors[number].detach() for number in numbers])

    def digests(self) -> list[bytes] | None:
        """Return the way and digest of each tensor; None if too expensive. Waits for devices."""
        for batch in self._under_way:
            batch.done.synchronize()
            parts: dict[int, bytearray] = {}
            sums = batch.rows.cpu().numpy()
            for owner, row in zip(batch.fingerprint.owners, sums, strict=True):
                parts.setdefault(owner, bytearray()).extend(row.tobytes())
            for owner, part in parts.items():
                self._digests[batch.numbers[owner]] = _ON_DEVICE + digest(part)
        self._under_way = []
        if not self._known:
            return None
        return [self._digests[number] for number in range(len(self._digests))]

    def _begin(self, device: torch.device, numbers: list[int], tensors: list[torch.Tensor]) -> None:
        strided = [t for t in tensors if not t.is_contiguous() and t.nbytes > _SMALL_BYTES]
        kernels = kernels_on(device)
        if strided or kernels is None:
            self._known = False
            return
        with torch.cuda.device(device):
            whole = [tensor.contiguous() for tensor in tensors]
            ranges = [(tensor.data_ptr(), tensor.nbytes) for tensor in whole]
            fingerprint = Fingerprint(ranges, kernels, torch.cuda.Stream(device))
            _, rows = fingerprint.sums(0, len(whole))
            done = torch.cuda.Event()
            done.record()
        self._under_way.append(_OnDevice(numbers, whole, fingerprint, rows, done))
