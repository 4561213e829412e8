"""Hugging Face's Trainer, trl and peft: killed and resumed, alone and as several ranks."""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from expect import raises, warned

pytest.importorskip("transformers", reason="needs transformers, accelerate, trl and peft")

import numpy as np
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch.utils.data import IterableDataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    MarianConfig,
    MarianMTModel,
    MixtralConfig,
    MixtralForCausalLM,
    Trainer,
    TrainerCallback,
    default_data_collator,
)
from transformers.trainer_utils import get_last_checkpoint

import laststep
from frameworks import hf_train
from frameworks.trained import Script, environment, read
from laststep import cli
from laststep.adapters.export.trainer import export_trainer
from laststep.hf.folders import Folders
from laststep.hf.training import TrainCall

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedModel

# trl uses names that are deprecated since transformers 5.23.
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")

STEPS = 12
EXAMPLE = Path(__file__).parents[2] / "examples" / "hugging_face.py"


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """So that sums are the same here and in the scripts."""
    torch.set_num_threads(1)


def here(out: Path, **options: object) -> Trainer:
    """A trainer in this process, whose run lies where it does by default."""
    return hf_train.trainer(out, out.parent / "losses", options)


def folders(out: Path) -> list[str]:
    return sorted(path.name for path in out.glob("checkpoint-*"))


def script(folder: Path, ranks: int = 1, **options: object) -> Script:
    return Script("hf_train.py", folder, json.dumps(options), ranks=ranks)


def check_resumed_exactly(folder: Path, ranks: int = 1, **options: object) -> None:
    """Killed in a save and resumed, the losses are those of a run without interruption."""
    if ranks == 1:
        (folder / "whole").mkdir()
        here(folder / "whole" / "out", **options).train()
        whole = read(folder / "whole" / "losses")
    else:
        whole = script(folder / "whole", ranks, **options).to_its_end()
    assert max(whole) == STEPS
    broken = script(folder / "broken", ranks, waits=True, **options)
    before = broken.killed_in_save(6)
    after = broken.to_its_end()
    assert min(after) > 2
    assert sorted({*before, *after}) == sorted(whole)
    for part in (before, after):
        assert part == {step: whole[step] for step in part}


@pytest.mark.parametrize(
    "options",
    [
        {"kind": "attached", "args": {"gradient_accumulation_steps": 2}},
        {"kind": "sft", "lora": True},
    ],
    ids=["attached", "sft-lora"],
)
def test_a_trainer_that_was_killed_in_a_save_goes_on_bit_for_bit(
    tmp_path: Path, options: dict[str, object]
) -> None:
    check_resumed_exactly(tmp_path, **options)


class Stream(IterableDataset):
    """Data without a length, of ten batches."""

    def __iter__(self):
        return iter(hf_train.rows())


def masked(rows: list) -> dict[str, torch.Tensor]:
    """A collator that draws random numbers."""
    batch = default_data_collator(rows)
    batch["input_ids"][torch.rand(batch["input_ids"].shape) < 0.3] = 3
    return batch


@pytest.mark.parametrize(
    ("args", "given"),
    [
        ({"train_sampling_strategy": "group_by_length"}, {}),
        ({"accelerator_config": {"use_seedable_sampler": False}}, {}),
        ({"dataloader_num_workers": 1, "dataloader_persistent_workers": True}, {}),
        ({}, {"data_collator": masked}),
        ({"gradient_accumulation_steps": 3}, {"data_collator": masked}),
        ({}, {"train_dataset": Stream()}),
        ({"save_steps": 5}, {"train_dataset": Stream()}),
    ],
    ids=["by-length", "unseeded", "workers", "random", "random-accumulation", "stream", "pass"],
)
def test_the_data_goes_on_where_it_was_whatever_its_order_is_drawn_from(
    tmp_path: Path, args: dict[str, object], given: dict[str, object]
) -> None:
    def start(name: str, stop: int | None = None) -> dict[int, str]:
        losses = tmp_path / name / "losses"
        losses.unlink(missing_ok=True)
        losses.parent.mkdir(exist_ok=True)
        trainer = here(losses.parent / "out", args={"max_steps": 24, **args}, stop=stop)
        vars(trainer).update(given)
        with contextlib.nullcontext() if stop is None else pytest.raises(RuntimeError):
            trainer.train(resume_from_checkpoint=True)
        return read(losses)

    whole = start("whole")
    for stop in (7, 12, 18, None):
        part = start("broken", stop)
        assert part == {step: whole[step] for step in part}
    assert min(part) > 15


def test_a_reference_that_follows_the_model_is_saved(tmp_path: Path) -> None:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    data = Dataset.from_list(
        [
            {"prompt": f"w{i} w4", "chosen": f" w{i} w9", "rejected": f" w{30 - i} w7"}
            for i in range(4, 20)
        ]
    )

    def start(name: str, stop: int | None) -> dict[int, str]:
        losses = tmp_path / f"{name}-losses"
        losses.unlink(missing_ok=True)
        args = DPOConfig(
            output_dir=str(tmp_path / name),
            max_steps=8,
            save_steps=2,
            logging_steps=1,
            per_device_train_batch_size=2,
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            learning_rate=0.01,
            sync_ref_model=True,
            ref_model_sync_steps=3,
        )
        trainer = DPOTrainer(
            model=hf_train.tiny(),
            ref_model=hf_train.tiny(),
            args=args,
            train_dataset=data,
            processing_class=hf_train.tokenizer(),
            callbacks=[hf_train.Losses(losses, None, stop)],
        )
        with contextlib.nullcontext() if stop is None else pytest.raises(RuntimeError):
            laststep.hf.attach(trainer, options=laststep.Options(progress=False)).train(
                resume_from_checkpoint=True
            )
        return read(losses)

    whole = start("whole", None)
    start("broken", 5)
    after = start("broken", None)
    assert after == {step: whole[step] for step in range(5, 9)}


def test_a_checkpoint_has_a_folder_with_links_that_from_pretrained_loads(tmp_path: Path) -> None:
    trainer = here(tmp_path / "out")
    trainer.train()
    last = get_last_checkpoint(str(tmp_path / "out"))
    assert last == str(tmp_path / "out" / "checkpoint-12")
    [stored] = (tmp_path / "out" / "_laststep").glob("step-00000012.*/model.safetensors")
    assert stored.samefile(Path(last) / "model.safetensors")
    loaded = AutoModelForCausalLM.from_pretrained(last).state_dict()
    live = trainer.model.state_dict()
    assert loaded.keys() == live.keys()
    assert all(torch.equal(loaded[name], live[name]) for name in live)
    assert AutoTokenizer.from_pretrained(last)("w5 w6")["input_ids"] == [5, 6]


def test_a_stock_trainer_resumes_from_an_exported_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = {"save_steps": 6}
    stock = here(tmp_path / "stock" / "out", kind="stock", args=args)
    stock.train()
    here(tmp_path / "ours" / "out", args=args).train()
    target = tmp_path / "again" / "out" / "checkpoint-6"
    target.parent.mkdir(parents=True)
    words = ["export", tmp_path / "ours" / "out", target, "--format", "hf-trainer", "--step", 6]
    monkeypatch.setattr(sys, "argv", ["laststep", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code
    theirs = tmp_path / "stock" / "out" / "checkpoint-6"
    assert {file.name for file in target.iterdir()} == {file.name for file in theirs.iterdir()}
    assert state_of(target) == state_of(theirs)
    again = here(tmp_path / "again" / "out", kind="stock", args=args)
    again.train(resume_from_checkpoint=str(target))
    whole, rest = (read(tmp_path / name / "losses") for name in ("stock", "again"))
    assert rest == {step: loss for step, loss in whole.items() if step > 6}
    expected = stock.model.state_dict()
    assert all(torch.equal(found, expected[n]) for n, found in again.model.state_dict().items())


def test_an_export_replaces_the_folder_of_the_same_checkpoint_and_no_other(tmp_path: Path) -> None:
    out = tmp_path / "out"
    here(out, args={"save_steps": 3, "max_steps": 6}).train()
    three, six = (out / f"checkpoint-{step}" for step in (3, 6))
    (six / "notes.txt").write_text("mine")
    run = out / "_laststep"
    with laststep.open(run)[6] as checkpoint:
        for other in (three, run):
            with raises(laststep.AlreadyExistsError, where=str(other)):
                export_trainer(checkpoint, other, run=run)
        export_trainer(checkpoint, six, run=run)
        names = {file.name for file in six.iterdir()}
        assert {"notes.txt", "config.json", "optimizer.pt", "model.safetensors"} <= names
        assert "laststep.json" not in names
        with raises(laststep.AlreadyExistsError):  # what laststep did not make stays
            export_trainer(checkpoint, six, run=run)
        assert not checkpoint.verify().damage
    assert (three / "laststep.json").exists()
    assert not list(out.glob(".*"))


def test_only_what_a_trainer_saved_is_exported_as_its_folder(tmp_path: Path) -> None:
    with laststep.Checkpointer(tmp_path / "run", model=torch.nn.Linear(1, 1)) as ckpt:
        ckpt.save(0)
    with (
        laststep.open(tmp_path / "run")[0] as checkpoint,
        raises(laststep.UsageError, remedy="--format torch"),
    ):
        export_trainer(checkpoint, tmp_path / "checkpoint-0", run=None)
    assert not (tmp_path / "checkpoint-0").exists()


LIMITED = {
    "save_total_limit": 2,
    "save_steps": 2,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "load_best_model_at_end": True,
    "learning_rate": 0.3,
}


@pytest.mark.parametrize(
    "args",
    [
        LIMITED,
        {**LIMITED, "save_total_limit": 1, "learning_rate": 0.03},
        {"save_strategy": "epoch", "num_train_epochs": 3, "max_steps": -1, "save_total_limit": 2},
        {
            "save_strategy": "best",
            "eval_strategy": "steps",
            "eval_steps": 2,
            "metric_for_best_model": "loss",
        },
        {"save_strategy": "no"},
        {"save_only_model": True},
        {"gradient_accumulation_steps": 3, "logging_steps": 2},
    ],
    ids=["limit", "only-the-best", "epoch", "best", "no", "only-model", "accumulation"],
)
def test_folders_state_and_weights_are_those_of_the_trainer_s_own_saving(
    tmp_path: Path, args: dict[str, object]
) -> None:
    made = {}
    for kind in ("stock", "attached"):
        out = tmp_path / kind
        trainer = made[kind] = here(out, kind=kind, args=args, eval="eval_strategy" in args)
        trainer.train()
    assert folders(tmp_path / "attached") == folders(tmp_path / "stock")
    for name in folders(tmp_path / "stock"):
        theirs, ours = (tmp_path / kind / name for kind in ("stock", "attached"))
        omitted_items = {"optimizer.pt", "scheduler.pt", "rng_state.pth"}
        assert {file.name for file in ours.iterdir()} - {"laststep.json"} == {
            file.name for file in theirs.iterdir()
        } - omitted_items
        assert state_of(ours) == state_of(theirs)
        loaded, expected = (load_file(path / "model.safetensors") for path in (ours, theirs))
        assert loaded.keys() == expected.keys()
        assert all(torch.equal(loaded[name], expected[name]) for name in expected)
    stock, ours = (made[kind].model.state_dict() for kind in ("stock", "attached"))
    assert all(torch.equal(stock[name], ours[name]) for name in stock)


def state_of(folder: Path) -> dict[str, object]:
    """A trainer_state.json without what takes time, and without where it lies."""
    state = json.loads((folder / "trainer_state.json").read_text())
    for entry in state["log_history"]:
        for timed in [name for name in entry if "runtime" in name or "per_second" in name]:
            del entry[timed]
    best = state["best_model_checkpoint"]
    return {**state, "best_model_checkpoint": best and Path(best).name}


def test_peft_gets_its_adapter_and_nothing_else_is_stored(tmp_path: Path) -> None:
    trainer = here(tmp_path / "out", kind="sft", lora=True, modules=["norm"])
    trainer.train()
    folder = tmp_path / "out" / "checkpoint-12"
    with laststep.open(tmp_path / "out" / "_laststep").latest() as checkpoint:
        stored = [name for name in checkpoint.tensors() if name.startswith("model/")]
    assert stored
    assert all("lora_" in name or "modules_to_save" in name for name in stored)
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= {
        file.name for file in folder.iterdir()
    }
    assert not (folder / "model.safetensors").exists()
    base = hf_train.tiny()
    loaded = PeftModel.from_pretrained(base, folder).state_dict()
    live = trainer.model.state_dict()
    assert all(torch.equal(loaded[name], live[name]) for name in live)


def mixtral() -> MixtralForCausalLM:
    """Its files have other names than its tensors."""
    config = MixtralConfig(
        vocab_size=hf_train.VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=2,
        pad_token_id=0,
    )
    return MixtralForCausalLM(config)


def marian() -> MarianMTModel:
    """Some of its tensors are not in its files."""
    config = MarianConfig(
        vocab_size=hf_train.VOCABULARY,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        pad_token_id=0,
        decoder_start_token_id=0,
    )
    return MarianMTModel(config)


@pytest.mark.parametrize("make", [mixtral, marian])
def test_a_model_whose_files_have_other_names_gets_these(
    tmp_path: Path, make: Callable[[], PreTrainedModel]
) -> None:
    trainer = here(tmp_path / "out", model=make(), args={"max_steps": 2})
    trainer.train()
    trainer.model.save_pretrained(tmp_path / "theirs")
    ours, theirs = (
        load_file(path / "model.safetensors")
        for path in (tmp_path / "out" / "checkpoint-2", tmp_path / "theirs")
    )
    assert theirs.keys() != trainer.model.state_dict().keys()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("settings", [{"compression": "max"}, {"lossy": {"model/*": "bf16"}}, {}])
def test_what_is_no_link_is_written_out(
    tmp_path: Path, settings: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not settings:  # as on a disk without links

        def refuse(*_: object) -> None:
            raise OSError("no links here")

        monkeypatch.setattr("laststep.hf.folders.os.link", refuse)
    trainer = here(tmp_path / "out", args={"max_steps": 3}, settings=settings)
    trainer.train()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "checkpoint-3").state_dict()
    for name, live in trainer.model.state_dict().items():
        rounded = live.bfloat16().float() if "lossy" in settings else live
        assert torch.equal(loaded[name], rounded)


def test_a_folder_that_is_named_is_gone_on_from_exactly(tmp_path: Path) -> None:
    out = tmp_path / "out"
    here(out).train()
    whole = read(tmp_path / "losses")
    (tmp_path / "losses").unlink()
    here(out).train(resume_from_checkpoint=str(out / "checkpoint-6"))
    assert read(tmp_path / "losses") == {step: whole[step] for step in range(7, STEPS + 1)}
    assert laststep.open(out / "_laststep").steps() == [3, 6, 9, 12]
    assert folders(out) == sorted(f"checkpoint-{step}" for step in (3, 6, 9, 12))


def test_a_folder_is_there_until_another_takes_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    here(out, args={"max_steps": 6}).train()
    (out / ".checkpoint-6.tmp-1-1").mkdir()  # as a kill leaves it
    found = []
    fill = Folders._fill

    def look(self: Folders, folder: Path, checkpoint: object) -> None:
        found.append(folders(out))
        fill(self, folder, checkpoint)

    monkeypatch.setattr(Folders, "_fill", look)
    here(out, args={"max_steps": 6}).train(resume_from_checkpoint=str(out / "checkpoint-3"))
    assert found == [["checkpoint-3", "checkpoint-6"]]
    assert not list(out.glob(".*"))


def test_a_training_that_has_reached_its_end_does_no_step_more(tmp_path: Path) -> None:
    here(tmp_path / "out").train()
    (tmp_path / "losses").unlink()
    trainer = here(tmp_path / "out")
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == STEPS
    assert read(tmp_path / "losses") == {}


@pytest.mark.parametrize("put", [Path.rename, shutil.copytree], ids=["moved", "copied"])
def test_the_best_model_is_known_after_its_folder_was_moved(
    tmp_path: Path, put: Callable[[Path, Path], object]
) -> None:
    args = {**LIMITED, "save_total_limit": 1}
    with pytest.raises(RuntimeError, match="stopped"):
        here(tmp_path / "first", args=args, eval=True, stop=5).train()
    put(tmp_path / "first", tmp_path / "out")

    class End(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            control.should_training_stop = state.global_step == 6

    best = tmp_path / "out" / "checkpoint-4"
    expected = AutoModelForCausalLM.from_pretrained(best).state_dict()
    shutil.rmtree(best)  # and one that was not made yet is made
    trainer = here(tmp_path / "out", args=args, eval=True)
    trainer.add_callback(End())
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.best_global_step == 4, "step 6 is worse"
    assert trainer.state.best_model_checkpoint == str(best)
    assert folders(tmp_path / "out") == [best.name]
    described = json.loads((best / "trainer_state.json").read_text())
    assert described["best_model_checkpoint"] == str(best)
    live = trainer.model.state_dict()
    assert all(torch.equal(expected[name], live[name]) for name in live)


def test_what_a_callback_logs_is_saved_as_the_trainer_s_file_would_have_it(tmp_path: Path) -> None:
    class Logs(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **_):
            state.log_history[-1].update(mean=np.float64(1.5), pair=(1, 2), by={1: 2})

    trainer = here(tmp_path / "out", args={"max_steps": 3})
    trainer.add_callback(Logs())
    trainer.train()
    [*_, last] = state_of(tmp_path / "out" / "checkpoint-3")["log_history"]
    assert (last["mean"], last["pair"], last["by"]) == (1.5, [1, 2], {"1": 2})


def test_a_committed_checkpoint_without_a_folder_gets_it_when_it_is_resumed(tmp_path: Path) -> None:
    out = tmp_path / "out"
    here(out, args={"max_steps": 6}).train()
    shutil.rmtree(out / "checkpoint-6")
    here(out, args={"max_steps": 6}).train(resume_from_checkpoint=True)
    assert AutoModelForCausalLM.from_pretrained(out / "checkpoint-6") is not None


def test_damage_makes_the_one_before_count_and_a_warning_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "out"
    here(out).train()
    whole = read(tmp_path / "losses")
    (tmp_path / "losses").unlink()
    for newest in (out / "_laststep").glob("step-00000012.*/model.safetensors"):
        flip_last_byte(newest)
    trainer = here(out)
    with caplog.at_level(logging.WARNING):
        trainer.train(resume_from_checkpoint=True)
    assert warned(caplog, "step 12", "step 9")
    assert read(tmp_path / "losses") == {step: whole[step] for step in (10, 11, 12)}
    live = trainer.model.state_dict()
    loaded = AutoModelForCausalLM.from_pretrained(out / "checkpoint-12").state_dict()
    assert all(torch.equal(loaded[name], live[name]) for name in live)
    for newest in (out / "_laststep").glob("step-00000012.*/model.safetensors"):
        flip_last_byte(newest)
    with pytest.raises(laststep.CorruptError):
        here(out).train(resume_from_checkpoint=str(out / "checkpoint-12"))


def flip_last_byte(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def test_checkpoints_of_the_trainer_itself_are_taken_up(tmp_path: Path) -> None:
    out = tmp_path / "out"
    here(out, kind="stock").train()
    whole = read(tmp_path / "losses")
    for step in (9, 12):
        shutil.rmtree(out / f"checkpoint-{step}")
    (tmp_path / "losses").unlink()
    here(out).train(resume_from_checkpoint=True)
    assert read(tmp_path / "losses") == {step: whole[step] for step in range(7, STEPS + 1)}
    assert laststep.open(out / "_laststep").steps() == [9, 12]


def test_what_the_trainer_itself_has_saved_since_is_not_passed_over(tmp_path: Path) -> None:
    out = tmp_path / "out"
    here(out, args={"max_steps": 3}).train()
    own = here(out, kind="stock", args={"max_steps": 6})
    own.train(resume_from_checkpoint=str(out / "checkpoint-3"))
    with raises(laststep.UsageError, found="checkpoint-6"):
        here(out).train(resume_from_checkpoint=True)
    assert (out / "checkpoint-6" / "optimizer.pt").exists()


def test_what_would_lose_or_mix_checkpoints_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "out"
    here(out, args={"max_steps": 3}).train()
    with raises(laststep.UsageError, remedy="new_lineage=True"):
        here(out).train()
    with pytest.raises(laststep.MismatchError, match=r"layers\.1"):
        here(out, layers=1).train(resume_from_checkpoint=True)
    with raises(laststep.UsageError, found=out / "checkpoint-3"):
        here(tmp_path / "other").train(resume_from_checkpoint=str(out / "checkpoint-3"))
    with pytest.raises(laststep.NotFoundError, match="step 4"):
        here(out).train(resume_from_checkpoint=str(out / "checkpoint-4"))
    with raises(laststep.NotFoundError, remedy="run="):
        here(out, settings={"run": tmp_path / "new"}).train(resume_from_checkpoint=True)
    with laststep.Checkpointer(tmp_path / "loop", model=hf_train.tiny()) as ckpt:
        ckpt.save(1)
    with raises(laststep.MismatchError, "transformers"):
        here(out, settings={"run": tmp_path / "loop"}).train(resume_from_checkpoint=True)
    with raises(laststep.UsageError, found="LlamaForCausalLM"):
        laststep.hf.attach(hf_train.tiny())
    assert laststep.open(out / "_laststep").steps() == [3]
    here(out, args={"max_steps": 3}, settings={"new_lineage": True}).train()


def test_an_argument_of_the_trainer_is_no_setting(tmp_path: Path) -> None:
    with raises(laststep.UsageError, remedy="TrainingArguments"):
        laststep.hf.attach(here(tmp_path / "out", kind="stock"), save_steps=5)


def test_a_trainer_with_a_way_of_saving_of_its_own_is_told_that_it_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Own(Trainer):
        def _save_checkpoint(self, model: object, trial: object) -> None:
            raise AssertionError("not called")

        def _save(self, output_dir: str, state_dict: object = None) -> None:
            torch.save(self.model.state_dict(), Path(output_dir) / "pytorch_model.bin")

    plain = here(tmp_path / "out", kind="stock", args={"max_steps": 3})
    plain.__class__ = Own
    with caplog.at_level(logging.WARNING):
        laststep.hf.attach(plain).train()
    assert warned(caplog, "_save_checkpoint, _save of Own")
    assert not (tmp_path / "out" / "checkpoint-3" / "pytorch_model.bin").exists(), "would be old"
    assert folders(tmp_path / "out") == ["checkpoint-3"]


def test_an_error_in_training_leaves_what_was_saved_and_a_folder_for_it(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(RuntimeError, match="stopped"):
        here(out, stop=4).train()
    assert laststep.open(out / "_laststep").steps() == [3]
    assert folders(out) == ["checkpoint-3"]


def test_saves_by_a_schedule_of_laststep_s_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    options = {"args": {"save_strategy": "no"}, "settings": {"every": 5}}
    described = []
    look = TrainCall._described

    def count(self: TrainCall) -> object:
        described.append(self._trainer.state.global_step)
        return look(self)

    monkeypatch.setattr(TrainCall, "_described", count)
    here(out, **options).train()
    assert laststep.open(out / "_laststep").steps() == [5, 10, 12]
    assert folders(out) == ["checkpoint-10", "checkpoint-12", "checkpoint-5"]
    assert described == [5, 10, 12], "the log grows: it is copied only for a save"


def test_a_trainer_that_was_saved_with_its_model_only_begins_the_rest_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "out"
    here(out, args={"save_only_model": True, "max_steps": 6}).train()
    with caplog.at_level(logging.WARNING):
        trainer = here(out)
        trainer.train(resume_from_checkpoint=True)
    assert warned(caplog, "data, optimizer, rng, scheduler")
    assert trainer.state.global_step == STEPS
    assert laststep.open(out / "_laststep").steps() == [3, 6, 9, 12]


ZERO = {
    "train_micro_batch_size_per_gpu": 4,
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"fsdp2": True},
        {"args": {"deepspeed": {**ZERO, "zero_optimization": {"stage": 2}}}},
        {"args": {"deepspeed": {**ZERO, "zero_optimization": {"stage": 3}}}},
    ],
    ids=["ddp", "fsdp2", "zero2", "zero3"],
)
def test_two_ranks_that_were_killed_go_on_bit_for_bit_and_one_rank_takes_over(
    tmp_path: Path, options: dict[str, object]
) -> None:
    check_resumed_exactly(tmp_path, ranks=2, **options)
    broken = tmp_path / "broken"
    found = {}

    class Look(TrainerCallback):
        def on_train_begin(self, args, state, control, model=None, optimizer=None, **_):
            found["step"] = state.global_step
            found["weights"] = {k: v.clone() for k, v in model.state_dict().items()}
            found["moments"] = [v["exp_avg"].clone() for v in optimizer.state.values()]

    alone = here(broken / "out", args={"max_steps": 15}, settings={"run": broken / "run"})
    alone.add_callback(Look())
    alone.train(resume_from_checkpoint=True)
    assert found["step"] == STEPS
    assert sorted(read(tmp_path / "broken" / "losses")) == [13, 14, 15]
    stored = laststep.load(broken / "run", step=STEPS)
    saved = AutoModelForCausalLM.from_pretrained(broken / "out" / "checkpoint-12").state_dict()
    for name, weight in found["weights"].items():
        assert torch.equal(weight, saved[name])
        assert torch.equal(weight, stored["model"][name])
    moments = stored["optimizer"]["state"].values()
    for restored, state in zip(found["moments"], moments, strict=True):
        assert torch.equal(restored, state["exp_avg"])


def test_the_example_trains_and_goes_on(tmp_path: Path) -> None:
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-W", "ignore", EXAMPLE, tmp_path / "out"],
            check=True,
            capture_output=True,
            text=True,
            env=environment(),
        )
        assert "40 steps" in done.stdout
    assert folders(tmp_path / "out") == ["checkpoint-30", "checkpoint-40"]
