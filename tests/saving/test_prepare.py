"""What follows from a state is worked out once, and all of it anew when the state is another."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from laststep.capture.gather import hold_all
from laststep.errors import AbortedError
from laststep.plan.layouts import GlobalLayout, LocalLayout, agree, digest_of, encode_local_layout
from laststep.ranks.group import Rank
from laststep.saving.describe import Preparer, take_state
from laststep.state.layouts import Mesh, Replicate, Sharded
from laststep.state.provider import ValueProvider
from laststep.state.tensors import LocalShard

if TYPE_CHECKING:
    from collections.abc import Callable

    from laststep.saving.describe import TakenState
    from laststep.state.collecting import CollectCache

WIDE = 4 << 20
"""So much that replicas share the work of writing."""


class State:
    """A dict as an item, and what its last save is known by."""

    def __init__(self, **values: object) -> None:
        self.values = dict(values)
        self.caches: dict[str, CollectCache] = {}

    def take(self) -> TakenState:
        provider = ValueProvider(self.values)
        return take_state({"s": provider}, self.caches, {}, None, allow_pickle=False)


def two_ranks(local_layout: LocalLayout) -> GlobalLayout:
    """As if another rank held the same."""
    name = digest_of(encode_local_layout(local_layout))
    return agree([name, name], {name: local_layout})


@pytest.mark.parametrize("more", [{}, {"views": torch.arange(6.0)}])
def test_a_state_that_only_changes_its_numbers_is_prepared_once(more: dict[str, object]) -> None:
    state, preparer = State(w=torch.zeros(4, 2), n=1, **more), Preparer(Rank(0, 1))
    if more:  # overlapping views are taken apart anew at each save, with pieces that are only equal
        state.values["over"] = state.values["views"][2:]  # type: ignore[index]
    first, _ = preparer.prepare(state.take())
    state.values["n"] = 2
    state.values["w"].add_(1)  # type: ignore[attr-defined]
    again, sources = preparer.prepare(state.take())
    assert again is first
    assert sources[0].data_ptr() == state.values["w"].data_ptr()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "change",
    [
        lambda v: v.update(w=torch.zeros(2, 4)),
        lambda v: v.update(w=torch.zeros(4, 2, dtype=torch.int32)),
        lambda v: v.update(w=torch.zeros(2, 4).T),
        lambda v: v.update(v=v.pop("w")),
        lambda v: v.update(v=torch.zeros(1)),
    ],
)
def test_a_state_of_another_form_is_prepared_anew_and_nothing_of_the_last_is_kept(
    change: Callable[[dict[str, object]], None],
) -> None:
    state, preparer = State(w=torch.zeros(4, 2)), Preparer(Rank(0, 1))
    first, _ = preparer.prepare(state.take())
    change(state.values)
    taken = state.take()
    other, sources = preparer.prepare(taken)
    assert other is not first
    assert other.plan.items == tuple(spec for spec, _ in taken.described)
    assert [piece.shape for piece in other.plan.pieces] == [tuple(one.shape) for one in sources]
    assert other.copies.plan is other.plan
    assert other.copies.needs is None
    assert other.trees is not first.trees


def test_other_ranks_that_change_make_this_one_prepare_anew() -> None:
    state, preparer = State(w=torch.zeros(4)), Preparer(Rank(0, 2))
    global_layouts: list[GlobalLayout] = []

    def the_same(local_layout: LocalLayout) -> GlobalLayout:
        global_layouts[:] = global_layouts or [two_ranks(local_layout)]
        return global_layouts[0]

    first, _ = preparer.prepare(state.take(), the_same)
    assert preparer.prepare(state.take(), the_same)[0] is first
    other, _ = preparer.prepare(state.take(), two_ranks)
    assert other is not first
    assert other.write_shard is not None
    assert first.write_shard is not None
    assert other.write_shard.local_layout is first.write_shard.local_layout


def test_ranks_that_come_to_no_agreement_leave_what_was_prepared() -> None:
    state, preparer = State(w=torch.zeros(4)), Preparer(Rank(0, 2))
    first, _ = preparer.prepare(state.take(), two_ranks)

    def nobody(_: LocalLayout) -> GlobalLayout:
        raise AbortedError("rank 1 is gone")

    state.values["w"] = torch.zeros(5)
    with pytest.raises(AbortedError):
        preparer.prepare(state.take(), nobody)
    assert preparer.last is first
    other, sources = preparer.prepare(state.take(), two_ranks)
    assert [piece.shape for piece in other.plan.pieces] == [(5,)]
    assert len(sources) == 1


def test_the_window_of_a_rank_lies_as_the_memory_of_this_save_does() -> None:
    memory = torch.arange(4 * WIDE, dtype=torch.float32)
    layout = Sharded((2, WIDE), Mesh.of(("replicas",), (2,), [0, 1]), (Replicate(),))
    state, preparer = State(), Preparer(Rank(0, 2))
    global_layouts: dict[LocalLayout, GlobalLayout] = {}

    def agreed(local_layout: LocalLayout) -> GlobalLayout:
        return global_layouts.setdefault(local_layout, two_ranks(local_layout))

    found = []
    for strides in ((2 * WIDE, 1), (2 * WIDE, 1), (2 * WIDE, 2), (2 * WIDE, 1)):
        state.values["w"] = LocalShard(memory.as_strided((2, WIDE), strides), layout)
        found.append(preparer.prepare(state.take(), agreed))
    assert len(global_layouts) == 1
    pieces = [prepared.plan.pieces[0] for prepared, _ in found]
    assert [piece.shape for piece in pieces] == [(1, WIDE)] * 4
    assert [piece.contiguous for piece in pieces] == [True, True, False, True]
    assert found[1][0] is found[0][0]
    for prepared, sources in found:
        (held,) = hold_all(sources[:1], prepared.plan.pieces[:1]) or ()
        assert held.tensor.shape == (1, WIDE)
