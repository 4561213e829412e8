"""Train with Hugging Face's Trainer, be killed at any moment, go on: run it, kill it, run it again.

python examples/hugging_face.py runs/hugging_face
"""

from __future__ import annotations

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

import laststep


def main() -> None:
    out = sys.argv[1] if len(sys.argv) > 1 else "runs/hugging_face"
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    ids = torch.randint(64, (64, 16), generator=torch.Generator().manual_seed(0)).tolist()
    args = TrainingArguments(
        output_dir=out,
        max_steps=40,
        save_steps=10,
        save_total_limit=2,
        logging_steps=10,
        per_device_train_batch_size=8,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Trainer(
        model=LlamaForCausalLM(config),
        args=args,
        train_dataset=[{"input_ids": row, "labels": row} for row in ids],
    )

    laststep.hf.attach(trainer, options=laststep.Options(progress=False))  # the line that is new
    trainer.train(resume_from_checkpoint=True)  # begins a new run where there is none

    model = LlamaForCausalLM.from_pretrained(get_last_checkpoint(out))
    print(f"{trainer.state.global_step} steps, {model.num_parameters()} parameters in {out}")


if __name__ == "__main__":
    main()
