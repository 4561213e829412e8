"""Find on the device which chunks are equal to those of an earlier save.

Such a chunk need not be copied to the host: its blocks are reused from that save's files. Only
chunks that lie entirely in one staging buffer are compared; nobody changes those bytes any more, so
what is compared is what would be stored. Digests of 128 bits per 256 KiB, computed on a side
stream; a few are kept on the host. Belongs to the capture thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from laststep.capture.kernels import Digests, kernels_on
from laststep.constants import BLOCK_BYTES

if TYPE_CHECKING:
    from laststep.capture.device import SideStreams
    from laststep.capture.job import Job
    from laststep.capture.layout import ChunkLayout, Layout

_KEPT = 8
"""Saves whose digests are kept: as many as may be in progress."""
_LEAST_BYTES = 16 * BLOCK_BYTES
"""Smaller states are compared only in the flusher, which compares anyway."""

Place = tuple[int, int]
"""A chunk: its file, and where it begins there."""


class ChunkLooks:
    """The contents of one layout's chunks in the last saves."""

    def __init__(self, layout: Layout) -> None:
        self._chunks: dict[str, list[ChunkLayout]] = {}
        for chunk in layout.chunks:
            devices = {part.device for part in chunk.staged}
            if len(devices) == 1 and not chunk.direct and "cpu" not in devices:
                self._chunks.setdefault(chunk.staged[0].device, []).append(chunk)
        self._tables: dict[str, tuple[int, Digests]] = {}
        """Per device: the address of the staging buffer that they are for, and the tables."""
        self._seen: dict[int, dict[Place, bytes]] = {}
        """Digests by save number."""

    def look(self, job: Job, streams: SideStreams) -> dict[Place, bytes]:
        """Return digests of a job's chunks, where its devices can compute them. Staged bytes MUST
        be complete in the order of the side streams."""
        found: dict[Place, bytes] = {}
        for device, chunks in self._chunks.items():
            staging = job.staging.get(device)
            kernels = kernels_on(torch.device(device))
            if staging is None or kernels is None or staging.nbytes < _LEAST_BYTES:
                continue
            with torch.cuda.device(device), torch.cuda.stream(streams.filling(device)):
                address, digests = self._tables.get(device, (0, None))
                if digests is None or address != staging.data_ptr():
                    address = staging.data_ptr()
                    ranges = [(address + p.start, p.size_bytes) for c in chunks for p in c.staged]
                    digests = Digests(kernels, ranges, streams.stream(device))
                    self._tables[device] = address, digests
                rows = digests.sums(0, sum(len(chunk.staged) for chunk in chunks)).cpu().numpy()
            first = 0
            for chunk in chunks:
                last = first + len(chunk.staged)
                found[chunk.file, chunk.start] = rows[digests.rows(first, last)].tobytes()
                first = last
        return found

    def unchanged(self, found: dict[Place, bytes], since: int) -> list[Place]:
        """Return the chunks that are equal to those of that save."""
        before = self._seen.get(since, {})
        return [place for place, sums in found.items() if before.get(place) == sums]

    def keep(self, number: int, found: dict[Place, bytes]) -> None:
        """Remember what a save holds."""
        self._seen[number] = found
        for old in sorted(self._seen)[:-_KEPT]:
            del self._seen[old]
