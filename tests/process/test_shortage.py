"""A lack of memory is told apart from what only looks like one."""

from __future__ import annotations

import errno

import pytest
import torch

from expect import raises
from laststep.errors import StorageError
from laststep.process import system


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
    with raises(StorageError, found=True), system.translate_oom("save"):
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
    with pytest.raises(type(error)) as raised, system.translate_oom("save"):
        raise error
    assert raised.value is error
