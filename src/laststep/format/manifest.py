"""The manifest: the small record that commits or aborts a checkpoint.

The document contains the digest of its own content (`seal`), which is checked before anything else,
and of every rank's index; the indexes hold the locations of all data. Metrics and metadata are
typed JSON (`codecs.objects`), so nan and inf survive. Sets of ranks are stored as a few spans:
"every 8th of 131,072" takes three numbers. `encode` raises only `UsageError`; `decode` only
`CorruptError`, and `UsageError` for a later format.

Also holds what several formats share: the refusal of later formats, and the rules for file names.
"""

from __future__ import annotations

import functools
import math
import re
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NamedTuple

import msgspec

from laststep.codecs import objects
from laststep.codecs.digests import DIGEST_BYTES, digest_text
from laststep.constants import FORMAT_VERSION, with_article
from laststep.errors import CorruptError, UsageError
from laststep.process.threads import ready
from laststep.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


_MAX_NAME_BYTES = 255
_APART = frozenset('/\\:*?"<>|')
"""Characters with a special meaning in paths on some system."""


@functools.lru_cache(maxsize=1 << 12)
def is_file_name(name: str) -> bool:
    """Return True if `name` can be a file in a checkpoint's folder or one folder below it."""
    parts = name.split("/")
    return len(parts) <= 2 and all(map(is_plain_name, parts))


def is_plain_name(name: str) -> bool:
    """Return True if `name` is one visible path component on every system that we know of."""
    return (
        name.isprintable()
        and 0 < len(name.encode(errors="surrogatepass")) <= _MAX_NAME_BYTES
        and not name.startswith(".")
        and _APART.isdisjoint(name)
    )


_RELEASE = re.compile(r"[0-9][0-9A-Za-z.+-]{0,39}")


class Versioned(msgspec.Struct, frozen=True):
    """Fields that small records of every format have."""

    format: int
    laststep: str = ""


def refuse_later(number: object, *, what: str, where: str, writer: object = None) -> None:
    """Raise `UsageError` for a later format; `writer` is the version in the document, if any."""
    if type(number) is not int or number <= FORMAT_VERSION:
        return
    found, reads = f"format {number}", f"a version that writes format {number}"
    if isinstance(writer, str) and _RELEASE.fullmatch(writer):
        found, reads = f"{found}, written by laststep {writer}", f"version {writer} or a later one"
    raise UsageError(
        f"cannot read {with_article(what)} of a later format",
        where=where,
        expected=f"format {FORMAT_VERSION}, the latest that laststep {VERSION} reads",
        found=found,
        remedy=f"upgrade laststep (`pip install --upgrade laststep`) to {reads}",
    )


def seal(content: bytes) -> bytes:
    """Return a document with `content` and its digest."""
    return b'{"digest": "%b", "manifest": %b}' % (digest_text(content).encode(), content)


_CONTENT = slice(len(seal(b"")) - 1, -1)


# --- sets of ranks ---------------------------------------------------------------------------


class Span(NamedTuple):
    """`length` ranks starting at `first`, each `stride` above the previous one."""

    first: int
    length: int
    stride: int = 1

    @property
    def stop(self) -> int:
        """One above the last rank."""
        return self.first + (self.length - 1) * self.stride + 1


def spans_of(ranks: Iterable[int]) -> tuple[Span, ...]:
    """Convert ranks, given in ascending order, to a few spans."""
    spans: list[Span] = []
    for rank in ranks:
        if spans and (spans[-1].length == 1 or rank == spans[-1].stop - 1 + spans[-1].stride):
            first, length, _ = spans[-1]
            spans[-1] = Span(first, length + 1, (rank - first) // length)
        else:
            spans.append(Span(rank, 1))
    return tuple(spans)


def cover_once(spans: Iterable[Span], ranks: int) -> bool:
    """Return True if every rank below `ranks`, and no other, is in exactly one span."""
    seen = bytearray(ranks)
    for span in spans:
        if span.first < 0 or span.length < 1 or span.stride < 1 or span.stop > ranks:
            return False
        place = slice(span.first, span.stop, span.stride)
        if any(seen[place]):
            return False
        seen[place] = b"\1" * span.length
    return all(seen)


def ranks_of(spans: Iterable[Span]) -> list[int]:
    """Return the ranks of disjoint spans, in ascending order."""
    return sorted(r for span in spans for r in range(span.first, span.stop, span.stride))


# --- the document ----------------------------------------------------------------------------

Metric = float | int | str | bool

Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
MAX_RANKS = 1 << 24
"""More than any job has. Limits the memory that checking a manifest can take."""
_TABLE = re.compile(r"[0-9a-f]{32}")


class WrittenIndexes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Durable data of some ranks: the digests of their indexes, concatenated, and totals."""

    indexes: bytes = b""
    files: Count = 0
    size_bytes: Count = 0
    shared_bytes: Count = 0
    """Size of the files that were written for earlier checkpoints."""
    lossy: tuple[str, ...] = ()
    """Roundings applied to tensors; empty if all are exact."""

    def plus(self, more: WrittenIndexes) -> WrittenIndexes:
        """Add the indexes of the ranks that follow."""
        return WrittenIndexes(
            indexes=self.indexes + more.indexes,
            files=self.files + more.files,
            size_bytes=self.size_bytes + more.size_bytes,
            shared_bytes=self.shared_bytes + more.shared_bytes,
            lossy=tuple(sorted({*self.lossy, *more.lossy})),
        )


class ItemRecord(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """An item: the kind of its provider, its tensors and their bytes."""

    name: str
    kind: str
    tensors: Count
    size_bytes: Count
    per_rank: bool = False


class LayoutGroupRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Ranks that held the same tensors in the same layouts, with the digest of these."""

    local_layout: str
    spans: tuple[Span, ...]

    @property
    def ranks(self) -> list[int]:
        """The ranks of the group, in ascending order."""
        return ranks_of(self.spans)


class Commit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The decision to commit a checkpoint, with the fields of the document in their order."""

    format: Literal[1] = 1
    decision: Literal["commit"] = "commit"
    run: str
    step: Count
    term: Count
    attempt: Count
    created_s: float
    laststep: str
    items: tuple[ItemRecord, ...]
    written: WrittenIndexes = WrittenIndexes()
    metrics: dict[str, Metric] = {}
    metadata: object = None
    continues: str | None = None
    """The folder of the previous checkpoint."""
    ranks: Count = 1
    """There may be more indexes: a DCP coordinator writes one of its own."""
    layout_groups: tuple[LayoutGroupRecord, ...] = ()
    """Groups of ranks with equal local layouts; empty if unknown."""
    omitted_items: tuple[str, ...] = ()
    """Items that a partial checkpoint lacks, in alphabetical order."""

    @property
    def index_count(self) -> int:
        return len(self.written.indexes) // DIGEST_BYTES

    def index_digest(self, number: int) -> bytes:
        return self.written.indexes[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]


class Abort(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The decision against a checkpoint: the reason, and the writer that decided."""

    format: Literal[1] = 1
    decision: Literal["abort"] = "abort"
    reason: str
    by: str


_OPTIONAL: Final = {"ranks": 1, "layout_groups": (), "omitted_items": ()}
"""Fields that are left out of the document if they have their default."""
_FIELDS: Final = "the fields that docs/format.md lists"

# Created at import, so that the first commit of a job does not wait for it.
_decode_abort = msgspec.json.Decoder(ready(Abort)).decode


def encode(decision: Commit | Abort) -> bytes:
    """Return the bytes of `manifest.json`. Raise `UsageError` if they could not be read back."""
    document = msgspec.structs.asdict(decision)
    if isinstance(decision, Commit):
        document["metrics"] = msgspec.Raw(objects.encode(decision.metrics))
        document["metadata"] = msgspec.Raw(objects.encode(decision.metadata))
        for name, default in _OPTIONAL.items():
            if document[name] == default:
                del document[name]
        if decision.layout_groups:
            document["layout_groups"] = [  # the stride of a span is left out if it is 1
                {
                    "local_layout": group.local_layout,
                    "spans": [span[:2] if span.stride == 1 else span for span in group.spans],
                }
                for group in decision.layout_groups
            ]
    try:
        data = seal(msgspec.json.encode(document))
        # Decode before writing: a manifest that no reader accepts must not be committed.
        decode(data, where="the manifest to be written")
    except UnicodeEncodeError as error:
        raise UsageError(
            "cannot write a manifest", found=f"text that is not valid Unicode: {error}"
        ) from None
    except CorruptError as error:
        raise UsageError(
            "cannot write a manifest", expected=error.expected, found=error.found
        ) from None
    return data


def decode(data: bytes, *, where: str) -> Commit | Abort:
    """Return the decision in `data`, after verifying its digest and validating every field."""
    content = data[_CONTENT]
    if data != seal(content):
        raise _corrupt(where, "what was written", digest_text(content) if data else "no bytes")
    plain = objects.parse(content, where=where)
    if not isinstance(plain, dict):
        raise _corrupt(where, "a JSON object", with_article(type(plain)))
    refuse_later(plain.get("format"), what="manifest", where=where, writer=plain.get("laststep"))
    try:
        if plain.get("decision") == "abort":
            return _decode_abort(content)
        if absent := set(Commit.__struct_fields__) - plain.keys() - _OPTIONAL.keys():
            raise _corrupt(where, _FIELDS, f"no {', '.join(sorted(absent))}")
        for name in ("metrics", "metadata"):
            plain[name] = objects.from_parsed(plain[name], where=f"{name} of {where}")
        commit = msgspec.convert(plain, ready(Commit))
    except msgspec.ValidationError as error:
        raise _corrupt(where, _FIELDS, str(error)) from None
    problem = _problem(commit, plain)
    if problem is not None:
        raise _corrupt(where, *problem)
    return commit


def _corrupt(where: str, expected: str, found: str) -> CorruptError:
    return CorruptError("cannot read a manifest", where=where, expected=expected, found=found)


def _problem(commit: Commit, plain: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return (expected, found) of the first problem of a commit and its document."""
    written = commit.written
    if not math.isfinite(commit.created_s) or commit.created_s < 0:
        return "a time of creation", repr(commit.created_s)
    if commit.continues is not None and not is_plain_name(commit.continues):
        return "the name of a checkpoint's folder", repr(commit.continues)
    if not 1 <= commit.ranks <= commit.index_count <= MAX_RANKS:
        return f"1 to {MAX_RANKS} ranks with an index each", f"{commit.ranks} ranks"
    if len(written.indexes) % DIGEST_BYTES:
        return f"the digests of {commit.ranks} indexes", f"{len(written.indexes)} bytes"
    if written.shared_bytes > written.size_bytes:
        return f"at most {written.size_bytes} shared bytes", str(written.shared_bytes)
    problem = _group_problem(commit, plain) if commit.layout_groups else None
    return problem or _item_problem(commit)


def _group_problem(commit: Commit, plain: Mapping[str, Any]) -> tuple[str, str] | None:
    """Check that every rank is in exactly one layout group."""
    for group, document in zip(commit.layout_groups, plain["layout_groups"], strict=True):
        if _TABLE.fullmatch(group.local_layout) is None:
            return "32 hex digits for the layout of a layout group", repr(group.local_layout)
        for span in document["spans"]:
            if span[2:] == [1]:
                return "a first rank, a count and perhaps a stride", str(span)
    if len({group.local_layout for group in commit.layout_groups}) != len(commit.layout_groups):
        return "layout groups that differ in their layouts", "the same layout twice"
    spans = [span for group in commit.layout_groups for span in group.spans]
    if not cover_once(spans, commit.ranks):
        return f"layout groups that hold each of {commit.ranks} ranks once", "other ranks"
    return None


def _item_problem(commit: Commit) -> tuple[str, str] | None:
    here, omitted = set[str](), commit.omitted_items
    for record in commit.items:
        if not record.name or not record.kind:
            return "an item with a name and a kind", repr((record.name, record.kind))
        here.add(record.name)
    if len(here) != len(commit.items):
        return "items that differ in name", "one name twice"
    if "" in omitted or list(omitted) != sorted(set(omitted) - here):
        return "sorted names of other, omitted items", repr(omitted)
    if omitted and (not here or commit.layout_groups):
        return "items, and no classes, which tell of all of them", repr(sorted(here))
    return None
