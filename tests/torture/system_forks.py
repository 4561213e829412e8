"""Faults of forks and of threads beside the one that saves.

See `scene` for what each of these functions can rely on and what is judged after it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
import time
from typing import TYPE_CHECKING

import torch
from processes import children_of, wait_until_dead
from scene import PATIENCE_S
from system_faults import fault
from system_process import send

import laststep
import state

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from scene import Scene, Trainer

# Forks


def _fork_and_wait(trainer: Trainer, work: Callable[[], None], what: str) -> None:
    """A child of the trainer does something of its own; it must come to an end."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    if not wait_until_dead([pid], PATIENCE_S):
        os.kill(pid, signal.SIGKILL)
        trainer.say("hang", f"a forked child that does no more than {what} hangs")
    _, status = os.waitpid(pid, 0)
    if status != 0:
        trainer.say("flaw", f"a forked child that does no more than {what} ends with {status}")


def _save_elsewhere(run: Path) -> None:
    """In a forked child: a run of its own, twice."""
    live = state.new()
    with laststep.Checkpointer(
        str(run), options=laststep.Options(progress=False, flush="thread"), **live
    ) as checkpointer:
        for step in range(3):
            state.advance(live, step)
            checkpointer.save(step).wait(PATIENCE_S)
        if checkpointer.restore().step != 2 or state.wrong(live, 2):
            raise ValueError("the child's own run is wrong")


def _refused(trainer: Trainer) -> None:
    """In a forked child: the parent's Checkpointer refuses to work there."""
    try:
        trainer.checkpointer.save(1)
    except laststep.UsageError:
        return
    raise ValueError("a forked child could save with its parent's Checkpointer")


@fault("forks while saves are under way")
def forks(scene: Scene) -> None:
    elsewhere = scene.folder / "elsewhere"
    works = scene.chance.sample(range(4), 3)

    def body(trainer: Trainer) -> None:
        for work in works:
            trainer.save(2, wait=False)
            _fork_and_wait(
                trainer,
                *(
                    (lambda: None, "end"),
                    (lambda: _refused(trainer), "use its parent's Checkpointer"),
                    (lambda: torch.ones(100_000).add_(1), "add"),
                    (lambda: _save_elsewhere(elsewhere), "save elsewhere"),
                )[work],
            )
        trainer.settle()
        trainer.save()

    scene.work(body)


@fault("a fork while the flusher starts, and then the flusher killed")
def fork_at_start(scene: Scene) -> None:
    delay_s = scene.chance.choice((0.0, 0.01, 0.1))

    def body(trainer: Trainer) -> None:
        starting = threading.Thread(target=trainer.save, kwargs={"wait": False})
        starting.start()
        while not children_of(os.getpid()):
            time.sleep(0)
        helpers = children_of(os.getpid())
        time.sleep(delay_s)
        lingering = os.fork()
        if lingering == 0:
            time.sleep(PATIENCE_S)
            os._exit(0)
        starting.join()
        send(helpers, signal.SIGKILL)
        trainer.settle()
        trainer.save()
        os.kill(lingering, signal.SIGKILL)
        os.waitpid(lingering, 0)

    scene.work(body, flush="process")


@fault("a fork during a lazy capture, and a step of the child's optimizer")
def fork_while_lazy(scene: Scene) -> None:
    def body(trainer: Trainer) -> None:
        parameter = torch.nn.Parameter(torch.zeros(10))
        optimizer = torch.optim.SGD([parameter], lr=1.0)
        parameter.grad = torch.ones(10)
        for _ in range(3):
            optimizer.step()
            state.advance(trainer.live, trainer.step)
            trainer.say("saving", trainer.step)
            with trainer.told("save", trainer.step):
                trainer.handles.append(trainer.checkpointer.save(trainer.step))
            trainer.step += 1
            _fork_and_wait(trainer, optimizer.step, "step its optimizer")
            optimizer.step()
        trainer.settle()

    scene.work(body, capture="lazy")


# Threads


@fault("threads that hold the interpreter or allocate")
def busy_threads(scene: Scene) -> None:
    hold_us = scene.chance.choice((1000, 20_000, 100_000))

    def body(trainer: Trainer) -> None:
        over = threading.Event()

        def hold() -> None:
            while not over.is_set():
                ctypes.PyDLL(None).usleep(hold_us)  # a PyDLL keeps the interpreter's lock
                time.sleep(0.001)

        def allocate() -> None:
            while not over.is_set():
                torch.zeros(200_000)
                bytearray(1 << 20)

        threads = [threading.Thread(target=work) for work in (hold, allocate)]
        for thread in threads:
            thread.start()
        trainer.save(3)
        trainer.save(3, wait=False)
        trainer.settle()
        over.set()
        for thread in threads:
            thread.join()

    scene.work(body)


@fault("threads that save the same step")
def same_step(scene: Scene) -> None:
    def body(trainer: Trainer) -> None:
        for _ in range(4):
            step, trainer.step = trainer.step, trainer.step + 1
            state.advance(trainer.live, step)
            trainer.say("saving", step)
            done = _save_at_once(trainer.checkpointer, step, threads=3)
            with trainer.told("wait", -1):
                trainer.checkpointer.wait(PATIENCE_S)
            if done > 1:
                trainer.say("wrong", f"step {step} was committed {done} times without overwrite")
            if done:
                trainer.say("committed", step)

    scene.work(body)


def _save_at_once(checkpointer: laststep.Checkpointer, step: int, *, threads: int) -> int:
    """So many threads save the same step; how many of these were committed."""
    barrier = threading.Barrier(threads)
    handles: list[laststep.SaveHandle] = []

    def save() -> None:
        barrier.wait()
        with contextlib.suppress(laststep.LaststepError):
            handles.append(checkpointer.save(step))

    running = [threading.Thread(target=save) for _ in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    done = 0
    for handle in handles:
        with contextlib.suppress(laststep.LaststepError):
            done += handle.wait(PATIENCE_S)
    return done
