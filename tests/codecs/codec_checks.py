"""The checks that every block codec must pass.

The blocks cover every element size and all short lengths, special float values, all kinds of data,
and a base block that is equal, similar, unrelated or absent. Then the stored bytes are damaged in
many ways while `tracemalloc` watches the memory. A failure raises AssertionError with the case; the
cases are the same on every run.
"""

from __future__ import annotations

import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from laststep.constants import BLOCK_BYTES
from laststep.errors import CorruptError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from laststep.codecs.blocks import BlockCodec

ELEMENT_BYTES = (1, 2, 4, 8, 16)

_SPECIAL = {
    2: (0x8000, 0x0001, 0x7F80, 0xFF80, 0x7FC1, 0x7F81, 0xFFFF, 0x7C00, 0x7E01, 0x03FF),
    4: (0x80000000, 1, 0x7F800000, 0xFF800000, 0x7FC00001, 0x7F800001, 0xFFFFFFFF, 0x007FFFFF),
    8: (1 << 63, 1, 0x7FF << 52, 0xFFF << 52, 0x7FF8 << 48 | 1, 0x7FF << 52 | 1, 2**64 - 1),
}
"""-0, denormals, infinities and NaNs with payloads, quiet and signalling, as bits."""
_ODD_BYTES = (64, 1000, 4096, 4099, 70_001)
_DAMAGED = (*(f"{size} bytes" for size in (0, 1, 2, 3, 8, 16, 17, *_ODD_BYTES)), "a whole block")
_ROOM_BYTES = 1 << 20
"""Memory that a decoder may use for tables and contexts, in addition to a multiple of the sizes."""


class _Case(NamedTuple):
    what: str
    data: bytes
    element_bytes: int
    before: bytes | None

    def encode(self, codec: BlockCodec) -> bytes | None:
        return codec.encode(memoryview(self.data), self.element_bytes, _view(self.before))

    def decode(self, codec: BlockCodec, stored: bytes, size_bytes: int | None = None) -> bytes:
        size = len(self.data) if size_bytes is None else size_bytes
        return codec.decode(memoryview(stored), size, self.element_bytes, _view(self.before))


def check_codec(codec: BlockCodec) -> None:
    """Raise AssertionError unless the codec fulfils every MUST of the protocol."""
    cases = list(_cases())
    stored = [_check_round_trip(codec, case) for case in cases]
    check(any(one is not None for one in stored), "it never encodes a block")
    _check_threads(codec, cases, stored)
    # Once per distinct encoding: many codecs ignore the base block.
    chosen = {
        (case.data, case.element_bytes, one): case
        for case, one in zip(cases, stored, strict=True)
        if one is not None and case.what.startswith(_DAMAGED)
    }
    rng = np.random.default_rng(1)
    tracemalloc.start()
    try:
        for (_, _, one), case in chosen.items():
            _check_damaged(codec, case, one, rng)
    finally:
        tracemalloc.stop()


def check(condition: object, found: str) -> None:
    if not condition:
        raise AssertionError(found)


def _cases() -> Iterator[_Case]:
    rng = np.random.default_rng(0)
    for width in ELEMENT_BYTES:
        for size in (*range(18), *_ODD_BYTES):
            for what, data in _contents(rng, size, width):
                for beside, before in _befores(rng, data, width):
                    yield _Case(f"{size} bytes, {what}, {beside}", data, width, before)
        weights = (rng.standard_normal(BLOCK_BYTES // 4) * 0.02).astype("<f4")
        whole = weights.tobytes()
        yield _Case("a whole block", whole, width, None)
        yield _Case("an equal block", whole, width, _alike(rng, whole, width))


def _contents(rng: np.random.Generator, size: int, width: int) -> Iterator[tuple[str, bytes]]:
    yield "zeros", bytes(size)
    yield "random", rng.bytes(size)
    yield "floats", _floats(rng, size, width)
    special = b"".join(
        number.to_bytes(min(width, 8), "little") for number in _SPECIAL.get(min(width, 8), (255,))
    )
    yield "special", (special * (size // len(special) + 1))[:size]
    yield "rising", (np.arange(size // width + 1) // 3).astype("<u8").tobytes()[:size]


def _floats(rng: np.random.Generator, size: int, width: int) -> bytes:
    numbers = rng.standard_normal(size // min(width, 8) + 2) * 0.02
    if width == 2:  # bf16
        return (numbers.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()[:size]
    return numbers.astype("<f4" if width == 4 else "<f8").tobytes()[:size]


def _befores(
    rng: np.random.Generator, data: bytes, width: int
) -> Iterator[tuple[str, bytes | None]]:
    yield "alone", None
    yield "unchanged", data
    yield "alike", _alike(rng, data, width)
    yield "unrelated", rng.bytes(len(data))
    yield "shorter before", data[:-1]
    yield "longer before", data + b"x"


def _alike(rng: np.random.Generator, data: bytes, width: int) -> bytes:
    """Return a copy that differs in one element out of forty, and in the tail."""
    near = np.frombuffer(data, np.uint8).copy()
    near[np.flatnonzero(rng.random(len(near) // width) < 1 / 40) * width] += 1
    near[len(near) - len(near) % width :] += 1
    return near.tobytes()


def _check_round_trip(codec: BlockCodec, case: _Case) -> bytes | None:
    stored = case.encode(codec)
    about = f"{case.what}, elements of {case.element_bytes}"
    check(case.encode(codec) == stored, f"{about}: encoded twice, it differs")
    if stored is None:
        return None
    check(type(stored) is bytes, f"{about}: encoded as {type(stored)}")
    check(len(stored) <= len(case.data), f"{about}: encoded as {len(stored)} bytes, which is more")
    found = case.decode(codec, stored)
    check(type(found) is bytes, f"{about}: decoded as {type(found)}")
    check(len(found) == len(case.data), f"{about}: decoded as {len(found)} bytes")
    check(found == case.data, f"{about}: decoded as other bytes")
    return stored


def _check_threads(codec: BlockCodec, cases: list[_Case], expected: list[bytes | None]) -> None:
    """Check that four concurrent threads encode and decode the same bytes as one."""
    known = [
        (case, stored, None if stored is None else case.decode(codec, stored))
        for case, stored in zip(cases, expected, strict=True)
    ]

    def act(first: int) -> None:
        for case, stored, data in known[first::4]:
            check(case.encode(codec) == stored, f"{case.what}: threads encode differently")
            if stored is not None:
                check(
                    case.decode(codec, stored) == data, f"{case.what}: threads decode differently"
                )

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(act, range(4)))


def _check_damaged(codec: BlockCodec, case: _Case, stored: bytes, rng: np.random.Generator) -> None:
    size, width = len(case.data), case.element_bytes
    cuts = {cut for cut in (0, 1, len(stored) // 2, len(stored) - 1) if 0 <= cut < len(stored)}
    wrong = {size + 1, size + width, max(size - 1, 0), max(size - width, 0), 2 * size, 0}
    damaged = [
        *((stored[:cut], size, f"cut to {cut}") for cut in cuts),
        (stored + b"\0", size, "lengthened by a byte"),
        (stored + stored[:40] + b"\0", size, "lengthened by itself"),
        *(
            (stored, other, f"declared as {other}")
            for other in wrong - {size}
            if other <= BLOCK_BYTES
        ),
    ]
    for data, declared, how in damaged:
        found = _decode(codec, case, data, declared, how)
        about = f"{case.what}, elements of {width}, {how}"
        check(found is None, f"{about}: Corrupt was not raised")
    for at in {0, len(stored) - 1, *rng.integers(0, max(1, len(stored)), 6).tolist()}:
        if 0 <= at < len(stored):
            flipped = bytearray(stored)
            flipped[at] ^= 1 << int(rng.integers(8))
            _decode(codec, case, bytes(flipped), size, f"byte {at} flipped")
    _decode(codec, case, rng.bytes(len(stored)), size, "replaced by noise")
    for other in ELEMENT_BYTES:
        _decode(codec, case._replace(element_bytes=other), stored, size, f"elements of {other}")
    for before in (None, case.data[:-1], bytes(size)):
        _decode(codec, case._replace(before=before), stored, size, "a different base block")


def _decode(
    codec: BlockCodec, case: _Case, stored: bytes, size_bytes: int, how: str
) -> bytes | None:
    """Return the decoded bytes, or None after `CorruptError`. Check that they have the declared
    size and that decoding stayed within its memory limit."""
    about = f"{case.what}, elements of {case.element_bytes}, {how}"
    tracemalloc.reset_peak()
    held, _ = tracemalloc.get_traced_memory()
    try:
        found = case.decode(codec, stored, size_bytes)
    except CorruptError:
        found = None
    except Exception as error:
        raise AssertionError(f"{about}: {error!r} instead of Corrupt") from error
    _, peak = tracemalloc.get_traced_memory()
    bound = 8 * (min(max(size_bytes, 0), BLOCK_BYTES) + len(stored)) + _ROOM_BYTES
    check(peak - held <= bound, f"{about}: {peak - held} bytes of memory, more than {bound}")
    if found is not None:
        check(len(found) == size_bytes, f"{about}: {len(found)} bytes instead of {size_bytes}")
    return found


def _view(data: bytes | None) -> memoryview | None:
    return None if data is None else memoryview(data)
