"""Memory of each thread that codecs work in, kept from block to block.

An array of a megabyte that is made anew for each block may come from the system page by page and go
back to it: with 250 page faults for each of two arrays, splitting a block into planes took six
times as long. Who asks again under the same name gets the same memory, so no view of it may outlive
the call of a codec.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np

from laststep.terms import BLOCK_BYTES

if TYPE_CHECKING:
    from numpy import uint8, unsignedinteger
    from numpy.typing import NDArray

    Elements = NDArray[unsignedinteger]

_of_thread = threading.local()


def scratch(use: str, count: int, width: int = 1) -> Elements:
    """Room for unsigned integers of `width` bytes, no more than a block of them; with no content
    that means anything."""
    kept: dict[str, NDArray[uint8]] = _of_thread.__dict__
    if use not in kept:
        kept[use] = np.empty(BLOCK_BYTES, np.uint8)
    return kept[use][: count * width].view(f"<u{width}")
