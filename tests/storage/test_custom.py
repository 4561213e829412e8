"""A store that somebody registers is as good as any: it passes the suite and holds a whole run, and
all commands take its URL."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed.checkpoint as dcp
import typer
from typer.testing import CliRunner

import laststep
from laststep.catalog.retention import Keep, plan_prune
from laststep.catalog.run import Run
from laststep.cli import app
from laststep.dcp import Reader, Writer
from laststep.read.verify import verify_checkpoint
from laststep.settings import as_keywords
from laststep.storage import registry, shared_memory
from laststep.storage.directory import DirectoryStore
from laststep.storage.registry import open_store, register_store
from laststep.storage.store import Store
from laststep.testing.stores import StoreConformance
from waiting import PATIENCE_S

if TYPE_CHECKING:
    from pathlib import Path


SETTINGS = {"flush": "thread", "progress": False, "host_memory_bytes": 64 << 20}


class Bare(DirectoryStore):
    """Only what a store cannot do without, as somebody may write and register it."""

    has_marks = False
    file_names = Store.file_names
    folder_names = Store.folder_names
    free_bytes = Store.free_bytes
    link = Store.link
    locks_tell = Store.locks_tell
    marked = Store.marked

    def __init__(self, url: str) -> None:
        self._named = url
        super().__init__(url.partition(":/")[2])

    @property
    def url(self) -> str:
        return self._named


class TestBare(StoreConformance):
    def make_store(self, folder: Path) -> Store:
        return Bare(f"bare:/{folder}")


@pytest.fixture(params=["bare"])
def url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(registry, "_openers", dict(registry._openers))
    monkeypatch.setattr(shared_memory, "BASE", str(tmp_path))
    register_store("bare", Bare)
    return f"{request.param}:/{tmp_path}/run"


def state_at(step: int) -> dict[str, object]:
    return {"w": torch.full((5 << 18,), float(step)), "n": step}


def make_run(url: str, *steps: int, keep: Keep | None = None) -> None:
    model = torch.nn.Linear(3, 4)
    state = state_at(-1)
    with laststep.Checkpointer(
        url, model=model, state=state, keep=keep, **as_keywords(SETTINGS)
    ) as ckpt:
        ckpt.restore()
        for step in steps:
            state["w"].fill_(step)
            state["n"] = step
            torch.nn.init.constant_(model.weight, step)
            ckpt.save(step, metrics={"loss": float(step)}).wait(PATIENCE_S)


def test_a_run_in_it_is_saved_restored_and_retained(url: str) -> None:
    make_run(url, 1, 2, 3, 4, keep=Keep(last=2))
    assert laststep.open(url).steps() == [3, 4]
    model, state = torch.nn.Linear(3, 4), state_at(-1)
    with laststep.Checkpointer(url, model=model, state=state, **as_keywords(SETTINGS)) as ckpt:
        restored = ckpt.restore()
        assert (restored.step, restored.next_step) == (4, 5)
        assert state["n"] == 4
        assert torch.equal(state["w"], torch.full_like(state["w"], 4))
        assert torch.equal(model.weight, torch.full_like(model.weight, 4))
        assert ckpt.restore(3).step == 3
        assert state["n"] == 3
        ckpt.save(4).wait(PATIENCE_S)  # in place of the one that it was turned back from
    assert laststep.open(url).steps() == [3, 4]
    with laststep.Checkpointer(url, model=model, state=state, **as_keywords(SETTINGS)) as ckpt:
        assert ckpt.restore().step == 4
        assert state["n"] == 3


def test_a_run_in_it_is_looked_into_verified_and_pruned(url: str) -> None:
    make_run(url, 1, 2, 3)
    catalog = laststep.open(url)
    assert catalog.steps() == [1, 2, 3]
    assert torch.equal(catalog[2].tensor("state/w")[7:9], torch.full((2,), 2.0))
    assert laststep.load(url, step=1)["state"]["n"] == 1
    store = open_store(url)
    folders = [checkpoint.folder for checkpoint in catalog]
    assert not [one for one in folders if verify_checkpoint(store, one).damage]
    run = Run.open(store)
    assert plan_prune(run, Keep(last=1)).execute() == (folders[1], folders[0])
    assert laststep.open(url).steps() == [3]
    assert not run.clean()


def test_damage_in_it_is_found_and_passed_over(url: str, tmp_path: Path) -> None:
    make_run(url, 1, 2)
    store = open_store(url)
    folder = laststep.open(url).latest().folder
    name = next(name for name in store.file_names(folder) if name.startswith("state"))
    path = tmp_path / "run" / folder / name
    damaged = bytearray(path.read_bytes())
    damaged[1 << 20] ^= 1
    path.write_bytes(damaged)
    assert verify_checkpoint(store, folder).damage
    state = state_at(-1)
    with laststep.Checkpointer(url, state=state, **as_keywords(SETTINGS)) as ckpt:
        assert ckpt.restore(strict=False).step == 1
    assert state["n"] == 1


def test_nothing_is_shared_where_files_cannot_be_linked(url: str) -> None:
    with laststep.Checkpointer(url, state=state_at(0), **as_keywords(SETTINGS)) as ckpt:
        ckpt.restore()
        ckpt.save(1).wait(PATIENCE_S)
        ckpt.save(2).wait(PATIENCE_S)
    used = json.loads(CliRunner().invoke(app, ["du", url, "--json"]).output)
    assert used["apart_bytes"] == used["stored_bytes"]


LOCAL = {"version"}
"""Commands that are about no run."""


@pytest.mark.parametrize("url", ["bare", "shm"], indirect=True)
def test_every_command_takes_the_url_of_a_store(url: str, tmp_path: Path) -> None:
    make_run(url, 1, 2, 3)
    folder = laststep.open(url).latest().folder
    torch.save({"w": torch.ones(3)}, tmp_path / "w.pt")
    typed: set[str] = set()

    def said(*arguments: str) -> str:
        typed.add(arguments[0])
        ended = CliRunner().invoke(app, list(arguments))
        assert ended.exit_code == 0, ended.output
        return ended.output

    listed = json.loads(said("ls", url, "--json"))
    assert listed["run"] == url
    assert [one["step"] for one in listed["checkpoints"]] == [1, 2, 3]
    assert folder in said("show", f"{url}/{folder}")
    assert "state" in said("show", url, "--step", "2")
    used = json.loads(said("du", url, "--json"))
    assert used["run"] == url
    assert used["stored_bytes"] == used["apart_bytes"] > 3 * (5 << 20)
    assert said("verify", url).count(": ok") == 3
    assert ": ok" in said("verify", f"{url}/{folder}")
    said("copy", url, f"{url}-2")
    said("copy", url, str(tmp_path / "copy"), "--step", "2")
    said("copy", str(tmp_path / "copy"), f"{url}-3")
    assert laststep.open(f"{url}-2").steps() == [1, 2, 3]
    assert laststep.load(f"{url}-3")["state"]["n"] == 2
    said("pin", url, "1")
    said("prune", url, "--last", "1", "--yes")
    assert laststep.open(url).steps() == [1, 3]
    said("unpin", url, "1")
    said("rollback", url, "1", "--yes")
    said("rm", f"{url}-2", "3", "--yes")
    assert (laststep.open(url).steps(), laststep.open(f"{url}-2").steps()) == ([1], [1, 2])
    assert json.loads(said("recover", url, "--base", str(tmp_path), "--json"))["segments"] == []
    said("export", url, str(tmp_path / "out"), "--format", "hf")
    assert any((tmp_path / "out").iterdir())
    said("import", str(tmp_path / "w.pt"), f"{url}-4", "--step", "7")
    assert laststep.open(f"{url}-4").steps() == [7]
    assert typed == set(typer.main.get_command(app).commands) - LOCAL


@pytest.mark.filterwarnings("ignore::UserWarning:torch")
@pytest.mark.filterwarnings("ignore::FutureWarning:torch")
def test_what_dcp_writes_to_a_store_is_read_from_it(url: str) -> None:
    state = {"model": {"w": torch.arange(4.0)}}
    dcp.save(state, storage_writer=Writer(url, step=5), no_dist=True)
    assert laststep.open(url).steps() == [5]
    target = {"model": {"w": torch.zeros(4)}}
    dcp.load(target, storage_reader=Reader(url), no_dist=True)
    assert torch.equal(target["model"]["w"], state["model"]["w"])
