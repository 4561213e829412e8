"""Which steps a save may have, as the lineage has others."""

from __future__ import annotations

import pytest

from laststep.errors import AlreadyExistsError
from laststep.saving.place import SavedSteps


def test_a_step_that_is_committed_or_under_way_is_taken() -> None:
    steps = SavedSteps()
    steps.add([1, 2])
    for step in (1, 3):
        with pytest.raises(AlreadyExistsError, match=f"step {step} has been saved already"):
            steps.replaces(step, [3], "runs/a", overwrite=False)
        assert steps.replaces(step, [3], "runs/a", overwrite=True)
    assert not steps.replaces(4, [3], "runs/a", overwrite=False)


def test_steps_beyond_the_one_that_was_restored_are_replaced_once() -> None:
    steps = SavedSteps()
    steps.restored(2, [1, 2, 3, 4])
    with pytest.raises(AlreadyExistsError):
        steps.replaces(2, [], "runs/a", overwrite=False)
    assert steps.replaces(3, [], "runs/a", overwrite=False)
    steps.add([3])
    with pytest.raises(AlreadyExistsError):
        steps.replaces(3, [], "runs/a", overwrite=False)
    steps.restored(0)
    assert not steps.replaces(3, [], "runs/a", overwrite=False)


def test_the_newest_is_the_last_that_is_committed() -> None:
    steps = SavedSteps()
    assert steps.newest() is None
    steps.restored(5, [1, 5, 9])
    assert steps.newest() == 5
    steps.add([6])
    assert steps.newest() == 6
