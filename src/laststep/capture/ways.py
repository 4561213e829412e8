"""Choose how each piece is captured, from the memory that is spare.

Pure: pieces and room in, capture modes out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from laststep.capture.layout import Way
from laststep.errors import UsageError
from laststep.settings import Capture

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from laststep.state.provider import Piece

HOST_STAGING_BYTES = 64 << 20
"""Up to this much host state is copied aside at `save()`, outside the pool, instead of into
slots."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The capture mode of each piece, and the device memory that this needs."""

    ways: tuple[Way, ...]
    needs: dict[str, int]


def choose(pieces: Sequence[Piece], mode: Capture, rooms: Mapping[str, int]) -> Choice:
    """Stage device pieces while there is room, and host pieces if they are small. State that
    forward changes, and device state that needs gathering, cannot be lazy."""
    host_bytes = sum(piece.size_bytes for piece in pieces if piece.device == "cpu")
    small = host_bytes <= HOST_STAGING_BYTES
    needs = dict.fromkeys(rooms, 0)
    ways: list[Way] = []
    device_first = mode in (Capture.AUTO, Capture.DEVICE)
    for _name, _dtype, _shape, size, device, contiguous, volatile, *_ in pieces:
        if device == "cpu":
            staged = volatile or not contiguous if mode is Capture.LAZY else small
        else:
            fits = needs[device] + size <= rooms[device]
            if mode is Capture.DEVICE and not fits:
                raise _too_little(pieces, device, rooms[device])
            staged = volatile or not contiguous or (fits and device_first)
            needs[device] += size if staged else 0
        ways.append(Way.STAGED if staged else Way.DIRECT)
    return Choice(ways=tuple(ways), needs=needs)


def _too_little(pieces: Sequence[Piece], device: str, room: int) -> UsageError:
    needed = sum(piece.size_bytes for piece in pieces if piece.device == device)
    return UsageError(
        "device memory is short for capture='device'",
        where=device,
        expected=f"{needed} spare bytes",
        found=str(room),
        remedy="use capture='auto', which captures lazily what does not fit",
    )
