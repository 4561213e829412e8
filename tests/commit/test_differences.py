"""Where two ranks have other plain values of one item: the first of these is named, by its path."""

from __future__ import annotations

from collections import OrderedDict, deque, namedtuple

import msgspec
import pytest

from expect import names
from laststep.codecs.objects import Tagged, TensorRef, encode
from laststep.commit import differences
from laststep.commit.differences import Parts, describe, names_that_differ, values_of
from laststep.plan.receipts import Differing, Shared

Pair = namedtuple("Pair", ["left", "right"])  # noqa: PYI024 (one that a user has)
ASKED = Differing(shared=Shared(0, "extra"), ranks=(1, 3))


def parts(tree: object) -> Parts:
    return values_of("extra", encode({"tree": tree, "ties": {}, "views": {}}))


def said(one: object, other: object) -> str:
    """What is said of two trees, as two ranks show them to a third."""
    names_found = names_that_differ(ASKED, {1: parts(one), 3: parts(other)})
    return describe(ASKED, names_found)


@pytest.mark.parametrize(
    ("one", "other", "where"),
    [
        ({"lr": 0.1, "n": 1}, {"lr": 0.2, "n": 1}, "extra/lr"),
        ({"a": [{"b": 1}, {"b": 2}]}, {"a": [{"b": 1}, {"b": 3}]}, "extra/a/#1/b"),
        ({"a": (0.9, 0.99)}, {"a": (0.9, 0.9)}, "extra/a"),
        ({"a": True}, {"a": 1}, "extra/a"),
        ({"a": "x"}, {}, "extra/a"),
        ({"b": {}}, {"b": {"a": None}}, "extra/b"),
        ({7: {"a/b": 1}}, {7: {"a/b": 2}}, "extra/#7/a~1b"),
        (OrderedDict(a=deque([{}, 1])), OrderedDict(a=deque([{}, 2])), "extra/a/#1"),
        ({"p": Pair([{}], 1)}, {"p": Pair([{}], 2)}, "extra/p/#1"),
        (3, 4, "extra"),
        (Tagged("owned", ["StepLR", {"n": 1}]), Tagged("owned", ["StepLR", {"n": 2}]), "extra/n"),
        (Tagged("owned", ["StepLR", {}]), Tagged("owned", ["CyclicLR", {}]), "the class of extra"),
        ({"order": list(range(99))}, {"order": list(range(100))}, "extra/order"),
        ({"a": float("nan")}, {"a": -float("nan")}, "extra/a"),
        ({"a": (1.0, float("nan"))}, {"a": (1.0, -float("nan"))}, "extra/a"),
        ({"p": {"a": 1, "b": 2}}, {"p": {"b": 2, "a": 1}}, "the order of the keys of extra/p"),
        ({"a": 1, 2: 2}, {2: 2, "a": 1}, "the order of the keys of extra"),
        ({"a": b"1"}, {"a": b"2"}, "extra/a"),
        ({"a": {1, 2}}, {"a": {1, 3}}, "extra/a"),
        ({"a": Tagged("dtype", "a")}, {"a": Tagged("dtype", "b")}, "extra/a"),
    ],
)
def test_the_first_value_that_differs_is_named(one: object, other: object, where: str) -> None:
    message = said(one, other)
    assert message.startswith(where)
    assert names(message, "rank 1", "rank 3", "laststep.PerRank")


def test_how_many_more_differ_is_told() -> None:
    message = said(dict.fromkeys("abcdef", 1), dict.fromkeys("abcdef", 0))
    assert message.startswith(
        "extra/a, extra/b, extra/c and 3 more differs between rank 1 and rank 3"
    )


def test_a_rank_that_shows_nothing_leaves_the_item_named() -> None:
    message = describe(ASKED, names_that_differ(ASKED, {1: parts({"a": 1})}))
    assert names(message, "'extra'", "rank 1", "rank 3")


def test_what_is_shown_is_short_whatever_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = {"tensors": {f"w{n}": TensorRef(f"w{n}") for n in range(1000)}, "order": [*range(10**5)]}
    assert len(msgspec.msgpack.encode(parts(tree))) < 400
    monkeypatch.setattr(differences, "_MOST_VALUES", 10)
    assert len(parts({str(number): number for number in range(1000)})) == 10
