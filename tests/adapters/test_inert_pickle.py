"""Pickles become plain values and records; nothing is called, and nothing hostile takes long."""

from __future__ import annotations

import contextlib
import pickle
from collections import OrderedDict
from pathlib import PurePosixPath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expect import raises
from laststep.adapters.importing.inert_pickle import Global, PickledObject, read
from laststep.errors import CorruptError, LaststepError, UsageError

PATH = ("pathlib", "PurePosixPath")
ADMITTED = frozenset({PATH, ("collections", "OrderedDict"), ("builtins", "print")})

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text() | st.integers(), inner)
    ),
)


def read_it(data: bytes) -> object:
    return read(data, admitted=ADMITTED, where="there", remedy="do it yourself")


@given(value=plain, protocol=st.integers(2, 5))
def test_plain_values_come_back_equal(value: object, protocol: int) -> None:
    assert read_it(pickle.dumps(value, protocol=protocol)) == value


@pytest.mark.parametrize("protocol", range(2, 6))
def test_objects_become_records(protocol: int) -> None:
    state = OrderedDict(a=PurePosixPath("/x/y"), b=[1])
    found = read_it(pickle.dumps(state, protocol=protocol))
    assert isinstance(found, dict)
    assert list(found) == ["a", "b"]
    record = found["a"]
    assert isinstance(record, PickledObject)
    assert (record.kind, record.args) == (Global(*PATH), ("/", "x", "y"))


class Evil:
    """Runs code when it is unpickled."""

    def __init__(self, call: object) -> None:
        self.call = call

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (self.call, ("this must never be printed",))


def test_what_is_admitted_is_still_never_called(capsys: pytest.CaptureFixture[str]) -> None:
    found = read_it(pickle.dumps(Evil(print)))
    assert isinstance(found, PickledObject)
    assert found.kind == ("builtins", "print")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("protocol", range(6))
def test_what_is_not_admitted_is_named(protocol: int) -> None:
    with pytest.raises(LaststepError) as refused:
        read_it(pickle.dumps(Evil(exec), protocol=protocol))
    if protocol >= 1:
        assert isinstance(refused.value, UsageError)
        assert "exec" in refused.value.found


def test_every_cut_is_corrupt() -> None:
    data = pickle.dumps({"a": [1, (2, PurePosixPath("x"))], "b": "text", "c": 1 << 70})
    for length in range(len(data)):
        with pytest.raises(CorruptError):
            read_it(data[:length])


@given(data=st.binary(max_size=60))
def test_junk_raises_only_our_errors(data: bytes) -> None:
    for whole in (data, data + b".", b"\x80\x04" + data + b"."):
        with contextlib.suppress(CorruptError, UsageError):
            read_it(whole)


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (b"}" + b")" + b"\x85" * 100_000 + b"Ns.", "tuple"),
        (b"}](" + b")" + b"\x85" * 10 + b"e]s.", "list"),
        (b"})" + b"2\x86" * 200 + b"Ns.", "DUP"),
        (b"})\x94" + b"h\x00\x86" * 3 + b"Ns.", "tuple"),
        (b"(lp0\n.", "LIST"),
        (b"\x8f.", "EMPTY_SET"),
        (b"Pid\n.", "PERSID"),
        (b"\x82\x01.", "EXT1"),
        (b"K\x01K\x02R.", ""),
        (b"]K\x01b.", ""),
        (b"h\x05.", ""),
        (b"\x8d" + b"\xff" * 7 + b"\x7fabc.", ""),
        (b"(((", ""),
        (b"e.", ""),
        (b"", ""),
    ],
)
def test_hostile_pickles_are_corrupt(data: bytes, found: str) -> None:
    with raises(CorruptError, found):
        read_it(data)


def test_deep_values_are_read_and_dropped() -> None:
    assert read_it(b"]" * 100_000 + b"a" * 99_999 + b".") is not None
    assert read_it(b")" + b"\x85" * 100_000 + b".") is not None
