"""`ls` and `show`: what there is, for people and for programs."""

from __future__ import annotations

import math
import shutil
from typing import TYPE_CHECKING

from expect import names
from laststep.constants import MANIFEST_NAME
from laststep.format.manifest import seal
from stored import flip

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import pytest


def test_ls_lists_in_the_order_of_commits_with_lineage_and_pins(maker, laststep: Callable) -> None:
    maker.save(100, {"loss": 2.5})
    maker.save(200, {"loss": 2.25})
    maker.save(300)
    maker.start((1, 2))
    pinned = maker.save(250)
    maker.run.pin(pinned.name)
    ended = laststep("ls", maker.path)
    lines = ended.out.splitlines()
    assert (ended.status, ended.err) == (0, "")
    assert [line.split()[0] for line in lines] == ["step", "100", "200", "300", "250"]
    assert " ok " in lines[1]
    assert "loss=2.25" in lines[2]
    assert "abandoned" in lines[3]
    assert "pinned" in lines[4]


def test_ls_shows_one_metric_and_all_on_request(maker, laststep: Callable) -> None:
    maker.save(1, {"_internal": 1.0, "grad_norm": 0.5, "loss": 2.5, "epoch": 1.0})
    lines = laststep("ls", maker.path).out.splitlines()
    assert lines[0].split() == ["step", "when", "size", "status", "folder", "metrics"]
    assert "loss=2.5" in lines[1]
    assert "epoch" not in lines[1]
    whole = laststep("ls", maker.path, "--metrics").out
    assert names(whole, "grad_norm=0.5", "loss=2.5", "epoch=1")
    assert "_internal" not in whole


def test_the_run_that_an_adapter_keeps_in_an_output_folder_is_found(
    maker, laststep: Callable, tmp_path: Path
) -> None:
    maker.save(1)
    output = tmp_path / "out"
    output.mkdir()
    maker.path.rename(output / "_laststep")
    assert "step-00000001.1-1" in laststep("ls", output).out
    assert laststep("verify", output).out.splitlines()[-1] == "1 checkpoint ok"


def test_a_path_that_is_too_long_is_an_error_of_one_line(laststep: Callable) -> None:
    ended = laststep("ls", "x" * 5000)
    assert (ended.status, ended.err.count("\n")) == (1, 1)


def test_ls_of_the_folder_above_a_run_names_the_run(maker, laststep: Callable) -> None:
    maker.save(1)
    above, _, _ = str(maker.path).rpartition("/")
    ended = laststep("ls", above)
    assert ended.status != 0
    assert str(maker.path) in "".join(ended.err.split())


def test_ls_tells_of_saves_that_are_not_committed(maker, laststep: Callable) -> None:
    term = maker.start()
    lock = maker.run.lock_term(term)
    maker.save(7, commit=False)
    assert "step 7 " in laststep("ls", maker.path).out
    lock.close()
    assert names(laststep("ls", maker.path).out, "step 7", "step-00000007")


def test_a_checkpoint_that_lost_its_manifest_is_not_said_to_be_unfinished_or_deleted(
    maker, laststep: Callable
) -> None:
    folders = [maker.save(step) for step in (1, 2, 3)]
    (folders[0] / MANIFEST_NAME).unlink()
    (folders[2] / MANIFEST_NAME).unlink()
    listed, verified = laststep("ls", maker.path).out, laststep("verify", maker.path).out
    for step, folder in ((1, folders[0]), (3, folders[2])):
        assert names(listed, f"step {step} ", folder.name, "3.0")
        assert names(verified, f"{folder.name}: ", "3.0")


def test_the_document_of_ls_has_these_fields(maker, laststep: Callable) -> None:
    maker.save(100, {"loss": math.nan, "accuracy": 0.5})
    maker.save(200, commit=False)
    document = laststep("ls", maker.path, "--json").json()
    assert document.keys() == {"run", "checkpoints", "attempts"}
    [checkpoint], [attempt] = document["checkpoints"], document["attempts"]
    assert checkpoint["created_s"] == 1_700_000_100.0
    assert checkpoint["size_bytes"] > 3_000_000
    assert {k: v for k, v in checkpoint.items() if k not in ("created_s", "size_bytes")} == {
        "step": 100,
        "folder": "step-00000100.1-1",
        "shared_bytes": 0,
        "lossy": [],
        "omitted_items": [],
        "metrics": {"loss": "nan", "accuracy": 0.5},
        "lineage": "current",
        "superseded_by": None,
        "pinned": False,
        "term": 1,
        "attempt": 1,
        "error": None,
        "incomplete": None,
    }
    assert attempt.keys() == {"step", "folder", "size_bytes", "alive", "is_copy"}
    assert attempt["alive"] is False


def test_ls_shows_a_checkpoint_whose_manifest_is_damaged(maker, laststep: Callable) -> None:
    flip(maker.save(100) / MANIFEST_NAME, 200)
    ended = laststep("ls", maker.path)
    assert ended.status == 0
    header, row, *_ = ended.out.splitlines()
    assert row[header.index("status") :].startswith("damaged")
    [checkpoint] = laststep("ls", maker.path, "--json").json()["checkpoints"]
    assert "manifest.json" in checkpoint["error"]


def test_ls_does_not_call_a_checkpoint_of_a_later_format_damaged(maker, laststep: Callable) -> None:
    content = b'{"format": 9, "decision": "commit", "laststep": "7.1.0"}'
    (maker.save(100) / MANIFEST_NAME).write_bytes(seal(content))
    ended = laststep("ls", maker.path)
    assert ended.status == 0
    assert "damaged" not in ended.out
    assert names(ended.out, "step 100", "manifest.json", "9")


def test_a_folder_without_a_run_is_one_message_and_status_1(tmp_path, laststep: Callable) -> None:
    for command in (["ls"], ["show"], ["du"], ["verify"], ["prune", "--last", "1"], ["pin", "1"]):
        ended = laststep(command[0], tmp_path / "absent", *command[1:])
        assert (ended.status, ended.out) == (1, "")
        assert names(ended.err, "laststep: ", tmp_path / "absent")
        assert ended.err.count("\n") == 1
    assert laststep("ls", tmp_path).status == 1


def test_a_path_that_is_a_file_is_called_a_file(tmp_path, laststep: Callable) -> None:
    file = tmp_path / "file"
    file.write_text("no run")
    for command in (["ls"], ["show"], ["du"], ["verify"], ["prune", "--last", "1"], ["pin", "1"]):
        ended = laststep(command[0], file, *command[1:])
        assert (ended.status, ended.out) == (1, "")
        assert names(ended.err, "laststep: ", file)
        assert ended.err.count("\n") == 1


def test_ls_and_show_agree_on_the_size(maker, laststep: Callable) -> None:
    folder = maker.save(100)
    (folder / "notes.txt").write_text("put there by somebody")
    [listed] = laststep("ls", maker.path, "--json").json()["checkpoints"]
    shown = laststep("show", maker.path, "--json").json()
    data_files = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    assert listed["size_bytes"] == shown["size_bytes"] == data_files
    assert "3.01 MB" in laststep("ls", maker.path).out
    assert names(laststep("show", maker.path).out, "3.01 MB", "2 data files")


def test_ls_and_show_say_what_is_incomplete(maker, laststep: Callable) -> None:
    maker.save(100)
    with (maker.save(200, {"loss": 1.5}) / "model.safetensors").open("r+b") as file:
        file.truncate(5000)
    (maker.save(300) / "shared.safetensors").unlink()
    ended = laststep("ls", maker.path)
    assert ended.status == 0
    table = ended.out.splitlines()
    assert "incomplete" not in table[1]
    assert "loss=1.5" in table[2]
    assert "incomplete" in table[2]
    (maker.save(400) / "index-r00000").unlink()
    short, fewer = ("model.safetensors", "5000", "3004096"), ("shared.safetensors",)
    assert any(names(line, "step 200", *short) for line in table)
    assert any(names(line, "step 300", *fewer) for line in table)
    found = laststep("ls", maker.path, "--json").json()["checkpoints"]
    assert found[0]["incomplete"] is None
    assert [
        names(found[n]["incomplete"], *said)
        for n, said in ((1, short), (2, fewer), (3, ("index-r00000",)))
    ] == [True] * 3
    shown = laststep("show", maker.path, "--step", 200)
    assert names(shown.out, "incomplete", *short)
    assert "model/weight" in shown.out  # the index says what was there
    missing = laststep("show", maker.path, "--step", 300)
    assert names(missing.out, "incomplete", *fewer)


def test_ls_of_a_checkpoint_names_its_run(maker, laststep: Callable) -> None:
    ended = laststep("ls", maker.save(100))
    assert ended.status == 1
    assert f" {maker.path}" in ended.err


def test_a_mistyped_command_is_status_2(laststep: Callable) -> None:
    assert laststep("lss").status == 2
    assert laststep("ls").status == 2
    assert laststep("ls", "--colour").status == 2


def test_show_takes_the_newest_unless_told_otherwise(maker, laststep: Callable) -> None:
    maker.save(100, {"loss": 2.5})
    maker.save(200)
    newest = laststep("show", maker.path)
    assert "200 (term 1, attempt 2)" in newest.out
    older = laststep("show", maker.path, "--step", 100)
    assert "100 (term 1, attempt 1)" in older.out
    for text in ("loss=2.5", "made for a test", "model/weight", "750000"):
        assert text in older.out
    missing = laststep("show", maker.path, "--step", 150)
    assert missing.status == 1
    assert names(missing.err, "step 150", "100, 200")
    for step in range(300, 2000, 100):
        maker.save(step)
    missing = laststep("show", maker.path, "--step", 650)
    assert "400, 500, 600, 700, 800, 900" in missing.err


def test_show_opens_a_copied_folder_on_its_own(maker, laststep: Callable, tmp_path) -> None:
    folder = maker.save(100)
    copy = shutil.copytree(folder, tmp_path / "elsewhere")
    inside, outside = laststep("show", folder, "--json"), laststep("show", copy, "--json")
    assert inside.json()["lineage"] == "current"
    assert outside.json()["lineage"] is None
    assert inside.json()["tensors"] == outside.json()["tensors"]
    assert laststep("show", copy, "--step", 100).status == 2


def test_the_document_of_show_has_these_fields(maker, laststep: Callable) -> None:
    maker.save(100, {"loss": 2.5})
    document = laststep("show", maker.path, "--json").json()
    assert document.keys() == {
        "step",
        "term",
        "attempt",
        "folder",
        "run",
        "ranks",
        "created_s",
        "size_bytes",
        "format",
        "lossy",
        "omitted_items",
        "shared_bytes",
        "shared_with",
        "laststep",
        "metrics",
        "metadata",
        "lineage",
        "pinned",
        "incomplete",
        "continues",
        "items",
        "files",
        "tensors",
        "values",
        "plain_values",
    }
    assert document["metadata"] == {"note": "made for a test"}
    assert document["ranks"] == 1
    assert document["items"][0] == {
        "name": "model",
        "kind": "module",
        "per_rank": False,
        "tensors": 1,
        "size_bytes": 3_000_000,
    }
    assert document["files"][0].keys() == {"name", "rank", "size_bytes", "origin", "sharers"}
    assert document["tensors"] == [
        {
            "name": "model/weight",
            "rank": None,
            "dtype": "float32",
            "shape": [750_000],
            "size_bytes": 3_000_000,
            "missing_bytes": 0,
            "lossy": None,
            "parts": [
                {
                    "start": [0],
                    "shape": [750_000],
                    "size_bytes": 3_000_000,
                    "file": "model.safetensors",
                }
            ],
        },
        {
            "name": "optimizer/momentum",
            "rank": None,
            "dtype": "float32",
            "shape": [1000],
            "size_bytes": 4000,
            "missing_bytes": 0,
            "lossy": None,
            "parts": [
                {"start": [0], "shape": [1000], "size_bytes": 4000, "file": "shared.safetensors"}
            ],
        },
    ]
    assert [(entry["name"], entry["rank"]) for entry in document["values"]] == [
        ("model", 0),
        ("optimizer", 0),
    ]


def test_show_lists_plain_values_and_escapes_them(maker, laststep: Callable) -> None:
    hostile = {"text": "a\x1b[2Jb", "big": 1 << 60_000, "many": [7] * 1000, "lone": "\udc80"}
    maker.save_values(3, {"lr": 0.1, "nested": {"k": [1, {"z": None}]}, "bad\x1bkey": 1, **hostile})
    ended = laststep("show", maker.path)
    assert ended.status == 0
    assert "\x1b" not in ended.out
    lines = [line.split(maxsplit=1) for line in ended.out.splitlines() if line.startswith("state/")]
    shown = {name: text for name, text in lines if "." not in name}
    assert shown["state/lr"] == "0.1"
    assert shown["state/nested"] == "{'k': [1, {'z': None}]}"
    assert shown["state/text"] == r"'a\x1b[2Jb'"
    assert shown["state/many"].endswith("…")
    assert max(map(len, ended.out.splitlines())) < 100
    document = laststep("show", maker.path, "--json").json()
    values = {entry["name"]: entry["value"] for entry in document["plain_values"]}
    assert values["state/many"] == [7] * 1000
    assert int(values["state/big"], 16) == 1 << 60_000
    assert values["state/bad\x1bkey"] == 1
    assert values["state/lone"] == "\udc80"


def test_show_lists_per_rank_values_of_each_rank(maker, laststep: Callable) -> None:
    maker.save_by_ranks(100)
    document = laststep("show", maker.path, "--json").json()
    values = {(v["name"], v["rank"]): v["value"] for v in document["plain_values"]}
    assert values == {("place/position", 0): 10, ("place/position", 1): 11}


def test_a_missing_step_of_many_is_answered_with_the_nearest_and_their_number(
    maker, laststep: Callable
) -> None:
    for step in range(0, 40, 4):
        maker.save(step)
    ended = laststep("show", maker.path, "--step", 30)
    assert ended.status == 1
    assert names(ended.err, "10 steps", "nearest", "20, 24, 28, 32, 36")


def test_show_says_which_index_is_damaged_and_shows_the_rest(maker, laststep: Callable) -> None:
    flip(maker.save_by_ranks(100) / "index-r00001", 50)
    ended = laststep("show", maker.path)
    assert ended.status == 0
    assert "index-r00001" in ended.out
    assert "model-r00000.safetensors" in ended.out
    assert "model-r00001.safetensors" not in ended.out
    [weight] = laststep("show", maker.path, "--json").json()["tensors"][:1]
    assert (weight["name"], weight["missing_bytes"]) == ("model/weight", 1_500_000)


def test_names_in_brackets_are_not_taken_for_markup(maker, laststep: Callable) -> None:
    maker.save(100, {"[red]loss[/red]": 1.5})
    assert "[red]loss[/red]=1.5" in laststep("ls", maker.path).out


def test_ls_of_a_one_off_folder_guesses_no_run(laststep: Callable, maker, tmp_path: Path) -> None:
    copy = tmp_path / "one-off"
    shutil.copytree(maker.save(100), copy)
    ended = laststep("ls", copy)
    assert ended.status == 1
    assert names(ended.err, "no run", copy)


def test_a_home_folder_is_found_and_a_url_refused(
    laststep: Callable, maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    maker.save(100)
    monkeypatch.setenv("HOME", str(maker.path.parent))
    for command in ("ls", "show", "verify"):
        assert laststep(command, f"~/{maker.path.name}").status == 0
        refused = laststep(command, "ftp://bucket/run")
        assert refused.status == 2
        assert "ftp://" in refused.err
    assert "nope" in laststep("ls", "nope").err
