"""Ctrl-C in the midst of save(), and what must not stay behind when a save is over."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import sys
import threading
import time
import weakref
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

import laststep
from cases import long
from expect import raises, warned
from laststep.process import signals
from waiting import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType


@contextmanager
def interrupted_after(seconds: float) -> Iterator[None]:
    """A KeyboardInterrupt out of nowhere, as a person or a preemption handler would raise it."""

    def handler(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, handler)
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGUSR1))
    try:
        timer.start()
        yield
        timer.join()
        time.sleep(0)  # a signal that has come is handled by now
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, before)


class Tracer:
    """Counts the steps of a call on this thread, in laststep and in Python's own threading, and has
    a signal come at one of them."""

    FILES = ("laststep", "threading.py", "queue.py", "contextlib.py")

    def __init__(self, at: int | None = None) -> None:
        self._at = at
        self.steps = 0

    def __call__(self, frame: FrameType, event: str, arg: object) -> Tracer | None:
        if not any(name in frame.f_code.co_filename for name in self.FILES):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            self.steps += 1
            if self.steps == self._at:
                signal.raise_signal(signal.SIGUSR1)
        return self

    def run(self, call: Callable[[], object]) -> None:
        """An exception that a handler raises comes out of here, from where it was raised."""
        before = sys.gettrace()
        sys.settrace(self)
        try:
            call()
        finally:
            sys.settrace(before)


@pytest.fixture
def _raising() -> Iterator[None]:
    def handler(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, handler)
    yield
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.usefixtures("_raising")
@pytest.mark.parametrize(
    ("flush", "times"),
    [
        ("process", 80),
        ("thread", 80),
        pytest.param("process", 1000, marks=pytest.mark.long),
        pytest.param("thread", 250, marks=pytest.mark.long),
    ],
)
def test_a_save_may_be_interrupted_at_any_step(run_folder: Path, flush: str, times: int) -> None:
    """What it was not done with is absent, what is there is whole, and nothing is held up."""
    state = {f"t{i}": torch.zeros(1000) for i in range(4)}
    rng = random.Random(0)
    saved = [0]
    with laststep.Checkpointer(
        run_folder, items={"state": state}, options=laststep.Options(flush=flush)
    ) as checkpointer:

        def save(tracer: Tracer | None = None) -> laststep.SaveHandle | None:
            step = saved[-1] + 1
            saved.append(step)
            for tensor in state.values():
                tensor.fill_(step)
            try:
                if tracer is None:
                    return checkpointer.save(step)
                tracer.run(lambda: checkpointer.save(step))
            except KeyboardInterrupt:
                pass
            finally:
                for tensor in state.values():
                    tensor.fill_(-1)  # training goes on: nothing of this may be stored
            return None

        save()
        count = Tracer()
        save(count)
        assert count.steps > 1000
        whole = []
        for n in range(1, times + 1):
            save(Tracer(rng.randint(1, count.steps)))
            if n % 10 == 0:
                handle = save()
                assert handle is not None
                assert handle.wait(PATIENCE_S)
                whole.append(handle.step)
    catalog = laststep.open(run_folder)
    for checkpoint in catalog:
        for name in state:
            with checkpoint:
                stored = checkpoint.tensor(f"state/{name}")[:]
            assert torch.equal(stored, torch.full_like(stored, checkpoint.step))
    assert set(whole) <= set(catalog.steps())


@pytest.mark.parametrize("after_s", [0.005, *long(0.001, 0.02)])
def test_an_interrupted_restore_can_be_done_again(run_folder: Path, after_s: float) -> None:
    state = {f"t{i}": torch.full((2_250_000,), 7.0) for i in range(12)}
    with laststep.Checkpointer(run_folder, items={"state": state}) as checkpointer:
        checkpointer.save(1).wait(PATIENCE_S)
        for _ in range(5):
            for tensor in state.values():
                tensor.fill_(-1)
            with contextlib.suppress(KeyboardInterrupt), interrupted_after(after_s):
                checkpointer.restore()
            assert checkpointer.restore().step == 1
            assert all(bool((tensor == 7).all()) for tensor in state.values())
        assert checkpointer.save(2).wait(PATIENCE_S)


@pytest.mark.parametrize("waits", ["handle", "wait", "close", "restore"])
def test_waiting_for_a_save_can_be_interrupted(run_folder: Path, waits: str) -> None:
    go_on = threading.Event()

    def slow(event: laststep.events.Event) -> None:
        if isinstance(event, laststep.events.Captured):
            go_on.wait()

    checkpointer = laststep.Checkpointer(
        run_folder, x={"x": torch.ones(3)}, options=laststep.Options(subscribers=[slow])
    )
    handle = checkpointer.save(1)
    call = {
        "handle": handle.wait,
        "wait": checkpointer.wait,
        "close": checkpointer.close,
        "restore": checkpointer.restore,
    }[waits]
    with pytest.raises(KeyboardInterrupt), interrupted_after(0.1):
        call()
    go_on.set()
    assert handle.wait(PATIENCE_S)
    checkpointer.close()
    assert laststep.open(run_folder).steps() == [1]


@pytest.mark.usefixtures("_raising")
@pytest.mark.parametrize("closes_again", [True, False])
def test_a_close_that_was_interrupted_goes_on_where_it_was(
    run_folder: Path,
    caplog: pytest.LogCaptureFixture,
    flusher: Callable[[], int],
    *,
    closes_again: bool,
) -> None:
    state = {"t": torch.ones(3)}
    before = set(threading.enumerate())
    checkpointer = laststep.Checkpointer(run_folder, state=state)
    checkpointer.save(1).wait(PATIENCE_S)
    with laststep.Checkpointer(run_folder, state=state) as other:
        other.restore()
        other.save(2)
    checkpointer.save(3)  # fails, since the other one has taken over
    checkpointer._work.wait()
    pid = flusher()
    os.kill(pid, signal.SIGSTOP)  # so that close() waits for it
    interrupted = pytest.raises(KeyboardInterrupt)
    try:
        with interrupted, signals.defer_signals():  # let in where close() waits for the flusher
            signal.raise_signal(signal.SIGUSR1)
            checkpointer.close()
        with pytest.raises(laststep.UsageError):
            checkpointer.save(4)
    finally:
        os.kill(pid, signal.SIGCONT)
    if closes_again:
        with raises(laststep.LaststepError, step=3):
            checkpointer.close()
        checkpointer.close()  # which has told it
    else:
        checkpointer._work.finish_at_exit()
        assert warned(caplog, "step 3")
    assert set(threading.enumerate()) <= before
    assert not Path(f"/proc/{pid}").exists()


def test_a_handler_that_closes_in_the_midst_of_a_close_does_nothing(
    run_folder: Path, flusher: Callable[[], int]
) -> None:
    checkpointer = laststep.Checkpointer(run_folder, x={"x": torch.ones(3)})
    checkpointer.save(1).wait(PATIENCE_S)
    pid = flusher()

    def handler(*_: object) -> None:
        checkpointer.close()
        os.kill(pid, signal.SIGCONT)

    before = signal.signal(signal.SIGUSR1, handler)
    os.kill(pid, signal.SIGSTOP)
    try:
        with signals.defer_signals():
            signal.raise_signal(signal.SIGUSR1)  # let in where close() waits for the flusher
            checkpointer.close()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert laststep.open(run_folder).steps() == [1]


@pytest.mark.parametrize("call", ["close", "wait", "save", "restore"])
@pytest.mark.parametrize("outer", ["save", "restore"])
def test_a_handler_that_calls_in_the_midst_of_a_call_is_refused(
    run_folder: Path, outer: str, call: str
) -> None:
    """It could only wait for a call that waits for it. What it interrupted can be made again."""
    go_on = threading.Event()

    def slow(event: laststep.events.Event) -> None:
        if isinstance(event, laststep.events.Captured):
            go_on.wait()

    with laststep.Checkpointer(
        run_folder, x={"x": 1}, options=laststep.Options(subscribers=[slow])
    ) as checkpointer:
        calls: dict[str, Callable[[], object]] = {
            "close": checkpointer.close,
            "wait": checkpointer.wait,
            "save": lambda: checkpointer.save(2),
            "restore": checkpointer.restore,
        }
        before = signal.signal(signal.SIGUSR1, lambda *_: calls[call]())
        checkpointer.save(1)
        try:
            refused = raises(laststep.UsageError, call, f"{outer}()")
            with (
                refused,
                signals.defer_signals(),
            ):  # it comes before, and is let in where the call waits
                signal.raise_signal(signal.SIGUSR1)
                calls[outer]()
        finally:
            signal.signal(signal.SIGUSR1, before)
            go_on.set()
        assert checkpointer.save(3).wait(PATIENCE_S)
    assert laststep.open(run_folder).steps() == [1, 3]


def test_a_handler_may_close_when_a_save_has_returned(run_folder: Path) -> None:
    """One that comes while a save has no need to wait runs at its end."""
    checkpointer = laststep.Checkpointer(run_folder, x=Signalling())
    before = signal.signal(signal.SIGUSR1, lambda *_: checkpointer.close())
    try:
        assert checkpointer.save(1).committed.done()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert laststep.open(run_folder).steps() == [1]


class Signalling:
    """Gets a signal in the midst of a save."""

    def state_dict(self) -> dict[str, int]:
        signal.raise_signal(signal.SIGUSR1)
        return {"n": 1}

    def load_state_dict(self, state: dict[str, int]) -> None: ...


class Fresh:
    """Gives new tensors at every save, as some libraries do."""

    def __init__(self) -> None:
        self.given: list[weakref.ref[torch.Tensor]] = []

    def state_dict(self) -> dict[str, torch.Tensor]:
        tensor = torch.zeros(1000)
        self.given.append(weakref.ref(tensor))
        return {"x": tensor}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None: ...


def test_a_save_that_is_over_holds_no_tensors(run_folder: Path) -> None:
    owner = Fresh()
    with laststep.Checkpointer(
        run_folder, owner=owner, options=laststep.Options(flush="thread")
    ) as checkpointer:
        handles = [checkpointer.save(step) for step in range(4)]
        checkpointer.wait()
        checkpointer._capturer.settle()  # its thread has let go of them
        gc.collect()
        assert all(handle.report.committed_s for handle in handles)
        assert [ref() for ref in owner.given] == [None] * 4


def test_a_checkpointer_that_could_not_be_made_leaves_the_optimizer_alone(run_folder: Path) -> None:
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(laststep.UsageError, match="Keep"):
        laststep.Checkpointer(run_folder, model=model, optimizer=optimizer, keep=2)  # type: ignore[arg-type]
    for _ in range(5):
        model(torch.ones(3)).sum().backward()
        optimizer.step()
