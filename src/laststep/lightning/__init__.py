"""Adapter for Lightning: a callback that saves and resumes.

Trainer(callbacks=[laststep.lightning.Checkpoint("runs/a", every=500)])

Lightning is published under two names, `lightning.pytorch` and `pytorch_lightning`, each with its
own classes. The adapter uses the one that the program has imported.
"""

# ruff: noqa: SLF001 (Lightning's loops have no public names)

from __future__ import annotations

import importlib
import sys
from typing import Any

from laststep.adapters.framework import Framework
from laststep.lightning.uses import USES

FRAMEWORK: Framework = Framework(
    package="lightning", extra="lightning", oldest="2.6", newest="2.6", uses=USES
)
FRAMEWORK.check()

_OLD = "pytorch_lightning" in sys.modules and "lightning" not in sys.modules
_NAME = "pytorch_lightning" if _OLD else "lightning.pytorch"
pl: Any = importlib.import_module(_NAME)
torchmetrics: Any = importlib.import_module("torchmetrics")

_combined: Any = importlib.import_module(f"{_NAME}.utilities.combined_loader")
CombinedLoader: Any = _combined.CombinedLoader
LOADER_MODES: Any = _combined._SUPPORTED_MODES
_exceptions: Any = importlib.import_module(f"{_NAME}.utilities.exceptions")
SigTerm: type[BaseException] = _exceptions.SIGTERMException

from laststep.lightning.checkpoint import Checkpoint  # noqa: E402

__all__ = ["Checkpoint"]
