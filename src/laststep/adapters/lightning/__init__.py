"""Lightning: a callback that saves and resumes, and a plugin for those who keep ModelCheckpoint.

    Trainer(callbacks=[laststep.lightning.Checkpoint("runs/a", every=500)])

Tested with lightning 2.6, which is checked when this is imported.
"""

from laststep.adapters.lightning.checkpoint import Checkpoint
from laststep.adapters.lightning.io import IO

__all__ = ["IO", "Checkpoint"]
