"""Adapter for Lightning: a callback that saves and resumes.

Trainer(callbacks=[laststep.lightning.Checkpoint("runs/a", every=500)])
"""

from laststep.lightning.checkpoint import Checkpoint

__all__ = ["Checkpoint"]
