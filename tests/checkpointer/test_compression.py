"""What is saved encoded comes back bit for bit; files are lent, left and read as others are."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

import laststep
from cases import long
from laststep.constants import BLOCK_BYTES
from laststep.flush import base as flush_base
from laststep.flush import writer

for _folder in ("format", "checkpointer"):
    sys.path.insert(0, str(Path(__file__).parents[1] / _folder))

import second_reader  # noqa: E402
from coded_training import BLOCKS, CodedTraining  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture
def training(tmp_path: Path) -> Iterator[CodedTraining]:
    made = CodedTraining(tmp_path / "run")
    yield made
    made.ckpt.close()


def test_weights_take_a_third_less_and_differences_next_to_nothing(training: CodedTraining) -> None:
    [first] = training.save(0)
    assert (first.file, first.mode, first.picked) == ("model.safetensors", "max", "planes, raw")
    assert first.raw_bytes == BLOCKS * BLOCK_BYTES + 6
    assert first.stored_bytes < 0.7 * first.raw_bytes
    training.touch(*range(BLOCKS))
    [second] = training.save(1)
    assert second.picked == "patches"
    assert second.stored_bytes < 2000
    assert training.codecs(1)[:BLOCKS] == ["patches"] * BLOCKS
    training.check()
    found = second_reader.read(training.run)["model"]["w"].data
    assert found == training.saved[1].view(torch.uint8).numpy().tobytes()


def test_differences_are_always_to_a_block_that_stands_alone(training: CodedTraining) -> None:
    for step in range(6):
        training.touch(2, 3)
        training.save(step)
    assert training.codecs(5)[2:4] == ["patches"] * 2
    assert sorted(path.name for path in training.folder(5).iterdir()) == [
        "blocks-r00000.pack",
        "blocks-r00000~1-1.pack",
        "index-r00000",
        "manifest.json",
    ]
    bases = [place.base for place in training.places(5)[2:4]]
    assert {(base.file, base.encoding.codec) for base in bases} == {
        ("blocks-r00000~1-1.pack", "planes")
    }
    training.check()


def test_a_file_is_lent_on_though_what_some_of_its_blocks_needed_is_gone(
    training: CodedTraining,
) -> None:
    training.save(0)
    training.redraw(5, 7)
    training.save(1)
    training.touch(5)  # is told by its difference to that of step 1
    training.redraw(6, 7)
    training.save(2)
    training.redraw(5)  # and with that nothing is needed of step 1 any more
    training.save(3)
    assert not (training.folder(3) / "blocks-r00000~1-2.pack").exists()
    assert training.places(3)[6].file == "blocks-r00000~1-3.pack"
    training.check()
    training.ckpt.close()
    training.start(compression="none")  # what is lent is found in the files
    training.touch(0)
    training.save(4)
    training.check()


@pytest.mark.parametrize("flush", ["thread", *long("process")])
def test_other_ways_of_encoding_from_start_to_start_go_together(tmp_path: Path, flush: str) -> None:
    training = CodedTraining(tmp_path / "run", flush=flush)
    step = 0
    for compression in ("max", "none", "planes", {"model": "max", "*": "none"}, "adaptive"):
        training.ckpt.close()
        training.start(flush=flush, compression=compression)
        for _ in range(2):
            training.touch(step % BLOCKS)
            training.save(step)
            step += 1
    training.ckpt.close()
    training.check()
    kinds = {codec for at in range(step) for codec in training.codecs(at)}
    assert kinds >= {"", "planes", "patches"}


def test_a_folder_that_is_encoded_is_whole_when_it_is_copied_and_the_rest_is_gone(
    training: CodedTraining, tmp_path: Path
) -> None:
    training.save(0)
    training.touch(1, 2)
    training.save(1)
    copy = Path(shutil.copytree(training.folder(1), tmp_path / "copy"))
    training.ckpt.close()
    shutil.rmtree(training.run)
    assert torch.equal(laststep.load(copy)["model"]["w"], training.saved[1])


def test_no_encoded_file_is_shared_by_more_than_so_many(
    training: CodedTraining, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flush_base, "MAX_SHARERS", 3)
    for step in range(9):
        training.touch(step % BLOCKS)
        training.save(step)
    links = [path.stat().st_nlink for path in training.run.rglob("*.pack")]
    assert max(links) == 4  # its own, and three more
    training.check()


def test_retention_takes_what_nobody_needs_and_leaves_the_anchors(tmp_path: Path) -> None:
    training = CodedTraining(tmp_path / "run", keep=laststep.Keep(last=2))
    for step in range(6):
        training.touch(step % BLOCKS)
        training.save(step)
    training.ckpt.close()
    assert laststep.open(training.run).steps() == [4, 5]
    assert "patches" in training.codecs(5)
    training.check()


def test_after_a_rollback_differences_are_to_what_was_rolled_back_to(
    training: CodedTraining,
) -> None:
    for step in range(4):
        training.redraw(1)
        training.save(step)
    restored = training.ckpt.restore(1)
    assert restored.step == 1
    training.touch(1)
    training.save(2)
    loaded = laststep.load(training.run)
    assert torch.equal(loaded["model"]["w"], training.saved[2])
    training.check()


def test_part_of_a_checkpoint_is_restored_alone(training: CodedTraining) -> None:
    training.save(0)
    training.touch(4)
    training.save(1)
    training.model["w"].zero_()
    training.small["n"] = -1
    training.ckpt.restore(only=["model"])
    assert torch.equal(training.model["w"], training.saved[1])
    assert training.small["n"] == -1


def test_a_failed_save_is_no_anchor_of_the_next(
    training: CodedTraining, monkeypatch: pytest.MonkeyPatch
) -> None:
    training.save(0)
    finish = writer.PackWriter.finish

    def fails(*_: object) -> None:
        raise laststep.StorageError("a disk", found="EIO")

    monkeypatch.setattr(writer.PackWriter, "finish", fails)
    training.redraw(1, 2)
    with pytest.raises(laststep.StorageError):
        training.ckpt.save(1).wait()
    monkeypatch.setattr(writer.PackWriter, "finish", finish)
    training.touch(1, 3)  # block 1 is close to what was never committed
    training.save(2)
    assert training.codecs(2)[1] == "planes"
    assert training.codecs(2)[3] == "patches"
    training.check()


def test_an_encoded_checkpoint_is_exported(training: CodedTraining, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    from laststep.cli import app

    training.save(0)
    training.touch(2)
    training.save(1)
    words = ["export", str(training.run), str(tmp_path / "hf"), "--format", "hf"]
    with pytest.raises(SystemExit) as ended:
        app([*words, "--item", "model"])
    assert ended.value.code in (0, None)
    [file] = (tmp_path / "hf").glob("*.safetensors")
    assert torch.equal(load_file(file)["w"], training.saved[1])


def test_what_is_adaptive_saves_as_it_is_without_zstandard_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "laststep.codecs.planes", None)
    training = CodedTraining(tmp_path / "run", compression="adaptive")
    for step in range(2):
        training.touch(1)
        [report] = training.save(step)
        assert report.picked == "raw"
        assert "zstandard" in report.why
        assert "laststep[compress]" in report.why
    training.ckpt.close()
    training.check()


def test_max_is_refused_at_once_without_zstandard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "laststep.codecs.planes", None)
    with pytest.raises(laststep.UsageError, match=r"zstandard.*laststep\[compress\]"):
        CodedTraining(tmp_path / "run", compression="max")


@pytest.mark.parametrize(
    "read",
    [
        laststep.load,
        lambda run: laststep.open(run).latest().tensor("model/w")[:5],
        lambda run: laststep.open(run).latest().verify(),
    ],
    ids=["load", "tensor", "verify"],
)
def test_without_zstandard_a_reader_names_the_codec_and_what_to_install(
    training: CodedTraining, read: Callable[[Path], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    training.save(0)
    training.ckpt.close()
    monkeypatch.setitem(sys.modules, "laststep.codecs.planes", None)
    with pytest.raises(
        laststep.UsageError, match=r"'planes' needs .*zstandard.*laststep\[compress\]"
    ):
        read(training.run)


def test_what_is_encoded_lies_in_a_pack_and_only_the_index_knows_it(
    training: CodedTraining,
) -> None:
    training.save(0)
    names = sorted(path.name for path in training.folder(0).iterdir())
    assert names == ["blocks-r00000.pack", "index-r00000", "manifest.json"]
    places = training.places(0)
    assert (training.folder(0) / "blocks-r00000.pack").stat().st_size == sum(
        place.size_bytes for place in places
    )
    manifest = json.loads((training.folder(0) / "manifest.json").read_bytes())["manifest"]
    assert "planes" not in json.dumps(manifest)
