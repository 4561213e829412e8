"""What the storage for torch.distributed.checkpoint decides without a disk."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.planner import SavePlan

from expect import raises
from laststep.adapters.nesting import nest
from laststep.codecs import objects
from laststep.dcp import record as dcp_record
from laststep.dcp.record import locate, paths_of, paths_told, tensor_name
from laststep.errors import CorruptError, UsageError

KEYS = st.sampled_from(["a", "b", "model", "shared", "x/y", "", "ü", "a.b"])
PATHS = st.tuples(KEYS, st.lists(KEYS | st.integers(0, 3), max_size=3)).map(
    lambda pair: (pair[0], *pair[1])
)


@given(st.lists(st.tuples(PATHS, st.booleans()), max_size=8))
def test_entries_never_get_in_each_others_way(told: list[tuple[Any, bool]]) -> None:
    paths = {f"fqn {number}": path for number, (path, _) in enumerate(told)}
    sharded = {f"fqn {number}" for number, (_, is_sharded) in enumerate(told) if is_sharded}
    found = locate(paths, sharded)
    assert found.keys() == paths.keys()
    assert len(set(found.values())) == len(found)
    nest(((path, None) for path in found.values()), where="")
    for fqn, location in found.items():
        assert "/" not in str(location[0])
        assert location[0] not in ("", "shared")
        assert tensor_name(location) or fqn not in sharded


def test_paths_are_taken_only_from_what_looks_like_them() -> None:
    good = {"a.b": ("a", "b"), "l.0": ("l", 0)}
    bad = {1: ("a",), "x": ["a"], "y": (), "z": (0, "a"), "neg": ("a", -1), "f": ("a", 1.0)}
    assert paths_told({**good, **bad}) == good
    assert paths_told(None) == paths_told([("a", "b")]) == {}


def test_entries_of_all_ranks_count_once() -> None:
    plans = [create_default_local_save_plan({"w": torch.ones(2), "n": 1}, True) for _ in range(2)]
    plans.append(SavePlan([], usable=False))
    assert paths_of(plans) == ({"w": ("w",), "n": ("n",)}, set())


@given(
    st.lists(
        st.builds(
            dcp_record.RecordEntry,
            fqn=st.text(),
            location=PATHS,
            kind=st.sampled_from(["tensor", "value", "raw"]),
        )
        | st.builds(
            dcp_record.RecordEntry,
            fqn=st.text(),
            location=PATHS,
            kind=st.just("part"),
            start=st.just((0, 3)),
            shape=st.just((4, 9)),
        )
    ),
    st.none() | st.dictionaries(st.text(), PATHS),
    st.none() | st.text(),
)
def test_a_record_comes_back(
    entries: list[dcp_record.RecordEntry], planner_data: object, save_id: str | None
) -> None:
    record = dcp_record.DcpRecord(
        entries=tuple(entries), planner_data=planner_data, save_id=save_id
    )
    assert dcp_record.decode(dcp_record.encode(record), where="here") == record


@pytest.mark.parametrize(
    "told",
    [
        None,
        [],
        {},
        {"version": 1},
        {"version": 0, "planner_data": None, "entries": []},
        {"version": 1, "planner_data": None, "entries": {}},
        {"version": 1, "planner_data": None, "entries": [], "more": 1},
        {"version": 1, "planner_data": None, "entries": [], "save_id": 1},
        {"version": 1, "planner_data": None, "entries": [], "save_id": "a", "more": 1},
        *(
            {"version": 1, "planner_data": None, "entries": [entry]}
            for entry in (
                None,
                [],
                ["a"],
                ["a", [], "tensor"],
                ["a", [1], "tensor"],
                ["a", "b", "tensor"],
                ["a", ["b"], "other"],
                [1, ["b"], "tensor"],
                ["a", ["b", -1], "tensor"],
                ["a", ["b", True], "tensor"],
                ["a", ["b", None], "tensor"],
            )
        ),
    ],
    ids=repr,
)
def test_a_malformed_record_is_corrupt(told: object) -> None:
    with raises(CorruptError, where="here", found=True):
        dcp_record.decode(objects.encode(told), where="here")


def test_a_record_without_the_id_of_its_save_is_read() -> None:
    data = objects.encode({"version": 1, "planner_data": None, "entries": []})
    found = dcp_record.decode(data, where="here")
    assert found == dcp_record.DcpRecord(entries=(), planner_data=None, save_id=None)


def test_a_record_of_a_later_version_asks_for_an_upgrade() -> None:
    with raises(UsageError, where="here", found="3", remedy="upgrade"):
        dcp_record.decode(objects.encode({"version": 3}), where="here")
