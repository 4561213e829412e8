"""`export --format dcp`: what torch.distributed.checkpoint loads, equal to what was saved."""

from __future__ import annotations

import json
import sys
from collections import Counter, OrderedDict
from fractions import Fraction
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from dcp_rounds import ALONE, same, trained, untrained
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import laststep
from laststep import cli
from laststep.adapters.export import folder as export_folder

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = ALONE


@pytest.fixture
def export(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Run `laststep export --format dcp`: its status, what it printed, and its errors."""

    def run(*arguments: object) -> tuple[int, str, str]:
        words = ["laststep", "export", *map(str, arguments), "--format", "dcp"]
        monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as end:
            cli.main()
        out, err = capsys.readouterr()
        return int(end.value.code or 0), out, err

    return run


def save(run: Path, *, allow_pickle: bool = False, **items: object) -> None:
    with laststep.Checkpointer(
        run,
        items=items,
        options=laststep.Options(flush="thread", progress=False),
        allow_pickle=allow_pickle,
    ) as ckpt:
        ckpt.save(0).wait()


PLAIN = {"term": 3, "name": "gpt", "seen": [1, 2, 3], "nested": {"lr": 0.1, "none": None}}


@pytest.mark.parametrize("piece_bytes", [500, 1 << 20])
def test_a_module_and_its_optimizer_go_on_in_dcp(
    piece_bytes: int,
    export: Callable,
    run_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(export_folder, "PIECE_BYTES", piece_bytes)
    model, optimizer = trained()
    save(run_folder, model=model, optimizer=optimizer, rest=dict(PLAIN))
    status, out, err = export(run_folder, tmp_path / "dcp")
    assert (status, err) == (0, "")
    assert "model, optimizer, rest of step 0" in out
    names = sorted(file.name for file in (tmp_path / "dcp").iterdir())
    assert names == [".metadata", "__0_0.distcp", "__0_1.distcp", "__0_2.distcp"]

    expected = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    expected = {**expected, "rest": PLAIN}
    fresh, other = untrained()
    state = dict(zip(("model", "optimizer"), get_state_dict(fresh, other), strict=True))
    state["rest"] = {"term": 0, "name": "", "seen": [], "nested": {"lr": 0.0, "none": 1}}
    dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert same(state, expected)
    set_state_dict(
        fresh, other, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    assert same(dict(fresh.state_dict()), dict(model.state_dict()))
    assert same(other.state_dict(), optimizer.state_dict())

    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "whole.pt")
    assert same(torch.load(tmp_path / "whole.pt", weights_only=False), expected)


def test_what_dcp_itself_would_make_of_a_state(
    export: Callable, run_folder: Path, tmp_path: Path
) -> None:
    shared = torch.arange(24.0).reshape(4, 6)
    state = {
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 3),
        "no_columns": torch.zeros(3, 0),
        "bf16": torch.randn(5).bfloat16(),
        "z": torch.ones(2, dtype=torch.complex128),
        "e4m3": torch.randn(4).to(torch.float8_e4m3fnuz).float(),
        "whole": shared,
        "rows": shared[1:3],
        "tied": shared,
        "list": [torch.ones(2), {"deep": torch.zeros(3), "word": "x"}, 5],
        "tuple": (torch.ones(2), 1),
        "words": ["a", "b"],
        "array": np.arange(5),
        "number": np.float32(2.5),
        "ordered": OrderedDict(a=1, b=torch.ones(1)),
        "counter": Counter("aab"),
        "set": {1, 2},
        "dtype": torch.bfloat16,
        "size": torch.Size([1, 2]),
        "bytes": b"x" * 10_000,
        "int_keys": {1: torch.ones(1), 2: "two"},
        "none": None,
    }
    save(run_folder, state=state)
    dcp.save({"state": state}, checkpoint_id=tmp_path / "theirs", no_dist=True)
    _, out, _ = export(run_folder, tmp_path / "ours", "--json")
    document = json.loads(out)
    loaded = []
    for name in ("ours", "theirs"):
        dcp_to_torch_save(tmp_path / name, tmp_path / f"{name}.pt")
        loaded.append(torch.load(tmp_path / f"{name}.pt", weights_only=False))
    assert same(*loaded)
    metadata = [dcp.FileSystemReader(tmp_path / n).read_metadata() for n in ("ours", "theirs")]
    assert metadata[0].state_dict_metadata == metadata[1].state_dict_metadata
    assert metadata[0].planner_data == metadata[1].planner_data
    assert metadata[0].version == metadata[1].version
    entries = metadata[0].state_dict_metadata
    assert document["tensors"] + document["values"] == len(entries)


def test_tied_tensors_are_stored_once(export: Callable, run_folder: Path, tmp_path: Path) -> None:
    weight = torch.randn(1000, 100)
    save(run_folder, model={"a": weight, "b": weight})
    export(run_folder, tmp_path / "dcp")
    assert (tmp_path / "dcp" / "__0_0.distcp").stat().st_size < 1.1 * weight.nbytes
    state = {"model": {"a": torch.zeros(1000, 100), "b": torch.zeros(1000, 100)}}
    dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert same(state, {"model": {"a": weight, "b": weight}})


def test_one_item_may_be_chosen(export: Callable, run_folder: Path, tmp_path: Path) -> None:
    save(run_folder, model={"a": torch.ones(2)}, rest={"b": 1})
    export(run_folder, tmp_path / "dcp", "--item", "rest")
    state = {"rest": {"b": 0}}
    dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert state == {"rest": {"b": 1}}
    status, _, err = export(run_folder, tmp_path / "other", "--item", "nothing")
    assert status == 1
    assert "'nothing'" in err
    assert not (tmp_path / "other").exists()


class Pair(NamedTuple):
    one: int
    two: int


def test_what_dcp_cannot_hold_is_told(export: Callable, run_folder: Path, tmp_path: Path) -> None:
    state = {"a": {"b": torch.ones(1)}, "a.b": torch.ones(2)}
    save(run_folder / "names", state=state)
    save(run_folder / "code", state={"pair": {"code": Fraction()}}, allow_pickle=True)
    status, _, err = export(run_folder / "names", tmp_path / "dcp")
    assert status == 2
    assert all(name in err for name in ("'state.a.b'", "('state', 'a', 'b')", "('state', 'a.b')"))
    status, _, err = export(run_folder / "code", tmp_path / "dcp")
    assert status == 2
    assert "state.pair.code" in err
    save(run_folder / "pair", state={"pair": (Pair(1, 2),)})
    status, _, err = export(run_folder / "pair", tmp_path / "dcp")
    assert status == 2
    assert "state.pair" in err
    status, _, err = export(run_folder / "code", tmp_path / "dcp", "--dtype", "bf16")
    assert status == 2
    assert "--dtype" in err
    assert not list(tmp_path.iterdir())
