"""Report committed checkpoints to Ray Train.

    ckpt = laststep.ray.Checkpointer(model=model, optimizer=optimizer, rng=laststep.RNG())
    start = ckpt.restore().next_step
    ckpt.report({"loss": loss})  # instead of ray.train.report, on all workers

By default the run is stored in the folder of Ray's experiment, and Ray gets the checkpoint's folder
itself: nothing is copied or uploaded. Of a run elsewhere, Ray gets no checkpoints. Ray's
`FailureConfig` restarts workers that die; `restore()` then reads the newest checkpoint of the run,
which may be newer than the last one reported.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray.train
from ray.train import CheckpointUploadMode

from laststep import checkpointer as core
from laststep.adapters.framework import Framework
from laststep.events import Committed

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from laststep.events import Event

__all__ = ["Checkpointer"]

_USES = {
    "ray/train/v2/_internal/execution/context.py": {
        "TrainContext.get_storage": "74313bcd78",
        "TrainContext.report": "1ba03a0ffc",
    },
    "ray/train/v2/api/context.py": {
        "DistributedTrainContext.get_storage": "9f8f77fda2",
        "LocalTrainContext.get_storage": "466658468d",
    },
    "ray/train/v2/api/train_fn_utils.py": {"get_context": "f11e8fc3cc", "report": "0e80720569"},
}
"""Digests of the code of Ray that this adapter relies on; see tests/frameworks/test_uses.py."""
FRAMEWORK = Framework(package="ray", extra="ray", oldest="2.60", newest="2.60", uses=_USES)
FRAMEWORK.check()


class Checkpointer(core.Checkpointer):
    """A `laststep.Checkpointer` for the training function that Ray Train runs on each worker."""

    def __init__(self, run: str | os.PathLike[str] | None = None, /, **more: Any) -> None:
        """`run` defaults to the folder `laststep` of Ray's experiment, unless `tiers` is passed."""
        self._experiment = _experiment()
        if run is None and not more.get("tiers") and self._experiment is not None:
            run = self._experiment / "laststep"
        self._news: deque[Committed] = deque()
        self._metrics: dict[str, Any] = {}
        self._over = False
        super().__init__(run, **more)
        self.subscribe(self._hear)

    def report(self, metrics: Mapping[str, Any]) -> None:
        """Report metrics to Ray, with the newest checkpoint committed since the last report and its
        step as `checkpoint_step`. All workers must call it equally often: Ray synchronises them
        here."""
        self._metrics = dict(metrics)
        newest = None
        while self._news:  # only rank 0 reports a checkpoint
            newest = self._news.popleft()
        if newest is None or not self._context.rank.is_first:
            ray.train.report(self._metrics)
            return
        folder, checkpoint = Path(self.path, newest.folder), None
        if self._experiment is not None and folder.is_relative_to(self._experiment):
            checkpoint = ray.train.Checkpoint.from_directory(folder)
        ray.train.report(
            {**self._metrics, "checkpoint_step": newest.step},
            checkpoint=checkpoint,
            checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD,
        )

    def close(self) -> None:
        """Wait for all saves, raise the error of a failed one, and report the last checkpoint with
        the last metrics."""
        super().close()
        if not self._over:
            self._over = True
            self.report(self._metrics)

    def _hear(self, event: Event) -> None:
        if isinstance(event, Committed):
            self._news.append(event)


def _experiment() -> Path | None:
    """Return the folder of Ray's experiment if it is on this machine's file system, else None."""
    try:
        storage = ray.train.get_context().get_storage()
    except NotImplementedError:  # in Ray's local mode
        return None
    path = Path(storage.experiment_fs_path)
    return path if path.is_absolute() else None
