"""Prove, before anything is written to an object store, that it keeps what a run rests on.

Five requests and a deletion below the run's prefix. A server that ignores a condition is refused:
two writers could both believe that they have committed. Knows nothing of runs.
"""

from __future__ import annotations

import contextlib
import secrets
from typing import TYPE_CHECKING

from laststep.errors import LaststepError, StorageFailed

if TYPE_CHECKING:
    from laststep.storage.bucket import Bucket

PROBE = ".probe-"
"""How the names of such objects begin; no list has them."""
_CONTENT = b"what a server keeps is what was put there"
_RANGE = (5, 8)
_NO_VERSION = '"0123456789abcdef0123456789abcdef"', "1"


def probe(bucket: Bucket) -> None:
    """`StorageFailed` where the server lacks something; leaves nothing behind."""
    prefix = f"{bucket.prefix}/" if bucket.prefix else ""
    key = f"{prefix}{PROBE}{secrets.token_hex(6)}"
    try:
        lacks = _lacks(bucket, key)
    finally:
        with contextlib.suppress(LaststepError):
            bucket.delete([key])
    if lacks is not None:
        what, found = lacks
        raise StorageFailed(
            "this object store cannot keep a run", where=bucket.where(bucket.prefix),
            expected=what, found=found,
            remedy="use a server, or a version of it, that can; or save to a folder. "
            "docs/guides/object-storage.md lists what has been tried",
        )  # fmt: skip


def _lacks(bucket: Bucket, key: str) -> tuple[str, str] | None:
    """What was expected and what was found, at the first that is not as it must be."""
    if bucket.create(key, _CONTENT) is None:
        return "names that are free where nothing was put", "a random name that is taken"
    for expected, holds in (
        ("puts that fail where the name is taken (If-None-Match)", _refuses_second),
        ("puts that fail where another version is there (If-Match)", _refuses_other_version),
        ("reads of ranges (Range)", _reads_range),
        ("lists that have what was put before", _lists),
    ):
        try:
            found = None if holds(bucket, key) else "it is ignored"
        except StorageFailed as error:
            if error.transient:
                raise
            found = error.found
        if found is not None:
            return expected, found
    return None


def _refuses_second(bucket: Bucket, key: str) -> bool:
    return bucket.create(key, b"") is None


def _refuses_other_version(bucket: Bucket, key: str) -> bool:
    return bucket.replace(key, b"", _NO_VERSION) is None


def _reads_range(bucket: Bucket, key: str) -> bool:
    first, last = _RANGE
    return bucket.read_range(key, first, last - first) == _CONTENT[first:last]


def _lists(bucket: Bucket, key: str) -> bool:
    return key in [meta["path"] for meta in bucket.names(bucket.prefix)]
