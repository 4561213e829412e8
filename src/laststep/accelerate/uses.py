"""Digests of the code of Accelerate that the adapter relies on.

tests/frameworks/test_uses.py compares them with the installed release and prints a new table.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from laststep.adapters.sources import Uses

USES: Uses = {
    "accelerate/accelerator.py": {
        "Accelerator.clear": "4ae40503a2",
        "Accelerator.end_training": "d3369a2938",
        "Accelerator.free_memory": "a86c4d4cb0",
        "Accelerator.get_state_dict": "86fd13761d",
        "Accelerator.load_state": "11759d79a7",
        "Accelerator.prepare_data_loader": "84f85139ff",
        "Accelerator.register_load_state_pre_hook": "5f81188d1a",
        "Accelerator.register_save_state_pre_hook": "c1a83a33d9",
        "Accelerator.save_state": "45c7bc29f7",
        "Accelerator.skip_first_batches": "b74221e6f5",
    },
    "accelerate/data_loader.py": {
        "BatchSamplerShard": "0fb1572653",
        "DataLoaderAdapter": "e44a46b429",
        "DataLoaderDispatcher.__init__": "ba991861ae",
        "DataLoaderDispatcher.__iter__": "6ca5050843",
        "DataLoaderDispatcher._fetch_batches": "377ab4cb2a",
        "DataLoaderDispatcher.set_epoch": "3e198c4773",
        "DataLoaderShard.__iter__": "d859516a77",
        "DataLoaderShard.adjust_state_dict_for_prefetch": "46a68c6dd9",
        "DataLoaderShard.set_epoch": "b025a4b1d3",
        "DataLoaderStateMixin": "05b089df9b",
        "IterableDatasetShard": "7ddf0dc0e6",
        "SeedableRandomSampler": "50b88c5784",
        "skip_first_batches": "010f1a79cf",
    },
    "accelerate/optimizer.py": {
        "AcceleratedOptimizer.state_dict": "aed44fa409",
        "AcceleratedOptimizer.step": "e03a293ade",
    },
    "accelerate/scheduler.py": {"AcceleratedScheduler.state_dict": "48bea7260f"},
}
