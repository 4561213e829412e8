"""The fence: every errand once, whichever threads step, and nothing of it in a forked child."""

from __future__ import annotations

import contextlib
import os
import threading
from typing import TYPE_CHECKING

import torch
from torch import nn

from laststep.capture.fence import Fence
from waiting import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Iterator


class Endless:
    """A capture that never ends."""

    over = threading.Event()

    def hold_back(self) -> None:
        self.over.wait()


def stepper() -> torch.optim.Optimizer:
    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.ones(1)
    return torch.optim.SGD([parameter], lr=0.1)


def test_an_optimizer_step_in_a_forked_child_does_not_wait_for_captures_of_the_parent() -> None:
    fence, optimizer = Fence(), stepper()
    fence.add(Endless())  # type: ignore[arg-type]
    try:
        pid = os.fork()
        if pid == 0:
            stepping = threading.Thread(target=optimizer.step, daemon=True)
            stepping.start()
            stepping.join(PATIENCE_S / 3)
            os._exit(1 if stepping.is_alive() else 0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    finally:
        fence.close()


def test_errands_do_not_run_twice_when_two_threads_step_at_once() -> None:
    """As with optimizers that step inside of backward on several devices."""
    fence, optimizers = Fence(), [stepper(), stepper()]
    ran: list[str] = []
    both = threading.Barrier(2)

    class SyncPoint:
        """A number that lets the other thread look at the errands too before it is compared."""

        def __le__(self, other: int) -> bool:
            with contextlib.suppress(threading.BrokenBarrierError):
                both.wait(0.5)
            return other >= 1

        def __gt__(self, other: int) -> bool:
            return other < 1

    fence.at_step(SyncPoint(), lambda: ran.append("once") is None)  # type: ignore[arg-type]
    try:
        threads = [threading.Thread(target=one.step) for one in optimizers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
    finally:
        fence.close()
    assert ran == ["once"]


def test_an_errand_that_could_not_be_done_is_tried_again_at_a_later_step() -> None:
    fence, optimizer = Fence(), stepper()
    answers: Iterator[bool] = iter([False, False, True])
    tried: list[int] = []
    steps = 0

    def errand() -> bool:
        tried.append(steps)
        return next(answers)

    fence.at_step(1, errand)
    try:
        for steps in range(1, 12):  # noqa: B007 (the errand looks at it)
            optimizer.step()
    finally:
        fence.close()
    assert tried == [1, 2, 4]
