"""Digests of the code of Megatron-Core that the adapter overrides, calls although it is private, or
imitates. tests/frameworks/test_uses.py prints a new table."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from laststep.adapters.sources import Uses

USES: Uses = {
    "megatron/core/dist_checkpointing/serialization.py": {
        "load": "b1c6388536",
        "load_common_state_dict": "a6ebad51fa",
        "load_sharded_metadata": "04adc5b352",
        "load_tensors_metadata": "478ffbb3e4",
        "save": "1f8d96c906",
    },
    "megatron/core/dist_checkpointing/strategies/common.py": {
        "COMMON_STATE_FNAME": "690f16b7cd",
        "load_common": "e0aaa5f534",
    },
    "megatron/core/dist_checkpointing/strategies/torch.py": {
        "MCoreLoadPlanner": "892940bbb5",
        "MCoreSavePlanner": "23742c6de0",
        "TorchDistLoadShardedStrategy.__init__": "a8b3c52e6d",
        "TorchDistLoadShardedStrategy.load": "701bcc7053",
        "TorchDistLoadShardedStrategy.load_sharded_metadata": "b73f7b7f49",
        "TorchDistLoadShardedStrategy.load_tensors_metadata": "f4f83204e8",
        "TorchDistSaveShardedStrategy.__init__": "4f5bae1413",
        "TorchDistSaveShardedStrategy.save": "b775f7bbcc",
        "_replace_sharded_keys_with_state_dict_keys": "ea64147800",
        "_replace_state_dict_keys_with_sharded_keys": "d8383520f9",
        "_restore_dict_types": "61b9fc40c9",
        "_unwrap_pyt_sharded_tensor": "85d1fd234f",
        "mcore_to_pyt_state_dict": "d6afa180f5",
    },
    "megatron/core/distributed/param_and_grad_buffer.py": {
        "_ParamAndGradBuffer.__init__": "693c08d200"
    },
    "megatron/core/optimizer/distrib_optimizer.py": {
        "DistributedOptimizer._build_model_and_main_param_groups": "73bc85609f",
        "DistributedOptimizer._build_model_gbuf_range": "6548c5e7b8",
        "DistributedOptimizer._copy_main_params_to_model_params": "46990d9ce5",
    },
    "megatron/core/parallel_state.py": {"initialize_model_parallel": "67f8675d62"},
    "megatron/core/tensor_parallel/layers.py": {
        "_initialize_affine_weight_cpu": "c3910a2df1",
        "set_tensor_model_parallel_attributes": "95d4138949",
    },
}
