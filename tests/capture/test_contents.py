"""Digests of what tensors hold, by which ranks compare them."""

from __future__ import annotations

import pytest
import torch

from laststep.capture.contents import Contents


def made() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [
        torch.randn(5, 3),
        torch.randn(4, 6).t(),
        torch.zeros(0, 3),
        torch.tensor(2.0),
        torch.randn(7).bfloat16(),
        torch.tensor([True, False]),
        torch.randn(3, dtype=torch.cfloat),
    ]


def test_equal_tensors_have_equal_digests_wherever_they_lie_in_memory() -> None:
    apart = [torch.stack((one, one), -1)[..., 0] if one.dim() else one.clone() for one in made()]
    found = Contents(made()).digests()
    assert found is not None
    assert Contents(apart).digests() == found
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("number", [0, 1, 3, 4, 5, 6])
def test_one_changed_bit_changes_the_digest_of_its_tensor_alone(number: int) -> None:
    tensors, before = made(), Contents(made()).digests()
    raw = torch.view_as_real(tensors[number]) if tensors[number].is_complex() else tensors[number]
    flat = raw.t() if number == 1 else raw
    flat.reshape(-1)[-1:].view(torch.uint8)[-1] ^= 1
    after = Contents(tensors).digests()
    assert before is not None
    assert after is not None
    assert [one != other for one, other in zip(before, after, strict=True)] == [
        at == number for at in range(len(tensors))
    ]


def test_what_changes_later_is_not_in_it() -> None:
    tensors = made()
    contents, expected = Contents(tensors), Contents(tensors).digests()
    tensors[0].zero_()
    assert contents.digests() == expected
