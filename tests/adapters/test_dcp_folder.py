"""Folders of torch.distributed.checkpoint come out as its own converter gives them."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import subprocess
import sys
import warnings
from collections import OrderedDict
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict

import laststep
from expect import raises
from laststep import cli
from laststep.adapters.importing.dcp_folder import read_folder
from laststep.errors import CorruptError, NotFoundError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch.distributed.checkpoint.metadata import Metadata

TWO_RANKS = """
import sys
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.device_mesh import init_device_mesh

rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{folder}.rendezvous", rank=rank, world_size=2)
torch.manual_seed(0)
# Rows that do not divide by two, and one that leaves the second rank with nothing.
model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))
mesh = init_device_mesh("cpu", (2,))
for layer in (model[0], model[2], model):
    fully_shard(layer, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for _ in range(2):
    model(torch.randn(3, 7)).sum().backward()
    optimizer.step()
model_state, optimizer_state = get_state_dict(model, optimizer)
state = {"model": model_state, "optimizer": optimizer_state, "term": 3, f"rank{rank}": [rank]}
dcp.save(state, checkpoint_id=folder)
dist.barrier()
dist.destroy_process_group()
"""


def training_state() -> dict[str, object]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 5)).sum().backward()
    optimizer.step()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


def odd_state() -> dict[str, object]:
    return {
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 4),
        "half": torch.randn(3).to(torch.bfloat16),
        "eighth": torch.randn(3).to(torch.float8_e4m3fn),
        "complex": torch.randn(2, 2, dtype=torch.complex64),
        "turned": torch.arange(6).view(2, 3).T,
        "slice": torch.arange(100)[10:20:3],
        "tuple": (torch.ones(2), 1),
        "list": [1, {"a": {}, "b": torch.ones(1)}, [torch.zeros(2), None]],
        "numbers": {1: "one", 2: b"two"},
        "none": None,
        "ordered": OrderedDict(x=1.5),
        "with.dot": {"and/slash": True},
    }


def save(state: dict[str, object], folder: Path, planner: object = None, **options: object) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, storage_writer=FileSystemWriter(folder, **options), planner=planner)
    return folder


def metadata_of(folder: Path) -> Metadata:
    return pickle.loads((folder / ".metadata").read_bytes())  # noqa: S301


def by_torch(folder: Path) -> dict[str, object]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_to_torch_save(folder, folder.parent / "whole.pt")
    return torch.load(folder.parent / "whole.pt", weights_only=False)


def assert_same(found: object, expected: object, at: str = "") -> None:
    assert type(found) is type(expected), at
    if isinstance(expected, torch.Tensor):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), at
        # As bytes: not every dtype can be compared, and -0.0 is not 0.0.
        assert bytes_of(found) == bytes_of(expected), at
    elif isinstance(expected, dict):
        assert list(found) == list(expected), at
        for key in expected:
            assert_same(found[key], expected[key], f"{at}.{key}")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), at
        for index, value in enumerate(expected):
            assert_same(found[index], value, f"{at}.{index}")
    else:
        assert found == expected, at


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def run_import(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "argv", ["laststep", "import", *map(str, arguments)])
    status: object = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            cli.main()
        except SystemExit as end:
            status = end.code or 0
    return int(str(status)), out.getvalue(), err.getvalue()


def test_a_training_state_is_loaded_as_torch_converts_it(
    tmp_path: Path, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(training_state(), tmp_path / "dcp")
    status, out, err = run_import(monkeypatch, folder, run_folder, "--step", 70, "--json")
    assert (status, err) == (0, "")
    assert json.loads(out) == {
        "schema": 1,
        "source": str(folder),
        "run": str(run_folder),
        "step": 70,
        "items": ["model", "optimizer"],
    }
    assert_same(laststep.load(run_folder), by_torch(folder))
    assert laststep.open(run_folder)[70].metadata == {"imported_from": "dcp"}


def test_a_live_model_takes_what_was_imported(
    tmp_path: Path, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = training_state()
    run_import(monkeypatch, save(state, tmp_path / "dcp"), run_folder)
    fresh = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.BatchNorm1d(3))
    with laststep.Checkpointer(
        run_folder, model=fresh, options=laststep.Options(flush="thread", progress=False)
    ) as ckpt:
        assert ckpt.restore(only=["model"]).step == 0
    assert_same(dict(fresh.state_dict()), dict(state["model"]))


@pytest.mark.parametrize(
    "options",
    [{}, {"single_file_per_rank": False}, {"thread_count": 3}],
    ids=["one file", "a file for each", "three threads"],
)
def test_all_that_a_state_may_hold_comes_out_as_torch_gives_it(
    options: dict[str, object], tmp_path: Path
) -> None:
    folder = save(odd_state(), tmp_path / "dcp", **options)
    assert_same(read_folder(folder), by_torch(folder))


def test_what_is_left_over_becomes_the_item_rest(
    tmp_path: Path, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save({**training_state(), "term": 3}, tmp_path / "dcp")
    status, out, _ = run_import(monkeypatch, tmp_path / "dcp", run_folder)
    assert status == 0
    assert "step 0: model, optimizer, rest" in out
    assert laststep.load(run_folder)["rest"] == {"term": 3}


def test_a_flat_state_becomes_the_model(
    tmp_path: Path, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"layer.weight": torch.randn(3, 2), "layer.bias": torch.randn(3)}
    save(state, tmp_path / "dcp")
    assert run_import(monkeypatch, tmp_path / "dcp", run_folder)[0] == 0
    assert_same(laststep.load(run_folder), {"model": state})


def test_a_state_that_was_saved_without_flattening(tmp_path: Path) -> None:
    state = {"model": {"w": torch.ones(2)}, "t": torch.zeros(3)}
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    folder = save(state, tmp_path / "dcp", planner=planner)
    assert_same(read_folder(folder), state)


def test_what_two_ranks_saved_with_fsdp_is_put_together(
    tmp_path: Path, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "dcp"
    ranks = [
        subprocess.Popen(
            [os.environ["WARM_PYTHON"], "-c", TWO_RANKS, str(rank), str(folder)],
            stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    for rank in ranks:
        _, err = rank.communicate()
        assert rank.returncode == 0, err.decode()
    assert {path.name for path in folder.iterdir()} == {".metadata", "__0_0.distcp", "__1_0.distcp"}
    expected = by_torch(folder)
    assert expected["model"]["0.weight"].shape == (5, 7)
    assert (expected["rank0"], expected["rank1"]) == ([0], [1])
    assert_same(read_folder(folder), expected)
    assert run_import(monkeypatch, folder, run_folder)[0] == 0
    loaded = laststep.load(run_folder)
    rest = loaded.pop("rest")
    assert_same(loaded, {name: expected[name] for name in ("model", "optimizer")})
    assert rest == {name: expected[name] for name in rest}
    (folder / "__1_0.distcp").unlink()
    with raises(CorruptError, where="__1_0.distcp"):
        read_folder(folder)


def test_too_little_memory_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    folder = save({"a": torch.ones(4, 6)}, tmp_path / "dcp")
    monkeypatch.setattr("laststep.adapters.importing.dcp_folder.allocate", fail)
    status, _, err = run_import(monkeypatch, folder, tmp_path / "run")
    assert status == 1
    assert "can't allocate memory" in err


def test_streams_that_were_transformed_are_refused(tmp_path: Path) -> None:
    class Upside(ZStandard):
        """A transform that needs no library."""

        def __init__(self) -> None:
            pass

        @staticmethod
        def registry_name() -> str:
            return "upside"

        def get_descriptor(self) -> str:
            return "upside/1"

        def transform_to(self, output: object) -> object:
            return output

    folder = save({"a": torch.ones(2)}, tmp_path / "dcp", _extensions=[Upside()])
    with raises(UsageError, "'a'", "upside/1"):
        read_folder(folder)


class Evil:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (print, ("this must never be printed",))


def test_a_value_that_is_code_is_named_and_never_run(
    tmp_path: Path, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save({"model": {"w": torch.ones(2)}, "args": Evil()}, tmp_path / "dcp")
    status, out, err = run_import(monkeypatch, folder, run_folder)
    assert status == 2
    assert "this must never be printed" not in out
    assert "'args'" in err
    assert " print, " in err
    assert "dcp_to_torch_save" in err
    assert not run_folder.exists()


def test_a_folder_without_metadata_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save({"a": torch.ones(2)}, tmp_path / "dcp")
    (folder / ".metadata").rename(folder / ".metadata.tmp")
    status, _, err = run_import(monkeypatch, folder, tmp_path / "run")
    assert status == 1
    assert "a .metadata" in err
    with pytest.raises(NotFoundError):
        read_folder(folder)


def replaced(payload: object) -> bytes:
    out = io.BytesIO()
    torch.save(payload, out)
    return out.getvalue()


@pytest.mark.parametrize(
    ("payload", "found"),
    [
        (lambda: replaced(torch.ones(3, 3)), "[3, 3]"),
        (lambda: replaced(torch.ones(64, 64).half()), "torch.float16"),
        (lambda: replaced([1, 2]), "list"),
        (lambda: replaced(torch.ones(64, 64).to_sparse()), "torch.sparse_coo"),
        (lambda: replaced(torch.empty(64, 64, device="meta")), "meta"),
        (lambda: replaced(Evil()), "print"),
        (lambda: b"junk" * 100, "damaged"),
        (lambda: b"", "damaged"),
        (lambda: replaced(torch.ones(64, 64))[:900], "damaged"),
        (lambda: b"PK\x03\x04" + b"\0" * 500, "damaged"),
        (lambda: b"\xff" * 7 + b"\x7f{" + b" " * 90, ""),
    ],
)
def test_payloads_that_are_not_the_chunk_are_refused(
    payload: Callable[[], bytes], found: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save({"a": torch.ones(64, 64)}, tmp_path / "dcp")
    (file,) = folder.glob("*.distcp")
    metadata = metadata_of(folder)
    (info,) = metadata.storage_data.values()
    info.offset, info.length = file.stat().st_size, len(payload())
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    file.write_bytes(file.read_bytes() + payload())
    with raises((CorruptError, UsageError), found):
        read_folder(folder)
    assert "printed" not in capsys.readouterr().out
