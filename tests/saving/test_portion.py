"""What a rank writes of its state is worked out once, and again when its memory lies otherwise."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from laststep.capture.sources import hold
from laststep.plan.tables import agree, digest_of, encode_table
from laststep.saving.describe import Memory, take_state
from laststep.saving.portion import PortionPlanner
from laststep.state.layouts import Mesh, Replicate, Sharded
from laststep.state.tensors import Laid
from laststep.state.values import ValueProvider

if TYPE_CHECKING:
    from laststep.saving.describe import TakenState

WIDE = 4 << 20
"""So much that replicas share the work of writing."""


def test_the_window_of_a_rank_lies_as_the_memory_of_this_save_does() -> None:
    memory = torch.arange(4 * WIDE, dtype=torch.float32)
    layout = Sharded((2, WIDE), Mesh.of(("replicas",), (2,), [0, 1]), (Replicate(),))
    state: dict[str, object] = {}
    sharing, kept = PortionPlanner(0), Memory()

    def take(*strides: int) -> TakenState:
        state["w"] = Laid(memory.as_strided((2, WIDE), strides), layout)
        return take_state({"s": ValueProvider(state)}, kept, None, None, allow_pickle=False)

    taken = take(2 * WIDE, 1)
    table = sharing.table(taken)
    name = digest_of(encode_table(table))
    agreement = agree([name, name], {name: table})
    found = [sharing.own(taken, agreement)[0]]
    for strides in ((2 * WIDE, 1), (2 * WIDE, 2), (2 * WIDE, 1)):
        taken = take(*strides)
        assert sharing.table(taken) is table
        found.append(sharing.own(taken, agreement)[0])
    assert [own.pieces[0].shape for own in found] == [(1, WIDE)] * 4
    assert [own.pieces[0].contiguous for own in found] == [True, True, False, True]
    assert found[1].pieces is found[0].pieces
    for own in found:
        assert hold(own.sources[0], own.pieces[0]).tensor.shape == (1, WIDE)
