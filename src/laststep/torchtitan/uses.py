"""Digests of the code of torchtitan that the adapter relies on.

tests/frameworks/test_uses.py compares them with the installed release and prints a new table.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from laststep.adapters.sources import Uses

USES: Uses = {
    "torchtitan/components/checkpointer/base.py": {
        "BaseCheckpointManager": "c9f35b6549",
        "ModelWrapper": "ac880487a7",
    },
    "torchtitan/components/checkpointer/dcp.py": {
        "CheckpointManager.Config": "626a75a0e5",
        "CheckpointManager.__init__": "e77447285b",
        "CheckpointManager._close": "28d3b4ceb9",
        "CheckpointManager._find_load_step": "b4972d50a0",
        "CheckpointManager._load": "a0ba37a6fb",
        "CheckpointManager._maybe_wait_for_staging": "19cc4841c8",
        "CheckpointManager._save": "b5202e4e20",
        "CheckpointManager._save_last_step": "f48daea766",
        "CheckpointManager._should_save": "6cbcd9917c",
        "CheckpointManager._wait_for_saving": "66168dfe4e",
    },
    "torchtitan/components/checkpointer/utils.py": {"canonical_fqn": "10d4994d64"},
    "torchtitan/components/dataloader.py": {
        "ParallelAwareDataloader.load_state_dict": "e3d72dff97",
        "ParallelAwareDataloader.state_dict": "a523f70c02",
    },
}
