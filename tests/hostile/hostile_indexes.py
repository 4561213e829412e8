"""Indexes that are hostile. Each is a sound one with one change, and a right digest unless that is
the lie."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import msgspec
from hostile_case import Case

from laststep.codecs.digests import digest

if TYPE_CHECKING:
    from collections.abc import Iterator

Path = tuple[int | str, ...]

FILES, ENCODINGS, LAYOUTS, VALUES = 2, 3, 4, 5
PLAIN, ENCODED = ((LAYOUTS, number) for number in range(2))
LAYOUT, DIGESTS, RUNS = 0, 1, 2
RUN = (RUNS, 0)
BASE = (*ENCODED, *RUN, 5, 0)


def payload() -> list[Any]:
    """A plain data file; and one that is encoded against a file of an earlier checkpoint."""
    encoded = layout("e", "uint8", 8)
    base = [1, 2, 4096, 0, b"", [], b""]
    return [
        1,
        0,
        [
            ["m.safetensors", 4104, "", 0],
            ["blocks-r00000.pack", 6, "", 0],
            ["e~1-1.safetensors", 4104, "step-00000001.1-1", 1],
        ],
        [["planes", 2], ["patches", 1]],
        [
            [layout("m", "float32", 8), bytes(16), [[1, 0, 4096, 0, b"", [], b""]], {}],
            [encoded, bytes(16), [[1, 1, 1, 2, sizes(5), [base], bytes(16)]], {}],
        ],
        {"m": b"{}"},
    ]


def layout(item: str, dtype: str, size: int) -> list[Any]:
    shape = [size // {"float32": 4, "uint8": 1}[dtype]]
    return [f"{item}.safetensors", item, 4096, size, [["w", dtype, shape, 0, size]], {}]


def sizes(*stored: int) -> bytes:
    return struct.pack(f"<{len(stored)}I", *stored)


def sealed(content: bytes) -> bytes:
    return digest(content) + content


def sound() -> bytes:
    return sealed(msgspec.msgpack.encode(payload()))


def changed(path: Path, value: object) -> bytes:
    """The sound index with another value at a place."""
    found: Any = payload()
    inner = found
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return sealed(msgspec.msgpack.encode(found))


def _name_cases() -> Iterator[tuple[str, str, Path, object]]:
    name = (FILES, 0, 0)
    yield "file-parent", "a file outside the folder", name, "../m.safetensors"
    yield "file-deep-parent", "a file in the parent folder", name, "a/../m.safetensors"
    yield "file-absolute", "a file with an absolute path", name, "/m.safetensors"
    yield "file-hidden", "a file with a hidden name", name, ".safetensors"
    yield "file-deep-hidden", "a file in a hidden folder", name, ".a/m.safetensors"
    yield "file-deep", "a file two folders down", name, "a/b/m.safetensors"
    yield "file-nul", "a file name with a NUL", name, "a\0.safetensors"
    yield "file-long", "a file name of 300 bytes", name, "a" * 300 + ".safetensors"
    yield "file-suffix", "a file that holds no blocks", name, "manifest.json"
    yield "file-twice", "a file twice", (FILES, 1, 0), "m.safetensors"
    yield "file-number", "a file whose name is a number", name, 1
    yield (
        "file-many",
        "5,000 files",
        (FILES,),
        [[f"{number}.pack", 6, "", 0] for number in range(5_000)],
    )
    yield "file-size-negative", "a file of negative size", (FILES, 0, 1), -1
    yield "file-size-huge", "a file of 2^63 bytes", (FILES, 0, 1), 1 << 63
    yield "file-member", "a file with a fifth member", (FILES, 0), ["m.safetensors", 4104, "", 0, 0]
    yield "origin-parent", "a file of the folder above", (FILES, 2, 2), ".."
    yield "origin-path", "a file of a folder far away", (FILES, 2, 2), "/etc"
    named = (*PLAIN, LAYOUT, 0)
    yield "layout-parent", "a layout outside the folder", named, "../m.safetensors"
    yield "layout-absolute", "a layout with an absolute path", named, "/m.safetensors"
    yield "layout-hidden", "a layout with a hidden name", named, ".m.safetensors"
    yield "layout-twice", "a layout twice", (*ENCODED, LAYOUT, 0), "m.safetensors"


def _run_cases() -> Iterator[tuple[str, str, Path, object]]:
    run = (*PLAIN, *RUN)
    yield "run-beyond", "a block that ends behind its file", (*run, 2), 4097
    yield "run-offset-huge", "a block at byte 2^62", (*run, 2), 1 << 62
    yield "run-offset-negative", "a block at a negative offset", (*run, 2), -1
    yield "run-file", "a block in a file that is not listed", (*run, 1), 3
    yield "run-encoding", "a block in an encoding that is not listed", (*run, 3), 3
    yield "run-none", "no run for a block", (*PLAIN, RUNS), []
    yield (
        "run-empty",
        "a run of no blocks",
        (*PLAIN, RUNS),
        [[1, 0, 4096, 0, b"", [], b""], [0, 0, 4096, 0, b"", [], b""]],
    )
    yield "run-many", "a run of more blocks than there are", (*run, 0), 2
    yield "run-count-huge", "a run of 2^62 blocks", (*run, 0), 1 << 62
    yield "run-count-negative", "a run of -1 blocks", (*run, 0), -1
    yield "run-member", "a run with an eighth member", run, [1, 0, 4096, 0, b"", [], b"", 0]
    yield "run-short", "a run of two numbers", run, [1, 0]
    yield "sizes-raw", "sizes of blocks that are stored as they are", (*run, 4), sizes(8)
    stored = (*ENCODED, *RUN, 4)
    yield "sizes-missing", "no size of an encoded block", stored, b""
    yield "sizes-short", "a size of three bytes", stored, b"\5\0\0"
    yield "sizes-more", "more sizes than blocks", stored, sizes(4, 1)
    yield "sizes-beyond", "an encoded block that ends behind its file", stored, sizes(6)
    yield "sizes-huge", "an encoded block of 4 GiB", stored, sizes((1 << 32) - 1)
    yield "digests-missing", "no digest of a block", (*PLAIN, DIGESTS), b""
    yield "digests-short", "a digest of 15 bytes", (*PLAIN, DIGESTS), bytes(15)
    yield "digests-more", "more digests than blocks", (*PLAIN, DIGESTS), bytes(32)
    yield "digests-text", "digests that are text", (*PLAIN, DIGESTS), "0" * 16


def _base_cases() -> Iterator[tuple[str, str, Path, object]]:
    base = [1, 2, 4096, 0, b"", [], b""]
    yield "base-of-base", "a base with a base", (*BASE,), [1, 1, 1, 2, sizes(5), [base], bytes(16)]
    yield (
        "base-of-raw",
        "a base of a block that is stored as it is",
        (*PLAIN, *RUN),
        [1, 0, 4096, 0, b"", [base], bytes(16)],
    )
    yield "base-beyond", "a base that ends behind its file", (*BASE, 2), 4097
    yield "base-file", "a base in a file that is not listed", (*BASE, 1), 3
    yield "base-many", "more bases than blocks", (*BASE, 0), 2
    yield "base-digest", "a base without its digest", (*ENCODED, *RUN, 6), b""
    yield "base-digest-alone", "the digest of a base that there is not", (*ENCODED, *RUN, 5), []


def _encoding_cases() -> Iterator[tuple[str, str, Path, object]]:
    yield "encoding-path", "a codec that is a path", (ENCODINGS, 1, 0), "../x"
    yield "encoding-nameless", "a codec without a name", (ENCODINGS, 1, 0), ""
    yield "encoding-elements", "elements of three bytes", (ENCODINGS, 1, 1), 3
    yield "encoding-twice", "an encoding twice", (ENCODINGS, 1), ["planes", 2]


def _layout_cases() -> Iterator[tuple[str, str, Path, object]]:
    inner = (*PLAIN, LAYOUT)
    tensors = (*inner, 4)
    first = (*tensors, 0)
    yield "header-zero", "a header of no bytes", (*inner, 2), 0
    yield "header-unaligned", "a header of 4,000 bytes", (*inner, 2), 4000
    yield "header-huge", "a header of 1 TiB", (*inner, 2), 1 << 40
    yield "header-negative", "a header of -4,096 bytes", (*inner, 2), -4096
    yield "item-number", "an item that is a number", (*inner, 1), 1
    yield "tensor-bytes-short", "tensors that end behind the tensors", (*inner, 3), 7
    yield "tensor-bytes-long", "bytes of no tensor", (*inner, 3), 9
    yield "tensor-bytes-negative", "tensors of negative size", (*inner, 3), -8
    yield "tensor-dtype", "an unknown dtype", (*first, 1), "float31"
    yield "tensor-shape", "a shape of another size", (*first, 2), [3]
    yield "tensor-shape-negative", "negative sides", (*first, 2), [-1, -2]
    yield "tensor-shape-huge", "a side of 2^63", (*first, 2), [1 << 63]
    yield (
        "tensor-shape-overflow",
        "sides that come to 8 modulo 2^64",
        (*first, 2),
        [1 << 32, 1 << 32, 2],
    )
    yield "tensor-hole", "a hole before a tensor", (*first, 3), 4
    yield "tensor-backwards", "an end before the start", (*first, 4), -8
    yield "tensor-metadata", "a tensor named __metadata__", (*first, 0), "__metadata__"
    yield "tensor-short", "a tensor without an end", first, ["w", "float32", [2], 0]
    w, v = ["w", "float32", [1], 0, 4], ["w", "float32", [1], 4, 8]
    yield "tensor-twice", "a tensor twice", tensors, [w, v]
    yield (
        "tensor-overlap",
        "tensors that overlap",
        tensors,
        [["v", "float32", [2], 0, 8], ["w", "float32", [2], 0, 8]],
    )
    parts = (*inner, 5)
    yield "part-absent", "a part that is no tensor of the file", parts, {"x": ["x", [2], [0]]}
    yield "part-beyond", "a part that ends behind its tensor", parts, {"w": ["x", [3], [2]]}
    yield "part-negative", "a part that starts before its tensor", parts, {"w": ["x", [3], [-1]]}
    yield "part-rank", "a part of a tensor of other dimensions", parts, {"w": ["x", [3, 3], [0, 0]]}
    yield "part-nameless", "a part of a tensor without a name", parts, {"w": ["", [3], [0]]}
    yield "value-text", "a value that is text", (VALUES, "m"), "{}"
    yield "format-older", "a format that never was", (0,), 0
    yield "format-bool", "a format that is a boolean", (0,), True
    yield "format-text", "a format that is text", (0,), "1"
    yield "rank-negative", "a negative rank", (1,), -1


def _byte_cases() -> Iterator[tuple[str, str, bytes]]:
    good = sound()
    member = msgspec.msgpack.encode([*payload(), 0])
    base = msgspec.msgpack.encode([[1, 2, 4096, 0, b"", [], b""]])
    front, end = base.split(b"\x90")
    deep = front * 5_000 + b"\x90" + end * 5_000
    nested = b"\x91" * 10_000 + b"\x90"
    huge = bytearray(msgspec.msgpack.encode([1, 0]))
    huge[0:1] = b"\x96"  # six members, of which the third says how many it has
    yield "empty", "no bytes at all", b""
    yield "only-digest", "a digest of nothing", sealed(b"")
    yield "short", "15 bytes", good[:15]
    yield "digest", "a digest that is wrong", bytes([good[0] ^ 1]) + good[1:]
    yield "flipped", "a bit that flipped", good[:-1] + bytes([good[-1] ^ 1])
    yield "truncated", "the first half only", good[: len(good) // 2]
    yield "trailing", "a byte behind the payload", sealed(good[16:] + b"\0")
    yield "not-msgpack", "a payload that is not MessagePack", sealed(b"\xc1")
    yield "map", "a payload that is a map", sealed(msgspec.msgpack.encode({"format": 1}))
    yield "empty-array", "a payload of no members", sealed(b"\x90")
    yield "member", "a seventh member", sealed(member)
    yield "base-deep", "bases of bases, 5,000 deep", sealed(good[16:].replace(base, deep))
    yield "nested", "10,000 arrays within each other", sealed(nested)
    yield "nested-value", "the same in place of the files", sealed(bytes(huge) + nested)
    yield "count-array", "an array of 2^32 - 1 files", sealed(bytes(huge) + b"\xdd" + b"\xff" * 4)
    yield (
        "count-bytes",
        "a name of 2^32 - 1 bytes",
        sealed(bytes(huge) + b"\x91\x94\xdb" + b"\xff" * 4),
    )
    yield (
        "count-map",
        "a map of 2^32 - 1 values",
        sealed(bytes(huge) + b"\x90\x90\x90\xdf" + b"\xff" * 4),
    )
    yield (
        "name-utf8",
        "a name that is not UTF-8",
        sealed(good[16:].replace(b"m.safetensors", b"\xff.safetensors", 1)),
    )


def index_cases() -> Iterator[Case]:
    for name, why, data in _byte_cases():
        yield Case(name=f"index-{name}.bin", raises="CorruptError", why=why, data=data)
    makers = (_name_cases, _run_cases, _base_cases, _encoding_cases, _layout_cases)
    for make in makers:
        for name, why, path, value in make():
            data = changed(path, value)
            yield Case(name=f"index-{name}.bin", raises="CorruptError", why=why, data=data)
    later = msgspec.msgpack.encode([9, {"new": True}])
    yield Case(
        name="index-format-newer.bin",
        raises="UsageError",
        why="a later format, which needs a later laststep",
        data=sealed(later),
    )
