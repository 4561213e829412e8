"""Encoded blocks whose headers lie, with every digest right: refused, or damage; never a crash."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest
import torch

import laststep
from laststep.codecs.digests import digest_text
from laststep.format import manifest
from laststep.format.borrowing import BlockPlace
from laststep.format.coding import RAW, CodedBlock, CodedBy
from laststep.format.header import Header, decode_header, encode_header
from laststep.terms import BLOCK_BYTES

sys.path.insert(0, str(Path(__file__).parents[1] / "checkpointer"))

from coded_training import BLOCK, CodedTraining

if TYPE_CHECKING:
    from collections.abc import Callable

TOP = "model.safetensors"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> CodedTraining:
    """Three steps. Of the last, block 3 is told by its difference to that of the second, which has
    block 2 as a difference, too."""
    made = CodedTraining(tmp_path_factory.mktemp("sound") / "run")
    made.save(0)
    made.touch(2)
    made.redraw(3)
    made.save(1)
    made.touch(3)
    made.save(2)
    made.ckpt.close()
    assert made.codecs(2)[2:4] == ["patches", "patches"]
    return made


@pytest.fixture
def training(sound: CodedTraining, tmp_path: Path) -> CodedTraining:
    """A copy of that, whose headers are to lie."""
    return sound.copied(tmp_path / "run")


def lie(folder: Path, name: str, change: Callable[[Header], Header]) -> None:
    """Change a header, and put right what the manifest says of it."""
    path = folder / name
    data = path.read_bytes()
    size = 8 + int.from_bytes(data[:8], "little")
    header = decode_header(data[:size], data_bytes=len(data) - size, where=name)
    region = encode_header(change(header), region_bytes=size)
    path.unlink()  # others may have it by a link
    path.write_bytes(region + data[size:])
    at = folder / "manifest.json"
    commit = manifest.decode(at.read_bytes(), where=name)
    assert isinstance(commit, manifest.Commit)
    files = tuple(
        msgspec.structs.replace(record, header_digest=digest_text(region))
        if record.name == name
        else record
        for record in commit.files
    )
    at.write_bytes(manifest.encode(msgspec.structs.replace(commit, files=files)))


def coded(change: Callable[[CodedBlock], CodedBlock]) -> Callable[[Header], Header]:
    """Change how each block is coded that a file holds."""

    def changed(header: Header) -> Header:
        assert header.coded is not None
        return msgspec.structs.replace(header, coded=tuple(map(change, header.coded)))

    return changed


@pytest.mark.parametrize(
    ("anchor", "found"),
    [
        (BlockPlace(2, 0), "block 0 of model~1-2.safetensors, which needs another"),
        (BlockPlace(2, 2), "block 2 of 2 of model~1-2.safetensors as an anchor"),
        (BlockPlace(1, 1 << 60), f"block {1 << 60} of 9 of model~1-1.safetensors as an anchor"),
    ],
    ids=["has an anchor", "not there", "far behind"],
)
def test_an_anchor_that_cannot_be_one_is_refused(
    training: CodedTraining, anchor: BlockPlace, found: str
) -> None:
    lie(training.folder(2), TOP, coded(lambda block: block._replace(anchor=anchor)))
    with pytest.raises(laststep.Corrupt, match=found):
        laststep.load(training.run, step=2)
    [damage] = laststep.open(training.run)[2].verify().damage
    assert (damage.file, damage.what) == (TOP, "header")
    training.start()
    assert torch.equal(training.model["w"], training.saved[1])
    training.ckpt.close()


def test_an_anchor_that_is_another_block_is_damage(training: CodedTraining) -> None:
    lie(training.folder(2), TOP, coded(lambda block: block._replace(anchor=BlockPlace(1, 0))))
    [damage] = laststep.open(training.run)[2].verify().damage
    assert (damage.file, damage.what, damage.touches) == (TOP, "block 0", ("model/w",))


def test_a_short_block_is_no_anchor_of_a_whole_one(training: CodedTraining) -> None:
    lie(training.folder(2), TOP, coded(lambda block: block._replace(anchor=BlockPlace(1, 8))))
    [damage] = laststep.open(training.run)[2].verify().damage
    assert damage.touches == ("model/w",)


@pytest.mark.parametrize(
    "way",
    [
        RAW,
        CodedBy("planes", 4, anchored=False),
        CodedBy("planes", 16, anchored=False),
        CodedBy("patches", 2, anchored=False),
        CodedBy("subtract", 2, anchored=False),
    ],
    ids=lambda way: f"{way.codec} {way.element_bytes}",
)
def test_blocks_of_another_codec_than_is_said_are_damage(
    training: CodedTraining, way: CodedBy
) -> None:
    lie(training.folder(0), TOP, coded(lambda block: block._replace(way=way)))
    damage = laststep.open(training.run)[0].verify().damage
    assert {one.file for one in damage} == {TOP}
    assert {f"block {number}" for number in range(8)} <= {one.what for one in damage}
    with pytest.raises(laststep.Corrupt):
        laststep.load(training.run, step=0)


def test_a_codec_that_nobody_knows_is_named(training: CodedTraining) -> None:
    way = CodedBy("zzz", 2, anchored=False)
    lie(training.folder(0), TOP, coded(lambda block: block._replace(way=way)))
    for read in (
        laststep.open(training.run)[0].verify,
        lambda: laststep.load(training.run, step=0),
    ):
        with pytest.raises(laststep.Usage, match="no codec is registered under the name 'zzz'"):
            read()


def test_blocks_that_lie_in_any_order_with_gaps_are_read(tmp_path: Path) -> None:
    """As a writer with several threads may leave them; this one puts them backwards."""
    training = CodedTraining(tmp_path / "run")
    training.save(0)
    training.ckpt.close()
    path = training.folder(0) / TOP
    data = path.read_bytes()
    size = 8 + int.from_bytes(data[:8], "little")
    header = decode_header(data[:size], data_bytes=len(data) - size, where="")
    assert header.coded is not None
    body, moved = b"", {}
    for number, block in reversed(list(enumerate(header.coded))):
        body += bytes(100_000 if number % 2 else 3)
        moved[number] = block._replace(start=len(body))
        body += data[size + block.start : size + block.stop]
    assert len(body) < 9 * BLOCK_BYTES
    told = msgspec.structs.replace(header, coded=tuple(moved[n] for n in sorted(moved)), objects=())
    region = encode_header(told, region_bytes=size)
    path.write_bytes(region + body)
    commit = manifest.decode((path.parent / "manifest.json").read_bytes(), where="")
    assert isinstance(commit, manifest.Commit)
    files = tuple(
        msgspec.structs.replace(
            record, header_digest=digest_text(region), size_bytes=len(region) + len(body)
        )
        if record.name == TOP
        else record
        for record in commit.files
    )
    text = manifest.encode(msgspec.structs.replace(commit, files=files))
    (path.parent / "manifest.json").write_bytes(text)
    training.check()
    found = laststep.open(training.run)[0].tensor("model/w")[BLOCK - 1 : BLOCK + 1]
    assert torch.equal(found, training.saved[0][BLOCK - 1 : BLOCK + 1])
