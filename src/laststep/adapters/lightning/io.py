"""A plugin that stores what `ModelCheckpoint` saves, for those who keep it: durably, and verified
when it is loaded. Training waits for it, as for Lightning's own."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from laststep.adapters.lightning.package import CheckpointIO, TorchIO
from laststep.adapters.lightning.state import as_lightning
from laststep.errors import UsageError
from laststep.oneoff import load, save

if TYPE_CHECKING:
    import os

__all__ = ["IO"]


class IO(CheckpointIO):  # type: ignore[misc]
    """`Trainer(plugins=[laststep.lightning.IO()])`: each `.ckpt` is a folder of laststep's."""

    def __init__(self, *, allow_pickle: bool = False) -> None:
        """`allow_pickle`: for hyperparameters and callbacks that hold other objects."""
        self._allow_pickle = allow_pickle
        self._files: Any = TorchIO()

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Store it; what is there is replaced once that is durable."""
        if storage_options is not None:
            raise UsageError(
                "IO takes no storage_options",
                found=repr(storage_options)[:80],
                remedy="leave them out: a path is all it needs",
            )
        save(checkpoint, path, allow_pickle=self._allow_pickle, overwrite=True)

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: Any = None,
        weights_only: bool | None = None,  # noqa: FBT001 (Lightning's signature)
    ) -> dict[str, Any]:
        """Of any kind: a file is one of Lightning's own."""
        if Path(path).is_file():
            return self._files.load_checkpoint(path, map_location, weights_only)  # type: ignore[no-any-return]
        device = None if callable(map_location) or isinstance(map_location, dict) else map_location
        loaded: Any = load(path, map_location=device, allow_pickle=self._allow_pickle)
        return as_lightning(loaded)

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Of any kind."""
        found = Path(path)
        if found.is_dir() and not found.is_symlink():
            shutil.rmtree(found)
        else:
            found.unlink(missing_ok=True)


class AlsoOurs(IO):
    """The plugin that a trainer has, which can load checkpoints of laststep's as well."""

    def __init__(self, own: Any, *, allow_pickle: bool) -> None:
        super().__init__(allow_pickle=allow_pickle)
        self._files = own

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        self._files.save_checkpoint(checkpoint, path, storage_options)

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        self._files.remove_checkpoint(path)

    def teardown(self) -> None:
        """What the plugin waits for at the end."""
        self._files.teardown()
