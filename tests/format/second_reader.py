"""A reader of runs that was written from docs/format.md and shares no code with laststep.

It takes the long way: all indexes, no tables. What is not as the page says is an `AssertionError`.
"""

from __future__ import annotations

import base64
import itertools
import json
import math
import re
import struct
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
import xxhash
import zstandard

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

Json = dict[str, Any]
BLOCK = 1 << 20
FOLDER = re.compile(r"step-(\d{8,20})\.(\d{1,20})-(\d{1,20})")
NAMES = {
    1: "bool uint8 int8 float8_e4m3fn float8_e5m2 float8_e8m0fnu float8_e4m3fnuz float8_e5m2fnuz "
    "float4_e2m1fn_x2",
    2: "uint16 int16 float16 bfloat16",
    4: "uint32 int32 float32 complex32",
    8: "uint64 int64 float64 complex64",
    16: "complex128",
}
SIZES = {name: size for size, names in NAMES.items() for name in names.split()}


# --- documents -----------------------------------------------------------------------------------


def unsealed(path: Path, member: str, space: str) -> Json:
    """The content of a document that carries its digest."""
    data = path.read_bytes()
    content = data[len(f'{{"digest":{space}"xxh3-128:{"0" * 32}",{space}"{member}":{space}') : -1]
    told = f'"digest":{space}"xxh3-128:{xxhash.xxh3_128_hexdigest(content)}"'
    assert data == b"{" + f'{told},{space}"{member}":{space}'.encode() + content + b"}", path
    found: Json = json.loads(content)
    assert found["format"] == 1, path
    return found


def newest(run: Path) -> Path:
    """The folder of the newest checkpoint of the lineage."""
    assert json.loads((run / "run.json").read_bytes())["format"] == 1
    commits = {}
    for folder in run.iterdir():
        match = FOLDER.fullmatch(folder.name)
        if match and (folder / "manifest.json").exists():
            content = unsealed(folder / "manifest.json", "manifest", " ")
            if content["decision"] == "commit":
                point = [content[name] for name in ("step", "term", "attempt")]
                assert point == [int(number) for number in match.groups()]
                commits[content["term"], content["attempt"]] = folder
    terms = {unsealed(path, "term", "")["term"] for path in (run / "terms").glob("*.json")}
    return commits[max(point for point in commits if point[0] in terms)]


# --- codecs of blocks ----------------------------------------------------------------------------


def unpacked(stored: bytes, size: int) -> bytes:
    """Bytes that are stored as they are, or fewer as a frame of zstandard."""
    found = stored
    if len(stored) != size:
        found = zstandard.ZstdDecompressor().decompress(stored)
    assert len(found) == size
    return found


def elements(data: bytes, count: int, width: int) -> tuple[bytes, bytes]:
    """So many elements, stored as planes, and what lies behind these."""
    found, at = bytearray(count * width), 4 * width
    for place, size in enumerate(struct.unpack(f"<{width}I", data[:at])):
        found[place::width] = unpacked(data[at : at + size], count)
        at += size
    return bytes(found), data[at:]


def sums(before: bytes, folded: bytes, width: int) -> bytes:
    """Elements of a base, with folded differences added to them."""
    found = b""
    for at in range(0, len(folded), width):
        one = int.from_bytes(folded[at : at + width], "little")
        old = int.from_bytes(before[at : at + width], "little")
        new = old + (-(one + 1) // 2 if one % 2 else one // 2)
        found += (new % (1 << 8 * width)).to_bytes(width, "little")
    return found


def decode(codec: str, data: bytes, size: int, width: int, before: bytes) -> bytes:
    if codec in ("raw", "rounded"):
        return data
    if codec == "planes":
        found, tail = elements(data, size // width, width)
        return found + tail
    width = min(width, 8)
    if codec == "subtract":
        folded, tail = elements(data, size // width, width)
        return sums(before, folded, width) + tail
    assert codec == "patches"
    count, gap_bytes, stored = struct.unpack("<III", data[:12])
    folded, tail = elements(data[12 + stored :], count, width)
    patched, at, gap, shift, nth = bytearray(before[: size // width * width]), 0, 0, 0, 0
    for byte in unpacked(data[12 : 12 + stored], gap_bytes):
        gap += (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            here, one = slice((at + gap) * width, (at + gap + 1) * width), nth * width
            patched[here] = sums(bytes(patched[here]), folded[one : one + width], width)
            at, gap, shift, nth = at + gap + 1, 0, 0, nth + 1
    assert nth == count
    return bytes(patched) + tail


def rounded(data: bytes, dtype: str) -> bytes:
    """Elements of fp32 as bf16 or fp16, to the nearest, ties to even. A NaN is FFFF in bf16; in
    fp16 it keeps its sign and the upper bits of its fraction, and is quiet."""
    bits = np.frombuffer(data, "<u4")
    nan = (bits & 0x7FFFFFFF) > 0x7F800000
    if dtype == "bfloat16":
        wide = bits.astype("u8")
        found = np.where(nan, 0xFFFF, (wide + 0x7FFF + (wide >> 16 & 1)) >> 16)
    else:
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            cast = bits.view("<f4").astype("<f2").view("<u2")
        found = np.where(nan, bits >> 16 & 0x8000 | 0x7E00 | bits >> 13 & 0x3FF, cast)
    return found.astype("<u2").tobytes()


# --- what one rank wrote -------------------------------------------------------------------------


class Tensor(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    data: bytes


class Part(NamedTuple):
    """A box of a tensor, as an entry holds it."""

    item: str
    tensor: str
    whole: tuple[int, ...]
    start: tuple[int, ...]
    held: Tensor


class Index:
    def __init__(self, folder: Path, rank: int, ranks: int, digest: bytes) -> None:
        each = max(128, -(-ranks // 1024))
        place = f"r{rank - rank % each:05d}/" if ranks > 256 else ""
        data = (folder / f"{place}index-r{rank:05d}").read_bytes()
        assert xxhash.xxh3_128_digest(data[16:]) == data[:16] == digest
        number, self.rank, files, encodings, stored, self.values = msgspec.msgpack.decode(data[16:])
        assert (number, self.rank) == (1, rank)
        self.encodings = [("raw", 1), *encodings]
        self.files = [(folder / file[0]).read_bytes() for file in files]
        assert [len(file) for file in self.files] == [file[1] for file in files]
        self.layouts = {entry[0][0]: entry for entry in stored}

    def blocks(self, runs: list[Any], end: int, at: int) -> Iterator[tuple[str, bytes]]:
        """Decode the blocks of some runs, of which the first begins at byte `at` of so many."""
        for count, file, begins, encoding, sizes, bases, digests in runs:
            offset = begins
            codec, width = self.encodings[encoding]
            earlier = self.blocks(bases, end, at)
            for number in range(count):
                length = min(BLOCK, end - at)
                told = int.from_bytes(sizes[4 * number : 4 * number + 4], "little")
                stored = told if encoding else length
                data = self.files[file][offset : offset + stored]
                assert len(data) == stored
                before = next(earlier)[1] if bases else b""
                assert not bases or digests[16 * number :][:16] == xxhash.xxh3_128_digest(before)
                yield codec, decode(codec, data, length, width, before)
                offset, at = offset + stored, at + length

    def tensor_bytes(self, name: str) -> bytes:
        """All tensors of a data file, one after the other, each block verified."""
        layout, digests, runs, _, derived = self.layouts[name]
        found, size = bytearray(), layout[3]
        for number, (codec, block) in enumerate(self.blocks(runs, size, 0)):
            data = block
            if codec == "rounded":
                stop = min(len(found) + BLOCK, size)
                data = self.put_together(block, len(found), stop, layout[4], derived)
            assert xxhash.xxh3_128_digest(data) == digests[16 * number : 16 * number + 16]
            found += data
        assert len(found) == size
        return bytes(found)

    def put_together(
        self, stored: bytes, at: int, end: int, tensors: list[Any], derived: Any
    ) -> bytes:
        """Bytes [at, end) of a file, stored as one bit for each derived tensor that has bytes
        there, and what is left when those of set bits are taken out."""
        here = [
            entry for entry in tensors if entry[0] in derived and entry[3] < end and entry[4] > at
        ]
        here = [entry for entry in here if entry[3] < entry[4]]
        size = -(-len(here) // 8)
        bits, rest, block = int.from_bytes(stored[:size], "little"), stored[size:], b""
        for number, (name, dtype, _, start, stop) in enumerate(here):
            if bits >> number & 1:
                low, high = max(start, at), min(stop, end)
                gap = low - at - len(block)
                file, tensor = derived[name]
                [first] = [entry[3] for entry in self.layouts[file][0][4] if entry[0] == tensor]
                master = self.tensor_bytes(file)[first + 2 * (low - start) :]
                block += rest[:gap] + rounded(master[: 2 * (high - low)], dtype)
                rest = rest[gap:]
        assert bits >> len(here) == 0
        return block + rest

    def parts(self) -> Iterator[Part]:
        """What the entries of all its data files hold."""
        for (name, item, _, size, tensors, boxes), *_ in self.layouts.values():
            data, at = self.tensor_bytes(name), 0
            for entry, dtype, shape, start, stop in tensors:
                assert (start, stop - start) == (at, math.prod(shape) * SIZES[dtype])
                owner, tensor = (item, entry) if item is not None else entry.split("/", 1)
                of, whole, first = boxes.get(entry, (tensor, shape, [0] * len(shape)))
                held = Tensor(dtype, tuple(shape), data[start:stop])
                yield Part(owner, of, tuple(whole), tuple(first), held)
                at = stop
            assert at == size


# --- tensors -------------------------------------------------------------------------------------


def joined(parts: list[Part]) -> Tensor:
    """A tensor, of its parts: every element once."""
    whole, size = parts[0].whole, SIZES[parts[0].held.dtype]
    data, seen = bytearray(math.prod(whole) * size), 0
    for part in parts:
        assert part.whole == whole
        shape = part.held.shape
        row = shape[-1] * size if shape else size
        seen += math.prod(shape)
        for number, index in enumerate(itertools.product(*map(range, shape[:-1]))):
            at = 0
            for one, start, side in zip((*index, 0), part.start, whole, strict=False):
                at = at * side + one + start
            data[at * size : at * size + row] = part.held.data[number * row : (number + 1) * row]
    assert seen == math.prod(whole)
    return Tensor(parts[0].held.dtype, whole, bytes(data))


def viewed(base: Tensor, entry: dict[str, Any]) -> Tensor:
    """A window into a base."""
    _, dtype, shape, stride, offset = entry["items"]
    shape, stride, size = shape["items"], stride["items"], SIZES[dtype]
    places = [
        offset + size * sum(i * step for i, step in zip(index, stride, strict=True))
        for index in itertools.product(*map(range, shape))
    ]
    return Tensor(dtype, tuple(shape), b"".join(base.data[at : at + size] for at in places))


def leaves(node: object) -> list[str]:
    """The names of the tensors in a tree, as typed JSON."""
    if isinstance(node, list):
        return [name for one in node for name in leaves(one)]
    if not isinstance(node, dict):
        return []
    return [node["name"]] if node.get("$") == "tensor" else leaves(list(node.values()))


def read(run: Path, rank: int = 0) -> dict[str, dict[str, Tensor]]:
    """All tensors of the newest checkpoint, by item and name; of items that each rank has for
    itself, those of one rank."""
    folder = newest(run)
    manifest = unsealed(folder / "manifest.json", "manifest", " ")
    joint, ranks = base64.b64decode(manifest["written"]["indexes"]), manifest.get("ranks", 1)
    digests = [joint[at : at + 16] for at in range(0, len(joint), 16)]
    indexes = [Index(folder, number, ranks, one) for number, one in enumerate(digests)]
    assert sum(len(index.files) for index in indexes) == manifest["written"]["files"]
    held = [(index, part) for index in indexes for part in index.parts()]
    found = {}
    for item in manifest["items"]:
        name, own = item["name"], item.get("per_rank", False)
        parts: dict[str, list[Part]] = {}
        for index, part in held:
            if part.item == name and (index.rank == rank or not own):
                parts.setdefault(part.tensor, []).append(part)
        stored = {tensor: joined(some) for tensor, some in parts.items()}
        found[name] = tensors = {}
        for index in indexes:
            if name in index.values and (index.rank == rank or not own):
                tree = json.loads(index.values[name])
                for leaf in leaves(tree["tree"]):
                    first = tree["ties"].get(leaf, leaf)
                    view = tree["views"].get(first)
                    base = stored[view["items"][0] if view else first]
                    tensors[leaf] = viewed(base, view) if view else base
    return found
