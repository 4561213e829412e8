"""`ls`, `show`, `du`, `prune` and `verify` of checkpoints that share files: what each says is what
the filesystem has."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest
import torch

from expect import names
from laststep import Checkpointer, Options
from laststep.constants import BLOCK_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

BLOCKS = 8


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Step 0 is whole, step 1 has another block 2, step 2 has nothing new, step 3 is new but for a
    quarter, step 4 throughout, which is written whole."""
    model = {"w": torch.randn(BLOCKS * BLOCK_BYTES // 4)}
    with Checkpointer(tmp_path / "run", model=model, options=Options(flush="thread")) as ckpt:
        ckpt.restore()
        for step in range(5):
            if step == 1:
                model["w"][2 * BLOCK_BYTES // 4] += 1
            if step == 3:
                model["w"][: BLOCKS * 3 // 4 * BLOCK_BYTES // 4] += 1
            if step == 4:
                model["w"] += 1
            ckpt.save(step).wait()
    return tmp_path / "run"


def folder(run: Path, step: int) -> Path:
    [found] = run.glob(f"step-{step:08d}.*")
    return found


def used_bytes(*folders: Path) -> int:
    """What these take, as a filesystem counts: a file that has several names once."""
    files = {
        (found.stat().st_dev, found.stat().st_ino): found.stat().st_size
        for one in folders
        for found in one.rglob("*")
        if found.is_file()
    }
    return sum(files.values())


def data_files(checkpoint: Path) -> list[Path]:
    return [path for path in checkpoint.iterdir() if path.suffix in (".safetensors", ".pack")]


def folders(run: Path) -> list[Path]:
    return sorted(run.glob("step-*"))


def test_ls_says_what_was_new_where_anything_is_shared(run: Path, laststep: Callable) -> None:
    header, *rows = laststep("ls", run).out.splitlines()
    assert header.split()[:4] == ["step", "when", "size", "new"]
    listed = laststep("ls", run, "--json").json()["checkpoints"]
    shared = [item["shared_bytes"] for item in listed]
    assert (shared[0], shared[4]) == (0, 0)
    whole = (folder(run, 0) / "model.safetensors").stat().st_size
    assert shared[1] == shared[3] == whole
    assert shared[2] == whole + (folder(run, 1) / "blocks-r00000.pack").stat().st_size
    for row, item in zip(rows, listed, strict=True):
        new = item["size_bytes"] - item["shared_bytes"]
        assert (f"{new / 1e6:.2f} MB" if new else "0 bytes") in row


def test_ls_has_no_such_column_where_nothing_is_shared(maker, laststep: Callable) -> None:
    maker.save(1)
    assert "new" not in laststep("ls", maker.path).out.split()


def test_show_says_with_how_many_a_checkpoint_shares_and_whose_files_it_has(
    run: Path, laststep: Callable
) -> None:
    linked = folder(run, 1) / "model~1-1.safetensors"
    document = laststep("show", run, "--step", 1, "--json").json()
    assert document["shared_bytes"] == linked.stat().st_size
    assert document["shared_with"] == [folder(run, step).name for step in (0, 2, 3)]
    files = {file["name"]: file for file in document["files"]}
    assert set(files) == {linked.name, "blocks-r00000.pack"}
    assert files[linked.name]["origin"] == folder(run, 0).name
    assert files[linked.name]["sharers"] == 1
    own = files["blocks-r00000.pack"]
    assert (own["origin"], own["sharers"]) == (None, 0)
    assert document["tensors"][0]["missing_bytes"] == 0

    text = laststep("show", run, "--step", 1).out
    both = sum(linked.with_name(name).stat().st_size for name in files)
    size = f"{both / 1e6:.2f} MB"
    assert names(text, size, "3 other checkpoints")
    assert names(text, linked.name, folder(run, 0).name)


def test_a_copy_says_of_its_files_that_they_were_written_for_others(
    run: Path, laststep: Callable, tmp_path: Path
) -> None:
    shutil.copytree(folder(run, 1), tmp_path / "copy")
    document = laststep("show", tmp_path / "copy", "--json").json()
    assert document["shared_with"] == []


def test_show_tells_the_damage_of_a_shared_file_where_it_lies(
    run: Path, laststep: Callable
) -> None:
    with (folder(run, 1) / "model~1-1.safetensors").open("r+b") as file:
        file.truncate(100)
    told = laststep("show", run, "--step", 1, "--json").json()["incomplete"]
    assert "model~1-1.safetensors" in told
    text = laststep("show", run, "--step", 1).out
    assert names(text, folder(run, 0).name, "incomplete", told)


def test_du_says_what_the_filesystem_has(run: Path, laststep: Callable) -> None:
    document = laststep("du", run, "--json").json()
    assert document.keys() == {"run", "checkpoints", "apart_bytes", "stored_bytes"}
    assert document["stored_bytes"] == used_bytes(*folders(run))
    assert document["apart_bytes"] == sum(map(used_bytes, folders(run)))
    for item in document["checkpoints"]:
        one = run / item["folder"]
        others = [other for other in folders(run) if other != one]
        assert item["size_bytes"] == used_bytes(one)
        assert item["alone_bytes"] == used_bytes(one, *others) - used_bytes(*others)
        assert item["error"] is None
    shared_with = [item["shared_with"] for item in document["checkpoints"]]
    names = [one.name for one in folders(run)]
    for at, others in enumerate(shared_with[:4]):
        assert others == [name for name in names[:4] if name != names[at]]
    assert shared_with[4] == []


def test_du_shows_a_line_for_each_and_the_totals(run: Path, laststep: Callable) -> None:
    ended = laststep("du", run)
    header, *rows, total = ended.out.splitlines()
    columns = ("step", "size", "only here", "folder", "shared with")
    assert header.split() == " ".join(columns).split()
    assert [row.split()[0] for row in rows] == ["0", "1", "2", "3", "4"]
    assert rows[0].count("step-") == 4
    assert rows[4].count("step-") == 1
    stored, apart = used_bytes(*folders(run)), sum(map(used_bytes, folders(run)))
    assert names(total, "5 checkpoints", f"{apart / 1e6:.2f} MB", f"{stored / 1e6:.2f} MB")


def test_du_of_a_run_that_shares_nothing_claims_no_savings(maker, laststep: Callable) -> None:
    assert str(maker.path) in laststep("du", maker.path).out
    maker.save(1)
    *_, total = laststep("du", maker.path).out.splitlines()
    assert names(total, "1 checkpoint", "3.01 MB")


def test_du_counts_what_cannot_be_read_as_its_own(run: Path, laststep: Callable) -> None:
    (folder(run, 4) / "manifest.json").write_bytes(b"{}")
    item = laststep("du", run, "--json").json()["checkpoints"][4]
    assert "manifest.json" in item["error"]
    assert item["alone_bytes"] == item["size_bytes"] == used_bytes(folder(run, 4))
    assert laststep("du", run).status == 0


@pytest.mark.parametrize("last", [1, 2, 3, 4])
def test_prune_frees_what_it_said_it_would(run: Path, laststep: Callable, last: int) -> None:
    before = used_bytes(*folders(run))
    said = laststep("prune", run, "--last", last, "--dry-run", "--json").json()
    assert used_bytes(*folders(run)) == before
    for item in said["checkpoints"]:
        others = [other for other in folders(run) if other.name != item["folder"]]
        assert item["size_bytes"] == before - used_bytes(*others)
    done = laststep("prune", run, "--last", last, "--yes", "--json").json()
    assert len(folders(run)) == last
    assert done["freed_bytes"] == said["freed_bytes"] == before - used_bytes(*folders(run))


def test_prune_tells_a_person_what_is_freed_not_what_lies_in_the_folders(
    run: Path, laststep: Callable
) -> None:
    before = used_bytes(*folders(run))
    ended = laststep("prune", run, "--last", 3, "--yes")
    freed = before - used_bytes(*folders(run))
    assert freed < 1e6
    assert names(ended.out.splitlines()[-1], "2 checkpoints", f"{freed / 1e3:.2f} kB")


def test_verify_counts_the_files_and_blocks_that_it_reads(run: Path, laststep: Callable) -> None:
    checked = laststep("verify", run, "--json").json()["checkpoints"]
    for step, item in enumerate(checked):
        # With them the manifest and the index.
        there = len(data_files(folder(run, step))) + 2
        assert (item["files"], item["blocks"]) == (there, BLOCKS)
    # Of shared files it reads the blocks that are needed.
    unread = [0, 1, 1, BLOCKS * 3 // 4, 0]
    for step, blocks in enumerate(unread):
        assert checked[step]["bytes"] == used_bytes(folder(run, step)) - blocks * BLOCK_BYTES


def test_a_pack_of_an_earlier_checkpoint_is_no_damage_where_the_manifest_is_lost(
    tmp_path: Path, laststep: Callable
) -> None:
    model = {"w": torch.randn(2 * BLOCKS * BLOCK_BYTES // 4)}
    with Checkpointer(tmp_path / "run", model=model, options=Options(flush="thread")) as ckpt:
        ckpt.restore()
        # Step 3 needs nothing of the pack of step 1, and all that step 2 wrote.
        for step, blocks in enumerate([(), (1, 2), (1, 3), (2,)]):
            for block in blocks:
                model["w"][block * BLOCK_BYTES // 4] += 1
            ckpt.save(step).wait()
    last = folder(tmp_path / "run", 3)
    linked = sorted(path.name for path in last.glob("*~*"))
    assert linked == ["blocks-r00000~1-3.pack", "model~1-1.safetensors"]
    (last / "manifest.json").write_bytes(b"{}")
    [item] = laststep("verify", last, "--json").json()["checkpoints"]
    assert [damage["file"] for damage in item["damage"]] == ["manifest.json"]
