"""Tensors that lose their memory, or their plain form, between two saves."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

import laststep
from cases import long
from expect import raises
from laststep.state.tensors import is_backed, needed_bytes

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

CAPTURES = ["auto", "lazy", "blocking"]
LARGE = 20 << 20  # elements of 4 bytes: more than is staged on the host


def freed(tensor: torch.Tensor) -> None:
    tensor.untyped_storage().resize_(0)


def shrunk(tensor: torch.Tensor) -> None:
    tensor.untyped_storage().resize_(tensor.nbytes - 1)


def step() -> None:
    """An optimizer's step, so that the next save may be lazy."""
    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.ones(1)
    torch.optim.SGD([parameter], lr=0.1).step()


def test_a_tensor_without_an_address_has_no_bytes(run_folder: Path) -> None:
    zeros = torch._efficientzerotensor(5)
    with pytest.raises(laststep.UsageError) as caught:
        laststep.save({"x": zeros}, run_folder)
    assert caught.value.found == "0 bytes"


@pytest.mark.parametrize(
    ("loss", "size"), [(freed, LARGE), (shrunk, 1000), *long((freed, 1000), (shrunk, LARGE))]
)
@pytest.mark.parametrize("capture", CAPTURES)
def test_a_tensor_without_its_memory_is_named_and_the_next_save_works(
    capture: str, loss: Callable[[torch.Tensor], None], size: int, run_folder: Path
) -> None:
    state = {"kept": torch.ones(3), "lost": torch.ones(size), "view": torch.ones(9)[4:]}
    with laststep.Checkpointer(
        run_folder,
        state=state,
        options=laststep.Options(capture=capture, flush="thread"),
        host_memory_bytes=64 << 20,
    ) as checkpointer:
        step()
        checkpointer.save(0).wait()
        for number, name in enumerate(["lost", "view"]):
            step()
            whole = state[name]
            state[name] = whole.clone()
            checkpointer.save(3 * number + 1).wait()
            loss(state[name])
            with raises(laststep.UsageError, where=f"{name} of item 'state'", expected=True):
                checkpointer.save(3 * number + 2)
            state[name] = whole
            checkpointer.save(3 * number + 3).wait()
    assert laststep.open(run_folder).steps() == [0, 1, 3, 4, 6]
    loaded = laststep.load(run_folder)["state"]
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())


def shrunk_in_place() -> tuple[torch.Tensor, Callable[[], None]]:
    """A tensor, and how its storage becomes smaller without being moved: the allocator gives the
    block that was just freed out again."""
    for size in range(512, 1 << 20, 512):
        tensor = torch.ones(size, dtype=torch.uint8)
        storage, address = tensor.untyped_storage(), tensor.data_ptr()

        def shrink(storage: torch.UntypedStorage = storage, size: int = size) -> None:
            storage.resize_(0)
            storage.resize_(size - 1)

        shrink()
        if tensor.data_ptr() == address:
            storage.resize_(0)
            storage.resize_(size)
            if tensor.data_ptr() == address:
                return tensor.fill_(1), shrink
    pytest.skip("this heap gives no block out again that was just freed")


def test_a_storage_that_was_made_smaller_in_place_is_noticed(run_folder: Path) -> None:
    tensor, shrink = shrunk_in_place()
    state = {"x": tensor}
    with laststep.Checkpointer(
        run_folder, state=state, options=laststep.Options(flush="thread")
    ) as checkpointer:
        for number in (0, 1):
            checkpointer.save(number).wait()
        shrink()
        with raises(laststep.UsageError, where="x of item 'state'", expected=True, found=True):
            checkpointer.save(2)


def test_a_restore_does_not_write_into_memory_that_is_gone(run_folder: Path) -> None:
    state = {"x": torch.ones(1000)}
    with laststep.Checkpointer(
        run_folder, state=state, options=laststep.Options(flush="thread")
    ) as checkpointer:
        checkpointer.save(0).wait()
        freed(state["x"])
        with raises(laststep.UsageError, where="x of item 'state'", expected="4000", found="0"):
            checkpointer.restore()


def sparse() -> torch.Tensor:
    return torch.eye(4).to_sparse()


def mkldnn() -> torch.Tensor:
    return torch.ones(4, 4).to_mkldnn()


def nested() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(3, 3)])


def meta() -> torch.Tensor:
    return torch.empty(4, 4, device="meta")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("capture", CAPTURES)
@pytest.mark.parametrize("make", [mkldnn, nested, meta])
def test_a_tensor_that_becomes_what_cannot_be_stored_is_refused_by_name(
    make: Callable[[], torch.Tensor], capture: str, run_folder: Path
) -> None:
    state = {"kept": torch.ones(3), "x": torch.ones(4, 4)}
    with laststep.Checkpointer(
        run_folder, state=state, options=laststep.Options(capture=capture, flush="thread")
    ) as checkpointer:
        for number in (0, 1):
            step()
            checkpointer.save(number).wait()
        state["x"] = make()
        for number in (2, 3):
            with raises(laststep.UsageError, where="x of item 'state'", remedy=True):
                checkpointer.save(number)
        state["x"] = torch.ones(4, 4)
        checkpointer.save(4).wait()
    assert laststep.open(run_folder).steps() == [0, 1, 4]


@pytest.mark.parametrize("capture", CAPTURES)
def test_a_tensor_that_becomes_sparse_is_stored_as_such(capture: str, run_folder: Path) -> None:
    model = nn.Linear(4, 4, bias=False)
    with laststep.Checkpointer(
        run_folder, model=model, options=laststep.Options(capture=capture, flush="thread")
    ) as checkpointer:
        for number in (0, 1):
            step()
            checkpointer.save(number).wait()
        model.weight = nn.Parameter(sparse(), requires_grad=False)
        checkpointer.save(2).wait()
        found = laststep.load(run_folder)["model"]["weight"]
        assert found.layout is torch.sparse_coo
        assert torch.equal(found.to_dense(), torch.eye(4))
        model.weight = nn.Parameter(torch.ones(4, 4))
        checkpointer.save(3).wait()
    assert laststep.open(run_folder).steps() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("tensor", "needed"),
    [
        (torch.ones(5), 20),
        (torch.ones(5)[2:], 20),
        (torch.ones(4, 3).t(), 48),
        (torch.ones(4, 3)[1:3, :1], 28),
        (torch.ones(1).expand(9), 4),
        (torch.ones(()), 4),
        (torch.ones(7)[7:], 0),
    ],
)
def test_how_far_a_tensor_reaches_into_its_storage(tensor: torch.Tensor, needed: int) -> None:
    assert needed_bytes(tensor) == needed
    assert is_backed(tensor)
    if needed:
        tensor.untyped_storage().resize_(needed - 1)
        assert not is_backed(tensor)
