"""Adapter for Lightning: a callback that saves and resumes, and a plugin for `ModelCheckpoint`.

    Trainer(callbacks=[laststep.lightning.Checkpoint("runs/a", every=500)])

Tested with lightning 2.6; importing this package checks the version.
"""

from laststep.lightning.checkpoint import IO, Checkpoint

__all__ = ["IO", "Checkpoint"]
