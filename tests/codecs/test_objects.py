"""Typed JSON: identity including types, refusals that name the place, hostile documents."""

from __future__ import annotations

import collections
import contextlib
import json
import math
import struct
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expect import raises
from laststep.codecs import objects
from laststep.codecs.objects import Tagged, TensorRef, decode, encode
from laststep.errors import CorruptError, UsageError


class Point(NamedTuple):
    x: object
    y: object


make_namedtuple: Any = collections.namedtuple  # noqa: PYI024
Renamed = make_namedtuple("Renamed", ["a", "class"], rename=True)

any_text = st.text(st.characters(), max_size=8)
bit_floats = st.integers(0, 2**64 - 1).map(lambda n: struct.unpack(">d", n.to_bytes(8, "big"))[0])
floats = st.floats() | bit_floats
atoms = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**80), 2**80)
    | floats
    | st.builds(complex, floats, floats)
    | any_text
    | st.binary(max_size=8)
)
wide = st.integers(-(2**70), 2**70)
ranges = st.builds(range, wide, wide, wide.filter(bool))
plain_names = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
hashable = st.recursive(
    atoms | ranges,
    lambda inner: (
        st.lists(inner, max_size=3).map(tuple)
        | st.frozensets(inner, max_size=3)
        | st.builds(Point, inner, inner)
    ),
    max_leaves=5,
)


def containers(inner: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
    pairs = st.lists(st.tuples(hashable, inner), max_size=3)
    lists = st.lists(inner, max_size=3)
    return st.one_of(
        lists,
        lists.map(tuple),
        st.dictionaries(any_text | st.just("$"), inner, max_size=3),
        pairs.map(dict),
        pairs.map(collections.OrderedDict),
        st.sets(hashable, max_size=3),
        lists.map(collections.deque),
        lists.map(lambda items: collections.deque(items, 7)),
        st.builds(slice, inner, inner, inner),
        st.builds(Point, inner, inner),
        st.builds(Tagged, plain_names, inner),
    )


leaves = hashable | st.binary(max_size=8).map(bytearray) | st.builds(TensorRef, plain_names)
values = st.recursive(leaves, containers, max_leaves=12)


def same(a: Any, b: Any) -> bool:
    """Equality with types and bits, which also holds for nan."""
    if isinstance(a, tuple) and hasattr(a, "_fields"):
        return (
            getattr(b, "_fields", None) == a._fields
            and type(a).__name__ == type(b).__name__
            and same(tuple(a), tuple(b))
        )
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b)
    if isinstance(a, complex):
        return same((a.real, a.imag), (b.real, b.imag))
    if isinstance(a, slice):
        return same((a.start, a.stop, a.step), (b.start, b.stop, b.step))
    if isinstance(a, range):
        return (a.start, a.stop, a.step) == (b.start, b.stop, b.step)
    if isinstance(a, Tagged):
        return a.tag == b.tag and same(a.value, b.value)
    if isinstance(a, dict):
        return same(list(a.items()), list(b.items()))
    if isinstance(a, (set, frozenset)):
        return encode(a) == encode(b) and len(a) == len(b)
    if isinstance(a, collections.deque) and a.maxlen != b.maxlen:
        return False
    if isinstance(a, (list, tuple, collections.deque)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@settings(max_examples=100, deadline=None)
@given(values)
def test_decoding_gives_back_the_value_and_its_types(value: object) -> None:
    assert same(value, decode(encode(value), where="here"))


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=40))
def test_any_bytes_are_decoded_or_corrupt(data: bytes) -> None:
    with contextlib.suppress(CorruptError):
        decode(data, where="here")


_tags = ["int", "dict", "set", "tuple", "deque", "range", "slice", "namedtuple", "ext", "float"]
_fields = ["items", "hex", "bits", "maxlen", "fields", "type", "value", "tag", "base64"]
documents = st.recursive(
    st.none() | st.integers() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(_fields), inner, max_size=3).flatmap(
            lambda d: st.sampled_from(_tags).map(lambda tag: {"$": tag, **d})
        )
    ),
    max_leaves=8,
)


@settings(max_examples=100, deadline=None)
@given(documents)
def test_any_document_is_decoded_or_corrupt(document: object) -> None:
    with contextlib.suppress(CorruptError):
        decode(json.dumps(document).encode(), where="here")


def test_plain_json_is_written_as_itself() -> None:
    value = {"a": [1, 2.5, None, True, "x"], "b": {"c": -1}}
    assert encode(value) == b'{"a":[1,2.5,null,true,"x"],"b":{"c":-1}}'


def test_a_tensor_is_written_as_the_format_says() -> None:
    assert encode(TensorRef("w")) == b'{"$":"tensor","name":"w"}'


def test_a_users_dollar_key_is_no_tag() -> None:
    value = {"$": "tensor", "name": "w"}
    assert decode(encode(value), where="here") == value


def test_equal_sets_have_equal_bytes() -> None:
    assert encode({"a", "b", "c"}) == encode({"c", "b", "a"})


def test_ints_beyond_the_limit_of_decimals_survive() -> None:
    value = -(7**20000)
    assert decode(encode(value), where="here") == value
    assert decode(encode({value: 1}), where="here") == {value: 1}


def test_minus_zero_and_nan_keep_their_bits() -> None:
    nan = struct.unpack(">d", bytes.fromhex("fff800000000beef"))[0]
    found: Any = decode(encode([-0.0, nan]), where="here")
    zero, back = found
    assert math.copysign(1, zero) == -1
    assert struct.pack(">d", back).hex() == "fff800000000beef"


def test_a_namedtuple_with_renamed_fields_survives() -> None:
    back: Any = decode(encode(Renamed(1, 2)), where="here")
    assert back == Renamed(1, 2)
    assert back._fields == ("a", "_1")


class OwnInt(int):
    pass


class OwnStr(str):
    __slots__ = ()


class OwnDict(dict):  # type: ignore[type-arg]
    pass


class OwnTuple(tuple):  # type: ignore[type-arg]
    __slots__ = ()


@pytest.mark.parametrize(
    "value",
    [
        len,
        object(),
        int,
        OwnInt(1),
        OwnStr("x"),
        OwnDict(),
        OwnTuple((1,)),
        collections.defaultdict(int),
        collections.Counter(),
        memoryview(b"x"),
        TensorRef("\ud800"),
        Tagged("\ud800", 1),
    ],
)
def test_what_cannot_be_expressed_is_refused(value: object) -> None:
    with pytest.raises(UsageError, match="allow_pickle=True"):
        encode(value)


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"groups": [{"fn": len}]}, "groups[0]['fn']"),
        ([{"a b": (1, len)}], "[0]['a b'][1]"),
        ({1: {None: len}}, "[1][<NoneType>]"),
        ({"s": {len}}, "s[0]"),
        ({"d": {len: 1}}, "d[<builtin_function_or_method>] (a key)"),
        ({10**5000: len}, "[<int>]"),
        (len, "its root"),
        ({"t": Tagged("x", [len])}, "t[0]"),
        ({"p": Point(1, len)}, "p[1]"),
    ],
)
def test_a_refusal_names_the_path_and_the_type(value: object, path: str) -> None:
    with pytest.raises(UsageError) as caught:
        encode(value)
    assert caught.value.where == path
    assert "builtin_function_or_method" in str(caught.value)


def test_a_cycle_is_refused() -> None:
    cycle: dict[str, object] = {}
    cycle["a"] = [cycle]
    with raises(UsageError, found="dict") as caught:
        encode(cycle)
    assert caught.value.where == "a[0]"


def test_the_same_list_twice_is_no_cycle() -> None:
    shared = [1]
    assert decode(encode([shared, shared]), where="here") == [[1], [1]]


def nested(depth: int, *, pairs: bool) -> object:
    value: object = 1
    for _ in range(depth):
        value = {1: value} if pairs else [value]
    return value


@pytest.mark.parametrize("pairs", [False, True])
def test_nesting_is_taken_up_to_the_limit_and_refused_beyond(pairs: bool) -> None:
    deepest = nested(objects.MAX_DEPTH, pairs=pairs)
    assert decode(encode(deepest), where="here") == deepest
    with raises(UsageError, found=str(objects.MAX_DEPTH)):
        encode(nested(objects.MAX_DEPTH + 1, pairs=pairs))


def test_too_many_namedtuple_classes_are_refused_both_ways() -> None:
    classes: list[Any] = [
        make_namedtuple(f"T{i}", ["a"]) for i in range(objects.MAX_NAMEDTUPLES + 1)
    ]
    with raises(
        UsageError, where=f"[{objects.MAX_NAMEDTUPLES}]", found=str(objects.MAX_NAMEDTUPLES)
    ):
        encode([made(1) for made in classes])
    one = '{"$":"namedtuple","type":"T%d","fields":[],"items":[]}'
    document = "[" + ",".join(one % i for i in range(objects.MAX_NAMEDTUPLES + 1)) + "]"
    with raises(CorruptError, where="here", found=str(objects.MAX_NAMEDTUPLES)):
        decode(document.encode(), where="here")


@pytest.mark.parametrize("document", ['{"a": 1, "b": [ 2 ]}', "1e2", ' "\\u0061"'])
def test_json_of_another_writer_is_read_too(document: str) -> None:
    assert decode(document.encode(), where="here") == json.loads(document)


def test_a_hundred_thousand_references_survive() -> None:
    value = {f"layers.{i}.weight": TensorRef(f"layers.{i}.weight") for i in range(100_000)}
    assert decode(encode(value), where="here") == value
