"""`laststep.open` on runs that lack something: each error says what there is, and what to do."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

import laststep
from expect import raises
from laststep import oneoff
from laststep.constants import BLOCK_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

OTHERWISE = r"`laststep verify`.*restore\(\)"


@pytest.fixture
def run(run_folder: Path) -> Path:
    """Steps 0, 10, …, 90 of a tensor that ends within its second block."""
    state = {"t": torch.zeros(BLOCK_BYTES + 4000, dtype=torch.uint8)}
    with laststep.Checkpointer(
        run_folder, state=state, options=laststep.Options(flush="thread", progress=False)
    ) as ckpt:
        for step in range(0, 100, 10):
            ckpt.save(step)
    return run_folder


def files(run: Path, step: int) -> Path:
    [folder] = run.glob(f"step-{step:08d}.*")
    return folder


def test_a_step_that_is_not_there_is_answered_with_its_neighbours(run: Path) -> None:
    catalog = laststep.open(run)
    with pytest.raises(laststep.NotFoundError) as raised:
        catalog[55]
    assert "step 55" in str(raised.value)
    assert "30, 40, 50, 60, 70, 80" in raised.value.found
    assert "catalog.steps()" in raised.value.remedy
    assert 55 not in catalog


def test_a_file_in_the_place_of_a_run_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no run")
    with raises(laststep.LaststepError, where=tmp_path / "file"):
        laststep.open(tmp_path / "file")


def test_a_missing_file_and_a_short_one_are_told_with_a_remedy(run: Path) -> None:
    (files(run, 30) / "state.safetensors").unlink()
    short = files(run, 90) / "state.safetensors"
    size = short.stat().st_size
    with short.open("r+b") as file:
        file.truncate(size - 1)
    catalog = laststep.open(run)
    with pytest.raises(laststep.CorruptError, match=f"state.safetensors.*{OTHERWISE}"):
        catalog[30].tensor("state/t")[:]
    told = rf"\b{size}\b.*\b{size - 1}\b.*{OTHERWISE}"
    with pytest.raises(laststep.CorruptError, match=told):
        catalog.latest().tensor("state/t")[:]  # nobody asked for an older one
    with raises(laststep.CorruptError, size - 1, remedy="load(…, step=N)") as raised:
        laststep.load(run)
    assert "restore()" not in raised.value.remedy
    with raises(laststep.CorruptError, size - 1, remedy="another copy") as raised:
        laststep.load(files(run, 90))
    assert "restore()" not in raised.value.remedy


def test_a_manifest_that_cannot_be_read_is_told_with_a_remedy(run: Path) -> None:
    (files(run, 30) / "manifest.json").write_bytes(b"{")
    with pytest.raises(laststep.CorruptError, match=f"manifest.*{OTHERWISE}"):
        laststep.open(run)[30]
    files(run, 40).rename(run / "step-00000041.1-5")
    with pytest.raises(laststep.CorruptError, match=f"step-00000041.*{OTHERWISE}"):
        laststep.open(run)[41]


def test_the_bytes_that_are_named_lie_within_the_file(run: Path) -> None:
    path = files(run, 50) / "state.safetensors"
    size = path.stat().st_size
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    place = rf"block 1 \(bytes {size - 4000}-{size}\)"
    with laststep.open(run)[50] as checkpoint:
        tensor = checkpoint.tensor("state/t")
        with pytest.raises(laststep.CorruptError, match=f"state/t.*{place}.*{OTHERWISE}"):
            tensor[:]
        assert tensor[0] == 0
    state = {"t": torch.ones(BLOCK_BYTES + 4000, dtype=torch.uint8)}
    with (
        laststep.Checkpointer(
            run, state=state, options=laststep.Options(flush="thread", progress=False)
        ) as ckpt,
        pytest.raises(laststep.CorruptError, match=place),
    ):
        ckpt.restore(50)


def test_a_file_that_is_cut_while_it_is_open_is_short(run: Path) -> None:
    path = files(run, 50) / "state.safetensors"
    size = path.stat().st_size
    with laststep.open(run)[50] as checkpoint:
        tensor = checkpoint.tensor("state/t")
        assert tensor[0] == 0
        with path.open("r+b") as file:
            file.truncate(size - 1000)
        told = rf"\b{size}\b.*\b{size - 1000}\b.*{OTHERWISE}"
        with pytest.raises(laststep.CorruptError, match=told):
            tensor[:]


def test_a_checkpoint_that_was_deleted_since_it_was_listed_is_not_found(run: Path) -> None:
    catalog = laststep.open(run)
    checkpoint = catalog[30]
    folder = files(run, 30)
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    with raises(laststep.NotFoundError, where="step-00000030", missing="manifest.json"):
        checkpoint.tensors()
    with pytest.raises(laststep.NotFoundError):
        checkpoint.verify()


def test_an_older_checkpoint_is_never_given_for_a_newest_whose_manifest_is_damaged(
    run: Path,
) -> None:
    manifest = files(run, 90) / "manifest.json"
    data = bytearray(manifest.read_bytes())
    data[len(data) // 2] ^= 1
    manifest.write_bytes(data)
    with raises(laststep.CorruptError, "step 90", remedy="load(…, step=N)"):
        laststep.load(run)
    catalog = laststep.open(run)
    with pytest.raises(laststep.CorruptError, match=r"step 90.*restore\(\)"):
        catalog.latest()
    assert catalog.steps()[-1] == 80
    assert laststep.load(run, step=80)["state"]["t"].sum() == 0
    with raises(laststep.NotFoundError, "step 81", where=run):
        laststep.load(run, step=81)


def test_what_is_no_run_is_told_with_what_to_call_instead(run: Path, tmp_path: Path) -> None:
    laststep.save({"w": torch.ones(2)}, tmp_path / "one")
    with raises(laststep.NotFoundError, where=tmp_path / "one"):
        laststep.open(tmp_path / "one")
    with raises(laststep.UsageError, where=tmp_path / "one", remedy="`step`"):
        laststep.load(tmp_path / "one", step=0)
    [file] = (tmp_path / "one").glob("*.safetensors")
    with raises(laststep.LaststepError, where=file):
        laststep.load(file)


def test_arguments_that_cannot_work_are_usage(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog = laststep.open(run)
    for wrong in ("a", 1.5, None, True):
        with raises(laststep.UsageError, found=repr(wrong), remedy="catalog.steps()"):
            catalog[wrong]  # type: ignore[index]
    for wrong in (3, None, "", b"x", "ftp://bucket/run"):
        with raises(laststep.UsageError, found=repr(wrong)):
            laststep.open(wrong)  # type: ignore[arg-type]
        with raises(laststep.UsageError, found=repr(wrong)):
            laststep.load(wrong)  # type: ignore[arg-type]
    with pytest.raises(laststep.UsageError):
        laststep.save("x", {"w": 1})  # type: ignore[arg-type]
    for wrong in ("nonsense", {"cuda:0": "cpu"}, lambda storage, place: storage):
        with raises(laststep.UsageError, found=repr(wrong), remedy='map_location="cpu"'):
            laststep.load(run, map_location=wrong)  # type: ignore[arg-type]
    if not torch.cuda.is_available():
        with raises(laststep.UsageError, found="'cuda'", remedy="map_location="):
            laststep.load(run, map_location="cuda")
    with catalog[50] as checkpoint:
        tensor = checkpoint.tensor("state/t")
        for index in ("a", 1.5, (0, "a")):
            with raises(laststep.UsageError, "state/t", remedy="t[:]"):
                tensor[index]
    monkeypatch.setenv("HOME", str(tmp_path))
    laststep.save({"w": 1}, "~/primary")
    assert (tmp_path / "primary").is_dir()
    assert laststep.load("~/primary") == {"w": 1}


def test_all_of_a_tensor_is_read_by_the_same_words_whatever_its_shape(run_folder: Path) -> None:
    state = {
        "one": torch.tensor(2.5),
        "none": torch.empty(0, 3),
        "some": torch.arange(6).view(2, 3),
    }
    with laststep.Checkpointer(
        run_folder, state=state, options=laststep.Options(flush="thread")
    ) as ckpt:
        ckpt.save(0).wait()
    checkpoint = laststep.open(run_folder).latest()
    for name, tensor in state.items():
        stored = checkpoint.tensor(f"state/{name}")
        assert torch.equal(stored[:], tensor)
        assert torch.equal(stored[...], tensor)


@pytest.mark.parametrize(
    ("name", "index"),
    [
        ("one", 0),
        ("one", slice(0, 1)),
        ("some", 2),
        ("some", (0, 3)),
        ("some", (0, 0, 0)),
        ("some", torch.tensor([5])),
        ("some", Ellipsis.__class__),
    ],
    ids=repr,
)
def test_an_index_that_a_tensor_does_not_have_is_told_and_ends_a_loop(
    name: str, index: object, run_folder: Path
) -> None:
    state = {"one": torch.tensor(2.5), "some": torch.arange(6).view(2, 3)}
    with laststep.Checkpointer(
        run_folder, state=state, options=laststep.Options(flush="thread")
    ) as ckpt:
        ckpt.save(0).wait()
    stored = laststep.open(run_folder).latest().tensor(f"state/{name}")
    with pytest.raises(laststep.UsageError, match=f"state/{name}") as caught:
        stored[index]
    assert isinstance(caught.value, IndexError)
    assert len(list(stored)) == len(state[name]) if stored.shape else True


def test_a_pipe_in_the_place_of_a_file_is_told_and_not_waited_for(run: Path) -> None:
    for name in ("state.safetensors", "manifest.json"):
        path = files(run, 90) / name
        path.unlink()
        os.mkfifo(path)
        with raises(laststep.StorageError, where=name, found="ENXIO"):
            laststep.load(run, step=90)


@pytest.mark.parametrize("kind", [np.uint64, np.uint8, np.int32])
def test_a_step_may_be_any_kind_of_whole_number(run: Path, kind: Callable[[int], object]) -> None:
    catalog = laststep.open(run)
    step = catalog.steps()[0]
    assert catalog[kind(step)].step == step
    assert kind(step) in catalog
    with raises(laststep.NotFoundError, "step 77", where=run):
        catalog[kind(77)]  # without a warning: warnings are errors here
    assert kind(77) not in catalog


@pytest.mark.parametrize("where", ["cpu", torch.device("cpu"), "meta"])
def test_tensors_are_loaded_to_the_device_of_map_location(
    where: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    load_item = oneoff.load_item

    def see(item: object, device: str) -> object:
        asked.append(device)
        return load_item(item, "cpu")

    monkeypatch.setattr(oneoff, "load_item", see)
    laststep.save({"w": torch.ones(3)}, tmp_path / "saved")
    loaded = laststep.load(tmp_path / "saved", map_location=where)
    assert asked == [str(where)]
    assert torch.equal(loaded["w"], torch.ones(3))
