"""The training that test_exact_resume starts, kills and starts again.

Everything that makes exact resumption hard is in it: dropout, batch statistics, a shuffled loader,
a schedule, a gradient scaler, and random numbers of Python and NumPy in the loss. It logs each loss
as an exact hexadecimal float and dies where it is told to.

To import torch only once, the process that the test starts trains nothing itself: it reads the
options of one training per line and forks a new process for each.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

import numpy as np
import torch
from torch import nn

import laststep

STEPS = 24
SAVE_EVERY = 3
BATCH = 8
EXAMPLES = 60  # not a multiple of the batch, so an epoch ends in the middle of a run
WIDTH = 48
STEP_S = 0.01  # a step of a real training takes longer than these


class PlainLoader:
    """Shuffled batches without end, by a loader that any user could have written."""

    def __init__(self, data: torch.Tensor) -> None:
        self._data = data
        self._shuffle = random.Random(3)
        self._order: list[int] = []
        self._at = 0

    def next_batch(self) -> torch.Tensor:
        if self._at >= len(self._order):
            self._order = self._shuffle.sample(range(len(self._data)), len(self._data))
            self._at = 0
        rows = self._order[self._at : self._at + BATCH]
        self._at += BATCH
        return self._data[rows]

    def state_dict(self) -> dict[str, object]:
        return {"shuffle": self._shuffle.getstate(), "order": self._order, "at": self._at}

    def load_state_dict(self, state: dict[str, object]) -> None:
        self._shuffle.setstate(state["shuffle"])
        self._order = state["order"]
        self._at = state["at"]


class TorchdataLoader:
    """torchdata's StatefulDataLoader, told to go on with the next epoch by itself.

    Loader and sampler get a generator each. Without one, `iter` draws from the global generator,
    and a resumed run, which calls it once more, sees other dropout masks; with one for both,
    torchdata 0.11 shuffles the epochs after a resumption differently.
    """

    def __init__(self, data: torch.Tensor) -> None:
        from torchdata.stateful_dataloader import StatefulDataLoader
        from torchdata.stateful_dataloader.sampler import RandomSampler

        dataset = torch.utils.data.TensorDataset(data)
        sampler = RandomSampler(dataset, generator=torch.Generator().manual_seed(3))
        own = torch.Generator().manual_seed(4)
        self._loader = StatefulDataLoader(dataset, BATCH, sampler=sampler, generator=own)
        self._batches = None

    def next_batch(self) -> torch.Tensor:
        while True:
            if self._batches is None:
                self._batches = iter(self._loader)
            batch = next(self._batches, None)
            if batch is not None:
                return batch[0]
            self._batches = None

    def state_dict(self) -> dict[str, object]:
        return self._loader.state_dict()

    def load_state_dict(self, state: dict[str, object]) -> None:
        self._loader.load_state_dict(state)
        self._batches = None


LOADERS = {"plain": PlainLoader, "torchdata": TorchdataLoader}


class Training:
    """All state, and one step of it."""

    def __init__(self, loader: str) -> None:
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002 (the global generator is what has to survive)
        self.data = torch.randn(EXAMPLES, WIDTH)
        self.loader = LOADERS[loader](self.data)
        self.model = nn.Sequential(
            nn.Linear(WIDTH, 256),
            nn.BatchNorm1d(256),
            nn.GELU(),
            nn.Dropout(0.3),
            nn.Linear(256, WIDTH),
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer, max_lr=1e-2, total_steps=STEPS
        )
        # It grows every other step, so that a forgotten scale would show in the losses.
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)

    def step(self) -> float:
        batch = self.loader.next_batch()
        noise = random.random() + float(np.random.rand())  # noqa: NPY002 (as above)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.mse_loss(self.model(batch), batch) * (1 + 0.01 * noise)
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        return loss.item() * self.scaler.get_scale()


def die_after(delay_s: float) -> None:
    """SIGKILL this process a moment from now, whatever it does then."""

    def wait_and_die() -> None:
        time.sleep(delay_s)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait_and_die, daemon=True).start()


def train(arguments: list[str]) -> None:
    """One training, as its options say."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--loader", choices=LOADERS, required=True)
    parser.add_argument("--run")
    parser.add_argument("--flush", default="process")
    parser.add_argument("--kill-at", type=int, default=-1)
    parser.add_argument("--kill-after-s", type=float, default=0.0)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    log = options.log.open("a", buffering=1)
    training = Training(options.loader)
    checkpointer, start = None, 0
    if options.run is not None:
        checkpointer = laststep.Checkpointer(
            options.run,
            options=laststep.Options(flush=options.flush),
            model=training.model,
            optimizer=training.optimizer,
            scheduler=training.scheduler,
            scaler=training.scaler,
            loader=training.loader,
            rng=laststep.RNG(),
        )
        start = checkpointer.restore().next_step
        log.write(f"start {start} x\n")
    for step in range(start, STEPS):
        loss = training.step()
        time.sleep(STEP_S)
        log.write(f"loss {step} {loss.hex()}\n")
        if step == options.kill_at:
            die_after(options.kill_after_s)
        if checkpointer is not None and step % SAVE_EVERY == SAVE_EVERY - 1:
            checkpointer.save(step, metrics={"loss": loss})
    if options.kill_at >= 0:
        time.sleep(60)  # the end came before the kill did
    if checkpointer is not None:
        checkpointer.close()


def serve() -> None:
    """One forked process for each line of options; answers with its status."""
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                train(line.rstrip("\n").split("\t"))
                status = 0
            except BaseException:  # noqa: BLE001 (a fork must not go on as its parent)
                traceback.print_exc()
            os._exit(status)
        _, ended = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(ended), flush=True)


if __name__ == "__main__":
    serve()
