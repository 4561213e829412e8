"""Weights that are their masters rounded are not stored, and come back bit for bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

import laststep
from cases import long
from expect import raises
from laststep.catalog.attempt import read_decision, read_index
from laststep.codecs import rounding
from laststep.constants import BLOCK_BYTES
from laststep.dcp import Reader
from laststep.errors import CorruptError
from laststep.read.verify import verify_checkpoint
from laststep.settings import as_keywords
from laststep.storage.directory import DirectoryStore
from stored import folders

if TYPE_CHECKING:
    from random import Random

BLOCK = BLOCK_BYTES // 2
"""Elements of a block of bf16."""
ODD = torch.tensor(
    [0, -(1 << 31), 1, 0x8000, 0x7F800000, 0x7F7FFFFF, 0x3F808000, 0x3F818000, 0x7FC00000],
    dtype=torch.int64,
).to(torch.int32)


class Mixed:
    """A model in bf16 with masters in fp32 and two moments, as an optimizer of mixed precision has
    them."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16, sizes: tuple[int, ...] = ()) -> None:
        sizes = sizes or (3 * BLOCK + 5, 7, BLOCK // 2, 1, BLOCK)
        self.optimizer: dict[str, dict[str, dict[str, torch.Tensor]]] = {"state": {}}
        self.model: dict[str, torch.Tensor] = {}
        for number, size in enumerate(sizes):
            names = ("exp_avg", "exp_avg_sq", "master")
            self.optimizer["state"][f"w{number}"] = {name: torch.randn(size) for name in names}
            self.model[f"w{number}"] = torch.empty(size, dtype=dtype)
        self.parameters = sum(sizes)
        self.sync()

    def sync(self) -> None:
        for name in self.optimizer["state"]:
            self.model[name].copy_(self.master(name))

    def master(self, name: str) -> torch.Tensor:
        return self.optimizer["state"][name]["master"]

    def train(self, by: float = 0.1) -> None:
        for state in self.optimizer["state"].values():
            for tensor in state.values():
                tensor.add_(by * torch.randn_like(tensor))
        self.sync()

    def copy(self) -> dict[str, torch.Tensor]:
        return {name: weight.clone() for name, weight in self.model.items()}

    def items(self) -> dict[str, object]:
        return {"model": self.model, "optimizer": self.optimizer}


DECLARED = {"model/*": "optimizer/state/*/master"}


@pytest.fixture
def run(run_folder: Path) -> Path:
    return run_folder


def opened(run: Path, state: Mixed, **settings: object) -> laststep.Checkpointer:
    how: dict[str, object] = {"derived": DECLARED, "flush": "thread", "progress": False, **settings}
    return laststep.Checkpointer(run, items=state.items(), **as_keywords(how))  # type: ignore[arg-type]


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def assert_restores(run: Path, expected: dict[str, torch.Tensor], step: int | None = None) -> None:
    """The model alone, and by name, is what it was."""
    checkpoint = laststep.open(run).latest() if step is None else laststep.open(run)[step]
    for name, weight in expected.items():
        assert same_bits(checkpoint.tensor(f"model/{name}")[:], weight), name


def stored_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def derived_blocks(run: Path, file: str = "model.safetensors") -> list[bool]:
    """Of each block of a file of the newest checkpoint: whether it is derived."""
    store = DirectoryStore(str(run))
    folder = folders(run)[-1]
    index = read_index(store, folder, read_decision(store, folder), 0)
    return [index.is_derived(ref) for ref in index.layout(file).refs()]


@pytest.mark.parametrize("flush", ["thread", "process"])
def test_a_parameter_takes_12_bytes_and_comes_back(run: Path, flush: str) -> None:
    state = Mixed()
    with opened(run, state, flush=flush) as ckpt:
        ckpt.save(1).result()
    assert stored_bytes(run / folders(run)[0]) < 12 * state.parameters + 40_000
    expected = state.copy()
    other = Mixed()
    with opened(run, other) as ckpt:
        ckpt.restore()
    assert all(same_bits(other.model[name], weight) for name, weight in expected.items())
    assert_restores(run, expected)
    report = verify_checkpoint(DirectoryStore(str(run)), folders(run)[0])
    assert report.damage == ()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_zeros_denormals_infinities_and_nan_come_back(run: Path, dtype: torch.dtype) -> None:
    state = Mixed(dtype)
    state.master("w0")[: len(ODD)] = ODD.view(torch.float32)
    state.master("w1")[:] = -0.0
    state.sync()
    with opened(run, state) as ckpt:
        ckpt.save(1).result()
    assert set(derived_blocks(run)) == {True}
    assert_restores(run, state.copy())


def test_of_a_tensor_that_differs_in_one_bit_that_block_is_stored(run: Path) -> None:
    state = Mixed()
    state.model["w0"].view(torch.int16)[BLOCK + 3] ^= 1
    with opened(run, state) as ckpt:
        ckpt.save(1).result()
    assert derived_blocks(run) == [True, False, True, True, True]
    assert_restores(run, state.copy())


def test_a_small_tensor_that_differs_does_not_keep_its_neighbours_from_being_left_out(
    run: Path,
) -> None:
    state = Mixed()
    state.model["w1"] += 1  # shares its block with others
    with opened(run, state) as ckpt:
        ckpt.save(1).result()
    assert set(derived_blocks(run)) == {True}
    assert_restores(run, state.copy())


def test_a_model_that_follows_from_nothing_is_a_file_that_others_can_read(run: Path) -> None:
    state = Mixed()
    for weight in state.model.values():
        weight.add_(1)
    with opened(run, state) as ckpt:
        ckpt.save(1).result()
    found = load_file(run / folders(run)[0] / "model.safetensors")
    assert all(same_bits(found[name], weight) for name, weight in state.model.items())


def test_without_the_setting_everything_is_stored_as_it_was(run: Path) -> None:
    state = Mixed()
    with opened(run, state, derived=False) as ckpt:
        ckpt.save(1).result()
    assert set(derived_blocks(run)) == {False}
    assert_restores(run, state.copy())


def test_the_model_alone_is_restored(run: Path) -> None:
    state = Mixed()
    with opened(run, state) as ckpt:
        ckpt.save(1).result()
    other = Mixed()
    moments = other.master("w0").clone()
    with opened(run, other) as ckpt:
        ckpt.restore(only=["model"])
    assert all(same_bits(other.model[name], weight) for name, weight in state.model.items())
    assert torch.equal(other.master("w0"), moments)


def test_slices_are_read(run: Path) -> None:
    state = Mixed()
    with opened(run, state) as ckpt:
        ckpt.save(1).result()
    tensor = laststep.open(run).latest().tensor("model/w0")
    for low, high in [(0, 1), (BLOCK - 3, BLOCK + 3), (3 * BLOCK, 3 * BLOCK + 5)]:
        assert same_bits(tensor[low:high], state.model["w0"][low:high])


@pytest.mark.parametrize("compression", ["max", *long("none", "adaptive")])
def test_every_step_comes_back_whatever_changed_between(run: Path, compression: str) -> None:
    state = Mixed()
    kept: dict[int, dict[str, torch.Tensor]] = {}

    def save(ckpt: laststep.Checkpointer, step: int) -> None:
        ckpt.save(step).result()
        kept[step] = state.copy()

    with opened(run, state, compression=compression) as ckpt:
        save(ckpt, 1)
        save(ckpt, 2)  # nothing has changed
        assert set(derived_blocks(run)) == {True}
        state.train()
        save(ckpt, 3)
        state.train(1e-9)  # masters change, and what they are rounded to does not
        save(ckpt, 4)
        assert set(derived_blocks(run)) == {True}
        state.model["w0"][5] = 1000.0  # and the other way round
        save(ckpt, 5)
        save(ckpt, 6)
    with opened(run, state, compression=compression) as ckpt:
        ckpt.restore()
        state.master("w4").add_(1)
        save(ckpt, 7)  # one master was changed, and nobody has rounded it yet
        state.sync()
        save(ckpt, 8)
    assert set(derived_blocks(run)) == {True}
    for step, expected in kept.items():
        assert_restores(run, expected, step)
    for folder in folders(run):
        assert verify_checkpoint(DirectoryStore(str(run)), folder).damage == ()


def test_what_did_not_change_and_follows_from_nothing_is_still_borrowed(run: Path) -> None:
    state = Mixed()
    state.model["frozen"] = torch.randn(6 * BLOCK).to(torch.bfloat16)
    with opened(run, state) as ckpt:
        ckpt.save(1).result()
        state.train()
        written = ckpt.save(2).result().written_bytes
        state.train()
        again = ckpt.save(3).result().written_bytes
    assert written is not None
    assert again is not None
    assert max(written, again) < 12 * state.parameters + 6 * BLOCK
    for step in (1, 2, 3):
        assert same_bits(laststep.open(run)[step].tensor("model/frozen")[:], state.model["frozen"])
    assert_restores(run, state.copy())


def test_what_follows_from_others_does_not_count_as_changed(run: Path) -> None:
    state = Mixed(sizes=(8 * BLOCK,))
    state.model["frozen"] = torch.randn(2 * BLOCK).to(torch.bfloat16)
    written = []
    with opened(run, state) as ckpt:
        for step in range(4):
            written.append(ckpt.save(step).result().written_bytes or 0)
            state.train()
    assert max(written[1:]) < 12 * state.parameters + BLOCK < written[0]


def test_a_folder_that_is_copied_is_whole(run: Path, tmp_path: Path) -> None:
    state = Mixed()
    with opened(run, state) as ckpt:
        ckpt.save(1).result()
        ckpt.save(2).result()
    copied = tmp_path / "copied" / folders(run)[-1]
    shutil.copytree(run / folders(run)[-1], copied)
    shutil.rmtree(run)
    assert_restores(copied.parent, state.copy())
    assert verify_checkpoint(DirectoryStore(str(copied.parent)), copied.name).damage == ()


def test_older_checkpoints_can_go(run: Path) -> None:
    state = Mixed()
    with opened(run, state, keep=laststep.Keep(last=1)) as ckpt:
        for step in range(4):
            ckpt.save(step).result()
            state.train(0.1 if step % 2 else 1e-9)
            expected = state.copy()
        ckpt.save(9).result()
    assert len(folders(run)) <= 2
    assert_restores(run, expected)


def damaged(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0x40]))


def place_of_master(run: Path, name: str) -> tuple[Path, int]:
    """The byte of the newest checkpoint's file at which a master begins."""
    path = run / folders(run)[-1] / "optimizer.safetensors"
    length = int.from_bytes(path.read_bytes()[:8], "little")
    header = json.loads(path.read_bytes()[8 : 8 + length])
    return path, 8 + length + header[f"state/{name}/master"]["data_offsets"][0]


def test_damage_of_a_master_is_damage_of_what_follows_from_it(run: Path) -> None:
    state = Mixed()
    with opened(run, state) as ckpt:
        ckpt.save(1).result()
        before = state.copy()
        state.train()
        ckpt.save(2).result()
    path, at = place_of_master(run, "w2")
    damaged(path, at + 3)
    found = verify_checkpoint(DirectoryStore(str(run)), folders(run)[-1]).damage
    assert {wrong.file for wrong in found} == {"optimizer.safetensors"}
    touched = {name for wrong in found for name in wrong.touches}
    assert {"model/w2", "optimizer/state/w2/master"} <= touched
    with pytest.raises(CorruptError, match=r"optimizer\.safetensors"):
        laststep.open(run).latest().tensor("model/w2")[:]
    other = Mixed()
    with opened(run, other) as ckpt:
        assert ckpt.restore().step == 1
    assert all(same_bits(other.model[name], weight) for name, weight in before.items())


@pytest.mark.parametrize("what", ["gone", "cut"])
def test_a_checkpoint_without_its_masters_is_passed_over(run: Path, what: str) -> None:
    state = Mixed()
    with opened(run, state) as ckpt:
        ckpt.save(1).result()
        state.train()
        ckpt.save(2).result()
    path = run / folders(run)[-1] / "optimizer.safetensors"
    if what == "gone":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-BLOCK])
    found = verify_checkpoint(DirectoryStore(str(run)), folders(run)[-1]).damage
    assert {wrong.file for wrong in found} == {"optimizer.safetensors"}
    with opened(run, Mixed()) as ckpt:
        assert ckpt.restore(only=["model"]).step == 1


def test_a_tensor_and_its_master_may_lie_in_one_file(run: Path) -> None:
    state = Mixed()
    item = {"weights": state.model, "masters": {n: state.master(n) for n in state.model}}
    with laststep.Checkpointer(
        run,
        state=item,
        options=laststep.Options(derived={"state/weights/*": "state/masters/*"}, flush="thread"),
    ) as ckpt:
        ckpt.save(1).result()
    ways = derived_blocks(run, "state.safetensors")
    # The block in which fp32 ends and bf16 begins is stored: masters lie in it.
    assert ways.count(True) == len(ways) - -(-4 * state.parameters // BLOCK_BYTES)
    checkpoint = laststep.open(run).latest()
    for name, weight in state.model.items():
        assert same_bits(checkpoint.tensor(f"state/weights/{name}")[:], weight)


def test_a_small_state_in_one_file_is_stored_as_it_is(run: Path) -> None:
    state = Mixed(sizes=(100, 7))
    with opened(run, state) as ckpt:
        ckpt.save(1).result()
    found = load_file(run / folders(run)[0] / "shared.safetensors")
    assert all(same_bits(found[f"model/{n}"], weight) for n, weight in state.model.items())


def test_a_small_model_in_the_shared_file_is_left_out(run: Path) -> None:
    state = Mixed(sizes=(100_000, 7))
    with opened(run, state) as ckpt:
        ckpt.save(1).result()
        ckpt.save(2).result()
    assert derived_blocks(run, "shared.safetensors") == [True]
    other = Mixed(sizes=(100_000, 7))
    with opened(run, other) as ckpt:
        ckpt.restore()
    assert all(same_bits(other.model[name], weight) for name, weight in state.model.items())


def test_a_state_larger_than_the_pool_is_left_out_all_the_same(run: Path) -> None:
    state = Mixed(sizes=(BLOCK * 10 + 1, 9, BLOCK * 5, BLOCK * 3 + 17))
    with opened(run, state, host_memory_bytes=64 << 20) as ckpt:
        for step in range(3):
            ckpt.save(step).result()
            assert set(derived_blocks(run)) == {True}
            state.train()
    assert state.parameters * 14 > 64 << 20


def test_the_report_says_what_was_left_out(run: Path) -> None:
    state = Mixed()
    with opened(run, state) as ckpt:
        (found,) = ckpt.save(1).result().coding
    assert (found.file, found.mode, found.picked) == ("model.safetensors", "derived", "rounded")
    assert found.raw_bytes == 2 * state.parameters
    assert found.stored_bytes < 100


def test_patterns_have_as_many_stars_on_both_sides(run: Path) -> None:
    with raises(laststep.UsageError, found="'model/*': 'optimizer/*/state/*'"):
        opened(run, Mixed(), derived={"model/*": "optimizer/*/state/*"})


class Adam(torch.optim.Optimizer):
    """Steps masters in fp32 that it keeps for parameters in bf16."""

    def __init__(self, parameters: object) -> None:
        super().__init__(parameters, {"lr": 0.01})  # type: ignore[arg-type]

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state["exp_avg"] = torch.zeros_like(parameter, dtype=torch.float32)
                state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=torch.float32)
                state["kept"] = parameter.float()
            state["exp_avg"].lerp_(parameter.grad.float(), 0.1)
            state["exp_avg_sq"].lerp_(parameter.grad.float() ** 2, 0.1)
            state["kept"] -= 0.01 * state["exp_avg"] / (state["exp_avg_sq"].sqrt() + 1e-8)
            parameter.copy_(state["kept"])


def test_masters_in_an_optimizer_are_found(run: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.Linear(1024, 1024))
    model.to(torch.bfloat16)
    torch.nn.init.zeros_(model[1].bias)  # as the moments are at first
    optimizer = Adam(model.parameters())
    items = {"model": model, "optimizer": optimizer}
    kept = {}
    with laststep.Checkpointer(
        run, items=items, options=laststep.Options(derived=True, flush="thread")
    ) as ckpt:
        for step in range(4):
            ckpt.save(step).result()
            kept[step] = {n: p.detach().clone() for n, p in model.named_parameters()}
            if step:
                assert set(derived_blocks(run)) == {True}, step
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter)
            optimizer.step()
    for step, expected in kept.items():
        assert_restores(run, expected, step)


def test_fp32_moments_without_a_master_are_not_rounded_for_ever(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = Mixed()
    for kept in state.optimizer["state"].values():
        del kept["master"]
    counted = []
    real = rounding.rounded
    monkeypatch.setattr(rounding, "rounded", lambda *a: counted.append(a) or real(*a))
    with opened(run, state, derived=True) as ckpt:
        for step in range(4):
            for weight in state.model.values():
                weight.add_(1)
            ckpt.save(step).result()
            if step == 1:
                assert counted
                counted.clear()
    assert counted == []
    found = load_file(run / folders(run)[-1] / "model.safetensors")
    assert all(same_bits(found[name], weight) for name, weight in state.model.items())


def test_what_is_declared_is_tried_at_each_save(run: Path) -> None:
    state = Mixed(sizes=(BLOCK,))
    with opened(run, state) as ckpt:
        for step in range(3):
            state.model["w0"].add_(1)
            ckpt.save(step).result()
            assert derived_blocks(run) == [False]
        state.sync()
        ckpt.save(3).result()
    assert derived_blocks(run) == [True]


def test_a_declaration_that_fits_nothing_is_told(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(run, Mixed(), derived={"model/*": "optimizer/*/main"}) as ckpt:
        ckpt.save(1).result()
    assert "no model/* has a optimizer/*/main of fp32" in caplog.text


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_other_readers_get_what_follows_from_masters(run: Path) -> None:
    state = Mixed()
    with opened(run, state) as ckpt:
        ckpt.save(1).result()
    found = {"model": {name: torch.zeros_like(weight) for name, weight in state.model.items()}}
    dcp.load(found, storage_reader=Reader(run), no_dist=True)
    assert all(same_bits(found["model"][name], weight) for name, weight in state.model.items())
    loaded = laststep.load(run / folders(run)[0])
    assert all(same_bits(loaded["model"][name], weight) for name, weight in state.model.items())


@settings(max_examples=5, deadline=None)
@given(st.randoms(use_true_random=False), st.sampled_from(["none", "max"]))
def test_any_chain_of_saves_comes_back(random: Random, compression: str) -> None:
    torch.manual_seed(random.randrange(1 << 30))
    sizes = tuple(random.choice([1, 3, 1000, BLOCK - 1, BLOCK + 1]) for _ in range(3))
    state = Mixed(random.choice([torch.bfloat16, torch.float16]), sizes)
    if random.random() < 0.5:
        state.model["alone"] = torch.randn(random.choice([5, BLOCK])).to(torch.bfloat16)
    kept: dict[int, dict[str, torch.Tensor]] = {}
    with TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        ckpt = opened(run, state, derived=random.choice([True, DECLARED]), compression=compression)
        for step in range(4):
            change = random.choice(["train", "little", "weight", "master", "nothing", "restart"])
            name = random.choice([*state.optimizer["state"]])
            at = random.randrange(state.model[name].numel())
            if change in ("train", "little"):
                state.train(0.1 if change == "train" else 1e-9)
            elif change == "weight":
                state.model[name].view(torch.int16)[at] ^= 1 << random.randrange(16)
            elif change == "master":
                state.master(name).view(torch.int32)[at] ^= 1 << random.randrange(31)
            elif change == "restart":
                ckpt.close()
                ckpt = opened(run, state, compression=compression)
                ckpt.restore()
            ckpt.save(step).result()
            kept[step] = state.copy()
        ckpt.close()
        for step, expected in kept.items():
            assert_restores(run, expected, step)
        for found in folders(run):
            assert verify_checkpoint(DirectoryStore(str(run)), found).damage == ()


def test_patterns_that_mean_the_same_pair_count_once(run: Path) -> None:
    """A run of a master that comes in two chunks is not whole when one of them has come twice."""
    masters = torch.randn(10 << 20)
    weights = masters.bfloat16()
    weights[7 << 19 : 15 << 18] = 0  # half a run is none of its master's, and zero
    state = {"a_pad": torch.zeros(1 << 18), "w": masters}
    both = {"model/*": "optimizer/*", "model/w*": "optimizer/w*"}
    with laststep.Checkpointer(
        run, model={"w": weights}, optimizer=state, options=laststep.Options(derived=both)
    ) as ckpt:
        ckpt.save(1).result()
    found = laststep.open(run).latest().tensor("model/w")[:]
    assert same_bits(found, weights)


def test_what_is_declared_is_tried_though_the_first_bytes_are_no_ones_rounding(run: Path) -> None:
    masters = {name: torch.randn(1 << 23) for name in ("ma", "mb", "mc")}
    weights = {name.replace("m", "w"): master.bfloat16() for name, master in masters.items()}
    weights["wa"].add_(1)
    declared = {"model/w*": "optimizer/m*"}
    with laststep.Checkpointer(
        run, model=weights, optimizer=masters, options=laststep.Options(derived=declared)
    ) as ckpt:
        report = ckpt.save(1).result()
    assert report.written_bytes is not None
    assert report.written_bytes < 0.8 * report.size_bytes
    assert [coding.mode for coding in report.coding] == ["derived"]


def test_of_small_masters_in_another_order_only_what_is_needed_is_read(run: Path) -> None:
    names = [f"w{number}" for number in range(1000)]
    model = {name: torch.randn(2048).bfloat16() for name in names}
    shuffled = [names[number * 389 % len(names)] for number in range(len(names))]
    masters = {name: {"exp_avg": torch.randn(6144), "m": model[name].float()} for name in shuffled}
    declared = {"model/*": "optimizer/*/m"}
    with laststep.Checkpointer(
        run, model=model, optimizer=masters, options=laststep.Options(derived=declared)
    ) as ckpt:
        ckpt.save(1).result()
    wanted = {name: weight.clone() for name, weight in model.items()}
    for weight in model.values():
        weight.zero_()
    with laststep.Checkpointer(run, model=model) as ckpt:
        before = read_so_far()
        ckpt.restore(only=["model"])
        read = read_so_far() - before
    assert all(same_bits(model[name], weight) for name, weight in wanted.items())
    assert read < 8 * 4096 * len(names)  # masters, the index; a block for each would be 1,000 MiB


def read_so_far() -> int:
    """Bytes that this process has read, of whatever."""
    return int(Path("/proc/self/io").read_text().split()[1])
