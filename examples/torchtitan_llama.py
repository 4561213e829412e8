"""Train torchtitan's small llama on numbers: run it, kill it, run it again.

torchrun --nproc-per-node 2 examples/torchtitan_llama.py 1000
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

import torch
from torch.utils.data import IterableDataset
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.optimizer import default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry
from torchtitan.tools.logging import init_logger
from torchtitan.trainer import Trainer

import laststep

WORDS = 2048


class Counting(IterableDataset):
    """Lines of a thousand ways to count; it knows its place."""

    def __init__(self, seq_len: int, dp_rank: int) -> None:
        self.seq_len, self.line = seq_len, dp_rank

    def __iter__(self):
        while True:
            words = torch.arange(self.seq_len + 1) * (self.line % 1000) % WORDS
            self.line += 8
            yield {"input": words[:-1]}, words[1:]

    def state_dict(self) -> dict[str, int]:
        return {"line": self.line}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.line = state["line"]


class Loader(ParallelAwareDataloader):
    @dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config):
        pass

    def __init__(self, config, *, dp_world_size, dp_rank, seq_len, local_batch_size, **_) -> None:
        data = Counting(seq_len, dp_rank)
        super().__init__(data, dp_rank, dp_world_size, batch_size=local_batch_size)


class NoTokenizer(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config, *, tokenizer_path) -> None:
        super().__init__()

    def encode(self, *_args, **_more):
        raise NotImplementedError

    decode = get_vocab_size = encode


def config(steps: int) -> Trainer.Config:
    spec = model_registry("debugmodel")
    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return Trainer.Config(
        model_spec=spec,
        loss=CrossEntropyLoss.Config(global_vocab_size=WORDS),
        tokenizer=NoTokenizer.Config(),
        dataloader=Loader.Config(),
        optimizer=default_adamw(lr=8e-4),
        training=TrainingConfig(
            local_batch_size=4, seq_len=64, steps=steps, disable_cuda_graphs=True
        ),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
        checkpoint=laststep.torchtitan.Manager.Config(  # the line that is changed
            folder="checkpoint", interval=2, last_save_model_only=False
        ),
        dump_folder="runs/torchtitan",
    )


def main() -> None:
    for name, value in (
        ("RANK", "0"),
        ("WORLD_SIZE", "1"),
        ("LOCAL_RANK", "0"),
        ("MASTER_ADDR", "localhost"),
        ("MASTER_PORT", "0"),
    ):
        os.environ.setdefault(name, value)  # without torchrun
    init_logger()
    trainer = config(int(sys.argv[1]) if len(sys.argv) > 1 else 10).build()
    try:
        trainer.train()
        print(f"trained up to step {trainer.step}")
    finally:
        trainer.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
