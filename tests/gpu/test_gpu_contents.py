"""Digests of what tensors of a device hold, by which ranks compare them."""

from __future__ import annotations

import pytest
import torch

from laststep.capture.contents import Contents
from laststep.capture.kernels import prepare_kernels

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def kernels() -> None:
    prepare_kernels(torch.device("cuda", 0))


def made() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [
        torch.randn(3000, 1000).cuda(),
        torch.randn(4, 6).cuda().t(),
        torch.zeros(0, 3).cuda(),
        torch.tensor(2.0).cuda(),
        torch.randn(7).bfloat16().cuda(),
        torch.randn(5),
    ]


def test_equal_tensors_have_equal_digests_and_one_bit_makes_another() -> None:
    tensors, expected = made(), Contents(made()).digests()
    assert expected is not None
    assert Contents(tensors).digests() == expected
    for number in (0, 3, 4):
        tensors = made()
        tensors[number].view(-1).view(torch.uint8)[-1] ^= 1
        found = Contents(tensors).digests()
        assert found is not None
        assert [a != b for a, b in zip(found, expected, strict=True)] == [
            at == number for at in range(len(tensors))
        ]


def test_which_tensors_are_on_a_device_is_told_so_that_only_like_is_compared_with_like() -> None:
    tensors = made()
    moved = Contents([tensor.cpu() for tensor in tensors]).digests()
    found = Contents(tensors).digests()
    assert found is not None
    assert moved is not None
    differs = [a[:1] != b[:1] for a, b in zip(found, moved, strict=True)]
    assert differs == [tensor.is_cuda and tensor.numel() > 0 for tensor in tensors]


def test_what_the_stream_does_later_is_not_in_it() -> None:
    tensors, expected = made(), Contents(made()).digests()
    contents = Contents(tensors)
    for tensor in tensors:
        tensor.zero_()
    assert contents.digests() == expected


def test_a_large_strided_tensor_is_not_digested_at_all() -> None:
    assert Contents([torch.zeros(4096, 4096, device="cuda").t()]).digests() is None
