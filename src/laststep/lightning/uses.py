"""Digests of the code of Lightning that the adapter relies on.

tests/frameworks/test_uses.py compares them with the installed release and prints a new table.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from laststep.adapters.sources import Uses

USES: Uses = {
    "lightning/fabric/plugins/io/torch_io.py": {"TorchCheckpointIO.load_checkpoint": "dd275bcc1e"},
    "lightning/pytorch/loops/fetchers.py": {
        "_DataFetcher": "c1ef4d109b",
        "_DataFetcherWrapper": "ea55b554a5",
        "_DataLoaderIterDataFetcher": "d16d550ca4",
        "_PrefetchDataFetcher": "362bb90f52",
    },
    "lightning/pytorch/loops/fit_loop.py": {
        "_FitLoop._can_stop_early": "69a911d869",
        "_FitLoop._load_combined_loader_states": "9f877a298c",
        "_FitLoop._results": "6cd163fce5",
        "_FitLoop.advance": "80e5bd7b70",
        "_FitLoop.done": "a4418df9ee",
        "_FitLoop.on_advance_end": "996f2f96ed",
        "_FitLoop.on_advance_start": "f809184cbc",
        "_FitLoop.on_load_checkpoint": "d30564df1b",
        "_FitLoop.on_run_start": "c8c65cb472",
        "_FitLoop.on_save_checkpoint": "2bf16293f6",
        "_FitLoop.reset": "d896a36216",
        "_FitLoop.restarting": "a262b82df1",
        "_FitLoop.run": "fc22210514",
        "_FitLoop.setup_data": "c43c95c369",
        "_FitLoop.update_restart_stage": "e4c7cfe051",
    },
    "lightning/pytorch/loops/loop.py": {"_Loop": "ca6e61e078"},
    "lightning/pytorch/loops/training_epoch_loop.py": {
        "_TrainingEpochLoop._num_ready_batches_reached": "e7259ec54f",
        "_TrainingEpochLoop._should_accumulate": "8fb5aa2af9",
        "_TrainingEpochLoop.advance": "83a26dbd22",
        "_TrainingEpochLoop.done": "e6d4872a1f",
        "_TrainingEpochLoop.global_step": "39d0913c04",
        "_TrainingEpochLoop.on_advance_end": "8e177b71f4",
        "_TrainingEpochLoop.on_load_checkpoint": "481c8df2ac",
        "_TrainingEpochLoop.on_run_start": "a79dee66e7",
        "_TrainingEpochLoop.on_save_checkpoint": "b9b8c33672",
        "_TrainingEpochLoop.reset": "cbf6dc9a47",
        "_TrainingEpochLoop.run": "967035e1b4",
        "_TrainingEpochLoop.update_restart_stage": "5afecf9808",
    },
    "lightning/pytorch/trainer/connectors/logger_connector/logger_connector.py": {
        "_LoggerConnector.callback_metrics": "ea3a0c7b7e"
    },
    "lightning/pytorch/trainer/connectors/logger_connector/result.py": {
        "_ResultCollection.update_metrics": "020e5792d0",
        "_ResultMetric": "9f2fd79018",
    },
    "lightning/pytorch/utilities/combined_loader.py": {
        "CombinedLoader": "b9b3573848",
        "_MaxSizeCycle": "9be352ca53",
        "_ModeIterator": "d300cda99a",
        "_SUPPORTED_MODES": "181f924253",
    },
}
