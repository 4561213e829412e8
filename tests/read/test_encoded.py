"""Indexes that lie about encoded blocks, with every digest right: refused, or damage; no crash."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest
import torch
from msgspec import structs

import laststep
from expect import raises
from laststep.codecs.digests import digest
from laststep.constants import BLOCK_BYTES
from laststep.format import index as index_format
from laststep.format import manifest
from laststep.format.index import BaseRef, BlockRef, BlockRun, Encoding, Index, runs_of

sys.path.insert(0, str(Path(__file__).parents[1] / "checkpointer"))

from coded_training import BLOCK, CodedTraining

if TYPE_CHECKING:
    from collections.abc import Callable

MODEL, INDEX, PACK = "model.safetensors", "index-r00000", "blocks-r00000.pack"
FIRST, SECOND = "blocks-r00000~1-1.pack", "blocks-r00000~1-2.pack"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> CodedTraining:
    """Three steps. Of the last, block 3 is encoded against that of the second step, and block 2 is
    one of the second step, encoded against that of the first."""
    made = CodedTraining(tmp_path_factory.mktemp("sound") / "run")
    made.save(0)
    made.touch(2)
    made.redraw(3)
    made.save(1)
    made.touch(3)
    made.save(2)
    made.ckpt.close()
    assert made.codecs(2)[2:4] == ["patches", "patches"]
    places = made.places(2)
    assert (places[2].file, places[3].file) == (SECOND, PACK)
    assert [one.base.file for one in places[2:4] if one.base is not None] == [FIRST, SECOND]
    return made


@pytest.fixture
def training(sound: CodedTraining, tmp_path: Path) -> CodedTraining:
    """A copy of that, whose indexes are to lie."""
    return sound.copied(tmp_path / "run")


def read(folder: Path) -> Index:
    return index_format.decode((folder / INDEX).read_bytes(), where=INDEX)


def put(folder: Path, index: Index) -> None:
    """Write an index unchecked, and put right what the manifest says of it."""
    payload = msgspec.msgpack.encode(index)
    (folder / INDEX).write_bytes(digest(payload) + payload)
    at = folder / "manifest.json"
    commit = manifest.decode(at.read_bytes(), where="")
    assert isinstance(commit, manifest.Commit)
    written = index_format.written_of(index, digest(payload) + payload)
    at.write_bytes(manifest.encode(structs.replace(commit, written=written)))


def with_refs(index: Index, change: Callable[[int, BlockRef], BlockRef]) -> Index:
    """The same with other places of the blocks of the model."""
    layouts = tuple(
        structs.replace(
            stored, runs=runs_of([change(n, ref) for n, ref in enumerate(stored.refs())])
        )
        if stored.layout.name == MODEL
        else stored
        for stored in index.layouts
    )
    return structs.replace(index, layouts=layouts)


def with_base(index: Index, base: BaseRef) -> Index:
    """The same with another base of block 3."""
    return with_refs(index, lambda n, ref: ref._replace(base=base) if n == 3 else ref)


def refs_of(index: Index) -> list[BlockRef]:
    stored = index.layout(MODEL)
    assert stored is not None
    return stored.refs()


def number_of(index: Index, file: str) -> int:
    return [one.name for one in index.files].index(file)


@pytest.mark.parametrize("lie", ["in a base", "no such file", "behind the end", "too large"])
def test_a_base_that_cannot_be_one_is_refused(training: CodedTraining, lie: str) -> None:
    folder = training.folder(2)
    index = read(folder)
    base = refs_of(index)[3].base
    assert base is not None
    if lie == "in a base":
        index = with_base(index, base._replace(block=refs_of(index)[2]))
        # `runs_of` keeps the base of a base.
        assert any(part.bases for run in index.layouts[0].runs for part in run.bases)
    else:
        size = index.files[base.block.file].size_bytes
        block = {
            "no such file": base.block._replace(file=99),
            "behind the end": base.block._replace(offset=size - base.block.size_bytes + 1),
            "too large": base.block._replace(offset=0, size_bytes=BLOCK_BYTES + 1),
        }[lie]
        index = with_base(index, base._replace(block=block))
    put(folder, index)
    with raises(laststep.CorruptError, where="index-r00000", found="model.safetensors"):
        laststep.load(training.run, step=2)
    [damage] = laststep.open(training.run)[2].verify().damage
    assert (damage.file, damage.what) == (INDEX, "index")
    training.start()
    assert torch.equal(training.model["w"], training.saved[1])
    training.ckpt.close()


def test_a_base_whose_digest_is_wrong_is_damage_of_the_base(training: CodedTraining) -> None:
    folder = training.folder(2)
    index = read(folder)
    base = refs_of(index)[3].base
    assert base is not None
    other = refs_of(index)[0]
    put(folder, with_base(index, base._replace(block=other)))
    [damage] = laststep.open(training.run)[2].verify().damage
    assert (damage.file, damage.what) == (index.files[other.file].name, "block 3")
    assert damage.touches == ("model/w",)


def test_a_base_that_is_another_block_is_damage(training: CodedTraining) -> None:
    folder = training.folder(2)
    index = read(folder)
    stored = index.layout(MODEL)
    assert stored is not None
    put(folder, with_base(index, BaseRef(refs_of(index)[0], stored.digest(0))))
    [damage] = laststep.open(training.run)[2].verify().damage
    assert (damage.file, damage.what, damage.touches) == (PACK, "block 3", ("model/w",))
    with pytest.raises(laststep.CorruptError, match="block 3"):
        laststep.load(training.run, step=2)


def test_a_short_block_is_no_base_of_a_whole_one(training: CodedTraining) -> None:
    folder = training.folder(2)
    index = read(folder)
    stored = index.layout(MODEL)
    assert stored is not None
    put(folder, with_base(index, BaseRef(refs_of(index)[8], stored.digest(8))))
    assert laststep.open(training.run)[2].verify().damage
    with pytest.raises(laststep.CorruptError):
        laststep.load(training.run, step=2)


@pytest.mark.parametrize(
    "encoding",
    [
        Encoding("planes", 4),
        Encoding("planes", 16),
        Encoding("patches", 2),
        Encoding("subtract", 2),
    ],
    ids=lambda encoding: f"{encoding.codec} {encoding.element_bytes}",
)
def test_blocks_of_another_codec_than_is_said_are_damage(
    training: CodedTraining, encoding: Encoding
) -> None:
    folder = training.folder(0)
    index = read(folder)
    assert index.encodings == (Encoding("planes", 2),)
    put(folder, structs.replace(index, encodings=(encoding,)))
    damage = laststep.open(training.run)[0].verify().damage
    assert {one.file for one in damage} == {PACK}
    assert {f"block {number}" for number in range(8)} <= {one.what for one in damage}
    with pytest.raises(laststep.CorruptError):
        laststep.load(training.run, step=0)


def test_encoded_blocks_that_are_said_to_be_raw_are_refused(training: CodedTraining) -> None:
    """They would reach behind the end of the file."""
    folder = training.folder(0)
    index = read(folder)
    put(folder, with_refs(index, lambda _, ref: BlockRef(ref.file, ref.offset, ref.size_bytes)))
    with raises(laststep.CorruptError, where="index-r00000", found="model.safetensors"):
        laststep.load(training.run, step=0)


def test_a_raw_block_in_an_encoded_one_is_damage(training: CodedTraining) -> None:
    folder = training.folder(0)
    index = read(folder)
    put(
        folder,
        with_refs(index, lambda n, ref: BlockRef(ref.file, 0, BLOCK_BYTES) if n == 1 else ref),
    )
    [damage] = laststep.open(training.run)[0].verify().damage
    assert (damage.file, damage.what) == (PACK, "block 1")


def test_an_unknown_codec_is_named(training: CodedTraining) -> None:
    folder = training.folder(0)
    put(folder, structs.replace(read(folder), encodings=(Encoding("zzz", 2),)))
    for act in (laststep.open(training.run)[0].verify, lambda: laststep.load(training.run, step=0)):
        with raises(laststep.UsageError, "'zzz'"):
            act()


def test_blocks_in_any_order_with_gaps_are_read(tmp_path: Path) -> None:
    """As a writer with several threads may leave them; here they lie backwards."""
    training = CodedTraining(tmp_path / "run")
    training.save(0)
    training.ckpt.close()
    folder = training.folder(0)
    index, path = read(folder), folder / PACK
    data, body, moved = path.read_bytes(), b"", {}
    for number, ref in reversed(list(enumerate(refs_of(index)))):
        body += bytes(100_000 if number % 2 else 3)
        moved[number] = ref._replace(offset=len(body))
        body += data[ref.offset : ref.offset + ref.size_bytes]
    path.write_bytes(body)
    file = structs.replace(index.files[number_of(index, PACK)], size_bytes=len(body))
    files = tuple(file if one.name == PACK else one for one in index.files)
    index = structs.replace(with_refs(index, lambda n, _: moved[n]), files=files)
    # Other layouts may lie in the pack, too.
    assert [one.layout.name for one in index.layouts if _uses(one.runs, index)] == [MODEL]
    put(folder, index)
    training.check()
    found = laststep.open(training.run)[0].tensor("model/w")[BLOCK - 1 : BLOCK + 1]
    assert torch.equal(found, training.saved[0][BLOCK - 1 : BLOCK + 1])


def _uses(runs: tuple[BlockRun, ...], index: Index) -> bool:
    return any(index.files[run.file].name == PACK for run in runs)
