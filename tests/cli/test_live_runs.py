"""Commands on a run that somebody writes to: what goes meanwhile is said to have gone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

import laststep as library
from expect import names
from laststep.browse import Catalog
from laststep.catalog.run import Run
from laststep.cli import listing, places, showing
from laststep.constants import MANIFEST_NAME
from laststep.storage.directory import DirectoryStore
from waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture
def three(maker):
    """Steps 100, 200 and 300."""
    for step in (100, 200, 300):
        maker.save(step, {"loss": 1.0})
    return maker


def delete(maker, folder: str) -> None:
    maker.run.store.delete_folder(folder, first=MANIFEST_NAME)


@pytest.fixture
def gone_when_verified(three, monkeypatch: pytest.MonkeyPatch) -> str:
    """A folder that retention takes when its turn comes."""
    victim = "step-00000200.1-2"
    verify = listing.verify_checkpoint

    def overtaken(store: object, folder: str, **more: object) -> object:
        if folder == victim:
            delete(three, victim)
        return verify(store, folder, **more)

    monkeypatch.setattr(listing, "verify_checkpoint", overtaken)
    return victim


def test_verify_says_what_was_deleted_meanwhile_and_goes_on(
    three, gone_when_verified: str, laststep: Callable
) -> None:
    ended = laststep("verify", three.path)
    assert (ended.status, ended.err) == (0, "")
    first, second, third, total = ended.out.splitlines()
    assert total == "2 checkpoints ok"
    assert first.startswith("step-00000100.1-1: ok")
    assert second.startswith(f"{gone_when_verified}: ")
    assert third.startswith("step-00000300.1-3: ok")


def test_what_was_deleted_meanwhile_is_no_damage_but_hides_none(
    three, gone_when_verified: str, laststep: Callable
) -> None:
    file = three.path / "step-00000300.1-3" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    ended = laststep("verify", three.path, "--json")
    assert ended.status == 3
    document = ended.json()
    keys = {"sound", "checkpoints", "deleted_meanwhile", "no_manifest", "run_error"}
    assert document.keys() == keys
    assert [entry["step"] for entry in document["checkpoints"]] == [100, 300]
    assert document["deleted_meanwhile"] == [gone_when_verified]
    assert document["sound"] is False


def test_one_that_was_named_and_went_was_not_verified(
    three, gone_when_verified: str, laststep: Callable
) -> None:
    ended = laststep("verify", three.path, "--step", 200)
    assert (ended.status, ended.out) == (1, "")
    assert names(ended.err, "laststep: ", three.path / gone_when_verified)


def test_show_of_what_was_deleted_meanwhile_says_so(
    three, laststep: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve, read_file = places.resolve, showing.read_index

    def gone_after(path: str, step: int | None) -> places.CheckpointPath:
        place = resolve(path, step)
        delete(three, place.folder)
        return place

    monkeypatch.setattr(places, "resolve", gone_after)
    ended = laststep("show", three.path, "--step", 100)
    assert (ended.status, ended.out) == (1, "")
    assert "step-00000100.1-1" in ended.err

    def gone_before(store: object, folder: str, *rest: object, **options: object) -> object:
        delete(three, folder)
        return read_file(store, folder, *rest, **options)

    monkeypatch.setattr(places, "resolve", resolve)
    monkeypatch.setattr(showing, "read_index", gone_before)
    ended = laststep("show", three.path, "--step", 200)
    assert (ended.status, ended.out) == (1, "")
    assert "step-00000200.1-2" in ended.err


@pytest.mark.parametrize("alive", [True, False])
def test_ls_does_not_take_a_deletion_under_way_for_a_save(
    alive: bool, three, laststep: Callable
) -> None:
    lock = three.run.lock_term(1) if alive else None
    (three.path / "step-00000100.1-1" / MANIFEST_NAME).unlink()
    three.save(400, commit=False)
    out = laststep("ls", three.path).out
    assert names(out, "step 100")
    assert names(out, "step 400")
    assert ("in progress" in out) == alive
    if lock is not None:
        lock.close()


def when_opened(
    victim: str, replace: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Call `replace` when the data of a checkpoint are first opened."""
    open_reader = DirectoryStore.open_reader

    def open_late(store: DirectoryStore, name: str, **options: object) -> object:
        if name.startswith(victim) and name.endswith(".safetensors"):
            monkeypatch.setattr(DirectoryStore, "open_reader", open_reader)
            replace()
        return open_reader(store, name, **options)

    monkeypatch.setattr(DirectoryStore, "open_reader", open_late)


def replace_when_opened(maker, victim: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def replace() -> None:
        maker.save(200)
        delete(maker, victim)

    when_opened(victim, replace, monkeypatch)


@pytest.fixture
def live(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A run whose writer keeps one checkpoint, and replaces step 100 when that is opened."""
    state = {"weight": torch.ones(4)}
    keep = library.Keep(last=1)
    with library.Checkpointer(
        tmp_path / "live", model=state, keep=keep, options=library.Options(flush="thread")
    ) as ckpt:
        ckpt.save(100).wait()
        victim = tmp_path / "live" / "step-00000100.1-1"

        def replace() -> None:
            state["weight"].fill_(2)
            ckpt.save(200)
            wait_until(lambda: not victim.exists())

        when_opened(victim.name, replace, monkeypatch)
        yield tmp_path / "live"


@pytest.fixture
def replaced(maker, monkeypatch: pytest.MonkeyPatch):
    """A run whose only checkpoint, step 100, is replaced by step 200 when it is opened."""
    maker.save(100)
    replace_when_opened(maker, "step-00000100.1-1", monkeypatch)
    return maker


def test_load_reads_the_checkpoint_that_replaced_the_newest(live: Path) -> None:
    assert torch.equal(library.load(live)["model"]["weight"], torch.full((4,), 2.0))


def test_export_reads_the_checkpoint_that_replaced_the_newest(
    live: Path, laststep: Callable, tmp_path: Path
) -> None:
    ended = laststep("export", live, tmp_path / "hf", "--format", "hf", "--json")
    assert (ended.status, ended.json()["step"]) == (0, 200)


def test_copy_brings_the_checkpoint_that_replaced_another(
    replaced, laststep: Callable, tmp_path: Path
) -> None:
    ended = laststep("copy", replaced.path, tmp_path / "copy", "--json")
    assert ended.status == 0
    assert ended.json()["copied"] == ["step-00000200.1-2"]
    assert library.open(tmp_path / "copy").steps() == [200]


def test_verify_checks_the_checkpoint_that_replaced_the_newest(
    replaced, laststep: Callable
) -> None:
    ended = laststep("verify", replaced.path, "--json")
    document = ended.json()
    assert ended.status == 0
    assert [entry["step"] for entry in document["checkpoints"]] == [200]
    assert document["deleted_meanwhile"] == ["step-00000100.1-1"]


def test_prune_checks_the_checkpoint_that_replaced_the_newest(
    maker, laststep: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    maker.save(50)
    maker.save(100)
    replace_when_opened(maker, "step-00000100.1-2", monkeypatch)
    ended = laststep("prune", maker.path, "--last", 1, "--yes", "--json")
    assert (ended.status, ended.json()["deleted"]) == (0, ["step-00000050.1-1"])
    assert library.open(maker.path).steps() == [200]


@pytest.mark.parametrize(
    "command", [("verify",), ("copy", "COPY"), ("export", "HF", "--format", "hf")]
)
def test_a_named_step_that_is_deleted_meanwhile_is_an_error(
    command: tuple[str, ...], replaced, laststep: Callable, tmp_path: Path
) -> None:
    name, *rest = command
    rest = [str(tmp_path / word) if word.isupper() else word for word in rest]
    assert laststep(name, replaced.path, *rest, "--step", 100).status == 1


def test_load_of_a_named_step_that_is_deleted_meanwhile_is_an_error(live: Path) -> None:
    with pytest.raises(library.NotFoundError):
        library.load(live, step=100)


@pytest.mark.parametrize("kept", [(), (50,)], ids=["alone", "beside_an_older_one"])
@pytest.mark.parametrize("look", ["latest", "newest"])
def test_a_commit_during_a_listing_is_listed(
    look: str, kept: tuple[int, ...], maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (*kept, 100):
        victim = maker.save(step).name
    list_folder = DirectoryStore.list

    def list_early(store: DirectoryStore, folder: str) -> object:
        entries = list_folder(store, folder)
        if folder == "":
            monkeypatch.setattr(DirectoryStore, "list", list_folder)
            maker.save(200)
            delete(maker, victim)
        return entries

    run = Run.open(DirectoryStore(maker.path))
    monkeypatch.setattr(DirectoryStore, "list", list_early)
    found = Catalog(run).latest() if look == "latest" else run.newest()
    assert found is not None
    assert found.step == 200
