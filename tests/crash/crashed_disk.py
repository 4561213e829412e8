"""What a disk may look like after a crash: at every moment, in every way to lose what was unsynced.

From the recorded system calls of a `RecordingDisk`, cut after any of them. The rule is POSIX's:
only a sync of a file makes its bytes durable, only a sync of a folder makes its names durable;
without it each change may have reached the disk or not, in any combination. A change of a folder by
one call is atomic. Knows nothing of checkpoints; `scenarios` has those.
"""

from __future__ import annotations

import enum
import hashlib
import itertools
import math
import random
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from disks import Change, Kind

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

Tree = dict[str, bytes | None]
"""Every path below the root, with its bytes, or None for a folder."""


class Fate(enum.Enum):
    """What becomes of the writes to a file that were not synced."""

    LOST = enum.auto()
    KEPT = enum.auto()
    ZEROS = enum.auto()
    """The size is there, the bytes are not."""
    TORN = enum.auto()
    """The last write is there by half."""
    HOLES = enum.auto()
    """Every other write is lost."""


@dataclass
class _File:
    durable: bytearray = field(default_factory=bytearray)
    pending: list[Change] = field(default_factory=list)

    def after(self, fate: Fate) -> bytes:
        content = bytearray(self.durable)
        if fate is Fate.LOST:
            return bytes(content)
        for place, change in enumerate(self.pending):
            last = place == len(self.pending) - 1
            data = change.data
            if fate is Fate.ZEROS:
                data = bytes(len(data))
            elif fate is Fate.TORN and last:
                data = data[: len(data) // 2]
            elif fate is Fate.HOLES and place % 2 == 0:
                continue
            _apply(content, change, data)
        return bytes(content)


@dataclass
class _Folder:
    durable: dict[str, _File | _Folder] = field(default_factory=dict)
    live: dict[str, _File | _Folder] = field(default_factory=dict)
    pending: list[tuple[tuple[str, _File | _Folder | None], ...]] = field(default_factory=list)

    def change(self, *names: tuple[str, _File | _Folder | None]) -> None:
        self.pending.append(names)
        _rename(self.live, names)

    def after(self, chosen: Sequence[bool]) -> dict[str, _File | _Folder]:
        entries = dict(self.durable)
        for names, kept in zip(self.pending, chosen, strict=True):
            if kept:
                _rename(entries, names)
        return entries


class World:
    """A disk in the making: what is durable, and what is only in memory."""

    def __init__(self, root: str, base: Tree) -> None:
        self._root = Path(root)
        self._top = _Folder()
        self._files: dict[int, _File] = {}
        for path, data in sorted(base.items()):
            folder, name = self._parent(str(self._root / path))
            node: _File | _Folder = _Folder() if data is None else _File(bytearray(data))
            folder.durable[name] = folder.live[name] = node

    def perform(self, change: Change) -> None:
        """One recorded call."""
        if change.kind is Kind.SYNC_FOLDER:
            folder = self._find(change.path)
            assert isinstance(folder, _Folder)
            folder.durable, folder.pending = dict(folder.live), []
        elif change.file is not None:
            self._perform_on_file(change, change.file)
        else:
            self._perform_on_names(change)

    def crashes(self, limit: int, seed: int) -> Iterator[Tree]:
        """The trees that a crash now may leave: all of them, or `limit` where there are more."""
        folders = [folder for folder in self._folders() if folder.pending]
        files = [file for file in self._all_files() if file.pending]
        options: list[list[object]] = [
            list(itertools.product((False, True), repeat=len(folder.pending))) for folder in folders
        ]
        options += [list(Fate) for _ in files]
        for choice in _choices(options, limit, seed):
            masks = {id(f): mask for f, mask in zip(folders, choice, strict=False)}
            fates = {id(f): fate for f, fate in zip(files, choice[len(folders) :], strict=True)}
            tree: Tree = {}
            self._build(self._top, "", masks, fates, tree)
            yield tree

    def _perform_on_file(self, change: Change, serial: int) -> None:
        if change.kind is Kind.CREATE_FILE:
            folder, name = self._parent(change.path)
            self._files[serial] = _File()
            folder.change((name, self._files[serial]))
            return
        file = self._files[serial]
        if change.kind is Kind.SYNC:
            file.durable, file.pending = bytearray(file.after(Fate.KEPT)), []
        elif change.kind in (Kind.WRITE, Kind.TRUNCATE):
            file.pending.append(change)

    def _perform_on_names(self, change: Change) -> None:
        folder, name = self._parent(change.path)
        if change.kind is Kind.MAKE_FOLDER:
            folder.change((name, _Folder()))
        elif change.kind in (Kind.UNLINK, Kind.REMOVE_FOLDER):
            folder.change((name, None))
        elif change.to is not None:
            target, new = self._parent(change.to)
            node = folder.live[name]
            if change.kind is Kind.LINK:
                target.change((new, node))
            else:
                assert target is folder, "the model knows renames within one folder only"
                folder.change((name, None), (new, node))

    def _find(self, path: str) -> _File | _Folder:
        node: _File | _Folder = self._top
        for part in Path(path).relative_to(self._root).parts:
            assert isinstance(node, _Folder)
            node = node.live[part]
        return node

    def _parent(self, path: str) -> tuple[_Folder, str]:
        folder = self._find(str(Path(path).parent))
        assert isinstance(folder, _Folder)
        return folder, Path(path).name

    def _folders(self) -> list[_Folder]:
        """All folders that any choice could show, each once."""
        found: list[_Folder] = []
        waiting: list[_File | _Folder] = [self._top]
        while waiting:
            node = waiting.pop()
            if isinstance(node, _Folder) and not any(node is other for other in found):
                found.append(node)
                waiting += _reachable(node)
        return found

    def _all_files(self) -> list[_File]:
        found: dict[int, _File] = {}
        for folder in self._folders():
            for node in _reachable(folder):
                if isinstance(node, _File):
                    found[id(node)] = node
        return list(found.values())

    def _build(
        self,
        folder: _Folder,
        path: str,
        masks: dict[int, object],
        fates: dict[int, object],
        tree: Tree,
    ) -> None:
        mask = masks.get(id(folder), ())
        assert isinstance(mask, tuple)
        for name, node in folder.after(mask).items():
            below = f"{path}/{name}" if path else name
            if isinstance(node, _Folder):
                tree[below] = None
                self._build(node, below, masks, fates, tree)
            else:
                fate = fates.get(id(node), Fate.KEPT)
                assert isinstance(fate, Fate)
                tree[below] = node.after(fate)


def read_tree(root: Path) -> Tree:
    """The tree that is on disk now."""
    return {
        str(path.relative_to(root)): None if path.is_dir() else path.read_bytes()
        for path in sorted(root.rglob("*"))
    }


def write_tree(root: Path, tree: Tree) -> None:
    """Make `root` that tree and nothing else."""
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    for path, data in sorted(tree.items()):
        if data is None:
            (root / path).mkdir()
        else:
            (root / path).write_bytes(data)


def fingerprint(tree: Tree) -> bytes:
    """The same for equal trees only."""
    state = hashlib.blake2b(digest_size=16)
    for path, data in sorted(tree.items()):
        content = b"-" if data is None else hashlib.blake2b(data, digest_size=16).digest()
        state.update(b"%d:%s%s" % (len(path), path.encode(), content))
    return state.digest()


def _choices(options: list[list[object]], limit: int, seed: int) -> Iterator[tuple[object, ...]]:
    if math.prod(len(option) for option in options) <= limit:
        yield from itertools.product(*options)
        return
    # The extremes first (masks are ordered from nothing to all; LOST and KEPT lead), then chance.
    yield tuple(option[0] for option in options)
    yield tuple(option[1] if option[0] is Fate.LOST else option[-1] for option in options)
    chance = random.Random(seed)
    for _ in range(limit - 2):
        yield tuple(chance.choice(option) for option in options)


def _reachable(folder: _Folder) -> list[_File | _Folder]:
    pending = [node for names in folder.pending for _, node in names if node is not None]
    return [*folder.durable.values(), *folder.live.values(), *pending]


def _rename(
    entries: dict[str, _File | _Folder], names: Sequence[tuple[str, _File | _Folder | None]]
) -> None:
    for name, node in names:
        if node is None:
            entries.pop(name, None)
        else:
            entries[name] = node


def _apply(content: bytearray, change: Change, data: bytes) -> None:
    if change.kind is Kind.TRUNCATE:
        size = change.size_bytes
        content[size:] = bytes(max(0, size - len(content)))
        return
    if data:
        end = change.offset + len(data)
        content.extend(bytes(max(0, end - len(content))))
        content[change.offset : end] = data
