"""The manifest: the small record whose existence decides that a checkpoint is, or is not.

Knows nothing of stores or of how the decision is made. The document carries the digest of its own
content, so any changed bit is noticed before anything in it is believed; then everything in it is
checked. Metrics and metadata are typed JSON (`codecs.objects`), so nan and inf survive. `encode`
raises only `Usage`; `decode` only `Corrupt`, and `Usage` for a later format.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec

from laststep.codecs import objects, strict
from laststep.codecs.digests import DIGEST_NAME, digest_text
from laststep.errors import Corrupt, Usage
from laststep.terms import ALIGN_BYTES, FORMAT_VERSION

if TYPE_CHECKING:
    from collections.abc import Iterable

Metric = float | int | str | bool

DAMAGE_REMEDY = (
    "`laststep verify` lists all damage; restore() without a step takes the newest good checkpoint"
)
"""What to do about stored bytes that are not what was written."""

_Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_MAX_NAME_BYTES = 255
_DIGEST = re.compile(re.escape(DIGEST_NAME) + r":[0-9a-f]{32}")
_OPEN, _BETWEEN, _CLOSE = b'{"digest": "', b'", "manifest": ', b"}"
_DIGEST_TEXT_BYTES = len(DIGEST_NAME) + 1 + 32
_SUFFIX = ".safetensors"


class FileRecord(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """A data file: its size, the length and digest of its header region, and who wrote it."""

    name: str
    size_bytes: _Count
    header_bytes: _Count
    header_digest: str
    rank: _Count = 0


class ItemRecord(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """An item: the kind of provider that wrote it, and the (first) file that holds its tensors;
    `per_rank` if every rank has a state of its own."""

    name: str
    kind: str
    file: str
    tensors: _Count
    size_bytes: _Count
    per_rank: bool = False


class Commit(msgspec.Struct, frozen=True, kw_only=True):
    """The decision that a checkpoint is. `continues` names the folder of the one before it;
    `references` the folders of others whose bytes it needs (always empty so far)."""

    format: int = FORMAT_VERSION
    run: str
    step: int
    epoch: int
    attempt: int
    created_s: float
    laststep: str
    items: tuple[ItemRecord, ...]
    files: tuple[FileRecord, ...]
    metrics: dict[str, Metric] = {}
    metadata: object = None
    continues: str | None = None
    references: tuple[str, ...] = ()
    ranks: int = 1
    """How many ranks wrote it."""


class Abort(msgspec.Struct, frozen=True, kw_only=True):
    """The decision that there is no checkpoint here: why, and who took it."""

    format: int = FORMAT_VERSION
    reason: str
    by: str


class _CommitDocument(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A commit as it is written; metrics and metadata are typed JSON."""

    format: Literal[1] = 1
    decision: Literal["commit"] = "commit"
    run: str
    step: _Count
    epoch: _Count
    attempt: _Count
    created_s: float
    laststep: str
    items: tuple[ItemRecord, ...]
    files: tuple[FileRecord, ...]
    metrics: msgspec.Raw
    metadata: msgspec.Raw
    continues: str | None
    references: tuple[str, ...]
    ranks: _Count | msgspec.UnsetType = msgspec.UNSET


class _AbortDocument(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    format: Literal[1] = 1
    decision: Literal["abort"] = "abort"
    reason: str
    by: str


def encode(decision: Commit | Abort) -> bytes:
    """The bytes of `manifest.json`; `Usage` if the decision could not be read back."""
    if decision.format != FORMAT_VERSION:
        raise Usage(
            "cannot write a manifest",
            expected=f"format {FORMAT_VERSION}",
            found=f"format {decision.format}",
        )
    try:
        content = msgspec.json.encode(_document_of(decision))
        data = _OPEN + digest_text(content).encode() + _BETWEEN + content + _CLOSE
        # What is written is read back first: nothing is committed that no reader would take.
        decode(data, where="the manifest to be written")
    except UnicodeEncodeError as error:
        raise Usage("cannot write a manifest", found=f"text that is no Unicode: {error}") from None
    except Corrupt as error:
        raise Usage("cannot write a manifest", expected=error.expected, found=error.found) from None
    return data


def decode(data: bytes, *, where: str) -> Commit | Abort:
    """The decision that `data` records, verified against its digest and checked throughout."""
    content = _verified(data, where)
    plain = strict.parse(content, where=where)
    if not isinstance(plain, dict):
        raise _corrupt(where, "a JSON object", f"a {type(plain).__name__}")
    _check_format(plain.get("format"), where)
    try:
        if plain.get("decision") == "abort":
            return _abort_of(msgspec.json.decode(content, type=_AbortDocument))
        document = msgspec.json.decode(content, type=_CommitDocument)
    except msgspec.ValidationError as error:
        raise _corrupt(where, "the fields that docs/format.md lists", str(error)) from None
    commit = _commit_of(document, where)
    problem = _problem(commit)
    if problem is not None:
        raise _corrupt(where, *problem)
    return commit


def _corrupt(where: str, expected: str, found: str, *, why: str = "") -> Corrupt:
    return Corrupt(
        "cannot read a manifest" + (f": {why}" if why else ""),
        where=where,
        expected=expected,
        found=found,
        remedy=DAMAGE_REMEDY,
    )


def _verified(data: bytes, where: str) -> bytes:
    """The content within the envelope, whose digest is right."""
    start = len(_OPEN) + _DIGEST_TEXT_BYTES + len(_BETWEEN)
    content = data[start : -len(_CLOSE)]
    expected = _OPEN + digest_text(content).encode() + _BETWEEN + content + _CLOSE
    if data != expected:
        raise _changed(data, content, where)
    return content


def _changed(data: bytes, content: bytes, where: str) -> Corrupt:
    """What is wrong with an envelope, in words; bytes that are no digest are not shown."""
    if not data:
        return _corrupt(where, "the record of a checkpoint", "an empty file", why="it is empty")
    claimed = data[len(_OPEN) : len(_OPEN) + _DIGEST_TEXT_BYTES].decode("ascii", "replace")
    found = digest_text(content)
    if _DIGEST.fullmatch(claimed) is None or claimed == found:
        claimed, found = "what was written", "other bytes"
    return _corrupt(where, claimed, found, why="the manifest has been changed")


def _check_format(number: object, where: str) -> None:
    if type(number) is int and number > FORMAT_VERSION:
        raise Usage(
            "cannot read a manifest of a later format",
            where=where,
            expected=f"format {FORMAT_VERSION}",
            found=f"format {number}",
            remedy="upgrade laststep",
        )


def _document_of(decision: Commit | Abort) -> _CommitDocument | _AbortDocument:
    if isinstance(decision, Abort):
        return _AbortDocument(reason=decision.reason, by=decision.by)
    _check_metrics(decision.metrics)
    return _CommitDocument(
        run=decision.run,
        step=decision.step,
        epoch=decision.epoch,
        attempt=decision.attempt,
        created_s=decision.created_s,
        laststep=decision.laststep,
        items=decision.items,
        files=decision.files,
        metrics=msgspec.Raw(objects.encode(decision.metrics)),
        metadata=msgspec.Raw(objects.encode(decision.metadata)),
        continues=decision.continues,
        references=decision.references,
        ranks=decision.ranks if decision.ranks != 1 else msgspec.UNSET,
    )


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


def _abort_of(document: _AbortDocument) -> Abort:
    return Abort(format=document.format, reason=document.reason, by=document.by)


def _commit_of(document: _CommitDocument, where: str) -> Commit:
    metrics = objects.decode(bytes(document.metrics), where=f"metrics of {where}")
    if type(metrics) is not dict:
        raise _corrupt(where, "metrics by name", type(metrics).__name__)
    try:
        _check_metrics(metrics)
    except Usage as error:
        raise _corrupt(where, "metrics of plain values", f"{error.where}: {error.found}") from None
    return Commit(
        format=document.format,
        run=document.run,
        step=document.step,
        epoch=document.epoch,
        attempt=document.attempt,
        created_s=document.created_s,
        laststep=document.laststep,
        items=document.items,
        files=document.files,
        metrics=metrics,
        metadata=objects.decode(bytes(document.metadata), where=f"metadata of {where}"),
        continues=document.continues,
        references=document.references,
        ranks=1 if document.ranks is msgspec.UNSET else document.ranks,
    )


def _problem(commit: Commit) -> tuple[str, str] | None:
    """What was expected and what was found instead, or None if all is sound."""
    if not math.isfinite(commit.created_s) or commit.created_s < 0:
        return "a time of creation", repr(commit.created_s)
    folders = commit.references + ((commit.continues,) if commit.continues is not None else ())
    for folder in folders:
        if not _is_plain_name(folder):
            return "the name of a checkpoint's folder", repr(folder)
    if not _all_differ(commit.references):
        return "folders that differ", "one twice"
    if commit.ranks < 1:
        return "a number of ranks", str(commit.ranks)
    for record in commit.files:
        if record.rank >= commit.ranks:
            return f"a rank below {commit.ranks} for {record.name}", str(record.rank)
        problem = _file_problem(record)
        if problem is not None:
            return problem
    return _item_problem(commit)


def _file_problem(record: FileRecord) -> tuple[str, str] | None:
    name = record.name
    if not _is_plain_name(name) or not name.endswith(_SUFFIX) or name == _SUFFIX:
        return f"the plain name of a {_SUFFIX} file", repr(name)
    header_bytes, size_bytes = record.header_bytes, record.size_bytes
    if header_bytes % ALIGN_BYTES or not 0 < header_bytes <= size_bytes:
        return (
            f"a header of a multiple of {ALIGN_BYTES} bytes within the file {name}",
            f"{header_bytes} bytes of {size_bytes}",
        )
    if _DIGEST.fullmatch(record.header_digest) is None:
        return f"{DIGEST_NAME}: and 32 hex digits for {name}", repr(record.header_digest)
    return None


def _item_problem(commit: Commit) -> tuple[str, str] | None:
    files = {record.name for record in commit.files}
    if len(files) != len(commit.files):
        return "files that differ in name", "one name twice"
    if not _all_differ(record.name for record in commit.items):
        return "items that differ in name", "one name twice"
    for record in commit.items:
        if not record.name or not record.kind:
            return "an item with a name and a kind", repr((record.name, record.kind))
        if record.file not in files:
            return f"a file of the checkpoint for {record.name!r}", repr(record.file)
    return None


def _all_differ(names: Iterable[str]) -> bool:
    listed = list(names)
    return len(set(listed)) == len(listed)


def _is_plain_name(name: str) -> bool:
    """Whether `name` is one visible component of a path on every system that we know of."""
    return (
        name.isprintable()
        and 0 < len(name.encode()) <= _MAX_NAME_BYTES
        and not name.startswith(".")
        and not any(character in name for character in '/\\:*?"<>|')
    )
