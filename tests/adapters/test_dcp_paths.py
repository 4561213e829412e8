"""A path as torch's own storage takes it: two changed lines, and old folders are read."""

from __future__ import annotations

import os
import signal
import subprocess
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from dcp_rounds import ALONE, failing, same, steps
from msgspec.structs import replace
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import SerializationFormat

import laststep
from expect import raises
from laststep.catalog.attempt import Attempt
from laststep.dcp import Reader, Writer
from laststep.errors import AlreadyExistsError, CorruptError, StorageError, UsageError

ROOT = Path(__file__).resolve().parents[2]

pytestmark = ALONE


def state_of(value: float) -> dict[str, Any]:
    return {"model": {"w": torch.full((4, 3), float(value))}, "n": value}


def loaded(reader: Reader, **how: Any) -> dict[str, Any]:
    into: dict[str, Any] = {"model": {"w": torch.zeros(4, 3)}, "n": None}
    dcp.load(into, storage_reader=reader, **how)
    return into


def test_two_changed_lines_are_enough(tmp_path: Path) -> None:
    assert laststep.dcp.Writer is Writer
    dcp.save(state_of(1), storage_writer=laststep.dcp.Writer(tmp_path / "ckpt"))
    assert same(loaded(laststep.dcp.Reader(tmp_path / "ckpt")), state_of(1))


def test_a_path_is_a_checkpoint_id(tmp_path: Path) -> None:
    writer, reader = Writer(tmp_path / "unused"), Reader(tmp_path / "unused")
    for value, path in ((1, tmp_path / "a"), (2, str(tmp_path / "b")), (3, tmp_path / "100")):
        dcp.save(state_of(value), storage_writer=writer, checkpoint_id=path)
        assert writer.checkpoint_id == str(path)
    for value, path in ((1, str(tmp_path / "a")), (2, tmp_path / "b"), (3, tmp_path / "100")):
        assert same(loaded(reader, checkpoint_id=path), state_of(value))
    assert not (tmp_path / "unused").exists()


def test_a_reader_names_the_path_of_a_checkpoint_without_a_step(tmp_path: Path) -> None:
    dcp.save(state_of(1), storage_writer=Writer(tmp_path))
    reader = Reader(tmp_path)
    assert reader.read_metadata().storage_meta.checkpoint_id == str(tmp_path)
    assert reader.checkpoint_id == str(tmp_path)


@pytest.mark.parametrize(
    ("checkpoint_id", "valid"),
    [("100", True), ("runs/a", True), ("s3://bucket/a", True), ("", False), ("nobody://a", False)],
)
def test_a_url_that_cannot_be_opened_is_no_checkpoint_id(checkpoint_id: str, valid: bool) -> None:
    assert Reader.validate_checkpoint_id(checkpoint_id) is valid
    assert Writer.validate_checkpoint_id(checkpoint_id) is valid


def test_saving_again_replaces_what_is_there(tmp_path: Path) -> None:
    for value in range(3):
        dcp.save(state_of(value), storage_writer=Writer(tmp_path))
        assert same(loaded(Reader(tmp_path)), state_of(value))
    assert len(list(tmp_path.glob("step-*"))) == 1
    with failing(AlreadyExistsError, "Checkpoint already exists"):  # as DCP says
        dcp.save(state_of(9), storage_writer=Writer(tmp_path, overwrite=False))
    assert same(loaded(Reader(tmp_path)), state_of(2))


def test_there_is_always_something_to_load_while_it_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loaded before and after each step of a save that changes the run."""
    dcp.save(state_of(0), storage_writer=Writer(tmp_path))
    seen: list[float] = []

    def watched(name: str) -> None:
        act = getattr(Attempt, name)

        def look(self: Attempt, *arguments: Any, **more: Any) -> Any:
            seen.append(loaded(Reader(tmp_path))["n"])
            result = act(self, *arguments, **more)
            seen.append(loaded(Reader(tmp_path))["n"])
            return result

        monkeypatch.setattr(Attempt, name, look)

    for name in ("begin", "commit"):
        watched(name)
    dcp.save(state_of(1), storage_writer=Writer(tmp_path))
    assert seen == [0, 0, 0, 1]


@pytest.mark.parametrize("method", ["commit", "execute"])
def test_a_save_that_is_killed_leaves_the_old_or_the_new(tmp_path: Path, method: str) -> None:
    script = """
        import os, sys, warnings
        warnings.simplefilter("ignore")
        import torch, torch.distributed.checkpoint as dcp
        from laststep.dcp import Writer
        from laststep.catalog.retention import PrunePlan
        from laststep.catalog.attempt import Attempt

        def save(value):
            state = {"model": {"w": torch.full((4, 3), float(value))}, "n": value}
            dcp.save(state, storage_writer=Writer(sys.argv[1]))

        save(1.0)
        owner = {"commit": Attempt, "execute": PrunePlan}[sys.argv[2]]
        setattr(owner, sys.argv[2], lambda *_: os.kill(os.getpid(), 9))
        save(2.0)
    """
    done = subprocess.run(
        [os.environ["WARM_PYTHON"], "-c", textwrap.dedent(script), str(tmp_path), method],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
    assert same(loaded(Reader(tmp_path)), state_of(1.0 if method == "commit" else 2.0))
    dcp.save(state_of(3.0), storage_writer=Writer(tmp_path))
    assert same(loaded(Reader(tmp_path)), state_of(3.0))
    assert len(list(tmp_path.glob("step-*"))) == 1


def test_a_run_with_steps_is_not_taken_for_one_checkpoint(tmp_path: Path) -> None:
    for step in (0, 5):
        dcp.save(state_of(step), storage_writer=Writer(tmp_path, step=step))
    with failing(UsageError, "step="):
        dcp.save(state_of(9), storage_writer=Writer(tmp_path))
    assert steps(tmp_path) == [0, 5]


# --- the arguments of torch's own storage


def test_arguments_of_torchs_own_writer_are_taken(tmp_path: Path) -> None:
    writer = Writer(
        tmp_path,
        single_file_per_rank=False,
        sync_files=False,
        thread_count=3,
        per_thread_copy_ahead=5,
        cache_staged_state_dict=True,
        overwrite=True,
        serialization_format=SerializationFormat.TORCH_SAVE,
        _extensions=None,
    )
    dcp.save(state_of(1), storage_writer=writer)
    assert same(loaded(Reader(tmp_path)), state_of(1))


def test_arguments_that_cannot_be_ignored_are_refused(tmp_path: Path) -> None:
    with raises(UsageError, found="object", remedy="_extensions"):
        Writer(tmp_path, _extensions=[object()])  # type: ignore[list-item]
    with raises(UsageError, "thread_count", found="0"):
        Writer(tmp_path, thread_count=0)
    with pytest.raises(TypeError, match="unexpected keyword argument 'stepp'"):
        Writer(tmp_path, stepp=3)  # type: ignore[call-arg]


# --- planners that keep their plans


def test_plans_that_were_kept_for_another_storage_are_not_used(tmp_path: Path) -> None:
    class Keeping(DefaultSavePlanner):
        pass

    def planner() -> Keeping:
        return Keeping(enable_plan_caching=True)

    for value in range(3):  # each way finds what the other has left
        dcp.save(state_of(value), checkpoint_id=tmp_path / "stock", planner=planner())
        for name in ("ours", "too"):
            writer = Writer(tmp_path / name)
            dcp.save(state_of(value), storage_writer=writer, planner=planner())
            assert same(loaded(Reader(tmp_path / name)), state_of(value))
        assert same(loaded(Reader(tmp_path / "stock")), state_of(value))


# --- folders that torch's own storage has written


def test_a_folder_of_torchs_own_is_read(tmp_path: Path) -> None:
    state = {
        "model": {"w": torch.randn(40, 3), "b": torch.arange(3)},
        "list": [1, {"x": "y"}],
        "empty": torch.empty(0, 2),
    }
    writer = dcp.FileSystemWriter(tmp_path, thread_count=2)
    dcp.save(state, storage_writer=writer)
    into: dict[str, Any] = {
        "model": {"w": torch.zeros(40, 3), "b": torch.zeros(3, dtype=torch.int64)},
        "list": [0, {"x": 0}],
        "empty": torch.empty(0, 2),
    }
    dcp.load(into, storage_reader=Reader(tmp_path))
    assert same(into, state)
    assert Reader(tmp_path).checkpoint_id == str(tmp_path)


def test_a_folder_of_torchs_own_runs_nothing(tmp_path: Path) -> None:
    class Harm:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "harmed",)

    dcp.save({"own": Harm()}, checkpoint_id=tmp_path / "old")
    with failing(UsageError, "own"):
        dcp.load({"own": None}, storage_reader=Reader(tmp_path / "old"))
    assert not (tmp_path / "harmed").exists()
    dcp.load({"own": None}, storage_reader=Reader(tmp_path / "old", allow_pickle=True))
    assert (tmp_path / "harmed").exists()


def test_a_folder_of_torchs_own_that_lacks_a_file_says_which(tmp_path: Path) -> None:
    dcp.save(state_of(1), checkpoint_id=tmp_path)
    (tmp_path / "__0_0.distcp").unlink()
    with failing(CorruptError, "__0_0.distcp"):
        loaded(Reader(tmp_path))


def test_a_folder_of_torchs_own_is_replaced_when_the_new_checkpoint_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failed(*_: object) -> None:
        raise StorageError("no space left")

    dcp.save(state_of(1), checkpoint_id=tmp_path)
    (tmp_path / "notes.txt").write_text("a user's own")
    with failing(AlreadyExistsError):
        dcp.save(state_of(2), storage_writer=Writer(tmp_path, overwrite=False))
    with monkeypatch.context() as patch:
        patch.setattr(Attempt, "commit", failed)
        with failing(StorageError, "no space left"):
            dcp.save(state_of(2), storage_writer=Writer(tmp_path))
    assert same(loaded(Reader(tmp_path)), state_of(1))
    dcp.save(state_of(2), storage_writer=Writer(tmp_path))
    assert same(loaded(Reader(tmp_path)), state_of(2))
    names = {path.name for path in tmp_path.iterdir()}
    assert names >= {"notes.txt", "run.json"}
    assert not names & {".metadata", "__0_0.distcp"}


def test_a_path_to_which_torchs_own_storage_has_saved_later_is_refused(tmp_path: Path) -> None:
    dcp.save(state_of(1), storage_writer=Writer(tmp_path))
    dcp.save(state_of(2), checkpoint_id=tmp_path)
    later = laststep.open(tmp_path).latest().content().commit.created_s + 5
    os.utime(tmp_path / ".metadata", (later, later))
    with raises(UsageError, where=tmp_path, remedy=".metadata"):
        Reader(tmp_path).read_metadata()
    dcp.save(state_of(3), storage_writer=Writer(tmp_path))
    assert same(loaded(Reader(tmp_path)), state_of(3))


def test_parts_that_lie_outside_of_their_tensor_are_damage(tmp_path: Path) -> None:
    from laststep.dcp import content, record

    dcp.save({"model": {"w": {"at 0": torch.ones(3)}}}, storage_writer=Writer(tmp_path))
    decode = record.decode

    def lying(*arguments: Any, **more: Any) -> record.DcpRecord:
        found = decode(*arguments, **more)
        entry = replace(found.entries[0], kind="part", start=(4,), shape=(5,))
        return replace(found, entries=(entry,))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(content.dcp_record, "decode", lying)
        with raises(CorruptError, where=tmp_path):
            Reader(tmp_path).read_metadata()
