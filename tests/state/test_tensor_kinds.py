"""Every kind of tensor: dtypes, strides, sharing, sparse layouts, subclasses."""

from __future__ import annotations

import warnings
import weakref
from typing import TYPE_CHECKING, Self

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import laststep
from expect import raises
from laststep.constants import DTYPES
from laststep.errors import CorruptError
from laststep.state import tensors
from laststep.state.boxes import MemoryRange, find_overlaps, find_ties
from laststep.state.collecting import CollectCache, collect
from laststep.state.tensors import TORCH_DTYPES
from laststep.state.tree import Piece, TensorSpec, decode_item, encode_item

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def raw(tensor: torch.Tensor) -> bytes:
    """The bits in row-major order, whatever the dtype."""
    if tensor.numel() == 0:
        return b""
    return bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist())


def random_bits(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    size = torch.empty(shape, dtype=dtype).nbytes
    generator = torch.Generator().manual_seed(size)
    high = 2 if dtype is torch.bool else 256
    data = torch.randint(0, high, (size,), dtype=torch.uint8, generator=generator)
    return data.view(dtype).view(shape)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("saves", [1, 2])
def test_every_dtype_comes_back_bit_by_bit_dense_strided_scalar_and_empty(
    saves: int, carry: Callable[..., object]
) -> None:
    source: dict[str, torch.Tensor] = {}
    for name, dtype in TORCH_DTYPES.items():
        source[name] = random_bits(dtype, 3, 5)
        source[f"{name} empty"] = torch.empty((0, 4), dtype=dtype)
        source[f"{name} scalar"] = random_bits(dtype, 1).view(())
        source[f"{name} strided"] = random_bits(dtype, 4, 6).t()
        source[f"{name} columns"] = random_bits(dtype, 4, 6)[:, 1:3]
    target = {
        key: torch.empty(t.shape, dtype=t.dtype)
        if "strided" not in key
        else torch.empty(tuple(reversed(t.shape)), dtype=t.dtype).t()
        for key, t in source.items()
    }
    expected = {
        # The bits of a strided tensor without relying on copies of that dtype.
        key: bits_of(t)
        for key, t in source.items()
    }
    carry({"s": source}, {"s": target}, saves=saves)
    wrong = [key for key, t in target.items() if bits_of(t) != expected[key]]
    assert wrong == []


def bits_of(tensor: torch.Tensor) -> list[object]:
    if tensor.dtype.itemsize == 16:
        return torch.view_as_real(tensor).view(torch.int64).tolist()
    as_int = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(as_int[tensor.dtype.itemsize]).tolist()


def test_every_dtype_of_torch_that_can_be_stored_is_known() -> None:
    known = set(TORCH_DTYPES.values())
    every = {d for d in vars(torch).values() if isinstance(d, torch.dtype)}
    # What is left are quantised types, types of less than a byte that torch cannot fill, and
    # bcomplex32 of torch 2.15, which the format has no name for.
    left = {str(d).removeprefix("torch.") for d in every - known}
    assert all(n.startswith(("q", "uint", "int", "bits", "bcomplex32")) for n in left), left
    assert set(DTYPES) == set(TORCH_DTYPES)


def test_quantised_tensors_are_refused(tmp_path: Path) -> None:
    with warnings.catch_warnings(action="ignore"):
        tensor = torch._empty_affine_quantized([2], scale=1.0, zero_point=0, dtype=torch.qint8)
    with pytest.raises(laststep.UsageError, match="qint8"):
        laststep.save({"q": tensor}, tmp_path / "one")


@pytest.mark.filterwarnings("ignore:BComplex32 support is experimental")
@pytest.mark.skipif(not hasattr(torch, "bcomplex32"), reason="needs bcomplex32 (torch 2.15)")
def test_a_dtype_that_the_format_does_not_know_is_refused(tmp_path: Path) -> None:
    tensor = torch.zeros(2, dtype=torch.bcomplex32)
    with pytest.raises(laststep.UsageError, match="bcomplex32"):
        laststep.save({"z": tensor}, tmp_path / "one")


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.arange(24.0).view(2, 3, 4).permute(2, 0, 1),
        lambda: torch.arange(48.0).view(1, 3, 4, 4).to(memory_format=torch.channels_last),
        lambda: torch.arange(20.0)[3::4],
        lambda: torch.arange(3.0).expand(4, 3),
        lambda: torch.tensor(2.5),
        lambda: torch.empty(0),
        lambda: torch.empty(3, 0, 2),
        lambda: torch.tensor([1 + 2j, 3 - 4j]).conj(),
        lambda: torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
        lambda: torch.conj(torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex128)[::2]),
        lambda: torch.ones(3, requires_grad=True) * 2,
        lambda: torch.arange(6.0).as_strided((3, 3), (1, 1)),
    ],
)
@pytest.mark.parametrize("saves", [1, 2])
def test_tensors_of_any_stride_and_view_come_back(
    make: Callable[[], torch.Tensor], saves: int, carry: Callable[..., object]
) -> None:
    source = make()
    target = {"t": torch.zeros(source.shape, dtype=source.dtype)}
    carry({"s": {"t": source}}, {"s": target}, saves=saves)
    assert torch.equal(target["t"], source)


def test_tensors_are_restored_into_views_of_any_kind(carry: Callable[..., object]) -> None:
    value = torch.tensor([1 + 2j, 3 - 4j, 5j])
    back = torch.zeros(6, dtype=torch.complex64)
    conj = torch.zeros(3, dtype=torch.complex64)
    image = torch.zeros(1, 3, 4, 4).to(memory_format=torch.channels_last)
    target = {"strided": back[::2], "conj": conj.conj(), "image": image, "p": torch.zeros(2)}
    source = {
        "strided": value,
        "conj": value,
        "image": torch.arange(48.0).view(1, 3, 4, 4),
        "p": torch.ones(2),
    }
    carry({"s": source}, {"s": target})
    assert back.tolist() == [1 + 2j, 0, 3 - 4j, 0, 5j, 0]
    assert torch.equal(conj.conj().resolve_conj(), value)
    assert target["image"] is image
    assert torch.equal(image, source["image"])


@pytest.mark.parametrize("elements", [3, 20 << 20])  # copied through torch; by address
@pytest.mark.parametrize(
    ("dtype", "mark"), [(torch.float32, torch._neg_view), (torch.complex64, torch.conj)]
)
def test_what_is_marked_as_negated_or_conjugated_after_a_save_is_stored_by_its_value(
    elements: int, dtype: torch.dtype, mark: Callable[[torch.Tensor], torch.Tensor], tmp_path: Path
) -> None:
    live = torch.full((elements,), 1 + 2j).to(dtype) if dtype.is_complex else torch.ones(elements)
    with laststep.Checkpointer(tmp_path / "run", s={"t": live}) as run:
        run.save(0)
        live.data = mark(live.data)
        assert live.is_contiguous()
        run.save(1)
    stored = laststep.load(tmp_path / "run")["s"]["t"]
    assert torch.equal(stored, live)


def test_a_lone_conjugate_view_is_restored_in_place(carry: Callable[..., object]) -> None:
    memory = torch.zeros(2, dtype=torch.complex64)
    carry({"z": torch.tensor([1 + 2j, 3j])}, {"z": memory.conj()})
    assert torch.equal(memory, torch.tensor([1 - 2j, -3j]))


def test_tied_and_overlapping_tensors_are_stored_once_and_share_again(tmp_path: Path) -> None:
    memory = torch.arange(1000.0)
    state = {
        "whole": memory,
        "again": memory,
        "head": memory[:600],
        "tail": memory[400:],
        "square": memory[:900].view(30, 30),
        "every third": memory[::3],
        "bytes": memory.view(torch.uint8)[5:77],
        "apart": torch.arange(3.0),
    }
    laststep.save(state, tmp_path / "one")
    size = sum(file.stat().st_size for file in (tmp_path / "one").iterdir())
    assert size < 4000 + 3 * 4096
    loaded = laststep.load(tmp_path / "one")
    assert all(torch.equal(loaded[key], state[key]) for key in state)
    loaded["whole"][500] = -1
    assert loaded["again"][500] == loaded["head"][500] == loaded["tail"][100] == -1
    assert loaded["square"][16, 20] == -1
    fresh = {key: torch.zeros_like(value) for key, value in state.items()}
    laststep.load(tmp_path / "one", into=fresh)
    assert all(torch.equal(fresh[key], state[key]) for key in state)


def test_views_of_different_element_sizes_that_overlap_keep_their_bytes(
    carry: Callable[..., object],
) -> None:
    memory = torch.arange(64, dtype=torch.uint8)
    source = {
        "bytes": memory[17:30],
        "words": memory.view(torch.int16)[9:20],
        "long": memory.view(torch.int64)[3:6],
    }
    target = {key: torch.zeros_like(t) for key, t in source.items()}
    carry({"s": source}, {"s": target})
    assert all(torch.equal(target[key], source[key]) for key in source)


def test_slices_of_one_flat_buffer_that_do_not_touch_are_stored_apart() -> None:
    flat = torch.arange(100.0)
    collected = collect({"a": flat[:40], "b": flat[40:], "big": torch.zeros(7)})
    assert [piece.name for piece in collected.pieces] == ["a", "b", "big"]
    assert not collected.ties
    assert not collected.views


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 60), st.integers(0, 20)), max_size=12))
def test_groups_of_overlaps_are_disjoint_and_hold_all_that_touches(
    windows: list[tuple[int, int, int]],
) -> None:
    extents = [
        MemoryRange(str(n), storage, start, start + size, (start, size))
        for n, (storage, start, size) in enumerate(windows)
    ]
    ties = find_ties(extents)
    assert not set(ties) & set(ties.values())
    left = [e for e in extents if e.name not in ties and e.start < e.stop]
    overlaps = find_overlaps(left)
    grouped = {member.name: n for n, overlap in enumerate(overlaps) for member in overlap}
    assert len(grouped) == sum(map(len, overlaps))
    for a in left:
        for b in left:
            if a is not b and a.storage == b.storage and a.start < b.stop and b.start < a.stop:
                assert grouped[a.name] == grouped[b.name]
    for overlap in overlaps:
        assert overlap[0].start == min(member.start for member in overlap)


@pytest.mark.parametrize(
    "make",
    [
        lambda d: d.to_sparse_coo(),
        lambda d: d.to_sparse_csr(),
        lambda d: d.to_sparse_csc(),
        lambda d: d.to_sparse_bsr((2, 2)),
        lambda d: d.to_sparse_bsc((2, 2)),
    ],
    ids=["coo", "csr", "csc", "bsr", "bsc"],
)
@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta")
def test_sparse_tensors_come_back_whatever_the_live_one_holds(
    make: Callable[[torch.Tensor], torch.Tensor], carry: Callable[..., object]
) -> None:
    dense = torch.zeros(4, 6)
    dense[0, 1], dense[2, 3], dense[3, 5] = 1.5, -2.0, 3.0
    source = make(dense)
    for current in (make(torch.zeros(4, 6)), make(torch.ones(4, 6)), None):
        target = {"t": current}
        carry({"s": {"t": source}}, {"s": target}, saves=2)
        assert target["t"].layout == source.layout
        assert torch.equal(target["t"].to_dense(), dense)


def test_an_uncoalesced_sparse_tensor_stays_uncoalesced(carry: Callable[..., object]) -> None:
    source = torch.sparse_coo_tensor([[0, 0, 1]], [1.0, 2.0, 3.0], (4,), check_invariants=True)
    target = {"t": None}
    carry({"s": {"t": source}}, {"s": target})
    assert not target["t"].is_coalesced()
    assert target["t"]._values().tolist() == [1, 2, 3]


class Pair(torch.Tensor):
    """A subclass that wraps two tensors."""

    @staticmethod
    def __new__(cls, a: torch.Tensor, b: torch.Tensor) -> Self:
        made = torch.Tensor._make_wrapper_subclass(cls, a.shape, dtype=a.dtype)
        made.a, made.b = a, b
        return made

    __torch_dispatch__ = None


class Stranger(torch.Tensor):
    pass


def test_a_tensor_subclass_is_refused_until_its_parts_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensors, "_HANDLERS", {})
    value = Pair(torch.arange(3.0), torch.ones(2))
    with raises(laststep.UsageError, "Pair", remedy="register_tensor_type"):
        laststep.save({"t": value}, tmp_path / "one")
    laststep.register_tensor_type(
        Pair,
        name="tests.Pair",
        to_parts=lambda t: {"a": t.a, "b": t.b, "note": "x"},
        from_parts=lambda parts: Pair(parts["a"], parts["b"]),
    )
    laststep.save({"t": value}, tmp_path / "one")
    loaded = laststep.load(tmp_path / "one")["t"]
    assert type(loaded) is Pair
    assert loaded.a.tolist() == [0, 1, 2]
    monkeypatch.setattr(tensors, "_HANDLERS", {})
    with raises(laststep.UsageError, "'tests.Pair'", remedy="register"):
        laststep.load(tmp_path / "one")
    with raises(laststep.UsageError, "Stranger"):
        laststep.save({"t": torch.zeros(1).as_subclass(Stranger)}, tmp_path / "two")


def test_a_meta_tensor_is_refused_by_its_path(tmp_path: Path) -> None:
    with raises(laststep.UsageError, where="a['b']"):
        laststep.save({"a": {"b": torch.empty(2, device="meta")}}, tmp_path / "one")


@pytest.mark.parametrize(
    "view",
    [
        ("base", "float32", (5,), (1,), 0),
        ("base", "float32", (2,), (1,), 12),
        ("base", "float32", (1,), (1,), 2),
        ("base", "float32", (1 << 40, 1 << 40), (1 << 40, 1), 0),
        ("base", "nonsense", (1,), (1,), 0),
        ("t", "float32", (1,), (1,), 0),
        ("base", "float32", (1, 1), (1,), 0),
        ("base", "float32", (1,), (-1,), 0),
    ],
)
def test_a_view_that_leaves_its_base_is_corrupt(view: tuple[object, ...]) -> None:
    from laststep.codecs import objects
    from laststep.codecs.objects import TensorRef

    tensors = {"base": TensorSpec("uint8", (16,)), "t": TensorSpec("float32", (4,))}

    def decode(entry: object) -> object:
        tree = {"tree": [TensorRef("v")], "ties": {}, "views": {"v": entry}}
        data = objects.encode(tree)
        return decode_item([(data, "here")], name="i", kind="value", tensors=tensors)

    decode(("base", "float32", (4,), (1,), 0))
    with pytest.raises(CorruptError):
        decode(view)


def test_an_items_tree_is_encoded_and_decoded_to_itself() -> None:
    memory = torch.arange(8.0)
    collected = collect({"a": memory, "b": memory[2:], "c": [1, (memory, 2)]})
    specs = {piece.name: TensorSpec(piece.dtype, piece.shape) for piece in collected.pieces}
    item = decode_item([(encode_item(collected), "here")], name="i", kind="value", tensors=specs)
    assert item.tree == collected.tree
    assert item.ties == collected.ties
    assert item.views == collected.views
    assert set(item.names) == {"a", "b", "c/#1/#0"}
    assert isinstance(collected.pieces[0], Piece)


def test_the_first_look_at_a_state_finds_the_very_tensors_that_the_next_one_will() -> None:
    layer = torch.nn.Linear(3, 2)
    value = {"weight": layer.weight, "bias": layer.bias, "tied": layer.weight}
    cache = CollectCache()
    first = collect(value, cache=cache)
    again = collect(value, cache=cache)
    assert [id(source) for source in first.sources] == [id(layer.weight), id(layer.bias)]
    assert [id(source) for source in again.sources] == [id(source) for source in first.sources]
    assert again.pieces is first.pieces


class GivenMesh:
    """What is asked of a DeviceMesh, without a job."""

    mesh = torch.arange(2)
    mesh_dim_names = ("data",)


def test_meshes_that_are_no_longer_used_are_let_go_of() -> None:
    meshes = [GivenMesh() for _ in range(300)]
    first = weakref.ref(meshes[0])
    for mesh in meshes:
        assert tensors.mesh_of(mesh).sizes == (2,)
    del mesh, meshes
    assert first() is None
