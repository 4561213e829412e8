"""Commands on a run that somebody writes to: what goes meanwhile is said to have gone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from laststep.cli import holdings, places, verifying
from laststep.terms import MANIFEST_NAME

if TYPE_CHECKING:
    from collections.abc import Callable


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
    verify = verifying.verify_checkpoint

    def overtaken(store: object, folder: str, **more: object) -> object:
        if folder == victim:
            delete(three, victim)
        return verify(store, folder, **more)

    monkeypatch.setattr(verifying, "verify_checkpoint", overtaken)
    return victim


def test_verify_says_what_was_deleted_meanwhile_and_goes_on(
    three, gone_when_verified: str, laststep: Callable
) -> None:
    ended = laststep("verify", three.path)
    assert (ended.status, ended.err) == (0, "")
    first, second, third = ended.out.splitlines()
    assert first.startswith("step-00000100.1-1: sound")
    assert second == f"{gone_when_verified}: deleted meanwhile"
    assert third.startswith("step-00000300.1-3: sound")


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
    assert ended.err.startswith("laststep: there is no committed checkpoint at ")


def test_show_of_what_was_deleted_meanwhile_says_so(
    three, laststep: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve, read_file = places.resolve, holdings.open_file

    def gone_after(path: str, step: int | None) -> places.CheckpointPath:
        place = resolve(path, step)
        delete(three, place.folder)
        return place

    monkeypatch.setattr(places, "resolve", gone_after)
    ended = laststep("show", three.path, "--step", 100)
    assert (ended.status, ended.out) == (1, "")
    assert "the checkpoint was deleted meanwhile" in ended.err

    def gone_before(store: object, folder: str, *rest: object, **options: object) -> object:
        delete(three, folder)
        return read_file(store, folder, *rest, **options)

    monkeypatch.setattr(places, "resolve", resolve)
    monkeypatch.setattr(holdings, "open_file", gone_before)
    ended = laststep("show", three.path, "--step", 200)
    assert (ended.status, ended.out) == (1, "")
    assert "the checkpoint was deleted meanwhile" in ended.err


@pytest.mark.parametrize("alive", [True, False])
def test_ls_does_not_take_a_deletion_under_way_for_a_save(
    alive: bool, three, laststep: Callable
) -> None:
    lock = three.run.lock_epoch(1) if alive else None
    (three.path / "step-00000100.1-1" / MANIFEST_NAME).unlink()
    three.save(400, commit=False)
    out = laststep("ls", three.path).out
    assert "step 100 has no manifest: a checkpoint that is partly deleted, or one whose" in out
    assert f"step 400 {'is in progress' if alive else 'has no manifest: an unfinished save'}" in out
    if lock is not None:
        lock.close()
