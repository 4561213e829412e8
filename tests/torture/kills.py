"""Real kill -9 of trainer, flusher or both, at random moments, one after the other in one run.

Each is a forked trainer that restores, judges what it got bit by bit, and saves in a loop
until it is killed. Afterwards: every process of it is gone within a bounded time; the run opens;
its newest checkpoint verifies; nothing that was reported as committed is lost; the next trainer
restores exactly that checkpoint, and once it has saved, no debris of a dead writer is left.
"""

from __future__ import annotations

import contextlib
import os
import random
import select
import signal
import time
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING

from processes import children_of, wait_until_dead
from tally import Tally, Violation

import laststep
import state
from laststep.catalog.run import Run
from laststep.errors import LaststepError
from laststep.read.verify import verify_checkpoint
from laststep.storage.directory import DirectoryStore

if TYPE_CHECKING:
    from pathlib import Path

KILLS = 10
"""So many in a trial, in one run."""

ENDS_WITHIN_S = 60.0
STARTS_WITHIN_S = 120.0
VICTIMS = ("trainer", "flusher", "trainer, then flusher", "flusher, then trainer")

# How a trainer ends by itself, which it does only when its flusher was killed.
_TOLD, _BROKEN = 3, 4


@dataclass(slots=True)
class _Trainer:
    """A forked trainer as its parent sees it; `heard` is all that it wrote so far."""

    pid: int
    pipe: int
    heard: str = ""

    def listen(self, timeout_s: float) -> bool:
        """Wait for more; False when nothing came or it is gone."""
        if not select.select([self.pipe], [], [], timeout_s)[0]:
            return False
        data = os.read(self.pipe, 65536)
        self.heard += data.decode()
        return bool(data)

    def last(self, word: str) -> int:
        """The last step that it reported with that word; -1 if none."""
        whole = self.heard.rpartition("\n")[0].splitlines()
        steps = [int(line.split()[1]) for line in whole if line.startswith(f"{word} ")]
        return steps[-1] if steps else -1


def trial(folder: Path, seed: int, tally: Tally) -> None:
    """Kill one trainer after the other in one run."""
    chance = random.Random(seed)
    busy: list[int] = []
    for number in range(KILLS):
        flush = "thread" if chance.random() < 0.2 else "process"
        victim = "trainer" if flush == "thread" else chance.choice(VICTIMS)
        label = f"kill {number} ({victim}, flush={flush!r})"
        tally.step(f"{label}{', at the heels of the last flusher' if busy else ''}")
        # Now and then the next trainer starts while the last flusher is still at work.
        busy = _kill_one(folder / "run", flush, victim, label, busy, chance, tally)
    _wait_for_helpers(busy, "the last kill")


def _kill_one(
    run: Path,
    flush: str,
    victim: str,
    label: str,
    busy: list[int],
    chance: random.Random,
    tally: Tally,
) -> list[int]:
    """Start a trainer, kill, judge. The flushers that the next one need not wait for."""
    newest = _newest(run)
    trainer = _start(run, flush)
    try:
        helpers = _wait_for_start(trainer, label)
        _check_restored(trainer, newest, label, exactly=not busy)
        _wait_for_helpers(busy, label)
        _wait(trainer, chance.uniform(0.0, 0.25))
        tally.fault(f"kill -9: {victim} (flush in a {flush})")
        _kill(trainer, helpers, victim)
        if victim == "flusher":
            helpers += _wait_for_reaction(trainer, label)
        _wait_for_end(trainer, label)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(trainer.pid, signal.SIGKILL)
        os.close(trainer.pipe)
    hurried = chance.random() < 0.3
    if not hurried:
        _wait_for_helpers(helpers, label)
    _judge(run, trainer, label)
    tally.checkpoint(2)  # what it restored, and what it left
    if trainer.last("saving") > trainer.last("committed"):
        tally.note("kill -9: a save was under way")
    if _newest(run) > trainer.last("committed"):
        tally.note("kill -9: a save was committed after the kill")
    return helpers if hurried else []


def _check_restored(trainer: _Trainer, newest: int, label: str, *, exactly: bool) -> None:
    """It restored the newest, or, where an old flusher was still at work, one that came later."""
    restored = trainer.last("restored")
    if restored < newest or (exactly and restored != newest):
        raise Violation("wrong", f"{label}: restored {restored}, the newest was {newest}")


# The trainer


def _start(folder: Path, flush: str) -> _Trainer:
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid:
        os.close(write_end)
        return _Trainer(pid=pid, pipe=read_end)
    status = _BROKEN
    try:
        os.close(read_end)
        _train(folder, flush, write_end)
    except LaststepError as error:
        _say(write_end, "told", 0, str(error))
        status = _TOLD
    except BaseException:  # noqa: BLE001 (whatever it is, the parent has to hear of it)
        _say(write_end, "broken", 0, traceback.format_exc())
    os._exit(status)


def _say(pipe: int, word: str, step: int, text: str = "") -> None:
    os.write(pipe, f"{word} {step} {text!r}\n".encode())


def _train(folder: Path, flush: str, pipe: int) -> None:
    live = state.new()
    checkpointer = laststep.Checkpointer(
        str(folder),
        keep=laststep.Keep(last=3),
        options=laststep.Options(flush=flush, progress=False),
        compression=state.COMPRESSION,
        **live,
    )
    restored = checkpointer.restore()
    if restored.step is not None:
        wrong = state.wrong(live, restored.step)
        if wrong or restored.skipped:
            raise Violation(
                "wrong", f"step {restored.step}: wrong {wrong}, skipped {restored.skipped}"
            )
    _say(pipe, "restored", -1 if restored.step is None else restored.step)
    step = restored.next_step
    state.advance(live, step)
    checkpointer.save(step, metrics={"loss": 1.0 / (step + 1)}).wait()
    _wait_for_cleanliness(folder)
    _say(pipe, "committed", step)
    _say(pipe, "ready", step)
    while True:
        step += 1
        state.advance(live, step)
        _say(pipe, "saving", step)
        handle = checkpointer.save(step, metrics={"loss": 1.0 / (step + 1)})
        # What is captured may change at once: what is stored must not.
        for tensor in live["weights"].values():
            tensor.zero_()
        if step % 2:
            handle.wait()
            _say(pipe, "committed", step)
        if step % 4 == 1:
            time.sleep(0.03)  # so that some kills find a flusher that has nothing to do


def _wait_for_cleanliness(folder: Path) -> None:
    """Nothing of dead writers is left. Looks again: retention may be deleting just now."""
    run = Run.open(DirectoryStore(folder))
    deadline = time.monotonic() + ENDS_WITHIN_S
    while debris := [orphan.name for orphan in run.orphans()]:
        if time.monotonic() > deadline:
            raise Violation("wrong", f"debris after the first save of a new writer: {debris}")
        time.sleep(0.01)


# Its parent


def _wait_for_start(trainer: _Trainer, label: str) -> list[int]:
    deadline = time.monotonic() + STARTS_WITHIN_S
    while trainer.last("ready") < 0:
        left_s = deadline - time.monotonic()
        if left_s <= 0 or not trainer.listen(left_s):
            raise Violation("hang", f"{label}: the trainer did not start: {trainer.heard}")
    return children_of(trainer.pid)


def _wait(trainer: _Trainer, seconds: float) -> None:
    """Wait, and keep the pipe empty so that the trainer never waits for us."""
    deadline = time.monotonic() + seconds
    while (left_s := deadline - time.monotonic()) > 0:
        trainer.listen(left_s)


def _kill(trainer: _Trainer, helpers: list[int], victim: str) -> None:
    order = {"trainer": [trainer.pid], "flusher": helpers}
    for name in victim.split(", then "):
        for pid in order[name]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _wait_for_reaction(trainer: _Trainer, label: str) -> list[int]:
    """A trainer whose flusher was killed is told, or goes on with a new one; it never hangs.

    One that goes on is killed now, and its new flusher is returned.
    """
    deadline = time.monotonic() + ENDS_WITHIN_S
    before = trainer.last("committed")
    # One more may have been committed, but not yet read, before the kill.
    while trainer.last("committed") <= before + 2 and trainer.last("told") < 0:
        if time.monotonic() > deadline or trainer.last("broken") >= 0:
            raise Violation("hang", f"{label}: no reaction to the kill: {trainer.heard[-4000:]}")
        trainer.listen(0.05)
    fresh = children_of(trainer.pid)
    if trainer.last("told") < 0:
        os.kill(trainer.pid, signal.SIGKILL)
    return fresh


def _wait_for_end(trainer: _Trainer, label: str) -> None:
    """The trainer is dead by the kill, or was told of its flusher's death and ended."""
    deadline = time.monotonic() + ENDS_WITHIN_S
    while True:
        pid, status = os.waitpid(trainer.pid, os.WNOHANG)
        if pid:
            break
        if time.monotonic() > deadline:
            raise Violation("hang", f"{label}: the trainer hangs: {trainer.heard[-4000:]}")
        trainer.listen(0.05)
    while trainer.listen(0):
        pass  # what it wrote before its end
    code = os.waitstatus_to_exitcode(status)
    if code not in (-signal.SIGKILL, _TOLD):
        raise Violation(
            "foreign error", f"{label}: the trainer ended with {code}: {trainer.heard[-4000:]}"
        )


def _wait_for_helpers(helpers: list[int], label: str) -> None:
    """No process is left behind for good."""
    if not wait_until_dead(helpers, ENDS_WITHIN_S):
        raise Violation("hang", f"{label}: orphans live on: {helpers}")


def _newest(folder: Path) -> int:
    if not folder.exists():
        return -1
    newest = Run.open(DirectoryStore(folder)).newest()
    return -1 if newest is None else newest.step


def _judge(folder: Path, trainer: _Trainer, label: str) -> None:
    """Open the run as a stranger would and look at its newest checkpoint."""
    run = Run.open(DirectoryStore(folder))
    newest = run.newest()
    if newest is None or newest.step < trainer.last("committed"):
        found = None if newest is None else newest.step
        raise Violation(
            "wrong", f"{label}: step {trainer.last('committed')} was committed, found {found}"
        )
    report = verify_checkpoint(run.store, newest.folder)
    if report.damage:
        raise Violation("wrong", f"{label}: {newest.folder} is damaged: {report.damage}")
    if any(item.commit is None for item in run.checkpoints()):
        raise Violation("wrong", f"{label}: a manifest cannot be read")
    live = state.new()
    laststep.load(str(folder / newest.folder), into=live)
    wrong = state.wrong(live, newest.step)
    if wrong:
        raise Violation("wrong", f"{label}: {newest.folder} is not the state of its step: {wrong}")
