"""Manifests that are hostile."""

from __future__ import annotations

import base64
import json
from typing import TYPE_CHECKING

from hostile_case import Case, Json

from laststep.codecs.digests import digest_text

if TYPE_CHECKING:
    from collections.abc import Iterator


def indexes(count: int) -> str:
    return base64.b64encode(bytes(16 * count)).decode()


def manifest() -> Json:
    item = {"name": "m", "kind": "tree", "tensors": 2, "size_bytes": 24}
    written = {
        "indexes": indexes(1),
        "files": 1,
        "size_bytes": 4122,
        "shared_bytes": 0,
        "lossy": [],
    }
    return {
        "format": 1,
        "decision": "commit",
        "run": "8f14e45f",
        "step": 100,
        "term": 3,
        "attempt": 17,
        "created_s": 1.5,
        "laststep": "0.1.0",
        "items": [item],
        "written": written,
        "metrics": {"loss": 0.5},
        "metadata": None,
        "continues": None,
    }


def of_ranks() -> Json:
    """A commit of four ranks, all of one class."""
    written: Json = manifest()["written"]  # type: ignore[assignment]
    groups = [{"local_layout": "0" * 32, "spans": [[0, 2, 2], [1, 2, 2]]}]
    more = {"ranks": 4, "layout_groups": groups, "written": {**written, "indexes": indexes(4)}}
    return {**manifest(), **more}


def sealed(content: bytes) -> bytes:
    return b'{"digest": "' + digest_text(content).encode() + b'", "manifest": ' + content + b"}"


def _manifest_fields() -> Iterator[tuple[str, str, Json]]:
    """(name, why, changed fields) for commits with a right digest that are still unsound."""
    good = manifest()
    item: Json = good["items"][0]  # type: ignore[index]

    whole: Json = good["written"]  # type: ignore[assignment]

    def written(**changed: object) -> Json:
        return {"written": {**whole, **changed}}

    yield "decision-unknown", "neither commit nor abort", {"decision": "perhaps"}
    yield "format-older", "a format that never was", {"format": 0}
    yield "format-bool", "a format that is a boolean", {"format": True}
    yield "step-negative", "a negative step", {"step": -1}
    yield "attempt-float", "an attempt that is no int", {"attempt": 1.5}
    yield "created-negative", "a time before all times", {"created_s": -1.0}
    yield "unknown-field", "a field that format 1 does not have", {"extra": 1}
    yield "item-twice", "an item twice", {"items": [item, item]}
    yield "item-nameless", "an item without a name", {"items": [{**item, "name": ""}]}
    yield "item-file", "an item with another field", {"items": [{**item, "file": "x"}]}
    yield "item-size", "an item of negative size", {"items": [{**item, "size_bytes": -1}]}
    yield "written-missing", "nothing that was written", {"written": None}
    yield "written-field", "another field of what was written", written(more=1)
    yield "indexes-none", "no digest of an index", written(indexes="")
    yield "indexes-short", "a digest of 15 bytes", written(indexes="A" * 20)
    yield "indexes-base64", "digests that are not base64", written(indexes="?" * 24)
    yield "indexes-number", "digests that are a number", written(indexes=1)
    yield "files-negative", "-1 files", written(files=-1)
    yield "size-huge", "a size beyond 63 bits", written(size_bytes=1 << 63)
    yield "shared-more", "more shared bytes than bytes", written(shared_bytes=4123)
    yield "lossy-text", "roundings that are text", written(lossy="bf16")
    yield "metric-list", "a metric that is a list", {"metrics": {"loss": [1]}}
    yield "metrics-list", "metrics that are a list", {"metrics": []}
    yield "metadata-tag", "metadata with an unknown tag", {"metadata": {"$": "os.system"}}
    yield "continues-path", "a predecessor that is a path", {"continues": "a/b"}
    yield "ranks-zero", "no ranks at all", {"ranks": 0}
    yield "ranks-huge", "more ranks than any job has", {"ranks": 1 << 62}

    def partial(*omitted_items: object, **changed: object) -> Json:
        return {"omitted_items": omitted_items, **changed}

    yield "excerpt-item", "an item that is here and left out", partial("m", "z")
    yield "excerpt-twice", "an item that is left out twice", partial("z", "z")
    yield "excerpt-order", "items that are left out in another order", partial("z", "y")
    yield "excerpt-nameless", "an item without a name, left out", partial("", "z")
    yield "excerpt-nothing", "an excerpt of no items", partial("z", items=[])
    yield "excerpt-number", "an item that is a number, left out", partial(1)


def _rank_fields() -> Iterator[tuple[str, str, Json]]:
    """The same for commits of several ranks."""
    written: Json = of_ranks()["written"]  # type: ignore[assignment]

    def spans(*some: list[object]) -> Json:
        return {"layout_groups": [{"local_layout": "0" * 32, "spans": some}]}

    few, half = {**written, "indexes": indexes(3)}, base64.b64encode(bytes(63)).decode()
    yield "ranks-few", "fewer indexes than ranks", {"written": few}
    yield "ranks-half", "most of the last digest", {"written": {**written, "indexes": half}}
    yield (
        "class-table",
        "a class whose table has no digest",
        {"layout_groups": [{"local_layout": "x", "spans": [[0, 4]]}]},
    )
    yield (
        "class-twice",
        "one local layout for two groups",
        {"layout_groups": [{"local_layout": "0" * 32, "spans": [[at, 2]]} for at in (0, 2)]},
    )
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
    yield "class-excerpt", "layout groups of an excerpt", {"omitted_items": ["z"]}


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
        ("key-twice", "a key twice", sealed(content.replace(b'"step"', b'"term": 3, "step"'))),
        ("utf8", "text that is no UTF-8", sealed(content.replace(b"8f14", b"\xff"))),
        ("truncated", "the first half only", good[: len(good) // 2]),
        ("abort-bare", "an abort without a reason", sealed(b'{"format": 1, "decision": "abort"}')),
    ]
    for name, why, changed in _manifest_fields():
        texts.append((name, why, sealed(json.dumps({**manifest(), **changed}).encode())))
    for name, why, changed in _rank_fields():
        texts.append((name, why, sealed(json.dumps({**of_ranks(), **changed}).encode())))
    for name, why, data in texts:
        yield Case(name=f"manifest-{name}.json", raises="CorruptError", why=why, data=data)
    yield Case(
        name="manifest-format-newer.json",
        raises="UsageError",
        why="a later format, which needs a later laststep",
        data=sealed(b'{"format": 9, "decision": "commit", "new": true}'),
    )
