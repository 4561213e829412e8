"""A run as storage of torch.distributed.checkpoint (DCP).

`dcp.save(state, storage_writer=Writer("runs/gpt", step=100))` commits an ordinary checkpoint,
`dcp.load(state, storage_reader=Reader("runs/gpt"))` loads the newest one, or `step`, whoever wrote
it. DCP's planners decide what lies on which rank, and DCP's collectives are all that the ranks say
to each other: the coordinator begins the attempt and tells the others in their plans where it is;
each writes files of its own; the coordinator commits. All ranks MUST see the same folder.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
import uuid
import weakref
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter
from torch.futures import Future

from laststep.adapters.dcp.attempts import tenure_of
from laststep.adapters.dcp.commit import make_commit
from laststep.adapters.dcp.content import DcpContent
from laststep.adapters.dcp.layout import entries_of, locate
from laststep.adapters.dcp.writing import write_items
from laststep.arguments import plain_step
from laststep.browse import Catalog
from laststep.catalog import decision
from laststep.catalog.epochs import this_writer
from laststep.catalog.names import parse_folder
from laststep.catalog.run import Run
from laststep.errors import Aborted, LaststepError, NotFound, Usage
from laststep.format.manifest import Commit
from laststep.storage.registry import open_store

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator

    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import (
        LoadPlan,
        LoadPlanner,
        SavePlan,
        SavePlanner,
    )
    from torch.distributed.checkpoint.storage import WriteResult

    from laststep.adapters.dcp.attempts import DcpSave
    from laststep.adapters.nesting import Path
    from laststep.storage.store import Store

__all__ = ["Reader", "Writer"]

_log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(slots=True, kw_only=True)
class _Assignment:
    """What a rank is told in its plan: where to write, as whom, and where its entries belong."""

    folder: str
    rank: int
    ranks: int
    locations: dict[str, Path]
    spent: bool = False
    """Whether a save has used it: a planner with a cache hands out an earlier plan, with this."""


@dataclass(slots=True, kw_only=True)
class _OpenedCheckpoint(StorageMeta):
    """What DCP is told of a checkpoint, and for other Readers the folder that was opened."""

    folder: str


class Writer(StorageWriter):
    """Stores what `dcp.save` or `dcp.async_save` saves as a checkpoint of a run.

    `step` may be left out where each save passes it as `checkpoint_id`. A step that the run has is
    `Exists`, unless `overwrite`. What cannot be stored but by pickling is `Usage`, unless
    `allow_pickle`.
    """

    def __init__(
        self,
        run: str | os.PathLike[str],
        *,
        step: int | None = None,
        overwrite: bool = False,
        allow_pickle: bool = False,
    ) -> None:
        self._path = open_store(run).url
        self._step = None if step is None else plain_step(step)
        self._overwrite = overwrite
        self._allow_pickle = allow_pickle
        self._trainer = this_writer()  # torch's background process saves for this one
        self._giving_up: weakref.finalize[..., Writer] | None = None
        self._forget()

    def _forget(self) -> None:
        """Give up the save under way, if it was not committed, and begin with nothing."""
        if self._giving_up is not None:
            self._giving_up()
            self._giving_up = None
        self._attempt: DcpSave | None = None
        self._ranks = 0
        self._save_id = str(uuid.uuid4())
        self._began_s = time.monotonic()

    def __getstate__(self) -> dict[str, object]:
        """What another process needs to save in this one's place."""
        under_way = ("_giving_up", "_attempt")
        return {**self.__dict__, **dict.fromkeys(under_way)}

    # What DCP calls, in this order

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A new save begins; a `checkpoint_id` is its step."""
        self._forget()
        if checkpoint_id is not None:
            self._step = _step_of(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: FBT001
        self._forget()
        if self._step is None:
            raise Usage(
                "cannot save without a step", where=self._path,
                remedy="pass step= to the Writer, or checkpoint_id= to dcp.save",
            )  # fmt: skip
        alone = not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1
        if not kwargs.get("use_collectives", True) and not alone:
            raise Usage(
                "cannot save without collectives: every rank would make a checkpoint of its own",
                where=self._path, remedy="leave use_collectives out",
            )  # fmt: skip

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Begin the attempt, and tell each rank where it is."""
        locations = locate(entries_of(plans))
        assert self._step is not None  # noqa: S101 (checked when the save was set up)
        tenure = tenure_of(self._path, self._trainer)
        attempt = tenure.begin(self._step, overwrite=self._overwrite)
        self._attempt, self._ranks = attempt, len(plans)
        # DCP does not tell when another rank has failed; then this object is not used any more.
        self._giving_up = weakref.finalize(self, attempt.give_up, "the save did not end")
        return [
            dataclasses.replace(
                plan,
                storage_data=_Assignment(
                    folder=attempt.folder,
                    rank=rank,
                    ranks=len(plans),
                    locations={item.index.fqn: locations[item.index.fqn] for item in plan.items},
                ),
            )
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write what this rank has to; when this returns, it is durable."""
        assigned: _Assignment = plan.storage_data
        store = open_store(self._path)
        folder = self._folder(assigned)
        assigned.spent = True
        try:
            with _folder_there(f"{self._path}/{folder}"):
                results = write_items(
                    plan.items, planner, assigned.locations, store=store, folder=folder,
                    rank=assigned.rank, ranks=assigned.ranks, allow_pickle=self._allow_pickle,
                )  # fmt: skip
        except BaseException as error:
            self._give_up(store, folder, f"rank {assigned.rank} failed: {error!r}")
            raise
        return _done(results)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit what all ranks have written."""
        attempt = self._attempt
        if attempt is None or self._giving_up is None:
            raise Usage("cannot finish a save that was not begun", where=self._path)
        try:
            with _folder_there(f"{self._path}/{attempt.folder}"):
                commit = make_commit(
                    attempt, metadata, results, save_id=self._save_id,
                    allow_pickle=self._allow_pickle,
                )  # fmt: skip
            attempt.commit(commit)
        except BaseException as error:
            attempt.give_up(f"the coordinator failed: {error!r}")
            raise
        finally:
            self._giving_up.detach()
            self._giving_up = self._attempt = None
        written = chain.from_iterable(results)
        metadata.storage_data = {result.index: result.storage_data for result in written}
        metadata.storage_meta = self.storage_meta()
        metadata.version = CURRENT_DCP_VERSION
        seconds = time.monotonic() - self._began_s
        _log.info("step %d of %s: %d bytes of %d ranks committed in %.2f s",
                  commit.step, self._path, commit.size_bytes, commit.ranks, seconds)  # fmt: skip

    # What DCP asks

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """The step, as text; "" before one is known."""
        return "" if self._step is None else str(self._step)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return _is_step(checkpoint_id)

    def storage_meta(self) -> StorageMeta | None:
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self._save_id)

    # Steps of the above

    def _folder(self, assigned: _Assignment) -> str:
        if self._attempt is not None:
            return self._attempt.folder
        if not assigned.spent:
            return assigned.folder
        # The plan is one that the planner has kept. The coordinator has made the new folder before
        # any rank got to know that the plan stays.
        attempts = Run.open(open_store(self._path)).attempts()
        mine = [attempt for attempt in attempts if attempt.step == self._step]
        if not mine:
            raise Aborted("the save was given up by the coordinator", where=self._path)
        return max(mine, key=lambda attempt: attempt.point).folder

    def _give_up(self, store: Store, folder: str, reason: str) -> None:
        """Abort an attempt, which any rank may do. Other ranks may still be writing, so its files
        go when the coordinator lets go of it, or at once where there is one rank."""
        if self._attempt is not None and self._ranks == 1:
            self._attempt.give_up(reason)
            return
        try:
            decision.abort(store, folder, reason)
        except LaststepError as error:
            _log.warning("cannot give the save up at %s: %s", folder, error)


class Reader(StorageReader):
    """Gives `dcp.load` the newest checkpoint of a run, or that of a step, whoever wrote it.

    What a Checkpointer saved is one state: its items by name. Objects that were pickled are
    `Usage`, unless `allow_pickle`.
    """

    def __init__(
        self,
        run: str | os.PathLike[str],
        step: int | None = None,
        *,
        allow_pickle: bool = False,
    ) -> None:
        self._path = open_store(run).url
        self._step = None if step is None else plain_step(step)
        self._allow_pickle = allow_pickle
        self._folder: str | None = None
        self._content: DcpContent | None = None
        self._stored: dict[Any, Any] = {}
        self._load_id = str(uuid.uuid4())

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_content": None}

    # What DCP calls, in this order

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A new load begins; a `checkpoint_id` is the step to load."""
        self._close()
        self._folder, self._stored = None, {}
        self._load_id = str(uuid.uuid4())
        if checkpoint_id is not None:
            self._step = _step_of(checkpoint_id)

    # No `**kwargs`: DCP takes these for a sign that each rank may have metadata of its own, for
    # which it asks where the checkpoint is damaged.
    def read_metadata(self) -> Metadata:
        """Find the checkpoint and open it."""
        self._close()
        catalog = Catalog(Run.open(open_store(self._path)))
        chosen = catalog.latest() if self._step is None else catalog[self._step]
        self._folder = chosen.folder
        content = self._opened()
        metadata = content.metadata()
        metadata.storage_meta = _OpenedCheckpoint(
            checkpoint_id=self.checkpoint_id, save_id=content.save_id, load_id=self._load_id,
            folder=self._folder,
        )  # fmt: skip
        return metadata

    def set_up_storage_reader(
        self,
        metadata: Metadata,
        is_coordinator: bool,  # noqa: FBT001
        *args: Any,
        **kwargs: Any,
    ) -> None:
        self._stored = metadata.storage_data
        if self._folder is None and isinstance(metadata.storage_meta, _OpenedCheckpoint):
            self._folder = metadata.storage_meta.folder

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return dataclasses.replace(plan, storage_data=self._folder)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """All ranks MUST have found the same checkpoint, however long one of them took."""
        folders = {plan.storage_data for plan in plans}
        if len(folders) > 1:
            raise Aborted(
                "the ranks found different checkpoints", where=self._path,
                found=", ".join(sorted(map(str, folders))),
                remedy="load again, or pass the step to the Reader: somebody is saving to the run",
            )  # fmt: skip
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what this rank wants, verified."""
        try:
            self._opened().read(plan, planner, self._stored)
        finally:
            self._close()
        return _done(None)

    # What DCP asks

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """The step, as text; "" before one is known."""
        name = None if self._folder is None else parse_folder(self._folder)
        step = self._step if name is None else name.step
        return "" if step is None else str(step)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return _is_step(checkpoint_id)

    # Steps of the above

    def _opened(self) -> DcpContent:
        if self._content is None:
            if self._folder is None:
                raise Usage("cannot read before the metadata", where=self._path)
            store = open_store(self._path)
            decided = decision.read(store, self._folder)
            if not isinstance(decided, Commit):
                raise NotFound("there is no such checkpoint", where=f"{store.url}/{self._folder}")
            in_job = dist.is_available() and dist.is_initialized()
            self._content = DcpContent(
                store, self._folder, decided, rank=dist.get_rank() if in_job else 0,
                allow_pickle=self._allow_pickle,
            )  # fmt: skip
        return self._content

    def _close(self) -> None:
        if self._content is not None:
            self._content.close()
            self._content = None


def _done(result: T) -> Future[T]:
    future: Future[T] = Future()
    future.set_result(result)
    return future


@contextlib.contextmanager
def _folder_there(where: str) -> Iterator[None]:
    try:
        yield
    except NotFound as error:
        raise Aborted(
            "the folder of the save is gone", where=where,
            found="it was deleted before the save ended, by hand or by a job that has taken over",
            remedy="save again; only one job at a time may save to a run",
        ) from error  # fmt: skip


def _step_of(checkpoint_id: object) -> int:
    if not _is_step(checkpoint_id):
        raise Usage(
            "the checkpoint_id of a run is a step", expected='a step, such as "100"',
            found=repr(checkpoint_id),
            remedy="pass the run to Writer or Reader, and the step as checkpoint_id",
        )  # fmt: skip
    return plain_step(int(str(checkpoint_id)))


def _is_step(checkpoint_id: object) -> bool:
    text = str(checkpoint_id) if type(checkpoint_id) in (str, int) else ""
    return text.isascii() and text.isdigit() and len(text) < 20
