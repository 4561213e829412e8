"""Change what a checkpoint says, and put every digest right again: a lie that no digest tells.

A sound checkpoint is taken apart into plain JSON and bytes, changed at will, and written back. What
is written need not be sound: only the digests on the way to the change are.
"""

from __future__ import annotations

import base64
import contextlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from laststep.codecs.digests import digest, digest_text
from laststep.terms import ALIGN_BYTES, BLOCK_BYTES, MANIFEST_NAME, align_up

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

Json = Any
_TABLE = "~6table"


def to_json(value: Json) -> bytes:
    """Compact, and whatever Python holds: lone surrogates, huge numbers, NaN."""
    return json.dumps(value, separators=(",", ":")).encode()


@dataclass(slots=True)
class DataFile:
    """A data file, taken apart."""

    path: Path
    entries: dict[str, Json]
    """Of safetensors, without the metadata."""
    document: dict[str, Json]
    """What laststep says of it."""
    data: bytes

    @classmethod
    def read(cls, path: Path) -> DataFile:
        whole = path.read_bytes()
        at = 8 + int.from_bytes(whole[:8], "little")
        entries = json.loads(whole[8:at])
        document = json.loads(entries.pop("__metadata__")["laststep"])
        return cls(path, entries, document, whole[at:])

    def object(self, name: str) -> bytes:
        start, stop = self.entries[name]["data_offsets"]
        return self.data[start:stop]

    def replace_object(self, name: str, data: bytes) -> None:
        """Other bytes for an object, and other places for those behind it."""
        kept = {one: self.object(one) for one in self.document["objects"]} | {name: data}
        at = self.document["tensor_bytes"]
        self.data = self.data[:at]
        for one, its in kept.items():
            stop = at + len(its)
            self.entries[one] = {"dtype": "U8", "shape": [len(its)], "data_offsets": [at, stop]}
            self.data, at = self.data + its, stop

    def digest_again(self) -> None:
        """Put the digests of blocks and objects right, where there is something to be digested."""
        size = self.document.get("tensor_bytes")
        packed = {"lent", "coding"} & self.document.keys()  # whose blocks are not the tensors
        if isinstance(size, int) and 0 <= size <= len(self.data) and not packed:
            parts = (
                self.data[at : min(at + BLOCK_BYTES, size)] for at in range(0, size, BLOCK_BYTES)
            )
            self.document["blocks"] = base64.b64encode(b"".join(map(digest, parts))).decode()
        objects = self.document.get("objects")
        for name in objects if isinstance(objects, dict) else ():
            match self.entries.get(name):
                case {"data_offsets": [int(start), int(stop)]}:
                    objects[name] = digest(self.data[max(start, 0) : max(stop, 0)]).hex()

    def write(self) -> Json:
        """Write it, and return what a manifest has to say of it."""
        metadata = {"format": "pt", "laststep": to_json(self.document).decode()}
        text = to_json({"__metadata__": metadata, **self.entries})
        size = align_up(8 + len(text), ALIGN_BYTES)
        region = (size - 8).to_bytes(8, "little") + text.ljust(size - 8)
        self.path.write_bytes(region + self.data)
        return {"size_bytes": size + len(self.data), "header_bytes": size,
                "header_digest": digest_text(region)}  # fmt: skip


def sealed(content: bytes, member: str) -> bytes:
    return (
        b'{"digest": "'
        + digest_text(content).encode()
        + f'", "{member}": '.encode()
        + content
        + b"}"
    )


def change_manifest(folder: Path, change: Callable[[Json], Json]) -> None:
    path = folder / MANIFEST_NAME
    path.write_bytes(sealed(to_json(change(json.loads(path.read_bytes())["manifest"])), "manifest"))


def change_epoch(path: Path, change: Callable[[Json], Json]) -> None:
    content = to_json(change(json.loads(path.read_bytes())["epoch"]))
    path.write_bytes(
        b'{"digest":"' + digest_text(content).encode() + b'","epoch":' + content + b"}"
    )


def change_file(path: Path, change: Callable[[DataFile], None], *, right: bool = True) -> None:
    """Change a data file of a checkpoint; with `right`, its inner digests are right again too."""
    file = DataFile.read(path)
    change(file)
    if right:
        file.digest_again()
    said = file.write()
    change_record(path, said)


def change_record(path: Path, said: Json) -> None:
    """Have the manifest, or that of a group, say this of a data file."""
    folder = path.parent

    def tell(manifest: Json) -> Json:
        for record in manifest["files"]:
            if record["name"] == path.name:
                record.update(said)
        return manifest

    groups = folder / "groups"
    if not groups.is_dir():
        change_manifest(folder, tell)
        return
    for group in sorted(groups.iterdir()):
        change_group(folder, group, tell)


def change_group(folder: Path, path: Path, change: Callable[[Json], Json]) -> None:
    """Change the manifest of a group, and what the root says of it."""
    told = change(json.loads(path.read_bytes())["group"])
    content = to_json(told)
    path.write_bytes(sealed(content, "group"))

    def tell(manifest: Json) -> Json:
        for record in manifest["groups"]:
            if record["name"] == f"groups/{path.name}":
                record["digest"] = digest_text(content)
                files = told.get("files") if isinstance(told, dict) else None
                if isinstance(files, list):
                    record["files"] = len(files)
                    sizes = [one.get("size_bytes") for one in files if isinstance(one, dict)]
                    record["size_bytes"] = sum(n for n in sizes if isinstance(n, int))
        return manifest

    change_manifest(folder, tell)


def change_tree(folder: Path, item: str, change: Callable[[Json], Json]) -> None:
    """Change the tree of an item: typed JSON."""

    def act(file: DataFile) -> None:
        name = f"{item}/~6tree"
        file.replace_object(name, to_json(change(json.loads(file.object(name)))))

    change_file(folder / "shared.safetensors", act)


def change_table(folder: Path, change: Callable[[Json], Json]) -> None:
    """Change the table of a class of ranks, and what the manifest says of it. What msgpack cannot
    hold (huge numbers, lone surrogates) is changed again."""
    was = told = b""

    def act(file: DataFile) -> None:
        nonlocal was, told
        was = file.object(_TABLE)
        while not told:
            with contextlib.suppress(OverflowError, UnicodeEncodeError, RecursionError):
                told = msgspec.msgpack.encode(change(msgspec.msgpack.decode(was)))
        file.replace_object(_TABLE, told)

    def tell(manifest: Json) -> Json:
        for record in manifest["classes"]:
            if record["table"] == digest(was).hex():
                record["table"] = digest(told).hex()
        return manifest

    change_file(folder / "shared-r00000.safetensors", act)
    change_manifest(folder, tell)


def into_groups(folder: Path) -> None:
    """Make a checkpoint of one rank one of two ranks, each a group, who share its files."""
    path = folder / MANIFEST_NAME
    manifest = json.loads(path.read_bytes())["manifest"]
    (folder / "groups").mkdir()
    records = []
    for rank, some in enumerate((manifest["files"][:1], manifest["files"][1:])):
        group = {"format": 1, "step": manifest["step"], "epoch": manifest["epoch"],
                 "attempt": manifest["attempt"], "first": rank, "ranks": 1,
                 "files": [{**one, "rank": rank} for one in some]}  # fmt: skip
        content = to_json(group)
        name = f"groups/r{rank:05d}.json"
        (folder / name).write_bytes(sealed(content, "group"))
        size = sum(one["size_bytes"] for one in some)
        records.append({"name": name, "digest": digest_text(content), "first": rank, "ranks": 1,
                        "files": len(some), "size_bytes": size})  # fmt: skip
    items = [{**item, "per_rank": False} for item in manifest["items"]]
    del manifest["files"]
    told = {**manifest, "items": items, "ranks": 2, "groups": records}
    change_manifest(folder, lambda _: told)
