"""The identity of a run: the id in `run.json` or, without that file, in its manifests.

Knows nothing of lineage or of writers.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated

import msgspec

from laststep.catalog import decision
from laststep.catalog.epochs import RECORD_LIMIT_BYTES
from laststep.catalog.names import RUN_NAME, parse_folder
from laststep.errors import Corrupt, LaststepError, NotFound, StorageFailed
from laststep.format.manifest import Commit
from laststep.format.versions import Versioned, refuse_later
from laststep.terms import FORMAT_VERSION

if TYPE_CHECKING:
    from laststep.storage.store import Store

_ID = re.compile("[0-9a-f]{32}")


class RunRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of `run.json`, by which a run is known."""

    format: int
    run: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]
    created_s: float


def run_id(store: Store) -> str:
    """Return the id of the run in a store; "" if neither `run.json` nor a manifest tells it."""
    record = read_record(store)
    return id_in_manifests(store) if record is None else record.run


def id_in_manifests(store: Store) -> str:
    """Return the run id in the newest readable manifest; "" if there is none."""
    attempts = [name for name in map(parse_folder, store.folder_names("")) if name is not None]
    for attempt in sorted(attempts, key=lambda name: name.point, reverse=True):
        try:
            decided = decision.read_manifest(store, attempt.folder)
        except StorageFailed:
            raise
        except LaststepError:
            continue  # damaged, or of a later format; an older manifest has the same id
        if isinstance(decided, Commit) and _ID.fullmatch(decided.run):
            return decided.run
    return ""


def read_record(store: Store) -> RunRecord | None:
    """Return the content of `run.json`; None if there is none, `Corrupt` if it is damaged."""
    where = f"{store.url}/{RUN_NAME}"
    try:
        data = store.read(RUN_NAME, limit_bytes=RECORD_LIMIT_BYTES)
    except NotFound:
        return None
    try:
        said = msgspec.json.decode(data, type=Versioned)
        refuse_later(
            said.format, what="run", where=where, writer=said.laststep, latest=FORMAT_VERSION
        )
        record = msgspec.json.decode(data, type=RunRecord)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        found = "other content, which laststep did not write" if data else "an empty file"
        raise _bad_record(where, found) from error
    if record.format != FORMAT_VERSION:
        raise _bad_record(where, f"format {record.format}")
    return record


def _bad_record(where: str, found: str) -> LaststepError:
    return Corrupt(
        "the record of the run is damaged",
        where=where,
        expected="a format, a run id and a time",
        found=found,
        remedy="move the file away: the checkpoints open without it",
    )
