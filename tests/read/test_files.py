"""One opener of data files: whatever is wrong with one is a value, and its reader is not left open.

Written by hand from the lower layers: no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from laststep.codecs.digests import block_digests, digest, digest_text
from laststep.errors import Corrupt, Usage
from laststep.format.header import Header, ObjectEntry, encode_header, reserve_bytes
from laststep.format.manifest import FileRecord
from laststep.format.safetensors import TensorEntry
from laststep.read.files import open_file
from laststep.storage.directory import DirectoryStore

if TYPE_CHECKING:
    from pathlib import Path

TENSOR, OBJECT = bytes(range(250)) * 4, b"a tree"


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore(tmp_path, direct=False)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "step" / "m.safetensors"


@pytest.fixture
def record(path: Path) -> FileRecord:
    """A file of one tensor and one object, and what its manifest says of it."""
    size = len(TENSOR)
    tensors = (TensorEntry(name="w", dtype="uint8", shape=(size,), start=0, stop=size),)
    one = ObjectEntry(name="o", start=size, stop=size + len(OBJECT), digest=digest(OBJECT))
    region_bytes = reserve_bytes(item="m", tensors=tensors, object_names=("o",), tensor_bytes=size)
    header = Header(
        item="m", tensors=tensors, objects=(one,), tensor_bytes=size,
        blocks=block_digests(memoryview(TENSOR)),
    )  # fmt: skip
    region = encode_header(header, region_bytes=region_bytes)
    path.parent.mkdir()
    path.write_bytes(region + TENSOR + OBJECT)
    return FileRecord(
        name=path.name, size_bytes=len(region) + size + len(OBJECT), header_bytes=len(region),
        header_digest=digest_text(region),
    )  # fmt: skip


def test_a_sound_file_is_open_and_its_bytes_are_found(store, record) -> None:
    opened = open_file(store, "step", record)
    file = opened.sound()
    buffer = bytearray(len(TENSOR))
    assert file.blocks(10, 20).read(memoryview(buffer)) == []
    assert buffer == TENSOR
    (entry,) = file.header.objects
    assert file.read_object(entry) == OBJECT
    assert (opened.damage, opened.there_bytes) == ((), record.size_bytes)
    opened.close()


def test_a_missing_file_is_damage(store, record, path) -> None:
    path.unlink()
    opened = open_file(store, "step", record)
    assert (opened.file, opened.there_bytes) == (None, None)
    assert [one.what for one in opened.damage] == ["missing file"]
    with pytest.raises(Corrupt, match="a data file is missing") as caught:
        opened.sound()
    assert caught.value.missing == "step/m.safetensors"


@pytest.mark.parametrize(("change", "how"), [(-1, "short"), (1, "long")])
def test_a_file_of_the_wrong_size_still_has_a_header(store, record, path, change, how) -> None:
    path.write_bytes((path.read_bytes() + b"x")[: record.size_bytes + change])
    opened = open_file(store, "step", record)
    assert opened.header is not None
    assert opened.there_bytes == record.size_bytes + change
    (damage,) = opened.damage
    ends = sorted([record.size_bytes, record.size_bytes + change])
    assert (damage.what, damage.start) == ("size", ends[0])
    assert damage.stop == record.size_bytes + change
    with pytest.raises(Corrupt, match=f"a data file is too {how}"):
        opened.sound()
    assert opened.file is not None
    with pytest.raises(Usage, match="has been closed"):
        opened.file.reader.read_into(0, memoryview(bytearray(1)))


def test_a_changed_header_is_damage_beside_a_wrong_size(store, record, path) -> None:
    data = bytearray(path.read_bytes() + b"more")
    data[100] ^= 1
    path.write_bytes(data)
    opened = open_file(store, "step", record)
    assert opened.file is None
    assert [one.what for one in opened.damage] == ["size", "header"]
    assert (opened.damage[1].start, opened.damage[1].stop) == (0, record.header_bytes)
    assert opened.damage[1].expected == record.header_digest


def test_a_header_that_makes_no_sense_is_damage_although_its_digest_is_right(
    store, record, path
) -> None:
    region = bytes(record.header_bytes)
    path.write_bytes(region + TENSOR + OBJECT)
    record = msgspec.structs.replace(record, header_digest=digest_text(region))
    opened = open_file(store, "step", record)
    assert [one.what for one in opened.damage] == ["header"]
    with pytest.raises(Corrupt, match=r"m\.safetensors"):
        opened.sound()


def test_a_header_too_large_to_be_one_is_not_read(store, record) -> None:
    record = msgspec.structs.replace(record, header_bytes=1 << 40)
    (damage,) = open_file(store, "step", record).damage
    assert damage.error.what == "a header is too large"
    assert damage.stop == record.size_bytes


def test_where_no_manifest_vouches_for_it_a_header_speaks_for_itself(store, record, path) -> None:
    unknown = FileRecord(
        name=record.name, size_bytes=record.size_bytes, header_bytes=0, header_digest=""
    )
    opened = open_file(store, "step", unknown)
    assert opened.sound().record == record
    opened.close()
    path.write_bytes(b"\xff" * 3)
    (size, header) = open_file(store, "step", unknown).damage
    assert (size.what, header.what, header.start, header.stop) == ("size", "header", 0, 3)
