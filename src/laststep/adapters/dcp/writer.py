"""A run as what torch.distributed.checkpoint (DCP) saves to.

`dcp.save(state, storage_writer=Writer("runs/gpt", step=100))` commits an ordinary checkpoint. DCP's
planners decide what lies on which rank, and DCP's collectives are all that the ranks say to each
other: the coordinator begins the attempt and tells the others in their plans where it is; each
writes files of its own; the coordinator commits. All ranks MUST see the same folder. Without
collectives every rank is the coordinator of a run of its own.
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
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StoragePrefix
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.storage import StorageWriter
from torch.futures import Future

from laststep.adapters.dcp import kept_plans, options
from laststep.adapters.dcp.address import (
    SOLE_STEP,
    Address,
    is_address,
    is_alone,
    own_path,
    this_rank,
)
from laststep.adapters.dcp.attempts import tenure_of
from laststep.adapters.dcp.commit import make_commit
from laststep.adapters.dcp.layout import entries_of, locate
from laststep.adapters.dcp.writing import WriteOptions, write_items
from laststep.catalog import decision
from laststep.catalog.epochs import this_writer
from laststep.catalog.run import Run
from laststep.errors import AbortedError, LaststepError, NotFoundError, UsageError
from laststep.storage.registry import open_store

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator

    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
    from torch.distributed.checkpoint.storage import WriteResult

    from laststep.adapters.dcp.attempts import DcpSave
    from laststep.adapters.dcp.options import StockOptions
    from laststep.adapters.nesting import Path
    from laststep.storage.store import Store

_log = logging.getLogger(__name__)

T = TypeVar("T")

_THREADS = 2


@dataclass(kw_only=True)
class _Assignment(_StoragePrefix):
    """What a rank is told in its plan: where to write, as whom, and where its entries belong. To
    torch's own storage, which a planner may hand it to, it is a beginning of files' names."""

    folder: str
    rank: int
    ranks: int
    locations: dict[str, Path]
    own: bool
    """Whether the rank saves for itself."""
    spent: bool = False
    """Whether a save has used it: a planner with a cache hands out an earlier plan, with this."""


class Writer(StorageWriter):
    """Stores what `dcp.save` or `dcp.async_save` saves as a checkpoint.

    Without a `step` the path is that of one checkpoint, and saving again replaces it, once the new
    one is committed. With one it is that of a run; a step that the run has is `AlreadyExistsError`.
    `overwrite` says otherwise, in both cases. Each save may name a path or a step of its own as
    `checkpoint_id`. What cannot be stored but by pickling is `UsageError`, unless `allow_pickle`.
    Arguments of torch's FileSystemWriter are taken too (`options`).
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        step: int | None = None,
        overwrite: bool | None = None,
        allow_pickle: bool = False,
        thread_count: int = _THREADS,
        **stock: Unpack[StockOptions],
    ) -> None:
        self._address = Address.of(path, step)
        self._overwrite = overwrite
        self._allow_pickle = allow_pickle
        self._threads = options.checked_threads(thread_count)
        options.accept(stock)
        self._own = False
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
        """A new save begins; a `checkpoint_id` is its path, or its step."""
        self._forget()
        self._address = self._address.named(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: FBT001
        self._forget()
        self._own = not kwargs.get("use_collectives", True) and not is_alone()
        kept_plans.forget_others(
            lambda told: isinstance(told, _Assignment) and told.own == self._own
        )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Begin the attempt, and tell each rank where it is."""
        locations = locate(entries_of(plans))
        attempt = tenure_of(self._path, self._trainer).begin(
            self._step, overwrite=self._overwrites, sole=self._address.step is None
        )
        self._attempt, self._ranks = attempt, len(plans)
        # DCP does not tell when another rank has failed; then this object is not used any more.
        self._giving_up = weakref.finalize(self, attempt.give_up, "the save did not end")
        return [
            dataclasses.replace(
                plan,
                storage_data=_Assignment(
                    prefix=f"__{rank}_",
                    folder=attempt.folder,
                    rank=rank,
                    ranks=len(plans),
                    locations={item.index.fqn: locations[item.index.fqn] for item in plan.items},
                    own=self._own,
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
        how = WriteOptions(allow_pickle=self._allow_pickle, own=self._own, threads=self._threads)
        try:
            with _folder_there(f"{self._path}/{folder}"):
                results = write_items(
                    plan.items,
                    planner,
                    assigned.locations,
                    store=store,
                    folder=folder,
                    rank=(assigned.rank, assigned.ranks),
                    how=how,
                )
        except BaseException as error:
            self._give_up(store, folder, f"rank {assigned.rank} failed: {error!r}")
            raise
        return done(results)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit what all ranks have written."""
        attempt = self._attempt
        if attempt is None or self._giving_up is None:
            raise UsageError("cannot finish a save that was not begun", where=self._path)
        try:
            with _folder_there(f"{self._path}/{attempt.folder}"):
                commit = make_commit(
                    attempt,
                    metadata,
                    results,
                    save_id=self._save_id,
                    allow_pickle=self._allow_pickle,
                )
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
        _log.info(
            "step %d of %s: %d bytes of %d ranks committed in %.2f s",
            commit.step,
            self._path,
            commit.size_bytes,
            commit.ranks,
            seconds,
        )

    # What DCP asks

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """The step, as text; the path where none was named."""
        return str(self._address)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return is_address(checkpoint_id)

    def storage_meta(self) -> StorageMeta | None:
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self._save_id)

    # Steps of the above

    @property
    def _path(self) -> str:
        return own_path(self._address.path, this_rank()) if self._own else self._address.path

    @property
    def _step(self) -> int:
        return SOLE_STEP if self._address.step is None else self._address.step

    @property
    def _overwrites(self) -> bool:
        return self._address.step is None if self._overwrite is None else self._overwrite

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
            raise AbortedError("the save was given up by the coordinator", where=self._path)
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


def done(result: T) -> Future[T]:
    """What DCP waits for, without a wait."""
    future: Future[T] = Future()
    future.set_result(result)
    return future


@contextlib.contextmanager
def _folder_there(where: str) -> Iterator[None]:
    try:
        yield
    except NotFoundError as error:
        raise AbortedError(
            "the folder of the save is gone",
            where=where,
            found="it was deleted before the save ended, by hand or by a job that has taken over",
            remedy="save again; only one job at a time may save to a run",
        ) from error
