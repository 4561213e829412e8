"""Which steps a save may have, as the lineage has others."""

from __future__ import annotations

import pytest

from expect import raises
from laststep.errors import AlreadyExistsError
from laststep.flush.saves import Saves
from saves_of import commit, lone_save


def committed(saves: Saves, *steps: int) -> None:
    for step in steps:
        save = lone_save(step)
        saves.enter(save)
        commit(save)
    saves.take_over()


def test_a_step_that_is_committed_or_under_way_is_taken() -> None:
    saves = Saves()
    committed(saves, 1, 2)
    saves.enter(lone_save(3))
    for step in (1, 3):
        with raises(AlreadyExistsError, f"step {step}", where="runs/a"):
            saves.check_new(step, "runs/a", overwrite=False)
        assert saves.check_new(step, "runs/a", overwrite=True)
    assert not saves.check_new(4, "runs/a", overwrite=False)


def test_steps_beyond_the_one_that_was_restored_are_replaced_once() -> None:
    saves = Saves()
    saves.restored(2, [1, 2, 3, 4])
    with pytest.raises(AlreadyExistsError):
        saves.check_new(2, "runs/a", overwrite=False)
    assert saves.check_new(3, "runs/a", overwrite=False)
    committed(saves, 3)
    with pytest.raises(AlreadyExistsError):
        saves.check_new(3, "runs/a", overwrite=False)
    saves.restored(0)
    assert not saves.check_new(3, "runs/a", overwrite=False)


def test_the_newest_is_the_last_that_is_committed() -> None:
    saves = Saves()
    assert saves.newest_committed() is None
    saves.restored(5, [1, 5, 9])
    assert saves.newest_committed() == 5
    committed(saves, 6)
    assert saves.newest_committed() == 6
