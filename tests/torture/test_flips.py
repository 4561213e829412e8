"""The judge of the bit flips: it takes no exact restore for granted."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import flips
import pytest
from tally import Tally, Violation

if TYPE_CHECKING:
    from pathlib import Path


def test_every_byte_of_every_new_file_is_under_a_digest(run_folder: Path) -> None:
    newer = flips._make(run_folder)
    for file in newer.iterdir():
        if "~" in file.name:  # of an earlier checkpoint: only some of it is needed
            continue
        at = 0
        for part in flips.covered_bytes(newer, file.name):
            assert part.start == at, (file.name, part)
            at = part.stop
        assert at == file.stat().st_size, file.name


def test_flips_in_all_files_are_noticed(run_folder: Path) -> None:
    tally = Tally()
    flips.flip(run_folder, 1, tally, flips=24)
    assert tally.faults.total() == tally.compared == 24
    hit = " ".join(tally.faults)
    assert all(name in hit for name in ("index-r00000", "manifest.json", ".pack", ".safetensors"))
    shared = sum(count for what, count in tally.faults.items() if "~" in what)
    assert tally.notes[f"bit flipped: {flips.OUTSIDE}"] <= shared  # of which not all is needed
    assert tally.notes[f"bit flipped: {flips.SPARE}"] <= 1


def test_a_flip_in_a_header_is_found_and_hurts_no_restore(run_folder: Path) -> None:
    newer = flips._make(run_folder)
    files = sorted(newer.glob("*.safetensors"))
    assert files
    for file in files:
        [header] = [c for c in flips.covered_bytes(newer, file.name) if c.what == flips.HEADER]
        for byte in (0, 7, 8, 60, header.stop - 1):
            flips._flip(file, byte, 2)
            assert flips._newest(run_folder, newer) == flips.EXACT
            flips._agree_with_verify(run_folder, newer, flips.IN_A_HEADER)
            flips._flip(file, byte, 2)


def test_a_restore_that_a_header_hurts_is_a_violation() -> None:
    covered = (flips.Covered(0, 4096, flips.HEADER),)
    with pytest.raises(Violation, match="a header"):
        flips._judge("newest: Corrupt", 60, covered)


def test_a_restore_that_notices_nothing_is_a_violation(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
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
    with pytest.raises(Violation, match=r"but the byte is in|but verify finds"):
        flips.flip(run_folder, 1, Tally(), flips=12)


def test_a_byte_that_no_digest_covers_may_change(run_folder: Path) -> None:
    """`pinned` is such a file: only that it is there counts."""
    newer = flips._make(run_folder)
    (newer / "pinned").write_bytes(b"x")
    assert flips.covered_bytes(newer, "pinned") == ()
    assert flips._judge(flips.EXACT, 0, ()) == flips.OUTSIDE
    flips._flip(newer / "pinned", 0, 3)
    assert flips._newest(run_folder, newer) == flips.EXACT
    flips._agree_with_verify(run_folder, newer, flips.OUTSIDE)
