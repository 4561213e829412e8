"""How fast a store is and how many cores are idle, by clocks and ticks that the tests give."""

from __future__ import annotations

import os

import pytest

from laststep.flush import encoder
from laststep.flush.encoder import IdleCores, Throughput, TimedWriting

MIB = 1 << 20


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_throughput_is_not_known_before_enough_was_written(clock: Clock) -> None:
    found = Throughput(clock)
    assert found.bytes_per_s is None
    for _ in range(31):
        with found.busy(MIB):
            clock.now += 0.5
    assert found.bytes_per_s is None
    with found.busy(MIB):
        clock.now += 0.5
    assert found.bytes_per_s == 2 * MIB


def test_writes_at_the_same_time_count_the_time_once(clock: Clock) -> None:
    found = Throughput(clock)
    with found.busy(32 * MIB):
        clock.now += 1
        with found.busy(32 * MIB):
            clock.now += 2
        clock.now += 1
    clock.now += 50  # nothing is under way
    with found.busy(0):  # a sync
        clock.now += 4
    assert found.bytes_per_s == 8 * MIB


def test_what_fails_leaves_nothing_under_way(clock: Clock) -> None:
    found = Throughput(clock)
    written = WrittenIndexes(clock)
    written.fails = True
    with pytest.raises(OSError, match="full"):
        TimedWriting(written, found).write_at(0, memoryview(bytes(64 * MIB)))
    clock.now += 100
    with found.busy(64 * MIB):
        clock.now += 1
    assert found.bytes_per_s == 64 * MIB


def test_earlier_saves_count_less_and_less(clock: Clock) -> None:
    found = Throughput(clock)
    for rate in (1, 100, 100, 100, 100, 100, 100, 100):
        found.begin_save()
        with found.busy(100 * MIB):
            clock.now += 1 / rate
    assert found.bytes_per_s is not None
    assert found.bytes_per_s > 5000 * MIB


def test_a_throughput_that_is_known_is_not_lost_by_saves_that_write_little(clock: Clock) -> None:
    found = Throughput(clock)
    with found.busy(320 * MIB):
        clock.now += 1
    for _ in range(50):
        found.begin_save()
        with found.busy(MIB):
            clock.now += 1 / 320
        assert found.bytes_per_s == pytest.approx(320 * MIB)


def test_small_saves_are_told_by_many_of_them(clock: Clock) -> None:
    found = Throughput(clock)
    for _ in range(8):
        found.begin_save()
        assert found.bytes_per_s is None
        with found.busy(4 * MIB):
            clock.now += 1
    found.begin_save()
    assert found.bytes_per_s == 4 * MIB


class WrittenIndexes:
    """Keeps what is called."""

    alignment_bytes = 512

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.calls: list[object] = []
        self.fails = False

    def write_at(self, offset: int, data: memoryview) -> None:
        self.calls.append((offset, bytes(data)))
        self._clock.now += 1
        if self.fails:
            raise OSError("full")

    def finish(self, size_bytes: int) -> None:
        self.calls.append(size_bytes)
        self._clock.now += 3

    def close(self) -> None:
        self.calls.append("closed")


def test_a_file_is_written_as_before_and_timed(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoder, "_LEAST_BYTES", 8)
    found, written = Throughput(clock), WrittenIndexes(clock)
    paced = TimedWriting(written, found)
    assert paced.alignment_bytes == 512
    paced.write_at(4096, memoryview(b"12345678"))
    paced.finish(5)
    paced.close()
    assert written.calls == [(4096, b"12345678"), 5, "closed"]
    assert found.bytes_per_s == 2.0


def test_cores_are_idle_by_what_passed_between_two_looks() -> None:
    ticks = iter([(100, 1000), (150, 1100), (150, 1100), (160, 1200), (160, 1300)])
    cores = len(os.sched_getaffinity(0))
    idle = IdleCores(lambda: next(ticks))
    assert idle.look() == cores * 0.5
    assert idle.look() == cores * 0.5  # no tick has passed: what was known before
    assert idle.look() == cores * 0.1
    assert idle.look() == 0.0


def test_where_nothing_tells_of_ticks_no_core_is_idle() -> None:
    assert IdleCores(lambda: (0, 0)).look() == 0.0


def test_this_machine_can_be_looked_at() -> None:
    assert 0 <= IdleCores().look() <= len(os.sched_getaffinity(0))
