"""The training that `demo.py` starts, kills and resumes: a small GPT on Python's own sources.

Events go to a log of JSON lines, flushed line by line, so that a kill loses none. Everything random
is seeded and one thread computes, so two runs of the same steps give the same bits. Apart from
that, this is how any training would use laststep.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import inspect
import io
import json
import os
import signal
import time
from pathlib import Path
from typing import TypedDict

import torch
from torch import Tensor, nn

import laststep

CONTEXT = 64
BATCH = 4
WIDTH = 256
LAYERS = 3
HEADS = 4
VOCABULARY = 128
SOURCES = ("this", "argparse", "ast", "dataclasses", "typing", "statistics", "textwrap")


class LoaderState(TypedDict):
    """Position of a loader."""

    shuffle: Tensor
    order: Tensor
    at: int


def text() -> str:
    """Return training text that every Python has: some of its own sources."""
    with contextlib.redirect_stdout(io.StringIO()):  # importing `this` prints it
        modules = [importlib.import_module(name) for name in SOURCES]
    return "".join(inspect.getsource(module) for module in modules)


class Loader:
    """Shuffled batches without end, with a `state_dict` as any stateful loader has."""

    def __init__(self, data: Tensor) -> None:
        self._windows = data[: len(data) // (CONTEXT + 1) * (CONTEXT + 1)].view(-1, CONTEXT + 1)
        self._shuffle = torch.Generator().manual_seed(1)
        self._order = torch.empty(0, dtype=torch.int64)
        self._at = 0

    def next_batch(self) -> tuple[Tensor, Tensor]:
        """Return inputs, and the same text shifted by one character."""
        if self._at + BATCH > len(self._order):
            self._order = torch.randperm(len(self._windows), generator=self._shuffle)
            self._at = 0
        rows = self._windows[self._order[self._at : self._at + BATCH]]
        self._at += BATCH
        return rows[:, :-1], rows[:, 1:]

    def state_dict(self) -> LoaderState:
        """Return the state of the shuffle, the order of this epoch, and the position in it."""
        return {"shuffle": self._shuffle.get_state(), "order": self._order, "at": self._at}

    def load_state_dict(self, state: LoaderState) -> None:
        """Continue where `state` was taken."""
        self._shuffle.set_state(state["shuffle"])
        self._order = state["order"]
        self._at = state["at"]


class Block(nn.Module):
    """Attention and a feed-forward part, each with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_a = nn.LayerNorm(WIDTH)
        self.project_in = nn.Linear(WIDTH, 3 * WIDTH)
        self.project_out = nn.Linear(WIDTH, WIDTH)
        self.norm_b = nn.LayerNorm(WIDTH)
        self.feed = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1)
        )
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        parts = self.project_in(self.norm_a(x)).view(batch, length, 3, HEADS, WIDTH // HEADS)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        mixed: Tensor = self.project_out(seen.transpose(1, 2).reshape(batch, length, WIDTH))
        x = x + self.drop(mixed)
        fed: Tensor = self.feed(self.norm_b(x))
        return x + fed


class GPT(nn.Module):
    """A transformer that predicts the next character; 2.4 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.characters = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(CONTEXT, WIDTH)
        self.layers = nn.ModuleList([Block() for _ in range(LAYERS)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, characters: Tensor) -> Tensor:
        """Return the logits of the next character at every position."""
        x: Tensor = self.characters(characters) + self.places.weight[: characters.shape[1]]
        for layer in self.layers:
            x = layer(x)
        predicted: Tensor = self.head(self.norm(x))
        return predicted


class Training:
    """Everything that changes from step to step."""

    def __init__(self, steps: int) -> None:
        torch.manual_seed(0)
        characters = torch.tensor(list(text().encode("ascii", "replace")), dtype=torch.int64)
        self.loader = Loader(characters)
        self.model = GPT()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, steps)

    def step(self) -> float:
        """Do one step and return its loss."""
        inputs, targets = self.loader.next_batch()
        predicted = self.model(inputs)
        loss = nn.functional.cross_entropy(predicted.flatten(0, 1), targets.flatten())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        return loss.item()


class Log:
    """Lines of JSON that survive a kill of the process."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1, encoding="utf-8")

    def write(self, event: str, **values: object) -> None:
        self._file.write(json.dumps({"event": event, **values}) + "\n")

    def save(self, handle: laststep.SaveHandle) -> None:
        report = handle.report
        self.write(
            "save",
            step=report.step,
            size_bytes=report.size_bytes,
            written_bytes=report.written_bytes,
            lost_s=report.lost_s,
            durable_s=report.durable_s,
            committed_s=report.committed_s,
        )


def children_of(parent: int) -> list[int]:
    """Return the processes whose parent is `parent`, zombies included."""
    children = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            # The second field is the command in brackets, which may contain anything.
            if int(stat.read_text().rpartition(")")[2].split()[1]) == parent:
                children.append(int(stat.parent.name))
    return children


def die(log: Log, handle: laststep.SaveHandle, step: int, whom: str) -> None:
    """Send SIGKILL in the middle of a save to this process, or to its flusher as well.

    A trainer that dies alone waits until the state is captured, so that its flusher can finish.
    """
    if whom == "trainer":
        handle.captured.wait()
    log.write("kill", step=step, whom=whom, committed=handle.committed.done())
    if whom == "machine":
        for child in children_of(os.getpid()):
            os.kill(child, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def train_plainly(steps: int, log: Log) -> None:
    """Train the reference, without checkpoints or interruptions."""
    training = Training(steps)
    started_s = time.perf_counter()
    for step in range(steps):
        log.write("loss", step=step, loss=training.step().hex())
    log.write("end", seconds=time.perf_counter() - started_s)


def train(steps: int, log: Log, options: argparse.Namespace) -> None:
    """Train with checkpoints; die where the options say."""
    training = Training(steps)
    checkpointer = laststep.Checkpointer(
        options.run,
        model=training.model,
        optimizer=training.optimizer,
        scheduler=training.scheduler,
        loader=training.loader,
        rng=laststep.RNG(),
    )
    restored = checkpointer.restore()
    log.write(
        "restored",
        step=restored.step,
        next_step=restored.next_step,
        skipped=[f"{skipped.folder}: {skipped.reason}" for skipped in restored.skipped],
    )
    started_s = time.perf_counter()
    handles: list[laststep.SaveHandle] = []
    for step in range(restored.next_step, steps):
        loss = training.step()
        log.write("loss", step=step, loss=loss.hex())
        while handles and handles[0].committed.done():
            log.save(handles.pop(0))
        if (step and step % options.every == 0) or step == steps - 1:
            handles.append(checkpointer.save(step, metrics={"loss": loss}))
            if step == options.kill_at:
                die(log, handles[-1], step, options.kill)
    checkpointer.close()
    for handle in handles:
        log.save(handle)
    log.write("end", seconds=time.perf_counter() - started_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--log", type=Path, required=True, help="file to append what happens to")
    parser.add_argument("--run", help="folder of the run; without it nothing is saved")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=10, help="save every so many steps")
    parser.add_argument("--kill-at", type=int, help="die in the middle of this step's save")
    parser.add_argument("--kill", choices=("trainer", "machine"), default="trainer")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(mode=True)
    if options.run is None:
        train_plainly(options.steps, Log(options.log))
    else:
        train(options.steps, Log(options.log), options)


if __name__ == "__main__":
    main()
