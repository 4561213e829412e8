"""Train a tiny Llama with Hugging Face's Trainer: hf_train.py RUN LOSSES OPTIONS, these as JSON.

OPTIONS: `args` for TrainingArguments, `settings` for the Checkpointer, `kind` of trainer (attached,
sft, stock), `stop` at a step with an exception, `waits` for the first save, `fsdp2`,
`lora` with `modules`, `layers`, `eval`.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import laststep
from laststep.settings import as_keywords

VOCABULARY = 32
SPECIAL = ("pad", "bos", "eos", "unk")


class Losses(TrainerCallback):
    """Appends each loss that is logged. At step 5 it waits for the first save, so that there is one
    when the second is interrupted; stops where it is told to."""

    def __init__(self, file: Path, first: Path | None, stop: int | None) -> None:
        self._file, self._first, self._stop = file, first, stop

    def on_log(self, args, state, control, logs=None, **_):
        if state.is_world_process_zero and "loss" in (logs or {}):
            with self._file.open("a") as file:
                file.write(f"{state.global_step} {float(logs['loss']).hex()}\n")

    def on_step_end(self, args, state, control, **_):
        while state.global_step == 5 and self._first is not None and not self._first.exists():
            time.sleep(0.01)
        if state.global_step == self._stop:
            raise RuntimeError("stopped")


def tiny(layers: int = 2, **more: object) -> LlamaForCausalLM:
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        attention_dropout=0.1,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        **more,
    )
    return LlamaForCausalLM(config)


def tokenizer() -> PreTrainedTokenizerFast:
    words = {f"w{number}": number for number in range(VOCABULARY)}
    inner = Tokenizer(models.WordLevel(words, unk_token="w3"))  # noqa: S106 (a word, no secret)
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, **{f"{name}_token": f"w{i}" for i, name in enumerate(SPECIAL)}
    )


def rows(count: int = 40) -> list[dict[str, list[int]]]:
    made = torch.Generator().manual_seed(3)
    drawn = torch.randint(3, VOCABULARY, (count, 8), generator=made).tolist()
    return [{"input_ids": ids, "labels": ids} for ids in drawn]


def trainer(out: Path, losses: Path, options: dict) -> Trainer:
    model = options.get("model") or tiny(options.get("layers", 2))
    kind = options.get("kind", "attached")
    settings = as_keywords({"progress": False, **options.get("settings", {})})
    common = {
        "output_dir": str(out),
        "per_device_train_batch_size": 4,
        "max_steps": 12,
        "save_steps": 3,
        "logging_steps": 1,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "learning_rate": 0.01,
        **options.get("args", {}),
    }
    first = out / "checkpoint-3" if options.get("waits") else None
    more = {
        "callbacks": [Losses(losses, first, options.get("stop"))],
        "processing_class": tokenizer(),
    }
    if options.get("lora"):
        from peft import LoraConfig, get_peft_model

        lora = LoraConfig(
            r=2,
            lora_dropout=0.1,
            target_modules=["q_proj", "v_proj"],
            task_type="CAUSAL_LM",
            modules_to_save=options.get("modules"),
        )
        if kind == "sft":
            more["peft_config"] = lora
        else:
            model = get_peft_model(model, lora)
    if options.get("eval"):
        more["eval_dataset"] = rows(8)
    if kind == "sft":
        from datasets import Dataset
        from trl import SFTConfig, SFTTrainer

        data = Dataset.from_list([{"input_ids": row["input_ids"]} for row in rows()])
        sft = SFTConfig(**{"max_length": 16, **common})
        made = SFTTrainer(model=model, args=sft, train_dataset=data, **more)
        return laststep.hf.attach(made, **settings)
    more["train_dataset"] = rows()
    plain = Trainer(model=model, args=TrainingArguments(**common), **more)
    return plain if kind == "stock" else laststep.hf.attach(plain, **settings)


def shard(made: Trainer) -> None:
    """As `fsdp="full_shard"` does on GPUs: accelerate does not turn it on for ranks of a CPU."""
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    state = made.accelerator.state
    state.distributed_type = DistributedType.FSDP
    state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        reshard_after_forward=True,
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
    )
    made.is_fsdp_enabled = True


def main() -> None:
    logging.basicConfig(level=logging.INFO)
    run, losses, options = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
    options.setdefault("settings", {})["run"] = str(run)
    made = trainer(run.parent / "out", losses, options)
    if options.get("fsdp2"):
        shard(made)
    made.train(resume_from_checkpoint=True)


if __name__ == "__main__":
    main()
