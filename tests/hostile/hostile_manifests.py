"""Manifests that are hostile: of a checkpoint, and of a group of ranks."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from hostile_case import Case, Json

from laststep.codecs.digests import digest_text

if TYPE_CHECKING:
    from collections.abc import Iterator


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

    def excerpt(*left_out: object, **changed: object) -> Json:
        return {"format": 4, "left_out": left_out, **changed}

    yield "excerpt-format", "an excerpt that says it is whole", excerpt("z", format=1)
    yield "excerpt-item", "an item that is here and left out", excerpt("m", "z")
    yield "excerpt-twice", "an item that is left out twice", excerpt("z", "z")
    yield "excerpt-order", "items that are left out in another order", excerpt("z", "y")
    yield "excerpt-nameless", "an item without a name, left out", excerpt("", "z")
    yield "excerpt-nothing", "an excerpt of no items", excerpt("z", items=[])
    yield "excerpt-number", "an item that is a number, left out", excerpt(1)


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
    yield "class-excerpt", "classes of an excerpt", {"format": 4, "left_out": ["z"]}


def group_cases() -> Iterator[Case]:
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
        data=sealed(b'{"format": 9, "new": true}', "group"),
    )


def manifest_cases() -> Iterator[Case]:
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
        data=sealed(b'{"format": 9, "decision": "commit", "new": true}'),
    )
