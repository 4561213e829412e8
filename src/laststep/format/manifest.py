"""The manifest: the small record whose existence decides that a checkpoint is, or is not.

Knows nothing of stores or of how the decision is made. The document carries the digest of its own
content (`format.envelope`); once that is right, everything in it is checked. It lists the files of
a checkpoint or, where many ranks wrote it, the manifests of groups of ranks that do
(`format.group`). Metrics and metadata are typed JSON (`codecs.objects`), so nan and inf survive.
`encode` raises only `Usage`; `decode` only `Corrupt`, and `Usage` for a later format.
"""

from __future__ import annotations

import functools
import math
import re
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from laststep.codecs import objects, strict
from laststep.codecs.digests import DIGEST_NAME
from laststep.errors import Corrupt, Usage
from laststep.format import envelope
from laststep.format.envelope import corrupt, is_digest, seal, unseal
from laststep.format.spans import RanksOf, Span, cover_once
from laststep.format.versions import refuse_later
from laststep.terms import (
    ALIGN_BYTES,
    CODING_FORMAT,
    EXCERPT_FORMAT,
    FIRST_FORMAT,
    SHARING_FORMAT,
    with_article,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

Metric = float | int | str | bool

DAMAGE_REMEDY = envelope.DAMAGE_REMEDY
Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
MAX_RANKS = 1 << 24
"""More than any job has; whatever a manifest says, checking it takes no more memory than that."""
_MAX_NAME_BYTES = 255
_TABLE = re.compile(r"[0-9a-f]{32}")
_APART = frozenset('/\\:*?"<>|')
"""What separates or means something in a path, on one system or another."""
_DATA, _GROUP = ".safetensors", ".json"
_SAME_FIELDS = (
    "run", "step", "epoch", "attempt", "created_s", "laststep", "items", "continues",
    "references",
)  # fmt: skip


class _Record(
    msgspec.Struct, frozen=True, kw_only=True, gc=False, forbid_unknown_fields=True,
    omit_defaults=True,
):  # fmt: skip
    """An entry of a list in a manifest."""


class FileRecord(_Record, frozen=True, kw_only=True):
    """A data file: its size, the length and digest of its header region, and who wrote it."""

    name: str
    size_bytes: Count
    header_bytes: Count
    header_digest: str
    rank: Count = 0
    origin: str = ""
    """The folder of the checkpoint that it was written for, if that is an earlier one."""
    lent: bool = False
    """Whether it is here only for other files, which borrow blocks of it."""
    sharers: Count = 0
    """How many checkpoints, one after the other, have shared it before this one."""
    lossy: tuple[str, ...] = ()
    """How tensors in it were rounded, in the ways that there are."""


class ItemRecord(_Record, frozen=True, kw_only=True):
    """An item: the kind of provider that wrote it, and the (first) file that holds its tensors;
    `per_rank` if every rank has a state of its own."""

    name: str
    kind: str
    file: str
    tensors: Count
    size_bytes: Count
    per_rank: bool = False


class GroupRecord(_Record, frozen=True, kw_only=True):
    """The manifest of a group of consecutive ranks: its name and digest, which ranks, how many data
    files of how many bytes in all it lists, and the bytes of those that have an origin."""

    name: str
    digest: str
    first: Count
    ranks: Count
    files: Count
    size_bytes: Count
    shared_bytes: Count = 0
    lossy: tuple[str, ...] = ()
    """As those of the files that are not lent."""


class ClassRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Ranks that held the same tensors in the same layouts: the digest of their table, and who."""

    table: str
    spans: tuple[Span, ...]

    @property
    def ranks(self) -> RanksOf:
        """These ranks, in ascending order."""
        return RanksOf(self.spans)


class Commit(msgspec.Struct, frozen=True, kw_only=True):
    """The decision that a checkpoint is. `continues` names the folder of the one before it;
    `references` the folders of others whose bytes it needs (always empty so far). There are `files`
    or `groups`, never both; `catalog.groups.files_of` gives the files of either."""

    run: str
    step: int
    epoch: int
    attempt: int
    created_s: float
    laststep: str
    items: tuple[ItemRecord, ...]
    files: tuple[FileRecord, ...] = ()
    metrics: dict[str, Metric] = {}
    metadata: object = None
    continues: str | None = None
    references: tuple[str, ...] = ()
    ranks: int = 1
    """How many ranks wrote it."""
    groups: tuple[GroupRecord, ...] = ()
    classes: tuple[ClassRecord, ...] = ()
    """Which ranks held the same; nothing where that is not known."""
    left_out: tuple[str, ...] = ()
    """Of an excerpt: the items that its original has and this has not, in alphabetical order."""

    @property
    def format(self) -> int:
        """The lowest format in which this can be said."""
        if self.left_out:
            return EXCERPT_FORMAT
        return lowest_format(self.groups or self.files, shared=bool(self.shared_bytes))

    @property
    def size_bytes(self) -> int:
        """Of all its data files."""
        return sum(record.size_bytes for record in self.groups or self.files)

    @property
    def shared_bytes(self) -> int:
        """Of those that were written for earlier checkpoints."""
        return sum(group.shared_bytes for group in self.groups) or shared_bytes(self.files)

    @property
    def lossy(self) -> tuple[str, ...]:
        """How tensors in it were rounded; nothing: all is exact."""
        return lossy_of(self.groups or self.files)

    @property
    def new_bytes(self) -> int:
        """Of those that were written for this one."""
        return self.size_bytes - self.shared_bytes

    @property
    def file_count(self) -> int:
        """How many data files it has."""
        return sum(group.files for group in self.groups) or len(self.files)


def shared_bytes(files: Iterable[FileRecord]) -> int:
    """Of these files, those that were written for earlier checkpoints."""
    return sum(record.size_bytes for record in files if record.origin)


def lossy_of(records: Iterable[FileRecord | GroupRecord]) -> tuple[str, ...]:
    """How tensors in these files were rounded. Of lent ones it does not count: what is borrowed of
    them is what the state was."""
    own = [r for r in records if isinstance(r, GroupRecord) or not r.lent]
    return tuple(sorted({how for record in own for how in record.lossy}))


def lowest_format(records: Iterable[FileRecord | GroupRecord], *, shared: bool) -> int:
    """The lowest format in which records can be said, of which some may be shared."""
    if any(record.lossy for record in records):
        return CODING_FORMAT
    return SHARING_FORMAT if shared else FIRST_FORMAT


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

    format: Literal[1, 2, 3, 4]
    decision: Literal["commit"] = "commit"
    run: str
    step: Count
    epoch: Count
    attempt: Count
    created_s: float
    laststep: str
    items: tuple[ItemRecord, ...]
    files: tuple[FileRecord, ...] | msgspec.UnsetType = msgspec.UNSET
    metrics: msgspec.Raw
    metadata: msgspec.Raw
    continues: str | None
    references: tuple[str, ...]
    ranks: Count | msgspec.UnsetType = msgspec.UNSET
    groups: tuple[GroupRecord, ...] | msgspec.UnsetType = msgspec.UNSET
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
    if commit.format > document.format:
        raise _corrupt(where, f"format {commit.format}", f"format {document.format}")
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
        format=commit.format,  # type: ignore[arg-type]
        **_same_fields(commit),
        files=msgspec.UNSET if commit.groups else commit.files,
        metrics=msgspec.Raw(objects.encode(commit.metrics)),
        metadata=msgspec.Raw(objects.encode(commit.metadata)),
        ranks=commit.ranks if commit.ranks != 1 else msgspec.UNSET,
        groups=commit.groups or msgspec.UNSET,
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
    if (document.files is msgspec.UNSET) is (document.groups is msgspec.UNSET):
        raise _corrupt(where, "either files or groups", "both or neither")
    if document.groups == ():
        raise _corrupt(where, "groups of ranks", "an empty list")
    metrics = objects.from_parsed(plain["metrics"], where=f"metrics of {where}")
    if type(metrics) is not dict:
        raise _corrupt(where, "metrics by name", type(metrics).__name__)
    try:
        _check_metrics(metrics)
    except Usage as error:
        raise _corrupt(where, "metrics of plain values", f"{error.where}: {error.found}") from None
    return Commit(
        **_same_fields(document),
        files=() if document.files is msgspec.UNSET else document.files,
        metrics=metrics,
        metadata=objects.from_parsed(plain["metadata"], where=f"metadata of {where}"),
        ranks=1 if document.ranks is msgspec.UNSET else document.ranks,
        groups=() if document.groups is msgspec.UNSET else document.groups,
        classes=_classes_of(document, where),
        left_out=() if document.left_out is msgspec.UNSET else document.left_out,
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
    if not 1 <= commit.ranks <= MAX_RANKS:
        return f"from 1 to {MAX_RANKS} ranks", str(commit.ranks)
    return (
        files_problem(commit.files, range(commit.ranks))
        or _groups_problem(commit)
        or _classes_problem(commit)
        or _item_problem(commit)
        or _excerpt_problem(commit)
    )


def files_problem(files: tuple[FileRecord, ...], ranks: range) -> tuple[str, str] | None:
    """What is wrong with data files that these ranks are said to have written, as `_problem`."""
    for record in files:
        if record.rank not in ranks:
            expected = f"a rank from {ranks.start} to {ranks.stop - 1} for {record.name}"
            return expected, str(record.rank)
        problem = _file_problem(record)
        if problem is not None:
            return problem
    if not _all_differ(record.name for record in files):
        return "files that differ in name", "one name twice"
    return None


def _file_problem(record: FileRecord) -> tuple[str, str] | None:
    name = record.name
    if not _is_file_name(name, _DATA):
        return f"the plain name of a {_DATA} file", repr(name)
    header_bytes, size_bytes = record.header_bytes, record.size_bytes
    if header_bytes % ALIGN_BYTES or not 0 < header_bytes <= size_bytes:
        return (
            f"a header of a multiple of {ALIGN_BYTES} bytes within the file {name}",
            f"{header_bytes} bytes of {size_bytes}",
        )
    if not is_digest(record.header_digest):
        return f"{DIGEST_NAME}: and 32 hex digits for {name}", repr(record.header_digest)
    if record.origin and not _is_plain_name(record.origin):
        return f"the name of a checkpoint's folder for {name}", repr(record.origin)
    if (record.lent or record.sharers) and not record.origin:
        return f"the checkpoint that {name} was written for", "none"
    return None


def _groups_problem(commit: Commit) -> tuple[str, str] | None:
    """Groups follow each other, and are all ranks."""
    if not commit.groups:
        return None
    ranks = 0
    for record in commit.groups:
        if not _is_file_name(record.name, _GROUP):
            return f"the plain name of a {_GROUP} file", repr(record.name)
        if not is_digest(record.digest):
            return f"{DIGEST_NAME}: and 32 hex digits for {record.name}", repr(record.digest)
        if record.first != ranks or record.ranks < 1:
            return f"a group of ranks from {ranks} on", f"{record.ranks} from {record.first} on"
        if record.shared_bytes > record.size_bytes:
            return f"at most {record.size_bytes} shared bytes", str(record.shared_bytes)
        ranks += record.ranks
    if ranks != commit.ranks:
        return f"groups of {commit.ranks} ranks in all", f"of {ranks}"
    if not _all_differ(record.name for record in commit.groups):
        return "groups that differ in name", "one name twice"
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
    files = {record.name for record in commit.files}
    if not _all_differ(record.name for record in commit.items):
        return "items that differ in name", "one name twice"
    for record in commit.items:
        if not record.name or not record.kind:
            return "an item with a name and a kind", repr((record.name, record.kind))
        # The files of groups are not known here.
        there = _is_file_name(record.file, _DATA) if commit.groups else record.file in files
        if not there:
            return f"a file of the checkpoint for {record.name!r}", repr(record.file)
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


@functools.lru_cache(maxsize=1 << 12)
def _is_file_name(name: str, suffix: str) -> bool:
    """Whether that is a file of this kind in a checkpoint's folder, or in a folder within it.
    Remembered: all manifests of a run have the same names in them."""
    parts = name.split("/")
    whole = parts[-1].endswith(suffix) and parts[-1] != suffix
    return whole and len(parts) <= 2 and all(map(_is_plain_name, parts))


def _is_plain_name(name: str) -> bool:
    """Whether `name` is one visible component of a path on every system that we know of."""
    return (
        name.isprintable()
        and 0 < len(name.encode()) <= _MAX_NAME_BYTES
        and not name.startswith(".")
        and _APART.isdisjoint(name)
    )
