"""Folders on filesystems other than ext4: memory, layers, a mount by FUSE, xfs, btrfs. Each passes
the suite of every store, and holds a run that a flusher's process writes, and that is copied."""

from __future__ import annotations

import shutil
import subprocess
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
import torch

import laststep
from laststep.catalog.run import Run
from laststep.settings import as_keywords
from laststep.storage.directory import DirectoryStore
from laststep.testing.stores import SharedStoreConformance, aligned
from waiting import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from laststep.storage.store import Store


@contextmanager
def mounted(place: Path, *command: str) -> Iterator[Path]:
    """A mount there by this command; skips where there is no such program, or no right to it."""
    if shutil.which(command[0]) is None:
        pytest.skip(f"needs the program `{command[0]}`")
    place.mkdir()
    done = subprocess.run([*command, str(place)], capture_output=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"needs the right to mount: {done.stderr.decode().strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def image(kind: str, file: Path) -> Path:
    """A filesystem in a file, which takes no room."""
    if shutil.which(f"mkfs.{kind}") is None:
        pytest.skip(f"needs the program `mkfs.{kind}`")
    with file.open("wb") as made:
        made.truncate(1 << 30)
    subprocess.run([f"mkfs.{kind}", str(file)], capture_output=True, check=True)
    return file


def long(*names: str) -> list[object]:
    return [pytest.param(name, marks=pytest.mark.long) for name in names]


@pytest.fixture(scope="module", params=["tmpfs", "overlay", "fuse", *long("xfs", "btrfs")])
def place(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """A folder on such a filesystem."""
    folder = tmp_path_factory.mktemp(request.param)
    for name in ("lower", "upper", "work"):
        (folder / name).mkdir()
    layers = f"lowerdir={folder}/lower,upperdir={folder}/upper,workdir={folder}/work"
    commands = {
        "tmpfs": ("mount", "-t", "tmpfs", "tmpfs"),
        "overlay": ("mount", "-t", "overlay", "overlay", "-o", layers),
        "fuse": ("bindfs", str(folder / "upper")),
    }
    if (command := commands.get(request.param)) is None:
        command = ("mount", "-o", "loop", str(image(request.param, folder / "image")))
    with mounted(folder / "mount", *command) as made:
        yield made


OTHERS = long("overlay", "fuse", "xfs", "btrfs")


@pytest.mark.parametrize("place", ["tmpfs", *OTHERS], indirect=True, scope="module")
class TestConformance(SharedStoreConformance):
    @pytest.fixture(autouse=True)
    def at(self, place: Path) -> None:
        self.place = place

    def make_store(self, folder: Path) -> Store:
        return DirectoryStore(self.place.joinpath(*folder.parts[1:]))


def test_direct_io_is_tried_once_and_what_is_written_is_there_either_way(place: Path) -> None:
    store = DirectoryStore(place / "direct")
    with aligned(1 << 20) as view:
        view[:] = b"\1" * (1 << 20)
        for number in range(2):
            writer = store.open_writer(f"x{number}", expected_bytes=1 << 20)
            writer.write_at(0, view)
            writer.finish((1 << 20) - 5)
            assert store.read(f"x{number}", limit_bytes=1 << 20) == b"\1" * ((1 << 20) - 5)
    assert store._direct is not None


def test_a_run_is_saved_restored_shared_copied_and_pruned(place: Path) -> None:
    state = {"w": torch.randn(3 << 18), "n": 0}
    run = place / "run"
    keep = laststep.Keep(last=2)
    how = {"keep": keep, "progress": False, "host_memory_bytes": 64 << 20}
    with laststep.Checkpointer(run, state=state, **as_keywords(how)) as ckpt:
        ckpt.restore()
        for step in range(4):
            state["n"] = step
            state["w"][0] = step
            ckpt.save(step).wait(PATIENCE_S)
    with laststep.Checkpointer(
        run, state=state, **as_keywords(how)
    ) as ckpt:  # retention is over by then
        assert ckpt.restore(2).step == 2
        assert state["w"][0] == 2
    laststep.copy(run, place / "copy")
    assert laststep.open(place / "copy").steps() == laststep.open(run).steps() == [2, 3]
    for one in (run, place / "copy"):
        assert not [c.step for c in laststep.open(one) if c.verify().damage]
    assert not Run.open(DirectoryStore(run)).orphans()


def test_a_run_of_a_lower_layer_is_gone_on_with_and_pruned(tmp_path: Path) -> None:
    """As of a run that lies in the image of a container: its folders cannot be renamed."""
    state = {"w": torch.randn(3 << 18), "n": 0}
    how = {"flush": "thread", "progress": False, "host_memory_bytes": 64 << 20}
    with laststep.Checkpointer(tmp_path / "lower" / "run", state=state, **as_keywords(how)) as ckpt:
        ckpt.restore()
        for step in range(3):
            state["w"][0] = step
            ckpt.save(step).wait(PATIENCE_S)
    for name in ("upper", "work"):
        (tmp_path / name).mkdir()
    layers = ",".join(
        f"{option}={tmp_path / name}"
        for option, name in (("lowerdir", "lower"), ("upperdir", "upper"), ("workdir", "work"))
    )
    command = ("mount", "-t", "overlay", "overlay", "-o", layers)
    with mounted(tmp_path / "mount", *command) as place:
        keep = laststep.Keep(last=2)
        with laststep.Checkpointer(
            place / "run", state=state, keep=keep, **as_keywords(how)
        ) as ckpt:
            assert ckpt.restore().step == 2
            ckpt.save(3).wait(PATIENCE_S)
            ckpt.save(4).wait(PATIENCE_S)
        assert laststep.open(place / "run").steps() == [2, 3, 4]  # it was resumed from 2
        assert len(list((place / "run").glob("step-*"))) == 3
        assert not [c.step for c in laststep.open(place / "run") if c.verify().damage]
        assert not list((place / "run").rglob("*.tmp-*"))


def test_a_folder_is_deleted_though_somebody_reads_a_file_in_it(
    place: Path, tmp_path: Path
) -> None:
    suite = TestConformance()
    suite.place = place
    suite.test_a_folder_is_deleted_with_all_below_it_though_somebody_reads(tmp_path)


def test_what_a_reader_held_open_while_it_was_deleted_goes_at_the_next_cleaning(
    place: Path,
) -> None:
    """FUSE and NFS give such a file another name, so its folder stays for a while."""
    run = place / "read-while-deleted"
    state = {"w": torch.randn(3 << 18)}
    how = {"flush": "thread", "progress": False, "host_memory_bytes": 64 << 20}
    with laststep.Checkpointer(
        run, state=state, keep=laststep.Keep(last=1), **as_keywords(how)
    ) as ckpt:
        ckpt.restore()
        ckpt.save(0).wait(PATIENCE_S)
        (folder,) = run.glob("step-*")
        with next(folder.glob("state*.safetensors")).open("rb") as held:
            before = held.read(100)
            state["w"] += 1
            ckpt.save(1).wait(PATIENCE_S)
            ckpt.restore()  # after retention
            assert [path.name for path in run.glob("step-*")] != [folder.name]
            assert laststep.open(run).steps() == [1]
            held.seek(0)
            assert held.read(100) == before
    Run.open(DirectoryStore(run)).clean()
    assert len(list(run.glob("step-*"))) == 1
