"""Digests of the code of Hugging Face's Trainer that the adapter relies on.

tests/frameworks/test_uses.py compares them with the installed release and prints a new table.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from laststep.adapters.sources import Uses

USES: Uses = {
    "transformers/core_model_loading.py": {"revert_weight_conversion": "a872da1ab9"},
    "transformers/modeling_utils.py": {"PreTrainedModel.save_pretrained": "7f06f20381"},
    "transformers/trainer.py": {
        "Trainer._determine_best_metric": "93c2cb5c30",
        "Trainer._finalize_training": "11cada684f",
        "Trainer._get_output_dir": "de378adf8d",
        "Trainer._init_training_state": "528c20c66d",
        "Trainer._inner_training_loop": "eb17bc299a",
        "Trainer._load_best_model": "866348bd5b",
        "Trainer._load_callback_state": "024507f80f",
        "Trainer._load_from_checkpoint": "6caf86dbdd",
        "Trainer._load_rng_state": "fd54b2127a",
        "Trainer._maybe_log_save_evaluate": "b6eb1b510e",
        "Trainer._prepare_for_training": "ce815af012",
        "Trainer._run_epoch": "143f6570a4",
        "Trainer._save": "a2f0ae1571",
        "Trainer._save_checkpoint": "46b3ed9da9",
        "Trainer.store_flos": "a97e592354",
        "Trainer.train": "f1ba5f0714",
    },
    "transformers/trainer_callback.py": {
        "ExportableState": "ba08f2ee69",
        "TrainerState": "20e363d73d",
    },
    "transformers/trainer_utils.py": {
        "get_last_checkpoint": "5ecadb2f0f",
        "rotate_checkpoints": "8a66e06d75",
    },
}
