"""`verify` and what is beneath it: every kind of damage is found, named and placed."""

from __future__ import annotations

import random
import shutil
from typing import TYPE_CHECKING

import pytest

import attempts
from expect import names, raises
from laststep.constants import BLOCK_BYTES, MANIFEST_NAME
from laststep.errors import NotFoundError
from laststep.read.verify import verify_checkpoint
from laststep.storage.directory import DirectoryStore
from laststep.storage.files import FileReader
from stored import flip

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def test_a_sound_run_is_status_0(maker, laststep: Callable) -> None:
    maker.save(100)
    maker.save(200)
    ended = laststep("verify", maker.path)
    assert ended.status == 0
    assert ended.out.count("(4 files, 4 blocks, 3.01 MB)") == 2
    document = laststep("verify", maker.path, "--json").json()
    assert document["sound"] is True
    assert [entry["step"] for entry in document["checkpoints"]] == [100, 200]


def test_every_byte_is_read(maker) -> None:
    folder = maker.save(100)
    report = verify_checkpoint(maker.run.store, folder.name)
    assert report.bytes == sum(file.stat().st_size for file in folder.iterdir())
    assert (report.files, report.blocks, report.unchecked_bytes) == (4, 4, 0)


def test_a_flipped_bit_in_the_data_is_placed_to_its_block(maker, laststep: Callable) -> None:
    folder = maker.save(100)
    header_bytes = 4096
    flip(folder / "model.safetensors", header_bytes + BLOCK_BYTES + 17)
    flip(folder / "model.safetensors", header_bytes + 2 * BLOCK_BYTES)
    ended = laststep("verify", maker.path, "--json")
    assert ended.status == 3
    document = ended.json()
    assert document["sound"] is False
    first, second = document["checkpoints"][0]["damage"]
    assert first["file"] == "model.safetensors"
    assert first["what"] == "block 1"
    assert (first["start"], first["stop"]) == (
        header_bytes + BLOCK_BYTES,
        header_bytes + 2 * BLOCK_BYTES,
    )
    assert first["touches"] == ["model/weight"]
    assert first["expected"] != first["found"]
    assert second["what"] == "block 2"
    assert second["stop"] == (folder / "model.safetensors").stat().st_size
    people = laststep("verify", maker.path)
    assert people.status == 3
    assert "DAMAGED in 2 places" in people.out
    assert names(people.out, "model.safetensors", "block 1", "model/weight")
    assert max(map(len, people.out.splitlines())) <= 80
    assert first["found"] not in people.out


def test_a_flipped_bit_in_a_header_is_found_and_its_data_are_checked(maker) -> None:
    folder = maker.save(100)
    flip(folder / "model.safetensors", 4095)
    report = verify_checkpoint(maker.run.store, folder.name)
    [damage] = report.damage
    assert (damage.file, damage.what) == ("model.safetensors", "header")
    assert (damage.start, damage.stop) == (0, 4096)
    assert damage.expected.startswith("xxh3-128:")
    assert (report.blocks, report.unchecked_bytes) == (4, 0)


def test_a_flipped_bit_in_an_index_is_found_and_its_data_are_unchecked(
    maker, laststep: Callable
) -> None:
    folder = maker.save(100)
    index = folder / "index-r00000"
    flip(index, index.stat().st_size - 1)
    report = verify_checkpoint(maker.run.store, folder.name)
    [damage] = report.damage
    assert (damage.file, damage.what) == ("index-r00000", "index")
    assert (damage.start, damage.stop) == (0, index.stat().st_size)
    assert damage.expected.startswith("xxh3-128:")
    data = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    assert (report.blocks, report.unchecked_bytes) == (0, data)
    assert "3.01 MB" in laststep("verify", maker.path).out


def test_an_index_that_is_missing_is_damage(maker, laststep: Callable) -> None:
    folder = maker.save(100)
    (folder / "index-r00000").unlink()
    [damage] = verify_checkpoint(maker.run.store, folder.name).damage
    assert (damage.file, damage.what, damage.start, damage.stop) == ("index-r00000", "index", 0, 0)
    assert laststep("verify", maker.path).status == 3


def test_behind_a_damaged_manifest_nothing_is_checked(maker, laststep) -> None:
    folder = maker.save(100)
    flip(folder / MANIFEST_NAME, 150)
    report = verify_checkpoint(maker.run.store, folder.name)
    assert [damage.what for damage in report.damage] == ["manifest"]
    assert report.unchecked_bytes > (folder / "model.safetensors").stat().st_size
    assert laststep("verify", maker.path).status == 3


def test_missing_short_and_long_files_are_damage(maker) -> None:
    missing, short, long = maker.save(100), maker.save(200), maker.save(300)
    (missing / "model.safetensors").unlink()
    with (short / "model.safetensors").open("r+b") as file:
        file.truncate(4096 + BLOCK_BYTES + 10)
    with (long / "model.safetensors").open("ab") as file:
        file.write(b"more")

    def damage(folder: Path) -> list[tuple[object, ...]]:
        report = verify_checkpoint(maker.run.store, folder.name)
        assert report.bytes == sum(file.stat().st_size for file in folder.iterdir()) - extra
        return [(one.what, one.start, one.stop, one.found, one.touches) for one in report.damage]

    extra = 0
    assert [one[:3] for one in damage(missing)] == [("missing file", 0, 0)]
    end = 4096 + BLOCK_BYTES + 10
    block, size = damage(short)
    assert (*block[:3], block[4]) == ("block 1", 4096 + BLOCK_BYTES, end, ("model/weight",))
    assert str(end) in block[3]
    assert (*size[:3], size[4]) == ("size", end, end, ("model/weight",))
    assert "1052682" in size[3]
    extra = 4
    (size,) = damage(long)
    assert (*size[:3], size[4]) == ("size", 3_004_096, 3_004_100, ())
    assert "3004100" in size[3]


@pytest.mark.parametrize("kept_bytes", [0, 5, 8, 100, 4095, 4096, 4097, 4096 + BLOCK_BYTES])
def test_the_places_of_damage_lie_within_the_file_however_short_it_is(
    kept_bytes: int, maker, laststep: Callable
) -> None:
    folder = maker.save(100)
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(kept_bytes)
    ended = laststep("verify", maker.path)
    assert ended.status == 3
    found = verify_checkpoint(maker.run.store, folder.name).damage
    found = [damage for damage in found if damage.file == "model.safetensors"]
    assert found
    assert all(0 <= damage.start <= damage.stop <= kept_bytes for damage in found)
    assert names(ended.out, f"{kept_bytes} bytes", "3004096 bytes")


def test_any_flipped_bit_anywhere_is_found(maker) -> None:
    folder = maker.save(100)
    chance = random.Random(5)
    files = sorted(folder.iterdir())
    for _ in range(60):
        file = chance.choice(files)
        byte, bit = chance.randrange(file.stat().st_size), chance.randrange(8)
        flip(file, byte, 1 << bit)
        damage = verify_checkpoint(maker.run.store, folder.name).damage
        assert any(d.file == file.name and d.start <= byte < d.stop for d in damage), (file, byte)
        flip(file, byte, 1 << bit)
    assert not verify_checkpoint(maker.run.store, folder.name).damage


def test_a_byte_that_is_wrong_only_once_is_no_damage(
    maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = maker.save(100)
    read_into, wrong = FileReader.read_into, []

    def first_wrong(self: FileReader, offset: int, into: memoryview) -> int:
        got = read_into(self, offset, into)
        if offset >= 4096 and offset not in wrong:
            wrong.append(offset)
            into[0] ^= 1
        return got

    monkeypatch.setattr(FileReader, "read_into", first_wrong)
    assert verify_checkpoint(maker.run.store, folder.name).damage == ()
    assert wrong


def test_one_step_or_one_folder_is_verified_alone(maker, laststep: Callable, tmp_path) -> None:
    good, bad = maker.save(100), maker.save(200)
    flip(bad / "model.safetensors", 5000)
    assert laststep("verify", maker.path, "--step", 100).status == 0
    assert laststep("verify", maker.path, "--step", 200).status == 3
    assert laststep("verify", good).status == 0
    assert laststep("verify", bad).status == 3
    copy = shutil.copytree(good, tmp_path / "copy")
    assert laststep("verify", copy).status == 0


def test_an_attempt_is_no_checkpoint(maker) -> None:
    open_, given_up = maker.save(100, commit=False), maker.save(200, commit=False)
    attempts.abort(maker.run, given_up.name, "the disk was full")
    with raises(NotFoundError, where=open_.name):
        verify_checkpoint(maker.run.store, open_.name)
    with raises(NotFoundError, "the disk was full", where=given_up.name):
        verify_checkpoint(maker.run.store, given_up.name)


def test_progress_reaches_all_bytes(maker) -> None:
    folder = maker.save(100)
    seen: list[tuple[int, int]] = []
    store = DirectoryStore(maker.path)
    report = verify_checkpoint(
        store, folder.name, threads=3, progress=lambda done, total: seen.append((done, total))
    )
    assert seen == sorted(seen)
    assert seen[-1] == (report.bytes, report.bytes)


def test_a_folder_without_a_manifest_is_listed_and_is_no_damage(maker, laststep: Callable) -> None:
    maker.save(100)
    left = maker.save(200, commit=False)
    ended = laststep("verify", maker.path)
    assert ended.status == 0
    told = f"{left.name}: "
    assert told in ended.out
    document = laststep("verify", maker.path, "--json").json()
    assert (document["sound"], document["no_manifest"]) == (True, [left.name])


@pytest.mark.parametrize(
    "data", [b"", b"{}", b'{"format": 1, "run": "x", "created_s": 1}', b"\xff"]
)
def test_a_damaged_record_of_the_run_is_status_3_and_the_rest_is_checked(
    data: bytes, maker, laststep: Callable
) -> None:
    folder = maker.save(100)
    (maker.path / "run.json").write_bytes(data)
    ended = laststep("verify", maker.path)
    assert ended.status == 3
    assert f"{folder.name}: ok" in ended.out
    assert names(ended.out, "DAMAGED", maker.path)
    assert "regex" not in ended.out
    document = laststep("verify", maker.path, "--json").json()
    assert not document["sound"]
    assert "run.json" in document["run_error"]
    assert laststep("verify", maker.path, "--step", 100).status == 3


def test_a_damaged_manifest_is_told_in_words(maker, laststep: Callable) -> None:
    manifest = maker.save(100) / "manifest.json"
    whole = manifest.read_bytes()
    flip(manifest, len(whole) // 2)
    told = laststep("ls", maker.path).out
    assert names(told, "manifest.json", "xxh3-128:")
    manifest.write_bytes(b"")
    assert "manifest.json" in laststep("ls", maker.path).out
    manifest.write_bytes(b"\xff\x00 what is this")
    told = laststep("ls", maker.path).out
    assert "manifest.json" in told
