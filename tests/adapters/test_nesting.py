"""Values find back to their places, just as torch.distributed.checkpoint puts them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint._nested_dict import flatten_state_dict, unflatten_state_dict

from expect import raises
from laststep.adapters.nesting import MAX_HOLES, nest
from laststep.errors import CorruptError

keys = st.text(alphabet="abc", min_size=1, max_size=2)
leaves = st.integers() | st.lists(st.integers(), max_size=2)
states = st.dictionaries(
    keys,
    st.recursive(
        leaves,
        lambda inner: (
            st.dictionaries(keys, inner, max_size=3)
            | st.lists(st.dictionaries(keys, inner, max_size=2), max_size=3)
        ),
        max_leaves=8,
    ),
    max_size=3,
)


@given(state=states)
def test_it_agrees_with_torch(state: dict[str, object]) -> None:
    flat, mapping = flatten_state_dict(state)
    expected = unflatten_state_dict(flat, mapping)
    found = nest([(mapping[name], value) for name, value in flat.items()], where="there")
    assert found == expected
    assert list(found) == list(expected)


def test_what_was_not_stored_in_a_list_is_none() -> None:
    assert nest([(("a", 2, "b"), 1)], where="there") == {"a": [None, None, {"b": 1}]}


def test_a_value_that_is_a_dict_stays_as_it_is() -> None:
    assert nest([(("a",), {1: 2})], where="there") == {"a": {1: 2}}


@pytest.mark.parametrize(
    ("paths", "found"),
    [
        ([("a",), ("a",)], "a"),
        ([("a",), ("a", "b")], "b"),
        ([("a", "b"), ("a",)], "a"),
        ([("a", 0), ("a", "b")], "a"),
        ([("a", -1)], "a"),
        ([("a", MAX_HOLES + 1)], ""),
        ([(name, MAX_HOLES - 1) for name in "ab"], ""),
        ([("a", 1 << 62)], ""),
    ],
)
def test_paths_that_cannot_be_are_corrupt(paths: list[tuple[str | int, ...]], found: str) -> None:
    with raises(CorruptError, found=found):
        nest([(path, 0) for path in paths], where="there")
