"""Headers that name masters which cannot be: each is damage, and none is followed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from msgspec import structs

from laststep.codecs.digests import digest, digest_text
from laststep.codecs.rounding import rounded
from laststep.errors import Corrupt
from laststep.format.borrowing import Stretch
from laststep.format.coding import RAW, CodedBlock
from laststep.format.deriving import ROUNDED, Master
from laststep.format.header import Header, encode_header, reserve_packed_bytes
from laststep.format.manifest import FileRecord
from laststep.format.safetensors import TensorEntry
from laststep.read.files import open_file
from laststep.storage.directory import DirectoryStore

if TYPE_CHECKING:
    from pathlib import Path

    from laststep.read.files import Opened

VALUES = np.arange(12, dtype=np.float32)
WEIGHTS = bytes(rounded(VALUES.tobytes(), "bfloat16"))
NAME, MASTERS = "model.safetensors", "masters.safetensors"


def written(folder: Path, name: str, header: Header, data: bytes) -> FileRecord:
    size = reserve_packed_bytes(header, codecs=["rounded", "raw"])
    region = encode_header(header, region_bytes=size)
    (folder / name).write_bytes(region + data)
    return FileRecord(
        name=name, size_bytes=len(region) + len(data), header_bytes=len(region),
        header_digest=digest_text(region),
    )  # fmt: skip


def packed(item: str, tensors: tuple[TensorEntry, ...], image: bytes, **more: object) -> Header:
    """A header of one block."""
    made = Header(
        item=item, tensors=tensors, objects=(), tensor_bytes=len(image),
        blocks=digest(image), coded=(CodedBlock(0, len(image), RAW),),
    )  # fmt: skip
    return structs.replace(made, **more)


class Files:
    """A file of masters, and one that follows from it."""

    def __init__(self, folder: Path) -> None:
        self.store = DirectoryStore(str(folder))
        self.folder = folder / "a"
        self.folder.mkdir()
        entry = TensorEntry("w", "float32", (12,), 0, 48)
        self.among: dict[str, FileRecord] = {}
        self.add(MASTERS, packed("masters", (entry,), VALUES.tobytes()), VALUES.tobytes())
        self.model = packed(
            "model", (TensorEntry("w", "bfloat16", (12,), 0, 24),), WEIGHTS,
            coded=(CodedBlock(0, 1, ROUNDED),), derived={"w": Master(MASTERS, "w")},
        )  # fmt: skip

    def add(self, name: str, header: Header, data: bytes) -> None:
        self.among[name] = written(self.folder, name, header, data)

    def open(self, data: bytes = b"\x01", **changes: object) -> Opened:
        self.add(NAME, structs.replace(self.model, **changes), data)
        return open_file(self.store, "a", self.among[NAME], self.among)


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def test_a_block_is_the_rounding_of_its_master(files: Files) -> None:
    file = files.open().sound()
    into = memoryview(bytearray(24))
    assert file.blocks(0, 24).read(into) == []
    assert bytes(into) == WEIGHTS
    file.close()


def refused(opened: Opened, found: str) -> None:
    with pytest.raises(Corrupt, match=found):
        opened.sound()


def test_a_master_that_is_not_there_is_damage(files: Files) -> None:
    refused(files.open(derived={"w": Master(MASTERS, "x")}), "not there")
    refused(files.open(derived={"w": Master("none.safetensors", "w")}), "none of the checkpoint")


def test_a_tensor_does_not_follow_from_itself(files: Files) -> None:
    refused(files.open(derived={"w": Master(NAME, "w")}), "bfloat16")


@pytest.mark.parametrize(
    "entry",
    [
        TensorEntry("w", "float32", (3, 4), 0, 48),
        TensorEntry("w", "int32", (12,), 0, 48),
        TensorEntry("w", "bfloat16", (24,), 0, 48),
    ],
)
def test_a_master_of_another_form_is_damage(files: Files, entry: TensorEntry) -> None:
    files.add(MASTERS, packed("masters", (entry,), VALUES.tobytes()), VALUES.tobytes())
    refused(files.open(), "for 'w'")


def test_a_master_that_needs_others_itself_is_damage(files: Files) -> None:
    tensors = (
        TensorEntry("w", "float32", (12,), 0, 48), TensorEntry("b", "bfloat16", (12,), 48, 72),
    )  # fmt: skip
    header = packed(
        "masters", tensors, VALUES.tobytes() + WEIGHTS, derived={"b": Master(MASTERS, "w")},
        coded=(CodedBlock(0, 49, ROUNDED),),
    )  # fmt: skip
    files.add(MASTERS, header, b"\x01" + VALUES.tobytes())
    refused(files.open(), "follows from another")


def test_a_block_that_is_borrowed_follows_from_nothing(files: Files) -> None:
    files.add("model~1-1.safetensors", files.model, b"\x01")
    borrows = {
        "lent": ("model~1-1.safetensors",), "stretches": (Stretch(1, 1, 0),), "blocks": b"",
        "tensors": (), "coded": None, "derived": {},
    }  # fmt: skip
    refused(files.open(b"", **borrows), "follows from others")


@pytest.mark.parametrize("data", [b"\x00", b"\x03", b"\x01\x02", b""])
def test_what_cannot_be_put_together_is_damage(files: Files, data: bytes) -> None:
    coded = (CodedBlock(0, len(data), ROUNDED),)
    file = files.open(data, coded=coded).sound()
    (damage,) = file.blocks(0, 24).read(memoryview(bytearray(24)))
    assert (damage.file, damage.what, damage.data) == (NAME, "block 0", (0, 24))
    file.close()


def test_damage_of_a_master_is_named_with_the_bytes_that_it_touches(files: Files) -> None:
    file = files.open().sound()
    path = files.folder / MASTERS
    stored = bytearray(path.read_bytes())
    stored[-1] ^= 0x40
    path.write_bytes(stored)
    (damage,) = file.blocks(0, 24).read(memoryview(bytearray(24)))
    assert (damage.file, damage.what, damage.data) == (MASTERS, "block 0", (0, 24))
    file.close()


def test_a_missing_master_is_damage_and_leaves_nothing_open(files: Files) -> None:
    (files.folder / MASTERS).unlink()
    opened = files.open()
    assert opened.file is None
    assert [(damage.file, damage.what) for damage in opened.damage] == [(MASTERS, "missing file")]
