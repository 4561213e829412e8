"""What makes a header sound: the first thing that is not, in words.

Pure. Of what has passed, a reader need check nothing again: tensors cover their area exactly, in
order and without holes, objects follow, and every block has its digest.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from laststep.codecs.digests import DIGEST_BYTES
from laststep.format import borrowing, coding, deriving
from laststep.terms import BLOCK_BYTES, DTYPES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from laststep.format.header import Header, ObjectEntry
    from laststep.format.safetensors import TensorEntry

METADATA = "__metadata__"
MAX_OFFSET = (1 << 63) - 1


def block_count(tensor_bytes: int) -> int:
    return -(-tensor_bytes // BLOCK_BYTES)


def header_problem(header: Header) -> str | None:
    """The first thing that makes a header unsound, in words, or None."""
    names = {entry.name for entry in header.tensors}
    names.update(entry.name for entry in header.objects)
    if len(names) != len(header.tensors) + len(header.objects):
        return "a name twice"
    if METADATA in names:
        return f"an entry named {METADATA}"
    if header.coded is not None:
        if len(header.coded) * DIGEST_BYTES != len(header.blocks):
            return f"{len(header.coded)} coded blocks, {len(header.blocks)} bytes of their digests"
        problem = coding.overlap(header.coded)
        if problem is not None:
            return problem
    if any(stored.file > len(header.lent) for stored in header.objects):
        return "an object of a file that lends nothing"
    # The tensors of a file that borrows are known only with those that it borrows of.
    problem = _deriving_problem(header) or (
        None if header.lent else deriving.problem(header.tensors, header.derived)
    )
    if problem is not None:
        return problem
    if header.lent:
        return _borrowing_problem(header)
    return (
        tensor_problem(header.tensors, header.tensor_bytes)
        or _object_problem(header.objects, header.held_bytes)
        or _block_problem(header)
        or _part_problem(header)
    )


def _deriving_problem(header: Header) -> str | None:
    ways = {block.way for block in header.coded or () if block.way.codec == deriving.ROUNDED.codec}
    if ways - {deriving.ROUNDED} or bool(ways) != bool(header.derived):
        return f"{len(header.derived)} derived tensors, and blocks coded by {sorted(ways)}"
    return None


def _borrowing_problem(header: Header) -> str | None:
    """The same of a file that borrows blocks."""
    if header.tensors or header.parts:
        return "tensors of its own in a file that borrows its blocks"
    if len(header.blocks) % DIGEST_BYTES:
        return f"{len(header.blocks)} bytes of block digests"
    own = [stored for stored in header.objects if stored.file == 0]
    return _object_problem(own, header.held_bytes) or borrowing.problem(
        header.stretches, image_bytes=header.tensor_bytes,
        held=len(header.blocks) // DIGEST_BYTES, lent=header.lent,
    )  # fmt: skip


def tensor_problem(tensors: Sequence[TensorEntry], tensor_bytes: int) -> str | None:
    """Why these tensors do not fill the range from 0 to `tensor_bytes`, in words, or None."""
    at = 0
    for tensor in tensors:
        if tensor.start != at or tensor.stop < at:
            place = f"[{tensor.start}, {tensor.stop})"
            return f"{tensor.name!r} at {place} where byte {at} is next"
        at = tensor.stop
        if not _fits(tensor):
            return (
                f"{at - tensor.start} bytes for {tensor.name!r}, a {tensor.dtype} of shape "
                f"{list(tensor.shape)}"
            )
    if at != tensor_bytes:
        return f"tensors that end at byte {at} of a tensor area of {tensor_bytes}"
    return None


def _fits(tensor: TensorEntry) -> bool:
    """Whether dtype and shape come to the bytes that the entry has."""
    shape, dtype = tensor.shape, DTYPES.get(tensor.dtype)
    if dtype is None or math.prod(shape) * dtype.size_bytes != tensor.stop - tensor.start:
        return False
    if tensor.start != tensor.stop:
        return min(shape, default=0) >= 0 and tensor.stop <= MAX_OFFSET
    # An empty tensor may have huge sides, but safetensors and torch multiply them up to the zero.
    leading = 1
    for side in shape:
        leading *= side
        if not 0 <= side <= MAX_OFFSET or leading * dtype.size_bytes > MAX_OFFSET:
            return False
    return True


def _object_problem(objects: Sequence[ObjectEntry], tensor_bytes: int) -> str | None:
    """Why these objects do not follow the tensor area without a hole, in words, or None."""
    at = tensor_bytes
    for stored in objects:
        if stored.start != at or not at <= stored.stop <= MAX_OFFSET:
            return f"{stored.name!r} at [{stored.start}, {stored.stop}) where byte {at} is next"
        if len(stored.digest) != DIGEST_BYTES:
            return f"a digest of {len(stored.digest)} bytes for {stored.name!r}"
        at = stored.stop
    return None


def _block_problem(header: Header) -> str | None:
    wanted = block_count(header.tensor_bytes) * DIGEST_BYTES
    if len(header.blocks) == wanted:
        return None
    return f"{len(header.blocks)} bytes of block digests where {wanted} are due"


def _part_problem(header: Header) -> str | None:
    """Why these parts are not boxes of larger tensors, in words, or None."""
    if not header.parts:
        return None
    shapes = {tensor.name: tensor.shape for tensor in header.tensors}
    for name, part in header.parts.items():
        shape = shapes.get(name)
        if shape is None:
            return f"a part {name!r} that is no tensor of the file"
        fits = len(shape) == len(part.shape) == len(part.start) and all(
            start >= 0 and start + size <= whole <= MAX_OFFSET
            for start, size, whole in zip(part.start, shape, part.shape, strict=True)
        )
        if not fits or not part.tensor:
            return f"{name!r}, of shape {list(shape)}, as the part {part}"
    return None
