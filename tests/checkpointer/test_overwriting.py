"""laststep.save(overwrite=True): what was there is there until the new one is."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import time
from typing import TYPE_CHECKING

import pytest
import torch

import laststep
from expect import raises
from laststep.storage.directory import DirectoryStore
from laststep.storage.files import Disk
from waiting import PATIENCE_S

if TYPE_CHECKING:
    from pathlib import Path

MB = 1 << 20

SAVER = """
import os, sys, torch, laststep
print(os.getpid(), flush=True)
for number in range(1, 1000):
    state = {"n": number, "w": torch.full((1 << 20,), float(number))}
    laststep.save(state, sys.argv[1], overwrite=True)
    print(number, flush=True)
"""


def state(number: int) -> dict[str, object]:
    return {"n": number, "w": torch.full((MB,), float(number))}


def number_in(path: Path) -> int:
    """Which state that is; all of it is of one."""
    found = laststep.load(path)
    assert found["w"].unique().tolist() == [float(found["n"])]
    return found["n"]


def test_a_checkpoint_is_replaced_and_nothing_else_is_left(tmp_path: Path) -> None:
    laststep.save(state(1), tmp_path / "one", overwrite=True)  # there is nothing yet
    laststep.save(state(2), tmp_path / "one", overwrite=True)
    assert number_in(tmp_path / "one") == 2
    assert [*tmp_path.iterdir()] == [tmp_path / "one"]
    with raises(laststep.AlreadyExistsError, remedy="overwrite=True"):
        laststep.save(state(3), tmp_path / "one")


def test_a_link_stays_and_what_it_leads_to_is_replaced(tmp_path: Path) -> None:
    laststep.save(state(1), tmp_path / "one")
    (tmp_path / "newest").symlink_to("one")
    laststep.save(state(2), tmp_path / "newest", overwrite=True)
    assert (tmp_path / "newest").is_symlink()
    assert number_in(tmp_path / "one") == 2


def test_what_no_save_has_stored_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "thesis.tex").touch()
    (tmp_path / "file").touch()
    with laststep.Checkpointer(
        tmp_path / "run", state=state(1), options=laststep.Options(progress=False)
    ) as ckpt:
        ckpt.save(1)
    (step,) = (tmp_path / "run").glob("step-*")
    for path in (tmp_path / "folder", tmp_path / "file", tmp_path / "run", step):
        with raises(laststep.AlreadyExistsError, where=path):
            laststep.save(state(2), path, overwrite=True)
    assert (tmp_path / "folder" / "thesis.tex").exists()
    assert laststep.open(tmp_path / "run").latest().verify().damage == ()


def test_files_of_others_beside_what_a_save_has_stored_are_not_deleted(tmp_path: Path) -> None:
    laststep.save(state(1), tmp_path / "one")
    (tmp_path / "one" / "tokenizer.json").write_text("{}")
    with raises(laststep.AlreadyExistsError, where=tmp_path / "one", found="tokenizer.json"):
        laststep.save(state(2), tmp_path / "one", overwrite=True)
    assert (tmp_path / "one" / "tokenizer.json").exists()
    assert number_in(tmp_path / "one") == 1


def test_one_that_another_has_saved_meanwhile_is_replaced_or_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = type(tmp_path).rename

    def late(made: Path, target: Path) -> object:
        """Somebody else saves just before."""
        monkeypatch.undo()
        laststep.save(state(1), target)
        return rename(made, target)

    monkeypatch.setattr(type(tmp_path), "rename", late)
    laststep.save(state(2), tmp_path / "one", overwrite=True)
    assert number_in(tmp_path / "one") == 2
    monkeypatch.setattr(type(tmp_path), "rename", late)
    with raises(laststep.AlreadyExistsError, remedy="overwrite=True"):
        laststep.save(state(2), tmp_path / "two")
    assert number_in(tmp_path / "two") == 1
    assert {*tmp_path.iterdir()} == {tmp_path / "one", tmp_path / "two"}


def test_what_was_there_goes_after_the_new_one_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    laststep.save(state(1), tmp_path / "one")
    calls, sync = [], Disk.sync_folder

    def exchange(self: Disk, path: str, other: str) -> None:
        calls.append("exchange")
        exchanged(self, path, other)

    def synced(self: Disk, path: str) -> None:
        calls.append(path)
        sync(self, path)

    def unlink(self: Disk, path: str) -> None:
        calls.append("unlink")
        unlinked(path)

    exchanged, unlinked = Disk.exchange, Disk.unlink
    monkeypatch.setattr(Disk, "exchange", exchange)
    monkeypatch.setattr(Disk, "sync_folder", synced)
    monkeypatch.setattr(Disk, "unlink", unlink)
    laststep.save(state(2), tmp_path / "one", overwrite=True)
    after = calls[calls.index("exchange") + 1 :]
    assert after[0] == str(tmp_path)


def test_a_save_that_fails_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    laststep.save(state(1), tmp_path / "one")
    with pytest.raises(laststep.LaststepError):
        laststep.save({"odd": object()}, tmp_path / "one", overwrite=True)
    assert number_in(tmp_path / "one") == 1

    def unknown(self: Disk, path: str, other: str) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(Disk, "exchange", unknown)
    with raises(laststep.StorageError, where=tmp_path / "one"):
        laststep.save(state(2), tmp_path / "one", overwrite=True)
    assert number_in(tmp_path / "one") == 1
    assert [*tmp_path.iterdir()] == [tmp_path / "one"]


def test_who_loads_meanwhile_and_who_loads_after_a_kill_has_one_whole_state(tmp_path: Path) -> None:
    path = tmp_path / "one"
    laststep.save(state(0), path)
    command = [os.environ["WARM_PYTHON"], "-c", SAVER, path]
    saver = subprocess.Popen(command, stdout=subprocess.PIPE)
    pid = int(saver.stdout.readline())
    try:
        found, deadline = [], time.monotonic() + PATIENCE_S
        while len(found) < 8 or len(set(found)) == 1:
            assert time.monotonic() < deadline, "it saves nothing"
            found.append(number_in(path))
        assert found == sorted(found)
    finally:
        os.kill(pid, signal.SIGKILL)  # at any instant of a save
        saver.wait()
        saver.stdout.close()
    assert number_in(path) >= found[-1]
    laststep.save(state(1), path, overwrite=True)
    assert number_in(path) == 1
    assert [*tmp_path.iterdir()] == [path]


KILLED = """
import os, sys, torch, laststep
from laststep import oneoff
oneoff._put = lambda *args, **more: os._exit(9)  # when all is written
laststep.save({"n": 1}, sys.argv[1])
"""


def test_what_a_killed_save_has_left_goes_with_the_next_and_that_of_others_stays(
    tmp_path: Path,
) -> None:
    for name in ("one", "two"):
        killed = subprocess.run(
            [os.environ["WARM_PYTHON"], "-c", KILLED, tmp_path / name], check=False
        )
        assert killed.returncode == 9
    assert len([*tmp_path.glob(".one.tmp-*")]) == 2  # a folder and its lock
    under_way = tmp_path / ".one.tmp-1-1"
    under_way.mkdir()
    (tmp_path / ".one.tmp-1-2.lock").touch()  # of one that was killed when its folder had its name
    with contextlib.closing(DirectoryStore(tmp_path).lock(f"{under_way.name}.lock")):
        laststep.save(state(1), tmp_path / "one")
    assert not (tmp_path / ".one.tmp-1-2.lock").exists()
    assert [*tmp_path.glob(".one.tmp-*/")] == [under_way]
    assert len([*tmp_path.glob(".two.tmp-*")]) == 2
