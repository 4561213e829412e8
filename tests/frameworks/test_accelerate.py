"""Accelerate: its state in laststep's runs, resumed to the bit, with its own names and hooks."""

from __future__ import annotations

import gc
import itertools
import logging
import os
import weakref
from pathlib import Path

import pytest
import torch
from torch.optim.optimizer import _global_optimizer_post_hooks
from torch.utils.data import DataLoader, IterableDataset

import laststep
from expect import raises, warned
from frameworks.trained import Script
from laststep.settings import as_keywords

pytest.importorskip("accelerate", reason="laststep[accelerate] is not installed")

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import ProjectConfiguration

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(550)]

STEPS, KILLED = 22, 15  # the last that is there is 12: in the middle of an epoch, with 1 rank and 2
NEEDS = {"stateful": "torchdata", "deepspeed": "deepspeed"}


@pytest.mark.parametrize(
    ("way", "loading", "plugin", "ranks"),
    [
        ("items", "plain", "none", 1),
        ("attach", "stateful", "none", 1),
        ("items", "stream", "none", 1),
        ("attach", "plain", "ddp", 2),
        ("items", "dispatched", "ddp", 2),
        ("attach", "hooks", "ddp", 2),
        ("attach", "seedable", "fsdp2", 2),
        ("items", "plain", "fsdp1", 2),
        ("attach", "plain", "deepspeed", 2),
    ],
)
def test_losses_after_a_kill_in_a_save_are_those_of_a_run_without_one(
    tmp_path: Path, way: str, loading: str, plugin: str, ranks: int
) -> None:
    for needed in (loading, plugin):
        pytest.importorskip(NEEDS.get(needed, "torch"))
    arguments = (way, loading, plugin, str(STEPS))
    whole = Script("accelerate_loop.py", tmp_path / "whole", *arguments, ranks=ranks).to_its_end()
    script = Script("accelerate_loop.py", tmp_path / "killed", *arguments, ranks=ranks)
    script.killed_in_save(KILLED)
    rest = script.to_its_end()
    assert min(rest) in (KILLED - 2, KILLED + 1)
    assert sorted(rest) == list(range(min(rest), STEPS + 1))
    assert rest == {step: whole[step] for step in rest}


def test_a_run_goes_on_with_other_ranks_and_plugins(tmp_path: Path) -> None:
    script = Script("accelerate_loop.py", tmp_path, "attach", "seedable")
    script.to_its_end("fsdp2", "9", ranks=2)
    assert sorted(script.to_its_end("none", "12")) == [10, 11, 12]
    assert "are repeated" not in script.output()  # one rank goes on after all that two had
    assert sorted(script.to_its_end("ddp", "15", ranks=2)) == [13, 14, 15]


# -- in one process -------------------------------------------------------------------------------


class Loop:
    """A small loop of an Accelerator."""

    def __init__(self, folder: Path, width: int = 4, **settings: object) -> None:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        accumulated = settings.pop("accumulated", 1)
        project = ProjectConfiguration(project_dir=str(folder), **settings.pop("project", {}))
        self.acc = Accelerator(
            cpu=True, gradient_accumulation_steps=accumulated, project_config=project
        )
        torch.manual_seed(3)
        model = torch.nn.Linear(4, width)
        optimizer = torch.optim.AdamW(model.parameters())
        loader = DataLoader(torch.arange(32.0).reshape(8, 4), batch_size=1, shuffle=True)
        self.model, self.optimizer, self.loader = self.acc.prepare(model, optimizer, loader)
        self.run = folder / "run"
        if settings.pop("attached", True):
            laststep.accelerate.attach(self.acc, self.run, **as_keywords(settings))

    def train(self, batches: int, loader: object = None) -> list[float]:
        """The first numbers of the batches that it was trained with."""
        seen = []
        for batch in itertools.islice(self.loader if loader is None else loader, batches):
            with self.acc.accumulate(self.model):
                self.acc.backward(self.model(batch).square().sum())
                self.optimizer.step()
                self.optimizer.zero_grad()
            seen.append(batch[0, 0].item())
        return seen

    def weight(self) -> torch.Tensor:
        return self.acc.unwrap_model(self.model).weight.detach().clone()


def test_a_checkpoint_is_found_by_the_folder_that_it_was_saved_as(tmp_path: Path) -> None:
    loop, weights = Loop(tmp_path), {}
    for name in ("out/epoch_0", "out/epoch_1"):
        loop.train(3)
        loop.acc.save_state(name)
        weights[name] = loop.weight()
    loop.acc.save_state("out/last")  # of the same step: it has both names then
    loop.acc.end_training()
    for name in ("out/epoch_0", "out/epoch_1", "out/last"):
        again = Loop(tmp_path)
        restored = again.acc.load_state(name)
        expected = "epoch_0" if name.endswith("_0") else "epoch_1"
        assert restored.step == (3 if name.endswith("_0") else 6)
        assert torch.equal(again.weight(), weights[f"out/{expected}"])
        again.acc.end_training()
    assert not Path("out").exists()


def test_the_step_counts_the_steps_of_the_optimizer_that_are_done(tmp_path: Path) -> None:
    loop = Loop(tmp_path, accumulated=2)
    assert loop.acc.load_state().step is None
    loop.train(6)
    assert loop.acc.save_state().result(60).step == 3
    again = Loop(tmp_path, accumulated=2)
    assert again.acc.load_state().step == 3
    again.train(2)
    assert again.acc.save_state().result(60).step == 4
    again.acc.end_training()


def test_automatic_names_count_on_and_no_more_than_the_limit_stay(tmp_path: Path) -> None:
    project = {"automatic_checkpoint_naming": True, "total_limit": 2}
    loop = Loop(tmp_path, project=project)
    for _ in range(3):
        loop.train(1)
        loop.acc.save_state()
    loop.acc.end_training()
    assert laststep.open(loop.run).steps() == [2, 3]
    again = Loop(tmp_path, project=project)
    assert again.acc.load_state().step == 3
    assert again.acc.save_iteration == 3
    again.train(1)
    again.acc.save_state()
    again.acc.end_training()
    newest = laststep.open(loop.run).latest().metadata
    assert newest["names"] == [str(tmp_path / "checkpoints" / "checkpoint_3")]


def test_hooks_write_where_they_did_and_what_they_save_is_not_saved_twice(tmp_path: Path) -> None:
    def save(models: list[object], weights: list[object], folder: str) -> None:
        torch.save(weights.pop(), Path(folder) / "own.pt")

    def load(models: list[torch.nn.Module], folder: str) -> None:
        models.pop().load_state_dict(torch.load(Path(folder) / "own.pt"))

    out = str(tmp_path / "out")
    loop = Loop(tmp_path)
    loop.acc.register_save_state_pre_hook(save)
    loop.train(2)
    loop.acc.save_state(out)
    weight = loop.weight()
    loop.acc.end_training()
    assert "model" not in laststep.open(loop.run).latest().items()
    again = Loop(tmp_path)
    again.acc.register_load_state_pre_hook(load)
    assert again.acc.load_state().step == 2
    assert torch.equal(again.weight(), weight)
    again.acc.end_training()


def test_where_the_newest_is_damaged_hooks_get_the_folder_of_the_one_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loop = Loop(tmp_path)
    for name in ("first", "second"):
        loop.train(1)
        loop.acc.save_state(str(tmp_path / name))
    loop.acc.end_training()
    for file in loop.run.glob("step-00000002.*/model*.safetensors"):
        content = file.read_bytes()
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    folders = []
    for name, expected in ((None, ["second", "first"]), (str(tmp_path / "second"), ["second"])):
        again = Loop(tmp_path)
        again.acc.register_load_state_pre_hook(lambda _, at: folders.append(Path(at).name))
        if name is None:
            assert again.acc.load_state().step == 1
            assert warned(caplog, "step 2", "step 1")
        else:
            with pytest.raises(laststep.CorruptError):
                again.acc.load_state(name)
        assert folders == expected
        folders.clear()


def test_hooks_without_a_folder_are_told(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    loop.acc.register_save_state_pre_hook(lambda *_: None)
    with raises(laststep.UsageError, "register_save_state_pre_hook"):
        loop.acc.save_state()


def test_hooks_that_save_a_model_save_it_each_time(tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    loop = Loop(tmp_path)
    loop.acc.register_load_state_pre_hook(lambda models, _: models.clear())
    assert loop.acc.load_state().step is None
    handle = loop.acc.register_save_state_pre_hook(lambda _, weights, __: weights.clear())
    loop.train(1)
    loop.acc.save_state(out).result(60)
    assert "model" not in laststep.open(loop.run).latest().items()
    handle.remove()
    with raises(laststep.UsageError, found="Linear"):
        loop.acc.save_state(out)
    loop.acc.end_training()


def test_hooks_get_the_folder_that_is_loaded(tmp_path: Path) -> None:
    names, folders = [str(tmp_path / name) for name in ("epoch", "last")], []
    loop = Loop(tmp_path)
    loop.train(1)
    for name in names:  # two names of one checkpoint
        loop.acc.save_state(name)
    loop.acc.end_training()
    for name in (*names, None):
        again = Loop(tmp_path)
        again.acc.register_load_state_pre_hook(lambda _, at: folders.append(at))
        again.acc.load_state(name)
        again.acc.end_training()
    assert folders == [*names, names[1]]


def test_models_whose_weights_a_hook_replaces_are_saved(tmp_path: Path) -> None:
    def only_the_bias(models: object, weights: list[dict[str, object]], folder: object) -> None:
        weights[:] = [{"bias": weights[0]["bias"]}]

    loop = Loop(tmp_path)
    loop.acc.register_save_state_pre_hook(only_the_bias)
    loop.train(1)
    loop.acc.save_state(str(tmp_path / "out"))
    loop.acc.end_training()
    again = Loop(tmp_path)
    again.acc.load_state()
    assert torch.equal(again.weight(), loop.weight())
    again.acc.end_training()


@pytest.mark.parametrize("skips", [False, True])
def test_an_epoch_goes_on_where_it_was_also_where_a_script_skips_batches(
    tmp_path: Path, skips: bool
) -> None:
    loop = Loop(tmp_path)
    batches = iter(loop.loader)
    first = loop.train(3, batches)
    loop.acc.save_state().result(60)
    rest = loop.train(5, batches)
    assert len({*first, *rest}) == 8
    again = Loop(tmp_path)
    again.acc.load_state()
    loader = again.acc.skip_first_batches(again.loader, 3) if skips else again.loader
    assert again.train(8, loader) == rest
    assert len(again.train(8)) == 8
    again.acc.end_training()


def test_an_epoch_goes_on_at_the_same_sample_in_batches_of_another_size(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def start(size: int) -> Loop:
        loop = Loop(tmp_path)
        data = torch.arange(96.0).reshape(24, 4)
        loop.loader = loop.acc.prepare(DataLoader(data, batch_size=size, shuffle=True))
        return loop

    loop = start(2)
    batches = iter(loop.loader)
    loop.train(7, batches)
    loop.acc.save_state().result(60)
    rest = torch.cat([*batches])
    again = start(4)
    again.acc.load_state()
    assert torch.equal(torch.cat([*again.loader])[2:], rest)  # two samples come twice
    assert warned(caplog, "2 samples")


@pytest.mark.parametrize("what", ["a sampler with another seed", "workers that stay"])
@pytest.mark.parametrize("batches", [3, 8, 11])
def test_the_order_of_epochs_goes_on_with(tmp_path: Path, what: str, batches: int) -> None:
    def start(seed: int) -> Loop:
        loop = Loop(tmp_path)
        loop.acc.dataloader_config.use_seedable_sampler = "seed" in what
        workers = {"num_workers": 1, "persistent_workers": True} if "workers" in what else {}
        torch.manual_seed(seed)
        data = torch.arange(32.0).reshape(8, 4)
        loop.loader = loop.acc.prepare(DataLoader(data, batch_size=1, shuffle=True, **workers))
        loop.endless = itertools.chain.from_iterable(itertools.repeat(loop.loader))
        return loop

    loop = start(7)
    loop.train(batches, loop.endless)
    loop.acc.save_state().result(60)
    expected = loop.train(20, loop.endless)
    again = start(8)
    again.acc.load_state()
    assert again.train(20, again.endless) == expected


def test_batches_are_skipped_as_asked_in_a_run_that_was_not_restored(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    laststep.accelerate.items(loop.acc)
    assert len(loop.train(8, loop.acc.skip_first_batches(loop.loader, 6))) == 2
    assert len(loop.train(8)) == 8


def test_an_epoch_that_was_left_begins_anew(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    loop.train(3)
    loop.acc.save_state().result(60)
    expected = loop.train(8)
    again = Loop(tmp_path)
    again.acc.load_state()
    assert again.train(8) == expected
    assert len(expected) == 8


def test_what_accelerate_has_saved_is_loaded_by_accelerate(tmp_path: Path) -> None:
    loop = Loop(tmp_path, attached=False)
    loop.train(3)
    loop.acc.save_state(str(tmp_path / "old"))
    again = Loop(tmp_path)
    assert again.acc.load_state(str(tmp_path / "old")) is None
    assert torch.equal(again.weight(), loop.weight())
    again.train(1)
    again.acc.save_state()
    again.acc.end_training()


def test_a_folder_of_accelerates_is_loaded_also_if_a_checkpoint_is_called_the_same(
    tmp_path: Path,
) -> None:
    stock = Loop(tmp_path, attached=False)
    stock.train(3)
    stock.acc.save_state(str(tmp_path / "old" / "epoch_0"))
    loop = Loop(tmp_path)
    loop.train(1)
    loop.acc.save_state("out/epoch_0")
    loop.acc.end_training()
    again = Loop(tmp_path)
    again.acc.load_state(str(tmp_path / "old" / "epoch_0"))
    assert torch.equal(again.weight(), stock.weight())


@pytest.mark.parametrize("prepared", [False, True])
def test_states_between_which_only_other_optimizers_stepped_are_two_checkpoints(
    tmp_path: Path, prepared: bool
) -> None:
    def make() -> tuple[Loop, torch.optim.Optimizer]:
        loop = Loop(tmp_path)
        other = torch.optim.SGD(loop.model.parameters(), lr=0.1)
        return loop, loop.acc.prepare(other) if prepared else other

    loop, other = make()
    weights = []
    for name in ("first", "second"):
        loop.model(torch.ones(1, 4)).sum().backward()
        other.step()
        loop.acc.save_state(name)
        weights.append(loop.weight())
    loop.acc.end_training()
    for name, weight in zip(("first", "second"), weights, strict=True):
        again, _ = make()
        again.acc.load_state(name)
        assert torch.equal(again.weight(), weight)


def test_a_plain_loop_reads_what_an_accelerator_has_saved(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    loop.train(3)
    loop.acc.save_state()
    loop.acc.end_training()
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    with laststep.Checkpointer(loop.run, model=model, optimizer=optimizer) as ckpt:
        ckpt.restore(only=["model", "optimizer"])
    assert torch.equal(model.weight, loop.weight())
    assert optimizer.state_dict()["state"][0]["step"] == 3


def test_the_scaler_and_objects_that_were_registered_are_items(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    loop.acc.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    loop.acc.register_for_checkpointing(
        torch.optim.lr_scheduler.StepLR(loop.optimizer.optimizer, 2)
    )
    items = laststep.accelerate.items(loop.acc)
    assert list(items) == ["model", "optimizer", "loader", "custom", "scaler", "accelerator", "rng"]


class Counting(IterableDataset):
    """Has a state of its own, and reads nothing twice."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self):
        while self.at < 8:
            self.at += 1
            yield torch.full((4,), float(self.at))
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def test_a_dataset_with_a_state_goes_on_by_that(tmp_path: Path) -> None:
    pytest.importorskip("torchdata")

    def loop() -> Loop:
        made = Loop(tmp_path)
        made.acc.dataloader_config.use_stateful_dataloader = True
        made.loader = made.acc.prepare(DataLoader(Counting(), batch_size=1))
        return made

    first = loop()
    batches = iter(first.loader)
    assert first.train(3, batches) == [1, 2, 3]
    first.acc.save_state().result(60)
    again = loop()
    again.acc.load_state()
    assert again.train(9) == [4, 5, 6, 7, 8]
    assert again.train(9) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert laststep.accelerate.items(again.acc)["loader_1"].when_ranks_change == "refuse"


@pytest.mark.parametrize(
    ("ways", "batches", "again"), [(1, 6, ""), (3, 2, ""), (4, 1, "2 samples")]
)
def test_other_ranks_go_on_as_far_as_all_had_come_rounded_down(
    tmp_path: Path, ways: int, batches: int, again: str, caplog: pytest.LogCaptureFixture
) -> None:
    loader = laststep.accelerate.items(Loop(tmp_path).acc)["loader"]
    loader._place.ways = ways
    first = {**loader.describe().value, "ways": 2, "place": {"batches": 3, "inner": None}}
    with caplog.at_level(logging.WARNING):
        loader.restore(loader.when_ranks_change([first, {}], 0, ways))
    assert loader._place.now()["batches"] == batches
    assert again in caplog.text
    assert bool(again) == bool(caplog.text)


def test_an_accelerator_that_is_dropped_takes_its_run_with_it(tmp_path: Path) -> None:
    gc.collect()
    hooks = len(_global_optimizer_post_hooks)
    loop = Loop(tmp_path)
    loop.train(2)
    loop.acc.save_state().result(60)
    attached = weakref.ref(loop.acc.save_state.__self__)
    loop.acc.free_memory()  # Accelerate keeps what it has prepared, also elsewhere
    del loop
    gc.collect()
    assert attached() is None
    assert len(_global_optimizer_post_hooks) == hooks


# -- bad use --------------------------------------------------------------------------------------


def test_an_accelerator_is_attached_once(tmp_path: Path) -> None:
    with raises(laststep.UsageError, found=True):
        laststep.accelerate.attach(Loop(tmp_path).acc, tmp_path / "other")


def test_nothing_prepared_is_told(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    loop.acc.free_memory()
    with raises(laststep.UsageError, remedy="accelerator.prepare"):
        loop.acc.save_state()


def test_what_is_registered_too_late_is_told_of_and_not_left_out(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    loop.acc.load_state()
    loop.acc.register_for_checkpointing(
        torch.optim.lr_scheduler.StepLR(loop.optimizer.optimizer, 2)
    )
    with raises(laststep.UsageError, "StepLR"):
        loop.acc.save_state()


def test_a_name_that_is_not_there_is_told(tmp_path: Path) -> None:
    with raises(laststep.NotFoundError, "'out/never'"):
        Loop(tmp_path).acc.load_state("out/never")


def test_a_run_of_others_is_left_alone(tmp_path: Path) -> None:
    loop = Loop(tmp_path, attached=False)
    with laststep.Checkpointer(loop.run, items=laststep.accelerate.items(loop.acc)) as ckpt:
        ckpt.save(1, metadata={"framework": "lightning"})
    before = Loop(tmp_path)
    before.train(1)
    weight = before.weight()
    with raises(laststep.MismatchError, "lightning"):
        before.acc.load_state()
    assert torch.equal(before.weight(), weight)


def test_another_model_is_a_mismatch_and_the_run_is_not_left_behind(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    loop.train(1)
    loop.acc.save_state()
    loop.acc.end_training()
    other = Loop(tmp_path, width=5)
    with pytest.raises(laststep.MismatchError, match="model"):
        other.acc.load_state()
    with pytest.raises(laststep.UsageError, match="restore"):
        Loop(tmp_path).acc.save_state()
    assert laststep.open(loop.run).steps() == [1]


def test_a_save_between_two_steps_of_the_optimizer_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loop = Loop(tmp_path, accumulated=4)
    loop.train(2)
    with caplog.at_level(logging.WARNING):
        loop.acc.save_state()
    assert warned(caplog, "2 batches")
    loop.acc.end_training()


def test_the_example_runs(tmp_path: Path) -> None:
    example = Path(__file__).parents[2] / "examples" / "accelerate_loop.py"
    script = Script(os.fspath(example), tmp_path)
    script.to_its_end("20")
    script.to_its_end("30")
    assert "from step 20" in script.output()
