"""Whether the Triton kernels work here, found out in the background before they are needed.

Compiling them takes seconds the first time on a machine; until that is done, and where it fails,
plain torch operations do the same work with more calls.
"""

from __future__ import annotations

import logging
import threading

import torch

log = logging.getLogger(__name__)

_works = threading.Event()


def kernels_work() -> bool:
    """Whether `check_kernels` has found them working."""
    return _works.is_set()


def check_kernels(device: str) -> None:
    """Compile and run the kernels on a few bytes; what fails is said once and done without."""
    if _works.is_set():
        return
    try:
        from laststep.engine.copy.kernels import Copies, Tiles

        stream = torch.cuda.Stream(device=device)
        with torch.cuda.device(device), torch.cuda.stream(stream):
            sample = torch.arange(64, dtype=torch.int64, device=device)
            target = torch.zeros(512 + 12 + 7, dtype=torch.uint8, device=device)
            address = sample.data_ptr()
            Copies([(address, 0, 512), (address, 512, 12), (address, 524, 7)], stream).run(target)
            raw = sample.view(torch.uint8)
            copied = torch.equal(target, torch.cat((raw, raw[:12], raw[:7])))
            changed = sample.clone()
            changed[7] = -7
            tiles = [Tiles([tensor], stream).sums() for tensor in (sample, changed)]
            noticed = not torch.equal(*tiles)
    except Exception as error:  # noqa: BLE001 (compilers fail in any way; plain copies do not)
        log.warning("Triton kernels do not work here, plain copies are used instead: %s", error)
        return
    if copied and noticed:
        _works.set()
    else:
        log.warning("Triton kernels give wrong results here, plain copies are used instead")
