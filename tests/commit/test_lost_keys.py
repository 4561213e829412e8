"""Whatever note is lost, of agreeing or of a round, the save that met it ends on all ranks with a
true and short message, and the next save works.

A note is lost where the store of the ranks does not answer for a while. Each is lost here, one in
each job, in each way (`simulated.Loss`), and the ranks come to both saves in several orders.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest
from simulated import GONE, Loss

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from _pytest.mark import ParameterSet
    from simulated import SimulatedJob

    Simulate = Callable[..., SimulatedJob]

SHORT = 300
"""Characters: a message that tells what another told of a third is longer."""

ORDERS = {"together": (), "the first one first": (0,), "the first one last": (1, 2, 3)}
"""Who begins a second before the others."""


def in_some_order(*several: Iterable[object]) -> list[ParameterSet]:
    """All combinations of these, each in one of the orders; in the long run in every order."""
    return [
        pytest.param(*one, early, marks=() if at % len(ORDERS) == turn else pytest.mark.long)
        for at, one in enumerate(itertools.product(*several))
        for turn, early in enumerate(ORDERS.values())
    ]


def started(simulate: Simulate, ranks: int, *, changing: bool) -> SimulatedJob:
    """A job, in groups of two, whose ranks have to agree: at their first save, or anew."""
    job = simulate(ranks, group=2)
    if changing:
        assert set(job.save(1)) == {""}
        for rank in job.ranks:
            rank.tensors.append(f"of {rank.number % 2}")
    return job


def lose(job: SimulatedJob, number: int, nth: int, loss: Loss) -> list[str]:
    """Have the n-th note that this rank leaves from now on be lost; then the list has its name."""
    lost: list[str] = []
    count = itertools.count()

    def loses(name: str) -> Loss | None:
        if next(count) != nth:
            return None
        lost.append(name)
        return loss

    job.ranks[number].kv.loses = loses
    return lost


def save(job: SimulatedJob, step: int, early: tuple[int, ...]) -> list[str]:
    """All ranks save, these a second before the others; returns what each hears in the end."""
    numbers = range(len(job.ranks))
    if early:
        job.begin(step, *(number for number in numbers if number in early))
        job.clock.pass_s(1)
    job.begin(step, *(number for number in numbers if number not in early))
    return [rank.outcome() for rank in job.ranks]


def check(job: SimulatedJob, step: int, told: list[str], *causes: str, case: object) -> None:
    """That save ended alike on all ranks, with short messages, of which one tells the cause."""
    committed = step in job.committed()
    assert [said == "" for said in told] == [committed] * len(told), (case, told)
    assert all(len(said) < SHORT for said in told), (case, told)
    assert committed or any(cause in said for said in told for cause in causes), (case, told)


@pytest.mark.parametrize(
    ("changing", "number", "loss", "early"), in_some_order([False, True], range(4), Loss), ids=str
)
def test_the_save_after_one_that_lost_a_note_works(
    changing: bool, number: int, loss: Loss, early: tuple[int, ...], simulate: Simulate
) -> None:
    kinds = set()
    for nth in itertools.count():
        job = started(simulate, 4, changing=changing)
        lost = lose(job, number, nth, loss)
        told = save(job, 2, early)
        if not lost:
            break
        kinds.add(lost[0].split("/")[0])
        check(job, 2, told, GONE, case=lost)
        assert save(job, 3, early) == [""] * 4, (lost, told)
    assert told == [""] * 4
    # In which order a rank leaves its notes depends on its threads: one kind may be passed over.
    every = {"a", "s", "last"} | ({"now", "t"} if number == 0 else set())
    assert len(every - kinds) <= 1, kinds


@pytest.mark.parametrize(
    ("cut_off", "changing", "away_s", "early"),
    in_some_order([(0, 1), (0,), (1,)], [False, True], [40, 100]),
    ids=str,
)
def test_the_save_after_the_store_was_away_works(
    cut_off: tuple[int, ...],
    changing: bool,
    away_s: float,
    early: tuple[int, ...],
    simulate: Simulate,
) -> None:
    """For longer than everybody waits, or for much longer, from each question on that is asked."""
    for nth in itertools.count():
        job = started(simulate, 2, changing=changing)
        count, back_s = itertools.count(), [0.0]

        def reaches(job: SimulatedJob = job, count=count, back_s=back_s, nth: int = nth) -> bool:
            if next(count) == nth:
                back_s[0] = job.clock.now_s + away_s
            return job.clock.now_s >= back_s[0]

        for number in cut_off:
            job.ranks[number].kv.reaches = reaches
        told = save(job, 2, early)
        if not back_s[0]:
            break
        check(job, 2, told, GONE, "within 30 s", case=nth)
        job.clock.pass_s(max(back_s[0] - job.clock.now_s, 0))
        assert save(job, 3, early) == ["", ""], (nth, told)
    assert told == ["", ""]
