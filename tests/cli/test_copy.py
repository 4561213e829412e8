"""`laststep copy`: what it says, how it ends, and what is there after it was killed."""

from __future__ import annotations

import contextlib
import os
import random
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from expect import names
from laststep.catalog.retention import Keep, plan_prune
from laststep.catalog.run import Run
from laststep.errors import AlreadyExistsError
from laststep.read.verify import verify_checkpoint
from laststep.storage.directory import DirectoryStore
from laststep.tiers.runs import copy
from stored import contents
from waiting import wait_until

ROOT = Path(__file__).resolve().parent.parent.parent


def sound_steps(run: Path) -> list[int]:
    """The steps that a run shows, all of which verify."""
    store = DirectoryStore(run)
    if not (run / "run.json").exists():
        return []
    listed = Run.open(store).checkpoints()
    assert not [one for one in listed if verify_checkpoint(store, one.folder).damage]
    return [item.step for item in listed]


def test_a_run_is_copied_and_the_next_copy_finds_it_there(maker, laststep, tmp_path: Path) -> None:
    maker.save(1)
    maker.save_by_ranks(2)
    ended = laststep("copy", maker.path, tmp_path / "copy")
    assert ended.status == 0, ended.err
    assert "3.02 MB" in ended.out
    assert names(ended.out, "2 checkpoints", tmp_path / "copy")
    assert contents(tmp_path / "copy") == contents(maker.path)
    assert sound_steps(tmp_path / "copy") == [1, 2]
    again = laststep("copy", maker.path, tmp_path / "copy", "--json").json()
    assert (len(again["copied"]), len(again["there"])) == (0, 2)


def test_one_step_is_copied_by_its_number_or_its_folder(maker, laststep, tmp_path: Path) -> None:
    maker.save(1)
    folder = maker.save(2)
    document = laststep("copy", folder, tmp_path / "copy", "--json").json()
    assert document["copied"] == [folder.name]
    assert (document["from"], document["to"]) == (str(maker.path), str(tmp_path / "copy"))
    assert laststep("copy", maker.path, tmp_path / "copy", "--step", 1).status == 0
    assert sound_steps(tmp_path / "copy") == [1, 2]
    assert laststep("copy", maker.path, tmp_path / "copy", "--step", 7).status == 1


def test_a_dry_run_changes_nothing_and_says_what_would_come(
    maker, laststep, tmp_path: Path
) -> None:
    folders = [maker.save(step).name for step in (1, 2)]
    assert names(
        laststep("copy", maker.path, tmp_path / "copy", "--dry-run").out, "2 checkpoints", "6."
    )
    assert not (tmp_path / "copy").exists()
    laststep("copy", maker.path, tmp_path / "copy", "--step", 1)
    document = laststep("copy", maker.path, tmp_path / "copy", "--dry-run", "--json").json()
    assert (document["there"], document["copy"]) == ([folders[0]], [folders[1]])
    assert document["size_bytes"] > 3_000_000


def test_damage_is_told_by_file_block_and_status(maker, laststep, tmp_path: Path) -> None:
    for step in (1, 2, 3):
        maker.save(step)
    file = next(maker.path.glob("step-00000002.*/model.safetensors"))
    damaged = bytearray(file.read_bytes())
    damaged[-5] ^= 1
    file.write_bytes(damaged)
    ended = laststep("copy", maker.path, tmp_path / "copy")
    assert ended.status == 3
    assert f"{file}, block 2" in ended.out
    assert sound_steps(tmp_path / "copy") == [1, 3]
    assert laststep("copy", maker.path, tmp_path / "copy", "--json").json()["damaged"] == [
        file.parent.name
    ]


def test_a_place_that_is_none_for_this_run_is_refused(maker, laststep, tmp_path: Path) -> None:
    folder = maker.save(1)
    copy(maker.path, tmp_path / "runs" / "gpt")
    ended = laststep("copy", maker.path, tmp_path / "runs")  # as one would with cp
    assert ended.status == 2
    assert str(tmp_path / "runs" / "gpt") in ended.err
    ended = laststep("copy", maker.path, tmp_path / "runs" / "gpt" / folder.name)
    assert (ended.status, folder.name in ended.err) == (2, True)
    assert laststep("copy", tmp_path / "nowhere", tmp_path / "copy").status == 1
    assert not (tmp_path / "copy").exists()


def test_a_full_disk_ends_a_copy_that_goes_on_when_there_is_room(
    maker, laststep, mount, tmp_path: Path
) -> None:
    for step in (1, 2, 3):
        maker.save(step)
    target = tmp_path / "disk"
    target.mkdir()
    mount(target, "-t", "tmpfs", "-o", "size=8m", "tmpfs")
    ended = laststep("copy", maker.path, target / "run")
    assert (ended.status, "No space left" in ended.err) == (1, True)
    assert sound_steps(target / "run") == [1, 2]
    subprocess.run(["mount", "-o", "remount,size=20m", str(target)], check=True)
    assert laststep("copy", maker.path, target / "run").status == 0
    assert sound_steps(target / "run") == [1, 2, 3]


@pytest.mark.parametrize("limit", ["fast", "0MB/s", "-1 MB/s", "12"])
def test_what_is_no_rate_is_refused(maker, laststep, tmp_path: Path, limit: str) -> None:
    maker.save(1)
    ended = laststep("copy", maker.path, tmp_path / "copy", f"--limit={limit}")
    assert (ended.status, "200MB/s" in ended.err) == (2, True)


def test_a_limit_is_kept(maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Told by what is waited for, in all: all bytes but those of the last chunk."""
    maker.save(1)
    waited: list[float] = []
    monkeypatch.setattr(time, "monotonic", lambda: 0.0)
    stop = threading.Event()
    monkeypatch.setattr(stop, "wait", waited.append)
    report = copy(maker.path, tmp_path / "copy", bytes_per_s=1e6, stop=stop)
    assert report.copied_bytes > 3_000_000
    assert waited[0] == 0
    assert report.copied_bytes / 1e6 > max(waited) > 0


def test_ctrl_c_ends_a_copy_that_the_next_one_goes_on_with(maker, laststep, tmp_path: Path) -> None:
    maker.save(1)
    target = tmp_path / "copy"
    command = [sys.executable, "-m", "laststep", "copy", str(maker.path), str(target)]
    with subprocess.Popen(
        [*command, "--limit", "100kB/s", "--threads", "1"],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        wait_until(lambda: any(target.glob("step-*/*.safetensors")))
        process.send_signal(signal.SIGINT)
        _, said = process.communicate()
    assert process.returncode not in (0, -signal.SIGINT)
    assert "Traceback" not in said
    assert sound_steps(target) == []
    assert "`laststep copy`" in laststep("ls", target).out
    assert laststep("copy", maker.path, target).status == 0
    assert sound_steps(target) == [1]


def killed(
    source: Path, target: Path, after_s: float, items: tuple[str, ...] | None = None
) -> bool:
    """Copy in a child that is killed after that time; whether it was before the end."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            copy(source, target, items=items, threads=2)
            status = 0
        finally:
            os._exit(status)
    ended = os.pidfd_open(child)
    if not select.select([ended], [], [], after_s)[0]:
        os.kill(child, signal.SIGKILL)
    os.close(ended)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, -signal.SIGKILL)
    return status != 0


@pytest.mark.parametrize("kills", [6, pytest.param(100, marks=pytest.mark.long)])
@pytest.mark.parametrize("items", [None, ("model",)])
def test_after_kills_at_random_instants_all_that_is_shown_is_sound(
    maker, tmp_path: Path, kills: int, items: tuple[str, ...] | None
) -> None:
    for step in range(6):
        maker.save(step)
    drawn = random.Random(kills)
    before: list[int] = []
    target = tmp_path / "0"
    for number in range(kills):
        if not killed(maker.path, target, drawn.uniform(0.0, 0.15), items):
            before, target = [], tmp_path / str(number)  # from the start again
        steps = sound_steps(target)
        assert steps[: len(before)] == before
        before = steps
    copy(maker.path, target, items=items)
    for made in target.rglob("*.tmp-*"):  # of kills, which are cleaned up after an hour
        os.utime(made, (0, 0))
    copy(maker.path, target, items=items)
    copy(maker.path, tmp_path / "at once", items=items)
    assert contents(target) == contents(tmp_path / "at once")
    assert sound_steps(target) == list(range(6))


def test_a_run_that_is_saved_to_and_pruned_meanwhile_is_copied(maker, tmp_path: Path) -> None:
    stop = threading.Event()
    maker.save(0)

    def train() -> None:
        step = 0
        while not stop.is_set():
            step += 1
            maker.save(step)
            plan_prune(maker.run, Keep(last=2)).execute()

    trainer = threading.Thread(target=train)
    trainer.start()
    try:
        for _ in range(10):
            report = copy(maker.path, tmp_path / "copy")
            assert not report.damaged
    finally:
        stop.set()
        trainer.join()
    newest = copy(maker.path, tmp_path / "copy")
    assert len(newest.copied + newest.there) == 2
    sound_steps(tmp_path / "copy")


def test_copying_never_imports_torch(maker, tmp_path: Path) -> None:
    maker.save(1)
    script = (
        "import sys; from laststep.tiers.runs import copy; copy(*sys.argv[1:]); "
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, maker.path, tmp_path / "copy"],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        check=False,
    )
    assert done.returncode == 0


def test_several_that_copy_at_once_leave_one_sound_copy(maker, tmp_path: Path) -> None:
    for step in range(4):
        maker.save(step)

    def one() -> None:
        status = 1
        try:
            while status:  # another copies the next one: again, until nothing is left to do
                with contextlib.suppress(AlreadyExistsError):
                    copy(maker.path, tmp_path / "copy", threads=2)
                    status = 0
        finally:
            os._exit(status)

    children = []
    for _ in range(4):
        child = os.fork()
        if child == 0:
            one()
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0, 0]
    assert contents(tmp_path / "copy") == contents(maker.path)
    assert sound_steps(tmp_path / "copy") == [0, 1, 2, 3]
