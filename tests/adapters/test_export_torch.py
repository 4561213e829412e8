"""`export --format torch`: one file that `torch.load` reads by default."""

from __future__ import annotations

import contextlib
import errno
import io
import sys
from collections import OrderedDict, deque
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from torch import nn

import laststep
from expect import names
from laststep import cli
from laststep.adapters.export import torch_file

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(numbers))


def trained(seed: int, steps: int = 3) -> tuple[Tied, torch.optim.Optimizer, object]:
    torch.manual_seed(seed)
    model = Tied()
    optimizer = torch.optim.AdamW(
        [{"params": model.parameters(), "lr": 0.1 + seed}], weight_decay=0.01
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for _ in range(steps):
        model(torch.randint(5, (3,))).square().mean().backward()
        optimizer.step()
        scheduler.step()
    return model, optimizer, scheduler


VALUES = {
    "array": np.arange(6, dtype=np.int16).reshape(2, 3),
    "scalar": np.float32(0.5),
    "tuple": (1, "a", None, 2.5, b"bytes"),
    "ordered": OrderedDict(b=1, a=[True]),
    "deque": deque([1, 2], maxlen=4),
    "set": {1, 2},
    "bf16": torch.ones(3, dtype=torch.bfloat16),
    "empty": torch.empty(0, 3),
    "number": np.array(2.5),
    "big": np.arange(3, dtype=">i4"),
}


@pytest.fixture
def saved(run_folder: Path) -> Path:
    model, optimizer, scheduler = trained(1)
    options = laststep.Options(flush="thread", progress=False)
    with laststep.Checkpointer(
        run_folder,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        values=dict(VALUES),
        rng=laststep.RNG(),
        options=options,
    ) as ckpt:
        ckpt.save(7)
    return run_folder


@pytest.fixture
def export(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    def run(*arguments: object) -> tuple[int, str, str]:
        words = ["laststep", "export", *map(str, arguments), "--format", "torch"]
        monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as end:
            cli.main()
        out, err = capsys.readouterr()
        return int(end.value.code or 0), out, err

    return run


def take_over(state: dict[str, object]) -> None:
    """Load a state into other objects, and compare the next steps with those of the saved ones."""
    theirs, ours = trained(1), trained(2, steps=1)
    for name, one in zip(("model", "optimizer", "scheduler"), ours, strict=True):
        one.load_state_dict(state[name])
    for model, optimizer, scheduler in (theirs, ours):
        torch.manual_seed(5)
        optimizer.zero_grad()
        model(torch.randint(5, (3,))).square().mean().backward()
        optimizer.step()
        scheduler.step()
    assert torch.equal(theirs[0].head.weight, ours[0].head.weight)
    assert theirs[1].param_groups[0]["lr"] == ours[1].param_groups[0]["lr"]


def test_torch_loads_all_items_and_training_continues(
    saved: Path, export: Callable, tmp_path: Path
) -> None:
    status, out, err = export(saved, tmp_path / "all.pt")
    assert (status, err) == (0, "")
    assert names(out, "all.pt", "model, optimizer, scheduler, values, rng of step 7")
    state = torch.load(tmp_path / "all.pt")
    assert sorted(state["model"]) == ["embedding.weight", "head.weight"]
    assert state["model"]["embedding.weight"] is state["model"]["head.weight"]
    take_over(state)
    values = state["values"]
    assert values["array"].tolist() == VALUES["array"].tolist()
    assert values["array"].dtype is torch.int16
    assert values["deque"] == [1, 2]
    for name in ("scalar", "tuple", "ordered", "set"):
        assert values[name] == VALUES[name]
    assert torch.equal(values["bf16"], VALUES["bf16"])
    assert values["empty"].shape == (0, 3)
    assert (values["number"].shape, values["number"].item()) == ((), 2.5)
    assert values["big"].tolist() == [0, 1, 2]
    torch.set_rng_state(state["rng"]["torch"]["cpu"])
    np.random.set_state(state["rng"]["numpy"])  # noqa: NPY002


def test_one_item_is_the_file(saved: Path, export: Callable, tmp_path: Path) -> None:
    assert export(saved, tmp_path / "model.pt", "--item", "model")[0] == 0
    model = Tied()
    model.load_state_dict(torch.load(tmp_path / "model.pt"))
    assert model.head.weight is model.embedding.weight


def test_load_gives_what_load_state_dict_takes(saved: Path) -> None:
    take_over(laststep.load(saved))


def test_an_existing_file_stays(saved: Path, export: Callable, tmp_path: Path) -> None:
    (tmp_path / "all.pt").write_text("mine")
    status, _, err = export(saved, tmp_path / "all.pt")
    assert (status, "all.pt" in err) == (1, True)
    assert (tmp_path / "all.pt").read_text() == "mine"


def test_a_full_disk_leaves_nothing_behind(
    saved: Path, export: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(io.BytesIO):
        def write(self, data: bytes) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(torch_file, "new_file", lambda _: contextlib.nullcontext(Full()))
    status, _, err = export(saved, tmp_path / "new" / "all.pt")
    assert (status, "all.pt" in err, "No space left" in err) == (1, True, True)
    assert not (tmp_path / "new").exists()


def test_a_pickled_object_is_refused(run_folder: Path, export: Callable, tmp_path: Path) -> None:
    options = laststep.Options(flush="thread", progress=False)
    with laststep.Checkpointer(
        run_folder, values={"x": 1 + 2j, "y": complex}, allow_pickle=True, options=options
    ) as ckpt:
        ckpt.save(0)
    status, _, err = export(run_folder, tmp_path / "all.pt")
    assert (status, "values" in err, (tmp_path / "all.pt").exists()) == (2, True, False)


@pytest.mark.parametrize("value", [np.datetime64("2026-01-01"), np.array(["text"])], ids=str)
def test_what_torch_cannot_load_is_refused_by_the_item(
    value: object, run_folder: Path, export: Callable, tmp_path: Path
) -> None:
    options = laststep.Options(flush="thread", progress=False)
    with laststep.Checkpointer(
        run_folder, values={"x": value}, allow_pickle=True, options=options
    ) as ckpt:
        ckpt.save(0)
    status, _, err = export(run_folder, tmp_path / "all.pt")
    assert (status, "values" in err, (tmp_path / "all.pt").exists()) == (2, True, False)


def test_a_target_that_cannot_be_is_an_error_of_one_line(
    saved: Path, export: Callable, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    status, _, err = export(saved, tmp_path / "file" / "all.pt")
    assert (status, err.count("\n")) == (1, 1)
