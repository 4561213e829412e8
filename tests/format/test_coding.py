"""Tables of encoded blocks: what is written is read, and whatever else arrives is refused."""

from __future__ import annotations

import base64
import contextlib
import struct
import tracemalloc
from typing import TYPE_CHECKING

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from laststep.codecs.digests import DIGEST_BYTES, digest
from laststep.errors import Corrupt, Usage
from laststep.format import coding
from laststep.format.borrowing import BlockPlace, Stretch
from laststep.format.coding import CodedBlock, CodedBy, CodingDocument
from laststep.format.header import (
    Header,
    ObjectEntry,
    decode_header,
    encode_header,
    reserve_packed_bytes,
)
from laststep.format.safetensors import TensorEntry
from laststep.terms import BLOCK_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

LENT = 5


@st.composite
def blocks_of_a_file(draw: st.DrawFn) -> tuple[CodedBlock, ...]:
    """Blocks that may lie together, in any order and with gaps."""
    ways = draw(st.lists(st.builds(
        CodedBy, st.from_regex(coding.CODEC_NAME, fullmatch=True),
        st.sampled_from([1, 2, 4, 8, 16]), anchored=st.booleans(),
    ), min_size=1, max_size=6))  # fmt: skip
    found, at = [], draw(st.sampled_from([0, 0, 4096, 1 << 62]))
    for _ in range(draw(st.integers(0, 30))):
        at += draw(st.sampled_from([0, 0, 0, 1, 5000]))
        size = draw(st.integers(0, BLOCK_BYTES))
        way = draw(st.sampled_from(ways))
        place = BlockPlace(draw(st.integers(1, LENT)), draw(st.integers(0, 1 << 40)))
        found.append(CodedBlock(at, size, way, place if way.anchored else None))
        at += size
    return tuple(draw(st.permutations(found)))


@given(blocks=blocks_of_a_file())
def test_blocks_come_back_from_their_tables(blocks: tuple[CodedBlock, ...]) -> None:
    text = msgspec.json.encode(coding.encode(blocks))
    document = msgspec.json.decode(text, type=CodingDocument)
    assert coding.decode(document, held=len(blocks), lent=LENT) == blocks
    assert coding.overlap(blocks) is None


@given(blocks=blocks_of_a_file(), image_blocks=st.integers(0, 40), objects=st.integers(0, 3))
def test_a_header_of_encoded_blocks_fits_what_was_reserved_and_comes_back(
    blocks: tuple[CodedBlock, ...], image_blocks: int, objects: int
) -> None:
    lent = tuple(f"model~1-{number}.safetensors" for number in range(1, LENT + 1))
    borrowed = [BlockPlace(1 + n % LENT, n) for n in range(image_blocks)]
    own = [BlockPlace(0, n) for n in range(len(blocks))]
    places = own + borrowed
    header = Header(
        item="model", tensors=(), tensor_bytes=len(places) * BLOCK_BYTES,
        blocks=bytes(len(blocks) * DIGEST_BYTES), lent=lent,
        stretches=tuple(
            Stretch(1, place.file, place.block) for place in places
        ),
        coded=blocks, objects=_objects(objects, coding.held_bytes(blocks)),
    )  # fmt: skip
    codecs = sorted({block.way.codec for block in blocks}) or ["raw"]
    region = reserve_packed_bytes(header, codecs=codecs)
    written = encode_header(header, region_bytes=region)
    end = header.objects[-1].stop if objects else header.held_bytes
    assert decode_header(written, data_bytes=end, where="here") == header


def _objects(count: int, start: int) -> tuple[ObjectEntry, ...]:
    return tuple(
        ObjectEntry(name=f"o{n}", start=start + 7 * n, stop=start + 7 * n + 7, digest=digest(b""))
        for n in range(count)
    )


@given(
    shapes=st.lists(st.tuples(
        st.sampled_from(["bool", "bfloat16", "float8_e4m3fnuz", "float32", "complex128"]),
        st.lists(st.integers(0, 9), max_size=3),
    ), max_size=8),
    seed=st.integers(0, 3),
)  # fmt: skip
def test_a_whole_image_keeps_its_tensors(shapes: list[tuple[str, list[int]]], seed: int) -> None:
    sizes = {"bool": 1, "bfloat16": 2, "float8_e4m3fnuz": 1, "float32": 4, "complex128": 16}
    tensors, at = [], 0
    for number, (dtype, shape) in enumerate(shapes):
        size = sizes[dtype]
        for side in shape:
            size *= side
        tensors.append(TensorEntry(f't "{number}"\\', dtype, tuple(shape), at, at + size))
        at += size
    count = -(-at // BLOCK_BYTES)
    way = CodedBy("planes", 2, anchored=False)
    blocks = tuple(CodedBlock(7 * n, 7, way) for n in range(count))
    header = Header(
        item=None, tensors=tuple(tensors), objects=_objects(seed, 7 * count), tensor_bytes=at,
        blocks=bytes(count * DIGEST_BYTES), coded=blocks,
    )  # fmt: skip
    region = reserve_packed_bytes(header, codecs=["planes"])
    written = encode_header(header, region_bytes=region)
    end = header.objects[-1].stop if seed else header.held_bytes
    assert decode_header(written, data_bytes=end, where="here") == header


def table(kind: str, *numbers: int) -> str:
    return base64.b64encode(struct.pack(f"<{len(numbers)}{kind}", *numbers)).decode()


def sound() -> CodingDocument:
    """Two blocks, of which the second has an anchor."""
    return CodingDocument(
        ways=(("raw", 1, False), ("patches", 2, True)), way=table("B", 0, 1),
        starts=table("Q", 0, 10), sizes=table("I", 10, 5), anchors=((1, 1, 0),),
    )  # fmt: skip


def test_what_hostile_tables_are_derived_from_is_sound() -> None:
    assert len(coding.decode(sound(), held=2, lent=1)) == 2


HOSTILE = {
    "a way out of range": {"way": table("B", 0, 2)},
    "no ways": {"ways": ()},
    "too many ways": {"ways": (("raw", 1, False),) * 256 + (("patches", 2, True),)},
    "a codec of no name": {"ways": (("", 1, False), ("patches", 2, True))},
    "a codec in capitals": {"ways": (("Raw", 1, False), ("patches", 2, True))},
    "a codec that is a path": {"ways": (("../raw", 1, False), ("patches", 2, True))},
    "a codec with a line break": {"ways": (("raw\n", 1, False), ("patches", 2, True))},
    "a codec of a long name": {"ways": (("r" * 33, 1, False), ("patches", 2, True))},
    "elements of 3 bytes": {"ways": (("raw", 3, False), ("patches", 2, True))},
    "elements of -1 bytes": {"ways": (("raw", -1, False), ("patches", 2, True))},
    "elements of 2^62 bytes": {"ways": (("raw", 1 << 62, False), ("patches", 2, True))},
    "too few ways for the blocks": {"way": table("B", 0)},
    "too many starts": {"starts": table("Q", 0, 10, 20)},
    "sizes that are no base64": {"sizes": "!!!!!!!!!!!="},
    "sizes of other than ASCII": {"sizes": "ééééééééééé="},
    "sizes of a byte too many": {"sizes": table("I", 10, 5)[:-1] + "A"},
    "overlapping blocks": {"starts": table("Q", 0, 9)},
    "the same start": {"starts": table("Q", 3, 3)},
    "a start beyond all files": {"starts": table("Q", 0, (1 << 64) - 1)},
    "an end beyond all files": {"starts": table("Q", 0, (1 << 63) - 2)},
    "a size above a block": {"sizes": table("I", 10, BLOCK_BYTES + 1)},
    "a size of 4 GiB": {"sizes": table("I", 10, (1 << 32) - 1)},
    "an anchor in no file": {"anchors": ((1, 2, 0),)},
    "an anchor in the file itself": {"anchors": ((1, 0, 0),)},
    "an anchor in a negative file": {"anchors": ((1, -1, 0),)},
    "an anchor that is negative": {"anchors": ((1, 1, -1),)},
    "no anchor where one is due": {"anchors": ()},
    "more anchors than are due": {"anchors": ((2, 1, 0),)},
    "2^60 anchors": {"anchors": ((1 << 60, 1, 0),)},
    "anchors that cancel out": {"anchors": ((2, 1, 0), (-1, 1, 0))},
    "a stretch of no anchors": {"anchors": ((1, 1, 0), (0, 1, 0))},
}


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_table_is_refused(change: dict[str, object]) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=r"\w"):
            coding.decode(msgspec.structs.replace(sound(), **change), held=2, lent=1)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


_numbers = st.one_of(
    st.integers(-2, 40), st.sampled_from([1 << 31, 1 << 62, 1 << 63, 1 << 64, -(1 << 63)])
)
_texts = st.one_of(
    st.text(max_size=30),
    st.binary(max_size=40).map(lambda data: base64.b64encode(data).decode()),
)


@given(
    ways=st.lists(st.tuples(_texts, _numbers, st.booleans()), max_size=3),
    way=_texts, starts=_texts, sizes=_texts,
    anchors=st.lists(st.tuples(_numbers, _numbers, _numbers), max_size=3),
    held=st.integers(0, 5), lent=st.integers(0, 3),
)  # fmt: skip
def test_any_table_is_sound_or_refused(
    ways: Sequence[tuple[str, int, bool]],
    way: str,
    starts: str,
    sizes: str,
    anchors: Sequence[tuple[int, int, int]],
    held: int,
    lent: int,
) -> None:
    document = CodingDocument(
        ways=tuple(ways), way=way, starts=starts, sizes=sizes, anchors=tuple(anchors)
    )
    try:
        blocks = coding.decode(document, held=held, lent=lent)
    except ValueError:
        return
    assert len(blocks) == held
    assert coding.overlap(blocks) is None
    for block in blocks:
        assert (block.anchor is not None) == block.way.anchored
        assert block.anchor is None or 1 <= block.anchor.file <= lent


@given(data=st.data())
def test_a_header_with_some_bytes_changed_is_sound_or_refused(data: st.DataObject) -> None:
    way = CodedBy("planes", 2, anchored=False)
    header = Header(
        item="m", tensors=(TensorEntry("t", "bfloat16", (BLOCK_BYTES,), 0, 2 * BLOCK_BYTES),),
        objects=(), tensor_bytes=2 * BLOCK_BYTES, blocks=bytes(2 * DIGEST_BYTES),
        coded=(CodedBlock(0, 9, way), CodedBlock(9, 3, coding.RAW)),
    )  # fmt: skip
    region = reserve_packed_bytes(header, codecs=["planes"])
    text = bytearray(encode_header(header, region_bytes=region))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(8, len(bytes(text).rstrip()) - 1))
        text[at] = data.draw(st.sampled_from(b'0129AZaz"\\,:[]{}+/= \xff'))
    with contextlib.suppress(Corrupt, Usage):
        assert decode_header(bytes(text), data_bytes=12, where="here").held_bytes <= 12
