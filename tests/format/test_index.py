"""The index: what is written is read, block by block, and whatever else arrives is refused."""

from __future__ import annotations

import contextlib
import struct
import sys
import tracemalloc
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from expect import raises
from laststep.codecs.digests import DIGEST_BYTES, digest
from laststep.constants import BLOCK_BYTES
from laststep.errors import CorruptError, UsageError
from laststep.format import index as index_format
from laststep.format.index import (
    RAW,
    BaseRef,
    BlockRef,
    BlockRun,
    Encoding,
    Index,
    StoredFile,
    StoredLayout,
    decode,
    encode,
    in_place,
    refs_of,
    runs_of,
    written_of,
)

sys.path.insert(0, str(Path(__file__).parent))

from layouts import layout_of, layouts, names

from saves_of import whole_index

PLANES, PATCHES = 1, 2
ENCODINGS = (Encoding("planes", 4), Encoding("patches", 4))
FILE_BYTES = 1 << 40
FILES = tuple(StoredFile(name=f"{number}.pack", size_bytes=FILE_BYTES) for number in range(3))


@st.composite
def block_refs(draw: st.DrawFn, size: int) -> list[BlockRef]:
    """Where the blocks of so many bytes might lie: some right behind the one before."""
    refs: list[BlockRef] = []
    for start in range(0, size, BLOCK_BYTES):
        whole = min(BLOCK_BYTES, size - start)
        ref = draw(one_ref(whole, [RAW, PLANES]))
        if draw(st.booleans()):
            base = BaseRef(
                draw(one_ref(whole, [RAW, PLANES])), draw(st.binary(min_size=16, max_size=16))
            )
            stored = draw(st.integers(0, BLOCK_BYTES))
            ref = BlockRef(ref.file, ref.offset, stored, PATCHES, base)
        if refs and draw(st.booleans()):
            before = refs[-1]
            ref = ref._replace(file=before.file, offset=before.offset + before.size_bytes)
        refs.append(ref)
    return refs


@st.composite
def one_ref(draw: st.DrawFn, whole: int, encodings: list[int]) -> BlockRef:
    encoding = draw(st.sampled_from(encodings))
    size = whole if encoding == RAW else draw(st.integers(0, BLOCK_BYTES))
    return BlockRef(draw(st.integers(0, 2)), draw(st.integers(0, 1 << 39)), size, encoding)


sizes = st.integers(0, 12 * BLOCK_BYTES) | st.sampled_from(
    [0, 1, BLOCK_BYTES, BLOCK_BYTES + 1, 3 * BLOCK_BYTES]
)


def bytes_layout(size: int, name: str = "m.safetensors"):
    return layout_of(("w", "uint8", (size,)), name=name)


@settings(max_examples=50, deadline=None)
@given(st.data(), sizes)
def test_runs_give_back_the_blocks(data: st.DataObject, size: int) -> None:
    refs = data.draw(block_refs(size))
    runs = runs_of(refs)
    assert list(refs_of(runs, bytes_layout(size))) == refs
    assert runs_of(list(refs_of(runs, bytes_layout(size)))) == runs
    assert len(runs) <= len(refs)


def test_blocks_that_follow_each_other_are_one_run() -> None:
    size = 3 * BLOCK_BYTES + 5
    layout = bytes_layout(size)
    refs = list(refs_of(in_place(layout, 0), layout))
    assert [ref.offset for ref in refs] == [4096 + n * BLOCK_BYTES for n in range(4)]
    assert [ref.size_bytes for ref in refs] == [BLOCK_BYTES] * 3 + [5]
    assert runs_of(refs) == in_place(layout, 0)
    refs[1] = refs[1]._replace(file=1, offset=0)
    assert [run.blocks for run in runs_of(refs)] == [1, 1, 2]


def test_bases_need_not_lie_together() -> None:
    base = [BaseRef(BlockRef(1, 7 * n, BLOCK_BYTES), bytes([n]) * 16) for n in range(2)]
    refs = [BlockRef(0, 3 * n, 3, PATCHES, base[n]) for n in range(2)]
    [run] = runs_of(refs)
    assert (run.blocks, len(run.bases), run.base_digests) == (
        2,
        2,
        b"".join(one.digest for one in base),
    )
    assert list(refs_of([run], bytes_layout(2 * BLOCK_BYTES))) == refs


@settings(max_examples=50, deadline=None)
@given(st.data(), sizes, st.dictionaries(names, st.binary(max_size=9), max_size=3))
def test_an_index_survives(data: st.DataObject, size: int, values: dict[str, bytes]) -> None:
    refs = data.draw(block_refs(size))
    blocks = StoredLayout(
        layout=bytes_layout(size),
        digests=data.draw(st.binary(min_size=16, max_size=16)) * len(refs),
        runs=runs_of(refs),
        lossy=data.draw(st.dictionaries(names, st.sampled_from(["bf16", "int8"]), max_size=2)),
    )
    plain = data.draw(layouts(name="r00000/other.safetensors"))
    digests = bytes(plain.block_count * DIGEST_BYTES)
    other = StoredLayout(layout=plain, digests=digests, runs=in_place(plain, 2))
    made = Index(
        rank=data.draw(st.integers(0, 1 << 24)),
        files=FILES,
        encodings=ENCODINGS,
        layouts=(blocks, other),
        values=values,
    )
    stored = encode(made)
    index_format.check(stored, where="here", expected=stored[:16])
    assert decode(stored, where="here") == made
    assert made.layouts[0].refs() == refs


def test_a_whole_save_is_described_and_summed_up() -> None:
    one, two = bytes_layout(10, "a.safetensors"), bytes_layout(0, "b.safetensors")
    made = whole_index(3, [one, two], [digest(b"a"), b""], {"a": b"{}"}, [{"w": "bf16"}, {}])
    data = encode(made)
    assert decode(data, where="here") == made
    written = written_of(made, data)
    assert (written.indexes, written.files, written.size_bytes) == (data[:16], 2, 4106 + 4096)
    assert (written.shared_bytes, written.lossy) == (0, ("bf16",))
    shared = replace(made, files=(replace(made.files[0], origin="step-00000001.1-1"),))
    assert written_of(shared, data).shared_bytes == 4106


def test_a_short_raw_block_may_be_a_base_at_the_end_of_its_file() -> None:
    size = BLOCK_BYTES + 100
    layout = bytes_layout(size)
    file = StoredFile(name="m~1-1.safetensors", size_bytes=layout.size_bytes)
    bases = [BaseRef(ref, bytes(16)) for ref in refs_of(in_place(layout, 1), layout)]
    refs = [BlockRef(0, 0, 5, PATCHES, bases[0]), BlockRef(0, 5, 5, PATCHES, bases[1])]
    stored = StoredLayout(layout=layout, digests=bytes(32), runs=runs_of(refs))
    made = Index(files=(FILES[0], file), encodings=ENCODINGS, layouts=(stored,))
    assert decode(encode(made), where="here").layouts[0].refs() == refs
    short = replace(file, size_bytes=file.size_bytes - 1)
    with raises(UsageError, found="'m.safetensors'"):
        encode(replace(made, files=(FILES[0], short)))


def sound_index() -> Index:
    """A layout of two blocks in place, and one of an encoded block."""
    whole = layout_of(("w", "float32", (BLOCK_BYTES // 4 + 1,)), name="a.safetensors")
    packed = layout_of(("w", "bfloat16", (9,)), name="b.safetensors")
    run = BlockRun(1, 1, 0, PLANES, struct.pack("<I", 1))
    return Index(
        files=FILES,
        encodings=ENCODINGS,
        layouts=(
            StoredLayout(layout=whole, digests=bytes(32), runs=in_place(whole, 0)),
            StoredLayout(layout=packed, digests=bytes(16), runs=(run,)),
        ),
    )


def with_layout(number: int, **changes: object) -> Index:
    made = sound_index()
    some = list(made.layouts)
    some[number] = replace(some[number], **changes)
    return replace(made, layouts=tuple(some))


UNSOUND = {
    "a format that never was": replace(sound_index(), format=0),
    "a file twice": replace(sound_index(), files=(FILES[0], FILES[0], FILES[2])),
    "a file elsewhere": replace(
        sound_index(), files=(replace(FILES[0], name="../0.pack"), *FILES[1:])
    ),
    "an encoding twice": replace(sound_index(), encodings=(ENCODINGS[1],) * 3),
    "a layout twice": replace(sound_index(), layouts=sound_index().layouts[:1] * 2),
    "too few digests": with_layout(0, digests=bytes(16)),
    "too few blocks": with_layout(0, runs=(BlockRun(1, 0, 4096),)),
    "a file that is not there": with_layout(0, runs=(BlockRun(2, 3, 4096),)),
    "a block beyond its file": with_layout(0, runs=(BlockRun(2, 0, FILE_BYTES),)),
    "sizes of raw blocks": with_layout(0, runs=(BlockRun(2, 0, 0, RAW, bytes(8)),)),
    "an encoded block without a size": with_layout(0, runs=(BlockRun(2, 0, 0, PLANES, bytes(4)),)),
}


@pytest.mark.parametrize("made", UNSOUND.values(), ids=UNSOUND)
def test_an_unsound_index_is_neither_written_nor_read(made: Index) -> None:
    with raises(UsageError, found=True):
        encode(made)
    payload = msgspec.msgpack.encode(made)
    with raises(CorruptError, where="here", found=True):
        decode(digest(payload) + payload, where="here")


def test_what_the_unsound_ones_are_made_of_is_sound() -> None:
    assert decode(encode(sound_index()), where="here") == sound_index()


def test_an_index_is_not_taken_for_another_one() -> None:
    one, other = encode(sound_index()), encode(Index(rank=1))
    with raises(CorruptError, where="here", found="xxh3-128:") as caught:
        index_format.check(one, where="here", expected=other[:16])
    assert caught.value.expected == f"xxh3-128:{other[:16].hex()}"
    assert caught.value.found == f"xxh3-128:{one[:16].hex()}"


def test_every_flipped_bit_is_corrupt() -> None:
    data = bytearray(encode(sound_index()))
    for bit in range(8 * len(data)):
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptError):
            decode(bytes(data), where="here")
        data[bit // 8] ^= 1 << bit % 8


def test_every_truncated_or_longer_index_is_corrupt() -> None:
    data = encode(sound_index())
    for size in range(len(data)):
        with pytest.raises(CorruptError):
            decode(data[:size], where="here")
    with pytest.raises(CorruptError):
        decode(data + b"\0", where="here")


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_changed_payload_with_a_right_digest_raises_only_our_errors(data: st.DataObject) -> None:
    payload = bytearray(encode(sound_index())[16:])
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(payload) - 1))
        payload[at] = data.draw(st.integers(0, 255))
    with contextlib.suppress(CorruptError, UsageError):  # a later format
        made = decode(digest(payload) + payload, where="here")
        for stored in made.layouts:
            assert len(stored.refs()) == stored.layout.block_count


def test_a_name_that_is_no_unicode_is_refused() -> None:
    with raises(UsageError, found="surrogates"):
        encode(Index(values={"\ud800": b""}))


def test_huge_counts_take_no_memory() -> None:
    layout = replace(bytes_layout(1), tensor_bytes=1 << 62)
    layout = replace(layout, tensors=(layout.tensors[0]._replace(shape=(1 << 62,), stop=1 << 62),))
    run = BlockRun(1 << 42, 0, 0, PLANES)
    made = Index(
        files=FILES,
        encodings=ENCODINGS,
        layouts=(StoredLayout(layout=layout, digests=b"", runs=(run,)),),
    )
    payload = msgspec.msgpack.encode(made)
    tracemalloc.start()
    with raises(CorruptError, where="here", found="4398046511104"):
        decode(digest(payload) + payload, where="here")
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_a_changed_payload_is_told_by_its_digest() -> None:
    data = encode(sound_index())
    changed = data[:-1] + bytes([data[-1] ^ 1])
    with pytest.raises(CorruptError) as raised:
        index_format.check(changed, where="here")
    assert raised.value.found == f"xxh3-128:{digest(changed[16:]).hex()}"
