"""Lightning's trainer with laststep's callback: it resumes bit for bit, anywhere."""

# ruff: noqa: E402 (what needs Lightning is imported where it is installed)

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from expect import raises, warned

pl = pytest.importorskip("lightning.pytorch", reason="needs lightning: make test-frameworks")

import torch
from torch.utils.data import DataLoader

import laststep
from frameworks import lightning_training as training
from frameworks.trained import SCRIPTS, Script, environment, read
from laststep.settings import as_keywords

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(500)]


@pytest.fixture(autouse=True)
def _quiet():
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)


# -- resuming, from any step, with any loader -----------------------------------------------------

WAYS = {
    "plain": ({}, (5, 12, 30)),
    "validation in the middle of an epoch": ({"validate": 0.5}, (4, 6, 18)),
    "gradients accumulated": ({"accumulate": 5}, (1, 3, 7)),
    "a number of steps": ({"steps": 30}, (7, 12)),
    "workers": ({"loader": "workers"}, (5, 12)),
    "no length": ({"loader": "stream"}, (1, 12, 13)),
    "a state of its own": ({"loader": "stateful"}, (1, 12, 30)),
    "a state, and no length": ({"loader": "stream_stateful"}, (1, 30)),
    "a state, and a part of each epoch": ({"loader": "stateful", "limit": 5}, (3, 5, 8)),
    "a fetching training step": ({"step": "fetching"}, (5, 12)),
}


@pytest.mark.parametrize("way", WAYS)
def test_training_goes_on_bit_for_bit_from_every_step(way: str, tmp_path: Path) -> None:
    ways, steps = WAYS[way]
    training.train(str(tmp_path / "run"), str(tmp_path / "whole"), every=1, **ways)
    whole = read(tmp_path / "whole")
    batches = ways.get("accumulate", 1)
    for step in steps:
        run, losses = tmp_path / f"run{step}", tmp_path / f"losses{step}"
        shutil.copytree(tmp_path / "run", run)
        training.train(str(run), str(losses), resume=step, **ways)
        resumed = read(losses)
        first = min(resumed)
        assert first == step if batches == 1 else first in (5, 12, 29), (way, step)
        assert resumed == {batch: loss for batch, loss in whole.items() if batch >= first}


def test_lightnings_own_checkpoint_does_not_give_that(tmp_path: Path) -> None:
    """If it does one day, this adapter can become smaller."""
    own = pl.callbacks.ModelCheckpoint(tmp_path / "own", every_n_train_steps=5, save_top_k=-1)
    ways = {"run": None, "callbacks": [own]}
    training.train(losses=str(tmp_path / "whole"), **ways)
    kept = str(next((tmp_path / "own").glob("*step=5.ckpt")))
    training.train(losses=str(tmp_path / "resumed"), ckpt_path=kept, **ways)
    whole, resumed = read(tmp_path / "whole"), read(tmp_path / "resumed")
    assert resumed != {batch: loss for batch, loss in whole.items() if batch >= min(resumed)}


# -- killed, and several ranks --------------------------------------------------------------------


def test_a_training_that_is_killed_in_a_save_resumes_bit_for_bit(tmp_path: Path) -> None:
    whole = Script("lightning_training.py", tmp_path / "whole").to_its_end()
    script = Script("lightning_training.py", tmp_path / "killed")
    script.killed_in_save(15, "paced=1")
    resumed = script.to_its_end()
    assert min(resumed) in (10, 15)
    assert resumed == {batch: loss for batch, loss in whole.items() if batch >= min(resumed)}
    assert laststep.open(script.run).steps()[-1] == max(whole) + 1, "completed steps are counted"


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "fsdp"])
def test_two_ranks_resume_bit_for_bit_and_another_number_goes_on(
    strategy: str, tmp_path: Path
) -> None:
    arguments = (f"strategy={strategy}", "epochs=3")
    whole = Script("lightning_training.py", tmp_path / "whole", *arguments, ranks=2).to_its_end()
    script = Script("lightning_training.py", tmp_path / "killed", *arguments, ranks=2)
    script.killed_in_save(15, "paced=1")
    resumed = script.to_its_end()
    assert min(resumed) in (10, 15)
    assert resumed == {batch: loss for batch, loss in whole.items() if batch >= min(resumed)}

    newest = laststep.open(script.run).latest()
    assert (newest.step, newest.ranks) == (18, 2)
    weights = [newest.tensor(name)[:] for name in newest.tensors() if name.startswith("model/")]
    more = script.to_its_end("epochs=4", ranks=1)
    assert (min(more), len(more)) == (18, 12), "an epoch of one rank has twice as many batches"
    assert f"restored {sum(map(_sum, weights)):.4f}" in script.output()


def _sum(tensor: torch.Tensor) -> float:
    return tensor.double().abs().sum().item()


def test_an_epoch_that_two_ranks_have_begun_is_finished_by_one(tmp_path: Path) -> None:
    script = Script("lightning_training.py", tmp_path, "strategy=ddp", ranks=2)
    script.to_its_end("epochs=2", "steps=8", "every=4")
    more = script.to_its_end("epochs=2", "every=4", "resume=8", ranks=1)
    assert len(more) == 12 - 2 * 2, "two batches of each of two ranks were over"


# -- what is saved, and when ----------------------------------------------------------------------


def fit(run: Path | None, *more: object, epochs: int = 2, **settings: object) -> pl.Trainer:
    """A short training with a callback of ours, and `more`."""
    ours = [] if run is None else [laststep.lightning.Checkpoint(run, **as_keywords(settings))]
    pl.seed_everything(3, verbose=False)
    trainer = trainer_with(*ours, *more, epochs=epochs)
    net = training.Net(os.devnull)
    trainer.fit(net, training.loader("plain"), DataLoader(training.Samples(), batch_size=24))
    return trainer


def trainer_with(*callbacks: object, epochs: int = 2, **more: object) -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
        **more,
    )


def test_without_every_each_epoch_is_saved(tmp_path: Path) -> None:
    fit(tmp_path / "run", epochs=3)
    assert laststep.open(tmp_path / "run").steps() == [12, 24, 36]


def test_a_run_that_only_its_tiers_name_is_found_before_and_after(tmp_path: Path) -> None:
    tiers = [tmp_path / "run", tmp_path / "replica"]
    ours = laststep.lightning.Checkpoint(tiers=tiers)
    assert ours.last_model_path == ""
    trainer = trainer_with(ours)
    loaders = (training.loader("plain"), DataLoader(training.Samples(), batch_size=24))
    trainer.fit(training.Net(os.devnull), *loaders)
    again = laststep.lightning.Checkpoint(tiers=tiers)
    assert again.last_model_path == ours.last_model_path
    assert Path(again.last_model_path).parent == tmp_path / "run"
    with pytest.raises(laststep.UsageError):
        laststep.lightning.Checkpoint()


def test_the_end_is_saved_whatever_every_says(tmp_path: Path) -> None:
    fit(tmp_path / "run", every=20)
    assert laststep.open(tmp_path / "run").steps() == [20, 24]


def test_fit_of_a_training_that_is_over_does_nothing(tmp_path: Path) -> None:
    fit(tmp_path / "run")
    trainer = fit(tmp_path / "run")
    assert trainer.global_step == 24
    assert laststep.open(tmp_path / "run").steps() == [12, 24]


@pytest.mark.parametrize("path", [None, "last"])
def test_fit_resumes_by_itself(path: str | None, tmp_path: Path) -> None:
    fit(tmp_path / "run")
    trainer = trainer_with(laststep.lightning.Checkpoint(tmp_path / "run"), epochs=3)
    net = training.Net(str(tmp_path / "losses"))
    loaders = (training.loader("plain"), DataLoader(training.Samples(), batch_size=24))
    trainer.fit(net, *loaders, ckpt_path=path)
    assert min(read(tmp_path / "losses")) == 24
    assert len(net.draws) == 3, "what a hook has stored is there again"
    assert torch.equal(
        net.loaded, 2 * laststep.open(tmp_path / "run")[24].tensor("model/average")[:]
    )


def test_the_best_stay_and_can_be_tested(tmp_path: Path) -> None:
    run = tmp_path / "run"
    settings = {"every": 5, "monitor": "val_loss", "top_k": 2, "keep": laststep.Keep(last=1)}
    trainer = fit(run, epochs=6, **settings)
    catalog = laststep.open(run)
    scores = {one.step: one.metrics["val_loss"] for one in catalog if "val_loss" in one.metrics}
    assert 2 <= len(scores) <= 3
    assert len(catalog) <= 3
    assert all(step % 12 == 0 for step in scores), "only where it was validated"
    ours = trainer.checkpoint_callback
    best = min(scores, key=scores.get)
    assert ours.best_model_path == f"{run}/{catalog[best].folder}"
    net = training.Net(os.devnull)
    trainer.test(
        net, DataLoader(training.Samples(), batch_size=24), ckpt_path="best", verbose=False
    )
    assert torch.equal(net.average, catalog[best].tensor("model/average")[:])


def test_averaged_weights_of_a_callback_come_back(tmp_path: Path) -> None:
    def averaging() -> pl.callbacks.WeightAveraging:
        return pl.callbacks.EMAWeightAveraging(decay=0.9)

    one, two = averaging(), averaging()
    fit(tmp_path / "whole", one, epochs=3)
    fit(tmp_path / "run", averaging(), epochs=2)
    trainer = fit(tmp_path / "run", two, epochs=3)
    assert trainer.global_step == 36
    both = [laststep.load(tmp_path / run)["model"] for run in ("whole", "run")]
    assert all(torch.equal(both[0][name], both[1][name]) for name in both[0])
    hooks = [laststep.load(tmp_path / run)["hooks"] for run in ("whole", "run")]
    assert hooks[0].keys() == hooks[1].keys()
    assert any("state_dict" in name for name in hooks[0])
    assert all(torch.equal(hooks[0][name], hooks[1][name]) for name in hooks[0])


def test_sigterm_saves_the_last_step(tmp_path: Path) -> None:
    losses = tmp_path / "losses"
    process = subprocess.Popen(
        [
            sys.executable,
            SCRIPTS / "lightning_training.py",
            tmp_path / "run",
            losses,
            "epochs=100000",
            "every=1000000",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment(),
    )
    try:
        while not losses.exists() or len(read(losses)) < 3:
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        process.wait(120)
    finally:
        process.kill()
    assert laststep.open(tmp_path / "run").steps() == [max(read(losses)) + 1]


# -- wrong use ------------------------------------------------------------------------------------


def test_a_mode_that_is_none_is_refused() -> None:
    with raises(laststep.UsageError, expected="'min' or 'max'", found="'minimum'"):
        laststep.lightning.Checkpoint("runs/a", monitor="val_loss", mode="minimum")


def test_two_callbacks_of_ours_are_refused(tmp_path: Path) -> None:
    with raises(laststep.UsageError, found="Checkpoint"):
        fit(tmp_path / "run", laststep.lightning.Checkpoint(tmp_path / "other"))


def test_a_run_of_another_is_refused_and_stays(tmp_path: Path) -> None:
    with laststep.Checkpointer(tmp_path / "run", model=torch.nn.Linear(2, 2)) as ckpt:
        ckpt.save(3)
    with raises(laststep.MismatchError, "lightning"):
        fit(tmp_path / "run")
    assert laststep.open(tmp_path / "run").steps() == [3]


def test_a_changed_model_is_refused_and_the_run_stays(tmp_path: Path) -> None:
    fit(tmp_path / "run")
    wider = training.Net(os.devnull)
    wider.net[3] = torch.nn.Linear(32, training.WIDTH + 1)
    with pytest.raises(laststep.MismatchError, match=r"net\.3"):
        trainer_with(laststep.lightning.Checkpoint(tmp_path / "run")).fit(
            wider, training.loader("plain")
        )
    assert laststep.open(tmp_path / "run").steps() == [12, 24]


def test_a_damaged_checkpoint_is_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fit(tmp_path / "run")
    folder = tmp_path / "run" / laststep.open(tmp_path / "run").latest().folder
    file = next(folder.glob("model*.safetensors"), None) or next(folder.glob("*.safetensors"))
    damaged = bytearray(file.read_bytes())
    damaged[-1] ^= 1
    damaged[4096] ^= 1
    file.write_bytes(damaged)
    trainer = fit(tmp_path / "run", epochs=3)
    assert warned(caplog, "step 24")
    assert trainer.global_step == 36
    assert laststep.open(tmp_path / "run").steps() == [12, 24, 36]


def test_a_checkpoint_of_lightning_does_not_go_with_a_run_that_has_some(tmp_path: Path) -> None:
    fit(None, pl.callbacks.ModelCheckpoint(tmp_path, filename="own"))
    fit(tmp_path / "run")
    loaders = (training.loader("plain"), DataLoader(training.Samples(), batch_size=24))
    path = tmp_path / "own.ckpt"
    with raises(laststep.UsageError, found=path):
        trainer_with(laststep.lightning.Checkpoint(tmp_path / "run"), epochs=3).fit(
            training.Net(os.devnull), *loaders, ckpt_path=path
        )
    trainer = trainer_with(laststep.lightning.Checkpoint(tmp_path / "new"), epochs=3)
    trainer.fit(training.Net(os.devnull), *loaders, ckpt_path=path)
    assert laststep.open(tmp_path / "new").steps() == [36], "its run goes on in ours"


def test_an_error_in_training_leaves_what_was_saved(tmp_path: Path) -> None:
    class Breaks(pl.Callback):
        def on_train_epoch_start(self, trainer, module):
            if trainer.current_epoch == 1:
                raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        fit(tmp_path / "run", Breaks())
    assert laststep.open(tmp_path / "run").steps() == [12]
    assert fit(tmp_path / "run").global_step == 24


# -- the rest -------------------------------------------------------------------------------------


def test_the_example_runs_and_runs_again(tmp_path: Path) -> None:
    command = [sys.executable, SCRIPTS.parents[1] / "examples/lightning_callback.py", "run"]
    for _ in range(2):
        done = subprocess.run(
            command, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=True
        )
        assert "step 64, the best is" in done.stdout
    assert laststep.open(tmp_path / "run").steps()[-1] == 64


def test_the_old_name_of_lightning_works_too(tmp_path: Path) -> None:
    script = """
import sys
import pytorch_lightning as pl
from pytorch_lightning.demos.boring_classes import BoringModel
import laststep
one = laststep.lightning.Checkpoint(sys.argv[1])
trainer = pl.Trainer(
    max_epochs=int(sys.argv[2]), limit_train_batches=4, limit_val_batches=1, accelerator="cpu",
    callbacks=[one], logger=False, enable_progress_bar=False,
)
trainer.fit(BoringModel())
assert trainer.checkpoint_callbacks == [one]
assert "lightning.pytorch" not in sys.modules
"""
    for epochs in ("1", "2"):
        command = [sys.executable, "-W", "ignore", "-c", script, tmp_path / "run", epochs]
        subprocess.run(command, env=environment(), check=True, capture_output=True)
    assert laststep.open(tmp_path / "run").steps() == [4, 8]
