"""Per-thread working memory for codecs, kept from block to block.

A new array of a megabyte for each block may be allocated page by page and returned to the system:
with 250 page faults for each of two arrays, splitting a block into planes took six times as long.
Calls with the same name return the same memory, so no view of it may outlive the call of a codec.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np

from laststep.constants import BLOCK_BYTES

if TYPE_CHECKING:
    from numpy import uint8, unsignedinteger
    from numpy.typing import NDArray

    Elements = NDArray[unsignedinteger]

_of_thread = threading.local()


def scratch(use: str, count: int, width: int = 1) -> Elements:
    """Return this thread's array for `use`: `count` unsigned integers of `width` bytes, at most one
    block, with undefined content."""
    kept: dict[str, NDArray[uint8]] = _of_thread.__dict__
    if use not in kept:
        kept[use] = np.empty(BLOCK_BYTES, np.uint8)
    return kept[use][: count * width].view(f"<u{width}")
