"""The manifests of groups of ranks, written and read: which data files a checkpoint has.

In jobs of many ranks the manifest of a checkpoint names the manifests of groups, and these the
files. Whoever wants the files of some ranks reads the manifests of their groups only. What is not
as it was written is `Corrupt` after a second look past every cache.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from laststep.catalog import decision
from laststep.catalog.sharing import Holding, Sharing
from laststep.errors import Corrupt, Exists, NotFound
from laststep.format import group
from laststep.format.manifest import DAMAGE_REMEDY

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from laststep.catalog.listing import Listed
    from laststep.format.group import GroupManifest
    from laststep.format.manifest import Commit, FileRecord, GroupRecord
    from laststep.storage.store import Store

GROUP_LIMIT_BYTES = 64 << 20


def write(store: Store, folder: str, manifest: GroupManifest) -> GroupRecord:
    """Make the manifest of a group in an attempt's folder, durably."""
    record, data = group.encode(manifest)
    with contextlib.suppress(Exists):
        store.make_folder(f"{folder}/{group.GROUPS_FOLDER}", parents=False)
    store.create(f"{folder}/{record.name}", data)
    store.sync_folder(folder)  # the rank that made the folder may not have got that far yet
    return record


def files_of(
    store: Store, folder: str, commit: Commit, ranks: Iterable[int] | None = None
) -> tuple[FileRecord, ...]:
    """The data files of a checkpoint, or of these ranks of it, in the order of ranks.

    `NotFound` where the checkpoint has been deleted since its manifest was read.
    """
    wanted = None if ranks is None else frozenset(ranks)
    files = commit.files
    if commit.groups:
        try:
            files = tuple(
                file
                for record in commit.groups
                if wanted is None
                or not wanted.isdisjoint(range(record.first, record.first + record.ranks))
                for file in read(store, folder, commit, record).files
            )
            _check_names(files, where=f"{store.url}/{folder}")
        except Corrupt as error:
            gone = decision.deleted(store, folder)
            if gone is not None:
                raise gone from error
            raise
    return files if wanted is None else tuple(file for file in files if file.rank in wanted)


def sharing_of(store: Store, listed: Sequence[Listed]) -> Sharing:
    """Which files lie in which of these checkpoints. Manifests of groups are read only where any
    checkpoint shares files; one whose list of files cannot be read counts as sharing none."""
    any_shares = any(item.commit is not None and item.commit.shared_bytes for item in listed)

    def held(item: Listed) -> Holding:
        files: tuple[FileRecord, ...] = ()
        if any_shares and item.commit is not None:
            with contextlib.suppress(Corrupt, NotFound):
                files = files_of(store, item.folder, item.commit)
        return Holding(folder=item.folder, stored_bytes=item.stored_bytes, files=files)

    return Sharing(map(held, listed))


def read(store: Store, folder: str, commit: Commit, record: GroupRecord) -> GroupManifest:
    """The manifest of one group, verified; one that seems wrong is read a second time."""
    name = f"{folder}/{record.name}"
    try:
        return _read_once(store, name, commit, record)
    except Corrupt:
        return _read_once(store, name, commit, record)


def _read_once(store: Store, name: str, commit: Commit, record: GroupRecord) -> GroupManifest:
    where = f"{store.url}/{name}"
    try:
        reader = store.open_reader(name)
    except NotFound as error:
        raise Corrupt(
            "the manifest of a group of ranks is missing", where=where, expected=record.digest,
            found="no such file", remedy=DAMAGE_REMEDY,
        ).lacking(name) from error  # fmt: skip
    with contextlib.closing(reader):
        if reader.size_bytes > GROUP_LIMIT_BYTES:
            raise Corrupt(
                "the manifest of a group of ranks is too large to be one", where=where,
                expected=f"at most {GROUP_LIMIT_BYTES} bytes", found=f"{reader.size_bytes} bytes",
                remedy=DAMAGE_REMEDY,
            )  # fmt: skip
        data = bytearray(reader.size_bytes)
        got = reader.read_into(0, memoryview(data))
    manifest = group.decode(bytes(data[:got]), record, where=where)
    saved = manifest.step, manifest.epoch, manifest.attempt
    if saved != (commit.step, commit.epoch, commit.attempt):
        raise Corrupt(
            "the manifest of a group of ranks is that of another checkpoint", where=where,
            found="step {}, epoch {}, attempt {}".format(*saved),
            remedy=DAMAGE_REMEDY,
        )  # fmt: skip
    return manifest


def _check_names(files: tuple[FileRecord, ...], *, where: str) -> None:
    if len({file.name for file in files}) != len(files):
        raise Corrupt("two groups of ranks name the same file", where=where, remedy=DAMAGE_REMEDY)
