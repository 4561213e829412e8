"""Import the installed Lightning and check that this adapter supports its version.

Lightning is published under two names, `lightning.pytorch` and `pytorch_lightning`, each with its
own classes. Use the one that the program has imported.
"""

# ruff: noqa: SLF001 (Lightning's loops have no public names; the seams below check those we use)

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Any

from laststep.adapters.framework import Framework

_HAS_NEW = importlib.util.find_spec("lightning") is not None
_OLD = "pytorch_lightning" in sys.modules and "lightning" not in sys.modules
_PACKAGE = "lightning" if _HAS_NEW else "pytorch-lightning"

FRAMEWORK = Framework(package=_PACKAGE, extra="lightning", tested="2.6")
FRAMEWORK.check()

_NAME = "lightning.pytorch" if _HAS_NEW and not _OLD else "pytorch_lightning"
pl: Any = importlib.import_module(_NAME)


def _module(name: str) -> Any:
    return importlib.import_module(f"{_NAME}.{name}")


CombinedLoader: Any = _module("utilities.combined_loader").CombinedLoader
LOADER_MODES: Any = _module("utilities.combined_loader")._SUPPORTED_MODES
ModelCheckpoint: Any = pl.callbacks.ModelCheckpoint
SET_BY_EPOCH: Any = (
    pl.callbacks.GradientAccumulationScheduler,
    pl.callbacks.StochasticWeightAveraging,
)
SigTerm: type[BaseException] = _module("utilities.exceptions").SIGTERMException
FitLoop: Any = _module("loops.fit_loop")._FitLoop
EpochLoop: Any = _module("loops.training_epoch_loop")._TrainingEpochLoop
CheckpointIO: Any = _module("plugins.io").CheckpointIO
Metric: Any = importlib.import_module("torchmetrics").Metric
MetricCollection: Any = importlib.import_module("torchmetrics").MetricCollection
Results: Any = _module("trainer.connectors.logger_connector.result")._ResultCollection
TorchIO: Any = _module("plugins.io").TorchCheckpointIO

FRAMEWORK.seam(FitLoop, "_load_combined_loader_states")
FRAMEWORK.seam(FitLoop, "setup_data")
FRAMEWORK.seam(FitLoop, "on_advance_start")
FRAMEWORK.seam(FitLoop, "on_advance_end")
FRAMEWORK.seam(EpochLoop, "on_run_start", "data_fetcher")
FRAMEWORK.seam(EpochLoop, "on_advance_end", "data_fetcher")
FRAMEWORK.seam(EpochLoop, "_should_accumulate")
FRAMEWORK.seam(EpochLoop, "_num_ready_batches_reached")
FRAMEWORK.seam(Results, "update_metrics", "key", "value", "batch_size")
FRAMEWORK.seam(CombinedLoader, "_state_dicts")
FRAMEWORK.seam(CombinedLoader, "_load_state_dicts", "states")
