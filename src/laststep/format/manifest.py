"""The manifest: the small record whose existence decides that a checkpoint is, or is not.

Knows nothing of stores or of how the decision is made. The document carries the digest of its own
content (`format.envelope`); once that is right, everything in it is checked. It has the digest of
the index of every rank, which says what lies where. Metrics and metadata are typed JSON
(`codecs.objects`), so nan and inf survive. `encode` raises only `Usage`; `decode` only `Corrupt`,
and `Usage` for a later format.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from laststep.codecs import objects, strict
from laststep.codecs.digests import DIGEST_BYTES
from laststep.errors import Corrupt, Usage
from laststep.format import envelope
from laststep.format.envelope import corrupt, seal, unseal
from laststep.format.names import is_plain_name
from laststep.format.spans import RanksOf, Span, cover_once
from laststep.format.versions import refuse_later
from laststep.terms import FORMAT_VERSION, with_article

if TYPE_CHECKING:
    from collections.abc import Iterable

Metric = float | int | str | bool

DAMAGE_REMEDY = envelope.DAMAGE_REMEDY
Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
MAX_RANKS = 1 << 24
"""More than any job has; whatever a manifest says, checking it takes no more memory than that."""
_TABLE = re.compile(r"[0-9a-f]{32}")
_SAME_FIELDS = (
    "run", "step", "epoch", "attempt", "created_s", "laststep", "items", "written", "continues",
)  # fmt: skip


class _Record(
    msgspec.Struct, frozen=True, kw_only=True, gc=False, forbid_unknown_fields=True,
    omit_defaults=True,
):  # fmt: skip
    """An entry of a list in a manifest."""


class Written(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
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

    def plus(self, more: Written) -> Written:
        """The same with what later ranks have written."""
        return Written(
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
    written: Written = Written()
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
    written: Written
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
    """The bytes of `manifest.json`; `Usage` if the decision could not be read back."""
    document = decision if isinstance(decision, Abort) else _document_of(decision)
    try:
        data = seal(msgspec.json.encode(document), member="manifest")
        # What is written is read back first: nothing is committed that no reader would take.
        decode(data, where="the manifest to be written")
    except UnicodeEncodeError as error:
        raise Usage("cannot write a manifest", found=f"text that is no Unicode: {error}") from None
    except Corrupt as error:
        raise Usage("cannot write a manifest", expected=error.expected, found=error.found) from None
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
    plain = strict.parse(content, where=where)
    if not isinstance(plain, dict):
        raise corrupt(where, "a JSON object", with_article(type(plain)), what=what)
    refuse_later(plain.get("format"), what=what, where=where, writer=plain.get("laststep"))
    return plain


def _corrupt(where: str, expected: str, found: str) -> Corrupt:
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
            raise Usage(
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
    except Usage as error:
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
