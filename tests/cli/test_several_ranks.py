"""A checkpoint that several ranks wrote, as a user sees it: whole tensors, and whose a state is."""

from __future__ import annotations

import logging
import shutil
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import laststep as library
from expect import names, raises, warned
from laststep.constants import BLOCK_BYTES
from stored import flip

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

HEADER_BYTES = 4096
WEIGHT_SHAPE = (750, 1000)
"""Of `model/weight`, as `maker` writes it."""


def rows(out: str, start: str) -> list[list[str]]:
    """The lines that begin so, in words."""
    return [line.split() for line in out.splitlines() if line.startswith(start)]


def tensor_rows(out: str, start: str) -> list[list[str]]:
    """The same, without plain values."""
    return [row for row in rows(out, start) if row[1] == "float32"]


# show


def test_show_lists_whole_tensors_and_in_how_many_parts_they_lie(maker, laststep: Callable) -> None:
    maker.save_by_ranks(1, ranks=3)
    out = laststep("show", maker.path).out
    assert "~6" not in out
    assert rows(out, "model/") == [
        ["model/weight", "float32", "750×1000", "3,000,000", "3"]  # noqa: RUF001 (of sizes)
    ]
    assert "3 ranks" in out
    [model], [place] = rows(out, "model  "), rows(out, "place  ")
    assert model == ["model", "module", "1", "3.00", "MB"]
    assert "3 ranks" in " ".join(place[5:])


def test_what_each_rank_has_for_itself_is_listed_by_rank(maker, laststep: Callable) -> None:
    maker.save_by_ranks(1, ranks=3)
    out = laststep("show", maker.path).out
    found = [(row[0], row[3], " ".join(row[5:])) for row in tensor_rows(out, "place/")]
    assert found == [
        ("place/seen", "4", "of rank 0"),
        ("place/seen", "8", "of rank 1"),
        ("place/seen", "12", "of rank 2"),
        *(("place/alike", "40", f"of rank {rank}") for rank in range(3)),
    ]


def test_the_document_of_show_has_whole_tensors_and_their_parts(maker, laststep: Callable) -> None:
    maker.save_by_ranks(1)
    document = laststep("show", maker.path, "--json").json()
    assert document["ranks"] == 2
    model, place = document["items"]
    assert (model["per_rank"], place["per_rank"]) == (False, True)
    assert [file["rank"] for file in document["files"]] == [0, 0, 1, 1]
    weight, *places = document["tensors"]
    assert weight["shape"] == list(WEIGHT_SHAPE)
    assert (weight["rank"], weight["size_bytes"], weight["missing_bytes"]) == (None, 3_000_000, 0)
    assert weight["parts"][1] == {
        "start": [375, 0],
        "shape": [375, 1000],
        "size_bytes": 1_500_000,
        "file": "model-r00001.safetensors",
    }
    assert [(one["name"], one["rank"], one["shape"]) for one in places] == [
        ("place/seen", 0, [1]),
        ("place/seen", 1, [2]),
        ("place/alike", 0, [10]),
        ("place/alike", 1, [10]),
    ]


def test_names_that_show_lists_are_names_that_a_checkpoint_takes(maker, laststep: Callable) -> None:
    maker.save_by_ranks(1, ranks=3)
    listed = laststep("show", maker.path, "--json").json()["tensors"]
    assert len(listed) == 7
    with library.open(maker.path).latest() as checkpoint:
        for one in listed:
            view = checkpoint if one["rank"] is None else checkpoint.of_rank(one["rank"])
            tensor = view.tensor(one["name"])
            assert list(tensor.shape) == one["shape"]
            assert list(tensor[:].shape) == one["shape"]
            view.close()
        weight = checkpoint.tensor("model/weight")[200:600]
    assert torch.equal(weight, torch.arange(750_000.0).view(WEIGHT_SHAPE)[200:600])


def test_a_tensor_of_which_an_index_is_lost_is_said_to_lack_bytes(
    maker, laststep: Callable
) -> None:
    folder = maker.save_by_ranks(1)
    (folder / "index-r00001").unlink()
    out = laststep("show", maker.path).out
    [row] = rows(out, "model/weight")
    assert row[2] == "750×1000"  # noqa: RUF001 (of sizes)
    assert names(" ".join(row[4:]), "1", "1,500,000 bytes")
    assert len(rows(out, "damaged, ")) == 1
    [weight] = laststep("show", maker.path, "--json").json()["tensors"][:1]
    assert weight["missing_bytes"] == 1_500_000
    (folder / "index-r00000").unlink()
    out = laststep("show", maker.path).out
    assert rows(out, "model/weight") == []
    assert len(rows(out, "damaged, ")) == 2


def test_a_tensor_of_which_a_file_is_lost_is_listed_whole(maker, laststep: Callable) -> None:
    folder = maker.save_by_ranks(1)
    (folder / "model-r00001.safetensors").unlink()
    out = laststep("show", maker.path).out
    [row] = rows(out, "model/weight")
    assert row[4:] == ["2"]
    [told] = rows(out, "incomplete")
    assert "model-r00001.safetensors" in told


def test_of_many_files_some_are_listed(maker, laststep: Callable) -> None:
    maker.save_by_ranks(1, ranks=15)
    out = laststep("show", maker.path).out
    files = [row[0] for row in rows(out, "model-r") + rows(out, "shared-r")]
    assert len(files) == 20
    assert names(out, "10 more files", "--all")
    every = laststep("show", maker.path, "--all").out
    assert len(rows(every, "model-r") + rows(every, "shared-r")) == 30
    assert "--all" not in every


def test_tensors_that_are_left_out_are_all_counted(maker, laststep: Callable) -> None:
    maker.save_by_ranks(1, ranks=25)
    out = laststep("show", maker.path).out
    assert len(tensor_rows(out, "model/") + tensor_rows(out, "place/")) == 20
    assert names(out, "5 more values", "--all")
    assert names(out, "31 more tensors", "--all")
    assert len(tensor_rows(laststep("show", maker.path, "--all").out, "place/")) == 50


# verify


def test_damage_names_the_tensor_and_which_part_of_it(maker, laststep: Callable) -> None:
    folder = maker.save_by_ranks(1)
    flip(folder / "model-r00001.safetensors", HEADER_BYTES + BLOCK_BYTES + 5)
    ended = laststep("verify", maker.path, "--json")
    assert ended.status == 3
    [damage] = ended.json()["checkpoints"][0]["damage"]
    assert (damage["file"], damage["what"]) == ("model-r00001.safetensors", "block 1")
    assert damage["touches"] == ["model/weight[375:750, 0:1000]"]
    out = laststep("verify", maker.path).out
    assert names(out, "model-r00001.safetensors: block 1", "model/weight[375:750, 0:1000]")
    assert "~6" not in out


def test_damage_to_what_each_rank_has_for_itself_names_the_rank(maker, laststep: Callable) -> None:
    folder = maker.save_by_ranks(1)
    flip(folder / "model-r00000.safetensors", HEADER_BYTES)
    flip(folder / "shared-r00001.safetensors", HEADER_BYTES)
    [report] = laststep("verify", maker.path, "--json").json()["checkpoints"]
    found = {(one["file"], one["what"]): one["touches"] for one in report["damage"]}
    assert found == {
        ("model-r00000.safetensors", "block 0"): ["model/weight[0:375, 0:1000]"],
        ("shared-r00001.safetensors", "block 0"): ["place/seen of rank 1", "place/alike of rank 1"],
    }


def test_what_a_short_file_has_lost_is_named_by_its_part(maker, laststep: Callable) -> None:
    folder = maker.save_by_ranks(1)
    with (folder / "model-r00000.safetensors").open("r+b") as file:
        file.truncate(HEADER_BYTES)
    (folder / "model-r00001.safetensors").unlink()
    out = laststep("verify", maker.path).out
    assert names(out, "model-r00000.safetensors: size", "4096", "model/weight[0:375, 0:1000]")
    assert names(out, "model-r00001.safetensors: missing file", "1504096")


# whose


def test_a_checkpoint_gives_rank_0s(maker) -> None:
    maker.save_by_ranks(1)
    with library.open(maker.path).latest() as checkpoint:
        assert (checkpoint.ranks, checkpoint.per_rank()) == (2, ["place"])
        assert checkpoint.tensor("place/seen")[:].tolist() == [0.0]


def test_a_checkpoint_in_the_view_of_a_rank_gives_that_ranks_own(maker) -> None:
    maker.save_by_ranks(1)
    checkpoint = library.open(maker.path).latest()
    for rank, seen in ((0, [0.0]), (1, [1.0, 2.0])):
        with checkpoint.of_rank(rank) as view:
            assert view.tensor("place/seen")[:].tolist() == seen
            assert view.tensor("model/weight").shape == WEIGHT_SHAPE


def test_a_rank_that_did_not_write_it_is_not_found(maker) -> None:
    maker.save(1)
    alone = library.open(maker.path).latest()
    assert (alone.ranks, alone.per_rank()) == (1, [])
    with raises(library.NotFoundError, "rank 1", expected="1 ranks"):
        alone.of_rank(1)
    maker.save_by_ranks(2)
    checkpoint = library.open(maker.path).latest()
    for look in (checkpoint.of_rank, lambda rank: library.load(maker.path, rank=rank)):
        with raises(library.NotFoundError, "rank 2", where="step-00000002"):
            look(2)
    for wrong in ("1", 1.0, True, None, -1):
        with raises(library.UsageError, found=repr(wrong)):
            checkpoint.of_rank(wrong)  # type: ignore[arg-type]


def test_the_name_of_a_part_is_no_name_of_a_tensor(maker) -> None:
    maker.save_by_ranks(1)
    with library.open(maker.path).latest() as checkpoint:
        for name in ("model/weight~6at375,0", "model/nothing"):
            with raises(library.NotFoundError, name):
                checkpoint.tensor(name)


def test_load_gives_rank_0s_with_a_warning_unless_a_rank_is_named(
    maker, caplog: pytest.LogCaptureFixture
) -> None:
    maker.save_by_ranks(1)
    state = library.load(maker.path)
    assert state["place"]["position"] == 10
    assert torch.equal(state["model"]["weight"], torch.arange(750_000.0).view(WEIGHT_SHAPE))
    [told] = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert names(told.getMessage(), "place", "2 ranks", "rank 0", "load(…, rank=…)")
    caplog.clear()
    for rank in (0, 1):
        state = library.load(maker.path, rank=rank)
        assert state["place"]["position"] == 10 + rank
        assert len(state["place"]["seen"]) == rank + 1
    assert caplog.messages == []


def test_load_into_takes_the_state_of_the_rank_that_is_named(
    maker, caplog: pytest.LogCaptureFixture
) -> None:
    maker.save_by_ranks(1)

    def live(count: int) -> dict[str, object]:
        return {"position": 0, "seen": torch.zeros(count), "alike": torch.zeros(10)}

    model = {"weight": torch.zeros(WEIGHT_SHAPE)}
    place = live(2)
    library.load(maker.path, {"model": model, "place": place}, rank=1)
    assert (place["position"], place["seen"].tolist()) == (11, [1.0, 2.0])
    # One that is marked is not refused for there being other ranks now: it was asked for.
    place = live(2)
    library.load(maker.path, {"model": model, "place": library.PerRank(place)}, rank=1)
    assert (place["position"], place["seen"].tolist()) == (11, [1.0, 2.0])
    assert caplog.messages == []
    place = live(1)
    library.load(maker.path, {"model": model, "place": place})
    assert place["position"] == 10
    assert warned(caplog, "place", "rank 0")
    with raises(library.MismatchError, remedy="rank=…"):
        library.load(maker.path, {"model": model, "place": library.PerRank(live(1))})


def test_load_into_makes_one_state_of_all_as_a_restore_does(
    maker, caplog: pytest.LogCaptureFixture
) -> None:
    maker.save_by_ranks(1, ranks=3)

    def joined(states: list[dict[str, object]], rank: int, ranks: int) -> dict[str, object]:
        assert (rank, ranks) == (0, 1)
        return {"position": sum(state["position"] for state in states)}  # type: ignore[misc]

    place = {"position": 0}
    item = library.PerRank(place, when_ranks_change=joined)
    library.load(maker.path, {"model": {"weight": torch.zeros(WEIGHT_SHAPE)}, "place": item})
    assert place == {"position": 10 + 11 + 12}
    assert caplog.messages == []


# export


@pytest.mark.parametrize("rank", [None, 0, 1])
def test_export_writes_the_state_of_one_rank_and_says_whose(
    rank: int | None, maker, laststep: Callable, tmp_path: Path
) -> None:
    maker.save_by_ranks(1)
    chosen = () if rank is None else ("--rank", rank)
    words = ("export", maker.path, tmp_path / "hf", "--format", "hf", "--item", "place", *chosen)
    ended = laststep(*words)
    assert ended.status == 0
    seen = load_file(tmp_path / "hf" / "model.safetensors")["seen"]
    assert seen.tolist() == ([1.0, 2.0] if rank == 1 else [0.0])
    last = ended.out.splitlines()[-1]
    assert names(last, "place", "2 ranks", f"rank {rank or 0}")
    assert ("--rank N" in last) == (rank is None)
    shutil.rmtree(tmp_path / "hf")
    document = laststep(*words, "--json").json()
    assert (document["per_rank"], document["rank"]) == (["place"], rank or 0)


# Of torch.distributed.checkpoint itself, in a process that is no rank.
@pytest.mark.filterwarnings("ignore::UserWarning:torch", "ignore::FutureWarning:torch")
def test_export_to_dcp_has_whole_tensors_and_one_ranks_own(
    maker, laststep: Callable, tmp_path: Path
) -> None:
    maker.save_by_ranks(1)
    words = ("export", maker.path, tmp_path / "dcp", "--format", "dcp", "--rank", 1)
    assert names(laststep(*words).out.splitlines()[-1], "place", "2 ranks", "rank 1")
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "all.pt")
    state = torch.load(tmp_path / "all.pt")
    assert (state["place"]["position"], state["place"]["seen"].tolist()) == (11, [1.0, 2.0])
    assert torch.equal(state["model"]["weight"], torch.arange(750_000.0).view(WEIGHT_SHAPE))


def test_export_of_what_all_ranks_share_speaks_of_no_rank(
    maker, laststep: Callable, tmp_path: Path
) -> None:
    maker.save_by_ranks(1)
    ended = laststep("export", maker.path, tmp_path / "hf", "--format", "hf")
    assert ended.status == 0
    assert "place" not in ended.out
    weight = load_file(tmp_path / "hf" / "model.safetensors")["weight"]
    assert torch.equal(weight, torch.arange(750_000.0).view(WEIGHT_SHAPE))
    document = laststep("export", maker.path, tmp_path / "2", "--format", "hf", "--json").json()
    assert (document["per_rank"], document["rank"]) == ([], None)


def test_export_of_a_rank_that_is_not_there_writes_nothing(
    maker, laststep: Callable, tmp_path: Path
) -> None:
    maker.save_by_ranks(1)
    for format_ in ("hf", "dcp"):
        words = ("export", maker.path, tmp_path / "out", "--format", format_)
        ended = laststep(*words, "--rank", 2)
        assert ended.status == 1
        assert "rank 2" in ended.err
        assert laststep(*words, "--rank", -1).status == 2
    assert not (tmp_path / "out").exists()


# runs without a checkpoint


def test_a_run_without_a_checkpoint_is_told_plainly(
    maker, laststep: Callable, tmp_path: Path
) -> None:
    commands = (
        ("show", maker.path),
        ("show", maker.path, "--step", 3),
        ("pin", maker.path, 3),
        ("verify", maker.path, "--step", 3),
        ("export", maker.path, tmp_path / "out", "--format", "hf"),
    )
    for words in commands:
        ended = laststep(*words)
        assert ended.status == 1
        assert names(ended.err, "laststep: ", maker.path)
    maker.save(1, commit=False)
    for words in commands:
        assert names(laststep(*words).err, "laststep: ", maker.path, "1 save", "`laststep ls`")
    pruned = laststep("prune", maker.path, "--last", 1)
    assert (pruned.status, names(pruned.out, maker.path)) == (0, True)


def test_a_start_from_nothing_leaves_nothing_behind_before_its_first_commit(
    maker, laststep: Callable
) -> None:
    maker.save(100)
    maker.save(200)
    maker.start()  # anew, from no checkpoint
    assert laststep("show", maker.path).out.split()[:2] == ["step", "200"]
    assert library.open(maker.path).latest().step == 200
