"""Where two ranks have other plain values of one item: the first of these is named, by its path."""

from __future__ import annotations

from collections import OrderedDict, deque, namedtuple

import msgspec
import pytest

from expect import names
from laststep.codecs.objects import Tagged, TensorRef, encode
from laststep.commit import differences as differing
from laststep.commit.differences import Values, describe, values_of
from laststep.plan.receipts import Differing

Pair = namedtuple("Pair", ["left", "right"])  # noqa: PYI024 (one that a user has)


def shown(tree: object) -> Values:
    return values_of(encode({"tree": tree, "ties": {}, "views": {}}))


def said(one: object, other: object) -> str:
    """What is said of two trees, as two ranks show them to a third."""
    notes = {rank: msgspec.msgpack.encode(shown(tree)) for rank, tree in ((1, one), (3, other))}
    values = {rank: msgspec.msgpack.decode(note, type=Values) for rank, note in notes.items()}
    return describe(Differing(item="extra", ranks=(1, 3)), values)


@pytest.mark.parametrize(
    ("one", "other", "where"),
    [
        ({"lr": 0.1, "n": 1}, {"lr": 0.2, "n": 1}, ("extra/lr", "0.1", "rank 1", "0.2", "rank 3")),
        (
            {"a": [{"b": 1}, {"b": 2}]},
            {"a": [{"b": 1}, {"b": 3}]},
            ("extra/a/#1/b", "2", "rank 1", "3"),
        ),
        ({"a": (0.9, 0.99)}, {"a": (0.9, 0.9)}, ("extra/a", "(0.9, 0.99)", "rank 1", "(0.9, 0.9)")),
        ({"a": True}, {"a": 1}, ("extra/a", "True", "rank 1", "1", "rank 3")),
        ({"a": "x"}, {}, ("extra/a", "'x'", "rank 1", "rank 3")),
        ({"b": {}}, {"b": {"a": None}}, ("extra/b", "{}", "rank 1", "rank 3")),
        ({7: {"a/b": 1}}, {7: {"a/b": 2}}, ("extra/#7/a~1b", "1", "rank 1", "2", "rank 3")),
        (
            OrderedDict(a=deque([{}, 1])),
            OrderedDict(a=deque([{}, 2])),
            ("extra/a/#1", "1", "rank 1"),
        ),
        ({"p": Pair([{}], 1)}, {"p": Pair([{}], 2)}, ("extra/p/#1", "1", "rank 1", "2", "rank 3")),
        (3, 4, ("extra", "3", "rank 1", "4", "rank 3")),
        (
            Tagged("owned", ["StepLR", {"n": 1}]),
            Tagged("owned", ["StepLR", {"n": 2}]),
            ("extra/n", "1", "rank 1", "2", "rank 3"),
        ),
        (
            Tagged("owned", ["StepLR", {}]),
            Tagged("owned", ["CyclicLR", {}]),
            ("extra", "'StepLR'", "rank 1", "'CyclicLR'", "rank 3"),
        ),
        ({"order": list(range(99))}, {"order": list(range(100))}, ("extra/order", "rank 1")),
        (
            {"a": float("nan")},
            {"a": -float("nan")},
            ("extra/a", "7ff8000000000000", "rank 1", "fff8000000000000", "rank 3"),
        ),
        ({"a": (1.0, float("nan"))}, {"a": (1.0, -float("nan"))}, ("extra/a", "rank 1")),
        (
            {"p": {"a": 1, "b": 2}},
            {"p": {"b": 2, "a": 1}},
            ("extra/p", "['a', 'b']", "rank 1", "['b', 'a']", "rank 3"),
        ),
        ({"a": 1, 2: 2}, {2: 2, "a": 1}, ("extra", "rank 3")),
        (dict.fromkeys(range(999), 0), dict.fromkeys(range(998, -1, -1), 0), ("extra", "rank 3")),
        ({"a": b"1"}, {"a": b"2"}, ("extra/a", "rank 1", "rank 3")),
        ({"a": {1, 2}}, {"a": {1, 3}}, ("extra/a", "rank 1", "rank 3")),
        ({"a": Tagged("dtype", "a")}, {"a": Tagged("dtype", "b")}, ("extra/a", "rank 1")),
    ],
)
def test_the_first_value_that_differs_is_named(
    one: object, other: object, where: tuple[str, ...]
) -> None:
    message = said(one, other)
    assert names(message, *where)
    assert "laststep.PerRank" in message


def test_how_many_more_differ_is_told() -> None:
    message = said({"a": 1, "b": 2, "c": 3, "d": 4}, {"a": 0, "b": 0, "c": 0, "d": 4})
    assert names(message, "extra/a", "1", "rank 1", "0", "rank 3", "2 more")


def test_a_rank_that_shows_nothing_leaves_the_item_named() -> None:
    values = {1: shown({"a": 1})}
    message = describe(Differing(item="extra", ranks=(1, 3)), values)
    assert names(message, "'extra'", "rank 1", "rank 3")


def test_what_is_shown_is_short_whatever_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = {"tensors": {f"w{n}": TensorRef(f"w{n}") for n in range(1000)}, "order": [*range(10**5)]}
    assert len(msgspec.msgpack.encode(shown(tree))) < 400
    monkeypatch.setattr(differing, "_MOST", 10)
    assert len(shown({str(number): number for number in range(1000)})) == 10
