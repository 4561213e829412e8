"""Read the indexes of a checkpoint, verified, and find out what checkpoints share.

What is not as it was written is `Corrupt` after a second look past every cache; `NotFound` where the
whole checkpoint has been deleted since its manifest was read.
"""

from __future__ import annotations

import contextlib
from contextlib import closing
from typing import TYPE_CHECKING

from laststep.catalog import decision
from laststep.catalog.sharing import Holding, Sharing
from laststep.codecs.digests import DIGEST_NAME
from laststep.errors import Corrupt, NotFound, StorageFailed
from laststep.format import index as index_format
from laststep.format.envelope import DAMAGE_REMEDY
from laststep.plan.files import index_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from laststep.catalog.listing import Listed
    from laststep.format.index import Index, StoredFile
    from laststep.format.manifest import Commit
    from laststep.storage.store import Store

LIMIT_BYTES = 4 << 30


def read_index(store: Store, folder: str, commit: Commit, rank: int) -> Index:
    """The index of a rank, which the manifest vouches for."""
    data, where = read_bytes(store, folder, commit, rank)
    index = index_format.decode(data, where=where, expected=commit.index_digest(rank))
    if index.rank != rank:
        raise Corrupt(
            "an index is that of another rank", where=where, expected=f"rank {rank}",
            found=f"rank {index.rank}", remedy=DAMAGE_REMEDY,
        )  # fmt: skip
    return index


def read_indexes(
    store: Store, folder: str, commit: Commit, ranks: Iterable[int] | None = None
) -> list[Index]:
    """The indexes of these ranks, or of all."""
    wanted = range(commit.index_count) if ranks is None else sorted(ranks)
    return [read_index(store, folder, commit, rank) for rank in wanted]


def read_bytes(store: Store, folder: str, commit: Commit, rank: int) -> tuple[bytes, str]:
    """The bytes of an index, whose digest is right, and where they lie."""
    name = name_of(commit, rank)
    where, expected = f"{store.url}/{folder}/{name}", commit.index_digest(rank)
    found = b""
    for _ in range(2):
        try:
            data = _read_once(store, f"{folder}/{name}", where)
        except NotFound as error:
            gone = decision.deleted(store, folder)
            if gone is not None:
                raise gone from error
            raise Corrupt(
                "an index is missing", where=where, expected=f"{DIGEST_NAME}:{expected.hex()}",
                found="no such file", remedy=DAMAGE_REMEDY,
            ).lacking(f"{folder}/{name}") from error  # fmt: skip
        found = index_format.payload_digest(data)
        if found == expected == index_format.digest_of(data):
            return data, where
    gone = decision.deleted(store, folder)
    if gone is not None:
        raise gone
    raise Corrupt(
        "cannot read an index: it has been changed", where=where,
        expected=f"{DIGEST_NAME}:{expected.hex()}", found=f"{DIGEST_NAME}:{found.hex()}",
        remedy=DAMAGE_REMEDY,
    )  # fmt: skip


def name_of(commit: Commit, rank: int) -> str:
    """The name of the file of a rank's index."""
    return index_name(rank, commit.ranks)


def _read_once(store: Store, name: str, where: str) -> bytes:
    with closing(store.open_reader(name)) as reader:
        if reader.size_bytes > LIMIT_BYTES:
            raise Corrupt(
                "an index is too large to be one", where=where,
                expected=f"at most {LIMIT_BYTES} bytes", found=f"{reader.size_bytes} bytes",
                remedy=DAMAGE_REMEDY,
            )  # fmt: skip
        data = bytearray(reader.size_bytes)
        try:
            got = reader.read_into(0, memoryview(data))
        except StorageFailed as error:
            if not error.device_failed:
                raise
            raise Corrupt(
                "an index cannot be read", where=where, found=error.found, remedy=DAMAGE_REMEDY
            ) from error
        return bytes(data[:got])


def sharing_of(store: Store, listed: Sequence[Listed]) -> Sharing:
    """Which files lie in which of these checkpoints. Indexes are read only where any checkpoint
    shares files; one whose indexes cannot be read counts as sharing none."""
    any_shares = any(item.commit is not None and item.commit.shared_bytes for item in listed)

    def held(item: Listed) -> Holding:
        files: list[StoredFile] = []
        if any_shares and item.commit is not None:
            with contextlib.suppress(Corrupt, NotFound):
                for index in read_indexes(store, item.folder, item.commit):
                    files += index.files
        return Holding(folder=item.folder, stored_bytes=item.stored_bytes, files=tuple(files))

    return Sharing(map(held, listed))
