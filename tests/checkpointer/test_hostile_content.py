"""Content with valid digests that is not what its owner wrote: an error of ours, with the place."""

from __future__ import annotations

import random
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import laststep
from expect import raises
from laststep.errors import CorruptError, LaststepError, MismatchError
from laststep.settings import as_keywords

if TYPE_CHECKING:
    from collections.abc import Callable

# What changes checkpoints and puts their digests right again.
sys.path.insert(0, str(Path(__file__).parent.parent / "torture"))

import forging

Tree = Any
HOW = {"flush": "thread", "host_memory_bytes": 64 << 20, "progress": False}


class Extra(nn.Module):
    def get_extra_state(self) -> dict[str, int]:
        return {"n": 1}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.n = state["n"]


class Loader:
    def state_dict(self) -> dict[str, int]:
        return {"at": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"] + 1


def parts() -> dict[str, object]:
    model = nn.Sequential(nn.Linear(2, 3), Extra())
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(1))
    return {
        "model": model,
        "optimizer": optimizer,
        "loader": Loader(),
        "rng": laststep.RNG(),
        "schedule": torch.optim.lr_scheduler.StepLR(optimizer, 2),
        "scaler": scaler,
        "plain": {"a": [1, 2], "array": torch.arange(4).numpy()},
        "many": [1, 2],
        "group": {"inner": nn.Linear(1, 1), "n": 1},
    }


def put(*path: str | int) -> Callable[[object], Callable[[Tree], Tree]]:
    """`put("a", 0)(value)`: changes a tree at that place, classes and tuples looked through."""

    def to(value: object) -> Callable[[Tree], Tree]:
        def change(stored: Tree) -> Tree:
            *way, last = ("tree", *path)
            node = stored
            for key in way:
                node = _open(node)[key]
            _open(node)[last] = value
            return stored

        return change

    return to


def _open(node: Tree) -> Tree:
    while isinstance(node, dict) and "$" in node:
        node = node["value"][1] if node["$"] == "ext" else node["items"]
    return node


ROOT: tuple[object, ...] = (None, "text")
CASES: dict[str, tuple[str, Callable[[Tree], Tree]]] = {
    "python's generator": ("rng", put("python")([1, 2])),
    "python's numbers": ("rng", put("python", 1)({"$": "tuple", "items": [-1] * 625})),
    "numpy's generator": ("rng", put("numpy")("MT19937")),
    "numpy's generator, its position": ("rng", put("numpy", 2)(1 << 20)),
    "numpy's generator, before its keys": ("rng", put("numpy", 2)(-5)),
    "torch's generator": ("rng", put("torch", "cpu")(None)),
    "torch's generators": ("rng", put("torch")([])),
    "the groups of an optimizer": ("optimizer", put("groups")(3)),
    "a group of an optimizer": ("optimizer", put("groups")([5])),
    "a group without options": ("optimizer", put("groups")([{"params": {}}])),
    "parameters in a list": ("optimizer", put("groups", 0, "params")(["0.weight"])),
    "a parameter of no form": ("optimizer", put("groups", 0, "params")({"0.weight": 5})),
    "options that are none": ("optimizer", put("groups", 0, "options")([])),
    "a rate that is text": ("optimizer", put("groups", 0, "options", "lr")("fast")),
    "the state of an optimizer": ("optimizer", put("state")([])),
    "the state of a parameter": ("optimizer", put("state", "0.weight")([1, 2])),
    "a moment of another shape": (
        "optimizer",
        put("state", "0.weight", "exp_avg")({"$": "tensor", "name": "state/0.bias/exp_avg"}),
    ),
    "the state of DCP": ("optimizer", put()({"state": 5, "param_groups": 5})),
    "a loader's place": ("loader", put("at")("there")),
    "a loader without a place": ("loader", put()({})),
    "a schedule": ("schedule", put()({"$": "ext", "tag": "owned", "value": ["StepLR", 5]})),
    "a scaler's scale": ("scaler", put("scale")("large")),
    "extra state of a module": ("model", put("1._extra_state")([])),
    "a list for a dict": ("plain", put()([])),
    "a dict for a list": ("many", put()({})),
    "an array of text": (
        "plain",
        put("array")(
            {"$": "ext", "tag": "ndarray", "value": ["S99999999", {"$": "tensor", "name": "array"}]}
        ),
    ),
    "an owner of nothing": ("schedule", put()({"$": "ext", "tag": "owned", "value": 5})),
    "a value of no known kind": ("plain", put("a")({"$": "ext", "tag": "new", "value": 1})),
} | {f"{item} that is {root!r}": (item, put()(root)) for root in ROOT for item in parts()}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("sound") / "run"
    with laststep.Checkpointer(run, items=parts(), **as_keywords(HOW)) as checkpointer:
        checkpointer.save(0).wait()
    return run


@pytest.fixture
def forged(sound: Path, tmp_path: Path) -> Callable[[str, Callable[[Tree], Tree]], Path]:
    """`forged(item, change)`: a copy of the run in which the tree of an item is another."""

    def make(item: str, change: Callable[[Tree], Tree]) -> Path:
        run = tmp_path / "run"
        shutil.copytree(sound, run)
        (folder,) = run.glob("step-*")
        forging.change_tree(folder, item, change)
        return run

    return make


@pytest.mark.parametrize("case", CASES)
def test_a_restore_says_what_does_not_fit_and_where(
    case: str, forged: Callable[[str, Callable[[Tree], Tree]], Path]
) -> None:
    item, change = CASES[case]
    run = forged(item, change)
    for strict in (True, False):
        with laststep.Checkpointer(run, items=parts(), **as_keywords(HOW)) as checkpointer:
            error = raised(lambda: checkpointer.restore(strict=strict))  # noqa: B023 (called here)
        if strict:
            assert isinstance(error, CorruptError | MismatchError)
        assert error is None or item in str(error)
    error = raised(lambda: laststep.load(run))
    assert error is None or (isinstance(error, CorruptError) and item in str(error))


def raised(act: Callable[[], object]) -> LaststepError | None:
    """The error of ours that comes out, if any; another one is not caught."""
    try:
        act()
    except LaststepError as error:
        return error
    return None


def test_what_lies_is_named_in_the_error(forged: Callable[..., Path]) -> None:
    run = forged("rng", put("numpy", 2)(1 << 20))
    with (
        laststep.Checkpointer(run, items=parts(), **as_keywords(HOW)) as checkpointer,
        raises(MismatchError, where="item 'rng'", found="1048576", remedy=True),
    ):
        checkpointer.restore()


def test_generators_stay_as_they_are_when_one_of_them_is_not_sound(
    forged: Callable[..., Path],
) -> None:
    run = forged("rng", put("numpy", 2)(1 << 20))
    before = random.getstate()
    with (
        laststep.Checkpointer(run, items=parts(), **as_keywords(HOW)) as checkpointer,
        pytest.raises(MismatchError),
    ):
        checkpointer.restore()
    assert random.getstate() == before


def test_a_view_of_more_elements_than_torch_counts_is_damage(tmp_path: Path) -> None:
    base = torch.arange(4.0)
    laststep.save({"a": base[1:], "b": base[:3]}, tmp_path / "one")

    def change(stored: Tree) -> Tree:
        _open(stored["views"]["a"])[2] = {"$": "tuple", "items": [1 << 40, 1 << 40]}
        _open(stored["views"]["a"])[3] = {"$": "tuple", "items": [0, 0]}
        return stored

    forging.change_tree(tmp_path / "one", "state", change)
    with raises(CorruptError, where="one", found="View("):
        laststep.load(tmp_path / "one")


def test_an_item_that_cannot_be_written_is_not_said_to_be_restored(tmp_path: Path) -> None:
    array = torch.arange(3).numpy()
    with laststep.Checkpointer(tmp_path / "run", array=array, **as_keywords(HOW)) as checkpointer:
        checkpointer.save(0).wait()
        array.flags.writeable = False
        with raises(MismatchError, where="item 'array'"):
            checkpointer.restore()
