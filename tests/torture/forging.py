"""Change what a checkpoint says, and put every digest right again: a lie that no digest tells.

A sound checkpoint is taken apart into plain JSON and bytes, changed at will, and written back. What
is written need not be sound: only the digests on the way to the change are.
"""

from __future__ import annotations

import base64
import contextlib
import json
from typing import TYPE_CHECKING, Any

import msgspec

from laststep.codecs.digests import DIGEST_BYTES, digest, digest_text
from laststep.constants import MANIFEST_NAME
from laststep.format import index as index_format
from laststep.plan.files import LAYOUT_NAME

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

Json = Any
_VALUES = 5
"""The place of the values in an index."""


def to_json(value: Json) -> bytes:
    """Compact, and whatever Python holds: lone surrogates, huge numbers, NaN."""
    return json.dumps(value, separators=(",", ":")).encode()


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
    content = to_json(change(json.loads(path.read_bytes())["term"]))
    path.write_bytes(b'{"digest":"' + digest_text(content).encode() + b'","term":' + content + b"}")


def change_index(folder: Path, change: Callable[[Json], Json], rank: int = 0) -> None:
    """Change an index, as the plain lists that it is written as: its format, rank, files,
    encodings, layouts and values. What msgpack cannot hold (huge numbers, lone surrogates) is
    changed again."""
    path = folder / f"index-r{rank:05d}"
    payload = path.read_bytes()[DIGEST_BYTES:]
    told = b""
    while not told:
        with contextlib.suppress(OverflowError, UnicodeEncodeError, RecursionError, TypeError):
            told = msgspec.msgpack.encode(change(msgspec.msgpack.decode(payload)))
    _write_index(path, told, rank)


def _write_index(path: Path, payload: bytes, rank: int) -> None:
    """Write an index, and have the manifest say its digest."""
    path.write_bytes(digest(payload) + payload)

    def tell(manifest: Json) -> Json:
        known = bytearray(base64.b64decode(manifest["written"]["indexes"]))
        known[rank * DIGEST_BYTES : (rank + 1) * DIGEST_BYTES] = digest(payload)
        manifest["written"]["indexes"] = base64.b64encode(known).decode()
        return manifest

    change_manifest(path.parent, tell)


def digest_again(folder: Path) -> None:
    """Put the digests of blocks right that lie as they are in the files of the first index."""
    path = folder / "index-r00000"
    index = index_format.decode(path.read_bytes(), where=str(path))
    files = [(folder / file.name).read_bytes() for file in index.files]
    layouts = []
    for stored in index.layouts:
        digests = bytearray(stored.digests)
        for number, ref in enumerate(stored.refs()):
            if ref.encoding == index_format.RAW:
                block = files[ref.file][ref.offset : ref.offset + ref.size_bytes]
                digests[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES] = digest(block)
        layouts.append(msgspec.structs.replace(stored, digests=bytes(digests)))
    data = index_format.encode(msgspec.structs.replace(index, layouts=tuple(layouts)))
    _write_index(path, data[DIGEST_BYTES:], 0)


def header_of(path: Path) -> Json:
    """The header of a data file, parsed."""
    whole = path.read_bytes()
    return json.loads(whole[8 : 8 + int.from_bytes(whole[:8], "little")])


def write_header(path: Path, header: Json) -> None:
    """Write another header over that of a data file; what is too long is cut."""
    whole = path.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    path.write_bytes(whole[:8] + to_json(header)[:length].ljust(length) + whole[8 + length :])


def change_tree(folder: Path, item: str, change: Callable[[Json], Json]) -> None:
    """Change the tree of an item: typed JSON."""

    def act(index: Json) -> Json:
        index[_VALUES][item] = to_json(change(json.loads(index[_VALUES][item])))
        return index

    change_index(folder, act)


def change_table(folder: Path, change: Callable[[Json], Json]) -> None:
    """Change the table of a class of ranks, and what the manifest says of it."""
    was = told = b""

    def act(index: Json) -> Json:
        nonlocal was, told
        was = index[_VALUES][LAYOUT_NAME]
        told = msgspec.msgpack.encode(change(msgspec.msgpack.decode(was)))
        index[_VALUES][LAYOUT_NAME] = told
        return index

    def tell(manifest: Json) -> Json:
        for record in manifest["layout_groups"]:
            if record["local_layout"] == digest(was).hex():
                record["local_layout"] = digest(told).hex()
        return manifest

    change_index(folder, act)
    change_manifest(folder, tell)


def into_ranks(folder: Path) -> None:
    """Make a checkpoint of one rank one of two ranks, each with some of its data files."""
    path = folder / "index-r00000"
    index = index_format.decode(path.read_bytes(), where=str(path))
    indexes = []
    for rank, some in enumerate((index.layouts[:1], index.layouts[1:])):
        (first, *_) = (stored.runs[0].file for stored in some)
        layouts = tuple(
            msgspec.structs.replace(
                stored,
                runs=tuple(
                    msgspec.structs.replace(run, file=run.file - first) for run in stored.runs
                ),
            )
            for stored in some
        )
        files = index.files[first : first + len(some)]
        values = {} if rank else index.values
        one = msgspec.structs.replace(index, rank=rank, files=files, layouts=layouts, values=values)
        indexes.append(index_format.encode(one))
        (folder / f"index-r{rank:05d}").write_bytes(indexes[-1])

    def tell(manifest: Json) -> Json:
        digests = b"".join(index[:DIGEST_BYTES] for index in indexes)
        manifest["written"]["indexes"] = base64.b64encode(digests).decode()
        items = [{**item, "per_rank": False} for item in manifest["items"]]
        return {**manifest, "items": items, "ranks": 2}

    change_manifest(folder, tell)
