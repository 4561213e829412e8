"""Slots are free or leased, never both, and are handed out in order of arrival."""

from __future__ import annotations

import signal
import threading
from types import SimpleNamespace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from expect import raises
from laststep.errors import StorageError, UsageError
from laststep.memory.pool import Slots
from laststep.process import signals
from waiting import PATIENCE_S, wait_until


class SlotsMachine(RuleBasedStateMachine):
    """Slots beside a model that is two plain collections."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = Slots()
        self.free: list[int] = []
        self.leased: set[int] = set()
        self.made = 0

    @rule(count=st.integers(1, 3))
    def add(self, count: int) -> None:
        self.slots.add(range(self.made, self.made + count))
        self.free += range(self.made, self.made + count)
        self.made += count

    @precondition(lambda self: self.made)
    @rule(data=st.data())
    def add_again(self, data: st.DataObject) -> None:
        known = data.draw(st.integers(0, self.made - 1))
        with raises(UsageError, found="range("):
            self.slots.add(range(known, known + 1))

    @rule()
    def lease(self) -> None:
        got = self.slots.lease(0)
        if not self.free:
            assert got is None  # a full pool is not an empty one
        else:
            assert got == self.free.pop()  # the one freed last is the warmest
            self.leased.add(got)

    @rule(count=st.integers(0, 4))
    def lease_more(self, count: int) -> None:
        got = self.slots.lease_more(count)
        assert got == [self.free.pop() for _ in range(min(count, len(self.free)))]
        self.leased.update(got)

    @precondition(lambda self: self.leased)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.leased)))
        self.slots.release(slot)
        self.leased.remove(slot)
        self.free.append(slot)

    @precondition(lambda self: self.made)
    @rule(data=st.data())
    def release_what_nobody_holds(self, data: st.DataObject) -> None:
        slot = data.draw(st.integers(0, self.made + 1))
        if slot not in self.leased:
            with raises(UsageError, found=True):
                self.slots.release(slot)

    @rule()
    def reset(self) -> None:
        self.slots.reset()
        self.free += sorted(self.leased)
        self.leased.clear()

    @invariant()
    def counts_agree(self) -> None:
        assert len(self.slots.free) == len(self.free)
        assert len(self.slots._waiting) == 0


TestSlots = SlotsMachine.TestCase
TestSlots.settings = settings(max_examples=60, stateful_step_count=30)


def test_waiters_are_served_in_order_of_arrival() -> None:
    slots = Slots()
    served: list[int] = []
    mutex = threading.Lock()

    def wait(number: int) -> None:
        assert slots.lease(20) is not None
        with mutex:
            served.append(number)

    threads = []
    for number in range(6):
        threads.append(threading.Thread(target=wait, args=(number,)))
        threads[-1].start()
        wait_until(lambda n=number: len(slots._waiting) == n + 1)
    for number in range(6):
        slots.add(range(number, number + 1))
        wait_until(lambda n=number: len(served) == n + 1)
    for thread in threads:
        thread.join()
    assert served == list(range(6))


def test_one_who_gives_up_waiting_does_not_hold_up_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slots, now_s = Slots(), 0.0
    monkeypatch.setattr("laststep.memory.pool.time", SimpleNamespace(monotonic=lambda: now_s))
    impatient = threading.Thread(target=slots.lease, args=(20,))
    impatient.start()
    wait_until(lambda: len(slots._waiting) == 1)
    got: list[int | None] = []
    patient = threading.Thread(target=lambda: got.append(slots.lease(60)))
    patient.start()
    wait_until(lambda: len(slots._waiting) == 2)
    now_s = 30.0
    slots.add(range(0))  # nothing; but they look again
    impatient.join()
    slots.add(range(1))
    patient.join()
    assert got == [0]


def test_a_failure_reaches_everybody_who_waits_or_comes_to_wait() -> None:
    slots = Slots()
    errors: list[BaseException] = []

    def wait() -> None:
        with pytest.raises(StorageError) as caught:
            slots.lease(PATIENCE_S)
        errors.append(caught.value)

    threads = [threading.Thread(target=wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(slots._waiting) == 3)
    slots.fail(StorageError("gone"))
    for thread in threads:
        thread.join()
    assert len(errors) == 3
    wait()
    slots.reset()  # a new flusher brings no memory
    wait()
    slots.fail(None)
    assert slots.lease(0) is None


def test_a_restore_goes_on_without_the_flusher_and_saves_do_not() -> None:
    slots = Slots()
    slots.add(range(2))
    read, handed_over = slots.lease(), slots.lease(for_save=True)
    got: list[int | None] = []
    reading = threading.Thread(target=lambda: got.append(slots.lease(PATIENCE_S)))
    reading.start()
    wait_until(lambda: len(slots._waiting) == 1)
    slots.lose_flusher(StorageError("gone"))
    with pytest.raises(StorageError, match="gone"):
        slots.lease(for_save=True)
    assert reading.is_alive()
    slots.release(read)
    reading.join()
    assert got == [read]
    assert handed_over not in got


def test_a_restore_hears_of_a_flusher_that_died_with_all_slots_but_waits_for_new_ones() -> None:
    slots = Slots()
    slots.lose_flusher(StorageError("gone"))
    assert slots.lease(0) is None  # memory that is being made ready may still come
    slots.add(range(1))
    assert slots.lease(for_save=True) == 0
    with pytest.raises(StorageError, match="gone"):
        slots.lease()
    slots.reset()
    assert slots.lease() == 0


def test_a_handler_runs_without_the_lock() -> None:
    """Whatever it waits for may need a slot to be released."""
    slots = Slots()
    released: list[bool] = []

    def handler(*_: object) -> None:
        adding = threading.Thread(target=slots.add, args=(range(1),))
        adding.start()
        adding.join(PATIENCE_S)
        released.append(not adding.is_alive())

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with signals.defer_signals():
            signal.raise_signal(signal.SIGUSR1)
            assert slots.lease() == 0
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert released == [True]
