"""All peers in turn, repetition by repetition, with the disk's limits measured among them.

Machines drift: a disk slows down, a neighbour wakes up. What is compared is therefore measured
alternately, each repetition in another order, and never one peer's repetitions in a row. Files are
deleted, and the deletion waited for, before the next peer starts.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from bench.files import free_bytes, remove
from bench.measure import LoadSample, SaveSample, measure_load, measure_noise, measure_save
from bench.memory import Peak, Watch
from bench.peers import Peer, opened

if TYPE_CHECKING:
    from pathlib import Path

    from bench.raw import DiskSample
    from bench.state import Training

Make = Callable[[], Peer]
_NOISE_S = 2.5
"""About as long as a save takes to be durable."""


@dataclass(slots=True, kw_only=True)
class PeerResult:
    """Everything that was measured of one peer, and what was not, and why."""

    name: str
    status: str = "measured"
    saves: list[SaveSample] = field(default_factory=list)
    loads: list[LoadSample] = field(default_factory=list)
    peaks: list[Peak] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class Rotation:
    """The results of all peers, and the disk's limits in the same repetitions."""

    state_bytes: int
    tensors: int
    iteration_s: float
    forward_backward_s: float
    peers: list[PeerResult]
    raw: list[DiskSample] = field(default_factory=list)
    noise_s: list[float] = field(default_factory=list)
    """What nothing at all seemed to lose, once a repetition, measured like a save."""

    def peer(self, name: str) -> PeerResult | None:
        """The result of that name, if it was measured at all."""
        return next((p for p in self.peers if p.name == name and p.saves), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much to measure."""

    repetitions: int
    peer_repetitions: int
    baseline_iterations: int
    loads: bool
    memory: bool
    """Sample host memory in one repetition."""
    deadline: float
    """On time.monotonic's clock; after it no repetition but the first is begun."""


def rotate(
    training: Training,
    makers: Sequence[Make],
    folder: Path,
    plan: Plan,
    raw: Callable[[], DiskSample] | None,
    say: Callable[[str], None],
) -> Rotation:
    """Measure every peer `plan.repetitions` times.

    Memory is sampled in the second repetition, which slow peers still reach, or in the only one;
    where there are more, that one's timings are marked, since sampling disturbs them.
    """
    baseline = sorted(training.iteration_s(max(3, plan.baseline_iterations)))
    result = Rotation(
        state_bytes=training.size_bytes(),
        tensors=training.tensor_count(),
        iteration_s=baseline[len(baseline) // 2],
        forward_backward_s=training.forward_backward_s(3),
        peers=[PeerResult(name=make().name) for make in makers],
    )
    took_s: dict[str, float] = {}
    for repetition in range(plan.repetitions):
        if raw is not None and (repetition == 0 or time.monotonic() < plan.deadline):
            say(f"repetition {repetition + 1}: raw disk")
            result.raw.append(raw())
        say(f"repetition {repetition + 1}: noise")
        result.noise_s.append(measure_noise(training, plan.baseline_iterations, _NOISE_S))
        turn = -repetition % len(makers)  # ours, the first, stays early if time runs out
        order = [*range(turn, len(makers)), *range(turn)]
        for i in order:
            peer = result.peers[i]
            if repetition >= plan.peer_repetitions and not peer.name.startswith("laststep"):
                continue
            if repetition and time.monotonic() + took_s.get(peer.name, 0) > plan.deadline:
                peer.notes.append(f"repetition {repetition + 1} left out: out of time")
                continue
            started = time.monotonic()
            say(f"repetition {repetition + 1}: {peer.name}")
            _once(
                training,
                makers[i],
                folder / "peer",
                plan,
                peer,
                result,
                memory_sampled=plan.memory and repetition == min(1, plan.repetitions - 1),
            )
            took_s[peer.name] = time.monotonic() - started
    return result


def _once(
    training: Training,
    make: Make,
    folder: Path,
    plan: Plan,
    result: PeerResult,
    rotation: Rotation,
    *,
    memory_sampled: bool,
) -> None:
    if result.status != "measured":
        return
    reason = make().missing()
    if reason is not None:
        result.status = reason
        return
    if free_bytes(folder.parent) < 2.2 * rotation.state_bytes * make().saves:
        result.notes.append("left out once: not enough free disk")
        return
    try:
        _saves_and_load(
            training,
            make,
            folder,
            plan,
            result,
            rotation.iteration_s,
            memory_sampled=memory_sampled,
        )
    except Exception as error:  # noqa: BLE001 - a peer that breaks is a result, not the end of the run
        text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        result.notes.append(f"failed at save {len(result.saves) + 1}: {text}")
        if isinstance(error, TimeoutError) or not result.saves:
            result.status = f"failed: {text}"
    finally:
        remove(folder)
        _forget(training)


def _saves_and_load(
    training: Training,
    make: Make,
    folder: Path,
    plan: Plan,
    result: PeerResult,
    iteration_s: float,
    *,
    memory_sampled: bool,
) -> None:
    watch = Watch() if memory_sampled else None
    path = folder
    training.iteration()  # whatever the last peer left to warm up
    baseline_s = training.iteration_s(plan.baseline_iterations)
    try:
        with opened(make(), training, folder) as peer:
            for number in range(peer.saves):
                if number and path.exists():
                    remove(path)
                path = folder / f"step-{number + 1}"
                sample = measure_save(
                    training,
                    peer,
                    path,
                    baseline_s=baseline_s,
                    first=number == 0,
                    memory_sampled=memory_sampled and plan.repetitions > 1,
                )
                result.saves.append(sample)
                baseline_s = training.iteration_s(plan.baseline_iterations)
                if sample.baseline_s > 1.5 * iteration_s:
                    result.notes.append(
                        f"the machine was busy at save {len(result.saves)}: iterations without "
                        f"checkpointing took {sample.baseline_s:.3f} s, {iteration_s:.3f} s before"
                    )
    finally:
        if watch is not None:
            result.peaks.append(watch.stop())
    if plan.loads:
        peer = make()
        try:
            result.loads.append(measure_load(training, peer, path, result.saves[-1].fingerprint))
        finally:
            peer.close()


def _forget(training: Training) -> None:
    """Give back what a peer left in torch's caches, so that the next one does not inherit it."""
    gc.collect()
    if training.device.type == "cuda":
        torch.cuda.empty_cache()
        # Pinned memory; there is no public name, and older releases have none at all.
        getattr(torch._C, "_host_emptyCache", lambda: None)()  # noqa: SLF001
