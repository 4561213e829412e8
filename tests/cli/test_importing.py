"""`import`: files of torch.save and safetensors become checkpoints, and nothing in them is run."""

from __future__ import annotations

import os
import pickle
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed.checkpoint
from safetensors.torch import save_file

import laststep as library
from expect import names
from laststep.cli.foreign import items_of

if TYPE_CHECKING:
    from collections.abc import Callable


def test_a_training_state_becomes_one_item_for_each_part(
    laststep: Callable, tmp_path: Path, run_folder: Path
) -> None:
    model = torch.nn.Linear(5, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(5)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "term": 7}
    torch.save(state, tmp_path / "old.pt")
    ended = laststep("import", tmp_path / "old.pt", run_folder, "--step", 700)
    assert (ended.status, ended.err) == (0, "")
    assert "step 700: model, optimizer, rest" in ended.out
    loaded = library.load(run_folder)
    assert loaded["rest"] == {"term": 7}
    assert torch.equal(loaded["model"]["weight"], model.weight)
    fresh = torch.nn.Linear(5, 3)
    with library.Checkpointer(
        run_folder, model=fresh, options=library.Options(flush="thread")
    ) as checkpointer:
        assert checkpointer.restore(only=["model"]).next_step == 701
    assert torch.equal(fresh.weight, model.weight)


def test_a_data_file_of_a_checkpoint_becomes_the_model(
    laststep: Callable, run_folder: Path
) -> None:
    golden = Path(__file__).parents[1] / "golden" / "version-1" / "one-rank"
    path = next(golden.glob("step-00000001.*/model.safetensors"))
    assert laststep("import", path, run_folder).status == 0
    wanted, found = library.load(golden, step=1)["model"], library.load(run_folder)["model"]
    assert torch.equal(found["norm.running_mean"], wanted["norm.running_mean"])


def test_commands_for_runs_name_the_command_that_reads_a_folder_of_dcp(
    laststep: Callable, tmp_path: Path
) -> None:
    with warnings.catch_warnings():  # of the single process
        warnings.simplefilter("ignore")
        torch.distributed.checkpoint.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "dcp")
    for command in ("ls", "show"):
        ended = laststep(command, tmp_path / "dcp")
        assert ended.status != 0
        assert names(ended.err, "DCP", f"laststep import {tmp_path / 'dcp'} RUN")


def test_a_pack_is_no_file_of_tensors(laststep: Callable, run_folder: Path) -> None:
    golden = Path(__file__).parents[1] / "golden" / "version-1" / "coded"
    ended = laststep("import", next(golden.glob("step-*/blocks-r00000.pack")), run_folder)
    assert ended.status != 0
    assert "blocks-r00000.pack" in ended.err
    assert not list(run_folder.glob("step-*"))


def test_a_safetensors_file_becomes_the_model(
    laststep: Callable, tmp_path: Path, run_folder: Path
) -> None:
    tensors = {
        "a.weight": torch.randn(4, 6),
        "b": torch.arange(5),
        "c": torch.randn(3).to(torch.bfloat16),
        "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(3.5),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    document = laststep("import", tmp_path / "model.safetensors", run_folder, "--json").json()
    assert document["items"] == ["model"]
    assert document["step"] == 0
    loaded = library.load(run_folder)["model"]
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(loaded[name], tensor), name
        assert loaded[name].dtype == tensor.dtype
        assert loaded[name].shape == tensor.shape
    shown = laststep("show", run_folder, "--json").json()
    assert shown["metadata"] == {"imported_from": "model.safetensors"}


def test_a_second_import_continues_the_run(
    laststep: Callable, tmp_path: Path, run_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "a.pt")
    assert laststep("import", tmp_path / "a.pt", run_folder, "--step", 1).status == 0
    second = laststep("import", tmp_path / "a.pt", run_folder, "--step", 2)
    assert second.status == 0
    assert second.err + caplog.text == ""
    listed = laststep("ls", run_folder, "--json").json()["checkpoints"]
    assert [(entry["step"], entry["lineage"]) for entry in listed] == [
        (1, "current"),
        (2, "current"),
    ]
    again = laststep("import", tmp_path / "a.pt", run_folder, "--step", 2)
    assert again.status == 1
    assert again.err.count("step 2") == 1
    assert again.err.endswith("--step\n")
    assert "step 2" not in caplog.text


def test_a_run_that_is_being_written_is_only_taken_over_by_force(
    laststep: Callable, tmp_path: Path, run_folder: Path
) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "a.pt")
    state = {"w": torch.zeros(3)}
    with library.Checkpointer(
        run_folder, state=state, options=library.Options(flush="thread", progress=False)
    ) as ckpt:
        ckpt.save(1).wait()
        refused = laststep("import", tmp_path / "a.pt", run_folder, "--step", 2)
        assert refused.status == 1
        assert f"process {os.getpid()} on " in refused.err
        assert "--force" in refused.err
        assert library.open(run_folder).steps() == [1]
        forced = laststep("import", tmp_path / "a.pt", run_folder, "--step", 2, "--force")
        assert forced.status == 0
    assert library.open(run_folder).steps() == [1, 2]


class Evil:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (print, ("this must never be printed",))


def test_code_in_a_file_is_refused_and_never_run(
    laststep: Callable, tmp_path: Path, run_folder: Path
) -> None:
    torch.save({"model": Evil()}, tmp_path / "evil.pt")
    (tmp_path / "evil.pkl").write_bytes(pickle.dumps(Evil(), protocol=2))
    for name in ("evil.pt", "evil.pkl"):
        ended = laststep("import", tmp_path / name, run_folder)
        assert ended.status in (1, 2)
        assert "this must never be printed" not in ended.out
        assert ended.err.startswith("laststep: ")
    assert not run_folder.exists()


def test_a_pickled_module_is_refused_by_the_name_of_its_class(
    laststep: Callable, tmp_path: Path, run_folder: Path
) -> None:
    torch.save(torch.nn.Linear(2, 2), tmp_path / "module.pt")
    ended = laststep("import", tmp_path / "module.pt", run_folder)
    assert ended.status == 2
    assert "torch.nn.modules.linear.Linear" in ended.err
    assert "\x1b" not in ended.err
    assert "weights_only" not in ended.err
    assert ended.err.count("\n") == 1


@pytest.mark.parametrize("old", [False, True])
def test_a_file_of_another_pickle_protocol_and_one_that_is_cut_are_refused(
    laststep: Callable, tmp_path: Path, run_folder: Path, *, old: bool
) -> None:
    path = tmp_path / "new.pt"
    state = {"t": torch.ones(2), "module": torch.nn.Linear(1, 1)}
    torch.save(state, path, pickle_protocol=4, _use_new_zipfile_serialization=not old)
    ended = laststep("import", path, run_folder)
    assert ended.status == 1
    assert "protocol 2" in ended.err
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert laststep("import", path, run_folder).status == 1


def test_a_folder_as_source_is_told(laststep: Callable, tmp_path: Path, run_folder: Path) -> None:
    ended = laststep("import", tmp_path, run_folder)
    assert ended.status == 1
    assert str(tmp_path) in ended.err


@pytest.mark.parametrize(
    "data",
    [b"", b"PK\x03\x04 and then nothing", b"x" * 100, b"junk junk\n" * 9, b"hello world, a text"],
)
def test_a_file_that_is_neither_is_one_message(
    data: bytes, laststep: Callable, tmp_path: Path, run_folder: Path
) -> None:
    (tmp_path / "odd.pt").write_bytes(data)
    ended = laststep("import", tmp_path / "odd.pt", run_folder)
    assert ended.status == 1
    assert ended.err.startswith("laststep: ")
    assert str(tmp_path / "odd.pt") in ended.err
    assert ended.err.count("\n") == 1
    assert laststep("import", tmp_path / "absent.pt", run_folder).status == 1


def test_which_parts_become_items() -> None:
    plain = {"layer.weight": 1, "layer.bias": 2}
    assert items_of(plain) == {"model": plain}
    assert items_of({"model": plain}) == {"model": plain}
    assert items_of({"model": plain, "rest": {}, "lr": 1}) == {
        "model": plain,
        "rest": {},
        "rest_": {"lr": 1},
    }
    assert items_of({"a/b": plain}) == {"model": {"a/b": plain}}
    assert items_of({"shared": plain}) == {"model": {"shared": plain}}  # no name for an item
    assert items_of([1, 2]) == {"model": {"value": [1, 2]}}
