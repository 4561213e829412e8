"""Looking at a run beside somebody who deletes: what goes meanwhile is gone, never damaged."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from expect import raises
from laststep.catalog.retention import Keep, plan_prune
from laststep.catalog.run import Run
from laststep.constants import MANIFEST_NAME
from laststep.errors import CorruptError, NotFoundError
from laststep.read.content import Content
from laststep.read.verify import verify_checkpoint
from laststep.storage.directory import DirectoryStore

if TYPE_CHECKING:
    from pathlib import Path

    from laststep.catalog.attempt import AttemptName
    from laststep.storage.files import FileReader
    from laststep.storage.store import StoreEntry

Saved = Callable[..., list[str]]


class Overtaken(DirectoryStore):
    """A store in which somebody deletes a folder right before, or in, a call that looks at it."""

    def __init__(self, path: Path, *, victim: str, at: str) -> None:
        super().__init__(path)
        self._victim = victim
        self._at = at

    def _delete(self) -> None:
        self._at = ""
        self.delete_folder(self._victim, first=MANIFEST_NAME)

    def list(self, folder: str) -> list[StoreEntry]:
        if folder == self._victim and self._at == "list":
            self._delete()
        entries = super().list(folder)
        if folder == self._victim and self._at == "within list":
            self._delete()
            # What had been looked at before it went is there; what came after it is not.
            return [entry for entry in entries if entry.name == MANIFEST_NAME]
        return entries

    def file_names(self, folder: str) -> tuple[str, ...]:
        if folder == self._victim and self._at == "names":
            self._delete()
        return super().file_names(folder)

    def read(self, name: str, *, limit_bytes: int) -> bytes:
        if name.startswith(self._victim) and self._at == "read":
            self._delete()
        return super().read(name, limit_bytes=limit_bytes)

    def open_reader(self, name: str, *, cached: bool = False) -> FileReader:
        if name == f"{self._victim}/m.safetensors" and self._at == "open":
            self._delete()
        return super().open_reader(name, cached=cached)


@pytest.fixture
def folders(saved: Saved) -> list[str]:
    return saved(1, 2, 3)


@pytest.mark.parametrize(
    ("look", "at"),
    [
        (Run.checkpoints, "list"),
        (Run.checkpoints, "within list"),
        (Run.checkpoints, "read"),
        (Run.attempts, "names"),
    ],
)
def test_a_checkpoint_that_goes_while_it_is_looked_at_is_not_listed(
    look: Callable[[Run], tuple[AttemptName, ...]], at: str, folders: list[str], tmp_path: Path
) -> None:
    victim = folders.pop(0)
    run = Run.open(Overtaken(tmp_path / "run", victim=victim, at=at))
    found = look(run)
    assert victim not in [item.folder for item in found]
    assert not (tmp_path / "run" / victim).exists()
    assert [item.folder for item in run.checkpoints()] == folders
    assert all(item.is_whole for item in run.checkpoints())


def test_one_look_shows_a_save_either_as_an_attempt_or_as_a_checkpoint(
    run: Run, folders: list[str]
) -> None:
    attempt = run.begin(step=9, term=1, attempt=4).folder
    checkpoints, attempts = run.look()
    assert [item.folder for item in checkpoints] == folders
    assert [item.folder for item in attempts] == [attempt]


def test_to_verify_what_goes_meanwhile_is_not_found_and_no_damage(
    folders: list[str], tmp_path: Path
) -> None:
    store = Overtaken(tmp_path / "run", victim=folders[0], at="open")
    with raises(NotFoundError, where=folders[0], missing=MANIFEST_NAME):
        verify_checkpoint(store, folders[0])
    with pytest.raises(NotFoundError):
        verify_checkpoint(store, folders[0])


def test_to_open_what_goes_meanwhile_is_not_found_and_not_corrupt(
    run: Run, folders: list[str], tmp_path: Path
) -> None:
    commits = [item.commit for item in run.checkpoints()]
    store = Overtaken(tmp_path / "run", victim=folders[0], at="open")
    with raises(NotFoundError, where=folders[0], missing=MANIFEST_NAME):
        Content(store, folders[0], commits[0]).open_files([0])
    (tmp_path / "run" / folders[1] / "m.safetensors").unlink()
    with raises(CorruptError, where=f"{folders[1]}/m.safetensors", remedy="restore()"):
        Content(store, folders[1], commits[1]).open_files([0])


def test_beside_a_pruner_nothing_is_ever_shown_as_damaged(
    run: Run, saved: Saved, tmp_path: Path
) -> None:
    saved(*range(1, 31))
    stop = threading.Event()
    wrong: list[str] = []

    def look() -> None:
        store = DirectoryStore(tmp_path / "run")
        while not stop.is_set():
            items = Run.open(store).checkpoints()
            wrong.extend(item.folder for item in items if not item.is_whole)

    thread = threading.Thread(target=look)
    thread.start()
    plan_prune(run, Keep(last=1)).execute()
    stop.set()
    thread.join()
    assert wrong == []


def test_a_writer_need_not_delete_what_somebody_else_has_deleted(run: Run) -> None:
    attempt = run.begin(step=1, term=run.claim_term(None), attempt=1)
    run.store.delete_folder(attempt.folder)
    assert not attempt.abort("it failed")
    assert attempt.folder not in run.store.folder_names("")
