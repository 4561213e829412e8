"""One save, one load: how long training lost, when the state was durable, how fast it came back.

Time lost by a save is the sum, over all iterations from the call of `save` until the state is
durable, of how much longer each took than the median iteration without checkpointing. The stall of
`save` itself is part of the first of them. The first save of a peer is also charged the iterations
since the peer was opened, in which it may have pinned, compiled or started something. Noise can
make the sum negative; it is left so, and `measure_noise` says how large it is.
"""

from __future__ import annotations

import statistics
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from bench.files import make_cold

if TYPE_CHECKING:
    from pathlib import Path

    from bench.peers import Peer
    from bench.state import Training

LIMIT_S = 180.0
"""A save that takes longer than this is given up and reported as failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveSample:
    """One save, as training saw it."""

    first: bool
    """The first of this peer since it was opened: it may allocate, pin, start processes."""
    memory_sampled: bool
    baseline_s: float
    stall_s: float
    """How long the call of `save` took."""
    lost_s: float
    worst_s: float
    """By how much the worst iteration was longer; the stall included."""
    durable_s: float
    """From the call of `save` until every byte is durable."""
    fingerprint: int
    """Of the state when `save` was called."""
    opened_s: list[float]
    """Iterations between opening and the first save."""
    iterations_s: list[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSample:
    """One load of files that are not in the page cache."""

    seconds: float
    cold_by: str
    bit_equal: bool
    """The state is again what it was when `save` was called."""


class _Watcher(threading.Thread):
    """Notes when a save became durable, and what went wrong instead."""

    def __init__(self, peer: Peer) -> None:
        super().__init__(daemon=True)
        self._peer = peer
        self.ended = 0.0
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self._peer.wait_durable()
        except BaseException as error:  # noqa: BLE001 - handed to the trainer's thread below
            self.error = error
        self.ended = time.perf_counter()


def measure_save(
    training: Training,
    peer: Peer,
    path: Path,
    *,
    baseline_s: list[float],
    first: bool,
    memory_sampled: bool,
) -> SaveSample:
    """Train, save to `path`, train on until that is durable. `baseline_s` are iterations without
    checkpointing, from before the peer was opened or after its last save."""
    count = len(baseline_s)
    opened_s = training.iteration_s(count) if first else []
    fingerprint = training.fingerprint()
    started = previous = time.perf_counter()
    peer.save(training, path)
    returned = time.perf_counter()
    watcher = _Watcher(peer)
    watcher.start()
    iterations_s: list[float] = []
    while True:
        training.iteration(peer.guard)
        now = time.perf_counter()
        iterations_s.append(now - previous)
        previous = now
        if not watcher.is_alive():
            break
        if now - started > LIMIT_S:
            raise TimeoutError(f"not durable after {LIMIT_S:.0f} s")
    if watcher.error is not None:
        raise watcher.error
    # Before and after: a machine that others use as well drifts within seconds.
    usual_s = statistics.median(baseline_s + training.iteration_s(count))
    longer = [seconds - usual_s for seconds in opened_s + iterations_s]
    return SaveSample(
        first=first,
        memory_sampled=memory_sampled,
        baseline_s=usual_s,
        stall_s=returned - started,
        lost_s=sum(longer),
        worst_s=max(longer),
        durable_s=watcher.ended - started,
        fingerprint=fingerprint,
        opened_s=opened_s,
        iterations_s=iterations_s,
    )


def measure_noise(training: Training, baseline_iterations: int, seconds: float) -> float:
    """What a save that does nothing and takes `seconds` would seem to lose."""
    baseline = training.iteration_s(baseline_iterations)
    ends = time.perf_counter() + seconds
    iterations_s = []
    while time.perf_counter() < ends:
        iterations_s += training.iteration_s(1)
    baseline += training.iteration_s(baseline_iterations)
    usual_s = statistics.median(baseline)
    return sum(taken - usual_s for taken in iterations_s)


def measure_load(training: Training, peer: Peer, path: Path, expected: int) -> LoadSample:
    """Load `path` cold into the live training and compare with the fingerprint at `save`."""
    cold_by = make_cold(path if path.exists() else path.parent)
    started = time.perf_counter()
    peer.load(path, training)
    if training.device.type == "cuda":
        torch.cuda.synchronize()  # here every stream counts
    seconds = time.perf_counter() - started
    return LoadSample(
        seconds=seconds, cold_by=cold_by, bit_equal=training.fingerprint() == expected
    )
