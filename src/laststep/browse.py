"""Inspect a run without loading it: checkpoints, their tensors, and slices of these.

`laststep.open(run)` reads only manifests. The indexes of a checkpoint are read when its content is
first accessed; a slice reads and verifies only the blocks that hold it.
"""

from __future__ import annotations

import logging
import math
import weakref
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Self, SupportsIndex

from msgspec import Meta

from laststep.catalog.attempt import read_manifest
from laststep.catalog.listing import nearest_steps
from laststep.catalog.run import Run
from laststep.checks import checked
from laststep.constants import BLOCK_BYTES, DTYPES, MANIFEST_NAME
from laststep.errors import CorruptError, NotFoundError, UsageError, ends_tracebacks
from laststep.format.manifest import Commit, decode
from laststep.process import system
from laststep.process.threads import OnlyOne
from laststep.read.blocks import close_files, refuse
from laststep.read.content import Content, Place
from laststep.read.verify import VerifyReport, verify_checkpoint
from laststep.state.boxes import Box, whole
from laststep.storage.registry import open_parent, open_store

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator

    import torch

    from laststep.catalog.listing import Listed
    from laststep.state.tree import TensorSpec
    from laststep.storage.store import Store

_Number = Annotated[int, Meta(ge=0)]

log = logging.getLogger(__name__)


@ends_tracebacks
@system.translate_oom("look into a run")
def open(path: str | os.PathLike[str]) -> Catalog:  # noqa: A001 (the word users expect)
    """Return the catalog of a run: its checkpoints by step. Raises `NotFoundError` if there is no
    run."""
    return Catalog(open_run(path))


def open_run(path: str | os.PathLike[str]) -> Run:
    return Run.open(open_store(path))


class Catalog:
    """The checkpoints of a run, by step: `catalog[100]`, `catalog.latest()`, `for c in catalog`.

    Iteration, `len()` and `in` cover the current lineage. `catalog[step]` also finds checkpoints
    outside of it, but prefers the lineage.
    """

    def __init__(self, run: Run) -> None:
        self._run = run

    def __iter__(self) -> Iterator[Checkpoint]:
        return iter([self._open(entry) for entry in self._readable()])

    def __contains__(self, step: object) -> bool:
        return step in self.steps()

    def __len__(self) -> int:
        return len(self._readable())

    @ends_tracebacks
    def __getitem__(self, wanted: SupportsIndex) -> Checkpoint:
        step = checked("step", wanted, _Number, remedy="catalog.steps() lists the steps")
        with system.translate_oom("list a run"):
            listed = self._run.checkpoints()
        same_step = [entry for entry in listed if entry.step == step]
        if not same_step:
            raise NotFoundError(
                f"there is no checkpoint of step {step}",
                where=self._run.store.url,
                found=nearest_steps((entry.step for entry in listed), step),
                remedy="catalog.steps() lists all of the lineage, `laststep ls` the rest",
            )
        return self._open(max(reversed(same_step), key=attrgetter("on_lineage")))

    def steps(self) -> list[int]:
        """Return the steps of the lineage whose manifests can be read; `laststep ls` also lists the
        others."""
        return [entry.step for entry in self._readable()]

    def _readable(self) -> list[Listed]:
        return [entry for entry in self._lineage() if entry.commit is not None]

    @ends_tracebacks
    def latest(self) -> Checkpoint:
        """Return the newest checkpoint of the lineage. Raises `NotFoundError` if there is none, and
        `CorruptError` if its manifest cannot be read; it never returns an older one instead."""
        # Not `Run.newest`: damage must raise here. The caller might not notice that an older
        # checkpoint was returned instead.
        lineage = self._lineage()
        if not lineage:
            raise NotFoundError("the run has no checkpoint yet", where=self._run.store.url)
        newest = lineage[-1]
        if not isinstance(newest.error, CorruptError):
            return self._open(newest)
        what = f"the newest checkpoint, step {newest.step}, is damaged: {newest.error.what}"
        raise newest.error.amended(what=what) from newest.error

    @system.translate_oom("list a run")
    def _lineage(self) -> tuple[Listed, ...]:
        return self._run.lineage()

    def _open(self, listed: Listed) -> Checkpoint:
        if listed.commit is None:
            raise listed.error or CorruptError("the manifest cannot be read", where=listed.folder)
        return Checkpoint(self._run.store, listed.folder, listed.commit)


class Checkpoint(OnlyOne):
    """One committed checkpoint. For per-rank items, it shows the state of one rank (rank 0, unless
    `of_rank` chose another).

    Attributes: `step`, `folder`, `metrics`, `metadata`, `created_s` (Unix time), `size_bytes`,
    `ranks` (the number of ranks that wrote it), `lossy` and `omitted_items`.
    """

    def __init__(self, store: Store, folder: str, commit: Commit, rank: int | None = None) -> None:
        self._store = store
        self._content: Content | None = None
        self._rank = rank
        """The rank whose per-rank items are shown; None: nobody has chosen, and rank 0's are."""
        self.folder = folder
        self.step = commit.step
        self.metrics = commit.metrics
        self.metadata = commit.metadata
        self.created_s = commit.created_s
        self.size_bytes = commit.written.size_bytes
        self.lossy = commit.written.lossy
        """The rounding that was applied to tensors; empty if all are exact."""
        self.omitted_items = commit.omitted_items
        """In a partial checkpoint, the items of the original that it lacks."""
        self.ranks = commit.ranks
        self._commit = commit

    def items(self) -> list[str]:
        return [item.name for item in self._commit.items]

    def per_rank(self) -> list[str]:
        """Return the names of the items of which each of several ranks has stored its own state."""
        return [item.name for item in self._commit.items if item.per_rank and self.ranks > 1]

    def of_rank(self, rank: int) -> Checkpoint:
        """Return the same checkpoint with the per-rank items of this rank, counted from 0. Raises
        `NotFoundError` if the checkpoint has no such rank."""
        number = checked("rank", rank, _Number)
        if number >= self.ranks:
            raise NotFoundError(
                f"the checkpoint has no rank {number}",
                where=self.folder,
                expected=f"one of the {self.ranks} ranks that wrote it, counted from 0",
            )
        return Checkpoint(self._store, self.folder, self._commit, number)

    def tensors(self) -> list[str]:
        """Return the full names of all tensors, `item/name`, including those that share bytes."""
        content = self.content()
        return [f"{item.name}/{name}" for item in content.items.values() for name in item.names]

    def tensor(self, full_name: str) -> StoredTensor:
        """Return a tensor by its full name. No data is read before it is sliced. Raises
        `NotFoundError` if there is none of that name."""
        content = self.content()
        item_name, _, name = checked("the name of a tensor", full_name, str).partition("/")
        item = content.item(item_name)
        if self._rank is None and item_name in self.per_rank():
            log.warning(
                "%s: this is rank 0's, and each rank has its own: of_rank(…) has the others'",
                full_name,
            )
        if item.view_of(name) is not None:
            raise UsageError(
                f"{full_name} shares bytes with other tensors", remedy="load its item whole"
            )
        stored = item.ties.get(name, name)
        if stored not in item.tensors:
            raise NotFoundError(
                f"there is no tensor {full_name!r}",
                where=self.folder,
                remedy="checkpoint.tensors() lists the names; of_rank(…) has those of another rank",
            )
        places = content.places(item_name, stored)
        return StoredTensor(content, full_name, item.tensors[stored], places)

    @system.translate_oom("verify a checkpoint")
    def verify(self) -> VerifyReport:
        """Read and check every byte; return a report of all damage."""
        return verify_checkpoint(self._store, self.folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files; they are reopened on demand."""
        if self._content is not None:
            self._content.close()
            self._content = None

    @system.translate_oom("open a checkpoint")
    def content(self) -> Content:
        """Return the verified indexes and plain values, which are read once."""
        if self._content is None:
            self._content = Content(self._store, self.folder, self._commit, rank=self._rank or 0)
            # StoredTensors may outlive this object: the files stay open while any of them exists.
            weakref.finalize(self._content, close_files, self._content.files)
        return self._content

    def __repr__(self) -> str:
        return f"<Checkpoint step={self.step} {self.folder}>"


class NoSuchElements(UsageError, IndexError):
    """An index outside of a stored tensor; also an `IndexError`, so that `for` loops end there."""


class StoredTensor(OnlyOne):
    """A tensor in a checkpoint. Slicing reads only the requested rows: `t[10:20]`, `t[:]`.

    Attributes: `name` (the full name), `dtype` (a string) and `shape`.
    """

    def __init__(
        self, content: Content, name: str, spec: TensorSpec, places: tuple[Place, ...]
    ) -> None:
        self._content = content
        self._places = places
        self.name = name
        self.dtype, self.shape = spec

    @system.translate_oom("read a tensor")
    def __getitem__(self, index: object) -> torch.Tensor:
        """Return a slice as a CPU tensor. A leading int or slice limits the data that is read.
        `t[:]` returns the whole tensor, even if it is a scalar. Raises `CorruptError` if stored
        bytes are damaged."""
        if not self.shape and index == slice(None):
            index = ...
        lead, *rest = (index if isinstance(index, tuple) else (index,)) or (...,)
        try:
            box, lead = self._rows(lead)
            return self._box(box)[(lead, *rest)]
        except (IndexError, TypeError, ValueError, RuntimeError) as error:  # torch raises several
            if system.is_one(error):
                raise
            raise NoSuchElements(
                f"cannot index {self.name}",
                expected=f"an index into the shape {list(self.shape)}",
                found=str(error).partition("\n")[0],
                remedy="t[:] reads all of it",
            ) from error

    def _rows(self, lead: object) -> tuple[Box, object]:
        """Return the rows that a leading index needs, and the index to apply to them."""
        box = whole(self.shape)
        if not self.shape:
            return box, lead
        if isinstance(lead, int) and not isinstance(lead, bool):
            row = lead + self.shape[0] if lead < 0 else lead
            if not 0 <= row < self.shape[0]:
                raise IndexError(f"row {lead} of {self.shape[0]} rows")
            start, stop, lead = row, row + 1, 0
        elif isinstance(lead, slice) and (lead.step is None or lead.step > 0):
            start, stop, step = lead.indices(self.shape[0])
            stop, lead = max(start, stop), slice(None, None, step)
        else:
            return box, lead
        return Box((start, *box.start[1:]), (stop, *box.stop[1:])), lead

    def _box(self, wanted: Box) -> torch.Tensor:
        from laststep.state.tensors import allocate, box_of, from_bytes

        result = allocate(self.dtype, wanted.shape, "cpu")
        for place in self._places:
            common = place.box.meet(wanted)
            if common is None:
                continue
            # Read whole rows of the shard, since these are contiguous bytes.
            row_bytes = math.prod(place.box.shape[1:]) * DTYPES[self.dtype].size_bytes
            rows = common.shape[0] if common.shape else 1
            skipped = common.start[0] - place.box.start[0] if common.shape else 0
            data = self._read(place, skipped * row_bytes, rows * row_bytes)
            read = Box(
                (*common.start[:1], *place.box.start[1:]), (*common.stop[:1], *place.box.stop[1:])
            )
            stored = from_bytes(data, self.dtype, read.shape)
            if read == wanted:
                return stored
            box_of(result, common.within(wanted)).copy_(box_of(stored, common.within(read)))
        return result

    def _read(self, place: Place, start: int, size: int) -> bytearray:
        """Read bytes of a stored shard, verifying the whole blocks that contain them."""
        if size == 0:
            return bytearray()
        first_byte = place.start + start
        file = self._content.files[place.file]
        extent = file.blocks(first_byte, first_byte + size)
        buffer = bytearray(extent.size_bytes)
        try:
            self._content.open_files([place.file])
            refuse(extent.read(memoryview(buffer)))
        except CorruptError as error:
            raise error.amended(what=f"cannot read {self.name}: {error.what}") from error
        at = first_byte % BLOCK_BYTES
        return buffer[at : at + size]

    def __repr__(self) -> str:
        return f"<StoredTensor {self.name} {self.dtype}{list(self.shape)}>"


@system.translate_oom("open a checkpoint")
def open_folder(path: str | os.PathLike[str]) -> Checkpoint:
    """Open the folder of a single checkpoint, which may have been copied out of its run."""
    store, folder = open_parent(path)
    return Checkpoint(store, folder, read_commit(store, folder))


def read_commit(store: Store, folder: str) -> Commit:
    """Return the commit of a checkpoint, whatever the name of its folder is now."""
    full = f"{store.url}/{folder}"
    try:
        data = read_manifest(store, folder)
    except NotFoundError:
        raise NotFoundError(
            "there is no checkpoint", where=full, expected=MANIFEST_NAME, remedy="check the path"
        ) from None
    decided = decode(data, where=f"{full}/{MANIFEST_NAME}")
    if not isinstance(decided, Commit):
        raise NotFoundError("this checkpoint was aborted", where=full, found=decided.reason)
    return decided
