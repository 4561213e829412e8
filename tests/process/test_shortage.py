"""A lack of memory is told apart from what only looks like one."""

from __future__ import annotations

import errno

import pytest
import torch

from laststep.errors import StorageFailed
from laststep.process import shortage


class OutOfMemoryError(Exception):
    """Of a user's own."""


def torch_says() -> RuntimeError:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(1 << 60, dtype=torch.uint8)
    return raised.value


@pytest.mark.parametrize(
    "error",
    [MemoryError(), torch_says(), torch.OutOfMemoryError("CUDA"), OSError(errno.ENOMEM, "mmap")],
    ids=repr,
)
def test_too_little_memory_is_told_as_an_error_of_ours(error: Exception) -> None:
    with pytest.raises(StorageFailed, match="too little memory to save"), shortage.told("save"):
        raise error


@pytest.mark.parametrize(
    "error",
    [
        OutOfMemoryError("the queue of devices is empty"),
        RuntimeError("an object that can't allocate memory"),
        OSError(errno.EIO, "read"),
        ValueError(),
    ],
    ids=repr,
)
def test_any_other_error_stays_what_it_is(error: Exception) -> None:
    with pytest.raises(type(error)) as raised, shortage.told("save"):
        raise error
    assert raised.value is error
