"""Inspect a run without loading it: checkpoints, their tensors, and slices of these.

`laststep.open(run)` reads only manifests. The indexes of a checkpoint are read when its content is
first accessed; a slice reads and verifies only the blocks that hold it.
"""

from __future__ import annotations

import contextlib
import logging
import math
import operator
import weakref
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from operator import attrgetter
from typing import TYPE_CHECKING, Self, SupportsIndex

from laststep.catalog.attempt import is_checkpoint, read_manifest
from laststep.catalog.listing import nearest_steps
from laststep.catalog.run import Run
from laststep.constants import BLOCK_BYTES, DTYPES, MANIFEST_NAME
from laststep.errors import CorruptError, NotFoundError, UsageError
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

log = logging.getLogger(__name__)


@system.translate_oom("look into a run")
def open(path: str | os.PathLike[str]) -> Catalog:  # noqa: A001 (the word users expect)
    """Return the catalog of a run: its checkpoints by step. Raises `NotFoundError` if there is no
    run."""
    return Catalog(open_run(path))


def open_run(path: str | os.PathLike[str]) -> Run:
    """Open the run in that folder. Raises `NotFoundError` if there is none."""
    store = open_store(path)
    try:
        return Run.open(store)
    except NotFoundError:
        if not is_checkpoint(store):
            raise
        raise NotFoundError(
            "this is one checkpoint, not a run",
            where=store.url,
            remedy=f"laststep.load(path) loads it, `laststep show {store.url}` says what it holds",
        ) from None


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
        return _whole_number(step) in self.steps()

    def __len__(self) -> int:
        return len(self._readable())

    def __getitem__(self, wanted: SupportsIndex) -> Checkpoint:
        step = _whole_number(wanted)
        if step is None:
            raise UsageError(
                "a catalog is indexed by step",
                expected="an int of 0 or more",
                found=repr(wanted),
                remedy="catalog.steps() lists the steps",
            )
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

    def latest(self) -> Checkpoint:
        """Return the newest checkpoint of the lineage. Raises `NotFoundError` if there is none, and
        `CorruptError` if its manifest cannot be read; it never returns an older one instead."""
        # Not `Run.newest`: damage must raise here. The caller might not notice that an older
        # checkpoint was returned instead.
        lineage = self._lineage()
        if not lineage:
            raise NotFoundError("the run has no checkpoint yet", where=self._run.store.url)
        newest = lineage[-1]
        good = [entry.step for entry in lineage[:-1] if entry.is_whole]
        older = f"; laststep.load(run, step={good[-1]}) loads an older one" if good else ""
        if not isinstance(newest.error, CorruptError):
            return self._open(newest, older)
        raise newest.error.amended(
            what=f"the newest checkpoint, step {newest.step}, is damaged: {newest.error.what}",
            remedy=f"{CorruptError.usual_remedy}{older}",
        ) from newest.error

    @system.translate_oom("list a run")
    def _lineage(self) -> tuple[Listed, ...]:
        return self._run.lineage()

    def _open(self, listed: Listed, older: str = "") -> Checkpoint:
        if listed.commit is None:
            raise listed.error or CorruptError("the manifest cannot be read", where=listed.folder)
        return Checkpoint(self._run.store, listed.folder, listed.commit, older=older)


class Checkpoint(OnlyOne):
    """One committed checkpoint. For per-rank items, it shows the state of one rank (rank 0, unless
    `of_rank` chose another).

    Attributes: `step`, `folder`, `metrics`, `metadata`, `created_s` (Unix time), `size_bytes`,
    `ranks` (the number of ranks that wrote it), `lossy` and `omitted_items`.
    """

    def __init__(
        self, store: Store, folder: str, commit: Commit, *, rank: int | None = None, older: str = ""
    ) -> None:
        self._store = store
        self._older = older
        """A hint how to load an older checkpoint, appended to errors about damage."""
        self._content: Content | None = None
        self._rank = rank
        """The rank whose per-rank items are shown; None if none was chosen, which means rank 0."""
        self._told: set[str] = set()
        """Per-rank items for which the default to rank 0 was logged."""
        self.folder = folder
        self.step = commit.step
        self.metrics = commit.metrics
        self.metadata = commit.metadata
        self.created_s = commit.created_s
        self.size_bytes = commit.size_bytes
        self.lossy = commit.lossy
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
        number = _whole_number(rank)
        if number is None:
            raise UsageError(
                "rank must be an integer", expected="an int of 0 or more", found=repr(rank)
            )
        if not 0 <= number < self.ranks:
            known = "rank 0, which alone wrote it"
            if self.ranks > 1:
                known = f"one of the ranks 0 to {self.ranks - 1} that wrote it"
            raise NotFoundError(
                f"the checkpoint has no rank {number}", where=self.folder, expected=known
            )
        return Checkpoint(self._store, self.folder, self._commit, rank=number, older=self._older)

    def tensors(self) -> list[str]:
        """Return the full names of all tensors, `item/name`, including those that share bytes."""
        content = self.content()
        return [f"{item.name}/{name}" for item in content.items.values() for name in item.names()]

    def tensor(self, full_name: str) -> StoredTensor:
        """Return a tensor by its full name. No data is read before it is sliced. Raises
        `NotFoundError` if there is none of that name."""
        if not isinstance(full_name, str):
            raise UsageError(
                "index a checkpoint by tensor name",
                expected="text such as 'model/weight'",
                found=repr(full_name),
                remedy="checkpoint.tensors() lists the names",
            )
        content = self.content()
        item_name, _, name = full_name.partition("/")
        if not name and (meant := _meant_by(full_name, content)) is not None:
            raise NotFoundError(
                f"there is no tensor {full_name!r}",
                where=self.folder,
                remedy=f"did you mean {meant!r}?",
            )
        item = content.item(item_name)
        self._tell_whose(item_name)
        if item.view_of(name) is not None:
            raise UsageError(
                f"{full_name} shares bytes with other tensors", remedy="load its item whole"
            )
        stored = item.ties.get(name, name)
        if stored not in item.tensors:
            raise NotFoundError(
                f"there is no tensor {full_name!r}",
                where=self.folder,
                remedy=_remedy_for(content, item_name, name),
            )
        places = content.places(item_name, stored)
        return StoredTensor(content, full_name, item.tensors[stored], places, self._older)

    def _tell_whose(self, item: str) -> None:
        if self._rank is None and item in self.per_rank() and item not in self._told:
            self._told.add(item)
            log.warning(
                "%s: each of %d ranks has its own; this is rank 0's: checkpoint.of_rank(…) has the "
                "others'",
                item,
                self.ranks,
            )

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

    @contextlib.contextmanager
    def advising(self) -> Iterator[None]:
        """Add a hint how to load an older checkpoint to `CorruptError`s raised inside the block."""
        try:
            yield
        except CorruptError as error:
            if not self._older or (error.remedy or "").endswith(self._older):
                raise
            raise error.amended(remedy=f"{error.remedy}{self._older}") from error

    @system.translate_oom("open a checkpoint")
    def content(self) -> Content:
        """Return the verified indexes and plain values, which are read once."""
        if self._content is None:
            with self.advising():
                self._content = Content(
                    self._store, self.folder, self._commit, rank=self._rank or 0
                )
            # StoredTensors may outlive this object: the files stay open while any of them exists.
            weakref.finalize(self._content, close_files, self._content.files)
        return self._content

    def __repr__(self) -> str:
        whose = "" if self._rank is None else f" of rank {self._rank}"
        return f"<Checkpoint step={self.step} {self.folder}{whose}>"


class NoSuchElements(UsageError, IndexError):
    """An index outside of a stored tensor. It is also an `IndexError`, so that `for` loops end
    there."""


class StoredTensor(OnlyOne):
    """A tensor in a checkpoint. Slicing reads only the requested rows: `t[10:20]`, `t[:]`.

    Attributes: `name` (the full name), `dtype` (a string) and `shape`.
    """

    def __init__(
        self,
        content: Content,
        name: str,
        spec: TensorSpec,
        places: tuple[Place, ...],
        older: str = "",
    ) -> None:
        """`older` is a hint how to load an older checkpoint if this one is damaged."""
        self._content = content
        self._older = older
        self._places = places
        self.name = name
        self.dtype, self.shape = spec

    @system.translate_oom("read a tensor")
    def __getitem__(self, index: object) -> torch.Tensor:
        """Return a slice as a CPU tensor. A leading int or slice limits the data that is read.
        `t[:]` returns the whole tensor, even if it is a scalar. Raises `CorruptError` if stored
        bytes are damaged."""
        self._check(index)
        if not self.shape and index == slice(None):
            index = ...
        lead = index[0] if isinstance(index, tuple) and index else index
        found = self._rows(lead)
        if found is None:
            return self._indexed(self._box(whole(self.shape)), index)
        rows, rest = found
        inner = whole(self.shape[1:])
        part = self._box(Box((rows.start, *inner.start), (rows.stop, *inner.stop)))
        return self._indexed(part, (rest, *index[1:]) if isinstance(index, tuple) else rest)

    def _indexed(self, part: torch.Tensor, index: object) -> torch.Tensor:
        try:
            return part[index]  # type: ignore[index]
        except (IndexError, TypeError, ValueError, RuntimeError) as error:  # torch raises several
            if system.is_one(error):
                raise
            raise NoSuchElements(
                f"cannot index {self.name}",
                expected=f"an index into the shape {list(self.shape)}",
                found=str(error).partition("\n")[0],
                remedy="t[:] reads all of it",
            ) from error

    def _box(self, wanted: Box) -> torch.Tensor:
        from laststep.state.tensors import allocate, from_bytes, put_box

        size = DTYPES[self.dtype].size_bytes
        if len(self._places) == 1 and self._places[0].box == whole(self.shape):
            place = self._places[0]
            row_bytes = math.prod(self.shape[1:]) * size
            start = wanted.start[0] * row_bytes if wanted.start else 0
            data = self._read(place, start, wanted.volume * size)
            return from_bytes(data, self.dtype, wanted.shape)
        result = allocate(self.dtype, wanted.shape, "cpu")
        for place in self._places:
            common = place.box.meet(wanted)
            if common is None:
                continue
            # Read whole rows of the shard, since these are contiguous bytes.
            first, rows = common.start[0] - place.box.start[0], common.shape[0]
            row_bytes = math.prod(place.box.shape[1:]) * size
            data = self._read(place, first * row_bytes, rows * row_bytes)
            read = Box(
                (common.start[0], *place.box.start[1:]), (common.stop[0], *place.box.stop[1:])
            )
            stored = from_bytes(data, self.dtype, read.shape)
            put_box(result, common.within(wanted), stored, common.within(read))
        return result

    def _check(self, index: object) -> None:
        """Raise `UsageError`, before anything is read, for indices that torch would warn about or
        misinterpret."""
        for part in index if isinstance(index, tuple) else (index,):
            bounds = (part.start, part.stop, part.step) if isinstance(part, slice) else ()
            odd = any(bound is not None and not hasattr(bound, "__index__") for bound in bounds)
            odd = odd or (isinstance(part, slice) and part.step == 0)
            if odd or isinstance(part, str | bytes | float | complex | Mapping | AbstractSet):
                raise UsageError(
                    f"cannot index {self.name}",
                    expected="ints, slices or index tensors",
                    found=repr(index),
                    remedy="t[:] reads all of it",
                )

    def _rows(self, lead: object) -> tuple[range, int | slice] | None:
        """Return the rows that a leading index needs and the index to apply to them; None means the
        whole tensor."""
        if not self.shape:
            return None
        if isinstance(lead, int) and not isinstance(lead, bool):
            row = lead + self.shape[0] if lead < 0 else lead
            if not 0 <= row < self.shape[0]:
                raise NoSuchElements(
                    f"there is no row {lead} of {self.name}",
                    found=f"{self.shape[0]} rows",
                    remedy="t[:] reads all of it",
                )
            return range(row, row + 1), 0
        if isinstance(lead, slice):
            start, stop, step = lead.indices(self.shape[0])
            if step > 0:
                return range(start, max(start, stop)), slice(None, None, step)
        return None

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
            what = f"cannot read {self.name}: {error.what}"
            raise error.amended(what=what, remedy=f"{error.remedy}{self._older}") from error
        at = first_byte % BLOCK_BYTES
        return buffer[at : at + size]

    def __repr__(self) -> str:
        return f"<StoredTensor {self.name} {self.dtype}{list(self.shape)}>"


def _whole_number(step: object) -> int | None:
    try:
        return None if isinstance(step, bool) else operator.index(step)  # type: ignore[arg-type]
    except TypeError:
        return None


def _remedy_for(content: Content, item: str, name: str) -> str:
    """Return a remedy for a name that is not a tensor, or not one in this rank's view."""
    for file in content.files:
        layout = file.layout
        if layout.item not in (None, item):
            continue
        entry = f"{item}/{name}" if layout.item is None else name
        part = layout.parts.get(entry)
        if part is not None:
            full_name = f"{item}/{part.tensor}"
            return f"{layout.name} has a shard of that name: ask for {full_name!r}"
        if item in content.per_rank and any(stored.name == entry for stored in layout.tensors):
            rank = file.reader.index.rank
            return f"rank {rank} has it: ask checkpoint.of_rank({rank})"
    return "`laststep show --all` lists the names"


def _meant_by(name: str, content: Content) -> str | None:
    """Return the full name if `name` has a dot instead of a slash after the item, else None."""
    for stored in content.items.values():
        rest = name.removeprefix(f"{stored.name}.")
        if rest != name and (rest in stored.tensors or rest in stored.ties):
            return f"{stored.name}/{rest}"
    return None


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
