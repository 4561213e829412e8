"""Which checkpoint is restored, and what never happens when something does not fit."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

import laststep
from expect import names, raises
from laststep.codecs.digests import DIGEST_NAME
from laststep.restoring.choose import Choosing
from laststep.settings import as_keywords
from laststep.storage.files import FileReader
from stored import flip

if TYPE_CHECKING:
    from collections.abc import Callable

    from laststep.read.content import Content
    from laststep.restoring.choose import Chosen

INDEX = "index-r00000"


def folder_of(run: Path, step: int) -> Path:
    return max(run.glob(f"step-{step:08d}.*"))


def data_at(path: Path) -> int:
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


def test_a_new_run_restores_nothing_and_starts_at_zero(opened: object, fresh: object) -> None:
    with opened(fresh) as checkpointer:
        restored = checkpointer.restore()
        assert (restored.step, restored.next_step, restored.skipped) == (None, 0, ())
        with pytest.raises(laststep.NotFoundError):
            checkpointer.restore(5)


def test_the_newest_is_restored_or_exactly_the_step_that_was_named(
    saved: Callable[..., Path], opened: object, fresh: object
) -> None:
    saved(1, 2, 3)
    with opened(fresh) as checkpointer:
        restored = checkpointer.restore()
        assert (restored.step, restored.next_step) == (3, 4)
        assert fresh.is_wholly(3)
        assert checkpointer.restore(1).step == 1
        assert fresh.is_wholly(1)
        with pytest.raises(laststep.NotFoundError, match="step 7"):
            checkpointer.restore(7)
        assert fresh.is_wholly(1)


# Each breaks a checkpoint in another kind of place.


def in_the_data(folder: Path) -> None:
    flip(folder / "blob.safetensors", data_at(folder / "blob.safetensors") + (2 << 20) + 5)


def in_the_last_byte(folder: Path) -> None:
    path = folder / "blob.safetensors"
    flip(path, path.stat().st_size - 1)


def in_a_header(folder: Path) -> None:
    flip(folder / "model.safetensors", 60)


def in_the_padding_of_a_header(folder: Path) -> None:
    flip(folder / "model.safetensors", data_at(folder / "model.safetensors") - 1)


def in_the_length_of_a_header(folder: Path) -> None:
    flip(folder / "model.safetensors", 0)


def in_a_tree(folder: Path) -> None:
    path = folder / INDEX
    flip(path, path.read_bytes().rindex(b'"tree"'))


def in_the_digest_of_an_index(folder: Path) -> None:
    flip(folder / INDEX, 3)


def in_the_files_of_an_index(folder: Path) -> None:
    path = folder / INDEX
    flip(path, path.read_bytes().index(b"model.safetensors"))


def truncated_index(folder: Path) -> None:
    path = folder / INDEX
    path.write_bytes(path.read_bytes()[:-1])


def empty_index(folder: Path) -> None:
    (folder / INDEX).write_bytes(b"")


def missing_index(folder: Path) -> None:
    (folder / INDEX).unlink()


def index_of_another_step(folder: Path) -> None:
    shutil.copy(folder_of(folder.parent, 2) / INDEX, folder / INDEX)


def in_the_manifest(folder: Path) -> None:
    flip(folder / "manifest.json", 200)


def in_the_digest_of_the_manifest(folder: Path) -> None:
    flip(folder / "manifest.json", 25)


def truncated(folder: Path) -> None:
    path = folder / "blob.safetensors"
    path.write_bytes(path.read_bytes()[:-5000])


def grown(folder: Path) -> None:
    path = folder / "blob.safetensors"
    path.write_bytes(path.read_bytes() + b"x")


def missing(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def swapped_with_another_step(folder: Path) -> None:
    other = folder_of(folder.parent, 2)
    shutil.copy(other / "model.safetensors", folder / "model.safetensors")


def empty_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_bytes(b"")


def manifest_of_another_step(folder: Path) -> None:
    shutil.copy(folder_of(folder.parent, 2) / "manifest.json", folder / "manifest.json")


BREAKS = [
    in_the_data,
    in_the_last_byte,
    in_a_tree,
    in_the_digest_of_an_index,
    in_the_files_of_an_index,
    in_the_manifest,
    in_the_digest_of_the_manifest,
    truncated,
    grown,
    missing,
    truncated_index,
    empty_index,
    missing_index,
    index_of_another_step,
    swapped_with_another_step,
    empty_manifest,
    manifest_of_another_step,
]


@pytest.mark.parametrize("damage", BREAKS)
def test_damage_of_every_kind_is_found_and_an_older_checkpoint_is_taken(
    damage: Callable[[Path], None], saved: Callable[..., Path], opened: object, fresh: object
) -> None:
    run = saved(1, 2, 3)
    damage(folder_of(run, 3))
    with opened(fresh) as checkpointer:
        restored = checkpointer.restore()
        assert restored.step == 2
        assert fresh.is_wholly(2)
        (skipped,) = restored.skipped
        assert skipped.step == 3
        assert skipped.folder == folder_of(run, 3).name
        assert skipped.reason
        # What was passed over blocks no step.
        fresh.become(3)
        checkpointer.save(3).wait()
        assert checkpointer.restore().step == 3
        assert fresh.is_wholly(3)


def test_a_named_step_that_is_corrupt_is_never_replaced_by_another(
    saved: Callable[..., Path], opened: object, fresh: object
) -> None:
    run = saved(1, 2, 3)
    in_the_data(folder_of(run, 3))
    with opened(fresh) as checkpointer, pytest.raises(laststep.CorruptError, match="block 2"):
        checkpointer.restore(3)


def test_when_all_are_corrupt_that_is_said_of_each(
    saved: Callable[..., Path], opened: object, fresh: object
) -> None:
    run = saved(1, 2)
    in_the_data(folder_of(run, 1))
    missing(folder_of(run, 2))
    with opened(fresh) as checkpointer:
        with raises(laststep.CorruptError, "none of the 2 ", remedy="verify") as raised:
            checkpointer.restore()
        lines = str(raised.value).splitlines()[1:]
        assert [line.split(":")[0].strip() for line in lines] == ["step 2", "step 1"]
        assert names(lines[0], "missing", "step-00000002")
        assert names(lines[1], "step-00000001", "block 2")
        assert all(len(line) < 140 and DIGEST_NAME not in line for line in lines)
        # The state was touched: it must not be saved.
        with raises(laststep.UsageError, found="failed", remedy="restore()"):
            checkpointer.save(9)


def test_a_state_left_mixed_is_not_saved_until_it_is_whole_again(
    saved: Callable[..., Path], opened: object, fresh: object
) -> None:
    run = saved(1, 2)
    fresh.become(7)
    in_the_data(folder_of(run, 2))
    with opened(fresh) as checkpointer:
        with pytest.raises(laststep.CorruptError):
            checkpointer.restore(2)
        with raises(laststep.UsageError, found="failed", remedy="restore()"):
            checkpointer.save(3)
        checkpointer.restore(1, only=["plain"])  # a part makes nothing whole
        with raises(laststep.UsageError, found="failed", remedy="restore()"):
            checkpointer.save(3)
        checkpointer.restore(1)
        checkpointer.save(3).wait()


@pytest.mark.parametrize(
    "damage", [in_a_header, in_the_padding_of_a_header, in_the_length_of_a_header]
)
def test_damage_to_a_header_hurts_no_restore_and_verify_finds_it(
    damage: Callable[[Path], None], saved: Callable[..., Path], opened: object, fresh: object
) -> None:
    run = saved(1, 2)
    damage(folder_of(run, 2))
    with opened(fresh) as checkpointer:
        restored = checkpointer.restore()
    assert (restored.step, restored.skipped) == (2, ())
    assert fresh.is_wholly(2)
    with laststep.open(run)[2] as checkpoint:
        found = checkpoint.verify().damage
    assert [(wrong.file, wrong.what) for wrong in found] == [("model.safetensors", "header")]


def test_a_corrupt_index_is_found_before_anything_is_touched(
    saved: Callable[..., Path], opened: object, fresh: object
) -> None:
    run = saved(1)
    fresh.become(7)
    in_the_files_of_an_index(folder_of(run, 1))
    with opened(fresh, new_lineage=True) as checkpointer:
        with pytest.raises(laststep.CorruptError):
            checkpointer.restore(1)
        assert fresh.is_wholly(7)
        checkpointer.save(2).wait()


def test_a_mismatch_lists_everything_touches_nothing_and_takes_no_older_one(
    saved: Callable[..., Path], opened: object, fresh: object
) -> None:
    saved(1, 2)
    fresh.become(7)
    fresh.blob["data"] = torch.full((9,), 7, dtype=torch.uint8)
    fresh.blob["new"] = torch.full((9,), 7)
    del fresh.blob["more"]
    extra = {"another": {"x": 1}}
    fresh.items = lambda base=fresh.items: {**base(), **extra}
    with opened(fresh, new_lineage=True) as checkpointer:
        with pytest.raises(laststep.MismatchError) as caught:
            checkpointer.restore()
        text = str(caught.value)
        for part in (
            "missing: another is not in the checkpoint",
            "missing: blob/new",
            "unexpected: blob/more",
            "mismatched: blob/data: stored uint8[3145728], live uint8[9]",
        ):
            assert part in text
        assert len(caught.value.problems) == 4
        assert fresh.model[0].weight.unique().tolist() == [7]
        assert fresh.plain["n"] == 7
        checkpointer.save(9).wait()  # nothing was touched, so it may be saved
        restored = checkpointer.restore(2, strict=False)
    assert set(restored.problems.missing) == {"another", "blob/new"}
    assert restored.problems.unexpected == ("blob/more",)
    assert len(restored.problems.mismatched) == 1
    assert fresh.plain["n"] == 2
    assert fresh.model[0].weight.unique().tolist() == [2]
    assert fresh.blob["data"].unique().tolist() == [7]
    assert fresh.blob["new"].unique().tolist() == [7]
    assert "more" not in fresh.blob


def test_an_item_of_the_checkpoint_that_is_not_live_is_unexpected(
    saved: Callable[..., Path], opened: object, fresh: object
) -> None:
    saved(1)
    some = {"model": fresh.model}
    fresh.items = lambda: some
    with opened(fresh) as checkpointer:
        with raises(laststep.MismatchError, "plain"):
            checkpointer.restore()
        checkpointer.restore(only=["model"])
    assert fresh.values()["model"] == {1}


def test_storage_that_cannot_be_read_raises_and_takes_no_older_checkpoint(
    saved: Callable[..., Path], opened: object, fresh: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = saved(1, 2)
    read_into = FileReader.read_into

    def fail(self: FileReader, offset: int, into: memoryview) -> int:
        if folder_of(run, 2).name in self._path and "blob" in self._path:
            raise laststep.StorageError("cannot read", found="the cable is out")
        return read_into(self, offset, into)

    monkeypatch.setattr(FileReader, "read_into", fail)
    with opened(fresh) as checkpointer, pytest.raises(laststep.StorageError, match="cable"):
        checkpointer.restore()


def test_a_real_read_error_is_a_storage_failure(
    saved: Callable[..., Path], opened: object, fresh: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(1, 2)

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with opened(fresh) as checkpointer:
        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", fail)
            patch.setattr(os, "pread", fail)
            with pytest.raises(laststep.StorageError, match="Input/output"):
                checkpointer.restore()
        assert checkpointer.restore().step == 2


def test_a_rollback_starts_a_new_lineage(
    saved: Callable[..., Path], opened: object, training: object, fresh: object
) -> None:
    run = saved(1, 2, 3)
    with opened(training) as checkpointer:
        checkpointer.restore(1)
        training.become(20)
        checkpointer.save(2).wait()  # the abandoned step 2 does not block it
        assert laststep.open(run).steps() == [1, 2]
        training.become(5)
        checkpointer.save(5).wait()
        checkpointer.restore(2)  # in mid-run
        assert training.is_wholly(20)
        training.become(6)
        checkpointer.save(6).wait()
    assert laststep.open(run).steps() == [1, 2, 6]
    with opened(fresh) as checkpointer:
        assert checkpointer.restore().step == 6
        assert checkpointer.restore(3).step == 3  # still there for who names it
        assert fresh.is_wholly(3)


def test_metrics_and_metadata_come_back_with_the_checkpoint(
    opened: object, training: object
) -> None:
    loss = torch.tensor(1.5, requires_grad=True) * 2
    metadata = {"git": "abc", "tags": ["a", (1, 2)], "n": None}
    with opened(training) as checkpointer:
        metrics = {"loss": loss, "accuracy": torch.tensor([0.25]), "n": 3, "kind": "x", "ok": True}
        checkpointer.save(0, metrics=metrics, metadata=metadata)
        metadata["tags"].append("later")
        with torch.no_grad():
            loss.fill_(9)
        restored = checkpointer.restore()
    expected = {"loss": 3.0, "accuracy": 0.25, "n": 3, "kind": "x", "ok": True}
    assert restored.metrics == expected
    assert restored.metadata == {"git": "abc", "tags": ["a", (1, 2)], "n": None}
    assert laststep.open(checkpointer.path).latest().metrics == expected
    manifest = folder_of(Path(checkpointer.path), 0) / "manifest.json"
    assert json.loads(manifest.read_bytes())["manifest"]["metrics"]["loss"] == 3.0


@pytest.mark.parametrize(
    "metrics",
    [{"loss": torch.ones(2)}, {"loss": None}, {"loss": [1]}, {3: 1.0}, {"z": torch.tensor(1j)}],
)
def test_a_metric_that_is_no_number_is_refused_at_once(
    metrics: dict[object, object], opened: object, training: object
) -> None:
    with opened(training) as checkpointer:
        with pytest.raises(laststep.UsageError):
            checkpointer.save(0, metrics=metrics)
        checkpointer.save(0, metrics={"loss": float("nan")}).wait()


def test_metadata_that_cannot_be_stored_is_refused_at_once(
    opened: object, training: object
) -> None:
    with opened(training) as checkpointer:
        with pytest.raises(laststep.UsageError):
            checkpointer.save(0, metadata={"f": object()})
        checkpointer.save(0).wait()


def test_slices_of_stored_tensors_are_read_alone(
    saved: Callable[..., Path], bytes_read: dict[str, int]
) -> None:
    run = saved(4)
    with_tensor = laststep.open(run).latest()
    tensor = with_tensor.tensor("blob/data")
    assert "blob.safetensors" not in bytes_read  # the index says what is in it
    assert tensor[10:20].tolist() == [4] * 10
    assert int(tensor[-1]) == 4
    assert 0 < bytes_read["blob.safetensors"] <= 2 << 20
    with_tensor.close()
    flip(folder_of(run, 4) / "blob.safetensors", data_at(folder_of(run, 4) / "blob.safetensors"))
    again = laststep.open(run).latest()
    with pytest.raises(laststep.CorruptError, match="block 0"):
        again.tensor("blob/data")[5]
    assert int(again.tensor("blob/data")[-1]) == 4
    again.close()


def test_the_way_of_a_module_to_another_kind_of_item_is_a_mismatch(tmp_path: Path) -> None:
    settings = {"flush": "thread", "host_memory_bytes": 64 << 20}
    with laststep.Checkpointer(
        tmp_path / "run", x={"w": torch.zeros(2)}, **as_keywords(settings)
    ) as one:
        one.save(0)
    with (
        laststep.Checkpointer(
            tmp_path / "run", x=nn.Linear(1, 1), **as_keywords(settings)
        ) as other,
        pytest.raises(laststep.MismatchError),
    ):
        other.restore()


def test_what_is_overwritten_goes_once_its_successor_is_committed(run_folder: Path) -> None:
    state = {"a": torch.zeros(3)}
    with laststep.Checkpointer(
        run_folder, items={"one": state}, options=laststep.Options(flush="thread")
    ) as checkpointer:
        checkpointer.save(7)
        checkpointer.save(8)
        state["a"].fill_(5)
        checkpointer.save(7, overwrite=True)
    catalog = laststep.open(run_folder)
    assert sorted(catalog.steps()) == [7, 8]
    assert catalog[7].tensor("one/a")[:].tolist() == [5, 5, 5]
    assert len(list(run_folder.glob("step-*"))) == 2


def test_a_checkpoint_that_retention_takes_meanwhile_is_no_damage(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    state = {"n": 0}
    with laststep.Checkpointer(tmp_path, state=state) as ckpt:
        for step in (1, 2):
            state["n"] = step
            ckpt.save(step)
        ckpt.wait()
        handle = ckpt.save(3)
        handle.wait()
        newest = handle.report.folder
        really_open = Choosing.open

        def open_late(choosing: Choosing, chosen: Chosen) -> Content:
            if chosen.folder == newest:
                shutil.rmtree(tmp_path / newest)
            return really_open(choosing, chosen)

        monkeypatch.setattr(Choosing, "open", open_late)
        restored = ckpt.restore()
    assert (restored.step, state["n"]) == (2, 2)
    (skipped,) = restored.skipped  # nobody takes an older one without a word
    assert (skipped.step, bool(skipped.reason)) == (3, True)
