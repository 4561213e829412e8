"""Damage to what is encoded: each checkpoint that needs it says so, names the file that is damaged,
and is passed over by a restore. Nothing ever comes back wrong."""

from __future__ import annotations

import errno
import os
import random
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

import laststep
from expect import raises
from laststep.constants import BLOCK_BYTES
from laststep.storage.files import FileReader, failed
from stored import flip

sys.path.insert(0, str(Path(__file__).parent))

from coded_training import BLOCK, CodedTraining

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TOP, LENT = "blocks-r00000.pack", "blocks-r00000~1-1.pack"
"""The packs of the second step: its own, and the one that it shares with the first."""
INDEX = "index-r00000"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> CodedTraining:
    """Two steps. Of the second, block 2 is told by its difference to that of the first, block 3 is
    held alone, and the rest is borrowed; block 6 is of zeros."""
    run = tmp_path_factory.mktemp("sound") / "run"
    made = CodedTraining(run, small={"n": 0, "t": torch.arange(500) // 7})
    made.block(6).zero_()
    made.save(0)
    made.touch(2)
    made.redraw(3)
    made.save(1)
    made.ckpt.close()
    assert [made.codecs(1)[number] for number in (2, 3, 6)] == ["patches", "planes", "planes"]
    return made


@pytest.fixture
def training(sound: CodedTraining, tmp_path: Path) -> Iterator[CodedTraining]:
    """A copy of that, to be damaged."""
    made = sound.copied(tmp_path / "run")
    yield made
    made.ckpt.close()


def damaged(training: CodedTraining) -> dict[int, set[str]]:
    """The damaged files of each step, as `verify` names them."""
    catalog = laststep.open(training.run)
    return {step: {damage.file for damage in catalog[step].verify().damage} for step in (0, 1)}


def in_block(number: int, step: int) -> Callable[[CodedTraining], tuple[Path, int]]:
    """In the middle of the encoded bytes of a block."""

    def found(training: CodedTraining) -> tuple[Path, int]:
        place = training.places(step)[number]
        assert place.encoding is not None
        return training.folder(step) / place.file, place.start + place.size_bytes // 2

    return found


def in_file(name: str, at: int, step: int = 1) -> Callable[[CodedTraining], tuple[Path, int]]:
    """At a byte of a file, counted from its end if that is negative."""

    def found(training: CodedTraining) -> tuple[Path, int]:
        path = training.folder(step) / name
        return path, at % path.stat().st_size

    return found


@pytest.mark.parametrize(
    ("place", "wanted", "touches"),
    [
        (in_file(INDEX, 300), {0: set(), 1: {INDEX}}, ()),
        (in_file(INDEX, 300, step=0), {0: {INDEX}, 1: set()}, ()),
        (in_block(3, 1), {0: set(), 1: {TOP}}, ("model/w",)),
        (in_block(2, 1), {0: set(), 1: {TOP}}, ("model/w",)),
        (in_block(2, 0), {0: {TOP}, 1: {LENT}}, ("model/w",)),
        (in_block(3, 0), {0: {TOP}, 1: set()}, ()),
        (in_block(5, 1), {0: {TOP}, 1: {LENT}}, ("model/w",)),
        (in_block(6, 1), {0: {TOP}, 1: {LENT}}, ("model/w",)),
        (in_file(INDEX, -5), {0: set(), 1: {INDEX}}, ()),
    ],
    ids=[
        "index",
        "index of the first",
        "block",
        "difference",
        "base",
        "not needed",
        "shared block",
        "zeros",
        "value",
    ],
)
def test_each_checkpoint_that_needs_it_names_the_file_that_is_damaged(
    training: CodedTraining,
    place: Callable[[CodedTraining], tuple[Path, int]],
    wanted: dict[int, set[str]],
    touches: tuple[str, ...],
) -> None:
    flip(*place(training), 0xFF)
    assert damaged(training) == wanted
    found = laststep.open(training.run)[1].verify().damage
    assert {one for damage in found for one in damage.touches} == set(touches)
    good = [step for step in (1, 0) if not wanted[step]]
    if not good:
        with pytest.raises(laststep.CorruptError):
            training.start()
        return
    training.start()
    restored = training.ckpt.restore()
    assert (restored.step, len(restored.skipped)) == (good[0], 0 if good[0] == 1 else 1)
    assert torch.equal(training.model["w"], training.saved[good[0]])
    training.touch(1, 4)
    training.save(2)  # what was damaged is not borrowed of
    assert torch.equal(laststep.load(training.run)["model"]["w"], training.saved[2])
    assert not laststep.open(training.run).latest().verify().damage


def test_whatever_bit_is_flipped_nothing_comes_back_wrong(training: CodedTraining) -> None:
    chance = random.Random(5)
    for name in (TOP, LENT) * 6:
        path = training.folder(1) / name
        at, bits = chance.randrange(path.stat().st_size), 1 << chance.randrange(8)
        flip(path, at, bits)
        sound = not laststep.open(training.run)[1].verify().damage
        try:
            found = laststep.open(training.run)[1].tensor("model/w")[:]
        except laststep.CorruptError:
            assert not sound, (name, at, bits)
        else:
            # A bit of a frame that means nothing, or a block that is not needed.
            assert sound, (name, at, bits)
            assert torch.equal(found, training.saved[1])
        flip(path, at, bits)
    assert damaged(training) == {0: set(), 1: set()}


def test_a_block_that_is_not_damaged_is_read_beside_one_that_is(training: CodedTraining) -> None:
    flip(*in_block(2, 0)(training), 0xFF)  # the base
    tensor = laststep.open(training.run)[1].tensor("model/w")
    assert torch.equal(tensor[: 2 * BLOCK], training.saved[1][: 2 * BLOCK])
    assert torch.equal(tensor[3 * BLOCK :], training.saved[1][3 * BLOCK :])
    with pytest.raises(laststep.CorruptError, match=LENT):
        tensor[2 * BLOCK : 2 * BLOCK + 1]


@pytest.mark.parametrize(
    ("name", "share"), [(TOP, 0.0), (TOP, 0.3), (TOP, 0.9), (LENT, 0.001), (LENT, 0.5)]
)
def test_a_file_that_is_cut_is_damage_and_a_restore_falls_back(
    training: CodedTraining, name: str, share: float
) -> None:
    path = training.folder(1) / name
    size = int(path.stat().st_size * share)
    data = path.read_bytes()
    path.unlink()  # the other step keeps its own
    path.write_bytes(data[:size])
    assert damaged(training) == {0: set(), 1: {name}}
    training.start()
    assert torch.equal(training.model["w"], training.saved[0])


def test_a_lent_file_that_is_missing_is_named(training: CodedTraining) -> None:
    (training.folder(1) / LENT).unlink()
    assert damaged(training) == {0: set(), 1: {LENT}}
    with raises(laststep.CorruptError, where=LENT, missing=LENT):
        laststep.load(training.run, step=1)


@pytest.mark.parametrize("what", ["fails", "swapped"])
def test_a_device_that_fails_under_an_anchor_is_damage_of_its_file(
    training: CodedTraining, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = training.places(0)[2]
    assert place.encoding is not None
    read_into = FileReader.read_into

    def fails(reader: FileReader, offset: int, into: memoryview) -> int:
        hit = offset <= place.start < offset + len(into) and str(reader._path).endswith(LENT)
        # Not with the blocks that are reused, but with that which is only a base.
        if hit and len(into) <= BLOCK_BYTES:
            if what == "swapped":
                return read_into(reader, offset + 4096, into)
            raise failed("read", str(reader._path), OSError(errno.EIO, "I/O error"))
        return read_into(reader, offset, into)

    monkeypatch.setattr(FileReader, "read_into", fails)
    # How many reads hit it depends on the order in which threads appended blocks to the pack.
    damage = laststep.open(training.run)[1].verify().damage
    assert {(found.file, found.touches) for found in damage} == {(LENT, ("model/w",))}


def test_a_device_that_may_answer_later_is_not_damage(
    training: CodedTraining, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, read_into = training.places(0)[2], FileReader.read_into

    def fails(reader: FileReader, offset: int, into: memoryview) -> int:
        if offset <= place.start < offset + len(into) and str(reader._path).endswith(LENT):
            later = laststep.StorageError("cannot read", found="ESTALE")
            later.transient = True
            raise later
        return read_into(reader, offset, into)

    monkeypatch.setattr(FileReader, "read_into", fails)
    with pytest.raises(laststep.StorageError):
        laststep.open(training.run)[1].verify()
    with pytest.raises(laststep.StorageError):
        laststep.load(training.run)


def test_bytes_behind_the_end_are_damage_too(training: CodedTraining) -> None:
    path = training.folder(1) / TOP
    os.truncate(path, path.stat().st_size + 10)
    assert damaged(training) == {0: set(), 1: {TOP}}
