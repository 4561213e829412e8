"""The manifest of a group of ranks: which data files they wrote, in a job of many ranks.

Knows nothing of stores. Its digest stands in the manifest of the checkpoint, which thereby vouches
for all files without listing them. Carries its own digest as that one does (`format.envelope`) and
is checked as strictly. `encode` raises only `Usage`; `decode` only `Corrupt`, and `Usage` for a
later format.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from laststep.codecs.digests import digest_text
from laststep.errors import Corrupt, Usage
from laststep.format.envelope import corrupt, seal, unseal
from laststep.format.manifest import (
    MAX_RANKS,
    Count,
    FileRecord,
    GroupRecord,
    files_problem,
    lossy_of,
    lowest_format,
    parse_content,
    shared_bytes,
)

GROUPS_FOLDER = "groups"
_WHAT = "group manifest"


class GroupManifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The data files of consecutive ranks of one attempt."""

    format: Literal[1, 2, 3] = 1
    step: Count
    epoch: Count
    attempt: Count
    first: Count
    ranks: Count
    files: tuple[FileRecord, ...]


def encode(group: GroupManifest) -> tuple[GroupRecord, bytes]:
    """What the manifest of the checkpoint says of it, and the bytes of the file."""
    shared = shared_bytes(group.files)
    lowest = lowest_format(group.files, shared=bool(shared))
    content = msgspec.json.encode(msgspec.structs.replace(group, format=lowest))
    data = seal(content, member="group")
    record = GroupRecord(
        name=f"{GROUPS_FOLDER}/r{group.first:05d}.json", digest=digest_text(content),
        first=group.first, ranks=group.ranks, files=len(group.files),
        size_bytes=sum(file.size_bytes for file in group.files), shared_bytes=shared,
        lossy=lossy_of(group.files),
    )  # fmt: skip
    try:
        decode(data, record, where="the group manifest to be written")
    except Corrupt as error:
        raise Usage(f"cannot write a {_WHAT}", expected=error.expected, found=error.found) from None
    return record, data


def decode(data: bytes, record: GroupRecord, *, where: str) -> GroupManifest:
    """The group that `data` describes and `record` vouches for, checked throughout."""
    content = unseal(data, member="group", where=where, what=_WHAT)
    if digest_text(content) != record.digest:
        raise _corrupt(where, record.digest, digest_text(content))
    parse_content(content, where=where, what=_WHAT)
    try:
        group = msgspec.json.decode(content, type=GroupManifest)
    except msgspec.ValidationError as error:
        raise _corrupt(where, "the fields that docs/format.md lists", str(error)) from None
    problem = _problem(group, record)
    if problem is not None:
        raise _corrupt(where, *problem)
    return group


def _corrupt(where: str, expected: str, found: str) -> Corrupt:
    return corrupt(where, expected, found, what=_WHAT)


def _problem(group: GroupManifest, record: GroupRecord) -> tuple[str, str] | None:
    """What was expected and what was found instead, or None if all is sound."""
    if not 1 <= group.ranks <= MAX_RANKS:
        return f"from 1 to {MAX_RANKS} ranks", str(group.ranks)
    size_bytes = sum(file.size_bytes for file in group.files)
    shared = shared_bytes(group.files)
    rounded = ", ".join(lossy_of(group.files)) or "nothing"
    said = ", ".join(record.lossy) or "nothing"
    actual = (group.first, group.ranks, len(group.files), size_bytes, shared, rounded)
    wanted = (
        record.first, record.ranks, record.files, record.size_bytes, record.shared_bytes, said
    )  # fmt: skip
    if actual != wanted:
        text = "{1} ranks from {0} on, with {2} files of {3} bytes, {4} of them shared, {5} rounded"
        return text.format(*wanted), text.format(*actual)
    return files_problem(group.files, range(group.first, group.first + group.ranks))
