"""What settings of `laststep.torchtitan.Manager` come to: FOLDER, in which `facts.json` is left.

All in one process of one rank: to start one with torchtitan takes many seconds.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from torchtitan_train import alone, configured, digests, train  # before torchtitan

from torchtitan.components.checkpointer import CheckpointManager  # isort: skip

import laststep

Manager = laststep.torchtitan.Manager

FOLDER = Path(sys.argv[1])
RUN = FOLDER / "a"
FACTS = []


def fact(function):
    """What it returns, or the error that it ends with, is a fact by its name."""
    FACTS.append(function)
    return function


def of(function):
    try:
        return function()
    except laststep.LaststepError as error:
        return f"{type(error).__name__}: {error}"


def steps_in(run):
    return [checkpoint.step for checkpoint in laststep.open(run)]


def built(name, *, manager=Manager, layers=2, **settings):
    settings = {"interval": 2, "enable": True, **settings}
    return configured(FOLDER, manager.Config(folder=name, **settings), steps=5, layers=layers)


def loaded(config):
    """A trainer that has loaded and not trained."""
    trainer = config.build()
    trainer.checkpointer.load(config.checkpoint.load_step)
    trainer.close()
    return trainer


def whole(trainer):
    """The weights, as torchtitan names them, as plain tensors."""
    state = trainer.model_parts[0].state_dict()
    return {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in state.items()}


def weights_of(trainer):
    return {k: v for k, v in digests(trainer).items() if k.startswith("model.")}


def train_first():
    train(built("a", keep_latest_k=2, export_dtype="bfloat16"))


@fact
def kept():
    return steps_in(RUN)


@fact
def final():
    train_first()
    return [steps_in(RUN), [path.name for path in (RUN / "final").iterdir()]]


@fact
def older_step():
    return loaded(built("a", load_step=2)).step


@fact
def missing_step():
    return loaded(built("a", load_step=3)).step


@fact
def omitted_items():
    trainer = loaded(built("a", exclude_from_loading=["train_state", "lr_scheduler"]))
    return [trainer.step, trainer.lr_schedulers.state_dict(), trainer.dataloader.dataset.line]


@fact
def left_out_by_a_wrong_name():
    return loaded(built("a", exclude_from_loading=["schedule"])).step


@fact
def another_model():
    return loaded(built("a", layers=3)).step


@fact
def another_framework():
    with laststep.Checkpointer(FOLDER / "own", model=torch.nn.Linear(2, 2)) as ckpt:
        ckpt.save(4)
    return loaded(built("own")).step


@fact
def damaged():
    shutil.copytree(RUN, FOLDER / "damaged")
    newest = next(iter(sorted((FOLDER / "damaged").glob("step-00000004.*"))))
    file = max(newest.glob("*.safetensors"), key=lambda file: file.stat().st_size)
    data = bytearray(file.read_bytes())
    data[-4096] ^= 1
    file.write_bytes(data)
    return loaded(built("damaged")).step


@fact
def begun_with_the_final_model():
    trained = train(built("whole", export_dtype="bfloat16"))
    own = whole(loaded(built("b", initial_load_path=str(FOLDER / "whole/final/step-5"))))
    return all(
        torch.equal(own[name], entry.bfloat16().float()) for name, entry in whole(trained).items()
    )


@fact
def hugging_face():
    trainer = train(built("hf", last_save_in_hf=True))
    (file,) = (FOLDER / "hf" / "final" / "step-5").glob("*.safetensors")
    stored = load_file(file)["model.layers.0.mlp.gate_proj.weight"]
    own = whole(trainer)["layers.0.feed_forward.w1.weight"]
    return [torch.equal(stored, own), steps_in(FOLDER / "hf")]


@fact
def moved_from_dcp():
    train(built("dcp", manager=CheckpointManager, last_save_model_only=False))
    trainer = loaded(built("dcp"))
    began, same = trainer.step, digests(trainer)
    train(configured(FOLDER, built("dcp").checkpoint, steps=8, layers=2))
    own = loaded(built("dcp", manager=CheckpointManager, enable=True))
    return [began, same == digests(own), steps_in(FOLDER / "dcp"), loaded(built("dcp")).step]


@fact
def moved_back_to_dcp():
    train(built("back"))
    train(
        configured(FOLDER, built("back", manager=CheckpointManager).checkpoint, steps=8, layers=2)
    )
    return loaded(built("back")).step


@fact
def modes():
    modes = ("disabled", "async", "async_with_pinned_mem")
    for mode in modes:
        train(
            configured(
                FOLDER, Manager.Config(folder=mode, interval=1, async_mode=mode), steps=2, layers=1
            )
        )
    return [steps_in(FOLDER / mode) for mode in modes]


@fact
def first_step():
    train(built("first", interval=4, enable_first_step_checkpoint=True))
    return steps_in(FOLDER / "first")


@fact
def only_loads():
    before = steps_in(RUN)
    trainer = train(
        configured(FOLDER, Manager.Config(folder="a", load_only=True), steps=6, layers=2)
    )
    return [trainer.step, before == steps_in(RUN)]


@fact
def seed():
    trainer = built("seed", create_seed_checkpoint=True).build()
    trainer.checkpointer.save(curr_step=0, last_step=True)
    trainer.close()
    seeded = loaded(built("seed"))
    return [steps_in(FOLDER / "seed"), seeded.step, weights_of(trainer) == weights_of(seeded)]


@fact
def own_schedule():
    train(built("own_schedule", settings={"every": 3, "compression": "adaptive"}))
    return steps_in(FOLDER / "own_schedule")


@fact
def switched_off():
    train(built("off", enable=False))
    return (FOLDER / "off").exists()


if __name__ == "__main__":
    alone()
    train_first()
    facts = {function.__name__: of(function) for function in FACTS}
    (FOLDER / "facts.json").write_text(json.dumps(facts))
    torch.distributed.destroy_process_group()
