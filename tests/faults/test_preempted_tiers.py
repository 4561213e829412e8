"""Jobs that are told to end, with several tiers: the report says exactly which of them have it."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any

import pytest
from preemptions import steps
from rank_jobs import wait_for_end

from cases import long
from laststep.memory import segments
from waiting import is_flusher, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from preemptions import Ranks, Told


class Tiers:
    """Shared memory, a primary and a replica, each of which finishes files once it is open."""

    def __init__(self, folder: Path) -> None:
        self.base, self.primary, self.far = folder / "shm", folder / "primary", folder / "far"
        self.base.mkdir(parents=True)

    def request(self, **settings: Any) -> dict[str, Any]:
        tiers = [f"shm://{self.base}", f"gated://{self.primary}", f"gated://{self.far}"]
        how = {"flush": "process", "every": 1000, **settings}
        return {"tiers": tiers, "settings": how, "phase": "training", "tells_saves": True}

    def open(self, place: Path) -> None:
        place.with_suffix(".open").touch()

    def names(self, *tiers: str) -> list[str]:
        """As reports name them."""
        urls = {"primary": f"gated://{self.primary}", "far": f"gated://{self.far}"}
        return [urls.get(tier, tier) for tier in tiers]


@pytest.fixture
def tiers(run_folder: Path) -> Tiers:
    return Tiers(run_folder)


IN_MEMORY = ("holds", "shm://")
COMMITTED = ("committed",)


def end_by_signal(trainer: Told, *grace_ends_when: str) -> dict[str, Any]:
    """Send the signal and return the report, once the process has ended. Its grace ends when it
    says these words, if any."""
    flusher = trainer.hear("ready")[1]
    trainer.process.flushers += [] if flusher == "None" else [int(flusher)]
    trainer.hear("at")
    trainer.send()
    if grace_ends_when:
        trainer.hear(*grace_ends_when)
        trainer.end_grace()
    report = trainer.report()
    trainer.hear("unwound")
    trainer.end()
    return report


def kill_flushers(trainer: Told) -> None:
    for pid in filter(is_flusher, trainer.process.flushers):
        os.kill(pid, signal.SIGKILL)
        wait_for_end(pid)


@pytest.mark.parametrize("flush", ["process", *long("thread")])
def test_where_the_home_is_too_slow_memory_has_it_and_gives_it_back(
    told: Callable[..., Told], tiers: Tiers, flush: str
) -> None:
    trainer = told(**tiers.request(flush=flush))
    report = end_by_signal(trainer, *IN_MEMORY)
    assert (report["tiers"], report["committed"]) == (["shm://"], False)
    assert report["problem"]
    assert steps(tiers.primary) == []
    said = trainer.process.log.read_text()
    assert f"[{report['step']}]" in said
    assert f"`laststep recover gated://{tiers.primary} --base {tiers.base}`" in said
    kill_flushers(trainer)
    for place in (tiers.primary, tiers.far):
        tiers.open(place)
    assert end_by_signal(told(**tiers.request()))["step"] == report["step"] + 1
    assert steps(tiers.primary) == [report["step"], report["step"] + 1]
    assert segments.found(str(tiers.base)) == []


@pytest.mark.parametrize(("flush", "is_drained"), [("process", False), ("thread", True)])
def test_a_preempted_job_frees_its_memory_though_nobody_calls_close(
    told: Callable[..., Told], tiers: Tiers, flush: str, *, is_drained: bool
) -> None:
    tiers.open(tiers.primary)
    if is_drained:
        tiers.open(tiers.far)
    request = {"bare": True, "preemption": {"grace": "60 s" if is_drained else "2 s"}}
    trainer = told(**request, **tiers.request(flush=flush))
    assert end_by_signal(trainer)["committed"]
    assert segments.found(str(tiers.base)) == []


def test_a_loop_that_asks_whether_it_is_preempted_frees_its_memory_without_close(
    told: Callable[..., Told], tiers: Tiers
) -> None:
    for place in (tiers.primary, tiers.far):
        tiers.open(place)
    trainer = told(bare=True, own=False, **tiers.request(flush="thread", every=None))
    trainer.hear("at")
    trainer.send()
    trainer.hear("stops")
    trainer.end(0)
    assert steps(tiers.primary) == [0]
    assert segments.found(str(tiers.base)) == []


def test_what_memory_alone_has_the_flusher_goes_on_to_commit_and_to_drain(
    told: Callable[..., Told], tiers: Tiers
) -> None:
    trainer = told(**tiers.request())
    report = end_by_signal(trainer, *IN_MEMORY)
    assert report["tiers"] == ["shm://"]
    tiers.open(tiers.primary)
    wait_until(lambda: steps(tiers.primary) == [0])
    tiers.open(tiers.far)
    wait_until(lambda: steps(tiers.far) == [0])


@pytest.mark.parametrize("flush", ["process", "thread"])
def test_a_further_tier_that_never_ends_costs_the_grace_and_no_more(
    told: Callable[..., Told], tiers: Tiers, flush: str
) -> None:
    tiers.open(tiers.primary)
    report = end_by_signal(told(**tiers.request(flush=flush)), *COMMITTED)
    assert report["tiers"] == tiers.names("shm://", "primary")
    assert (report["committed"], report["problem"]) == (True, "")
    assert (steps(tiers.primary), steps(tiers.far)) == ([0], [])


def test_the_next_start_waits_for_no_flusher_that_only_drains(
    told: Callable[..., Told], tiers: Tiers
) -> None:
    tiers.open(tiers.primary)
    trainer = told(**tiers.request())
    assert end_by_signal(trainer, *COMMITTED)["committed"]
    again = told(**tiers.request())
    assert again.hear("ready")[0] == "1"
    again.hear("at", "training")
    tiers.open(tiers.far)
    wait_until(lambda: steps(tiers.far) == [0])
    (pid,) = trainer.process.flushers
    wait_for_end(pid)


def test_within_the_grace_all_tiers_get_it_and_nothing_stays_in_memory(
    told: Callable[..., Told], tiers: Tiers
) -> None:
    """Also one that would get each hundredth save, or the first, and no other."""
    for place in (tiers.primary, tiers.far):
        tiers.open(place)
    request = {**tiers.request(every=1), "phase": "idle", "far_every": 100}
    trainer = told(**request)
    report = end_by_signal(trainer)
    assert report["step"] > 0
    assert report["tiers"] == tiers.names("shm://", "primary", "far")
    assert steps(tiers.primary)[-1] == steps(tiers.far)[-1] == report["step"]
    assert segments.found(str(tiers.base)) == []


@pytest.mark.parametrize("full", ["primary", *long("far")])
def test_a_tier_that_fails_at_once_is_waited_for_no_longer(
    told: Callable[..., Told], tiers: Tiers, full: str
) -> None:
    """What is in memory alone stays there though the job ends in order."""
    if full == "far":
        tiers.open(tiers.primary)
    place = tiers.primary if full == "primary" else tiers.far
    place.with_suffix(".full").touch()
    report = end_by_signal(told(**tiers.request()))
    assert report["tiers"] == tiers.names("shm://", *(["primary"] if full == "far" else []))
    assert bool(report["problem"]) is (full == "primary")
    assert report["seconds"] < report["grace_s"]
    place.with_suffix(".full").unlink()
    tiers.open(tiers.primary)
    tiers.open(tiers.far)
    assert end_by_signal(told(**tiers.request()))["step"] == 1
    assert steps(tiers.primary) == [0, 1]
    assert segments.found(str(tiers.base)) == []


def test_ranks_say_that_memory_has_it_only_where_all_have_it_there(
    told_job: Callable[..., Ranks], tiers: Tiers
) -> None:
    request = {**tiers.request(), "phase": ""}
    job = told_job(2, **request)
    assert [report["tiers"] for report in end_ranks(job, IN_MEMORY, IN_MEMORY)] == [["shm://"]] * 2
    for rank in job.ranks:
        kill_flushers(rank)
    tiers.open(tiers.primary)  # or the next start waits there, with what memory has
    stands = {"phase": "seal", "until": "the end"}
    again = told_job(2, only={1: stands}, **request)
    reports = end_ranks(again, IN_MEMORY, ("at", "seal"))
    assert [report["tiers"] for report in reports] == [[], []]
    for rank in again.ranks:
        kill_flushers(rank)


def end_ranks(job: Ranks, *grace_ends_when: tuple[str, ...]) -> list[dict[str, Any]]:
    """Send one rank the signal and return the reports of all. The grace of all ends when each has
    said its words."""
    for rank in job.ranks:
        rank.process.flushers.append(int(rank.hear("ready")[1]))
    job.go()
    job.ranks[1].send()
    for rank, words in zip(job.ranks, grace_ends_when, strict=True):
        rank.hear(*words)
    for rank in job.ranks:
        rank.end_grace()
    reports = [rank.report() for rank in job.ranks]
    for rank in job.ranks:
        rank.end()
    return reports
