"""A short, seeded share of the structure fuzz."""

from __future__ import annotations

import ctypes
import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from expect import raises
from guards import GuardedPool
from laststep.constants import CHUNK_BYTES
from laststep.errors import UsageError
from waiting import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

HERE = Path(__file__).parent
NAMES = ("structure", "structure_changes", "structure_state", "trials")


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[ModuleType, ModuleType]]:
    """The fuzz and its frame, which find their neighbours by path, as torture.py lets them."""
    monkeypatch.syspath_prepend(str(HERE))
    yield importlib.import_module("structure"), importlib.import_module("trials")
    for name in NAMES:
        sys.modules.pop(name, None)


def test_states_that_change_between_and_under_saves_are_exact_or_loud(
    modules: tuple[ModuleType, ModuleType], run_folder: Path
) -> None:
    structure, trials = modules
    tally = trials.run("structure", structure.trial, run_folder, seed=2, trials=3)
    assert not tally.findings, "\n".join(map(str, tally.findings))
    assert tally.compared > 12
    assert sum(tally.faults.values()) > 40


def test_the_fuzz_notices_a_save_that_is_not_the_state(
    modules: tuple[ModuleType, ModuleType], run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    structure, trials = modules
    written_down = structure.World.written_down

    def a_little_later(world: object) -> object:
        found = written_down(world)
        world.extra["step"] = "another"  # type: ignore[attr-defined]
        return found

    monkeypatch.setattr(structure.World, "written_down", a_little_later)
    tally = trials.run("structure", structure.trial, run_folder, seed=0, trials=1)
    assert [finding.kind for finding in tally.findings] == ["wrong"]


def test_a_guarded_pool_refuses_copies_by_the_system_into_what_was_handed_over() -> None:
    made, source = GuardedPool(CHUNK_BYTES, pinned=False), (ctypes.c_char * 4)(*b"\1\2\3\4")
    try:
        made.want(CHUNK_BYTES)
        slot = made.lease(PATIENCE_S)
        assert slot is not None
        ranges = [(ctypes.addressof(source), 4)]
        assert made.land(slot, 0, ranges)
        made.seal([slot])
        with raises(UsageError, found="slot 0"):
            made.land(slot, 8, ranges)
        made.release(slot)
        assert bytes(made.view(slot)[:12]) == b"\1\2\3\4" + bytes(8)
        assert made.lease(PATIENCE_S) == slot
        assert made.land(slot, 8, ranges)
    finally:
        made.close()
