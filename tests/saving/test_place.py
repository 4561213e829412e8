"""What is said of a run's folder at construction: new, suspicious, or of no use."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

import pytest
import torch

import laststep
from expect import names, raises

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


def make(run: object) -> laststep.Checkpointer:
    return laststep.Checkpointer(
        run,
        s={"a": 1},
        options=laststep.Options(flush="thread", progress=False),
        host_memory_bytes=64 << 20,
    )


def said(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == level]


@pytest.fixture(autouse=True)
def all_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="laststep")


@pytest.mark.parametrize("exists", [False, True])
def test_a_new_run_says_so_and_makes_nothing(
    exists: bool, run_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if exists:
        run_folder.mkdir()
    with make(run_folder) as checkpointer:
        assert [str(run_folder) in text for text in said(caplog, logging.INFO)] == [True]
        assert not said(caplog, logging.WARNING)
        assert run_folder.exists() == exists
        checkpointer.save(0).wait()
    caplog.clear()
    with make(run_folder):
        assert not said(caplog, logging.INFO)
    assert not said(caplog, logging.WARNING)


def test_a_folder_of_something_else_is_suspicious(
    run_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_folder.mkdir()
    for name in ("a.txt", "b.txt", "c.txt", "d.txt"):
        (run_folder / name).touch()
    with make(run_folder) as checkpointer:
        (warning,) = said(caplog, logging.WARNING)
        assert str(run_folder) in warning
        assert "a.txt, b.txt, c.txt" in warning
        checkpointer.save(0).wait()
    caplog.clear()
    with make(run_folder):
        assert not said(caplog, logging.WARNING)


def test_the_folder_above_a_run_is_answered_with_the_run(
    run_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with make(run_folder) as checkpointer:
        checkpointer.save(0).wait()
    with make(run_folder.parent):
        (warning,) = said(caplog, logging.WARNING)
        assert str(run_folder) in warning
    with pytest.raises(laststep.NotFoundError) as caught:
        laststep.load(run_folder.parent)
    assert str(run_folder) in caught.value.remedy


def test_a_one_off_save_announces_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    laststep.save({"a": 1}, tmp_path / "one")
    assert not [record for record in caplog.records if record.module == "place"]


def in_place_of_the_run(folder: Path) -> Path:
    (folder / "run").write_text("a file")
    return folder / "run"


def above_the_run(folder: Path) -> Path:
    (folder / "file").write_text("a file")
    return folder / "file" / "deeper" / "run"


def name_too_long(folder: Path) -> Path:
    return folder / ("x" * 300)


def path_too_long(folder: Path) -> Path:
    return folder.joinpath(*["x" * 200] * 30)


def link_to_nowhere(folder: Path) -> Path:
    (folder / "run").symlink_to(folder / "gone")
    return folder / "run"


USELESS = {
    in_place_of_the_run: "run",
    above_the_run: "/file",
    name_too_long: "File name too long",
    path_too_long: "File name too long",
    link_to_nowhere: "a link to nothing",
}


@pytest.mark.parametrize("spoil", USELESS)
def test_a_path_of_no_use_is_told_at_construction(
    spoil: Callable[[Path], Path], tmp_path: Path
) -> None:
    run = spoil(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    with raises(laststep.StorageError, found=USELESS[spoil]) as caught:
        make(run)
    assert caught.value.where == str(run)
    assert caught.value.remedy
    with pytest.raises((laststep.StorageError, laststep.AlreadyExistsError)):
        laststep.save({"a": 1}, run)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.fixture
def nobody() -> Iterator[None]:
    """Without root's right to write everywhere."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_folder_without_the_right_to_write_is_told_at_construction(nobody: None) -> None:
    for run in ("/usr/laststep-test", "/usr"):
        if os.access(run, os.W_OK, effective_ids=True):
            pytest.skip("this user may write to /usr")
        with pytest.raises(
            laststep.StorageError, match=r"Permission denied|[Rr]ead-only"
        ) as caught:
            make(run)
        assert caught.value.where == run
        assert caught.value.remedy


@pytest.fixture
def read_only(tmp_path: Path, mount: Callable[..., None]) -> Path:
    """A folder that nobody can write to, with a run in it."""
    place = tmp_path / "place"
    with make(place / "run") as checkpointer:
        checkpointer.save(3).wait()
    mount(place, "--bind", str(place))
    mount(place, "-o", "remount,bind,ro", str(place))
    return place


def test_a_run_that_cannot_be_written_can_be_restored_but_no_new_one_be_made(
    read_only: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with make(read_only / "run") as checkpointer:
        (warning,) = said(caplog, logging.WARNING)
        assert names(warning, read_only / "run", "Read-only file system")
        assert checkpointer.restore().step == 3
    with raises(laststep.StorageError, where=read_only / "other", found="Read-only"):
        make(read_only / "other")


def test_what_is_there_of_a_damaged_run_is_for_restore_to_say(run_folder: Path) -> None:
    with make(run_folder) as checkpointer:
        checkpointer.save(0).wait()
    (run_folder / "run.json").write_text("nonsense")
    with make(run_folder) as checkpointer, pytest.raises(laststep.CorruptError):
        checkpointer.restore()


def test_a_relative_path_and_one_through_a_link_are_fine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    monkeypatch.chdir(tmp_path)
    state = {"t": torch.zeros(2)}
    with laststep.Checkpointer(
        "link/a/run", s=state, options=laststep.Options(flush="thread")
    ) as checkpointer:
        checkpointer.save(0).wait()
    assert laststep.open(tmp_path / "real/a/run").steps() == [0]


def test_a_checkpoint_is_not_taken_for_a_run(run_folder: Path, tmp_path: Path) -> None:
    with make(run_folder) as checkpointer:
        checkpointer.save(7)
    folder = "step-00000007.1-1"
    with raises(laststep.UsageError, where=run_folder / folder) as caught:
        make(run_folder / folder)
    assert caught.value.where == str(run_folder / folder)
    assert "laststep.load(" in caught.value.remedy
    laststep.save({"a": 1}, tmp_path / "one")
    with raises(laststep.UsageError, where=tmp_path / "one", remedy="laststep.load("):
        make(tmp_path / "one")
