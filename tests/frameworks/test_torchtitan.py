"""laststep.torchtitan with the real torchtitan, on CPU ranks."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

import laststep
from expect import names
from frameworks.trained import PATIENCE_S, SCRIPTS, Script, environment

pytest.importorskip("torchtitan", reason="needs laststep[torchtitan]")


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_killed_run_goes_on_with_the_same_losses(tmp_path, ranks):
    whole = Script("torchtitan_train.py", tmp_path / "whole", "steps=10", ranks=ranks).to_its_end()
    script = Script("torchtitan_train.py", tmp_path / "killed", "steps=10", ranks=ranks)
    before = script.killed_in_save(6)
    after = script.to_its_end()
    assert whole.keys() == set(range(1, 11))
    assert 4 < min(after) <= 7
    assert max(after) == 10
    assert {**before, **after} == whole


def test_another_cut_of_the_model_takes_up_the_same_state(tmp_path):
    script = Script("torchtitan_train.py", tmp_path, "interval=1")

    def start(name, *how, ranks):
        script.to_its_end(f"state={str(tmp_path / name)!r}", *how, ranks=ranks)

    def noted(name):
        found = {}
        for part in tmp_path.glob(f"{name}-[0-9]"):
            lines = [line.split(" ", 1) for line in part.read_text().splitlines()]
            assert all(found.get(name, digest) == digest for name, digest in lines)
            found |= dict(lines)
        return found

    start("shards", "steps=1", "tp=2", ranks=4)
    saved = noted("shards-end")
    loaders = {"loader.0": saved["loader.0"], "loader.1": saved["loader.1"]}
    start("stages", "steps=2", "pp=2", ranks=4)
    assert noted("stages") == saved
    with pytest.raises(AssertionError, match="data-parallel"):
        start("refused", "steps=2", ranks=1)
    out = "exclude_from_loading=['dataloader']"
    start("one", "steps=3", out, ranks=1)
    assert {**noted("one"), **loaders} == {**noted("stages-end"), **loaders}


@pytest.fixture(scope="module")
def facts(tmp_path_factory):
    """Of one process, that tries one setting after the other."""
    folder = tmp_path_factory.mktemp("uses")
    subprocess.run(
        [sys.executable, "-W", "ignore", SCRIPTS / "torchtitan_uses.py", folder],
        check=True,
        env=environment(),
        timeout=PATIENCE_S,
        capture_output=True,
    )
    return json.loads((folder / "facts.json").read_text())


def test_as_many_checkpoints_stay_as_torchtitan_is_told(facts):
    assert facts["kept"] == [2, 4]


def test_the_last_save_is_of_the_model_alone_and_the_run_can_be_resumed(facts):
    assert facts["final"] == [[2, 4], ["step-5"]]


def test_the_last_save_can_be_in_the_format_of_hugging_face(facts):
    assert facts["hugging_face"] == [True, [2, 4]]


def test_an_older_step_is_loaded_where_it_is_named(facts):
    assert facts["older_step"] == 2
    assert names(facts["missing_step"], "NotFoundError: ", "step 3")


def test_a_damaged_checkpoint_is_passed_over(facts):
    assert facts["damaged"] == 2


def test_what_is_excluded_from_loading_stays_as_it_is(facts):
    assert facts["omitted_items"] == [0, {"last_epoch": 0}, 8]
    assert facts["left_out_by_a_wrong_name"].startswith("UsageError: exclude_from_loading")


def test_a_run_begins_with_the_final_model_of_another(facts):
    assert facts["begun_with_the_final_model"] is True


def test_a_run_of_torchtitans_own_is_taken_up(facts):
    assert facts["moved_from_dcp"] == [5, True, [6], 6]


def test_what_torchtitan_has_saved_since_is_not_passed_over(facts):
    told = facts["moved_back_to_dcp"]
    assert told.startswith("UsageError: "), told
    assert "step-8" in told


def test_all_modes_of_saving_and_schedules_are_accepted(facts):
    assert facts["modes"] == [[1], [1], [1]]
    assert facts["first_step"] == [1, 4]
    assert facts["own_schedule"] == [3]
    assert facts["only_loads"] == [6, True]
    assert facts["switched_off"] is False


def test_of_a_seed_the_model_is_loaded_and_nothing_else(facts):
    assert facts["seed"] == [[0], 0, True]


def test_a_changed_model_and_the_run_of_others_are_refused(facts):
    assert facts["another_model"].startswith("MismatchError: ")
    assert names(facts["another_framework"], "MismatchError: ", "torch")


def test_a_restore_of_no_optimizer_state_removes_it(tmp_path):
    from laststep.torchtitan.state import Optimizers

    layers = [torch.nn.Linear(2, 2) for _ in range(2)]
    optimizers = [
        torch.optim.AdamW(layer.named_parameters(prefix=str(i))) for i, layer in enumerate(layers)
    ]
    with laststep.Checkpointer(tmp_path, items={"optimizer": Optimizers(optimizers)}) as ckpt:
        ckpt.save(0).result(60)
        for layer, optimizer in zip(layers, optimizers, strict=True):
            layer(torch.ones(2)).sum().backward()
            optimizer.step()
        ckpt.restore()
    assert [len(optimizer.state) for optimizer in optimizers] == [0, 0]


def test_the_example_goes_on_where_it_ended(tmp_path):
    example = SCRIPTS.parents[1] / "examples" / "torchtitan_llama.py"
    on_a_cpu = (
        "import runpy, sys, torchtitan_cpu; sys.argv = sys.argv[1:]; "
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    known = environment()
    known["PYTHONPATH"] += f":{SCRIPTS}"
    for steps, first in (("4", 1), ("6", 5)):
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", on_a_cpu, example, steps],
            check=True,
            cwd=tmp_path,
            timeout=PATIENCE_S,
            env=known,
            capture_output=True,
            text=True,
        )
        assert f"trained up to step {steps}" in done.stdout
        assert f"Training starts at step {first}" in done.stdout + done.stderr
