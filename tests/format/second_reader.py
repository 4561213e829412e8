"""A reader of runs that was written from docs/format.md and shares no code with laststep.

It takes the long way: all headers, no tables. What is not as the page says is an `AssertionError`.
"""

from __future__ import annotations

import base64
import itertools
import json
import math
import re
from typing import TYPE_CHECKING, Any, NamedTuple

import second_codecs
import xxhash

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

Json = dict[str, Any]
BLOCK = 1 << 20
FOLDER = re.compile(r"step-(\d{8,20})\.(\d{1,20})-(\d{1,20})")
DTYPES = {
    "BOOL": ("bool", 1), "U8": ("uint8", 1), "I8": ("int8", 1), "U16": ("uint16", 2),
    "I16": ("int16", 2), "U32": ("uint32", 4), "I32": ("int32", 4), "U64": ("uint64", 8),
    "I64": ("int64", 8), "F16": ("float16", 2), "BF16": ("bfloat16", 2), "F32": ("float32", 4),
    "F64": ("float64", 8), "F8_E4M3": ("float8_e4m3fn", 1), "F8_E5M2": ("float8_e5m2", 1),
    "F8_E8M0": ("float8_e8m0fnu", 1), "C64": ("complex64", 8),
}  # fmt: skip
MORE = {"float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "float4_e2m1fn_x2": 1, "complex32": 4,
        "complex128": 16}  # fmt: skip
SIZES = {**dict(DTYPES.values()), **MORE}


class Tensor(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    data: bytes


class Part(NamedTuple):
    """A box of a tensor, as an entry holds it."""

    tensor: str
    whole: tuple[int, ...]
    start: tuple[int, ...]
    held: Tensor


class DataFile(NamedTuple):
    rank: int
    item: str | None
    parts: list[Part]
    objects: dict[str, bytes]


def digest(data: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(data)


def unsealed(path: Path, member: str, space: str) -> Json:
    """The content of a document that carries its digest."""
    data = path.read_bytes()
    head = len(f'{{"digest":{space}"xxh3-128:{"0" * 32}",{space}"{member}":{space}')
    content = data[head:-1]
    front = f'{{"digest":{space}"xxh3-128:{digest(content)}",{space}"{member}":{space}'
    assert data == front.encode() + content + b"}", path
    found: Json = json.loads(content)
    assert found["format"] in (1, 2, 4), path
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
                assert [content["step"], content["epoch"], content["attempt"]] == [
                    int(number) for number in match.groups()
                ]
                commits[content["epoch"], content["attempt"]] = folder
    epochs = {unsealed(path, "epoch", "")["epoch"] for path in (run / "epochs").glob("*.json")}
    return commits[max(point for point in commits if point[0] in epochs)]


def files_of(folder: Path, manifest: Json) -> list[Json]:
    files: list[Json] = manifest.get("files", [])
    for record in manifest.get("groups", []):
        group = unsealed(folder / record["name"], "group", " ")
        same = ("first", "ranks")
        assert [group[key] for key in same] == [record[key] for key in same]
        assert [group[k] for k in ("step", "epoch", "attempt")] == [
            manifest[k] for k in ("step", "epoch", "attempt")
        ]
        assert len(group["files"]) == record["files"]
        assert sum(file["size_bytes"] for file in group["files"]) == record["size_bytes"]
        shared = [file["size_bytes"] for file in group["files"] if "origin" in file]
        assert sum(shared) == record.get("shared_bytes", 0)
        files = files + group["files"]
    return files


class Held(NamedTuple):
    """A data file as it lies on the disk, with its header verified."""

    header: Json
    said: Json
    data: bytes

    def block(self, number: int, size: int, files: dict[str, Held]) -> bytes:
        """A block that the file holds, verified; `files` are all that its image draws on."""
        found = self.data[number * BLOCK : number * BLOCK + size]
        if "coding" in self.said:
            found = self.decoded(number, size, files)
        blocks = base64.b64decode(self.said["blocks"])
        assert digest(found) == blocks[16 * number : 16 * number + 16].hex()
        return found

    def decoded(self, number: int, size: int, files: dict[str, Held]) -> bytes:
        """A block of a file that has `coding`: tables with a number for each block that it holds,
        little-endian: `way` (1 byte), `starts` (8), `sizes` (4). A way is a codec, the size of its
        elements, and whether the block has an anchor: another one, as long, that it is told by the
        difference to. `anchors` are stretches, of all blocks that have one in order."""
        coding = self.said["coding"]
        way, start, stored = (
            table(coding[name], size)[number]
            for name, size in (("way", 1), ("starts", 8), ("sizes", 4))
        )
        codec, width, anchored = coding["ways"][way]
        before = b""
        if anchored:
            ways = [coding["ways"][one][2] for one in table(coding["way"], 1)]
            stretches = coding["anchors"]
            places = [(file, first + n) for count, file, first in stretches for n in range(count)]
            assert len(places) == sum(ways)
            file, block = places[sum(ways[:number])]
            lender = files[self.said["lent"][file - 1]]
            before = lender.block(block, size, {})  # which has no anchor itself
        data = self.data[start : start + stored]
        assert len(data) == stored
        return second_codecs.DECODE[codec](data, size, width, before)


def table(text: str, size: int) -> list[int]:
    data = base64.b64decode(text)
    return [int.from_bytes(data[at : at + size], "little") for at in range(0, len(data), size)]


def held(folder: Path, record: Json) -> Held:
    data = (folder / record["name"]).read_bytes()
    assert len(data) == record["size_bytes"]
    region, data = data[: record["header_bytes"]], data[record["header_bytes"] :]
    assert record["header_digest"] == f"xxh3-128:{digest(region)}"
    assert int.from_bytes(region[:8], "little") == len(region) - 8
    header = json.loads(region[8:])
    said = json.loads(header.pop("__metadata__")["laststep"])
    assert (said["block_bytes"], said["codec"]) == (BLOCK, "raw")
    assert said["version"] == (3 if "coding" in said else 2 if "lent" in said else 1)
    at = 0
    for entry in header.values():
        assert entry["data_offsets"][0] == at
        at = entry["data_offsets"][1]
    assert at == len(data)
    return Held(header, said, data)


def opened(folder: Path, record: Json, records: dict[str, Json]) -> DataFile:
    """A data file, of which every byte is verified, with all that it borrows."""
    own = held(folder, record)
    files = [own] + [held(folder, records[name]) for name in own.said.get("lent", [])]
    size = own.said["tensor_bytes"]
    places = own.said.get("stretches", [[-(-size // BLOCK), 0, 0]])
    blocks = [(file, first + n) for count, file, first in places for n in range(count)]
    assert len(blocks) == -(-size // BLOCK)
    by_name = dict(zip([record["name"], *own.said.get("lent", [])], files, strict=True))
    data = b"".join(
        files[file].block(number, min(BLOCK, size - at * BLOCK), by_name)
        for at, (file, number) in enumerate(blocks)
    )
    image = files[1] if len(files) > 1 else own
    assert "lent" not in image.said
    assert (image.said["item"], image.said["tensor_bytes"]) == (own.said["item"], size)
    objects = {
        name: own.data[slice(*own.header[name]["data_offsets"])] for name in own.said["objects"]
    }
    sums = dict(own.said["objects"])
    for name, (file, start, stop, sum_) in own.said.get("borrowed", {}).items():
        objects[name], sums[name] = files[file].data[start:stop], sum_
    assert all(digest(objects[name]) == sums[name] for name in sums)
    parts = []
    for name, dtype, shape, start, stop in tensors_of(image):
        tensor = Tensor(dtype, tuple(shape), data[start:stop])
        assert math.prod(shape) * SIZES[dtype] == stop - start
        boxes = image.said.get("parts", {})
        of, whole, first = boxes.get(name, (name, shape, [0] * len(shape)))
        if name in boxes and image.said["item"] is None:
            of = f"{name.partition('/')[0]}/{of}"
        parts.append(Part(of, tuple(whole), tuple(first), tensor))
    return DataFile(record.get("rank", 0), own.said["item"], parts, objects)


def tensors_of(image: Held) -> Iterator[tuple[str, str, list[int], int, int]]:
    """The tensors of an image, and where each lies: by the entries; or one after the other, where
    blocks are coded and the document names them."""
    at = 0
    for name, dtype, shape in image.said.get("tensors", []):
        size = math.prod(shape) * SIZES[dtype]
        yield name, dtype, shape, at, at + size
        at += size
    for name, entry in image.header.items():
        if name not in image.said["objects"] and "coding" not in image.said:
            plain = DTYPES[entry["dtype"]][0], entry["shape"]
            dtype, shape = image.said["dtypes"].get(name, plain)
            yield name, dtype, shape, *entry["data_offsets"]


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


def leaves(node: object) -> list[str]:
    """The names of the tensors in a tree, as typed JSON."""
    if isinstance(node, list):
        return [name for one in node for name in leaves(one)]
    if not isinstance(node, dict):
        return []
    if node.get("$") == "tensor":
        return [node["name"]]
    return [name for one in node.values() for name in leaves(one)]


def viewed(base: Tensor, entry: Json) -> Tensor:
    """A window into a base."""
    _, dtype, shape, stride, offset = entry["items"]
    shape, stride, size = shape["items"], stride["items"], SIZES[dtype]
    places = [
        offset + size * sum(i * step for i, step in zip(index, stride, strict=True))
        for index in itertools.product(*map(range, shape))
    ]
    return Tensor(dtype, tuple(shape), b"".join(base.data[at : at + size] for at in places))


def read(run: Path, rank: int = 0) -> dict[str, dict[str, Tensor]]:
    """All tensors of the newest checkpoint, by item and name; of items that each rank has for
    itself, those of one rank."""
    folder = newest(run)
    manifest = unsealed(folder / "manifest.json", "manifest", " ")
    records = {record["name"]: record for record in files_of(folder, manifest)}
    files = [
        opened(folder, record, records) for record in records.values() if not record.get("lent")
    ]
    found = {}
    for item in manifest["items"]:
        name = item["name"]
        mine = [file for file in files if file.rank == rank or not item.get("per_rank")]
        parts: dict[str, list[Part]] = {}
        for file in mine:
            for part in file.parts:
                owner, _, tensor = part.tensor.partition("/")
                if file.item == name or (file.item is None and owner == name):
                    parts.setdefault(tensor if file.item is None else part.tensor, []).append(part)
        trees = [json.loads(f.objects[t]) for f in mine if (t := f"{name}/~6tree") in f.objects]
        stored = {tensor: joined(some) for tensor, some in parts.items()}
        found[name] = tensors = {}
        for tree in trees:
            for leaf in leaves(tree["tree"]):
                first = tree["ties"].get(leaf, leaf)
                view = tree["views"].get(first)
                base = stored[view["items"][0] if view else first]
                tensors[leaf] = viewed(base, view) if view else base
    return found
