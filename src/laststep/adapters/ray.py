"""Hand committed checkpoints to Ray Train.

    ckpt = laststep.ray.Checkpointer(model=model, optimizer=optimizer, rng=laststep.RNG())
    start = ckpt.restore().next_step
    ckpt.report({"loss": loss})  # instead of ray.train.report, on all workers alike

By default the run lies in the folder of Ray's experiment, so that a checkpoint is handed over as
the folder that it is: nothing is copied or uploaded. Of a run elsewhere a pointer is handed over, a
file of a few bytes. A worker that dies is started again by Ray's `FailureConfig`; `restore()` then
takes the newest checkpoint of the run, which may be newer than the last that was reported.
"""

from __future__ import annotations

import json
import tempfile
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray.train
from ray.train import CheckpointUploadMode

from laststep import checkpointer as core
from laststep.adapters.framework import Framework
from laststep.errors import NotFoundError, UsageError
from laststep.events import Committed

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence

    from laststep.events import Event, Subscriber

__all__ = ["Checkpointer", "folder_of"]

FRAMEWORK = Framework(package="ray", extra="ray", first="2.60", last="2.60")
FRAMEWORK.check()

_POINTER = "pointer.json"


class Checkpointer(core.Checkpointer):
    """A `laststep.Checkpointer` for the function that Ray Train runs on each worker."""

    def __init__(
        self,
        run: str | os.PathLike[str] | None = None,
        /,
        *,
        subscribers: Sequence[Subscriber] = (),
        **more: Any,
    ) -> None:
        """`run`: the folder `laststep` of the experiment, unless it or `tiers` are named."""
        self._experiment = _experiment()
        if run is None and not more.get("tiers"):
            if self._experiment is None:
                raise UsageError(
                    "Ray's experiment does not lie in a folder of this machine",
                    expected="a storage_path that is a folder, or the run's own place",
                    remedy="name the run: laststep.ray.Checkpointer('s3://bucket/run', …)",
                )
            run = self._experiment / "laststep"
        self._news: deque[Committed] = deque()
        self._metrics: dict[str, Any] = {}
        self._over = False
        super().__init__(run, subscribers=[*subscribers, self._hear], **more)

    def report(self, metrics: Mapping[str, Any]) -> None:
        """Report metrics, and the newest checkpoint that was committed since the last report, with
        its step as `checkpoint_step`. All workers call it equally often; Ray lets them meet."""
        self._metrics = dict(metrics)
        newest = None
        while self._news:  # of the first rank; the others have none to tell
            newest = self._news.popleft()
        if newest is None or not self._rank.is_first:
            ray.train.report(self._metrics)
            return
        told = {**self._metrics, "checkpoint_step": newest.step}
        folder = Path(self.path, newest.folder)
        if self._experiment is not None and folder.is_relative_to(self._experiment):
            ray.train.report(
                told,
                checkpoint=ray.train.Checkpoint.from_directory(folder),
                checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD,
            )
            return
        with tempfile.TemporaryDirectory() as pointer:
            text = json.dumps({"folder": f"{self.path}/{newest.folder}", "step": newest.step})
            Path(pointer, _POINTER).write_text(text)
            ray.train.report(told, checkpoint=ray.train.Checkpoint.from_directory(pointer))

    def close(self) -> None:
        """Wait for all saves, raise what failed, and report the last one, with the last metrics."""
        super().close()
        if not self._over:
            self._over = True
            self.report(self._metrics)

    def _hear(self, event: Event) -> None:
        if isinstance(event, Committed):
            self._news.append(event)


def folder_of(checkpoint: Any) -> str:
    """Where the checkpoint lies that `report` has handed over: for `laststep.load`."""
    if Path(checkpoint.path, "manifest.json").exists():
        return str(checkpoint.path)
    with checkpoint.as_directory() as folder:
        pointer = Path(folder, _POINTER)
        if not pointer.exists():
            raise NotFoundError(
                "this is no checkpoint of laststep's",
                where=str(checkpoint.path),
                expected=f"manifest.json or {_POINTER}",
                remedy="hand checkpoints to Ray by laststep.ray.Checkpointer.report",
            )
        return str(json.loads(pointer.read_text())["folder"])


def _experiment() -> Path | None:
    """The folder of Ray's experiment, if it is one of this machine's."""
    try:
        storage = ray.train.get_context().get_storage()
    except (NotImplementedError, RuntimeError) as error:
        if isinstance(error, NotImplementedError):  # as in Ray's local mode
            return None
        raise UsageError(
            "laststep.ray.Checkpointer is for the function that Ray Train runs on its workers",
            found=str(error).partition("\n")[0],
            remedy="use laststep.Checkpointer elsewhere",
        ) from error
    path = Path(storage.experiment_fs_path)
    return path if path.is_absolute() else None
