"""DeepSpeed engines that save and load with laststep: killed, resumed, on other ranks."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from expect import raises, warned

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")

import torch

import laststep
from frameworks.trained import SCRIPTS, Script, environment
from laststep.settings import as_keywords

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

sys.path.append(str(SCRIPTS))
pytestmark = pytest.mark.filterwarnings("ignore")  # DeepSpeed's own

STEADY = (
    "zero0+bf16+steady",
    "zero1+steady",
    "zero2+bf16+steady",
    "zero2+fp16+offload+steady",
    "zero3+steady",
    "zero3+bf16+twice+steady",
    "moe+steady",
    "moe+zero2+bf16+steady",
    "pipe+steady",
    "pipe+zero1+steady",
)
WAYS = (
    "zero0",
    "zero0+fp16",
    "zero1+bf16",
    "zero2+twice",
    "zero3+fp16+offload",
    "moe+zero1",
    "pipe+zero1+bf16",
    "pipe+fp16",
)


@pytest.mark.parametrize(
    ("way", "ranks"), [("zero1", 1), ("zero3+bf16+twice", 2), ("moe+zero2", 2), ("pipe+zero1", 2)]
)
def test_a_killed_run_goes_on_as_if_nothing_had_happened(
    way: str, ranks: int, tmp_path: Path
) -> None:
    whole = Script("deepspeed_train.py", tmp_path / "whole", way, "8", ranks=ranks).to_its_end()
    script = Script("deepspeed_train.py", tmp_path / "killed", way, "8", ranks=ranks)
    before = script.killed_in_save(6)
    after = script.to_its_end()
    assert sorted(whole) == list(range(1, 9))
    assert min(after) in (5, 7)
    assert {**before, **after} == whole


class Matrix:
    """What ranks of some number have saved in many ways."""

    def __init__(self, folder: Path, ranks: int, ways: tuple[str, ...]) -> None:
        self._script = Script("deepspeed_matrix.py", folder, ranks=ranks)
        self._script.run.mkdir(parents=True)
        self._starts, self.ways, self.run = 0, ways, self._script.run
        self.losses = self._start("save", ranks)

    def load(self, ranks: int) -> dict[str, Any]:
        return self._start("load", ranks)

    def _start(self, what: str, ranks: int) -> dict[str, Any]:
        self._script.to_its_end(what, *self.ways, ranks=ranks)
        self._starts += 1
        found: dict[str, Any] = json.loads(
            (self._script.folder / f"losses{self._starts}").read_text()
        )
        return found


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    return Matrix(tmp_path_factory.mktemp("two"), 2, STEADY)


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(tree, dict | list | tuple):
        inner = tree.items() if isinstance(tree, dict) else enumerate(tree)
        for key, value in inner:
            yield from leaves(value, f"{path}/{key}")
    else:
        yield path, tree


def assert_the_same_state(first: str, second: str) -> None:
    states = [laststep.load(run, step=3) for run in (first, second)]
    for item in ("model", "optimizer", "lr_scheduler", "counts"):
        expected, found = (dict(leaves(state[item])) for state in states)
        assert expected, item
        assert sorted(expected) == sorted(found), item
        for name, value in expected.items():
            if isinstance(value, torch.Tensor):
                assert value.dtype == found[name].dtype, name
                assert torch.equal(value, found[name]), name
            else:
                assert value == found[name], name


def test_every_kind_of_engine_goes_on_bit_for_bit(of_two: Matrix, tmp_path: Path) -> None:
    for losses in (of_two.losses, Matrix(tmp_path, 2, WAYS).losses):
        assert losses
        for way, of_way in losses.items():
            assert of_way["resumed"] == of_way["uninterrupted"], way


@pytest.mark.parametrize("ranks", [1, 4])
def test_other_numbers_of_ranks_load_the_same_bits(of_two: Matrix, ranks: int) -> None:
    losses = of_two.load(ranks)
    for way in STEADY:
        assert_the_same_state(f"{of_two.run}/{way}", f"{of_two.run}/{way}.{ranks}")
        for resumed, then in zip(
            losses[way]["resumed"], of_two.losses[way]["resumed"], strict=True
        ):
            assert float.fromhex(resumed) == pytest.approx(float.fromhex(then), rel=0.02), way


def test_two_ranks_load_what_one_has_saved(tmp_path: Path) -> None:
    alone = Matrix(tmp_path, 1, ("zero2+steady", "zero3+bf16+steady", "moe+zero1+steady"))
    alone.load(2)
    for way in alone.ways:
        assert_the_same_state(f"{alone.run}/{way}", f"{alone.run}/{way}.2")


# -- in this process, which is one rank -----------------------------------------------------------

Make = "Callable[..., Any]"


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    from deepspeed_ways import start

    start()
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture
def make(one_rank: None, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Engines that save to one run."""
    from deepspeed_ways import engine_of

    made = []

    def engine(way: str = "zero1", run: str = "run", **settings: Any) -> Any:
        attached = laststep.deepspeed.attach(
            engine_of(way),
            tmp_path / run,
            **as_keywords({"flush": "thread", "progress": False, **settings}),
        )
        made.append(attached)
        return attached

    yield engine
    for one in made:
        one.checkpointer.close()


def steps(engine: Any, count: int) -> Any:
    from deepspeed_ways import step_of

    for _ in range(count):
        step_of(engine, "zero1")
    return engine


def weight(engine: Any) -> torch.Tensor:
    return engine.module.last.weight.detach().clone()


def test_a_checkpoint_goes_by_all_tags_that_it_was_saved_with(make: Make) -> None:
    engine = steps(make(), 1)
    assert engine.load_checkpoint("elsewhere") == (None, None)
    engine.save_checkpoint("elsewhere", tag="first")
    steps(engine, 1).save_checkpoint("elsewhere")
    engine.save_checkpoint("elsewhere", tag="best", client_state={"score": 1.5})
    engine.checkpointer.wait()
    other = make()
    for tag, step in (("first", 1), ("best", 2), ("global_step2", 2), (None, 2)):
        folder, client = other.load_checkpoint("elsewhere", tag)
        assert (other.global_steps, Path(folder).parent.name) == (step, "run")
        assert client == ({"score": 1.5} if step == 2 else {})
    with raises(laststep.NotFoundError, "'worst'"):
        other.load_checkpoint("elsewhere", "worst")


def test_only_what_is_wanted_is_loaded(make: Make) -> None:
    engine = steps(make(), 3)
    engine.load_checkpoint()
    engine.save_checkpoint()
    then, moment = weight(engine), engine.basic_optimizer.state_dict()["state"][0]["exp_avg"]
    engine.checkpointer.wait()
    for flags, steps_then, rate_is_back, moments_are_back in (
        ({"load_module_only": True}, 1, False, False),
        ({"load_optimizer_states": False}, 3, False, False),
        ({"load_lr_scheduler_states": False}, 3, False, True),
        ({}, 3, True, True),
    ):
        other = steps(make(), 1)
        other.load_checkpoint(**flags)
        assert torch.equal(weight(other), then), flags
        assert other.global_steps == steps_then, flags
        held = other.basic_optimizer.state_dict()["state"][0]["exp_avg"]
        assert torch.equal(held, moment) == moments_are_back, flags
        if "load_lr_scheduler_states" in flags or "load_module_only" in flags or not flags:
            at = other.lr_scheduler.last_batch_iteration
            assert (at == engine.lr_scheduler.last_batch_iteration) == rate_is_back, flags


def test_the_client_state_has_tensors_and_needs_no_pickle(make: Make) -> None:
    engine = steps(make(), 1)
    engine.load_checkpoint()
    state = {"epoch": 3, "mean": torch.arange(4.0), "of": [{"a": (1, 2.5, None)}]}
    engine.save_checkpoint(client_state=state)
    engine.checkpointer.wait()
    _, found = make().load_checkpoint()
    assert torch.equal(found.pop("mean"), state.pop("mean"))
    assert found == state
    with pytest.raises(laststep.UsageError, match="client"):
        engine.save_checkpoint(client_state={"odd": object})


def test_a_damaged_checkpoint_is_passed_over_and_by_its_tag_an_error(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make()
    engine.load_checkpoint()
    for _ in range(2):
        steps(engine, 1).save_checkpoint()
    engine.checkpointer.wait()
    [damaged] = Path(engine.checkpointer.path).glob("step-00000002.*/model*.safetensors")
    content = bytearray(damaged.read_bytes())
    content[-100] ^= 1
    damaged.write_bytes(content)
    other = make()
    with caplog.at_level(logging.WARNING, "laststep"):
        folder, _ = other.load_checkpoint()
    assert other.global_steps == 1
    assert "step-00000001" in folder
    assert "step 2" in caplog.text
    with pytest.raises(laststep.CorruptError):
        make().load_checkpoint(tag="global_step2")


def test_the_loss_scale_of_fp16_comes_back(make: Make) -> None:
    engine = steps(make("zero2+fp16"), 4)
    engine.load_checkpoint()
    scale = engine.optimizer.loss_scaler.cur_scale
    assert engine.skipped_steps > 0
    assert scale < 2**21
    engine.save_checkpoint()
    engine.checkpointer.wait()
    other = make("zero2+fp16")
    other.load_checkpoint()
    assert other.optimizer.loss_scaler.cur_scale == scale
    assert other.skipped_steps == engine.skipped_steps


def test_with_every_it_says_whether_it_has_saved(make: Make) -> None:
    engine = make(every=2)
    engine.load_checkpoint()
    assert [steps(engine, 1).save_checkpoint() for _ in range(4)] == [False, True, False, True]
    engine.checkpointer.wait()
    assert laststep.open(engine.checkpointer.path).steps() == [2, 4]


def test_a_run_may_begin_with_what_deepspeed_has_saved(make: Make, tmp_path: Path) -> None:
    from deepspeed_ways import engine_of

    native = steps(engine_of("zero1"), 2)
    native.save_checkpoint(str(tmp_path / "old"), client_state={"epoch": 1})
    engine = make()
    folder, client = engine.load_checkpoint(str(tmp_path / "old"))
    assert Path(folder).is_relative_to(tmp_path / "old")
    assert (client["epoch"], engine.global_steps) == (1, 2)
    steps(engine, 1).save_checkpoint(str(tmp_path / "old"))
    engine.checkpointer.wait()
    other = make()
    other.load_checkpoint(str(tmp_path / "old"))
    assert other.global_steps == 3


def test_a_run_of_another_framework_or_a_changed_model_is_refused(make: Make) -> None:
    with laststep.Checkpointer(
        Path(make().checkpointer.path),
        model=torch.nn.Linear(2, 2),
        options=laststep.Options(flush="thread", progress=False),
    ) as ckpt:
        ckpt.save(0, metadata={"framework": "lightning"})
    with raises(laststep.MismatchError, "deepspeed"):
        make().load_checkpoint()
    engine = steps(make(run="other"), 1)
    engine.load_checkpoint()
    engine.save_checkpoint()
    engine.checkpointer.wait()
    with pytest.raises(laststep.MismatchError, match="experts"):
        make("moe+zero1", run="other").load_checkpoint()


def test_bad_use_is_said(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    engine = make("zero1+twice")
    with raises(laststep.UsageError, remedy="engine.checkpointer"):
        laststep.deepspeed.attach(engine, "other")
    with pytest.raises(laststep.UsageError, match="custom_load_fn"):
        engine.load_checkpoint(custom_load_fn=print)
    for unsupported in ({"save_latest": False}, {"exclude_frozen_parameters": True}):
        with raises(laststep.UsageError, *unsupported):
            engine.save_checkpoint(**unsupported)
    rows = torch.randn(4, 12)
    engine.backward(engine(rows).square().mean())
    engine.step()
    with caplog.at_level(logging.WARNING, "laststep"):
        engine.save_checkpoint("elsewhere")
    assert warned(caplog, "1 micro-steps")


def test_another_version_is_refused(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed_ways import engine_of

    engine = engine_of("zero1")
    monkeypatch.setattr("importlib.metadata.version", lambda _: "0.9.1")
    with raises(laststep.UsageError, found="0.9.1"):
        laststep.deepspeed.attach(engine, "run")


def test_the_example_runs_and_goes_on(tmp_path: Path) -> None:
    example = SCRIPTS.parents[1] / "examples" / "deepspeed_engine.py"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    for first in (0, 20):
        done = subprocess.run(
            [*launch, example],
            cwd=tmp_path,
            env=environment(),
            text=True,
            check=False,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert done.returncode == 0, done.stdout[-4000:]
        assert f"steps {first} to {first + 20}" in done.stdout
