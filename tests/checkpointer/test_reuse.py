"""What did not change is not written again: folders stay whole, and every step comes back."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

import laststep
import laststep.events
from laststep.catalog.attempt import read_decision, read_index
from laststep.constants import BLOCK_BYTES
from laststep.flush import base as flush_base
from laststep.format.manifest import Commit
from laststep.storage.directory import DirectoryStore

sys.path.insert(0, str(Path(__file__).parents[1] / "format"))

import second_reader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

BLOCK = BLOCK_BYTES // 4
"""Elements of a block."""
PACK = "blocks-r00000.pack"


class Training:
    """A state of a few blocks, and copies of what it was at each step."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self.model = {"w": torch.randn(12 * BLOCK + 5), "v": torch.randn(BLOCK // 2)}
        self.small = {"a": torch.randn(40_000), "n": 0}
        self.saved: dict[int, dict[str, torch.Tensor]] = {}
        self.ckpt = self.opened()

    def opened(self) -> laststep.Checkpointer:
        return laststep.Checkpointer(
            self.run,
            model=self.model,
            small=self.small,
            options=laststep.Options(flush="thread"),
            keep=None,
        )

    def change(self, *blocks: int) -> None:
        for block in blocks:
            self.model["w"][block * BLOCK + 2] += 1

    def save(self, step: int) -> int:
        """The bytes that it wrote."""
        self.small["a"] += 1
        self.report = self.ckpt.save(step).result()
        self.saved[step] = {"w": self.model["w"].clone(), "a": self.small["a"].clone()}
        assert self.report.written_bytes is not None
        return self.report.written_bytes

    def restarted(self) -> None:
        self.ckpt.close()
        self.ckpt = self.opened()
        self.ckpt.restore()

    def check(self) -> None:
        """Every step that is there is as it was saved."""
        for stored in laststep.open(self.run):
            wanted = self.saved[stored.step]
            assert torch.equal(stored.tensor("model/w")[:], wanted["w"])
            assert torch.equal(stored.tensor("small/a")[:], wanted["a"])
            assert not stored.verify().damage

    def folder(self, step: int) -> Path:
        [found] = self.run.glob(f"step-{step:08d}.*")
        return found


def data_files(folder: Path) -> list[Path]:
    """The data files and packs in a folder and those within it."""
    return [path for path in folder.rglob("*") if path.suffix in (".safetensors", ".pack")]


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Training]:
    made = Training(tmp_path / "run")
    made.ckpt.restore()
    yield made
    made.ckpt.close()


def test_a_file_of_which_nothing_changed_is_linked(training: Training) -> None:
    first = training.save(0)
    second = training.save(1)
    assert second < first / 20
    one, other = (training.folder(step) / "model.safetensors" for step in (0, 1))
    assert one.samefile(other)
    assert sorted(p.name for p in training.folder(1).iterdir()) == sorted(
        p.name for p in training.folder(0).iterdir()
    )
    training.check()


def test_only_the_blocks_that_changed_are_written(training: Training) -> None:
    training.save(0)
    training.change(2, 3, 9)
    written = training.save(1)
    assert 3 * BLOCK_BYTES < written < 3 * BLOCK_BYTES + 400_000
    assert (training.folder(1) / "model~1-1.safetensors").samefile(
        training.folder(0) / "model.safetensors"
    )
    assert not (training.folder(1) / "model.safetensors").exists()
    assert (training.folder(1) / PACK).stat().st_size == 3 * BLOCK_BYTES
    training.change(12)  # the short one, at the end
    training.save(2)
    training.save(3)
    training.check()
    newest = second_reader.read(training.run)
    assert newest["model"]["w"].data == training.model["w"].numpy().tobytes()
    assert newest["small"]["a"].data == training.small["a"].numpy().tobytes()


def test_a_file_that_is_changed_throughout_is_written_whole(training: Training) -> None:
    training.save(0)
    for step in (1, 2):
        training.model["w"] += 1
        training.save(step)
        assert not list(training.folder(step).glob("*~*"))
        assert not (training.folder(step) / PACK).exists()
        assert (training.folder(step) / "model.safetensors").stat().st_nlink == 1
    training.check()


@pytest.mark.parametrize(
    "changes",
    [
        [range(13)],
        [range(10)],
        [range(3, 6)],
        [range(5), range(4)],  # the first change leaves a file of which one block in five is used
        [range(5), range(5, 12), range(1, 11)],
        [(), range(13)],
    ],
    ids=["all", "most", "few", "sparse_file", "three_files", "all_after_none"],
)
def test_saves_of_nothing_new_write_little_after_a_change(
    training: Training, changes: list[Iterable[int]]
) -> None:
    training.save(0)
    for step, blocks in enumerate(changes, 1):
        training.change(*blocks)
        training.save(step)
    assert training.save(11) < 3 * BLOCK_BYTES  # what is left of a sparsely used file
    assert training.save(12) < BLOCK_BYTES / 2  # the small item, which did change
    training.check()


def test_a_file_that_changes_throughout_after_a_quiet_save_stands_alone(training: Training) -> None:
    training.save(0)
    training.save(1)
    training.model["w"] += 1
    training.save(2)
    assert not list(training.folder(2).glob("model~*"))
    training.check()


def test_a_folder_that_borrows_is_whole_when_it_is_copied_and_the_rest_is_gone(
    training: Training, tmp_path: Path
) -> None:
    training.save(0)
    training.change(4)
    training.save(1)
    shutil.copytree(training.folder(1), tmp_path / "copy")
    training.ckpt.close()
    shutil.rmtree(training.run)
    loaded = laststep.load(tmp_path / "copy")
    assert torch.equal(loaded["model"]["w"], training.saved[1]["w"])


def test_a_step_outlives_those_that_it_borrows_of(training: Training) -> None:
    for step in range(3):
        training.change(step)
        training.save(step)
    for step in (0, 1):
        shutil.rmtree(training.folder(step))
    training.check()
    assert [stored.step for stored in laststep.open(training.run)] == [2]
    training.change(8)
    training.save(3)  # what it borrows of is the newest, which is there
    training.check()


def test_where_the_last_checkpoint_is_gone_everything_is_written(training: Training) -> None:
    training.save(0)
    shutil.rmtree(training.folder(0))
    training.change(1)
    assert training.save(1) > 12 * BLOCK_BYTES
    training.check()


def test_a_new_start_goes_on_borrowing(training: Training) -> None:
    training.save(0)
    training.change(5)
    training.save(1)
    training.restarted()
    training.change(6)
    assert training.save(2) < 2 * BLOCK_BYTES
    training.restarted()
    assert training.save(3) < BLOCK_BYTES
    training.check()


def test_a_place_without_links_gets_everything(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    training.save(0)
    monkeypatch.setattr(DirectoryStore, "link", lambda *_: False)
    training.change(5)
    assert training.save(1) > 12 * BLOCK_BYTES
    training.check()


def test_no_file_is_shared_by_more_than_so_many(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flush_base, "MAX_SHARERS", 3)
    for step in range(9):
        training.change(step)
        training.save(step)
    links = [path.stat().st_nlink for path in data_files(training.run)]
    assert max(links) == 4  # its own, and three more
    training.check()


def test_a_checkpoint_draws_on_few_files(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flush_base, "MOST_FILES", 3)
    for step in range(10):
        training.change(step)
        training.save(step)
        assert len(list(training.folder(step).glob("*~*"))) <= 3
    training.check()


def test_a_file_of_which_little_is_needed_is_let_go_of(training: Training) -> None:
    training.save(0)
    training.change(*range(5))
    training.save(1)
    training.change(*range(4))  # of the five blocks of step 1 one is left
    training.save(2)
    training.change(11)
    training.save(3)
    assert not (training.folder(3) / "blocks-r00000~1-2.pack").exists()
    training.check()


def test_a_flipped_bit_in_a_shared_file_is_damage_of_each_that_needs_it(training: Training) -> None:
    training.save(0)
    training.change(3)
    training.save(1)
    training.change(3)
    training.save(2)
    at = training.folder(0) / "model.safetensors"
    header = int.from_bytes(at.read_bytes()[:8], "little") + 8
    with at.open("r+b") as file:
        file.seek(header + 3 * BLOCK_BYTES + 100)
        file.write(b"\xff\xfe\xfd")
        file.seek(header + 7 * BLOCK_BYTES + 100)
        file.write(b"\xff\xfe\xfd")
    catalog = laststep.open(training.run)
    damage = {step: catalog[step].verify().damage for step in (0, 1, 2)}
    assert [len(damage[step]) for step in (0, 1, 2)] == [2, 1, 1]  # block 3 is needed by one only
    assert damage[2][0].file == "model~1-1.safetensors"
    assert damage[2][0].touches == ("model/w",)
    with pytest.raises(laststep.CorruptError, match="model~1-1"):
        catalog[2].tensor("model/w")[:]
    rows = catalog[2].tensor("model/w")[: 2 * BLOCK]
    assert torch.equal(rows, training.saved[2]["w"][: 2 * BLOCK])


def test_what_is_written_is_said_and_what_is_shared(training: Training) -> None:
    training.save(0)
    training.change(1)
    training.save(1)
    commit = read_decision(DirectoryStore(training.run), training.folder(1).name)
    assert isinstance(commit, Commit)
    index = read_index(DirectoryStore(training.run), training.folder(1).name, commit, 0)
    shared = {file.name: file for file in index.files}["model~1-1.safetensors"]
    assert (shared.origin, shared.sharers) == (training.folder(0).name, 1)
    assert commit.written.shared_bytes == shared.size_bytes
    there = sum(path.stat().st_size for path in data_files(training.folder(1)))
    assert (commit.written.size_bytes, commit.written.files) == (there, len(index.files))
    assert (training.folder(1) / shared.name).stat().st_nlink == 2


def test_a_report_tells_the_state_from_what_is_written_and_what_is_shared(
    training: Training,
) -> None:
    told: list[laststep.events.Event] = []
    training.ckpt.subscribe(told.append)
    state_bytes = sum(t.nbytes for t in (*training.model.values(), training.small["a"]))
    for step, blocks in enumerate([(), (3,), ()]):
        training.change(*blocks)
        written = training.save(step)
        report, folder = training.report, training.folder(step)
        there = {path.name: path.stat() for path in data_files(folder)}
        assert state_bytes < report.size_bytes < state_bytes + 2000  # with plain values
        assert written + (report.shared_bytes or 0) == sum(s.st_size for s in there.values())
        assert written == sum(s.st_size for s in there.values() if s.st_nlink == 1)
    training.ckpt.close()  # all has been told
    durable = [event for event in told if isinstance(event, laststep.events.Durable)]
    assert [event.size_bytes for event in durable] == [report.size_bytes] * 3
    assert durable[-1].written_bytes == report.written_bytes
    assert durable[-1].shared_bytes == report.shared_bytes
    assert durable[0].shared_bytes == 0
    committed = [event for event in told if isinstance(event, laststep.events.Committed)]
    assert [event.size_bytes for event in committed] == [report.size_bytes] * 3


def test_what_a_restore_passed_over_is_not_borrowed_of(training: Training) -> None:
    training.save(1)
    training.change(3)
    training.save(2)
    path = training.folder(2) / PACK
    data = bytearray(path.read_bytes())
    data[-200_000] ^= 1
    path.write_bytes(data)
    model = training.model["w"].clone()
    restored = training.ckpt.restore()
    assert (restored.step, len(restored.skipped)) == (1, 1)
    training.model["w"].copy_(model)
    for step in (2, 3):
        training.save(step)
    assert [stored.step for stored in laststep.open(training.run)][-2:] == [2, 3]
    training.check()


def test_a_file_that_is_not_as_long_as_it_was_is_not_linked(training: Training) -> None:
    training.save(0)
    path = training.folder(0) / "model.safetensors"
    os.truncate(path, path.stat().st_size - 5)
    training.change(1)
    assert training.save(1) > 12 * BLOCK_BYTES
    assert not list(training.folder(1).glob("*~*"))
    shutil.rmtree(training.folder(0))
    training.check()


@pytest.mark.parametrize("failing", [1, 2])
def test_where_a_link_fails_none_is_left_and_everything_is_written(
    training: Training, failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    training.save(0)
    training.change(1)
    training.save(1)
    link, calls = DirectoryStore.link, []

    def fails(store: DirectoryStore, name: str, new: str) -> bool:
        if "~" in new:
            calls.append(new)
            if len(calls) == failing:
                raise laststep.StorageError("a link", found="ESTALE")
        return link(store, name, new)

    monkeypatch.setattr(DirectoryStore, "link", fails)
    training.change(2)
    training.save(2)
    monkeypatch.undo()
    assert len(calls) == failing
    assert not list(training.folder(2).glob("*~*"))
    training.check()


@pytest.mark.parametrize(
    ("blocks", "at_most"),
    [(lambda step: range(0, 12, 2), 1.6), (lambda step: range(step % 3, 12, 2), 2.3)],
    ids=["the same", "others"],
)
def test_the_files_of_a_checkpoint_hold_little_more_than_it(
    training: Training, blocks: Callable[[int], range], at_most: float
) -> None:
    for step in range(12):
        training.change(*blocks(step))
        training.save(step)
        files = [path for path in data_files(training.folder(step)) if path.name[:6] != "shared"]
        sizes = [path.stat().st_size for path in files]
        assert sum(sizes) < at_most * 13 * BLOCK_BYTES, step
    training.check()


def test_plain_values_that_grow_write_no_tensor_again(tmp_path: Path) -> None:
    kept, values = {"t": torch.arange(300_000)}, {"n": 0, "log": list[str]()}
    written = []
    with laststep.Checkpointer(
        tmp_path, kept=kept, values=values, options=laststep.Options(flush="thread")
    ) as ckpt:
        ckpt.restore()
        for step in range(3):
            values["log"] += [f"line {n} of step {step}" for n in range(1000)]
            written.append(ckpt.save(step).result().written_bytes)
    assert written[0] > kept["t"].nbytes
    assert written[1:] == [0, 0]
    assert laststep.load(tmp_path)["values"] == values


def test_plain_values_alone_need_no_data_file(tmp_path: Path) -> None:
    values = {"text": "x" * 100_000, "n": 0}
    with laststep.Checkpointer(
        tmp_path, values=values, options=laststep.Options(flush="thread")
    ) as ckpt:
        ckpt.restore()
        for step in range(3):
            values["n"] = step
            ckpt.save(step).wait()
    assert not data_files(tmp_path)
    assert [laststep.load(tmp_path, step=step)["values"]["n"] for step in range(3)] == [0, 1, 2]


def test_where_what_did_not_change_cannot_be_linked_by_its_name_it_is_borrowed(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    training.save(0)
    link = DirectoryStore.link

    def fails(store: DirectoryStore, name: str, new: str) -> bool:
        if new.endswith("/model.safetensors"):
            raise laststep.StorageError("a link", found="EIO")
        return link(store, name, new)

    monkeypatch.setattr(DirectoryStore, "link", fails)
    assert training.save(1) < BLOCK_BYTES
    assert (training.folder(1) / "model~1-1.safetensors").exists()
    training.check()
