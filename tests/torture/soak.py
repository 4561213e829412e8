"""Hours of one trainer: saving, restoring, rolling back, its flusher killed, its run taken over.

Short-lived trainers come between on the same run and are killed; the run is pruned. What is
restored is compared bit by bit. Memory, descriptors, threads, shared memory and the time of a save
are sampled, and are flat: the median of the last quarter is within a bound of the second's. The
first quarter is for warming up.
"""

from __future__ import annotations

import contextlib
import os
import random
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from processes import Child, children_of, wait_until_dead
from tally import Violation

import laststep
import state
from laststep.catalog.retention import Keep, plan_prune
from laststep.catalog.run import Run
from laststep.errors import LaststepError
from laststep.storage.directory import DirectoryStore

if TYPE_CHECKING:
    from processes import Say
    from tally import Tally

PATIENCE_S = 60.0
SAMPLE_EVERY = 20
"""So many saves between two samples."""
ENOUGH, ENOUGH_FOR_TIMES = 40, 400
"""Of fewer samples nothing is said; times vary with what else the machine does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """How much more the last quarter may have than the second: a factor, and something on top."""

    factor: float
    more: float
    unit: str


BOUNDS = {
    "memory of the trainer": Bound(factor=1.10, more=16.0, unit="MB"),
    "memory of the flusher": Bound(factor=1.10, more=8.0, unit="MB"),
    "shared memory": Bound(factor=1.10, more=8.0, unit="MB"),
    "descriptors": Bound(factor=1.0, more=3.0, unit=""),
    "threads": Bound(factor=1.0, more=2.0, unit=""),
    "time of save()": Bound(factor=1.5, more=1.0, unit="ms"),
    "time until committed": Bound(factor=1.5, more=10.0, unit="ms"),
}


def trial(folder: Path, seed: int, tally: Tally) -> None:
    """One long life, `LASTSTEP_TORTURE_SECONDS` long, an hour by default."""
    seconds = float(os.environ.get("LASTSTEP_TORTURE_SECONDS", "3600"))
    chance = random.Random(seed)
    run = folder / "run"
    until = time.monotonic() + seconds
    old = Child.fork(lambda say: _live_long(say, run, seed, until))
    try:
        while not old.wait(chance.uniform(0.5, 4.0)):
            _disturb(old, run, chance, tally)
            if time.monotonic() > until + PATIENCE_S:
                for line in old.stacks():
                    tally.step(f"# {line}")
                raise Violation("hang", f"the trainer does not end; it said {old.heard[-4:]}")
        _hear(old, tally)
        if old.heard[-1] != ["end"]:
            raise Violation("crash", f"the trainer died; it said {old.heard[-4:]}")
        _judge([sample for (sample,) in old.said("sample")], tally)
    finally:
        old.close()


def _hear(child: Child, tally: Tally) -> None:
    for word, *rest in child.heard:
        if word == "foreign":
            raise Violation("foreign error", rest[0])
        if word == "wrong":
            raise Violation("wrong", rest[0])
        if word == "compared":
            tally.checkpoint()
        if word == "told":
            tally.note(f"soak: the trainer was told {rest[0]}")
        if word == "saves":
            tally.note("soak: saves committed", rest[0])


# The long life


def _live_long(say: Say, run: Path, seed: int, until: float) -> None:
    chance = random.Random(seed + 1)
    live = state.new()
    checkpointer = _open(run, live)
    step = _restore(checkpointer, live, say)
    saves, times = 0, []
    while time.monotonic() < until:
        try:
            dice = chance.random()
            if dice < 0.03:
                step = _restore(checkpointer, live, say)
            elif dice < 0.05:
                step = _roll_back(checkpointer, live, run, chance, say, step)
            elif dice < 0.06:
                try:
                    checkpointer.close()
                except LaststepError as error:  # of a save whose flusher was killed
                    say("told", type(error).__name__)
                checkpointer = _open(run, live)
                step = _restore(checkpointer, live, say)
            state.advance(live, step)
            began = time.perf_counter()
            handle = checkpointer.save(step, overwrite=True, metrics={"loss": chance.random()})
            saved = time.perf_counter()
            if chance.random() < 0.8:
                handle.wait(PATIENCE_S)
                times.append((saved - began, time.perf_counter() - began))
            saves += 1
            step += 1
        except LaststepError as error:
            say("told", type(error).__name__)
            step = _restore(checkpointer, live, say)
        if len(times) >= SAMPLE_EVERY:
            say("sample", _sample(times))
            times = []
    with contextlib.suppress(LaststepError):
        checkpointer.close()
    say("saves", saves)


def _open(run: Path, live: state.Live) -> laststep.Checkpointer:
    return laststep.Checkpointer(
        str(run),
        keep=laststep.Keep(last=5, best=1, metric="loss"),
        options=laststep.Options(progress=False),
        host_memory_bytes=64 << 20,
        compression=state.COMPRESSION,
        **live,
    )


def _restore(
    checkpointer: laststep.Checkpointer, live: state.Live, say: Say, step: int | None = None
) -> int:
    """Restore, compare; the next step. A failure of a save that comes back here is told once."""
    while True:
        try:
            restored = checkpointer.restore(step)
        except (laststep.StorageError, laststep.AbortedError) as error:
            say("told", type(error).__name__)
            continue
        if restored.step is not None:
            if wrong := state.wrong(live, restored.step):
                say("wrong", f"restored {restored.step} with {wrong}")
            if restored.skipped:
                say("wrong", f"passed over {restored.skipped}")
            say("compared")
        return restored.next_step


def _roll_back(
    checkpointer: laststep.Checkpointer,
    live: state.Live,
    run: Path,
    chance: random.Random,
    say: Say,
    step: int,
) -> int:
    checkpointer.wait(PATIENCE_S)
    steps = laststep.open(run).steps() if run.exists() else []
    if not steps:
        return step
    try:
        return _restore(checkpointer, live, say, chance.choice(steps))
    except laststep.NotFoundError:
        return _restore(checkpointer, live, say)  # deleted by another's retention meanwhile


def _sample(times: list[tuple[float, float]]) -> dict[str, float]:
    helpers = children_of(os.getpid())
    shared = sum(_status(pid, "RssShmem") for pid in (os.getpid(), *helpers))
    return {
        "memory of the trainer": _status(os.getpid(), "RssAnon"),
        "memory of the flusher": sum(_status(pid, "RssAnon") for pid in helpers),
        "shared memory": shared,
        "descriptors": float(len(list(Path("/proc/self/fd").iterdir()))),
        "threads": float(len(list(Path("/proc/self/task").iterdir()))),
        "time of save()": statistics.median(one for one, _ in times) * 1000,
        "time until committed": statistics.median(two for _, two in times) * 1000,
    }


def _status(pid: int, name: str) -> float:
    """In MB; 0 where it has ended. What is shared counts whole: shares depend on how many others
    have a page, and a trainer is forked from a process that goes on."""
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) / 1024
    return 0.0


# What others do


def _disturb(old: Child, run: Path, chance: random.Random, tally: Tally) -> None:
    dice = chance.random()
    if dice < 0.4:
        for pid in children_of(old.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)
                tally.fault("soak: flusher killed")
    elif dice < 0.8:
        tally.fault("soak: taken over by a trainer that is killed")
        _live_shortly(run, chance, tally)
    elif run.exists():
        tally.note("soak: pruned")
        pruning = Child.fork(lambda _: _prune(run))
        pruning.wait(PATIENCE_S)
        heard = pruning.said("foreign")
        pruning.close()
        if heard:
            raise Violation("foreign error", str(heard))


def _prune(run: Path) -> None:
    """As `laststep prune --last 5 --abandoned`; what another deletes at the same time is gone."""
    plan_prune(Run.open(DirectoryStore(run)), Keep(last=5, abandoned=False)).execute()


def _live_shortly(run: Path, chance: random.Random, tally: Tally) -> None:
    def live_shortly(say: Say) -> None:
        live = state.new()
        checkpointer = _open(run, live)
        step = _restore(checkpointer, live, say)
        for number in range(step, step + 50):
            state.advance(live, number)
            with contextlib.suppress(laststep.AbortedError):
                checkpointer.save(number, overwrite=True, metrics={"loss": 0.5})

    child = Child.fork(live_shortly)
    child.wait(chance.uniform(0.05, 1.0))
    helpers = children_of(child.pid)
    child.kill()
    child.wait(PATIENCE_S)
    if not wait_until_dead(helpers, PATIENCE_S):
        raise Violation("hang", "the flusher of a dead trainer lives on")
    _hear(child, tally)
    child.close()


# Flat?


def _judge(samples: list[dict[str, float]], tally: Tally) -> None:
    if len(samples) < ENOUGH:
        tally.note(f"soak: too short for figures, {len(samples)} samples")
        return
    quarter = len(samples) // 4
    for name, bound in BOUNDS.items():
        second = statistics.median(sample[name] for sample in samples[quarter : 2 * quarter])
        last = statistics.median(sample[name] for sample in samples[-quarter:])
        figures = f"{name}: second quarter {second:.1f}, last {last:.1f} {bound.unit}".rstrip()
        tally.note(f"soak: {figures}")
        vague = bound.unit == "ms" and len(samples) < ENOUGH_FOR_TIMES
        if last > bound.factor * second + bound.more and not vague:
            tally.flaw("wrong", f"not flat: {figures}")
