"""A flusher whose trainer is dead, or whose run is another's: what it leaves alone."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import torch

import laststep
from expect import raises, warned
from laststep.catalog.run import Run
from laststep.catalog.terms import Seen, new_start
from laststep.flush import listeners
from laststep.flush import server as serving
from laststep.flush.protocol import Begin, Connection, Continue, Ended, Instruct, Orders, in_trainer
from laststep.storage.directory import DirectoryStore
from waiting import PATIENCE_S, wait_until

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_no_epoch_is_claimed_for_a_dead_trainer_of_several_ranks(run_folder: Path) -> None:
    with subprocess.Popen([sys.executable, "-S", "-c", ""]) as trainer:
        pidfd = os.pidfd_open(trainer.pid)
    ours, theirs = socket.socketpair()
    dead = Connection(ours)
    dead.send(Instruct(continues=Continue(seen=Seen())))
    dead.send(Begin(save=1, step=1, overwrite=False, files=(), role="first"))
    flusher = serving.Flusher(
        Connection(theirs, peer=pidfd),
        memoryview(b""),
        serving.Setup(run=str(run_folder), trainer=new_start(), orders=Orders(writers=1)),
    )
    flusher.serve()
    os.close(pidfd)
    assert Run.open_or_create(DirectoryStore(run_folder)).newest_point() == Seen()
    while not isinstance(said := dead.receive(in_trainer), Ended):
        assert said is not None
    assert said.kind == "AbortedError"
    dead.close()


def test_retention_of_a_writer_that_was_taken_over_deletes_nothing(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plan_prune = listeners.plan_prune

    def overtaken(run: Run, *arguments: object, **more: object) -> object:
        plan = plan_prune(run, *arguments, **more)
        if plan.deletions:
            # Another start has restored step 1, and begins to save just now.
            assert plan.deletions == ("step-00000001.1-1",)
            run.claim_term((1, 1), writer=new_start())
        return plan

    state = {"t": torch.zeros(5)}
    keep = laststep.Keep(last=1)
    monkeypatch.setattr(listeners, "plan_prune", overtaken)
    with laststep.Checkpointer(
        run_folder, state=state, keep=keep, options=laststep.Options(flush="thread")
    ) as checkpointer:
        checkpointer.save(1).wait(PATIENCE_S)
        checkpointer.save(2).wait(PATIENCE_S)
    assert laststep.open(run_folder).steps() == [1, 2]
    assert warned(caplog, run_folder)


def test_a_save_that_was_begun_before_the_run_was_taken_over_is_not_committed(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = serving.SaveWriter.finish

    def overtaken(flush: serving.SaveWriter, *arguments: object) -> object:
        records = finish(flush, *arguments)
        Run.open(DirectoryStore(run_folder)).claim_term((1, 1), writer=new_start())
        return records

    state = {"t": torch.zeros(5)}
    checkpointer = laststep.Checkpointer(
        run_folder, state=state, options=laststep.Options(flush="thread")
    )
    checkpointer.save(1).wait(PATIENCE_S)
    monkeypatch.setattr(serving.SaveWriter, "finish", overtaken)
    with raises(laststep.AbortedError, step=2, where=run_folder, found=f"process {os.getpid()}"):
        checkpointer.save(2).wait(PATIENCE_S)
    checkpointer.close()
    assert [one.step for one in laststep.open(run_folder)] == [1]


def test_a_job_that_missed_a_save_restores_again_before_it_takes_over(run_folder: Path) -> None:
    keep = laststep.Keep(last=1)
    first, second = (
        laststep.Checkpointer(
            run_folder,
            state={"t": torch.zeros(5)},
            keep=keep,
            options=laststep.Options(flush="thread"),
        )
        for _ in range(2)
    )
    first.save(1).wait(PATIENCE_S)
    assert second.restore().step == 1
    first.save(2).wait(PATIENCE_S)
    with raises(laststep.AbortedError, step=2, where=run_folder, found="step-00000002.1-2"):
        second.save(2).wait(PATIENCE_S)
    assert laststep.open(run_folder).steps()[-1] == 2
    assert second.restore().step == 2
    second.save(3).wait(PATIENCE_S)
    with raises(laststep.AbortedError, step=3, where=run_folder, found=f"process {os.getpid()}"):
        first.save(3).wait(PATIENCE_S)
    first.close()
    second.close()
    assert laststep.open(run_folder).steps() == [2, 3]


def test_retention_does_not_take_what_was_resumed_from_meanwhile(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan_prune = listeners.plan_prune
    planned, resumed = threading.Event(), threading.Event()

    def late(run: Run, *arguments: object, **more: object) -> object:
        plan = plan_prune(run, *arguments, **more)
        if plan.deletions:
            planned.set()
            assert resumed.wait(PATIENCE_S)
        return plan

    monkeypatch.setattr(listeners, "plan_prune", late)
    state, keep = {"t": torch.zeros(5)}, laststep.Keep(last=1)
    with laststep.Checkpointer(
        run_folder, state=state, keep=keep, options=laststep.Options(flush="thread")
    ) as checkpointer:
        checkpointer.save(1).wait(PATIENCE_S)
        checkpointer.save(2).wait(PATIENCE_S)
        assert planned.wait(PATIENCE_S)
        assert checkpointer.restore(1).step == 1
        checkpointer.save(7)
        wait_until(lambda: any(run_folder.glob("step-00000007*")))  # the flusher hears in order
        resumed.set()
    assert 1 in laststep.open(run_folder).steps()
