"""The storage writer for torch.distributed.checkpoint (DCP): saves to a run.

`dcp.save(state, storage_writer=Writer("runs/gpt", step=100))` commits an ordinary checkpoint. DCP's
planners decide which rank writes what, and ranks communicate only through DCP's collectives: the
coordinator begins the attempt and passes its location to the others in their plans; each rank
writes files of its own; the coordinator commits. All ranks MUST see the same folder. Without
collectives every rank is the coordinator of a run of its own.
"""

from __future__ import annotations

import dataclasses
import logging
import uuid
import weakref
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, SerializationFormat
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter
from torch.futures import Future

from laststep.catalog.attempt import Attempt, abort
from laststep.catalog.terms import this_writer
from laststep.dcp.address import SOLE_STEP, Address, is_address, is_alone, own_path, this_rank
from laststep.dcp.attempts import only_logged, writer_of
from laststep.dcp.record import locate, paths_of
from laststep.dcp.saving import RankPlan, make_commit, write_items
from laststep.errors import UsageError
from laststep.storage.registry import open_store

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from torch.distributed.checkpoint._extension import StreamTransformExtension
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import SavePlan
    from torch.distributed.checkpoint.storage import WriteResult

    from laststep.dcp.attempts import DcpSave

_log = logging.getLogger(__name__)


def _forget_plans() -> None:
    """Remove the plans that planners have cached: an earlier plan names an earlier attempt, or
    another storage. All ranks MUST do so at the same points of a save."""
    for name, cache in vars(SavePlanner).items():
        if name.startswith("_cached_"):
            cache.clear()


T = TypeVar("T")


class Writer(StorageWriter):
    """Storage writer for `dcp.save` and `dcp.async_save`: stores the state as a checkpoint.

    Without `step`, the path is a single checkpoint, and saving again replaces it once the new one
    is committed. With `step`, the path is a run, and saving an existing step raises
    `AlreadyExistsError`. `overwrite` changes this in both cases. Each save may name its own path or
    step as `checkpoint_id`. Values that can only be pickled raise `UsageError` unless
    `allow_pickle` is set. The other arguments are those of torch's FileSystemWriter; apart from
    `thread_count` they have no effect.
    """

    def __init__(  # noqa: PLR0913 (torch's arguments)
        self,
        path: str | os.PathLike[str],
        *,
        step: int | None = None,
        overwrite: bool | None = None,
        allow_pickle: bool = False,
        thread_count: int = 2,
        single_file_per_rank: bool = True,
        sync_files: bool = True,
        per_thread_copy_ahead: int | None = None,
        cache_staged_state_dict: bool = False,
        serialization_format: SerializationFormat = SerializationFormat.SAFETENSORS,
        _extensions: Sequence[StreamTransformExtension] | None = None,
    ) -> None:
        self._address = Address.of(path, step)
        self._overwrite = overwrite
        self._allow_pickle = allow_pickle
        if type(thread_count) is not int or thread_count < 1:
            raise UsageError(
                "thread_count is a number of threads",
                expected="at least 1",
                found=repr(thread_count),
            )
        self._threads = thread_count
        if _extensions:  # they might encrypt
            raise UsageError(
                "stream extensions are not supported",
                found=repr(_extensions)[:200],
                remedy="leave _extensions out, or keep torch's FileSystemWriter",
            )
        self._own = False
        self._trainer = this_writer()  # torch's background process saves on its behalf
        self._giving_up: weakref.finalize[..., Writer] | None = None
        self._forget()

    def _forget(self) -> None:
        """Abort the save in progress, if it was not committed, and reset the state."""
        if self._giving_up is not None:
            self._giving_up()
            self._giving_up = None
        self._save: DcpSave | None = None
        self._ranks = 0
        self.save_id = str(uuid.uuid4())

    def __getstate__(self) -> dict[str, object]:
        """Return the state that another process needs to save on behalf of this one."""
        return {**self.__dict__, "_giving_up": None, "_save": None}

    # Called by DCP, in this order

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new save. `checkpoint_id` is its path or its step."""
        self._forget()
        self.save_id = str(uuid.uuid4())
        self._address = self._address.named(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: FBT001
        self._forget()
        self._own = not kwargs.get("use_collectives", True) and not is_alone()
        _forget_plans()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Begin the attempt and add its location to each rank's plan."""
        locations = locate(*paths_of(plans))
        sole = self._address.step is None
        save = writer_of(self._path, self._trainer).begin_save(
            SOLE_STEP if self._address.step is None else self._address.step,
            overwrite=sole if self._overwrite is None else self._overwrite,
            sole=sole,
        )
        self._save, self._ranks = save, len(plans)
        # DCP does not report the failure of another rank: it just drops this object.
        self._giving_up = weakref.finalize(self, save.abort, "the save did not finish")
        return [
            dataclasses.replace(
                plan,
                storage_data=RankPlan(
                    at=save.attempt.name,
                    rank=(rank, len(plans)),
                    locations={item.index.fqn: locations[item.index.fqn] for item in plan.items},
                    own=self._own,
                ),
            )
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's data. It is durable when this returns."""
        _forget_plans()
        assigned: RankPlan = plan.storage_data
        save = self._save
        attempt = Attempt(open_store(self._path), assigned.at) if save is None else save.attempt
        try:
            allow_pickle, threads = self._allow_pickle, self._threads
            results = write_items(
                plan.items, planner, assigned, attempt, allow_pickle=allow_pickle, threads=threads
            )
        except BaseException as error:
            self._give_up(attempt, f"rank {assigned.rank[0]} failed: {error!r}")
            raise
        return done(results)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit the data that all ranks have written."""
        save = self._save
        if save is None or self._giving_up is None:
            raise UsageError("cannot finish a save that was not begun", where=self._path)
        try:
            commit = make_commit(save, metadata, results, save_id=self.save_id)
            save.commit(commit)
        except BaseException as error:
            save.abort(f"the coordinator failed: {error!r}")
            raise
        finally:
            self._giving_up.detach()
            self._giving_up = self._save = None
        metadata.storage_data = {
            result.index: result.storage_data for result in chain.from_iterable(results)
        }
        metadata.storage_meta = self.storage_meta()
        metadata.version = CURRENT_DCP_VERSION
        _log.info("committed step %d of %s", commit.step, self._path)

    # Queried by DCP

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """The step as text; the path if no step was named."""
        return str(self._address)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return is_address(checkpoint_id)

    def storage_meta(self) -> StorageMeta | None:
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self.save_id)

    @property
    def _path(self) -> str:
        return own_path(self._address.path, this_rank()) if self._own else self._address.path

    def _give_up(self, attempt: Attempt, reason: str) -> None:
        """Abort an attempt, which any rank may do. Other ranks may still be writing, so its files
        are deleted when the coordinator drops the save, or now if there is only one rank."""
        if self._save is not None and self._ranks == 1:
            self._save.abort(reason)
            return
        with only_logged(f"abort the save at {attempt.folder}"):
            abort(attempt.store, attempt.folder, reason)


def done(result: T) -> Future[T]:
    future: Future[T] = Future()
    future.set_result(result)
    return future
