"""Ways of training with Lightning that keep a state of their own: each resumes bit for bit."""

# ruff: noqa: E402, TC003 (what needs Lightning is imported where it is installed)

from __future__ import annotations

import logging
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from expect import raises

pl = pytest.importorskip("lightning.pytorch", reason="needs lightning: make test-frameworks")

import torch
import torchmetrics
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, Subset

import laststep
from frameworks import lightning_training as training
from frameworks.trained import read
from laststep.settings import as_keywords

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(500)]

callbacks = pl.callbacks
WIDTH, BATCH, SAMPLES = training.WIDTH, training.BATCH, training.SAMPLES
BATCHES = SAMPLES // BATCH


@pytest.fixture(autouse=True)
def _quiet():
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)


class Cut(training.Net):
    """Draws which samples there are when the loader is made."""

    def train_dataloader(self):
        chosen = torch.randperm(SAMPLES)[: SAMPLES - BATCH].tolist()
        return DataLoader(Subset(training.Samples(), chosen), batch_size=BATCH, shuffle=True)


class Both(training.Net):
    """Takes batches of two loaders."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch["long"] + batch["short"], batch_idx)


class OfTheEpoch(training.Net):
    """Its scheduler looks at a mean over the epoch, and metrics of several kinds are logged."""

    def __init__(self, losses: str) -> None:
        super().__init__(losses)
        self.error = torchmetrics.MeanSquaredError()
        shared = {"one": torchmetrics.MeanSquaredError(), "two": torchmetrics.MeanSquaredError()}
        self.group, self.all = torchmetrics.MetricCollection(shared), torchmetrics.CatMetric()

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("mean", loss, on_step=False, on_epoch=True)
        if not batch_idx:
            self.log("first", loss, on_step=False, on_epoch=True)
        found = self.net(batch).detach()
        self.error(found, batch)
        self.log("error", self.error, on_step=False, on_epoch=True)
        self.group.update(found, batch)
        self.all.update(loss.detach())
        return loss

    def on_train_epoch_end(self):
        self.log_dict(self.group.compute())
        self.log("all", self.all.compute().sum())
        self.group.reset()
        self.all.reset()

    def configure_optimizers(self):
        (optimizer,), (config,) = super().configure_optimizers()
        config["scheduler"].threshold = 0.2
        return [optimizer], [{**config, "monitor": "mean"}]


class ByHand(training.Net):
    """Steps the optimizer itself, each fifth batch, whatever epoch it is in."""

    def __init__(self, losses: str) -> None:
        super().__init__(losses)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        if self.trainer.fit_loop.total_batch_idx % 5 == 4:
            self.optimizers().step()
            self.optimizers().zero_grad()


class NoScheduler(training.Net):
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Skips(NoScheduler):
    """Leaves each epoch early."""

    def on_train_batch_start(self, batch, batch_idx):
        return -1 if batch_idx == 7 else None


def two_loaders() -> CombinedLoader:
    short = DataLoader(Subset(training.Samples(), range(12)), batch_size=BATCH, shuffle=True)
    return CombinedLoader({"long": training.loader("plain"), "short": short}, "max_size_cycle")


WAYS: dict[str, dict[str, Any]] = {
    "samples are drawn": {"net": Cut, "loader": None, "steps": (4, 22, 30)},
    "samples are drawn for each epoch": {
        "net": Cut,
        "loader": None,
        "trainer": {"reload_dataloaders_every_n_epochs": 1},
        "steps": (4, 22, 30),
    },
    "samples are drawn for every second epoch": {
        "net": Cut,
        "loader": None,
        "trainer": {"reload_dataloaders_every_n_epochs": 2},
        "steps": (11, 15, 22),
    },
    "a short loader begins anew": {"net": Both, "loader": two_loaders, "steps": (7, 12, 20)},
    "means of the epoch": {"net": OfTheEpoch, "steps": (7, 12, 34, 40)},
    "validation at other times": {
        "trainer": {"check_val_every_n_epoch": None, "val_check_interval": 8},
        "steps": (10, 12),
    },
    "steps by hand": {"net": ByHand, "steps": (1, 4, 7)},
    "gradients beyond an epoch": {  # before a validation Lightning clears them
        "net": ByHand,
        "every": None,
        "steps": (2, 4, 7),
        "trainer": {"limit_val_batches": 0},
    },
    "gradients accumulated by epoch": {
        "callbacks": lambda: [callbacks.GradientAccumulationScheduler({0: 1, 1: 4, 3: 2})],
        "steps": (12, 13, 19),
    },
    "epochs left early": {"net": Skips, "steps": (7, 9, 28)},
}


def fit(run: Path, losses: Path, way: dict[str, Any], **settings: object) -> pl.Trainer:
    pl.seed_everything(7, verbose=False)
    ours = laststep.lightning.Checkpoint(run, **as_keywords(settings))
    more = way["callbacks"]() if "callbacks" in way else []
    trainer = pl.Trainer(
        **{"max_epochs": 4, **way.get("trainer", {})},
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ours, *more],
    )
    net = way.get("net", training.Net)(str(losses))
    make = way.get("loader", lambda: training.loader("plain"))
    validation = DataLoader(training.Samples(), batch_size=24)
    trainer.fit(net, None if make is None else make(), validation)
    return trainer


@pytest.mark.parametrize("name", WAYS)
def test_training_goes_on_bit_for_bit(name: str, tmp_path: Path) -> None:
    way = WAYS[name]
    every = way.get("every", 1)
    end = fit(tmp_path / "run", tmp_path / "whole", way, every=every)
    whole = read(tmp_path / "whole")
    for step in way["steps"]:
        run, losses = tmp_path / f"run{step}", tmp_path / f"losses{step}"
        shutil.copytree(tmp_path / "run", run)
        trainer = fit(run, losses, way, every=every, resume=step)
        resumed = read(losses)
        begun = min(resumed, default=max(whole) + 1)
        assert resumed == {batch: loss for batch, loss in whole.items() if batch >= begun}
        assert trainer.global_step == end.global_step
        if resumed:
            _equal(trainer, end)


def _equal(one: pl.Trainer, other: pl.Trainer) -> None:
    states = [trainer.lightning_module.state_dict() for trainer in (one, other)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[1])
    metrics = [
        {name: value.item() for name, value in trainer.callback_metrics.items() if name != "first"}
        for trainer in (one, other)
    ]
    assert metrics[0] == metrics[1]


# -- what is saved, and when ----------------------------------------------------------------------


def test_a_training_that_was_stopped_early_stays_stopped(tmp_path: Path) -> None:
    way = {"callbacks": lambda: [callbacks.EarlyStopping("val_loss", 9.0, patience=1)]}
    ends = [fit(tmp_path / "run", tmp_path / "losses", way).global_step for _ in range(3)]
    assert ends == [2 * BATCHES] * 3


def test_averages_that_a_callback_leaves_at_the_end_are_not_trained_on(tmp_path: Path) -> None:
    def way(epochs: int) -> dict[str, Any]:
        averaged = [callbacks.EMAWeightAveraging(decay=0.9)]
        return {"callbacks": lambda: averaged, "trainer": {"max_epochs": epochs}}

    fit(tmp_path / "one", tmp_path / "whole", way(3), every=100)
    fit(tmp_path / "two", tmp_path / "first", way(2), every=100)
    fit(tmp_path / "two", tmp_path / "rest", way(3), every=100)
    assert {**read(tmp_path / "first"), **read(tmp_path / "rest")} == read(tmp_path / "whole")


def test_a_metric_of_training_is_enough_to_judge_by(tmp_path: Path) -> None:
    class Unvalidated(OfTheEpoch):
        val_dataloader = validation_step = None

    way = {"net": Unvalidated, "trainer": {"limit_val_batches": 0}}
    fit(tmp_path / "run", tmp_path / "losses", way, monitor="mean")
    found = laststep.open(tmp_path / "run")
    assert found.steps() == [BATCHES * epoch for epoch in (1, 2, 3, 4)]
    assert all("mean" in one.metrics for one in found)


def test_epochs_are_saved_where_nobody_logs_the_metric(tmp_path: Path) -> None:
    fit(tmp_path / "run", tmp_path / "losses", {}, monitor="val_los")
    assert laststep.open(tmp_path / "run").steps() == [BATCHES * epoch for epoch in (1, 2, 3, 4)]


class Thaws(callbacks.BaseFinetuning):
    def freeze_before_training(self, pl_module):
        pass


@pytest.mark.parametrize(
    "callback",
    [Thaws(), callbacks.StochasticWeightAveraging(1e-3)],
    ids=["finetuning", "averaging"],
)
def test_callbacks_that_change_the_optimizer_on_the_way_are_refused(
    callback: pl.Callback, tmp_path: Path
) -> None:
    with raises(laststep.UsageError, found=type(callback).__name__):
        fit(tmp_path / "run", tmp_path / "losses", {"callbacks": lambda: [callback]})


def test_gradients_are_captured_before_the_next_epoch_adds_to_them(tmp_path: Path) -> None:
    lazy = laststep.Options(capture="lazy")
    way = WAYS["gradients beyond an epoch"]
    end = fit(tmp_path / "run", tmp_path / "losses", way, options=lazy)
    assert laststep.open(tmp_path / "run").steps()[-1] == end.global_step


def test_sigterm_while_gradients_are_accumulated_saves_the_step_that_follows(
    tmp_path: Path,
) -> None:
    class Ends(pl.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if batch_idx == 4:
                os.kill(os.getpid(), signal.SIGTERM)

    way = {"callbacks": lambda: [Ends()], "trainer": {"accumulate_grad_batches": 4}}
    with pytest.raises(SystemExit):
        fit(tmp_path / "run", tmp_path / "losses", way, every=1000)
    assert laststep.open(tmp_path / "run").steps() == [2]


def test_a_finder_of_rates_does_not_keep_a_run_from_going_on(tmp_path: Path) -> None:
    class Found(NoScheduler):
        lr = 1e-3

    def way(epochs: int) -> dict[str, Any]:
        finder = callbacks.LearningRateFinder(num_training_steps=20)
        root = {"max_epochs": epochs, "default_root_dir": tmp_path}
        return {"net": Found, "callbacks": lambda: [finder], "trainer": root}

    fit(tmp_path / "run", tmp_path / "first", way(1))
    assert fit(tmp_path / "run", tmp_path / "rest", way(2)).global_step == 2 * BATCHES
    assert laststep.open(tmp_path / "run").steps() == [BATCHES, 2 * BATCHES]


def test_a_plugin_of_the_users_is_kept_and_pickles_are_read_where_they_may_be(
    tmp_path: Path,
) -> None:
    class Own(TorchCheckpointIO):
        pass

    class Holds(pl.Callback):
        def state_dict(self):
            return {"place": tmp_path}

    way = {"callbacks": lambda: [Holds()], "trainer": {"plugins": [Own()], "max_epochs": 1}}
    trainer = fit(tmp_path / "run", tmp_path / "losses", way, allow_pickle=True)
    trainer.save_checkpoint(tmp_path / "before.ckpt")
    net, data = training.Net(os.devnull), DataLoader(training.Samples(), batch_size=24)
    for path in ("best", tmp_path / "before.ckpt"):
        trainer.test(net, data, ckpt_path=path, weights_only=False, verbose=False)
    trainer.save_checkpoint(tmp_path / "after.ckpt")
    assert (tmp_path / "after.ckpt").is_file()
