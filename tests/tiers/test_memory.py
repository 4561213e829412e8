"""A checkpoint in shared memory is there as soon as it is captured, and outlives its processes."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import laststep
from cases import long
from expect import raises, warned
from laststep.catalog.run import Run
from laststep.constants import CHUNK_BYTES
from laststep.errors import StorageError, UsageError
from laststep.memory import segments
from laststep.memory.segments import Mapping
from laststep.settings import as_keywords
from laststep.storage.directory import DirectoryStore
from laststep.tiers import snapshots
from laststep.tiers.recovery import snapshots_of
from waiting import PATIENCE_S, is_flusher, wait_ready, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TRAINER = Path(__file__).with_name("memory_trainer.py")
MB = 1 << 20


@pytest.fixture
def base(tmp_path: Path) -> str:
    """Where segments lie; any folder will do for what does not have to be fast."""
    place = tmp_path / "shm"
    place.mkdir()
    return str(place)


@pytest.fixture
def trainers() -> Iterator[list[subprocess.Popen[str]]]:
    running: list[subprocess.Popen[str]] = []
    yield running
    for trainer in running:
        if trainer.poll() is None:
            trainer.kill()
        trainer.wait()
        assert trainer.stdout is not None
        trainer.stdout.close()


class Trained:
    """A run of the trainer beside this file."""

    def __init__(self, running: list[subprocess.Popen[str]], *options: object) -> None:
        command = [os.environ["WARM_PYTHON"], str(TRAINER), *map(str, options)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        running.append(self.process)
        self.said: list[tuple[str, ...]] = []
        self.left_behind = 0
        """The flusher, once the trainer was killed."""
        self._pid = int(self.until("process")[1])

    def until(self, *words: object) -> tuple[str, ...]:
        """Wait until it says a line that begins so."""
        wanted = tuple(map(str, words))
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said.append(tuple(line.split()))
            if self.said[-1][: len(wanted)] == wanted:
                return self.said[-1]
        raise AssertionError(f"it ended before it said {wanted}: {self.said}")

    def flusher(self) -> int:
        children = Path(f"/proc/{self._pid}/task/{self._pid}/children").read_text()
        return next(pid for pid in map(int, children.split()) if is_flusher(pid))

    def end(self) -> None:
        """Kill the trainer alone."""
        os.kill(self._pid, signal.SIGKILL)
        self.process.wait()

    def kill(self, *, with_flusher: bool = True) -> None:
        flusher = self.flusher()
        if with_flusher:
            os.kill(flusher, signal.SIGKILL)
        self.left_behind = flusher
        self.end()
        if with_flusher:
            wait_until(lambda: not is_flusher(flusher))  # only then it holds no lock
        assert self.process.stdout is not None
        self.said += [tuple(line.split()) for line in self.process.stdout]

    def newest(self, *words: str) -> int:
        """The newest step of which it has said any of these."""
        return max((int(step) for word, step, *_ in self.said if word in words), default=-1)


def state_of(value: float = -1.0) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((5 << 20,), value), "small": torch.full((3,), value)}


def opened(base: str, run: Path, state: object, **settings: object) -> laststep.Checkpointer:
    how: dict[str, object] = {"host_memory_bytes": 160 * MB, "progress": False, **settings}
    tiers = [f"shm://{base}", str(run)]
    return laststep.Checkpointer(tiers=tiers, items={"state": state}, **as_keywords(how))  # type: ignore[arg-type]


def fail_after_a_save(ckpt: laststep.Checkpointer, step: int) -> None:
    """As a job that ends by an error of its own."""

    def train() -> None:
        with ckpt:
            ckpt.restore()
            ckpt.save(step).result()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()


def test_a_save_is_whole_in_memory_though_nothing_of_it_is_durable(
    base: str, run_folder: Path, trainers: list[subprocess.Popen[str]]
) -> None:
    trainer = Trained(trainers, base, run_folder, 1, "stuck")
    trainer.until("TierHolds", 0)
    trainer.end()
    assert trainer.newest("Committed") == -1
    state = state_of()
    with opened(base, run_folder, state) as ckpt:
        assert ckpt.restore().step == 0
        assert all(bool((tensor == 0).all()) for tensor in state.values())
        ckpt.wait()
    # The flusher has stored it, and nothing is left in memory that nobody needs.
    assert laststep.open(run_folder).steps() == [0]
    assert laststep.open(run_folder)[0].verify().damage == ()


def test_at_the_end_of_a_job_what_is_in_memory_alone_is_rescued(
    base: str, run_folder: Path, trainers: list[subprocess.Popen[str]]
) -> None:
    trainer = Trained(trainers, base, run_folder, 1, "stuck")
    trainer.until("TierHolds", 0)
    (alive,) = laststep.recover(base=base).segments
    assert (alive.is_alive, alive.is_removed) == (True, False)
    trainer.end()
    assert laststep.recover(run_folder, base=base).ok
    assert segments.found(base) == []
    assert laststep.open(run_folder)[0].verify().damage == ()
    state = state_of()
    with laststep.Checkpointer(
        run_folder, items={"state": state}, options=laststep.Options(progress=False)
    ) as ckpt:
        assert ckpt.restore().step == 0
    assert all(bool((tensor == 0).all()) for tensor in state.values())


@pytest.mark.parametrize("with_flusher", [True, pytest.param(False, marks=pytest.mark.long)])
def test_after_a_kill_the_newest_that_was_sealed_comes_back(
    base: str, run_folder: Path, trainers: list[subprocess.Popen[str]], *, with_flusher: bool
) -> None:
    kill_at_random(base, run_folder, trainers, random.Random(7), trials=2, only=with_flusher)


@pytest.mark.long
@pytest.mark.timeout(3600)  # a kill and a start take seconds
def test_after_a_hundred_kills_at_any_instant_the_newest_that_was_sealed_comes_back(
    base: str, run_folder: Path, trainers: list[subprocess.Popen[str]]
) -> None:
    kill_at_random(base, run_folder, trainers, random.Random(11), trials=100)


def kill_at_random(
    base: str,
    run: Path,
    trainers: list[subprocess.Popen[str]],
    chance: random.Random,
    *,
    trials: int,
    only: bool | None = None,
) -> None:
    promised = -1
    for _ in range(trials):
        trainer = Trained(trainers, base, run, 100)
        _, step, *found = trainer.until("restored")
        if promised >= 0:
            assert int(step) >= promised
            assert {float(value) for value in found} == {float(step)}
        first = int(step) + 1 if step != "None" else 0
        trainer.until("TierHolds", first + chance.randrange(4))
        signal.sigtimedwait((), chance.random() * 0.05)  # any instant of the next save
        trainer.kill(with_flusher=chance.random() < 0.5 if only is None else only)
        promised = max(promised, trainer.newest("TierHolds", "Committed"))
        assert len(segments.found(base)) <= 2
    wait_until(lambda: not is_flusher(trainer.left_behind))  # which may still write to the run


def test_a_job_that_ends_leaves_nothing_in_memory(base: str, run_folder: Path) -> None:
    with opened(base, run_folder, state_of(1.0)) as ckpt:
        ckpt.restore()
        report = ckpt.save(1).result()
        (segment,) = segments.found(base)
        assert segment.is_alive()
        assert segment.size_bytes >= 20 * MB
    assert segments.found(base) == []
    assert set(report.tiers) == {"shm://", str(run_folder)}
    assert report.tiers["shm://"] <= report.tiers[str(run_folder)]


def test_a_job_that_fails_leaves_what_it_has_sealed_for_the_next(
    base: str, run_folder: Path
) -> None:
    fail_after_a_save(opened(base, run_folder, state_of(1.0)), 1)
    (left,) = segments.found(base)
    assert not left.is_alive()
    state = state_of()
    with opened(base, run_folder, state) as ckpt:
        damage_file(run_folder)  # so that it can come out of memory alone
        assert ckpt.restore().step == 1
        assert all(bool((tensor == 1).all()) for tensor in state.values())
        ckpt.save(2).result()
        wait_until(lambda: left.folder not in {one.folder for one in segments.found(base)})


def damage_file(run: Path) -> None:
    (file,) = [path for path in run.glob("step-*/*.safetensors") if path.stat().st_size > MB]
    with file.open("r+b") as opened_file:
        opened_file.seek(2 * MB)
        opened_file.write(b"damage")


def damage_memory(base: str) -> None:
    """One byte of each slot that a snapshot needs."""
    (segment,) = segments.found(base)
    (save,) = snapshots.records_in(segment)
    with Path(segment.pool_path).open("r+b") as pool:
        for slot in save.needed_slots:
            pool.seek(slot * (16 << 20) + 5)
            pool.write(b"\x01")


def test_damaged_memory_gives_way_to_the_store(
    base: str, run_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fail_after_a_save(opened(base, run_folder, state_of(3.0)), 3)
    damage_memory(base)
    state = state_of()
    with opened(base, run_folder, state) as ckpt:
        restored = ckpt.restore()
    assert restored.step == 3
    assert restored.skipped == ()
    assert all(bool((tensor == 3).all()) for tensor in state.values())
    assert warned(caplog, "step-00000003")


def add_directory(segment: Path) -> None:
    (segment / "odd").mkdir()


def add_directory_named_like_a_record(segment: Path) -> None:
    (segment / "sealed-9-9").mkdir()


def add_pipe_named_like_a_record(segment: Path) -> None:
    os.mkfifo(segment / "sealed-9-9")


def replace_pool_by_directory(segment: Path) -> None:
    (segment / "pool").unlink()
    (segment / "pool").mkdir()


def replace_pool_by_pipe(segment: Path) -> None:
    (segment / "pool").unlink()
    os.mkfifo(segment / "pool")


def replace_owner_by_pipe(segment: Path) -> None:
    (segment / "owner.json").unlink()
    os.mkfifo(segment / "owner.json")


def add_segment_of_invalid_text(segment: Path) -> None:
    (segment.parent / "invalid").mkdir(mode=0o700)
    (segment.parent / "invalid" / "owner.json").write_bytes(b'{"run":"\xf2a"}')


def add_link_to_another_folder(segment: Path) -> None:
    other = segment.parents[2] / "other"
    other.mkdir()
    shutil.copy(segment / "owner.json", other)
    (segment.parent / "link").symlink_to(other)


@pytest.mark.parametrize(
    "spoil",
    [
        add_directory,
        add_directory_named_like_a_record,
        add_pipe_named_like_a_record,
        replace_pool_by_directory,
        replace_pool_by_pipe,
        replace_owner_by_pipe,
        add_segment_of_invalid_text,
        add_link_to_another_folder,
    ],
)
def test_foreign_objects_in_shared_memory_do_not_stop_a_run(
    base: str, run_folder: Path, spoil: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    fail_after_a_save(opened(base, run_folder, torch.ones(9), flush="thread"), 1)
    (left,) = segments.found(base)
    spoil(Path(left.folder))
    elsewhere = set(Path(base).parent.glob("other/*"))
    with opened(base, run_folder, torch.zeros(9), flush="thread") as ckpt:
        assert ckpt.restore().step == 1
        assert "shm://" in ckpt.save(2).result().tiers
    laststep.recover(base=base)
    assert "flusher" not in caplog.text
    assert set(Path(base).parent.glob("other/*")) == elsewhere
    assert laststep.open(run_folder).steps() == [1, 2]


@pytest.mark.parametrize("spoil", [add_directory, add_directory_named_like_a_record])
def test_memory_is_freed_though_its_folder_cannot_be_removed(
    base: str, run_folder: Path, spoil: Callable[[Path], None]
) -> None:
    fail_after_a_save(opened(base, run_folder, state_of(1.0)), 1)
    (left,) = segments.found(base)
    spoil(Path(left.folder))
    with opened(base, run_folder, state_of()) as ckpt:
        assert ckpt.restore().step == 1
        ckpt.save(2).result()
    assert left.size_bytes == 0
    assert [one.folder for one in segments.found(base)] == [left.folder]


def test_a_segment_that_cannot_be_opened_counts_as_in_use(
    base: str, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody knows whose it is, so it is neither read nor removed."""
    fail_after_a_save(opened(base, run_folder, state_of(1.0), flush="thread"), 1)
    (left,) = segments.found(base)
    open_file = os.open

    def refuse(path: str, *how: Any, **more: Any) -> int:
        if path == left.pool_path:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), path)
        return open_file(path, *how, **more)

    monkeypatch.setattr(os, "open", refuse)
    with opened(base, run_folder, state_of(), flush="thread") as ckpt:
        assert ckpt.restore().step == 1
        ckpt.save(2).result()
    assert laststep.recover(base=base).segments[0].is_alive
    assert [one.folder for one in segments.found(base)] == [left.folder]


def test_saves_go_on_when_somebody_has_removed_the_shared_memory(
    base: str, run_folder: Path, flusher: Callable[[], int]
) -> None:
    with opened(base, run_folder, state_of(1.0)) as ckpt:
        ckpt.restore()
        ckpt.save(1).result()
        shutil.rmtree(Path(base) / f"laststep-{os.getuid()}")
        ckpt.save(2).result()
        os.kill(flusher(), signal.SIGKILL)
        wait_until(lambda: ckpt._client.saves.refusal is not None)
        assert "shm://" not in ckpt.save(3).result().tiers
    assert laststep.open(run_folder).steps() == [1, 2, 3]


def test_what_is_rounded_is_rounded_in_memory_too(base: str, run_folder: Path) -> None:
    values = torch.randn(5 << 20)
    fail_after_a_save(opened(base, run_folder, {"m": values}, lossy={"state/m": "bf16"}), 1)
    (found,) = snapshots_of(DirectoryStore(str(run_folder)), base)
    assert found.commit.written.lossy == ("bf16",)
    found.close()
    state = {"m": torch.zeros(5 << 20)}
    with opened(base, run_folder, state) as ckpt:
        ckpt.restore()
    assert torch.equal(state["m"], values.bfloat16().float())


def test_a_state_that_does_not_fit_is_saved_and_not_kept(
    base: str, run_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(
        base, run_folder, {"w": torch.ones(24 << 20)}, host_memory_bytes=64 * MB, flush="thread"
    ) as ckpt:
        ckpt.restore()
        for step in range(3):
            assert set(ckpt.save(step).result().tiers) == {str(run_folder)}
    assert len(warned(caplog, 64 * MB)) == 1


def test_where_there_is_room_for_one_only_the_older_goes_when_it_is_stored(
    base: str, run_folder: Path
) -> None:
    state = state_of()
    with opened(base, run_folder, state, host_memory_bytes=64 * MB) as ckpt:
        ckpt.restore()
        for step in range(4):
            for tensor in state.values():
                tensor.fill_(step)
            assert "shm://" in ckpt.save(step).result().tiers
    assert laststep.open(run_folder).steps() == [0, 1, 2, 3]


def test_a_flusher_that_dies_takes_nothing_with_it(
    base: str, run_folder: Path, flusher: Callable[[], int]
) -> None:
    state = state_of(1.0)
    with opened(base, run_folder, state) as ckpt:
        ckpt.restore()
        ckpt.save(1).result()
        (segment,) = segments.found(base)
        os.kill(flusher(), signal.SIGKILL)
        wait_until(lambda: ckpt._client.saves.refusal is not None)
        (save,) = snapshots.records_in(segment)
        for step in (2, 3, 4):
            state["weight"].fill_(step)
            ckpt.save(step).result()
        assert [kept.at.step for kept in snapshots.records_in(segment)] == [4]
        assert save.at.step == 1


def test_another_start_that_has_taken_the_run_over_leaves_memory_behind(
    base: str, run_folder: Path, trainers: list[subprocess.Popen[str]]
) -> None:
    trainer = Trained(trainers, base, run_folder, 1, "stuck")
    trainer.until("TierHolds", 0)
    trainer.end()
    with laststep.Checkpointer(run_folder, state=state_of(5.0)) as elsewhere:
        elsewhere.restore()  # on another machine, which does not see that memory
        elsewhere.save(5).result()
    state = state_of()
    with opened(base, run_folder, state) as ckpt:
        assert ckpt.restore().step == 5
    assert laststep.open(run_folder).steps() == [5]


@pytest.mark.parametrize("continues", [(1, 1), *long(None)])
def test_a_start_that_dies_before_its_first_save_leaves_what_it_went_on_from(
    continues: tuple[int, int] | None,
    base: str,
    run_folder: Path,
    trainers: list[subprocess.Popen[str]],
) -> None:
    trainer = Trained(trainers, base, run_folder, 1, "stuck")
    trainer.until("TierHolds", 0)
    trainer.end()
    Run.open(DirectoryStore(run_folder)).claim_term(continues)
    state = state_of()
    with opened(base, run_folder, state) as ckpt:
        assert ckpt.restore().step == 0
        assert bool((state["weight"] == 0).all())
        ckpt.save(1).result()
    assert laststep.open(run_folder).steps() == [0, 1]
    assert segments.found(base) == []


def test_nobody_else_can_look_into_a_segment(base: str, run_folder: Path) -> None:
    with opened(base, run_folder, state_of(1.0)) as ckpt:
        ckpt.restore()
        (segment,) = segments.found(base)
        place = Path(segment.folder)
        assert [oct(path.stat().st_mode & 0o777) for path in (place, place.parent)] == ["0o700"] * 2
    place.parent.chmod(0o755)
    with raises(StorageError, where=base, expected="700"):
        opened(base, run_folder, state_of())


def test_a_container_with_little_shared_memory_is_told_what_to_do(
    tmp_path: Path, run_folder: Path, mount: Callable[..., None]
) -> None:
    place = tmp_path / "small"
    place.mkdir()
    mount(place, "-t", "tmpfs", "-o", "size=64m", "tmpfs")
    with raises(StorageError, where=place, remedy="--shm-size"):
        opened(str(place), run_folder, state_of())


@pytest.mark.parametrize(
    "tiers", [[], ["shm://"], ["runs/a", "shm://"], ["shm://", "shm://", "runs/a"], [3], "runs/a"]
)
def test_tiers_that_make_no_sense_are_refused(tiers: object) -> None:
    with pytest.raises(UsageError, match="tier"):
        laststep.Checkpointer(tiers=tiers, state={"a": torch.ones(1)})  # type: ignore[arg-type]


def test_a_save_goes_through_where_shared_memory_is_full_before_all_of_it_is_there(
    base: str, run_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    allocate = Mapping.allocate

    def full(mapping: Mapping, start: int, size_bytes: int) -> None:
        if start >= 4 * CHUNK_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        allocate(mapping, start, size_bytes)

    monkeypatch.setattr(Mapping, "allocate", full)
    state = torch.arange(6 * CHUNK_BYTES // 8)
    with opened(base, run_folder, {"all": state}, flush="thread") as ckpt:
        ckpt.restore()
        for step in (1, 2):
            state += step
            ckpt.save(step).result(PATIENCE_S)
    assert laststep.open(run_folder)[2].verify().damage == ()
    assert warned(caplog, 6 * CHUNK_BYTES)


def test_what_an_earlier_start_has_left_counts_against_the_cap_until_a_save_is_committed(
    base: str, run_folder: Path
) -> None:
    cap, save, spare = 20 * CHUNK_BYTES, 8 * CHUNK_BYTES, 8 * CHUNK_BYTES
    model = torch.nn.Linear(8 << 10, 4 << 10, bias=False)
    fail_after_a_save(opened(base, run_folder, model, host_memory_bytes=cap), 1)
    (left,) = segments.found(base)
    assert left.size_bytes == save
    with opened(base, run_folder, model, host_memory_bytes=cap) as ckpt:
        ckpt.restore()
        wait_ready(ckpt._pool)
        assert ckpt._pool.ready_bytes == max(cap - left.size_bytes, save + spare) < cap
        ckpt.save(2).result()
        wait_until(lambda: len(segments.found(base)) == 1)
        ckpt.save(3).result()
        wait_ready(ckpt._pool)
        assert ckpt._pool.ready_bytes > save + spare
