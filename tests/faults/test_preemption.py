"""Jobs that are told to end, in every phase of a save: what is there then is what was reported."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest
from preemptions import GRACE, check, steps

from cases import long
from waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from preemptions import Ranks, Told


@pytest.mark.parametrize("grace", [*long("2 s", "5 s", "10 s"), GRACE])
@pytest.mark.parametrize(
    "phase",
    [
        "training",
        "capture",
        "commit",
        "restore",
        *long("idle", "seal", "flush", "durable", "retention"),
    ],
)
def test_the_last_step_is_committed_whenever_the_signal_comes(
    told: Callable[..., Told], run_folder: Path, phase: str, grace: str
) -> None:
    trainer = told(phase=phase, preemption={"grace": grace})
    trainer.hear("at", phase)
    trainer.send()
    report = trainer.report()
    assert trainer.hear("unwound") == ["True"]
    trainer.end()
    check(run_folder, report)
    assert report["cause"] == "SIGTERM"
    assert report["committed"] or grace != GRACE


def test_the_next_start_goes_on_after_it(told: Callable[..., Told]) -> None:
    first = told(phase="idle")
    first.hear("at", "idle")
    first.send()
    step = first.report()["step"]
    first.end()
    again = told(phase="training")
    assert again.hear("ready")[0] == str(step + 1)
    again.hear("at", "training")
    again.send()
    assert again.report()["step"] == step + 1
    again.end()


@pytest.mark.parametrize("name", ["SIGUSR1", *long("SIGINT")])
def test_other_signals_and_exit_codes_can_be_had(
    told: Callable[..., Told], run_folder: Path, name: str
) -> None:
    trainer = told(phase="training", preemption={"signals": [name], "exit_code": 9})
    trainer.hear("at", "training")
    trainer.send(name)
    report = trainer.report()
    trainer.end(9)
    check(run_folder, report)
    assert (report["cause"], report["committed"]) == (name, True)


def test_a_scheduler_that_signals_all_processes_of_the_job_leaves_the_flusher_to_it(
    told: Callable[..., Told], run_folder: Path
) -> None:
    trainer = told(phase="training", bare=True, settings={"flush": "process", "every": 1000})
    flusher = int(trainer.hear("ready")[1])
    trainer.process.flushers.append(flusher)
    trainer.hear("at", "training")
    os.kill(flusher, signal.SIGTERM)
    trainer.send()
    report = trainer.report()
    trainer.end()  # also without close()
    check(run_folder, report)
    assert report["committed"]


def test_an_earlier_handler_still_runs(told: Callable[..., Told]) -> None:
    trainer = told(phase="training", handlers=["SIGTERM"])
    trainer.hear("at", "training")
    trainer.send()
    assert trainer.report()["committed"]
    assert ["handler", str(int(signal.SIGTERM))] in trainer.said
    trainer.end()


@pytest.mark.long
def test_signals_that_a_launcher_passes_on_as_well_are_one(told: Callable[..., Told]) -> None:
    trainer = told(phase="commit", same_s=60.0)
    trainer.hear("at", "commit")
    trainer.send()
    trainer.send()
    assert trainer.report()["committed"]
    trainer.end()


def test_a_second_signal_ends_it_at_once(told: Callable[..., Told], run_folder: Path) -> None:
    trainer = told(phase="commit", until="the end", same_s=0.0)
    trainer.hear("at", "commit")
    trainer.send()
    wait_until(lambda: "SIGTERM" in trainer.process.log.read_text())
    trainer.send()
    trainer.end(-signal.SIGTERM)
    assert steps(run_folder) == []


@pytest.mark.parametrize("phase", ["flush", *long("commit")])
def test_the_grace_ends_it_though_a_save_never_ends(
    told: Callable[..., Told], run_folder: Path, phase: str
) -> None:
    trainer = told(
        phase=phase, until="the end", preemption={"grace": "0.3 s"}, settings={"writers": 1}
    )  # of several threads that write, that of a later save may come first
    trainer.hear("at", phase)
    trainer.send()
    report = trainer.report()
    trainer.hear("unwound")
    trainer.end()
    assert report["problem"]
    assert steps(run_folder) == []


def test_the_grace_ends_it_though_there_is_no_room_for_the_last_save(
    told: Callable[..., Told], run_folder: Path
) -> None:
    """The pool is full of saves that never end, and the next one waits inside of save()."""
    trainer = told(
        phase="flush",
        until="the end",
        preemption={"grace": "0.3 s"},
        size=12 << 20,
        settings={"writers": 1},
    )
    trainer.hear("at", "flush")
    trainer.send()
    report = trainer.report()
    trainer.end()
    assert not report["committed"]
    assert steps(run_folder) == []


def test_what_the_grace_did_not_suffice_for_the_flusher_still_commits(
    told: Callable[..., Told], run_folder: Path
) -> None:
    trainer = told(phase="training", tells_saves=True, settings={"flush": "process", "every": 1000})
    _, flusher = trainer.hear("ready")
    trainer.process.flushers.append(int(flusher))
    trainer.hear("at", "training")
    os.kill(int(flusher), signal.SIGSTOP)
    trainer.send()
    trainer.hear("captured")
    trainer.end_grace()
    report = trainer.report()
    trainer.end()
    assert not report["committed"]
    os.kill(int(flusher), signal.SIGTERM)  # as a scheduler may
    os.kill(int(flusher), signal.SIGCONT)
    wait_until(lambda: steps(run_folder) == [0])


def test_saves_that_wait_behind_others_do_not_eat_the_grace(
    told: Callable[..., Told], run_folder: Path
) -> None:
    trainer = told(phase="flush", until="called off", step_s=0.1, settings={"writers": 1})
    trainer.hear("at", "flush")
    if ["steps"] not in trainer.said:  # another thread says the first
        trainer.hear("steps")
    trainer.send()
    report = trainer.report()
    trainer.end()
    check(run_folder, report)
    assert report["committed"]
    assert steps(run_folder) == [1, report["step"]]


@pytest.mark.parametrize("saves", [True, *long(False)])
def test_a_loop_that_saves_and_ends_by_itself_is_told(
    told: Callable[..., Told], run_folder: Path, saves: bool
) -> None:
    trainer = told(phase="training", own=saves, settings={"every": None})
    trainer.hear("at", "training")
    trainer.send()
    assert trainer.hear("stops") == ["0", "True"]
    trainer.hear("closed")
    trainer.end(0)
    assert steps(run_folder) == [0]


def test_a_loop_may_end_by_itself_after_step_has_saved(
    told: Callable[..., Told], run_folder: Path
) -> None:
    trainer = told(phase="idle", preemption={"exit_code": None}, settings={"every": None})
    trainer.hear("at", "idle")
    trainer.send()
    report = trainer.report()
    assert trainer.hear("stops") == [str(report["step"])]
    trainer.hear("closed")
    trainer.end(0)
    check(run_folder, report)
    assert report["committed"]


@pytest.mark.parametrize(
    ("who", "every", "together"),
    [
        ((3,), "0.05 s", False),
        ((0, 1, 2, 3), 10, True),
        *long(((2,), 10, False), ((0,), None, False), ((1,), None, True), ((2,), "auto", True)),
    ],
)
def test_all_ranks_stop_at_one_step_whoever_was_told(
    told_job: Callable[..., Ranks],
    run_folder: Path,
    who: tuple[int, ...],
    every: object,
    together: bool,
) -> None:
    """Also where each step is one of all ranks, so that nobody gets ahead of one that waits."""
    slow = {1: {"step_s": 0.02}}
    job = told_job(4, settings={"every": every}, only=slow, together=together)
    job.go()
    for rank in who:
        job.ranks[rank].send()
    reports = [rank.report() for rank in job.ranks]
    for rank in job.ranks:
        rank.end()
    assert len({report["step"] for report in reports}) == 1
    assert [report["committed"] for report in reports] == [True] * 4
    for number, report in enumerate(reports):
        causes = [f"rank {rank}: SIGTERM" for rank in who]  # its own may come after another's word
        assert report["cause"] in ([*causes, "SIGTERM"] if number in who else causes)
    check(run_folder, reports[0])


def test_ranks_of_a_loop_that_only_saves_stop_after_one_save(
    told_job: Callable[..., Ranks], run_folder: Path
) -> None:
    job = told_job(2, own=True, settings={"every": None})
    job.go()
    job.ranks[1].send()
    stopped = [rank.hear("stops") for rank in job.ranks]
    for rank in job.ranks:
        rank.end(0)
    assert stopped[0] == stopped[1]
    assert steps(run_folder)[-1] == int(stopped[0][0])


@pytest.mark.parametrize("dead", [1, *long(0)])
def test_a_rank_that_never_comes_costs_the_others_the_grace_and_no_more(
    told_job: Callable[..., Ranks], run_folder: Path, dead: int
) -> None:
    job = told_job(3, preemption={"grace": "1 s"}, settings={"every": 1000})
    job.go()
    job.ranks[dead].process.kill()
    alive = [rank for number, rank in enumerate(job.ranks) if number != dead]
    alive[0].send()
    for rank in alive:
        report = rank.report()
        rank.end()
        assert not report["committed"]
        assert report["problem"], report


def test_a_save_that_one_rank_never_finishes_costs_all_the_grace_and_no_more(
    told_job: Callable[..., Ranks], run_folder: Path
) -> None:
    stands = {"phase": "durable", "until": "the end"}
    job = told_job(2, preemption={"grace": "1 s"}, settings={"every": 1000}, only={1: stands})
    job.go()
    job.ranks[0].send()
    for rank in job.ranks:
        report = rank.report()
        rank.end()
        assert (report["committed"], bool(report["problem"])) == (False, True)
    assert steps(run_folder) == []
