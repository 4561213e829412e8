"""What torch.distributed.checkpoint (DCP) loads from: a run, or a folder that torch itself wrote.

`dcp.load(state, storage_reader=Reader("runs/gpt"))` loads the newest checkpoint there, or that of a
step, whoever wrote it.
"""

from __future__ import annotations

import dataclasses
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.storage import StorageReader

from laststep.adapters.dcp.address import Address, found_own_path, is_address, this_rank
from laststep.adapters.dcp.content import DcpContent
from laststep.adapters.dcp.stock_folder import StockFolder, is_stock_folder, was_saved_after
from laststep.adapters.dcp.writer import done
from laststep.browse import Catalog
from laststep.catalog import decision
from laststep.catalog.lineage import parse_folder
from laststep.catalog.run import Run
from laststep.errors import AbortedError, NotFoundError, UsageError
from laststep.format.manifest import Commit
from laststep.storage.registry import open_store

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
    from torch.futures import Future


@dataclass(frozen=True, slots=True, kw_only=True)
class _FoundCheckpoint:
    """Where a checkpoint was found."""

    path: str
    folder: str | None
    """Of the run at that path; None where torch wrote to the path itself."""
    own: bool
    """Whether each rank has saved for itself, so that only steps can be compared."""

    @property
    def step(self) -> int | None:
        name = None if self.folder is None else parse_folder(self.folder)
        return None if name is None else name.step

    def __str__(self) -> str:
        return f"step {self.step}" if self.own else f"{self.path}/{self.folder or ''}"


@dataclass(slots=True, kw_only=True)
class _OpenedCheckpoint(StorageMeta):
    """What DCP is told of a checkpoint, and for other Readers where it was found."""

    found: _FoundCheckpoint


class Reader(StorageReader):
    """Gives `dcp.load` the newest checkpoint of a run, or that of a step, whoever wrote it; or what
    torch's own storage has left at that path.

    What a Checkpointer saved is one state: its items by name. Objects that were pickled are
    `UsageError`, unless `allow_pickle`. Enums and dataclasses are made only of `types`, and of
    those classes that the state to load into has."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        step: int | None = None,
        *,
        allow_pickle: bool = False,
        types: Sequence[type] = (),
        _extension_registry: object = None,  # of torch's FileSystemReader: a run needs none
    ) -> None:
        self._types = tuple(types)
        self._address = Address.of(path, step)
        self._allow_pickle = allow_pickle
        self._found: _FoundCheckpoint | None = None
        self._content: DcpContent | StockFolder | None = None
        self._stored: dict[Any, Any] = {}
        self._load_id = str(uuid.uuid4())

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_content": None}

    # What DCP calls, in this order

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A new load begins; a `checkpoint_id` is the path to load from, or the step to load."""
        self._close()
        self._found, self._stored = None, {}
        self._load_id = str(uuid.uuid4())
        self._address = self._address.named(checkpoint_id)

    # No `**kwargs`: DCP takes these for a sign that each rank may have metadata of its own, for
    # which it asks where the checkpoint is damaged. Which rank this is, is known without.
    def read_metadata(self) -> Metadata:
        """Find the checkpoint and open it."""
        self._close()
        self._found = self._find()
        content = self._opened()
        metadata = content.metadata()
        metadata.storage_meta = _OpenedCheckpoint(
            checkpoint_id=self.checkpoint_id,
            save_id=content.save_id,
            load_id=self._load_id,
            found=self._found,
        )
        return metadata

    def set_up_storage_reader(
        self,
        metadata: Metadata,
        is_coordinator: bool,  # noqa: FBT001
        *args: Any,
        **kwargs: Any,
    ) -> None:
        self._stored = metadata.storage_data
        if self._found is None and isinstance(metadata.storage_meta, _OpenedCheckpoint):
            self._found = metadata.storage_meta.found

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return dataclasses.replace(plan, storage_data=str(self._found))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """All ranks MUST have found the same checkpoint, however long one of them took."""
        found = {plan.storage_data for plan in plans}
        if len(found) > 1:
            raise AbortedError(
                "the ranks found different checkpoints",
                where=self._address.path,
                found=", ".join(sorted(found)),
                remedy="load again, or pass the step to the Reader: somebody is saving to the run, "
                "or a rank that saved for itself has died before others",
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what this rank wants, verified."""
        try:
            self._opened().read(plan, planner, self._stored)
        finally:
            self._close()
        return done(None)

    # What DCP asks

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """The step, as text; the path before one is known, and of what torch wrote."""
        step = None if self._found is None else self._found.step
        return str(self._address if step is None else step)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return is_address(checkpoint_id)

    # Steps of the above

    def _find(self) -> _FoundCheckpoint:
        path = self._address.path
        try:
            return _FoundCheckpoint(path=path, folder=self._chosen(path), own=False)
        except NotFoundError:
            own = found_own_path(path)
            if own is not None:
                return _FoundCheckpoint(path=own, folder=self._chosen(own), own=True)
            if self._address.step is None and is_stock_folder(path):
                return _FoundCheckpoint(path=path, folder=None, own=False)
            raise

    def _chosen(self, path: str) -> str:
        catalog = Catalog(Run.open(open_store(path)))
        step = self._address.step
        return (catalog.latest() if step is None else catalog[step]).folder

    def _opened(self) -> DcpContent | StockFolder:
        if self._content is None:
            if self._found is None:
                raise UsageError("cannot read before the metadata", where=self._address.path)
            self._content = _open(self._found, self._types, allow_pickle=self._allow_pickle)
        return self._content

    def _close(self) -> None:
        if self._content is not None:
            self._content.close()
            self._content = None


def _open(
    found: _FoundCheckpoint, types: tuple[type, ...], *, allow_pickle: bool
) -> DcpContent | StockFolder:
    if found.folder is None:
        return StockFolder(found.path, rank=this_rank(), allow_pickle=allow_pickle)
    store = open_store(found.path)
    decided = decision.read(store, found.folder)
    if not isinstance(decided, Commit):
        raise NotFoundError("there is no such checkpoint", where=f"{store.url}/{found.folder}")
    if was_saved_after(found.path, decided.created_s):
        raise UsageError(
            "two storages have saved to one path, and torch's own later",
            where=found.path,
            expected="one of them",
            remedy="load it with torch's FileSystemReader; or delete its "
            ".metadata to load what laststep has saved",
        )
    return DcpContent(
        store,
        found.folder,
        decided,
        rank=0 if found.own else this_rank(),
        allow_pickle=allow_pickle,
        types=types,
    )
