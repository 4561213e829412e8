"""Disks that are full or read-only, for real; and files that somebody forged."""

from __future__ import annotations

import base64
import contextlib
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import laststep
from expect import raises
from laststep.errors import UsageError
from laststep.settings import as_keywords
from laststep.storage.directory import DirectoryStore
from waiting import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Callable

HOSTILE = Path(__file__).parent.parent / "hostile"

# What changes checkpoints and puts their digests right again.
sys.path.insert(0, str(Path(__file__).parent.parent / "torture"))

import forging  # noqa: E402


@pytest.fixture
def small_disk(tmp_path: Path, mount: Callable[..., None]) -> Path:
    """A filesystem of 24 MiB, mounted for this test alone."""
    place = tmp_path / "small"
    place.mkdir()
    mount(place, "-t", "tmpfs", "-o", "size=24m", "laststep-test")
    return place


def attempt(state: dict[str, object], run: Path, **settings: object) -> laststep.Checkpointer:
    return laststep.Checkpointer(
        run, state=state, host_memory_bytes=64 << 20, **as_keywords(settings)
    )


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
        with pytest.raises(laststep.StorageError, match="No space left"):
            checkpointer.wait(PATIENCE_S)
        assert laststep.open(small_disk / "run").steps() == [0]
        with pytest.raises(laststep.StorageError, match="No space left"):
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
        with pytest.raises(laststep.StorageError, match="No space left"):
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
        with pytest.raises(laststep.StorageError, match=r"[Rr]ead-only"):
            checkpointer.save(1).wait(PATIENCE_S)


@pytest.mark.skipif(
    os.geteuid() == 0, reason="root may write everywhere; the mount above is for it"
)
def test_a_folder_without_the_right_to_write_is_told(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(laststep.StorageError, match="Permission denied"):
        attempt({"a": 1}, tmp_path / "run")
    tmp_path.chmod(0o700)


def test_a_run_whose_path_is_a_file_is_told(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    with raises(laststep.StorageError, where=tmp_path / "run"):
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
        except UsageError as error:
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


@pytest.mark.parametrize("name", sorted(p.name for p in HOSTILE.glob("*.safetensors")))
def test_a_hostile_header_hurts_no_restore_and_verify_finds_it(name: str, second: Path) -> None:
    path = second / "shared.safetensors"
    whole = path.read_bytes()
    length = 8 + int.from_bytes(whole[:8], "little")
    path.write_bytes((HOSTILE / name).read_bytes()[:length].ljust(length, b"\0") + whole[length:])
    state = {"t": torch.full((10,), 9.0)}
    with attempt(state, second.parent, flush="thread") as checkpointer:
        restored = checkpointer.restore()
    assert (restored.step, restored.skipped) == (1, ())
    assert bool((state["t"] == 1).all())
    (damage,) = laststep.open(second.parent)[1].verify().damage
    assert (damage.file, damage.what) == ("shared.safetensors", "header")


@pytest.mark.parametrize("name", sorted(p.name for p in HOSTILE.glob("index-*")))
def test_a_hostile_index_under_a_manifest_that_vouches_for_it_is_passed_over(
    name: str, second: Path
) -> None:
    data = (HOSTILE / name).read_bytes()
    (second / "index-r00000").write_bytes(data)

    def vouch(stored: Any) -> Any:
        stored["written"]["indexes"] = base64.b64encode(data[:16].ljust(16)).decode()
        return stored

    forging.change_manifest(second, vouch)
    assert restores_the_first(second.parent) == ("newer" not in name)


FILES, LAYOUTS = 2, 4
"""Their places in an index."""


def put(value: object, *way: int) -> Callable[[Any], Any]:
    """Put a value at that place in an index."""

    def change(index: Any) -> Any:
        *outer, last = way
        inner = index
        for number in outer:
            inner = inner[number]
        inner[last] = value
        return index

    return change


ELSEWHERE = (
    "/etc/passwd",
    "/x.safetensors",
    "../x.safetensors",
    "../../x.pack",
    "a/b/c.safetensors",
    "r00000/../x.pack",
    ".hidden.safetensors",
    "a\\b.pack",
    "x\0.safetensors",
    "",
    ".pack",
    "manifest.json",
)


def test_an_index_that_names_files_elsewhere_reads_none_of_them(
    second: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    open_reader = DirectoryStore.open_reader

    def seen(self: DirectoryStore, name: str, **more: object) -> object:
        opened.append(name)
        return open_reader(self, name, **more)

    monkeypatch.setattr(DirectoryStore, "open_reader", seen)
    for name in ELSEWHERE:
        forging.change_index(second, put(name, FILES, 0, 0))
        opened.clear()
        assert restores_the_first(second.parent), name
        inside = ("manifest.json", "index-r00000", "shared.safetensors")
        assert opened
        assert all(path.endswith(inside) and path.count("/") <= 1 for path in opened), opened
        assert not any(".." in path or path.startswith("/") for path in opened)


LIES = {
    "a file that is too long": put(1 << 62, FILES, 0, 1),
    "a file of a folder elsewhere": put("../other", FILES, 0, 2),
    "a file that is no list": put("shared.safetensors", FILES, 0),
    "no files": put([], FILES),
    "a layout of a name elsewhere": put("../x.safetensors", LAYOUTS, 0, 0, 0),
    "a header of no length": put(0, LAYOUTS, 0, 0, 2),
    "tensors that are longer": put(1 << 40, LAYOUTS, 0, 0, 3),
    "digests that are too few": put(b"", LAYOUTS, 0, 1),
    "no runs": put([], LAYOUTS, 0, 2),
    "a run of very many blocks": put(1 << 62, LAYOUTS, 0, 2, 0, 0),
    "a run in a file that is not there": put(7, LAYOUTS, 0, 2, 0, 1),
    "a run behind the end": put(1 << 40, LAYOUTS, 0, 2, 0, 2),
    "an encoding that is not there": put(3, LAYOUTS, 0, 2, 0, 3),
    "another rank": put(1, 1),
    "no values": put({}, 5),
    "values that are no JSON": put({"state": b"\xff"}, 5),
}


@pytest.mark.parametrize("lie", LIES)
def test_an_index_that_lies_under_a_manifest_that_vouches_for_it_is_passed_over(
    lie: str, second: Path
) -> None:
    forging.change_index(second, LIES[lie])
    assert restores_the_first(second.parent)


def test_an_index_of_a_later_format_is_refused(second: Path) -> None:
    forging.change_index(second, put(1 << 20, 0))
    assert not restores_the_first(second.parent)
