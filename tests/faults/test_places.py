"""Disks that are full or read-only, for real; and files that somebody forged."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest
import torch

import laststep
from laststep.codecs.digests import digest_text
from laststep.errors import Usage
from laststep.format import manifest
from laststep.format.manifest import Commit, FileRecord, ItemRecord
from laststep.storage.directory import DirectoryStore
from waiting import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Callable

HOSTILE = Path(__file__).parent.parent / "hostile"


@pytest.fixture
def small_disk(tmp_path: Path, mount: Callable[..., None]) -> Path:
    """A filesystem of 24 MiB, mounted for this test alone."""
    place = tmp_path / "small"
    place.mkdir()
    mount(place, "-t", "tmpfs", "-o", "size=24m", "laststep-test")
    return place


def attempt(state: dict[str, object], run: Path, **settings: object) -> laststep.Checkpointer:
    return laststep.Checkpointer(run, state=state, host_memory_bytes=64 << 20, **settings)


@pytest.mark.parametrize("flush", ["thread", "process"])
def test_a_disk_that_is_full_fails_the_save_loudly_and_the_next_works_when_there_is_room(
    flush: str, small_disk: Path
) -> None:
    state = {"t": torch.zeros(8 << 20, dtype=torch.uint8)}
    with attempt(state, small_disk / "run", flush=flush) as checkpointer:
        checkpointer.save(0).wait(PATIENCE_S)
        ballast = small_disk / "ballast"
        with contextlib.suppress(OSError), ballast.open("wb") as file:
            for _ in range(64):
                file.write(bytes(1 << 20))
                file.flush()
        checkpointer.save(1)
        with pytest.raises(laststep.StorageFailed, match="No space left"):
            checkpointer.wait(PATIENCE_S)
        assert laststep.open(small_disk / "run").steps() == [0]
        with pytest.raises(laststep.StorageFailed, match="No space left"):
            checkpointer.save(2).wait(PATIENCE_S)
        ballast.unlink()
        state["t"].fill_(3)
        checkpointer.save(3).wait(PATIENCE_S)
        state["t"].zero_()
        assert checkpointer.restore().step == 3
    assert bool((state["t"] == 3).all())
    # Nothing of the failed ones is left.
    assert len(list((small_disk / "run").glob("step-*"))) == 2


def test_a_disk_that_fills_up_during_a_save_fails_it(small_disk: Path) -> None:
    state = {f"t{n}": torch.zeros(10 << 20, dtype=torch.uint8) for n in range(3)}
    items = {f"item{n}": {"t": tensor} for n, tensor in enumerate(state.values())}
    with laststep.Checkpointer(
        small_disk / "run", items=items, host_memory_bytes=64 << 20
    ) as checkpointer:
        checkpointer.save(0)
        with pytest.raises(laststep.StorageFailed, match="No space left"):
            checkpointer.wait(PATIENCE_S)
    assert not list((small_disk / "run").glob("step-*/*.safetensors"))


def test_a_filesystem_that_becomes_read_only_is_told_and_its_checkpoints_can_be_read(
    small_disk: Path, mount: Callable[..., None]
) -> None:
    state = {"t": torch.ones(1000)}
    with attempt(state, small_disk / "run") as checkpointer:
        checkpointer.save(0).wait(PATIENCE_S)
    mount(small_disk, "-o", "remount,ro")
    with attempt(state, small_disk / "run") as checkpointer:
        state["t"].zero_()
        assert checkpointer.restore().step == 0
        assert bool((state["t"] == 1).all())
        with pytest.raises(laststep.StorageFailed, match=r"[Rr]ead-only"):
            checkpointer.save(1).wait(PATIENCE_S)


@pytest.mark.skipif(
    os.geteuid() == 0, reason="root may write everywhere; the mount above is for it"
)
def test_a_folder_without_the_right_to_write_is_told(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(laststep.StorageFailed, match="Permission denied"):
        attempt({"a": 1}, tmp_path / "run")
    tmp_path.chmod(0o700)


def test_a_run_whose_path_is_a_file_is_told(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    with pytest.raises(laststep.StorageFailed, match="is not a folder"):
        attempt({"a": 1}, tmp_path / "run")


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps."""
    run = tmp_path_factory.mktemp("sound") / "run"
    state = {"t": torch.full((10,), 0.0)}
    with attempt(state, run, flush="thread") as checkpointer:
        for step in range(2):
            state["t"].fill_(step)
            checkpointer.save(step)
    return run


@pytest.fixture
def second(sound: Path, tmp_path: Path) -> Path:
    """The folder of the second step, in a copy of that run, for a test to spoil."""
    shutil.copytree(sound, tmp_path / "run")
    return next((tmp_path / "run").glob("step-00000001*"))


def restores_the_first(run: Path) -> bool:
    """Whether restore() passes the second step over; False where it refuses a later format."""
    state = {"t": torch.full((10,), 9.0)}
    with attempt(state, run, flush="thread") as checkpointer:
        try:
            restored = checkpointer.restore()
        except Usage as error:
            # Of a later version: there is nothing to fall back from.
            return "format" not in str(error)
    assert restored.step == 0
    assert [skipped.step for skipped in restored.skipped] == [1]
    assert bool((state["t"] == 0).all())
    return True


@pytest.mark.parametrize("name", sorted(p.name for p in HOSTILE.glob("manifest-*.json")))
def test_a_hostile_manifest_is_passed_over(name: str, second: Path) -> None:
    (second / "manifest.json").write_bytes((HOSTILE / name).read_bytes())
    assert restores_the_first(second.parent) == ("newer" not in name)


@pytest.mark.parametrize("name", sorted(p.name for p in HOSTILE.glob("header-*.safetensors")))
def test_a_hostile_header_under_a_manifest_that_vouches_for_it_is_passed_over(
    name: str, second: Path
) -> None:
    data = (HOSTILE / name).read_bytes()
    claimed = int.from_bytes(data[:8], "little")
    header_bytes = min(8 + claimed, len(data))
    genuine = manifest.decode((second / "manifest.json").read_bytes(), where="here")
    assert isinstance(genuine, Commit)
    record = FileRecord(
        name="state.safetensors",
        size_bytes=len(data),
        header_bytes=header_bytes,
        header_digest=digest_text(data[:header_bytes]),
    )
    item = ItemRecord(name="state", kind="value", file=record.name, tensors=1, size_bytes=40)
    forged = msgspec.structs.replace(genuine, files=(record,), items=(item,))
    try:
        text = manifest.encode(forged)
    except Usage:
        return  # no manifest can vouch for this one
    (second / record.name).write_bytes(data)
    (second / "manifest.json").write_bytes(text)
    assert restores_the_first(second.parent) == ("newer" not in name)


def test_a_manifest_that_names_files_elsewhere_reads_none_of_them(
    second: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    open_reader = DirectoryStore.open_reader

    def seen(self: DirectoryStore, name: str, **more: object) -> object:
        opened.append(name)
        return open_reader(self, name, **more)

    monkeypatch.setattr(DirectoryStore, "open_reader", seen)
    for name in ("manifest-file-absolute.json", "manifest-file-parent.json"):
        (second / "manifest.json").write_bytes((HOSTILE / name).read_bytes())
        assert restores_the_first(second.parent)
    assert opened
    assert not any(".." in name or name.startswith("/") for name in opened)
