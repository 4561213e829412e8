"""A reader of runs that was written from docs/format.md and shares no code with laststep.

It takes the long way: all indexes, no tables. What is not as the page says is an `AssertionError`.
The codecs of blocks are in `second_codecs`, and what puts tensors together is in `second_tensors`.
"""

from __future__ import annotations

import base64
import json
import math
import re
from typing import TYPE_CHECKING, Any

import msgspec
import xxhash
from second_codecs import decode
from second_tensors import SIZES, Part, Tensor, joined, viewed

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

Json = dict[str, Any]
BLOCK = 1 << 20
FOLDER = re.compile(r"step-(\d{8,20})\.(\d{1,20})-(\d{1,20})")


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


# --- what one rank wrote -------------------------------------------------------------------------


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

    def blocks(self, runs: list[Any], end: int, at: int) -> Iterator[bytes]:
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
                before = next(earlier) if bases else b""
                assert not bases or digests[16 * number :][:16] == xxhash.xxh3_128_digest(before)
                yield decode(codec, data, length, width, before)
                offset, at = offset + stored, at + length

    def tensor_bytes(self, name: str) -> bytes:
        """All tensors of a data file, one after the other, each block verified."""
        layout, digests, runs, _ = self.layouts[name]
        found, size = bytearray(), layout[3]
        for number, block in enumerate(self.blocks(runs, size, 0)):
            assert xxhash.xxh3_128_digest(block) == digests[16 * number : 16 * number + 16]
            found += block
        assert len(found) == size
        return bytes(found)

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
