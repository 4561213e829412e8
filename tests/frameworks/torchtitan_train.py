"""Train a small llama of torchtitan's: RUN LOSSES [name=value ...]; each value is Python's.

`steps`, `tp` and `pp` say how; `state` names a file for digests of what was restored; all else are
settings of `laststep.torchtitan.Manager`.
"""

from __future__ import annotations

import ast
import hashlib
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torchtitan_cpu  # noqa: F401 (before torchtitan)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor
from torch.utils.data import IterableDataset
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.config.configs import DebugConfig
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry
from torchtitan.tools.logging import init_logger
from torchtitan.trainer import Trainer

import laststep

WORDS = 2048


class Words(IterableDataset, Stateful):
    """Half of each line follows from its number, the other half from torch's generator."""

    def __init__(self, seq_len, dp_rank):
        self.seq_len, self.dp_rank, self.line = seq_len, dp_rank, 0

    def __iter__(self):
        while True:
            words = (torch.arange(self.seq_len + 1) * 17 + self.line * 31 + self.dp_rank) % WORDS
            words[::2] = torch.randint(WORDS, words[::2].shape)
            self.line += 1
            yield {"input": words[:-1]}, words[1:]

    def state_dict(self):
        return {"line": self.line}

    def load_state_dict(self, state):
        self.line = state["line"]


class Loader(ParallelAwareDataloader):
    @dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config):
        pass

    def __init__(self, config, *, dp_world_size, dp_rank, seq_len, local_batch_size, **_):
        data = Words(seq_len, dp_rank)
        super().__init__(data, dp_rank, dp_world_size, batch_size=local_batch_size)


class NoTokenizer(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config, *, tokenizer_path):
        super().__init__()

    def encode(self, *_, **__):
        raise NotImplementedError

    decode = get_vocab_size = encode


def small_llama(layers):
    spec = model_registry("debugmodel")
    spec.model.layers = spec.model.layers[:layers]
    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return spec


def configured(folder, checkpoint, *, steps=12, tp=1, pp=1, layers=4):
    return Trainer.Config(
        model_spec=small_llama(layers),
        loss=CrossEntropyLoss.Config(global_vocab_size=WORDS),
        tokenizer=NoTokenizer.Config(),
        dataloader=Loader.Config(),
        optimizer=default_adamw(lr=8e-4, fused=False),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2, total_steps=100),
        training=TrainingConfig(
            local_batch_size=2,
            seq_len=32,
            steps=steps,
            mixed_precision_param="float32",
            disable_cuda_graphs=True,
        ),
        parallelism=ParallelismConfig(
            tensor_parallel_degree=tp,
            pipeline_parallel_degree=pp,
            pipeline_parallel_schedule="Interleaved1F1B",
            spmd_backend="partial_dtensor",
        ),
        metrics=MetricsProcessor.Config(log_freq=1),
        checkpoint=checkpoint,
        debug=DebugConfig(seed=1, enable_structured_logging=False),
        dump_folder=str(folder),
    )


def note_losses(trainer, losses):
    """Write each loss down, on one rank that has it: with pipelines that is the last."""
    log, ranks = trainer.metrics_processor.log, torch.distributed.get_world_size()
    who = ranks - 1 if trainer.parallel_dims.pp_enabled else 0

    def note(step, loss, *args, **kwargs):
        if torch.distributed.get_rank() == who:
            with Path(losses).open("a") as file:
                file.write(f"{step} {float(loss).hex()}\n")
        log(step, loss, *args, **kwargs)

    trainer.metrics_processor.log = note


def digests(trainer):
    """Of all that this rank has a part of, whole."""
    state = trainer.optimizers.state_dict()
    for part in trainer.model_parts:
        state |= {f"model.{name}": tensor for name, tensor in part.state_dict().items()}
    state |= {f"trainer.{name}": value for name, value in trainer.state_dict().items()}
    state["lr_scheduler"] = trainer.lr_schedulers.state_dict()["last_epoch"]
    state[f"loader.{trainer.dataloader.dp_rank}"] = trainer.dataloader.dataset.line
    return {name: _digest(entry) for name, entry in state.items()}


def _digest(entry):
    if isinstance(entry, DTensor):
        entry = entry.full_tensor()
    if isinstance(entry, torch.Tensor):
        return hashlib.md5(entry.detach().numpy().tobytes(), usedforsecurity=False).hexdigest()
    return repr(entry)


def note_state(trainer, file):
    lines = [f"{name} {digest}\n" for name, digest in digests(trainer).items()]
    Path(f"{file}-{torch.distributed.get_rank()}").write_text("".join(lines))


def train(config, losses=None, state=None):
    """`state` names files for what was restored, and with `-end` for what there is at the end."""
    trainer = config.build()
    if losses is not None:
        note_losses(trainer, losses)
    if state is not None:
        load = trainer.checkpointer.load
        trainer.checkpointer.load = lambda step=-1: (load(step), note_state(trainer, state))
    try:
        trainer.train()
        if state is not None:
            note_state(trainer, f"{state}-end")
    finally:
        trainer.close()
    return trainer


def main(run, losses, *settings):
    given = dict(setting.split("=") for setting in settings)
    given = {name: ast.literal_eval(value) for name, value in given.items()}
    how = {name: given.pop(name) for name in ("tp", "pp", "steps") if name in given}
    state = given.pop("state", None)
    given = {"interval": 2, "last_save_model_only": False, **given}
    checkpoint = laststep.torchtitan.Manager.Config(folder=Path(run).name, **given)
    train(configured(Path(run).parent, checkpoint, **how), losses, state)
    torch.distributed.destroy_process_group()


def alone():
    """What a launcher would say to a job of one rank."""
    one = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_PORT": 0}
    for name, value in {**one, "MASTER_ADDR": "localhost"}.items():
        os.environ.setdefault(name, str(value))


if __name__ == "__main__":
    init_logger()
    alone()
    main(*sys.argv[1:])
