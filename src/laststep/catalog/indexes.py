"""Read and verify the indexes of a checkpoint, and find the files that checkpoints share.

A damaged index is read a second time, bypassing every cache, before `CorruptError` is raised;
`NotFoundError` is raised if the whole checkpoint has been deleted since its manifest was read. A
shared file is identified by the checkpoint that it was written for, its name there, and its size.
If a run was copied in a way that turned hard links into separate files, deleting frees more than is
computed here.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from contextlib import closing
from typing import TYPE_CHECKING, NamedTuple

from laststep.catalog.attempt import deleted
from laststep.codecs.digests import DIGEST_NAME
from laststep.errors import CorruptError, NotFoundError, StorageError
from laststep.format import index as index_format
from laststep.format.manifest import DAMAGE_REMEDY
from laststep.plan.files import index_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from laststep.catalog.listing import Listed
    from laststep.format.index import Index, StoredFile
    from laststep.format.manifest import Commit
    from laststep.storage.store import Store


class Holding(NamedTuple):
    """The files in a checkpoint's folder."""

    folder: str
    stored_bytes: int
    """The size of all files in the folder, including the manifest."""
    files: tuple[StoredFile, ...]
    """The data files of the checkpoint."""


class FileId(NamedTuple):
    """The identity of a file that several checkpoints share."""

    written_for: str
    name: str
    size_bytes: int


class Sharing:
    """The files of all checkpoints of a run."""

    def __init__(self, held: Iterable[Holding]) -> None:
        self._stored_bytes: dict[str, int] = {}
        self._files: dict[str, list[FileId]] = {}
        self._folders: dict[FileId, list[str]] = {}
        self._order: dict[str, int] = {}
        for folder, stored_bytes, files in held:
            self._order[folder] = len(self._order)
            self._stored_bytes[folder] = stored_bytes
            self._files[folder] = [file_id(file, folder) for file in files]
            for file in self._files[folder]:
                self._folders.setdefault(file, []).append(folder)

    def freed_bytes(self, folders: Iterable[str]) -> int:
        """Return the bytes that deleting all of these folders frees. A shared file is freed only
        when the last folder that contains it is deleted."""
        chosen = set(folders)
        names = Counter(file for folder in chosen for file in self._files[folder])
        kept = sum(
            file.size_bytes * (count - (count == len(self._folders[file])))
            for file, count in names.items()
        )
        # Missing files are not in stored_bytes, so the difference may be negative.
        return max(sum(self._stored_bytes[folder] for folder in chosen) - kept, 0)

    def stored_bytes(self) -> int:
        """Return the bytes that all checkpoints occupy together."""
        return self.freed_bytes(self._stored_bytes)

    def shared_bytes(self, folder: str) -> int:
        """Return the bytes of the files in this folder that are also in another folder."""
        files = self._files[folder]
        return sum(file.size_bytes for file in files if len(self._folders[file]) > 1)

    def sharers(self, folder: str) -> tuple[str, ...]:
        """Return the other folders that share a file with this one, in the order of checkpoints."""
        others = {other for file in self._files[folder] for other in self._folders[file]}
        return tuple(sorted(others - {folder}, key=self._order.__getitem__))


def file_id(file: StoredFile, folder: str) -> FileId:
    """Return the identity of a file in `folder`."""
    return FileId(file.origin or folder, file.own_name, file.size_bytes)


LIMIT_BYTES = 4 << 30


def read_index(store: Store, folder: str, commit: Commit, rank: int) -> Index:
    """Read the index of a rank and verify it against the manifest."""
    data, where = read_bytes(store, folder, commit, rank)
    index = index_format.decode(data, where=where)
    if index.rank != rank:
        raise CorruptError(
            "an index is that of another rank",
            where=where,
            expected=f"rank {rank}",
            found=f"rank {index.rank}",
            remedy=DAMAGE_REMEDY,
        )
    return index


def read_indexes(
    store: Store, folder: str, commit: Commit, ranks: Iterable[int] | None = None
) -> list[Index]:
    """Read and verify the indexes of these ranks, or of all ranks."""
    wanted = range(commit.index_count) if ranks is None else sorted(ranks)
    return [read_index(store, folder, commit, rank) for rank in wanted]


def read_bytes(store: Store, folder: str, commit: Commit, rank: int) -> tuple[bytes, str]:
    """Return the verified bytes of an index and their URL."""
    name = name_of(commit, rank)
    where, expected = f"{store.url}/{folder}/{name}", commit.index_digest(rank)
    try:
        data = _read_once(store, f"{folder}/{name}", where)
        try:
            index_format.check(data, where=where, expected=expected)
        except CorruptError:
            data = _read_once(store, f"{folder}/{name}", where)
            index_format.check(data, where=where, expected=expected)
    except (CorruptError, NotFoundError) as error:
        gone = deleted(store, folder)
        if gone is not None:
            raise gone from error
        if isinstance(error, CorruptError):
            raise
        raise CorruptError(
            "an index is missing",
            where=where,
            expected=f"{DIGEST_NAME}:{expected.hex()}",
            found="no such file",
            remedy=DAMAGE_REMEDY,
        ).lacking(f"{folder}/{name}") from error
    return data, where


def name_of(commit: Commit, rank: int) -> str:
    return index_name(rank, commit.ranks)


def _read_once(store: Store, name: str, where: str) -> bytes:
    with closing(store.open_reader(name)) as reader:
        if reader.size_bytes > LIMIT_BYTES:
            raise CorruptError(
                "an index is too large to be one",
                where=where,
                expected=f"at most {LIMIT_BYTES} bytes",
                found=f"{reader.size_bytes} bytes",
                remedy=DAMAGE_REMEDY,
            )
        data = bytearray(reader.size_bytes)
        try:
            got = reader.read_into(0, memoryview(data))
        except StorageError as error:
            if not error.device_failed:
                raise
            raise CorruptError(
                "an index cannot be read", where=where, found=error.found, remedy=DAMAGE_REMEDY
            ) from error
        return bytes(data[:got])


def sharing_of(store: Store, listed: Sequence[Listed]) -> Sharing:
    """Return which files each of these checkpoints contains. Indexes are read only if any
    checkpoint shares files; a checkpoint whose indexes cannot be read counts as sharing none."""
    any_shares = any(item.commit is not None and item.commit.shared_bytes for item in listed)

    def held(item: Listed) -> Holding:
        files: list[StoredFile] = []
        if any_shares and item.commit is not None:
            with contextlib.suppress(CorruptError, NotFoundError):
                for index in read_indexes(store, item.folder, item.commit):
                    files += index.files
        return Holding(folder=item.folder, stored_bytes=item.stored_bytes, files=tuple(files))

    return Sharing(map(held, listed))
