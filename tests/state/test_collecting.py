"""A state looked at all at once is what is found leaf by leaf, or refused in the same words."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from typing import TYPE_CHECKING, Final

import numpy as np
import pytest
import torch
from torch import nn

import laststep
from laststep.state.collecting import CollectCache, collect

if TYPE_CHECKING:
    from collections.abc import Callable

    from laststep.state.tree import Collected


def freed() -> torch.Tensor:
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)
    return tensor


def cut_off() -> torch.Tensor:
    """As large as what is left of its storage, of which it needs the other half."""
    whole = torch.arange(8.0)
    tensor = whole[4:]
    whole.untyped_storage().resize_(tensor.nbytes)
    return tensor


def strided_and_cut_off() -> torch.Tensor:
    tensor = torch.arange(8.0)[::2]
    tensor.untyped_storage().resize_(tensor.nbytes)
    return tensor


LEAVES: Final[dict[str, Callable[[], object]]] = {
    "plain": lambda: torch.arange(3.0),
    "parameter": lambda: nn.Parameter(torch.ones(2, 3)),
    "scalar": lambda: torch.tensor(3),
    "empty": lambda: torch.empty(0, 4),
    "bfloat16": lambda: torch.ones(3, dtype=torch.bfloat16),
    "strided": lambda: torch.arange(12.0).view(3, 4).t(),
    "at an offset": lambda: torch.arange(8.0)[3:],
    "expanded": lambda: torch.ones(1).expand(5),
    "conjugated": lambda: torch.ones(3, dtype=torch.complex64).conj(),
    "negated": lambda: torch._neg_view(torch.ones(3)),
    "freed": freed,
    "cut off": cut_off,
    "strided and cut off": strided_and_cut_off,
    "meta": lambda: torch.empty(3, device="meta"),
    "empty meta": lambda: torch.empty(0, device="meta"),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "compressed": lambda: torch.eye(3).to_sparse_csr(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "quantised": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    "lazy": lambda: nn.LazyLinear(3).weight,
    "array": lambda: np.arange(3.0),
    "bytes": lambda: bytes(5000),
    "a few bytes": lambda: b"abc",
    "counter": lambda: Counter("abca"),
    "set": lambda: {1, 2},
    "deque": lambda: deque([torch.ones(1)]),
    "class": object,
}


def nested(levels: int) -> object:
    value: object = torch.ones(1)
    for _ in range(levels):
        value = [value]
    return value


def containing_itself() -> object:
    value: list[object] = [torch.ones(1)]
    value.append(value)
    return value


def sharing() -> object:
    whole, tied = torch.arange(10.0), nn.Parameter(torch.ones(3))
    return {"tied": tied, "too": tied.detach(), "low": whole[:6], "high": whole[4:], "x": tied}


STATES: Final[dict[str, Callable[[], object]]] = {
    "rows": lambda: {n: {"step": torch.tensor(n), "avg": torch.ones(n)} for n in range(3)},
    "ordered": lambda: OrderedDict(b=torch.ones(1), a=OrderedDict(c=torch.ones(2), d=1)),
    "lists": lambda: [torch.ones(1), (torch.ones(2), 3, [torch.ones(3)]), [], (), {}],
    "alone": lambda: torch.ones(3),
    "nothing": dict,
    "only numbers": lambda: {"lr": 0.1, "betas": (0.9, 0.99)},
    "odd keys": lambda: {
        "": torch.ones(1),
        "a/b": torch.ones(2),
        "~": torch.ones(3),
        1: torch.ones(4),
        None: torch.ones(5),
        (1, "x"): torch.ones(6),
    },
    "keys without a name": lambda: {object: torch.ones(1)},
    "two keys of one name": lambda: {float("nan"): torch.ones(1), float("nan"): torch.ones(2)},
    "sharing": sharing,
    "as deep as may be": lambda: nested(200),
    "one level too deep": lambda: nested(202),
    "rows too deep": lambda: [{"a": {"b": nested(198)}}],
    "containing itself": containing_itself,
}


def found(value: object, cache: CollectCache | None) -> Collected | str:
    try:
        return collect(value, volatile=frozenset({("n", 1), ("a",)}), cache=cache)
    except laststep.UsageError as error:
        return str(error)


def check(value: object) -> None:
    plainly, at_once = found(value, None), found(value, CollectCache())
    if isinstance(plainly, str) or isinstance(at_once, str):
        assert at_once == plainly
        return
    assert repr(at_once.tree) == repr(plainly.tree)
    assert at_once.pieces == plainly.pieces
    assert all(type(piece.shape) is tuple for piece in at_once.pieces)
    assert (at_once.ties, at_once.views) == (plainly.ties, plainly.views)
    assert at_once.layouts == plainly.layouts
    for mine, theirs in zip(at_once.sources, plainly.sources, strict=True):
        assert torch.equal(mine, theirs)
        assert mine.stride() == theirs.stride()
        assert not mine.is_conj()
        assert not mine.is_neg()


@pytest.mark.filterwarnings("ignore")  # torch warns of prototypes
@pytest.mark.parametrize("leaf", LEAVES)
def test_every_kind_of_leaf_is_taken_or_refused_as_it_is_by_itself(leaf: str) -> None:
    made = LEAVES[leaf]()
    check({"a": torch.ones(2), "n": [torch.ones(1), made], "z": torch.zeros(3)})


@pytest.mark.parametrize("state", STATES)
def test_a_state_of_any_form_is_taken_or_refused_as_leaf_by_leaf(state: str) -> None:
    check(STATES[state]())
    check({"n": STATES[state]()})
