"""When step() saves, by a clock of the tests' own: one rank, and several that must decide alike."""

from __future__ import annotations

import contextlib
import gc
import itertools
import random
import weakref
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expect import names, raises, warned
from laststep.catalog.instances import Past
from laststep.errors import AbortedError, StorageError, UsageError
from laststep.plan.frequency import APART, Bound
from laststep.ranks.group import Rank
from laststep.saving import schedule as scheduling
from laststep.saving.schedule import Schedule, SharedNotes
from laststep.settings import Settings
from saves_of import commit, lone_save

if TYPE_CHECKING:
    from collections.abc import Callable

    from laststep.flush.saves import Save, SaveHandle

HOUR = 3600.0


class Job:
    """A training of one rank, as its schedule sees it: time passes only here."""

    def __init__(
        self,
        step_s: float = 0.1,
        *,
        stall_s: float = 0.005,
        slower_s: float = 0.0,
        latency_s: float = 2.0,
        past: Past | None = None,
        notes: Callable[[], scheduling.Notes] = scheduling.Notes,
        ranks: int = 1,
        is_first: bool = True,
        now_s: float = 1000.0,
        **settings: object,
    ) -> None:
        self.now_s = now_s
        self.step_s, self.stall_s, self.slower_s = step_s, stall_s, slower_s
        self.latency_s = latency_s
        self.asked = 0
        self.step = -1
        self.saves: list[tuple[int, float]] = []
        self.handles: list[SaveHandle] = []
        self.failing = False
        self._past = past or Past()
        self.meet = notes
        self._under_way: list[tuple[Save, float]] = []
        self.schedule = Schedule(
            Settings(**settings),
            Rank(0 if is_first else 1, ranks),
            self._ask,
            clock=lambda: self.now_s,
        )

    def _ask(self) -> Past:
        self.asked += 1
        return self._past

    def due(self, step: int | None = None, *, last: bool = False) -> bool:
        return self.schedule.due(self.step if step is None else step, self.meet, last=last)

    def train(self) -> None:
        """An iteration, without a call."""
        self.now_s += self.step_s + (self.slower_s if self._under_way else 0.0)
        for save, until_s in list(self._under_way):
            if self.now_s >= until_s:
                self._under_way.remove((save, until_s))
                if self.failing:
                    save.fail(StorageError("the disk is full"))
                else:
                    commit(save)
                    save.report.committed_s = save.report.durable_s = self.latency_s
        self.step += 1

    def save(self) -> SaveHandle:
        """As a Checkpointer does."""
        save = lone_save(self.step)
        handle = save.handle
        save.report.written_bytes = save.report.size_bytes = 1000
        save.report.stall_s = self.stall_s
        self.schedule.began(handle)
        self.saves.append((self.step, self.now_s))
        self.handles.append(handle)
        self.now_s += self.stall_s
        self._under_way.append((save, self.now_s - self.stall_s + self.latency_s))
        return handle

    def go(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.train()
            if self.due():
                self.save()

    def gaps(self, first: int = 0) -> list[float]:
        times = [at for _, at in self.saves[first:]]
        return [later - earlier for earlier, later in itertools.pairwise(times)]


def test_saves_are_as_far_apart_as_loses_least() -> None:
    job = Job(every="auto", mtbf="6 h")
    job.go(20_000)
    wanted = (2 * 0.005 * 6 * HOUR) ** 0.5
    assert len(job.saves) > 100
    for gap in job.gaps(1):
        assert wanted - 0.01 <= gap <= wanted + 0.2  # within two steps
    estimate = job.schedule.estimate
    assert estimate is not None
    assert estimate.bound is Bound.LEAST
    assert estimate.interval_s == pytest.approx(wanted)
    assert (estimate.cost_s, estimate.latency_s) == (0.005, 2.0)
    assert (estimate.mtbf_s, estimate.mtbf_from) == (6 * HOUR, "given")


def test_the_first_save_comes_after_a_few_steps() -> None:
    job = Job(every="auto")
    job.go(100)
    assert 8 <= job.saves[0][0] <= 16


@pytest.mark.parametrize("step_s", [20.0, 100.0, 1000.0])
def test_the_first_save_of_long_steps_comes_within_a_few(step_s: float) -> None:
    job = Job(step_s, every="auto")
    job.go(10)
    assert 2 <= job.saves[0][0] <= 5


def test_what_saves_slow_down_is_part_of_their_cost() -> None:
    job = Job(every="auto", mtbf="6 h", stall_s=0.01, slower_s=0.02, latency_s=2.0)
    job.go(10_000)
    estimate = job.schedule.estimate
    assert estimate is not None
    iterations = 2.0 / 0.12
    assert estimate.cost_s == pytest.approx(0.01 + 0.02 * iterations, rel=0.1)


@pytest.mark.parametrize("then_s", [pytest.param(0.02, marks=pytest.mark.long), 0.5])
def test_steps_that_become_faster_or_slower_are_no_cost_of_saves(then_s: float) -> None:
    job = Job(0.1, every="auto", mtbf="6 h", slower_s=0.01)
    job.go(3000)
    job.step_s, job.slower_s = then_s, then_s / 10
    for _ in range(int(1000 / then_s)):
        job.go()
        estimate = job.schedule.estimate
        assert estimate is not None
        assert 0.15 < estimate.cost_s < 0.25  # a tenth of the 2 s that a save takes


def test_a_validation_now_and_then_is_no_cost_of_a_save() -> None:
    job = Job(every="auto", mtbf="6 h")
    for number in range(3000):
        job.go()
        if number % 50 == 0:
            job.now_s += 30.0
    estimate = job.schedule.estimate
    assert estimate is not None
    assert estimate.cost_s == pytest.approx(0.005)
    assert estimate.step_s == pytest.approx(0.1)


@given(
    step_s=st.floats(0.001, 30.0),
    stall_s=st.floats(0.0001, 20.0),
    slower=st.floats(0.0, 1.0),
    latency_s=st.floats(0.01, 300.0),
    most_share=st.sampled_from([0.001, 0.01, 0.05]),
    jitter=st.floats(0.0, 0.5),
    seed=st.integers(0, 999),
)
def test_saves_never_pile_up_nor_cost_more_than_their_share(
    step_s: float,
    stall_s: float,
    slower: float,
    latency_s: float,
    most_share: float,
    jitter: float,
    seed: int,
) -> None:
    job = Job(
        step_s,
        every="auto",
        mtbf="1 h",
        stall_s=stall_s,
        slower_s=slower * step_s,
        latency_s=latency_s,
        most_share=most_share,
    )
    dice = random.Random(seed)
    for _ in range(300):
        job.step_s = step_s * (1 + dice.uniform(0, jitter))
        job.go()
    for gap in job.gaps():
        assert gap > latency_s
    for gap in job.gaps(1):
        # A twentieth of a step early is in time. What the timer knows may be a few steps old.
        assert gap >= (1 - jitter) * min(APART * latency_s - 0.05 * step_s, 2 * step_s)
        assert stall_s / gap <= most_share * (1 + 0.01 + jitter)


def test_a_duration_is_kept_whatever_saves_cost() -> None:
    job = Job(every="10 min", stall_s=100.0, latency_s=5.0)
    job.go(20_000)
    assert job.saves[0][1] == pytest.approx(1600.1, abs=0.3)
    assert job.gaps() == pytest.approx([600.0] * len(job.gaps()), abs=0.3)
    assert job.schedule.estimate is None


def test_a_duration_that_is_too_short_waits_for_the_save_before() -> None:
    job = Job(every="1 s", latency_s=5.0)
    job.go(500)
    assert len(job.gaps()) > 3
    for gap in job.gaps():
        assert 5.0 < gap < 5.0 + 2 * scheduling._SOON_S + 0.3  # it is looked at every second


def test_training_that_slows_down_is_noticed_between_two_saves() -> None:
    job = Job(0.01, every="10 min")
    job.go(10_000)
    job.step_s = 1.0  # there were 50,000 steps to go
    job.go(3000)
    two_looks_s = 2 * scheduling._LOOK_S / 0.01
    assert 599.9 <= job.saves[0][1] - 1000.0 <= 600.0 + two_looks_s + 3.0
    assert job.gaps() == pytest.approx([600.0] * len(job.gaps()), abs=3.0)


def test_a_save_that_failed_is_made_good_soon() -> None:
    job = Job(every="10 min")
    job.go(7000)
    job.failing = True
    job.go(6000)
    job.failing = False
    job.go(7000)
    gaps = [round(gap) for gap in job.gaps()]
    assert gaps[:1] == [600]
    assert 150 in gaps
    assert gaps[-1] == 600


def test_a_save_of_the_users_own_counts() -> None:
    job = Job(every="10 min")
    job.go(3000)
    job.save()
    assert not job.due()
    job.go(10_000)
    assert job.gaps()[0] == pytest.approx(600.0, abs=0.3)


def test_saves_of_a_user_who_never_calls_step_are_not_held() -> None:
    job = Job(every="auto")
    held = []
    for _ in range(50):
        held.append(weakref.ref(job.save()))
        job.train()
        job.handles.clear()
    job.now_s += 10.0
    job.train()
    gc.collect()
    assert sum(handle() is not None for handle in held) < 40


def test_a_save_that_failed_long_after_a_later_one_began_is_not_made_good() -> None:
    job = Job(every="10 min", latency_s=3.0)
    job.go(20)
    job.save()
    job.save()
    job.go(1)
    (first, _), (second, _) = job._under_way[-2:]
    first.fail(StorageError("the disk was full"))
    commit(second)
    second.report.committed_s = second.report.durable_s = 1.0
    job._under_way.clear()
    job.go(7000)
    assert job.gaps(1)[0] == pytest.approx(600.0, abs=0.3)


def test_every_so_many_steps_is_at_their_multiples() -> None:
    job = Job(every=100)
    job.go(350)
    assert [step for step, _ in job.saves] == [100, 200, 300]
    strides = Job(every=100)
    for step in range(0, 400, 30):
        strides.step = step
        if strides.due(step):
            strides.save()
    assert [step for step, _ in strides.saves] == [120, 210, 300]


def test_a_step_that_is_called_twice_is_counted_once() -> None:
    job = Job(every=10)
    job.go(11)
    assert not job.due(10)
    assert job.saves[-1][0] == 10


def test_steps_that_go_back_are_refused_until_a_restore() -> None:
    job = Job(every="auto")
    job.go(6)
    with raises(UsageError, "step 3", "step 5", found="3"):
        job.due(3)
    job.schedule.anew()
    assert not job.due(3)


def test_a_restore_begins_anew_and_keeps_what_saves_cost() -> None:
    job = Job(every="auto", mtbf="6 h")
    job.go(5000)
    count = len(job.saves)
    job.now_s += 500.0
    job.schedule.anew()
    job.step = 100
    came_back = job.now_s
    job.go(500)
    wanted = (2 * 0.005 * 6 * HOUR) ** 0.5
    assert job.saves[count][1] - came_back == pytest.approx(wanted, abs=0.4)


def test_the_last_step_is_saved_in_any_case_and_once() -> None:
    job = Job(every=10)
    job.go(5)
    assert job.due(5, last=True)
    job.step = 5
    job.save()
    assert not job.due(5, last=True)
    assert not job.due(5)


def test_steps_that_were_not_saved_are_told(caplog: pytest.LogCaptureFixture) -> None:
    job = Job(every=10)
    job.schedule.warn_of_unsaved_step()
    job.go(11)
    job.schedule.warn_of_unsaved_step()
    assert caplog.text == ""
    job.go(2)
    job.schedule.warn_of_unsaved_step()
    assert warned(caplog, "step 12")


def test_a_save_has_a_reckoning_once_one_has_ended() -> None:
    job = Job(every="auto", mtbf="6 h")
    job.go(1000)
    assert job.handles[0].report.estimate is None  # by which it is measured
    assert job.handles[-1].report.estimate is not None


def test_the_past_is_asked_once_and_only_where_it_counts() -> None:
    job = Job(every="auto", past=Past(9, 10 * HOUR))
    job.go(2000)
    job.schedule.anew()
    job.go(2000)
    assert job.asked == 1
    estimate = job.schedule.estimate
    assert estimate is not None
    assert estimate.mtbf_s == pytest.approx((24 + 10) * HOUR / 10, rel=0.02)
    assert names(str(estimate), "9", "10.1 h", "24 h")
    for other in (Job(every="auto", mtbf="6 h"), Job(every=10), Job(every="10 min")):
        other.go(100)
        assert other.asked == 0


# -- several ranks --------------------------------------------------------------------------------


class PreemptionSignal:
    """A board in memory. Whoever waits lets the first rank go on, as time would."""

    def __init__(self, notes: dict[str, bytes], go_on: Callable[[], None]) -> None:
        self._notes = notes
        self._go_on = go_on
        self.waited = 0

    def now_s(self) -> float:
        return 0.0

    def put(self, name: str, note: bytes) -> None:
        self._notes[name] = note

    def look(self, name: str) -> bytes | None:
        return self._notes.get(name)

    def until(self, look: Callable[[], object], until_s: float) -> object:
        while (seen := look()) is None:
            self.waited += 1
            self._go_on()
        return seen


class Ranks:
    """Jobs of one run that share a board; clocks and speeds differ."""

    def __init__(self, count: int, **settings: object) -> None:
        self.notes: dict[str, bytes] = {}
        self.key_value: list[PreemptionSignal] = []
        self.jobs = [self._job(number, count, settings) for number in range(count)]

    def _go_on(self) -> None:
        self.jobs[0].go()

    def _job(self, number: int, count: int, settings: dict[str, object]) -> Job:
        kv = PreemptionSignal(self.notes, self._go_on)
        self.key_value.append(kv)
        return Job(
            ranks=count,
            is_first=number == 0,
            now_s=1e6 * number,
            **settings,
            notes=lambda: SharedNotes(kv, is_first=number == 0, deadline_s=1.0),  # type: ignore[arg-type]
        )


@given(st.integers(2, 4), st.integers(0, 9999), st.sampled_from(["auto", "1 s", "2 s"]))
def test_ranks_save_at_the_same_steps_however_far_apart_they_are(
    count: int, seed: int, every: str
) -> None:
    dice = random.Random(seed)
    ranks = Ranks(count, every=every, step_s=dice.choice([0.01, 0.3, 5.0]))
    for job in ranks.jobs[1:]:
        job.step_s *= dice.choice([0.1, 1.0, 7.0])
    for _ in range(400):
        dice.choice(ranks.jobs).go(dice.randrange(1, 8))
    for job in ranks.jobs:
        job.go(ranks.jobs[0].step - job.step if job.step < ranks.jobs[0].step else 0)
    shortest = min(job.step for job in ranks.jobs)
    steps = [[step for step, _ in job.saves if step <= shortest] for job in ranks.jobs]
    assert all(one == steps[0] for one in steps)
    assert steps[0]


def test_ranks_in_step_wait_for_nothing_and_ask_seldom() -> None:
    ranks = Ranks(2, every="10 min")
    asked = 0
    look = ranks.key_value[1].look

    def counted(name: str) -> bytes | None:
        nonlocal asked
        asked += 1
        return look(name)

    ranks.key_value[1].look = counted  # type: ignore[method-assign]
    for _ in range(20_000):
        for job in reversed(ranks.jobs):  # the first rank comes last
            job.go()
    assert [job.saves[0][0] for job in ranks.jobs] == [ranks.jobs[0].saves[0][0]] * 2
    assert len(ranks.jobs[1].saves) == 3
    assert ranks.key_value[1].waited == 0
    assert asked < 1200  # of 20,000 steps, in 2,000 s


def test_a_first_rank_that_says_nothing_is_named() -> None:
    ranks = Ranks(2, every="10 min")
    ranks.key_value[1].until = lambda look, until_s: look()  # type: ignore[method-assign]
    member = ranks.jobs[1]
    member.go()
    with raises(AbortedError, expected="rank 0 within 1 s", remedy="step()"):
        member.go()
    # When it hears again it is in step.
    ranks.jobs[0].go(2)
    member.go()
    ranks.jobs[0].go(1)
    assert member.schedule._calls == ranks.jobs[0].schedule._calls


def test_what_the_first_rank_has_said_it_does_not_say_otherwise() -> None:
    first = Ranks(2, every="5 s", step_s=1.0).jobs[0]
    kv = first.schedule._begin(first.meet())._kv  # type: ignore[attr-defined]
    first.meet = lambda: SharedNotes(kv, is_first=True, deadline_s=1.0)
    put, said = kv.put, []

    def interrupted(name: str, note: bytes) -> None:
        put(name, note)  # it is there, and somebody may have read it
        said.append(note)
        raise KeyboardInterrupt

    for _ in range(50):
        first.go()
        first.train()
        kv.put = interrupted
        with contextlib.suppress(KeyboardInterrupt):
            first.due()
        kv.put = put
        first.now_s += 3.0  # by now it would decide otherwise
        first.go()
        assert not said or said[-1] in kv._notes.values()
    assert len(set(said)) > 10


def test_a_rank_that_could_not_ask_makes_no_save_of_its_own() -> None:
    ranks = Ranks(2, every="5 s")
    first, member = ranks.jobs
    for _ in range(40):
        first.go()
        member.go()
    until, ranks.key_value[1].until = ranks.key_value[1].until, lambda look, until_s: None  # type: ignore[method-assign]
    for _ in range(30):
        first.go()
        member.train()
        try:
            assert not member.due()
        except AbortedError:
            continue
    ranks.key_value[1].until = until  # type: ignore[method-assign]
    for _ in range(300):
        first.go()
        member.go()
    assert first.saves[0][0] not in [step for step, _ in member.saves]
    assert [step for step, _ in first.saves[1:]] == [step for step, _ in member.saves]
