"""Import the installed Lightning and check that this adapter supports its version.

Lightning is published under two names, `lightning.pytorch` and `pytorch_lightning`, each with its
own classes. Use the one that the program has imported.
"""

# ruff: noqa: SLF001 (Lightning's loops have no public names)

from __future__ import annotations

import importlib
import sys
from typing import Any

from laststep.adapters.framework import Framework

FRAMEWORK = Framework(package="lightning", extra="lightning", tested="2.6")
FRAMEWORK.check()

_OLD = "pytorch_lightning" in sys.modules and "lightning" not in sys.modules
_NAME = "pytorch_lightning" if _OLD else "lightning.pytorch"
pl: Any = importlib.import_module(_NAME)
torchmetrics: Any = importlib.import_module("torchmetrics")

_combined: Any = importlib.import_module(f"{_NAME}.utilities.combined_loader")
CombinedLoader: Any = _combined.CombinedLoader
LOADER_MODES: Any = _combined._SUPPORTED_MODES
SigTerm: type[BaseException] = importlib.import_module(
    f"{_NAME}.utilities.exceptions"
).SIGTERMException
