"""`laststep recover`: store orphaned snapshots and free their memory."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import laststep as library
from expect import names, warned
from laststep.catalog.attempt import Attempt
from laststep.catalog.run import Run
from laststep.errors import StorageError
from laststep.memory import segments
from laststep.read.verify import verify_checkpoint
from laststep.storage.directory import DirectoryStore
from laststep.tiers.nearest import NearestStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from laststep.memory.segments import Segment
    from laststep.storage.store import Lock

ROOT = Path(__file__).resolve().parents[2]


def test_what_the_dead_have_left_alone_is_stored_and_their_memory_freed(
    maker, own, laststep, base: str
) -> None:
    segment = own().die()
    folder = maker.seal(segment, 7)
    told = laststep("recover", "--base", base)
    assert told.status == 0
    assert "recovered, removed" in told.out
    assert "3.15 MB" in told.out
    assert segments.found(base) == []
    assert library.open(maker.path).steps() == [7]
    assert not verify_checkpoint(DirectoryStore(maker.path), folder).damage
    assert str(base) in laststep("recover", "--base", base).out


def test_a_dry_run_and_keep_remove_nothing(maker, own, laststep, base: str) -> None:
    segment = own().die()
    maker.seal(segment, 7)
    told = laststep("recover", "--base", base, "--dry-run")
    assert (told.status, "  only in memory" in told.out) == (0, True)
    assert library.open(maker.path).steps() == []
    (one,) = laststep("recover", "--base", base, "--keep", "--json").json()["segments"]
    assert [save["state"] for save in one["saves"]] == ["recovered"]
    assert (one["is_removed"], one["is_alive"], one["pid"]) == (False, False, segment.owner.pid)
    assert library.open(maker.path).steps() == [7]
    told = laststep("recover", maker.path, "--base", base)
    assert "  stored, removed" in told.out
    assert segments.found(base) == []


def test_what_lives_is_listed_and_left_alone(maker, own, laststep, base: str) -> None:
    owner = own()
    maker.seal(owner.segment, 7)
    empty = own()
    told = laststep("recover", "--base", base)
    assert told.status == 0
    assert f"pid {owner.process.pid}, alive" in told.out
    assert "  only in memory" in told.out
    assert len(segments.found(base)) == 2
    assert library.open(maker.path).steps() == []
    empty.die()
    assert laststep("recover", "--base", base).status == 0
    assert [one.folder for one in segments.found(base)] == [owner.segment.folder]


def test_what_a_later_start_has_left_behind_goes(maker, own, laststep, base: str) -> None:
    maker.seal(own().die(), 7)
    maker.start()
    maker.save(8)
    assert laststep("recover", "--base", base).status == 0
    assert segments.found(base) == []
    assert library.open(maker.path).steps() == [8]


@pytest.mark.parametrize("continues", [(1, 1), None])
def test_what_a_start_that_has_committed_nothing_went_on_from_is_stored(
    continues: tuple[int, int] | None, maker, own, laststep, base: str
) -> None:
    maker.seal(own().die(), 7)
    maker.start(continues)  # it dies before its first save is whole
    assert "  only in memory" in laststep("recover", "--base", base, "--dry-run").out
    assert "recovered, removed" in laststep("recover", "--base", base).out
    assert library.open(maker.path).steps() == [7]


def test_beside_a_later_start_that_lives_nothing_is_stored_nor_removed(
    maker, own, laststep, base: str
) -> None:
    segment = own().die()
    maker.seal(segment, 7)
    with closing(maker.run.lock_term(maker.start((1, 1)))):
        told = laststep("recover", "--base", base)
    assert (told.status, "  not stored" in told.out) == (1, True)
    assert f"process {os.getpid()}" in told.out
    assert [one.folder for one in segments.found(base)] == [segment.folder]
    assert laststep("recover", "--base", base).status == 0
    assert library.open(maker.path).steps() == [7]


def gone(maker, segment: Segment) -> None:
    shutil.rmtree(maker.path)


def another(maker, segment: Segment) -> None:
    shutil.rmtree(maker.path)
    type(maker)(maker.path).save(1)


def damaged(maker, segment: Segment) -> None:
    with Path(segment.pool_path).open("r+b") as pool:
        pool.seek(2 << 20)
        pool.write(b"damage")


def unreadable(maker, segment: Segment) -> None:
    segment.put("1-2", b"of a later version")


def directory(maker, segment: Segment) -> None:
    Path(segment.folder, "sealed-1-2").mkdir()


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (gone, "step 7"),
        (another, "step 7"),
        (damaged, "xxh3-128:"),
        (unreadable, "1 record"),
        (directory, "1 record"),
    ],
)
def test_what_cannot_be_stored_stays_and_the_status_says_so(
    maker, own, laststep, base: str, spoil: Callable[..., None], said: str
) -> None:
    segment = own().die()
    maker.seal(segment, 7)
    spoil(maker, segment)
    told = laststep("recover", "--base", base)
    assert told.status == 1
    assert said in told.out
    assert segment.folder in told.out
    assert [one.folder for one in segments.found(base)] == [segment.folder]
    assert not laststep("recover", "--base", base, "--json").json()["ok"]


def test_one_rank_of_several_alone_is_not_stored(maker, own, laststep, base: str) -> None:
    maker.seal(own(ranks=2).die(), 7)
    told = laststep("recover", "--base", base, "--dry-run")
    assert names(told.out, "captured by", "1 of 2 ranks", "incomplete")
    assert "only in memory" not in told.out
    told = laststep("recover", "--base", base)
    assert (told.status, "of 2 ranks" in told.out) == (1, True)
    assert len(segments.found(base)) == 1


def test_a_restore_tells_of_newer_steps_that_not_all_ranks_have_captured(
    maker, own, base: str, caplog: pytest.LogCaptureFixture
) -> None:
    maker.save(5)
    segment = own(ranks=3).die()
    for step in (6, 7):
        maker.seal(segment, step)
    for _ in range(2):
        with closing(NearestStore(DirectoryStore(maker.path), base, None)) as store:
            assert store.look() == {}
    assert len(warned(caplog, "step 6 (1 of 3 ranks)", "step 7 (1 of 3 ranks)")) == 1
    maker.save(8)
    caplog.clear()
    with closing(NearestStore(DirectoryStore(maker.path), base, None)) as store:
        assert store.look() == {}
    assert warned(caplog) == []


def test_other_runs_and_half_made_folders_are_left_alone_where_a_run_is_named(
    maker, own, laststep, base: str, tmp_path: Path
) -> None:
    segment = own().die()
    half = Path(segment.folder).with_name("new-1")
    half.mkdir()
    elsewhere = tmp_path / "elsewhere"
    assert laststep("recover", elsewhere, "--base", base).status == 0
    assert (half.exists(), len(segments.found(base))) == (True, 1)
    report = library.recover(base=base)
    assert report.debris == (str(half),)
    assert [one.is_removed for one in report.segments] == [True]
    assert report.ok


def test_what_a_rescue_could_not_finish_the_next_one_makes_anew(
    maker, own, base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    segment = own().die()
    folder = maker.seal(segment, 7)

    def full(*_: object) -> None:
        raise StorageError("no room is left")

    with monkeypatch.context() as patched:
        patched.setattr(Attempt, "commit", full)
        (left,) = library.recover(base=base).segments
    (save,) = left.saves
    assert (save.state, "no room is left" in str(save.error)) == ("not stored", True)
    assert (maker.path / folder / "state.safetensors").exists()
    assert library.open(maker.path).steps() == []
    assert library.recover(base=base).ok
    assert not verify_checkpoint(DirectoryStore(maker.path), folder).damage
    assert segments.found(base) == []


def test_of_two_who_rescue_at_once_one_stores_and_the_other_touches_nothing(
    maker, own, base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    segment = own().die()
    manifest = maker.path / maker.seal(segment, 7) / "manifest.json"
    lock_term, stored = Run.lock_term, []

    def late(run: Run, number: int) -> Lock:
        monkeypatch.setattr(Run, "lock_term", lock_term)
        assert library.recover(base=base).ok
        stored.append(manifest.stat().st_ino)
        return lock_term(run, number)

    monkeypatch.setattr(Run, "lock_term", late)
    assert library.recover(base=base).ok
    assert stored == [manifest.stat().st_ino]
    assert segments.found(base) == []


def test_rescuing_never_imports_torch(maker, own, base: str) -> None:
    maker.seal(own().die(), 7)
    script = (
        "import sys, laststep; report = laststep.recover(base=sys.argv[1]); "
        "assert report.segments[0].is_removed; assert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, base],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        check=False,
    )
    assert done.returncode == 0
