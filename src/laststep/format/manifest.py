"""The manifest: the small record whose existence decides that a checkpoint is, or is not.

Knows nothing of stores or of how the decision is made. The document carries the digest of its own
content (`format.envelope`); once that is right, everything in it is checked. It has the digest of
the index of every rank, which says what lies where. Metrics and metadata are typed JSON
(`codecs.objects`), so nan and inf survive. `encode` raises only `UsageError`; `decode` only
`CorruptError`, and `UsageError` for a later format.

Also has what documents share: the envelope with a digest, the refusal of later formats, and the
names that files of a checkpoint may have.
"""

from __future__ import annotations

import functools
import math
import re
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from laststep.codecs import objects
from laststep.codecs.digests import DIGEST_BYTES, DIGEST_NAME, digest_text
from laststep.errors import CorruptError, UsageError
from laststep.format.spans import RanksOf, Span, cover_once
from laststep.terms import FORMAT_VERSION, with_article
from laststep.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Iterable


_MAX_NAME_BYTES = 255
_APART = frozenset('/\\:*?"<>|')
"""What separates or means something in a path, on one system or another."""


@functools.lru_cache(maxsize=1 << 12)
def is_file_name(name: str) -> bool:
    """Return whether that can be a file in a checkpoint's folder, or in a folder within it."""
    parts = name.split("/")
    return len(parts) <= 2 and all(map(is_plain_name, parts))


def is_plain_name(name: str) -> bool:
    """Return whether `name` is one visible component of a path on every system that we know of."""
    return (
        name.isprintable()
        and 0 < len(name.encode(errors="surrogatepass")) <= _MAX_NAME_BYTES
        and not name.startswith(".")
        and _APART.isdisjoint(name)
    )


_RELEASE = re.compile(r"[0-9][0-9A-Za-z.+-]{0,39}")


class Versioned(msgspec.Struct, frozen=True):
    """What documents of every format have in common, as far as small records go."""

    format: int
    laststep: str = ""


def refuse_later(
    number: object, *, what: str, where: str, writer: object = None, latest: int = FORMAT_VERSION
) -> None:
    """`UsageError` for a later format than this version reads; `writer` is the version of laststep
    that the document names, or nothing."""
    if type(number) is not int or number <= latest:
        return
    found, reads = f"format {number}", f"a version that writes format {number}"
    if isinstance(writer, str) and _RELEASE.fullmatch(writer):
        found, reads = f"{found}, written by laststep {writer}", f"version {writer} or a later one"
    raise UsageError(
        f"cannot read {with_article(what)} of a later format",
        where=where,
        expected=f"format {latest}, the latest that laststep {VERSION} reads",
        found=found,
        remedy=f"upgrade laststep (`pip install --upgrade laststep`) to {reads}",
    )


DAMAGE_REMEDY = (
    "`laststep verify` lists all damage; restore() without a step takes the newest good checkpoint"
)
"""What to do about stored bytes that are not what was written."""

_DIGEST = re.compile(re.escape(DIGEST_NAME) + r":[0-9a-f]{32}")
_DIGEST_TEXT_BYTES = len(DIGEST_NAME) + 1 + 32
_OPEN, _CLOSE = b'{"digest": "', b"}"


def seal(content: bytes, *, member: str) -> bytes:
    """The document whose second member, of that name, is `content`."""
    return _OPEN + digest_text(content).encode() + _between(member) + content + _CLOSE


def unseal(data: bytes, *, member: str, where: str, what: str) -> bytes:
    """The content of a document that `seal` made; `what` it is, in words, for the error."""
    content = data[len(_OPEN) + _DIGEST_TEXT_BYTES + len(_between(member)) : -len(_CLOSE)]
    if data != seal(content, member=member):
        raise _changed(data, content, where, what)
    return content


def is_digest(text: str) -> bool:
    """Whether this is the digest of something, as manifests write it."""
    return _DIGEST.fullmatch(text) is not None


def corrupt(where: str, expected: str, found: str, *, what: str, why: str = "") -> CorruptError:
    """The error for a manifest that is not as it was written."""
    return CorruptError(
        f"cannot read a {what}" + (f": {why}" if why else ""),
        where=where,
        expected=expected,
        found=found,
        remedy=DAMAGE_REMEDY,
    )


def _between(member: str) -> bytes:
    return f'", "{member}": '.encode()


def _changed(data: bytes, content: bytes, where: str, what: str) -> CorruptError:
    """What is wrong with an envelope, in words; bytes that are no digest are not shown."""
    if not data:
        expected = "the record of a checkpoint"
        return corrupt(where, expected, "an empty file", what=what, why="it is empty")
    claimed = data[len(_OPEN) : len(_OPEN) + _DIGEST_TEXT_BYTES].decode("ascii", "replace")
    actual = digest_text(content)
    if not is_digest(claimed) or claimed == actual:
        claimed, actual = "what was written", "other bytes"
    return corrupt(where, claimed, actual, what=what, why=f"the {what} has been changed")


Metric = float | int | str | bool

Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
MAX_RANKS = 1 << 24
"""More than any job has; whatever a manifest says, checking it takes no more memory than that."""
_TABLE = re.compile(r"[0-9a-f]{32}")
_SAME_FIELDS = (
    "run",
    "step",
    "epoch",
    "attempt",
    "created_s",
    "laststep",
    "items",
    "written",
    "continues",
)


class _Record(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    gc=False,
    forbid_unknown_fields=True,
    omit_defaults=True,
):
    """An entry of a list in a manifest."""


class WrittenIndexes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What ranks have made durable: the digests of their indexes, and sums over these."""

    indexes: bytes = b""
    """One after the other, in the order of ranks."""
    files: Count = 0
    """How many data files there are."""
    size_bytes: Count = 0
    """Of all data files."""
    shared_bytes: Count = 0
    """Of those that were written for earlier checkpoints."""
    lossy: tuple[str, ...] = ()
    """How tensors were rounded; nothing: all is exact."""

    def plus(self, more: WrittenIndexes) -> WrittenIndexes:
        """The same with what later ranks have written."""
        return WrittenIndexes(
            indexes=self.indexes + more.indexes,
            files=self.files + more.files,
            size_bytes=self.size_bytes + more.size_bytes,
            shared_bytes=self.shared_bytes + more.shared_bytes,
            lossy=tuple(sorted({*self.lossy, *more.lossy})),
        )


class ItemRecord(_Record, frozen=True, kw_only=True):
    """An item: the kind of provider that wrote it, its tensors and their bytes; `per_rank` if every
    rank has a state of its own."""

    name: str
    kind: str
    tensors: Count
    size_bytes: Count
    per_rank: bool = False


class ClassRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Ranks that held the same tensors in the same layouts: the digest of their table, and who."""

    table: str
    spans: tuple[Span, ...]

    @property
    def ranks(self) -> RanksOf:
        """These ranks, in ascending order."""
        return RanksOf(self.spans)


class Commit(msgspec.Struct, frozen=True, kw_only=True):
    """The decision that a checkpoint is. `continues` names the folder of the one before it."""

    run: str
    step: int
    epoch: int
    attempt: int
    created_s: float
    laststep: str
    items: tuple[ItemRecord, ...]
    written: WrittenIndexes = WrittenIndexes()
    metrics: dict[str, Metric] = {}
    metadata: object = None
    continues: str | None = None
    ranks: int = 1
    """How many ranks wrote it. There may be more indexes: a DCP coordinator writes one of its
    own."""
    classes: tuple[ClassRecord, ...] = ()
    """Which ranks held the same; nothing where that is not known."""
    left_out: tuple[str, ...] = ()
    """Of an excerpt: the items that its original has and this has not, in alphabetical order."""

    format: int = FORMAT_VERSION

    @property
    def index_count(self) -> int:
        return len(self.written.indexes) // DIGEST_BYTES

    def index_digest(self, number: int) -> bytes:
        """The digest of the index of a rank."""
        return self.written.indexes[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]

    @property
    def size_bytes(self) -> int:
        """Of all its data files."""
        return self.written.size_bytes

    @property
    def shared_bytes(self) -> int:
        """Of those that were written for earlier checkpoints."""
        return self.written.shared_bytes

    @property
    def lossy(self) -> tuple[str, ...]:
        """How tensors in it were rounded; nothing: all is exact."""
        return self.written.lossy

    @property
    def new_bytes(self) -> int:
        """Of those that were written for this one."""
        return self.size_bytes - self.shared_bytes

    @property
    def file_count(self) -> int:
        """How many data files it has."""
        return self.written.files


class Abort(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The decision that there is no checkpoint here: why, and who took it."""

    format: Literal[1] = 1
    decision: Literal["abort"] = "abort"
    reason: str
    by: str


class _ClassDocument(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A class as it is written; a span without its stride, where that is 1."""

    table: str
    spans: tuple[tuple[Count, ...], ...]


class _CommitDocument(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A commit as it is written; metrics and metadata are typed JSON."""

    format: Literal[1]
    decision: Literal["commit"] = "commit"
    run: str
    step: Count
    epoch: Count
    attempt: Count
    created_s: float
    laststep: str
    items: tuple[ItemRecord, ...]
    written: WrittenIndexes
    metrics: msgspec.Raw
    metadata: msgspec.Raw
    continues: str | None
    ranks: Count | msgspec.UnsetType = msgspec.UNSET
    classes: tuple[_ClassDocument, ...] | msgspec.UnsetType = msgspec.UNSET
    left_out: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET


# Made here, so that the first commit of a job does not wait for it.
_decode_commit = msgspec.json.Decoder(_CommitDocument).decode
_decode_abort = msgspec.json.Decoder(Abort).decode


def encode(decision: Commit | Abort) -> bytes:
    """The bytes of `manifest.json`; `UsageError` if the decision could not be read back."""
    document = decision if isinstance(decision, Abort) else _document_of(decision)
    try:
        data = seal(msgspec.json.encode(document), member="manifest")
        # What is written is read back first: nothing is committed that no reader would take.
        decode(data, where="the manifest to be written")
    except UnicodeEncodeError as error:
        raise UsageError(
            "cannot write a manifest", found=f"text that is no Unicode: {error}"
        ) from None
    except CorruptError as error:
        raise UsageError(
            "cannot write a manifest", expected=error.expected, found=error.found
        ) from None
    return data


def decode(data: bytes, *, where: str) -> Commit | Abort:
    """The decision that `data` records, verified against its digest and checked throughout."""
    content = unseal(data, member="manifest", where=where, what="manifest")
    plain = parse_content(content, where=where, what="manifest")
    try:
        if plain.get("decision") == "abort":
            return _decode_abort(content)
        document = _decode_commit(content)
    except msgspec.ValidationError as error:
        raise _corrupt(where, "the fields that docs/format.md lists", str(error)) from None
    commit = _commit_of(document, plain, where)
    problem = _problem(commit)
    if problem is not None:
        raise _corrupt(where, *problem)
    return commit


def parse_content(content: bytes, *, where: str, what: str) -> dict[str, object]:
    """The members of a manifest of any kind, of a format that this version reads."""
    plain = objects.parse(content, where=where)
    if not isinstance(plain, dict):
        raise corrupt(where, "a JSON object", with_article(type(plain)), what=what)
    refuse_later(plain.get("format"), what=what, where=where, writer=plain.get("laststep"))
    return plain


def _corrupt(where: str, expected: str, found: str) -> CorruptError:
    return corrupt(where, expected, found, what="manifest")


def _document_of(commit: Commit) -> _CommitDocument:
    _check_metrics(commit.metrics)
    classes = tuple(
        _ClassDocument(
            table=record.table,
            spans=tuple(tuple(span[:2]) if span.stride == 1 else span for span in record.spans),
        )
        for record in commit.classes
    )
    return _CommitDocument(
        format=1,
        **_same_fields(commit),
        metrics=msgspec.Raw(objects.encode(commit.metrics)),
        metadata=msgspec.Raw(objects.encode(commit.metadata)),
        ranks=commit.ranks if commit.ranks != 1 else msgspec.UNSET,
        classes=classes or msgspec.UNSET,
        left_out=commit.left_out or msgspec.UNSET,
    )


def _same_fields(commit: Commit | _CommitDocument) -> dict[str, Any]:
    """The fields that are written just as they are."""
    return {name: getattr(commit, name) for name in _SAME_FIELDS}


def _check_metrics(metrics: dict[str, Metric]) -> None:
    for name, value in metrics.items():
        if type(name) is not str or type(value) not in (float, int, str, bool):
            raise UsageError(
                "cannot record a metric",
                where=repr(name),
                expected="a name and a float, int, str or bool",
                found=type(value).__name__,
                remedy="convert it, for example with float(value)",
            )


def _classes_of(document: _CommitDocument, where: str) -> tuple[ClassRecord, ...]:
    classes = () if document.classes is msgspec.UNSET else document.classes
    for entry in classes:
        for span in entry.spans:
            if not (len(span) == 2 or (len(span) == 3 and span[2] > 1)):
                raise _corrupt(where, "a first rank, a count and perhaps a stride", str(span))
    return tuple(
        ClassRecord(table=entry.table, spans=tuple(Span(*span) for span in entry.spans))
        for entry in classes
    )


def _commit_of(document: _CommitDocument, plain: dict[str, object], where: str) -> Commit:
    """`plain` is the same, parsed: metrics and metadata are in there."""
    metrics = objects.from_parsed(plain["metrics"], where=f"metrics of {where}")
    if type(metrics) is not dict:
        raise _corrupt(where, "metrics by name", type(metrics).__name__)
    try:
        _check_metrics(metrics)
    except UsageError as error:
        raise _corrupt(where, "metrics of plain values", f"{error.where}: {error.found}") from None
    return Commit(
        **_same_fields(document),
        metrics=metrics,
        metadata=objects.from_parsed(plain["metadata"], where=f"metadata of {where}"),
        ranks=1 if document.ranks is msgspec.UNSET else document.ranks,
        classes=_classes_of(document, where),
        left_out=() if document.left_out is msgspec.UNSET else document.left_out,
    )


def _problem(commit: Commit) -> tuple[str, str] | None:
    """What was expected and what was found instead, or None if all is sound."""
    if not math.isfinite(commit.created_s) or commit.created_s < 0:
        return "a time of creation", repr(commit.created_s)
    if commit.continues is not None and not is_plain_name(commit.continues):
        return "the name of a checkpoint's folder", repr(commit.continues)
    if not 1 <= commit.ranks <= MAX_RANKS:
        return f"from 1 to {MAX_RANKS} ranks", str(commit.ranks)
    return (
        _written_problem(commit)
        or _classes_problem(commit)
        or _item_problem(commit)
        or _excerpt_problem(commit)
    )


def _written_problem(commit: Commit) -> tuple[str, str] | None:
    written, due = commit.written, commit.ranks * DIGEST_BYTES
    if len(written.indexes) % DIGEST_BYTES or len(written.indexes) < due:
        return f"the digests of {commit.ranks} indexes", f"{len(written.indexes)} bytes"
    if commit.index_count > MAX_RANKS:
        return f"at most {MAX_RANKS} indexes", str(commit.index_count)
    if written.shared_bytes > written.size_bytes:
        return f"at most {written.size_bytes} shared bytes", str(written.shared_bytes)
    return None


def _classes_problem(commit: Commit) -> tuple[str, str] | None:
    """Classes are all ranks, each once."""
    if not commit.classes:
        return None
    for record in commit.classes:
        if _TABLE.fullmatch(record.table) is None:
            return "32 hex digits for the table of a class", repr(record.table)
    if not _all_differ(record.table for record in commit.classes):
        return "classes that differ in their tables", "one table twice"
    spans = [span for record in commit.classes for span in record.spans]
    if not cover_once(spans, commit.ranks):
        return f"classes that hold each of {commit.ranks} ranks once", "other ranks"
    return None


def _item_problem(commit: Commit) -> tuple[str, str] | None:
    if not _all_differ(record.name for record in commit.items):
        return "items that differ in name", "one name twice"
    for record in commit.items:
        if not record.name or not record.kind:
            return "an item with a name and a kind", repr((record.name, record.kind))
    return None


def _excerpt_problem(commit: Commit) -> tuple[str, str] | None:
    left_out, here = commit.left_out, {record.name for record in commit.items}
    if not left_out:
        return None
    if list(left_out) != sorted(set(left_out)) or "" in left_out or not here.isdisjoint(left_out):
        return "names of other items that were left out, in order", repr(left_out)
    if not here or commit.classes:
        return "items, and no classes, which tell of all of them", repr(sorted(here))
    return None


def _all_differ(names: Iterable[str]) -> bool:
    listed = list(names)
    return len(set(listed)) == len(listed)
