"""A lack of memory, told with an error of ours: it says nothing about what is saved or stored.

Knows torch's errors by their looks only, since most of the library does without torch.
"""

from __future__ import annotations

import contextlib
import errno
from typing import TYPE_CHECKING

from laststep.errors import StorageFailed

if TYPE_CHECKING:
    from collections.abc import Iterator

_OF_A_DEVICE = ("torch", "OutOfMemoryError")
_OF_THE_HOST = "DefaultCPUAllocator: can't allocate memory"
"""In the text of the plain `RuntimeError` that torch raises then."""


def is_one(error: BaseException) -> bool:
    """Whether that came of too little memory."""
    kind = type(error)
    if isinstance(error, MemoryError) or (kind.__module__, kind.__name__) == _OF_A_DEVICE:
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and _OF_THE_HOST in str(error)


def error_for(doing: str, error: BaseException) -> StorageFailed:
    """What to raise in its place."""
    told = StorageFailed(
        f"there is too little memory to {doing}",
        found=str(error).partition("\n")[0] or type(error).__name__,
        remedy="free memory, or give the process more (`ulimit -v`, the limit of its container)",
    )
    told.transient = True
    return told


@contextlib.contextmanager
def told(doing: str) -> Iterator[None]:
    """`StorageFailed` where memory does not suffice for what is done inside."""
    try:
        yield
    except Exception as error:
        if not is_one(error):
            raise
        raise error_for(doing, error) from error
