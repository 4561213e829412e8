"""A reader of runs that was written from docs/format.md and shares no code with laststep.

It takes the long way: all indexes, no tables. What is not as the page says is an `AssertionError`.
"""

from __future__ import annotations

import base64
import itertools
import json
import math
import re
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import second_codecs
import xxhash
from second_tensors import SIZES, Part, Tensor, joined, viewed

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

Json = dict[str, Any]
BLOCK = 1 << 20
FOLDER = re.compile(r"step-(\d{8,20})\.(\d{1,20})-(\d{1,20})")


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


class Block(NamedTuple):
    """Where a block lies, and how long it is when it is decoded."""

    file: int
    offset: int
    stored: int
    encoding: int
    length: int


class Index:
    """What one rank wrote."""

    def __init__(self, folder: Path, rank: int, ranks: int, digest: bytes) -> None:
        each = max(128, -(-ranks // 1024))
        place = f"r{rank - rank % each:05d}/" if ranks > 256 else ""
        data = (folder / f"{place}index-r{rank:05d}").read_bytes()
        assert xxhash.xxh3_128_digest(data[16:]) == data[:16] == digest
        number, self.rank, files, self.encodings, stored, self.values = msgspec.msgpack.decode(
            data[16:]
        )
        assert (number, self.rank) == (1, rank)
        self.files = [(folder / file[0]).read_bytes() for file in files]
        assert [len(file) for file in self.files] == [file[1] for file in files]
        self.layouts = {entry[0][0]: entry for entry in stored}

    def blocks(self, runs: list[Any], size: int, at: int) -> Iterator[Block]:
        """The blocks of some runs, of which the first begins at byte `at` of so many."""
        for count, file, begins, encoding, sizes, _, _ in runs:
            offset = begins
            for number in range(count):
                length = min(BLOCK, size - at)
                told = int.from_bytes(sizes[4 * number : 4 * number + 4], "little")
                stored = told if encoding else length
                yield Block(file, offset, stored, encoding, length)
                offset, at = offset + stored, at + length

    def decoded(self, block: Block, before: bytes) -> bytes:
        data = self.files[block.file][block.offset : block.offset + block.stored]
        assert len(data) == block.stored
        codec, width = self.encodings[block.encoding - 1] if block.encoding else ("raw", 1)
        return second_codecs.DECODE[codec](data, block.length, width, before)

    def tensor_bytes(self, name: str) -> bytes:
        """All tensors of a data file, one after the other, each block verified."""
        layout, digests, runs, _, derived = self.layouts[name]
        found, size = bytearray(), layout[3]
        for run in runs:
            blocks = self.blocks([run], size, len(found))
            bases = self.blocks(run[5], size, len(found)) if run[5] else itertools.repeat(None)
            for nth, (block, base) in enumerate(zip(blocks, bases, strict=False)):
                before = b""
                if base is not None:
                    before = self.decoded(base, b"")
                    assert xxhash.xxh3_128_digest(before) == run[6][16 * nth : 16 * nth + 16]
                data = self.decoded(block, before)
                if block.encoding and self.encodings[block.encoding - 1] == ["rounded", 2]:
                    place = len(found), len(found) + block.length
                    data = second_codecs.put_together(data, *place, layout[4], derived, self.master)
                number = len(found) // BLOCK
                assert xxhash.xxh3_128_digest(data) == digests[16 * number : 16 * number + 16]
                found += data
        assert len(found) == size
        return bytes(found)

    def master(self, file: str, tensor: str) -> bytes:
        [(start, stop)] = [entry[3:] for entry in self.layouts[file][0][4] if entry[0] == tensor]
        return self.tensor_bytes(file)[start:stop]

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
