"""A checkpoint of real ranks from outside: the command line, `open` and `load`."""

from __future__ import annotations

import contextlib
import io
import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

import laststep
from expect import names, raises
from laststep import cli

if TYPE_CHECKING:
    from collections.abc import Iterator

    from crew import Crew

Saved = tuple[str, dict[str, torch.Tensor]]


@pytest.fixture(scope="module")
def saved(crew: Crew) -> Iterator[Saved]:
    """A run of two ranks, and the whole model and optimizer that they had."""
    with tempfile.TemporaryDirectory(prefix="laststep-ranks-") as folder:
        run = f"{folder}/run"
        crew("looking_tasks:save_all_kinds", 2, run=run)
        yield run, torch.load(f"{run}.pt")


def said(monkeypatch: pytest.MonkeyPatch, *words: str) -> str:
    """What a command prints."""
    monkeypatch.setattr(sys, "argv", ["laststep", *words])
    out = io.StringIO()
    with contextlib.redirect_stdout(out), pytest.raises(SystemExit) as end:
        cli.main()
    assert not end.value.code
    return out.getvalue()


def test_all_that_show_lists_can_be_read_by_its_name(
    saved: Saved, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, expected = saved
    document = json.loads(said(monkeypatch, "show", run, "--json"))
    assert document["ranks"] == 2
    assert any(len(one["parts"]) > 1 for one in document["tensors"])
    for rank in (0, 1):
        with laststep.open(run).latest().of_rank(rank) as checkpoint:
            mine = [one for one in document["tensors"] if one["rank"] in (None, rank)]
            tied = {"model/head.weight"}  # the same as another: it has no bytes of its own
            assert {one["name"] for one in mine} == set(checkpoint.tensors()) - tied
            for one in mine:
                found = checkpoint.tensor(one["name"])[...]
                assert list(found.shape) == one["shape"]
                item, _, name = one["name"].partition("/")
                if item == "model":
                    assert torch.equal(found, expected[name])
    assert "~6" not in said(monkeypatch, "show", run, "--all")


def test_a_tensor_that_another_rank_has_is_found_in_that_rank(saved: Saved) -> None:
    with laststep.open(saved[0]).latest() as checkpoint:
        with raises(laststep.NotFoundError, remedy="of_rank"):
            checkpoint.tensor("place/extra")
        assert checkpoint.of_rank(1).tensor("place/extra")[:].tolist() == [1, 1]


def test_verify_names_the_part_of_a_rank(saved: Saved, tmp_path: Path) -> None:
    [folder] = Path(saved[0]).glob("step-*")
    copy = tmp_path / "step-00000001.1-1"
    copy.mkdir()
    for file in folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    path = copy / "model-r00001.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    [damage] = laststep.open(tmp_path).latest().verify().damage
    assert damage.file == path.name
    touched = [name.partition("[") for name in damage.touches]
    known = laststep.open(tmp_path).latest().tensors()
    assert touched
    assert all(name in known for name, _, _ in touched)
    assert any(index and not index.startswith("0:") for _, _, index in touched)


def test_a_rank_of_a_job_as_large_loads_its_own(crew: Crew, saved: Saved) -> None:
    found = crew("looking_tasks:load_own", 2, run=saved[0], rank=None)
    assert found == [(10, 10, []), (11, 11, [])]


def test_any_rank_of_any_job_loads_whose_it_asks_for(crew: Crew, saved: Saved) -> None:
    for ranks in (1, 2, 3):
        found = crew("looking_tasks:load_own", ranks, run=saved[0], rank=1)
        assert found == [(11, 11, [])] * ranks


def test_a_rank_of_another_job_hears_whose_it_got(crew: Crew, saved: Saved) -> None:
    found = crew("looking_tasks:load_own", 3, run=saved[0], rank=None)
    for (position, dropped, heard), whose in zip(found, (0, 1, 0), strict=True):
        assert (position, dropped) == (10 + whose, 0)
        assert names(heard[0], "place, rng", "2 ranks", f"rank {whose}")
        assert len(heard) == 2
