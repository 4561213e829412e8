"""What is kept of the copies of a plan is of that plan, and of what was copied last."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from laststep.capture.capture import Capturer
from laststep.capture.copies import Copies, Remembered
from laststep.capture.layout import choose
from laststep.constants import CHUNK_BYTES
from laststep.errors import LaststepError
from laststep.memory.pool import Pool
from laststep.plan.files import ItemSpec, SavePlan, plan_save
from laststep.settings import Capture
from laststep.state.tree import Piece

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def capturer() -> Iterator[Capturer]:
    pool = Pool(CHUNK_BYTES, pinned=False)
    made = Capturer(pool, mode=Capture.AUTO, margin_bytes=0)
    made.start({})
    yield made
    made.close()
    pool.close()


def plan(*, volatile: bool = False) -> SavePlan:
    pieces = (Piece("w", "float32", (4,), 16, "cpu", True, volatile),)
    return plan_save((ItemSpec(name="m", kind="value", standalone=True, pieces=pieces),))


def test_the_same_ways_keep_the_layout_and_others_make_another() -> None:
    copies = Copies(plan(volatile=True))
    copies.go(*choose(copies.plan.pieces, Capture.AUTO, {}))
    layout, gatherers = copies.layout, copies.gatherers
    copies.remembered = Remembered(layout, [torch.zeros(4)])
    copies.go(*choose(copies.plan.pieces, Capture.LAZY, {}))  # a buffer is staged in any case
    assert copies.layout is layout
    assert copies.gatherers is gatherers
    assert copies.remembered is not None
    other = Copies(plan())
    other.go(*choose(other.plan.pieces, Capture.AUTO, {}))
    staged = other.layout
    other.remembered = Remembered(staged, [torch.zeros(4)])
    other.go(*choose(other.plan.pieces, Capture.LAZY, {}))
    assert other.layout is not staged
    assert other.remembered is None


def test_after_a_capture_that_failed_nothing_is_staged_on_a_guess(capturer: Capturer) -> None:
    copies = Copies(plan())
    copies.go(*choose(copies.plan.pieces, Capture.AUTO, {}))
    copies.remembered = Remembered(copies.layout, [torch.zeros(4)])
    with pytest.raises(LaststepError):  # its tables may be those of other memory by now
        capturer.take(copies, [torch.zeros(3)], None, None)  # type: ignore[arg-type]
    assert copies.remembered is None


@pytest.mark.parametrize(("elements", "pays"), [(4 << 20, True), (1 << 18, False)])
def test_only_large_tensors_are_worth_a_copy_that_begins_early(elements: int, pays: bool) -> None:
    size = 4 * elements
    pieces = tuple(
        Piece(name, "float32", (elements,), size, "cuda:0", True, False) for name in "ab"
    )
    spec = ItemSpec(name="m", kind="value", standalone=True, pieces=pieces)
    copies = Copies(plan_save((spec,)))
    copies.go(*choose(pieces, Capture.AUTO, {"cuda:0": 1 << 40}))
    copies.gatherers["cuda:0"].can_run_again = lambda: True  # type: ignore[method-assign]
    copies.remember([torch.empty(elements, device="meta") for _ in pieces])
    assert (copies.remembered is not None) == pays
