"""Digests of the code of DeepSpeed that the adapter relies on.

tests/frameworks/test_uses.py compares them with the installed release and prints a new table.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from laststep.adapters.sources import Uses

USES: Uses = {
    "deepspeed/moe/experts.py": {"Experts": "a81d394944"},
    "deepspeed/moe/layer.py": {"MoE.__init__": "c0a6a344ac"},
    "deepspeed/runtime/bf16_optimizer.py": {
        "BF16_Optimizer._setup_for_real_optimizer": "f4f1d13495",
        "BF16_Optimizer._split_flat_tensor": "4341a89500",
        "BF16_Optimizer.update_lp_params": "60930e3029",
    },
    "deepspeed/runtime/engine.py": {
        "DeepSpeedEngine._common_checkpoint_state": "b06f96755c",
        "DeepSpeedEngine.destroy": "25f5e3923c",
        "DeepSpeedEngine.load_checkpoint": "47d8d23a10",
        "DeepSpeedEngine.save_checkpoint": "b1c55905a8",
    },
    "deepspeed/runtime/fp16/fused_optimizer.py": {
        "FP16_Optimizer.load_state_dict": "74c11abf0d",
        "FP16_Optimizer.refresh_fp32_params": "3e4ac26260",
        "FP16_Optimizer.state_dict": "3b5384ba75",
    },
    "deepspeed/runtime/fp16/loss_scaler.py": {
        "DynamicLossScaler": "24769c45ac",
        "LossScaleConfig": "5475f9d98b",
    },
    "deepspeed/runtime/fp16/unfused_optimizer.py": {
        "FP16_UnfusedOptimizer.load_state_dict": "7ef7a42af3",
        "FP16_UnfusedOptimizer.refresh_fp32_params": "01bd9c5155",
        "FP16_UnfusedOptimizer.state_dict": "b8b4af0b14",
    },
    "deepspeed/runtime/pipe/module.py": {
        "PipelineModule._build": "b2f290f18d",
        "PipelineModule.forward": "a6e8ee11a6",
    },
    "deepspeed/runtime/zero/partition_parameters.py": {"Init._partition_param": "b89bd0a728"},
    "deepspeed/runtime/zero/stage3.py": {
        "DeepSpeedZeroOptimizer_Stage3._create_fp16_partitions_with_defragmentation": "8fffa61273",
        "DeepSpeedZeroOptimizer_Stage3._create_fp16_sub_groups": "052beaf2d8",
        "DeepSpeedZeroOptimizer_Stage3._create_fp32_partitions": "d83e8c781f",
        "DeepSpeedZeroOptimizer_Stage3._post_step": "56cf79a01a",
        "DeepSpeedZeroOptimizer_Stage3._reassign_or_swap_out_partitioned_parameters": "d571902bfe",
        "DeepSpeedZeroOptimizer_Stage3._set_fp16_partitioned_groups_flat": "9e7076748f",
        "DeepSpeedZeroOptimizer_Stage3._unflatten_partitioned_parameters": "a7f8b5995d",
        "DeepSpeedZeroOptimizer_Stage3.get_param_id": "358c7b9f09",
        "DeepSpeedZeroOptimizer_Stage3.invalidate_secondary_tensor": "18fd33a615",
        "DeepSpeedZeroOptimizer_Stage3.set_grad_positions": "84033861d8",
    },
    "deepspeed/runtime/zero/stage_1_and_2.py": {
        "DeepSpeedZeroOptimizer._round_robin_reorder": "d4b96a2696",
        "DeepSpeedZeroOptimizer._update_model_bit16_weights": "b3d46fd464",
        "DeepSpeedZeroOptimizer.flatten_dense_tensors_aligned": "ca897ed634",
        "DeepSpeedZeroOptimizer.get_data_parallel_partitions": "9c621ea27e",
        "DeepSpeedZeroOptimizer.update_lp_params": "668a1834ba",
    },
}
