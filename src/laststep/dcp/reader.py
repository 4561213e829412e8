"""The storage reader for torch.distributed.checkpoint (DCP): a run, or a folder that torch wrote.

`dcp.load(state, storage_reader=Reader("runs/gpt"))` loads the newest checkpoint there, or that of a
step, whether laststep or DCP saved it.
"""

from __future__ import annotations

import dataclasses
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.storage import StorageReader

from laststep.browse import Catalog, Checkpoint, read_commit
from laststep.catalog.attempt import parse_folder
from laststep.catalog.run import Run
from laststep.dcp.address import (
    SOLE_STEP,
    Address,
    found_own_path,
    is_address,
    stock_saved_s,
    this_rank,
)
from laststep.dcp.content import DcpContent, StockFolder
from laststep.dcp.writer import done
from laststep.errors import AbortedError, NotFoundError, UsageError
from laststep.storage.registry import open_store

if TYPE_CHECKING:
    import os

    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
    from torch.futures import Future


@dataclass(kw_only=True)
class _FoundCheckpoint(StorageMeta):
    """DCP's storage metadata with the location of the checkpoint, for Readers of other ranks."""

    path: str
    folder: str | None
    """The checkpoint's folder in the run at `path`; None if torch wrote to the path itself."""
    own: bool
    """True if each rank saved separately, so that only steps can be compared."""

    @property
    def step(self) -> int | None:
        name = None if self.folder is None else parse_folder(self.folder)
        return None if name is None else name.step

    def __str__(self) -> str:
        return f"step {self.step}" if self.own else f"{self.path}/{self.folder or ''}"


class Reader(StorageReader):
    """Storage reader for `dcp.load`: loads the newest checkpoint of a run, or that of a step,
    whether a Checkpointer or DCP saved it. Also loads what torch's own storage wrote to the path.

    A checkpoint that a Checkpointer saved appears as one state: its items by name. Pickled objects
    raise `UsageError` unless `allow_pickle` is set.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        step: int | None = None,
        *,
        allow_pickle: bool = False,
        _extension_registry: object = None,  # for torch's FileSystemReader; unused here
    ) -> None:
        self._address = Address.of(path, step)
        self._allow_pickle = allow_pickle
        self._found: _FoundCheckpoint | None = None
        self._content: DcpContent | StockFolder | None = None
        self._stored: dict[Any, Any] = {}
        self.load_id = str(uuid.uuid4())

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_content": None}

    # Called by DCP, in this order

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new load. `checkpoint_id` is the path to load from or the step to load."""
        self._close()
        self._found, self._stored = None, {}
        self.load_id = str(uuid.uuid4())
        self._address = self._address.named(checkpoint_id)

    # No `**kwargs`: DCP would take them as a sign that each rank may have its own metadata, and
    # would ask for that if the checkpoint is damaged. The rank is known without them.
    def read_metadata(self) -> Metadata:
        self._close()
        self._found = self._find()
        content = self._opened()
        metadata = content.metadata()
        self._found.checkpoint_id, self._found.save_id = self.checkpoint_id, content.save_id
        self._found.load_id = self.load_id
        metadata.storage_meta = self._found
        return metadata

    def set_up_storage_reader(
        self,
        metadata: Metadata,
        is_coordinator: bool,  # noqa: FBT001
        *args: Any,
        **kwargs: Any,
    ) -> None:
        self._stored = metadata.storage_data
        if self._found is None and isinstance(metadata.storage_meta, _FoundCheckpoint):
            self._found = metadata.storage_meta

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return dataclasses.replace(plan, storage_data=str(self._found))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Raise `AbortedError` unless all ranks, which look separately, found one checkpoint."""
        found = {plan.storage_data for plan in plans}
        if len(found) > 1:
            raise AbortedError(
                "the ranks found different checkpoints",
                where=self._address.path,
                found=", ".join(sorted(found)),
                remedy=(
                    "load again, or pass the step to the Reader: another process is saving to the "
                    "run, or a rank died in a separate save"
                ),
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        try:
            self._opened().read(plan, planner, self._stored)
        finally:
            self._close()
        return done(None)

    # Queried by DCP

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """The step as text; the path if there is none, yet or at all, or if torch wrote it."""
        step = None if self._found is None else self._found.step
        return str(self._address if step in (None, SOLE_STEP) else step)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return is_address(checkpoint_id)

    def _find(self) -> _FoundCheckpoint:
        path = self._address.path
        try:
            return _FoundCheckpoint(path=path, folder=self._chosen(path), own=False)
        except NotFoundError:
            own = found_own_path(path)
            if own is not None:
                return _FoundCheckpoint(path=own, folder=self._chosen(own), own=True)
            if self._address.step is None and stock_saved_s(path) is not None:
                return _FoundCheckpoint(path=path, folder=None, own=False)
            raise

    def _chosen(self, path: str) -> str:
        catalog = Catalog(Run.open(open_store(path)))
        step = self._address.step
        return (catalog.latest() if step is None else catalog[step]).folder

    def _opened(self) -> DcpContent | StockFolder:
        found = self._found
        if self._content is not None:
            return self._content
        if found is None:
            raise UsageError("cannot read before the metadata", where=self._address.path)
        rank = this_rank()
        if found.folder is None:
            self._content = StockFolder(found.path, rank=rank, allow_pickle=self._allow_pickle)
            return self._content
        store = open_store(found.path)
        commit = read_commit(store, found.folder)
        if (stock_saved_s(found.path) or 0.0) > commit.created_s:
            raise UsageError(
                "two storages have saved to one path, torch's own last",
                where=found.path,
                expected="one of them",
                remedy="load it with torch's FileSystemReader; or delete its "
                ".metadata to load what laststep has saved",
            )
        checkpoint = Checkpoint(store, found.folder, commit, 0 if found.own else rank)
        where = f"{store.url}/{found.folder}"
        self._content = DcpContent(checkpoint, where=where, allow_pickle=self._allow_pickle)
        return self._content

    def _close(self) -> None:
        if self._content is not None:
            self._content.close()
            self._content = None
