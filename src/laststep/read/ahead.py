"""Read extents one after the other, verified, while threads read the next ones ahead.

For those who have no pool and want what they read on their own thread: `verify`, and the reader for
DCP, whose planners may be called there only. Memory is bounded: one buffer for each thread and one
for the caller, used again and again, in huge pages (`memory.landing` says why).
"""

from __future__ import annotations

import itertools
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from laststep.memory.landing import huge_pages
from laststep.terms import ALIGN_BYTES, CHUNK_BYTES, align_up

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable
    from concurrent.futures import Future

    from laststep.read.blocks import Damage, Readable


def read_ahead(
    extents: Iterable[Readable], *, threads: int, buffer_bytes: int = CHUNK_BYTES
) -> Generator[tuple[memoryview, list[Damage]], None, None]:
    """The bytes of each extent, in order, and what is wrong with them. The bytes are gone when the
    next ones are asked for. An extent of more than `buffer_bytes` gets a buffer of its own."""
    spare: list[memoryview] = []
    ahead: deque[tuple[int, memoryview, Future[list[Damage]]]] = deque()
    with ThreadPoolExecutor(threads, thread_name_prefix="laststep-ahead") as workers:
        try:
            for extent in itertools.chain(extents, itertools.repeat(None, threads)):
                if extent is not None:
                    size = extent.size_bytes
                    room = max(buffer_bytes, align_up(size, ALIGN_BYTES))
                    buffer = spare.pop() if spare and room == buffer_bytes else huge_pages(room)
                    ahead.append((size, buffer, workers.submit(extent.read, buffer)))
                if len(ahead) > threads or (extent is None and ahead):
                    size, buffer, damage = ahead.popleft()
                    yield buffer[:size], damage.result()
                    if len(buffer) == buffer_bytes:
                        spare.append(buffer)
        finally:
            for _, _, damage in ahead:
                damage.cancel()
