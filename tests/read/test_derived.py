"""Derived blocks are read from their masters; what cannot be put together is damage."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from msgspec import structs

from expect import raises
from laststep.codecs.digests import digest
from laststep.codecs.rounding import rounded
from laststep.constants import BLOCK_BYTES
from laststep.errors import CorruptError, UsageError
from laststep.format import index as index_format
from laststep.format.deriving import ROUNDED, Master
from laststep.format.index import BlockRun, Encoding, Index, StoredFile, StoredLayout, in_place
from laststep.plan.files import MasterPair
from laststep.read.blocks import BlockReader
from laststep.storage.directory import DirectoryStore
from saves_of import History, layout_of

if TYPE_CHECKING:
    from pathlib import Path

    from laststep.format.layout import FileLayout

VALUES = np.arange(12, dtype=np.float32).tobytes()
WEIGHTS = bytes(rounded(VALUES, "bfloat16"))
NAME, MASTERS, PACK = "model.safetensors", "masters.safetensors", "blocks-r00000.pack"
MASTER_LAYOUT = layout_of(("w", "float32", 48), name=MASTERS, item="masters")
MODEL_LAYOUT = layout_of(("w", "bfloat16", 24))


def sizes(*stored: int) -> bytes:
    return b"".join(size.to_bytes(4, "little") for size in stored)


class Files:
    """A file of masters, and a layout that is derived from it."""

    def __init__(self, folder: Path) -> None:
        self.store = DirectoryStore(str(folder), direct=False)
        self.folder = folder / "a"
        self.folder.mkdir()
        (self.folder / MASTERS).write_bytes(MASTER_LAYOUT.header() + VALUES)

    def index(
        self,
        data: bytes = b"\x01",
        masters: FileLayout = MASTER_LAYOUT,
        derived: dict[str, Master] | None = None,
    ) -> Index:
        """An index of both, of which `data` is stored of the only block of the model."""
        (self.folder / PACK).write_bytes(data)
        return Index(
            files=(
                StoredFile(name=MASTERS, size_bytes=MASTER_LAYOUT.size_bytes),
                StoredFile(name=PACK, size_bytes=len(data)),
            ),
            encodings=(Encoding(*ROUNDED),),
            layouts=(
                StoredLayout(layout=masters, digests=digest(VALUES), runs=in_place(masters, 0)),
                StoredLayout(
                    layout=MODEL_LAYOUT,
                    digests=digest(WEIGHTS),
                    runs=(BlockRun(1, 1, 0, 1, sizes(len(data))),),
                    derived={"w": Master(MASTERS, "w")} if derived is None else derived,
                ),
            ),
        )

    def open(self, data: bytes = b"\x01") -> BlockReader:
        index = self.index(data)
        index_format.encode(index)  # which checks it
        return BlockReader(self.store, "a", index)


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def refused(index: Index, found: str) -> None:
    """Neither is it written, nor read."""
    with raises(UsageError, found=found):
        index_format.encode(index)
    payload = index_format._encode(index)
    with raises(CorruptError, where="here", found=found):
        index_format.decode(digest(payload) + payload, where="here")


def test_a_block_is_the_rounding_of_its_master(files: Files) -> None:
    opened = files.open().sound()
    into = memoryview(bytearray(24))
    model = opened.layouts[1]
    assert model.blocks(0, 24).read(into) == []
    assert bytes(into) == WEIGHTS
    into[:] = bytes(24)
    extent = model.blocks(0, 24)
    assert extent.verify(into, extent.fill(into)) == []
    assert bytes(into) == WEIGHTS
    opened.close()


def test_masters_that_are_not_there_are_refused(files: Files) -> None:
    refused(files.index(derived={"w": Master(MASTERS, "x")}), f"'x' of {MASTERS!r}")
    refused(files.index(derived={"w": Master("none.safetensors", "w")}), "none.safetensors")
    refused(files.index(derived={}), NAME)


def test_a_tensor_is_not_derived_from_itself(files: Files) -> None:
    refused(files.index(derived={"w": Master(NAME, "w")}), "bfloat16")


@pytest.mark.parametrize(
    ("dtype", "shape"), [("float32", (3, 4)), ("int32", (12,)), ("bfloat16", (24,))]
)
def test_a_master_of_another_form_is_refused(
    files: Files, dtype: str, shape: tuple[int, ...]
) -> None:
    entry = MASTER_LAYOUT.tensors[0]._replace(dtype=dtype, shape=shape)
    layout = structs.replace(MASTER_LAYOUT, tensors=(entry,))
    refused(files.index(masters=layout), "'w'")


def test_a_master_that_is_derived_itself_is_refused(files: Files) -> None:
    index = files.index()
    layout = layout_of(("w", "float32", 48), ("b", "bfloat16", 24), name=MASTERS, item="masters")
    masters = StoredLayout(
        layout=layout,
        digests=digest(VALUES + WEIGHTS),
        runs=(BlockRun(1, 1, 0, 1, sizes(1)),),
        derived={"b": Master(MASTERS, "w")},
    )
    refused(structs.replace(index, layouts=(masters, index.layouts[1])), MASTERS)


@pytest.mark.parametrize("data", [b"\x00", b"\x03", b"\x01\x02"])
def test_a_block_that_cannot_be_put_together_is_damage(files: Files, data: bytes) -> None:
    opened = files.open(data).sound()
    (damage,) = opened.layouts[1].blocks(0, 24).read(memoryview(bytearray(24)))
    assert (damage.file, damage.what, damage.data) == (PACK, "block 0", (0, 24))
    opened.close()


def test_damage_of_a_master_is_named_with_the_bytes_that_it_touches(files: Files) -> None:
    opened = files.open().sound()
    path = files.folder / MASTERS
    stored = bytearray(path.read_bytes())
    stored[-1] ^= 0x40
    path.write_bytes(stored)
    (damage,) = opened.layouts[1].blocks(0, 24).read(memoryview(bytearray(24)))
    assert (damage.file, damage.what, damage.data) == (MASTERS, "block 0", (0, 24))
    opened.close()


def test_a_missing_master_is_damage(files: Files) -> None:
    (files.folder / MASTERS).unlink()
    opened = files.open()
    (damage,) = (damage for file in opened.files() for damage in file.damage)
    assert (damage.file, damage.what) == (MASTERS, "missing file")
    assert opened.layouts[1].blocks(0, 24).read(memoryview(bytearray(24)))
    with raises(CorruptError, missing=MASTERS):
        opened.sound()


@pytest.mark.parametrize("compression", ["none", "max"])
def test_masters_may_be_shared_and_encoded(tmp_path: Path, compression: str) -> None:
    """Masters that lie in the file of an earlier checkpoint, in blocks of their own."""
    count = BLOCK_BYTES // 2
    history = History(
        tmp_path,
        layout_of(
            ("a", "float32", 4 * count), ("w", "float32", 4 * count), name=MASTERS, item="masters"
        ),
        layout_of(("x", "uint8", 6), ("w", "bfloat16", 2 * count)),
        derived=[MasterPair(1, 1, 0, 1)],
        compression=compression,
    )
    chance = np.random.default_rng(1)
    first, master = (chance.standard_normal(count).astype(np.float32).tobytes() for _ in range(2))
    for step in range(3):
        weights = bytes(rounded(master, "bfloat16"))
        images = [first, b"head:" + bytes([step]) + weights]
        images[0] += master
        index = history.save(*images)
        assert history.read() == images
        assert index.layouts[1].derived == {"w": Master(MASTERS, "w")}
        master = chance.standard_normal(8).astype(np.float32).tobytes() + master[32:]
    assert index_format.written_of(index, b"").shared_bytes > 0


def test_many_small_tensors_are_derived_from_masters_in_another_order(tmp_path: Path) -> None:
    """More blocks of masters than are kept while one block is put together."""
    numbers = range(40)
    part = BLOCK_BYTES // 2
    masters = layout_of(
        *((f"m{n}", "float32", part) for n in numbers), name=MASTERS, item="masters"
    )
    order = [*numbers[::2], *numbers[1::2]]
    model = layout_of(*((f"w{n}", "bfloat16", part // 2) for n in order))
    pairs = [MasterPair(1, at, 0, n) for at, n in enumerate(order)]
    history = History(tmp_path, masters, model, derived=pairs)
    values = np.random.default_rng(1).standard_normal(len(numbers) * part // 4).astype(np.float32)
    image = values.tobytes()
    weights = bytes(rounded(image, "bfloat16"))
    half = part // 2
    moved = b"".join(weights[n * half : (n + 1) * half] for n in order)
    index = history.save(image, moved)
    assert history.read() == [image, moved]
    assert {index.encoding(ref.encoding) for ref in index.layouts[1].refs()} == {ROUNDED}
