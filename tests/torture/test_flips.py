"""The judge of the bit flips: it takes no exact restore for granted."""

from __future__ import annotations

import importlib
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

HERE = Path(__file__).parent


@pytest.fixture
def flips(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module, which finds its neighbour `state` by path, as torture.py lets it."""
    monkeypatch.syspath_prepend(str(HERE))
    yield importlib.import_module("flips")


def test_every_byte_of_every_file_is_under_a_digest(flips: ModuleType, run_folder: Path) -> None:
    newer = flips._make(run_folder)
    for file in newer.iterdir():
        at = 0
        for part in sorted(flips.covered_bytes(newer, file.name)):
            assert part.start == at, (file.name, part)
            at = part.stop
        assert at == file.stat().st_size, file.name


def test_flips_in_all_files_are_noticed(flips: ModuleType, run_folder: Path) -> None:
    done = flips.torture(run_folder, flips=12, seed=1)
    assert done.flips == 12
    assert not any(outcome.startswith("exact") for outcome in done.outcomes)


def test_a_restore_that_notices_nothing_is_a_violation(
    flips: ModuleType, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    restore = flips._restore
    sound = run_folder.with_name("sound")

    def blind(folder: Path, step: int | None) -> object:
        """As if the flip had been overlooked: what is read is a copy from before it."""
        return restore(sound, step)

    make = flips._make

    def made(folder: Path) -> Path:
        newer = make(folder)
        shutil.copytree(folder, sound)
        return newer

    monkeypatch.setattr(flips, "_make", made)
    monkeypatch.setattr(flips, "_restore", blind)
    with pytest.raises(flips.Violated, match="as if nothing had changed, but the byte is in"):
        flips.torture(run_folder, flips=5, seed=1)


def test_a_byte_that_no_digest_covers_may_change(flips: ModuleType, run_folder: Path) -> None:
    """`pinned` is such a file: only that it is there counts."""
    newer = flips._make(run_folder)
    (newer / "pinned").write_bytes(b"x")
    assert flips.covered_bytes(newer, "pinned") == ()
    assert flips._judge(flips.EXACT, 0, ()) == flips.OUTSIDE
    flips._flip(newer / "pinned", 0, 3)
    assert flips._newest(run_folder, newer) == flips.EXACT
    flips._agree_with_verify(run_folder, newer, flips.OUTSIDE)
