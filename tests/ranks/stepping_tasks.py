"""Ranks that call step(): which steps each has saved."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from tasks import PATIENCE_S

import laststep


def opened(run: str, state: dict[str, object], every: object) -> laststep.Checkpointer:
    made = laststep.Checkpointer(
        run,
        state=state,
        options=laststep.Options(
            progress=False,
            deadline_s=PATIENCE_S,
            flush="thread",
            mtbf="0.2 s" if every == "auto" else None,
            most_share=0.9,
        ),
        every=every,
    )
    # Clocks of ranks differ, in what they show and in how fast they go.
    rank = dist.get_rank()
    made._schedule._clock = lambda: 1e5 * rank + (1 + rank) * time.monotonic()
    return made


def train(
    c: laststep.Checkpointer, state: dict[str, object], first: int, last: int, *, slow: int
) -> list[int]:
    """The steps that this rank has saved; ranks do nothing together, and one of them is slow."""
    saved = []
    for step in range(first, last + 1):
        time.sleep(0.004 if dist.get_rank() == slow else 0.001)
        state["w"].fill_(step)  # type: ignore[attr-defined]
        if c.step(step, last=step == last) is not None:
            saved.append(step)
    return saved


def step_alike(run: str, every: object, slow: int) -> tuple[list[int], list[int]]:
    """Train, go back, and train again; the steps that this rank saved, each time."""
    state = {"w": torch.zeros(1000)}
    with opened(run, state, every) as c:
        before = train(c, state, 0, 150, slow=slow)
        c.restore(before[0])
        assert state["w"].unique().tolist() == [before[0]]
        after = train(c, state, before[0] + 1, 120, slow=slow)
    return before, after


def step_without_the_first(run: str) -> tuple[str, int, int]:
    """The first rank is late for longer than the others have patience. What a rank heard, and at
    which sync point it is afterwards."""
    with laststep.Checkpointer(
        run,
        state={"w": torch.zeros(3)},
        options=laststep.Options(progress=False, deadline_s=PATIENCE_S, flush="thread"),
        every="10 min",
    ) as c:
        c.step(0)
        said = ""
        if dist.get_rank() > 0:
            c.step(1)  # what is done here the first rank has said one step ahead
            notes = c._schedule._notes
            notes._deadline_s = 0.5  # here alone: in other steps ranks are just slow
            try:
                c.step(2)
            except laststep.AbortedError as error:
                said = str(error)
            notes._deadline_s = PATIENCE_S
        dist.barrier()
        if dist.get_rank() == 0:
            c.step(1)
            c.step(2)
        for step in range(3, 30):
            dist.barrier()
            c.step(step)
        return said, c._schedule._number, c._schedule._at
