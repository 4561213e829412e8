"""Data files whose headers are hostile: ours, and those of safetensors that others wrote."""

from __future__ import annotations

import base64
import json
import struct
from typing import TYPE_CHECKING

from hostile_case import Case, Json

from laststep.codecs.digests import digest
from laststep.terms import BLOCK_BYTES, align_up

if TYPE_CHECKING:
    from collections.abc import Iterator

REGION_BYTES = 4096
DATA = bytes(range(24)) + b"{}"


def region(text: bytes, *, size: int = REGION_BYTES, length: int | None = None) -> bytes:
    length = size - 8 if length is None else length
    return length.to_bytes(8, "little") + text.ljust(size - 8)


def entry(dtype: str, shape: list[object], start: object, stop: object) -> Json:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def document() -> Json:
    return {
        "version": 1,
        "item": None,
        "digest": "xxh3-128",
        "block_bytes": 1048576,
        "tensor_bytes": 24,
        "blocks": base64.b64encode(digest(DATA[:24])).decode(),
        "objects": {"m/$tree": digest(b"{}").hex()},
        "dtypes": {"m/c": ["complex128", [1]]},
        "codec": "raw",
    }


def entries() -> Json:
    return {
        "m/c": entry("U8", [16], 0, 16),
        "m/w": entry("F32", [2, 1], 16, 24),
        "m/$tree": entry("U8", [2], 24, 26),
    }


def header_text(tensors: Json, metadata: Json | None) -> bytes:
    inner = {} if metadata is None else {"laststep": json.dumps(metadata)}
    return json.dumps({"__metadata__": {"format": "pt", **inner}, **tensors}).encode()


def sound_header() -> bytes:
    return region(header_text(entries(), document())) + DATA


def coded_document(*, lends: bool = False) -> Json:
    """Of a file whose blocks are encoded: all of an image, or one of three that lie elsewhere."""
    tensors = [["m/c", "complex128", [1]], ["m/w", "float32", [2, 1]]]
    said = {**document(), "version": 3, "dtypes": {}, "coding": coding()}
    if not lends:
        return {**said, "tensors": tensors}
    borrowed = {"lent": ["m~1-1.safetensors"], "stretches": [[1, 0, 0], [2, 1, 0]]}
    size = 2 * BLOCK_BYTES + 24
    return {**said, **borrowed, "tensor_bytes": size, "coding": coding(anchors=[[1, 1, 2]])}


def coding(**changed: object) -> Json:
    """One block of 24 bytes; with an anchor, where some are given."""
    way = ["patches", 2, True] if changed.get("anchors") else ["raw", 1, False]
    said: Json = {"ways": [way], "way": _table("B", 0), "starts": _table("Q", 0)}
    return {**said, "sizes": _table("I", 24), "anchors": [], **changed}


def _table(kind: str, *numbers: int) -> str:
    return base64.b64encode(struct.pack(f"<{len(numbers)}{kind}", *numbers)).decode()


def coded_entries(size: int = 24) -> Json:
    return {"~6blocks": entry("U8", [size], 0, size), "m/$tree": entry("U8", [2], size, size + 2)}


def sound_coded(*, lends: bool = False) -> bytes:
    return region(header_text(coded_entries(), coded_document(lends=lends))) + DATA


def _coding_cases() -> Iterator[tuple[str, str, Json]]:
    """(name, why, coding) for each unsound coding of a whole image."""
    yield "start", "a block that begins behind the end", coding(starts=_table("Q", 1 << 40))
    yield "start-huge", "a block behind all ends", coding(starts=_table("Q", (1 << 64) - 1))
    yield "size", "a block that ends behind the data", coding(sizes=_table("I", 25))
    yield "size-huge", "a block of more than 1 MiB", coding(sizes=_table("I", BLOCK_BYTES + 1))
    yield "way", "a way that there is not", coding(way=_table("B", 1))
    yield "ways", "no ways at all", coding(ways=[])
    yield "ways-many", "more ways than a byte can tell", coding(ways=[["a", 1, False]] * 257)
    yield "codec-path", "a codec whose name is a path", coding(ways=[["../raw", 1, False]])
    yield "codec-empty", "a codec without a name", coding(ways=[["", 1, False]])
    yield "codec-number", "a codec whose name is a number", coding(ways=[[1, 1, False]])
    yield "elements", "elements of 3 bytes", coding(ways=[["raw", 3, False]])
    yield "table-short", "a table of too few blocks", coding(starts="")
    yield "table-long", "a table of too many blocks", coding(starts=_table("Q", 0, 24))
    yield "table-base64", "a table that is no base64", coding(starts="!" * 12)
    yield "table-number", "a table that is a number", coding(starts=0)
    yield "field", "a coding with a further field", coding(extra=1)
    yield "anchor-alone", "an anchor where nobody lends", coding(anchors=[[1, 1, 0]])


def _anchor_cases() -> Iterator[tuple[str, str, Json]]:
    """The same of a file that borrows."""
    yield "anchor-self", "an anchor in the file itself", coding(anchors=[[1, 0, 0]])
    yield "anchor-file", "an anchor in a file that is not lent", coding(anchors=[[1, 2, 0]])
    yield "anchor-negative", "a negative anchor", coding(anchors=[[1, 1, -1]])
    yield "anchor-more", "an anchor too many", coding(anchors=[[1, 1, 0], [1, 1, 1]])
    yield "anchor-many", "2^60 anchors", coding(anchors=[[1 << 60, 1, 0]])
    yield "anchor-none", "no anchor where one is due", coding(ways=[["patches", 2, True]])


def _whole_cases() -> Iterator[tuple[str, str, list[object]]]:
    """(name, why, tensors) of a whole image."""
    yield "missing", "encoded blocks of no tensors", []
    yield "dtype", "an unknown dtype", [["t", "float31", [6]]]
    yield "size", "tensors of other size than the image", [["t", "float32", [7]]]
    yield "huge", "a side beyond 64 bits", [["t", "uint8", [1 << 70]]]
    yield "overflow", "sides that overflow to the size", [["t", "float32", [1 << 62, 4, 2]]]
    yield "negative", "negative sides", [["t", "float32", [-2, -3]]]
    yield "twice", "a tensor twice", [["t", "float32", [3]]] * 2


def _coded_cases() -> Iterator[tuple[str, str, Json, Json]]:
    """(name, why, document, entries) of files whose blocks are encoded."""
    good, lends, there = coded_document(), coded_document(lends=True), coded_entries()
    for name, why, said in _coding_cases():
        yield name, why, {**good, "coding": said}, there
    for name, why, said in _anchor_cases():
        yield name, why, {**lends, "coding": said}, there
    for name, why, tensors in _whole_cases():
        yield f"tensors-{name}", why, {**good, "tensors": tensors}, there
    two = {"blocks": base64.b64encode(2 * digest(DATA[:24])).decode()}
    overlap = coding(way=_table("B", 0, 0), sizes=_table("I", 12, 13), starts=_table("Q", 0, 11))
    twice = {**two, "coding": overlap, "stretches": [[2, 0, 0], [1, 1, 0]]}
    yield "overlap", "encoded blocks that overlap", {**lends, **twice}, there
    yield "list", "a coding that is a list", {**good, "coding": []}, there
    yield "digests", "more digests than encoded blocks", {**good, **two}, there
    beside = {**there, "m/$tree": entry("U8", [1], 25, 26)}
    beside = {"~6blocks": there["~6blocks"], "t": entry("U8", [1], 24, 25), **beside}
    yield "tensors-beside", "a tensor beside encoded blocks", good, beside
    also = {**lends, "tensors": good["tensors"]}
    yield "tensors-lent", "tensors in a file that borrows them", also, there
    yield "no-coding", "version 3 without a coding", {**document(), "version": 3}, entries()
    yield "version", "a coding in version 1", {**good, "version": 1}, there
    yield "version-2", "a coding in version 2", {**lends, "version": 2}, there
    yield "blocks-absent", "no entry for the blocks", good, {"m/$tree": entry("U8", [26], 0, 26)}
    yield "blocks-short", "an entry of fewer bytes than the blocks have", good, coded_entries(23)
    typed = {**there, "~6blocks": entry("F32", [6], 0, 24)}
    yield "blocks-typed", "blocks that are no row of bytes", good, typed
    borrowed = {"x": [1, 26, 30, digest(b"").hex()]}
    yield "borrowed", "an object that is borrowed of nobody", {**good, "borrowed": borrowed}, there


def _document_cases() -> Iterator[tuple[str, str, str, object]]:
    """(name, why, field, value) for each unsound field of the laststep document."""
    digests = {"m/$tree": digest(b"{}").hex()}
    yield "version-older", "a format version that never was", "version", 0
    yield "version-text", "a format version that is no int", "version", "1"
    yield "item-number", "an item that is no string", "item", 3
    yield "digest-unknown", "a digest of an unknown name", "digest", "md5"
    yield "block-bytes", "another size of blocks", "block_bytes", 4096
    yield "codec-unknown", "an unknown codec", "codec", "zstd"
    yield "tensor-bytes-short", "a tensor area that ends within a tensor", "tensor_bytes", 20
    yield "tensor-bytes-long", "a tensor area that reaches into an object", "tensor_bytes", 26
    yield "tensor-bytes-negative", "a negative tensor area", "tensor_bytes", -1
    yield "blocks-missing", "no digest for a block", "blocks", ""
    yield "blocks-too-many", "more digests than blocks", "blocks", "A" * 64
    yield "blocks-base64", "block digests that are no base64", "blocks", "!" * 24
    yield "object-digest-short", "an object's digest of 4 bytes", "objects", {"m/$tree": "00" * 4}
    yield "object-digest-hex", "an object's digest that is no hex", "objects", {"m/$tree": "x" * 32}
    yield "object-absent", "a digest without its object", "objects", {**digests, "m/x": "00" * 16}
    yield "object-is-tensor", "a float tensor named as object", "objects", {"m/w": "00" * 16}
    yield "dtypes-absent", "a dtype of no tensor", "dtypes", {"m/x": ["complex128", [1]]}
    yield "dtypes-unknown", "a described dtype that is unknown", "dtypes", {"m/c": ["c256", [1]]}
    yield "dtypes-size", "a described shape of other size", "dtypes", {"m/c": ["complex128", [2]]}
    yield "dtypes-object", "a dtype for an object", "dtypes", {"m/$tree": ["uint8", [2]]}
    yield (
        "dtypes-typed",
        "a dtype for what is not stored as bytes",
        "dtypes",
        {"m/w": ["int8", [8]]},
    )
    yield "unknown-field", "a field that version 1 does not have", "extra", 1


def _entry_cases() -> Iterator[tuple[str, str, str, Json]]:
    """(name, why, tensor, entry) for each unsound entry."""
    big = 1 << 62
    yield "dtype-unknown", "an unknown dtype", "m/w", entry("F31", [2, 1], 16, 24)
    yield "dtype-sub-byte", "a dtype of half a byte", "m/w", entry("F4", [16, 1], 16, 24)
    yield "dtype-number", "a dtype that is no string", "m/w", entry(7, [2, 1], 16, 24)  # type: ignore[arg-type]
    yield (
        "shape-negative",
        "negative sides whose product fits",
        "m/w",
        entry("F32", [-2, -1], 16, 24),
    )
    yield "shape-float", "a side that is no int", "m/w", entry("F32", [2.0, 1], 16, 24)
    yield "shape-bool", "a side that is a boolean", "m/w", entry("F32", [2, True], 16, 24)
    yield "shape-size", "a shape of another size", "m/w", entry("F32", [3], 16, 24)
    yield (
        "shape-overflow",
        "sides that overflow to the size",
        "m/w",
        entry("F32", [big, 4, 2], 16, 24),
    )
    yield (
        "shape-overflow-zero",
        "overflow hidden by a zero",
        "m/w",
        entry("F32", [big, big, 0], 16, 16),
    )
    yield "shape-huge", "a side beyond 64 bits", "m/w", entry("F32", [1 << 70], 16, 24)
    yield "offsets-hole", "a hole between tensors", "m/w", entry("F32", [1], 20, 24)
    yield "offsets-overlap", "tensors that overlap", "m/w", entry("F32", [4], 8, 24)
    yield "offsets-backwards", "an end before the begin", "m/w", entry("F32", [2], 24, 16)
    yield "offsets-negative", "a negative offset", "m/c", entry("U8", [17], -1, 16)
    yield "offsets-start", "data that do not begin at 0", "m/c", entry("U8", [15], 1, 16)
    yield "offsets-beyond", "an end behind the data", "m/$tree", entry("U8", [3], 24, 27)
    yield "offsets-short", "data that no entry covers", "m/$tree", entry("U8", [1], 24, 25)
    yield "offsets-huge", "an offset beyond 64 bits", "m/$tree", entry("U8", [2], 24, 1 << 64)
    yield (
        "entry-extra",
        "an entry with a further field",
        "m/w",
        {**entry("F32", [2], 16, 24), "x": 1},
    )
    yield "entry-fields", "an entry without offsets", "m/w", {"dtype": "F32", "shape": [2]}
    yield (
        "offsets-one",
        "one offset only",
        "m/w",
        {**entry("F32", [2], 16, 24), "data_offsets": [16]},
    )


def _text_cases() -> Iterator[tuple[str, str, bytes]]:
    """(name, why, header region) for headers that are wrong as a text."""
    good = header_text(entries(), document())
    w = json.dumps(entries()["m/w"]).encode()
    doc_twice = json.dumps(document())[:-1] + ', "item": "x"}'
    twice = {"__metadata__": {"format": "pt", "laststep": doc_twice}, **entries()}
    order = entries()
    order = {name: order[name] for name in ("m/w", "m/c", "m/$tree")}
    behind = {**entries(), "m/$tree": entry("U8", [2], 0, 2), "m/c": entry("U8", [16], 2, 18)}
    behind["m/w"] = behind.pop("m/w")
    yield "length-huge", "a length field of 2^63", region(good, length=1 << 63)
    yield "length-short", "a length that ends within the header", region(good, length=100)
    yield "length-zero", "a length of 0", region(good, length=0)
    yield "unaligned", "a region that is no multiple of 4,096", region(good, size=4000)
    yield "only-length", "a length field of a page and nothing else", region(good)[:8]
    yield "empty", "no bytes at all", b""
    yield "not-json", "no JSON", region(b"{nonsense")
    yield "json-list", "JSON that is no object", region(b"[]")
    yield "json-space", "white space before the JSON", region(b" " + good)
    yield "json-trailing", "text behind the JSON", region(good + b" {}")
    yield "utf8", "a name that is no UTF-8", region(good.replace(b"m/w", b"m/\xff"))
    yield "utf8-surrogate", "a name with a lone surrogate", region(good.replace(b"m/w", b"\\ud800"))
    yield "nested", "1,900 brackets", region(b'{"a":' + b"[" * 1900 + b"]" * 1900 + b"}")
    yield "entry-twice", "an entry twice", region(good[:-1] + b', "m/w": ' + w + b"}")
    yield (
        "key-twice",
        "a key twice in an entry",
        region(good.replace(b'"F32"', b'"F16", "dtype": "F32"')),
    )
    yield "field-twice", "a field of the document twice", region(json.dumps(twice).encode())
    yield "no-metadata", "no metadata", region(json.dumps(entries()).encode())
    yield "metadata-foreign", "metadata of another library", region(header_text(entries(), None))
    yield (
        "metadata-list",
        "metadata that is a list",
        region(json.dumps({"__metadata__": []}).encode()),
    )
    yield (
        "order",
        "entries in another order than their bytes",
        region(header_text(order, document())),
    )
    yield "tensor-behind", "a tensor behind an object", region(header_text(behind, document()))


def header_cases() -> Iterator[Case]:
    for name, why, field, value in _document_cases():
        text = header_text(entries(), {**document(), field: value})
        yield Case(
            name=f"header-{name}.safetensors", raises="Corrupt", why=why, data=region(text) + DATA
        )
    for name, why, tensor, changed in _entry_cases():
        text = header_text({**entries(), tensor: changed}, document())
        yield Case(
            name=f"header-{name}.safetensors", raises="Corrupt", why=why, data=region(text) + DATA
        )
    for name, why, data in _text_cases():
        whole = data if len(data) < 100 else data + DATA
        yield Case(name=f"header-{name}.safetensors", raises="Corrupt", why=why, data=whole)
    for name, why, said, there in _coded_cases():
        text = header_text(there, said)
        yield Case(
            name=f"header-coded-{name}.safetensors", raises="Corrupt", why=why,
            data=region(text, size=align_up(8 + len(text), REGION_BYTES)) + DATA,
        )  # fmt: skip
    borrowed = {"x": [1, 26, 30, digest(b"").hex()]}
    text = header_text(entries(), {**document(), "borrowed": borrowed})
    yield Case(
        name="header-borrowed.safetensors", raises="Corrupt", data=region(text) + DATA,
        why="an object that is borrowed of nobody",
    )  # fmt: skip
    newer = header_text(entries(), {**document(), "version": 9, "new": [1]})
    yield Case(
        name="header-version-newer.safetensors",
        raises="Usage",
        why="a later format, which needs a later laststep",
        data=region(newer) + DATA,
    )


def plain_cases() -> Iterator[Case]:
    a, b = entry("F32", [2], 0, 8), entry("F32", [4], 8, 24)
    bad: list[tuple[str, str, str, Json]] = [
        ("hole", "Corrupt", "a hole", {"a": a, "b": entry("F32", [3], 12, 24)}),
        ("overlap", "Corrupt", "tensors that overlap", {"a": a, "b": entry("F32", [5], 4, 24)}),
        ("same-place", "Corrupt", "two tensors in one place", {"a": a, "c": a, "b": b}),
        ("short", "Corrupt", "data that no entry covers", {"a": a}),
        ("metadata", "Corrupt", "metadata that are no strings", {"__metadata__": {"a": 1}, "b": b}),
        ("dtype", "Corrupt", "an unknown dtype", {"a": entry("F31", [2], 0, 8), "b": b}),
        ("sub-byte", "Usage", "a dtype of half a byte", {"a": entry("F4", [16], 0, 8), "b": b}),
    ]
    for name, raises, why, tensors in bad:
        text = json.dumps(tensors).encode()
        data = region(text, size=8 + len(text)) + DATA[:24]
        yield Case(name=f"plain-{name}.safetensors", raises=raises, why=why, data=data)
