"""Regenerates the hostile files of this folder: `PYTHONPATH=src python tests/hostile/make.py`.

One file per kind of malformation, each derived from a sound one by one change. The beginning of a
file's name says who must refuse it: `header-` decode_header, `plain-` decode_plain, `manifest-` the
manifest's decode, `group-` that of a group of ranks, `object-` the typed JSON's decode.
"""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from laststep.codecs.digests import digest, digest_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

REGION_BYTES = 4096
DATA = bytes(range(24)) + b"{}"
Json = dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    name: str
    raises: str
    why: str
    data: bytes


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


def _header_cases() -> Iterator[Case]:
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
    newer = header_text(entries(), {**document(), "version": 2, "new": [1]})
    yield Case(
        name="header-version-newer.safetensors",
        raises="Usage",
        why="a later format, which needs a later laststep",
        data=region(newer) + DATA,
    )


def _plain_cases() -> Iterator[Case]:
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


def manifest() -> Json:
    file = {
        "name": "shared.safetensors",
        "size_bytes": 4122,
        "header_bytes": 4096,
        "header_digest": digest_text(b""),
    }
    item = {"name": "m", "kind": "tree", "file": file["name"], "tensors": 2, "size_bytes": 24}
    return {
        "format": 1,
        "decision": "commit",
        "run": "8f14e45f",
        "step": 100,
        "epoch": 3,
        "attempt": 17,
        "created_s": 1.5,
        "laststep": "0.1.0",
        "items": [item],
        "files": [file],
        "metrics": {"loss": 0.5},
        "metadata": None,
        "continues": None,
        "references": [],
    }


def sealed(content: bytes, member: str = "manifest") -> bytes:
    name = f'", "{member}": '.encode()
    return b'{"digest": "' + digest_text(content).encode() + name + content + b"}"


def grouped() -> Json:
    """A commit of four ranks in two groups, all of one class."""
    groups = [
        {"name": f"groups/r{first:05d}.json", "digest": digest_text(b""), "first": first,
         "ranks": 2, "files": 2, "size_bytes": 9000}
        for first in (0, 2)
    ]  # fmt: skip
    classes = [{"table": "0" * 32, "spans": [[0, 2, 2], [1, 2, 2]]}]
    rest = {key: value for key, value in manifest().items() if key != "files"}
    return {**rest, "ranks": 4, "groups": groups, "classes": classes}


def group() -> Json:
    """The manifest of ranks 2 and 3."""
    files = [
        {"name": f"r00000/model-r{rank:05d}.safetensors", "size_bytes": 4500,
         "header_bytes": 4096, "header_digest": digest_text(b""), "rank": rank}
        for rank in (2, 3)
    ]  # fmt: skip
    return {"format": 1, "step": 100, "epoch": 3, "attempt": 17, "first": 2, "ranks": 2,
            "files": files}  # fmt: skip


def _manifest_fields() -> Iterator[tuple[str, str, Json]]:
    """(name, why, changed fields) for commits with a right digest that are still unsound."""
    good = manifest()
    file: Json = good["files"][0]  # type: ignore[index]
    item: Json = good["items"][0]  # type: ignore[index]

    def files(**changed: object) -> Json:
        return {"files": [{**file, **changed}]}

    yield "decision-unknown", "neither commit nor abort", {"decision": "perhaps"}
    yield "format-older", "a format that never was", {"format": 0}
    yield "format-bool", "a format that is a boolean", {"format": True}
    yield "step-negative", "a negative step", {"step": -1}
    yield "attempt-float", "an attempt that is no int", {"attempt": 1.5}
    yield "created-negative", "a time before all times", {"created_s": -1.0}
    yield "unknown-field", "a field that format 1 does not have", {"extra": 1}
    yield "file-parent", "a file outside the folder", files(name="../x.safetensors")
    yield "file-absolute", "a file with an absolute path", files(name="/x.safetensors")
    yield "file-hidden", "a file with a hidden name", files(name=".safetensors")
    yield "file-nul", "a file name with a NUL", files(name="a\0.safetensors")
    yield "file-suffix", "a file that is no data file", files(name="manifest.json")
    yield "file-long", "a file name of 300 bytes", files(name="a" * 300 + ".safetensors")
    yield "file-twice", "a file twice", {"files": [file, file]}
    yield "header-unaligned", "a header of 4,000 bytes", files(header_bytes=4000)
    yield "header-zero", "a header of no bytes", files(header_bytes=0)
    yield "header-long", "a header longer than its file", files(header_bytes=8192)
    yield "size-huge", "a size beyond 63 bits", files(size_bytes=1 << 63)
    yield "header-digest", "a digest of another name", files(header_digest="md5:" + "0" * 32)
    yield "item-file", "an item in a file that is not named", {"items": [{**item, "file": "x"}]}
    yield "item-twice", "an item twice", {"items": [item, item]}
    yield "item-nameless", "an item without a name", {"items": [{**item, "name": ""}]}
    yield "metric-list", "a metric that is a list", {"metrics": {"loss": [1]}}
    yield "metrics-list", "metrics that are a list", {"metrics": []}
    yield "metadata-tag", "metadata with an unknown tag", {"metadata": {"$": "os.system"}}
    yield "reference-parent", "a reference that leaves the run", {"references": [".."]}
    yield "continues-path", "a predecessor that is a path", {"continues": "a/b"}
    yield "file-deep", "a file two folders down", files(name="a/b/x.safetensors")
    yield "file-deep-hidden", "a file in a hidden folder", files(name=".a/x.safetensors")
    yield "file-deep-parent", "a file in the parent folder", files(name="a/../x.safetensors")
    yield "file-folder", "a file without a name in a folder", files(name="a/.safetensors")
    yield "ranks-zero", "no ranks at all", {"ranks": 0}
    yield "ranks-huge", "more ranks than any job has", {"ranks": 1 << 62}
    yield "file-rank", "a file of a rank that there is not", files(rank=1)


def _grouped_fields() -> Iterator[tuple[str, str, Json]]:
    """The same for commits of several groups."""
    good = grouped()
    first: Json = good["groups"][0]  # type: ignore[index]
    second: Json = good["groups"][1]  # type: ignore[index]

    def last(**changed: object) -> Json:
        return {"groups": [first, {**second, **changed}]}

    def spans(*some: list[object]) -> Json:
        return {"classes": [{"table": "0" * 32, "spans": some}]}

    yield "group-and-files", "files and groups", {"files": manifest()["files"]}
    yield "group-none", "an empty list of groups", {"groups": []}
    yield "group-gap", "ranks between two groups", last(first=3)
    yield "group-overlap", "ranks in two groups", last(first=1, ranks=3)
    yield "group-short", "ranks behind the last group", last(ranks=1)
    yield "group-empty", "a group of no ranks", last(ranks=0)
    yield "group-order", "groups in another order", {"groups": [second, first]}
    yield "group-twice", "two groups in one file", last(name=first["name"])
    yield "group-parent", "a group outside the folder", last(name="../r00002.json")
    yield "group-absolute", "a group with an absolute path", last(name="/r00002.json")
    yield "group-suffix", "a group in a data file", last(name="r00002.safetensors")
    yield "group-digest", "a group with a digest of another name", last(digest="md5:00")
    yield "group-extra", "a group with a further field", last(more=1)
    yield "group-item", "an item in no data file", {"items": [{
        **manifest()["items"][0], "file": "x"}]}  # type: ignore[index]  # fmt: skip
    yield "class-table", "a class whose table has no digest", {"classes": [
        {"table": "x", "spans": [[0, 4]]}]}  # fmt: skip
    yield "class-twice", "one table for two classes", {"classes": [
        {"table": "0" * 32, "spans": [[at, 2]]} for at in (0, 2)]}  # fmt: skip
    yield "class-gap", "a rank of no class", spans([0, 3])
    yield "class-overlap", "a rank twice in a class", spans([0, 4], [2, 1])
    yield "class-beyond", "a class of ranks that there are not", spans([0, 5])
    yield "class-huge", "a span beyond all ranks", spans([0, 1 << 62])
    yield "class-negative", "a span of negative ranks", spans([-1, 5])
    yield "class-empty", "a span of no ranks", spans([0, 4], [0, 0])
    yield "class-stride", "a span that stays in its place", spans([0, 4, 0])
    yield "class-stride-one", "a span with a stride that goes without saying", spans([0, 4, 1])
    yield "class-short", "a span of one number", spans([0])
    yield "class-long", "a span of four numbers", spans([0, 2, 2, 2])


def _group_cases() -> Iterator[Case]:
    good = group()
    one: Json = good["files"][0]  # type: ignore[index]
    two: Json = good["files"][1]  # type: ignore[index]

    def files(**changed: object) -> Json:
        return {"files": [one, {**two, **changed}]}

    content = json.dumps(good).encode()
    whole = sealed(content, "group")
    texts: list[tuple[str, str, bytes]] = [
        ("empty", "no bytes at all", b""),
        ("root", "a manifest in its place", sealed(content)),
        ("digest", "a digest that is wrong", whole.replace(b"xxh3-128:", b"xxh3-128:0", 1)),
        ("space", "white space at the end", whole + b"\n"),
        ("list", "content that is a list", sealed(b"[]", "group")),
        ("not-json", "content that is no JSON", sealed(b"nonsense", "group")),
        ("key-twice", "a key twice", sealed(
            content.replace(b'"step"', b'"epoch": 3, "step"'), "group")),
    ]  # fmt: skip
    fields: list[tuple[str, str, Json]] = [
        ("format-older", "a format that never was", {"format": 0}),
        ("unknown-field", "a field that format 1 does not have", {"extra": 1}),
        ("first", "other ranks than the manifest says", {"first": 1}),
        ("ranks", "another number of ranks", {"ranks": 3}),
        ("ranks-huge", "more ranks than any job has", {"ranks": 1 << 62}),
        ("files", "fewer files than the manifest says", {"files": [one]}),
        ("size", "another size than the manifest says", files(size_bytes=4501)),
        ("file-rank", "a file of a rank of another group", files(rank=4)),
        ("file-twice", "a file twice", {"files": [one, one]}),
        ("file-parent", "a file outside the folder", files(name="../x.safetensors")),
        ("file-absolute", "a file with an absolute path", files(name="/x.safetensors")),
        ("file-deep", "a file two folders down", files(name="a/b/x.safetensors")),
        ("file-hidden", "a file in a hidden folder", files(name=".a/x.safetensors")),
        ("header-unaligned", "a header of 4,000 bytes", files(header_bytes=4000)),
        ("header-digest", "a digest of another name", files(header_digest="md5:" + "0" * 32)),
    ]
    for name, why, changed in fields:
        texts.append((name, why, sealed(json.dumps({**good, **changed}).encode(), "group")))
    for name, why, data in texts:
        yield Case(name=f"group-{name}.json", raises="Corrupt", why=why, data=data)
    yield Case(
        name="group-format-newer.json",
        raises="Usage",
        why="a later format, which needs a later laststep",
        data=sealed(b'{"format": 2, "new": true}', "group"),
    )


def _manifest_cases() -> Iterator[Case]:
    content = json.dumps(manifest()).encode()
    good = sealed(content)
    texts: list[tuple[str, str, bytes]] = [
        ("empty", "no bytes at all", b""),
        ("digest", "a digest that is wrong", good.replace(b"xxh3-128:", b"xxh3-128:0", 1)),
        ("digest-case", "a digest in upper case", good[:21] + good[21:53].upper() + good[53:]),
        ("space", "white space at the end", good + b"\n"),
        ("third-member", "a third member", good[:-1] + b', "x": 1}'),
        ("not-json", "content that is no JSON", sealed(b"nonsense")),
        ("list", "content that is a list", sealed(b"[]")),
        ("nested", "content of 2,000 brackets", sealed(b"[" * 1000 + b"]" * 1000)),
        ("key-twice", "a key twice", sealed(content.replace(b'"step"', b'"epoch": 3, "step"'))),
        ("utf8", "text that is no UTF-8", sealed(content.replace(b"8f14", b"\xff"))),
        ("truncated", "the first half only", good[: len(good) // 2]),
        ("abort-bare", "an abort without a reason", sealed(b'{"format": 1, "decision": "abort"}')),
    ]
    for name, why, changed in _manifest_fields():
        texts.append((name, why, sealed(json.dumps({**manifest(), **changed}).encode())))
    for name, why, changed in _grouped_fields():
        texts.append((name, why, sealed(json.dumps({**grouped(), **changed}).encode())))
    for name, why, data in texts:
        yield Case(name=f"manifest-{name}.json", raises="Corrupt", why=why, data=data)
    yield Case(
        name="manifest-format-newer.json",
        raises="Usage",
        why="a later format, which needs a later laststep",
        data=sealed(b'{"format": 2, "decision": "commit", "new": true}'),
    )


def _object_cases() -> Iterator[Case]:
    texts: list[tuple[str, str, bytes]] = [
        ("deep-lists", "10,000 brackets", b"[" * 10000 + b"]" * 10000),
        ("deep-open", "10,000 open brackets", b"[" * 10000),
        ("deep-values", "201 lists", b"[" * 201 + b"]" * 201),
        ("deep-tag", "a tag that is 400 lists", b'{"$":' + b"[" * 400 + b"]" * 400 + b"}"),
        ("deep-tuples", "201 tuples", b'{"$":"tuple","items":[' * 201 + b"]}" * 201),
        ("deep-ext", "201 extensions", b'{"$":"ext","tag":"","value":' * 201 + b"1" + b"}" * 201),
        ("tag-unknown", "an unknown tag", b'{"$":"eval","items":["1"]}'),
        ("tag-number", "a tag that is a number", b'{"$":1}'),
        ("tag-list", "a tag that cannot be hashed", b'{"$":[]}'),
        ("tag-null", "a tag that is null", b'{"$":null}'),
        ("field-missing", "a tuple without items", b'{"$":"tuple"}'),
        ("field-extra", "a tuple with more than items", b'{"$":"tuple","items":[],"x":1}'),
        ("items-text", "items that are text", b'{"$":"tuple","items":"abc"}'),
        ("pairs-odd", "a key without a value", b'{"$":"dict","items":[1]}'),
        ("pairs-twice", "a key twice in pairs", b'{"$":"dict","items":[1,2,1,3]}'),
        ("pairs-twice-equal", "equal keys, 1 and true", b'{"$":"dict","items":[1,2,true,3]}'),
        ("pairs-unhashable", "a list as a key", b'{"$":"dict","items":[[],1]}'),
        ("set-unhashable", "a dict in a set", b'{"$":"set","items":[{}]}'),
        ("set-twice", "an item twice in a set", b'{"$":"set","items":[1,1]}'),
        ("key-twice", "a key twice in a dict", b'{"a":1,"a":1}'),
        ("int-huge", "an int of 5,000 digits", b"9" * 5000),
        ("int-wide", "an int of 65 bits in decimal", str(1 << 64).encode()),
        ("int-hex", "an int that is no hex", b'{"$":"int","hex":"0x1f"}'),
        ("int-underscore", "hex with underscores", b'{"$":"int","hex":"1_0"}'),
        ("float-bits", "a float of too few bits", b'{"$":"float","bits":"7ff8"}'),
        ("float-range", "a float beyond all floats", b"1e999"),
        ("nan", "a bare NaN", b"NaN"),
        ("complex-parts", "a complex number of ints", b'{"$":"complex","re":1,"im":2}'),
        ("base64", "bytes that are no base64", b'{"$":"bytes","base64":"***"}'),
        ("base64-unicode", "base64 with an umlaut", '{"$":"bytes","base64":"äääa"}'.encode()),
        ("str-utf8", "a str that is no UTF-8", b'{"$":"str","base64":"/w=="}'),
        ("range-zero", "a range with step 0", b'{"$":"range","items":[0,1,0]}'),
        ("range-text", "a range of text", b'{"$":"range","items":["a","b","c"]}'),
        ("slice-short", "a slice of two parts", b'{"$":"slice","items":[1,2]}'),
        ("deque-short", "more items than maxlen", b'{"$":"deque","maxlen":1,"items":[1,2]}'),
        ("deque-huge", "a maxlen of 64 bits",
         b'{"$":"deque","maxlen":18446744073709551615,"items":[]}'),
        ("deque-bool", "a maxlen that is true", b'{"$":"deque","maxlen":true,"items":[]}'),
        ("named-fields", "fewer fields than items",
         b'{"$":"namedtuple","type":"P","fields":["x"],"items":[1,2]}'),
        ("named-code", "code for a field name",
         b'{"$":"namedtuple","type":"P","fields":["x=exit()"],"items":[1]}'),
        ("named-type", "code for a class name",
         b'{"$":"namedtuple","type":"P(exit())","fields":[],"items":[]}'),
        ("named-twice", "a field twice",
         b'{"$":"namedtuple","type":"P","fields":["x","x"],"items":[1,2]}'),
        ("tensor-name", "a tensor whose name is a number", b'{"$":"tensor","name":1}'),
        ("ext-tag", "an extension whose tag is a list", b'{"$":"ext","tag":[],"value":1}'),
        ("trailing", "text behind the document", b"1 2"),
        ("empty", "no bytes at all", b""),
        ("utf8", "text that is no UTF-8", b'"\xff"'),
        ("surrogate", "a lone surrogate", b'"\\ud800"'),
        ("bom", "a byte order mark", b"\xef\xbb\xbf1"),
    ]  # fmt: skip
    for name, why, data in texts:
        yield Case(name=f"object-{name}.json", raises="Corrupt", why=why, data=data)


def cases() -> list[Case]:
    makers: tuple[Callable[[], Iterator[Case]], ...] = (
        _header_cases, _plain_cases, _manifest_cases, _group_cases, _object_cases,
    )  # fmt: skip
    return [case for make in makers for case in make()]


def readme() -> str:
    rows = "\n".join(f"| `{case.name}` | {case.raises} | {case.why} |" for case in cases())
    return (
        "# Hostile files\n\n"
        "Each differs from a sound file in one way and MUST be refused with the error named.\n"
        "`make.py` regenerates them and this page.\n\n"
        f"| file | error | what it is |\n| --- | --- | --- |\n{rows}\n"
    )


def main() -> None:
    folder = Path(__file__).parent
    for case in cases():
        (folder / case.name).write_bytes(case.data)
    (folder / "README.md").write_text(readme())


if __name__ == "__main__":
    main()
