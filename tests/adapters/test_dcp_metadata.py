"""What DCP's metadata says is believed only as far as it can be; hostile ones run nothing."""

from __future__ import annotations

import contextlib
import pickle
import warnings
from dataclasses import replace
from pathlib import Path, PosixPath, PurePosixPath
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties as OldProperties
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from expect import raises
from laststep.adapters.importing.dcp_folder import read_folder
from laststep.adapters.importing.dcp_metadata import decode
from laststep.errors import CorruptError, LaststepError, UsageError
from laststep.state.boxes import Box

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.checkpoint.filesystem import _StorageInfo

Size = torch.Size


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tensor of 4 by 6 and a value, as torch saves them."""
    path = tmp_path_factory.mktemp("made") / "dcp"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"m": {"a": torch.ones(4, 6)}, "e": [1, 2]}, checkpoint_id=path)
    return path


@pytest.fixture
def metadata(folder: Path) -> Metadata:
    return pickle.loads((folder / ".metadata").read_bytes())  # noqa: S301


def changed(metadata: Metadata, folder: Path, target: Path) -> Path:
    """A copy of the folder with other metadata."""
    target.mkdir()
    for file in folder.glob("*.distcp"):
        (target / file.name).write_bytes(file.read_bytes())
    (target / ".metadata").write_bytes(pickle.dumps(metadata))
    return target


def tensor_of(metadata: Metadata) -> TensorStorageMetadata:
    return metadata.state_dict_metadata["m.a"]


def info_of(metadata: Metadata) -> _StorageInfo:
    return metadata.storage_data[MetadataIndex("m.a", Size([0, 0]))]


def cut(metadata: Metadata, *boxes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    """Let the tensor consist of these chunks (offsets, sizes), all of which claim to be stored."""
    info = info_of(metadata)
    tensor_of(metadata).chunks = [ChunkStorageMetadata(Size(at), Size(size)) for at, size in boxes]
    for at, _ in boxes:
        metadata.storage_data[MetadataIndex("m.a", Size(at))] = info


@pytest.mark.parametrize("protocol", range(2, 6))
def test_entries_are_the_same_in_every_protocol(metadata: Metadata, protocol: int) -> None:
    metadata.storage_meta.checkpoint_id = PurePosixPath("/some/where")
    tensor, value = decode(pickle.dumps(metadata, protocol=protocol), where="there")
    assert (tensor.name, tensor.path) == ("m.a", ("m", "a"))
    assert (tensor.shape, tensor.dtype) == ((4, 6), "float32")
    assert [part.box for part in tensor.parts] == [Box((0, 0), (4, 6))]
    assert (value.name, value.path) == ("e", ("e",))
    assert value.dtype is None
    assert [part.box for part in value.parts] == [None]


def test_metadata_of_other_versions_is_read(metadata: Metadata) -> None:
    properties = tensor_of(metadata).properties
    tensor_of(metadata).properties = OldProperties(
        dtype=properties.dtype,
        layout=properties.layout,
        requires_grad=False,
        memory_format=torch.contiguous_format,
        pin_memory=False,
    )
    data = pickle.dumps(metadata, protocol=2)
    assert b"sharded_tensor.metadata" in data
    names = {b"cpathlib\n", b"cpathlib._local\n"}  # the latter in Python 3.13
    [found] = [name for name in names if name in data]
    [other] = names - {found}
    renamed = data.replace(found, other)
    assert decode(renamed, where="there") == decode(data, where="there")


def test_strides_are_passed_over(metadata: Metadata, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.15 adds them to the metadata, of the tensor as it was before it was stored."""
    old = decode(pickle.dumps(metadata), where="there")
    state = TensorProperties.__getstate__
    monkeypatch.setattr(TensorProperties, "__getstate__", lambda self: (*state(self)[:5], (1, 4)))
    assert decode(pickle.dumps(metadata), where="there") == old


def test_empty_chunks_of_ranks_without_a_share_are_passed_over(metadata: Metadata) -> None:
    cut(metadata, ((0, 0), (4, 6)), ((4, 0), (0, 6)), ((4, 0), (0, 6)))
    tensor, _ = decode(pickle.dumps(metadata), where="there")
    assert len(tensor.parts) == 1


@pytest.mark.parametrize(
    ("boxes", "found"),
    [
        ([((0, 0), (2, 6))], "[0:2, 0:6]"),
        ([], "[4, 6]"),
        ([((0, 0), (3, 6)), ((2, 0), (2, 6))], ""),
        ([((0, 0), (2, 6)), ((0, 3), (4, 3))], ""),
        ([((0, 0), (4, 6)), ((0, 0), (4, 6))], ""),
        ([((1, 0), (4, 6))], "[1:5, 0:6]"),
        ([((0, 0), (4, 3)), ((0, 3), (4, 4))], ""),
        ([((0,), (24,))], ""),
        ([((0, 0), (4,))], ""),
    ],
)
def test_chunks_that_do_not_cover_the_tensor_once_are_corrupt(
    boxes: list[tuple[tuple[int, ...], tuple[int, ...]]], found: str, metadata: Metadata
) -> None:
    cut(metadata, *boxes)
    with raises(CorruptError, found, where="there"):
        decode(pickle.dumps(metadata), where="there")


def test_many_chunks_along_any_dimension_are_checked_fast(metadata: Metadata) -> None:
    columns = 20_000
    tensor_of(metadata).size = Size([1, columns])
    cut(metadata, *(((0, column), (1, 1)) for column in range(columns)))
    tensor, _ = decode(pickle.dumps(metadata), where="there")
    assert len(tensor.parts) == columns


class Evil:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (print, ("this must never be printed",))


@pytest.mark.parametrize("field", ["planner_data", "storage_data", "storage_meta", "version"])
def test_a_class_that_is_not_admitted_is_named_and_not_run(
    field: str, metadata: Metadata, capsys: pytest.CaptureFixture[str]
) -> None:
    data = pickle.dumps(replace(metadata, **{field: {"x": Evil()}}))
    with raises(UsageError, found="builtins.print"):
        decode(data, where="there")
    assert capsys.readouterr().out == ""


def test_getattr_is_read_but_never_called(metadata: Metadata) -> None:
    class Cunning:
        def __reduce__(self) -> tuple[object, tuple[object, str]]:
            return (getattr, (PosixPath, "cwd"))

    metadata.version = Cunning()
    assert len(decode(pickle.dumps(metadata), where="there")) == 2


@pytest.mark.parametrize(
    "data",
    [
        b"h\x05.",
        b"r\xff\xff\xff\x7f.",
        b"K\x01K\x02R.",
        b"]K\x01b.",
        b"Pid\n.",
        b"\x82\x01.",
        b"(((",
        b"e.",
    ],
)
def test_hostile_pickles_are_corrupt(data: bytes) -> None:
    with pytest.raises(CorruptError):
        decode(data, where="there")


def test_every_cut_is_corrupt(metadata: Metadata) -> None:
    data = pickle.dumps(metadata)
    for length in range(len(data)):
        with pytest.raises(CorruptError):
            decode(data[:length], where="there")


@given(at=st.integers(0), new=st.binary(min_size=1, max_size=3))
def test_damaged_bytes_raise_only_our_errors(at: int, new: bytes, folder: Path) -> None:
    data = bytearray((folder / ".metadata").read_bytes())
    at %= len(data)
    data[at : at + len(new)] = new
    with contextlib.suppress(LaststepError):
        decode(bytes(data), where="there")


def set_path(name: object) -> Callable[[Metadata], None]:
    return lambda metadata: setattr(info_of(metadata), "relative_path", name)


def set_region(offset: object, length: object) -> Callable[[Metadata], None]:
    def change(metadata: Metadata) -> None:
        info = info_of(metadata)
        info.offset, info.length = offset, length

    return change


def set_shape(*shape: int) -> Callable[[Metadata], None]:
    def change(metadata: Metadata) -> None:
        tensor_of(metadata).size = Size(shape)
        cut(metadata, ((0,) * len(shape), shape))

    return change


def set_state_path(path: object) -> Callable[[Metadata], None]:
    return lambda metadata: metadata.planner_data.__setitem__("m.a", path)


def deep(levels: int) -> tuple[object, ...]:
    return ("x",) * levels


def rename(name: str) -> Callable[[Metadata], None]:
    def change(metadata: Metadata) -> None:
        metadata.state_dict_metadata[name] = metadata.state_dict_metadata["e"]
        metadata.storage_data[MetadataIndex(name)] = metadata.storage_data[MetadataIndex("e")]

    return change


def grow(metadata: Metadata) -> None:
    """Many values in the same bytes."""
    for number in range(100):
        rename(f"e{number}")(metadata)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (set_path("../secret"), "'../secret'"),
        (set_path(".."), "'..'"),
        (set_path("/etc/passwd"), ""),
        (set_path("a/b.distcp"), ""),
        (set_path("a\0b"), ""),
        (set_path(""), ""),
        (set_path(7), ""),
        (set_path("__7_0.distcp"), "__7_0.distcp"),
        (set_path("."), ""),
        (set_region(1 << 40, 10), ""),
        (set_region(0, 1 << 40), ""),
        (set_region(-5, 10), ""),
        (set_region(0, -1), ""),
        (set_region(1 << 70, 10), ""),
        (set_region(True, 10), ""),
        (set_region(0, None), ""),
        (set_shape(1 << 40), ""),
        (set_shape(1 << 31, 1 << 31), ""),
        (set_shape(*[1] * 65), "64"),
        (set_state_path(deep(201)), "'m.a'"),
        (set_state_path(()), ""),
        (set_state_path((0, "a")), ""),
        (set_state_path(["m", "a"]), ""),
        (set_state_path(("m", 1.5)), "1.5"),
        (set_state_path(("m", True)), "True"),
        (set_state_path(("m", 1 << 40)), ""),
        (set_state_path(("e", "a")), ""),
        (grow, ""),
        (lambda metadata: metadata.storage_data.clear(), ""),
        (lambda metadata: setattr(metadata, "storage_data", None), "storage_data"),
        (lambda metadata: setattr(metadata, "state_dict_metadata", []), "state_dict_metadata"),
        (lambda metadata: setattr(tensor_of(metadata), "chunks", None), ""),
        (lambda metadata: setattr(tensor_of(metadata), "properties", 1), "dtype"),
    ],
)
def test_hostile_metadata_raises_our_errors(
    change: Callable[[Metadata], None], found: str, metadata: Metadata, folder: Path, tmp_path: Path
) -> None:
    change(metadata)
    with raises(CorruptError, found):
        read_folder(changed(metadata, folder, tmp_path / "dcp"))


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps(1),
        pickle.dumps(None),
        pickle.dumps({"a": 1}),
        pickle.dumps(Metadata({})),
        pickle.dumps(PurePosixPath("x")),
        b"",
    ],
)
def test_other_pickles_are_corrupt(data: bytes) -> None:
    with pytest.raises(CorruptError):
        decode(data, where="there")


def test_what_is_sparse_or_of_an_unknown_dtype_is_refused(metadata: Metadata) -> None:
    tensor_of(metadata).properties.layout = torch.sparse_coo
    with raises(UsageError, found="'m.a'"):
        decode(pickle.dumps(metadata), where="there")
    tensor_of(metadata).properties.dtype = torch.qint8
    with raises(UsageError, found="torch.qint8"):
        decode(pickle.dumps(metadata), where="there")
