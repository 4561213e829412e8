"""What commands say of a checkpoint that has only some items of its original."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from expect import names

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def weights(maker, laststep, tmp_path: Path) -> Path:
    """The model of two steps, and no optimizer."""
    for step in (1, 2):
        maker.save(step)
    ended = laststep("copy", maker.path, tmp_path / "weights", "--items", "model")
    assert ended.status == 0, ended.err
    return tmp_path / "weights"


def test_a_copy_of_some_items_says_what_it_would_bring(maker, laststep, tmp_path: Path) -> None:
    maker.save(1)
    said = laststep("copy", maker.path, tmp_path / "x", "--items", "model", "--dry-run", "--json")
    assert said.json()["size_bytes"] == 3_000_000


def test_a_copy_of_an_unknown_item_is_refused(maker, laststep, tmp_path: Path) -> None:
    maker.save(1)
    ended = laststep("copy", maker.path, tmp_path / "x", "--items", "modle")
    assert ended.status == 1
    assert "'modle'" in ended.err
    assert "model, optimizer" in ended.err
    assert not (tmp_path / "x").exists()


def test_show_says_of_which_run_it_is_and_what_was_left_out(maker, laststep, weights) -> None:
    said = laststep("show", weights).out
    assert names(said, maker.run.id, "optimizer")
    assert "optimizer/momentum" not in said
    document = laststep("show", weights, "--json").json()
    assert document["omitted_items"] == ["optimizer"]
    assert [item["name"] for item in document["items"]] == ["model"]
    assert [tensor["name"] for tensor in document["tensors"]] == ["model/weight"]
    assert maker.run.id not in laststep("show", maker.path).out


def test_ls_marks_what_has_only_some_items(maker, laststep, weights) -> None:
    assert laststep("ls", weights).out.count("only model") == 2
    assert "only" not in laststep("ls", maker.path).out
    listed = laststep("ls", weights, "--json").json()["checkpoints"]
    assert [one["omitted_items"] for one in listed] == [["optimizer"], ["optimizer"]]


def test_a_tier_without_some_items_has_them_at_risk(maker, laststep, weights) -> None:
    lines = laststep("ls", "--tiers", maker.path, weights).out.splitlines()
    assert lines[2].rstrip().endswith("optimizer")
    maker.save(5)
    lines = laststep("ls", "--tiers", maker.path, weights).out.splitlines()
    assert lines[1].rstrip().endswith("nothing")
    assert names(lines[2], "optimizer", "3 steps, 3 s")
    tiers = laststep("ls", "--tiers", maker.path, weights, "--json").json()["tiers"]
    assert [one["omitted_items"] for one in tiers] == [[], ["optimizer"]]


def test_verify_and_du_take_it_as_any_other(laststep, weights) -> None:
    assert laststep("verify", weights).status == 0
    assert laststep("du", weights).status == 0
