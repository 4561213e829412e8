"""A save after every single iteration: what that costs while the disk can keep up, and beyond."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bench.files import remove
from bench.peers import opened

if TYPE_CHECKING:
    from pathlib import Path

    from bench.ours import Laststep
    from bench.state import Training


@dataclass(slots=True, kw_only=True)
class EveryIteration:
    """Iterations without checkpointing and with a save after each, in alternating blocks."""

    name: str
    state_bytes: int
    status: str = "measured"
    baseline_s: list[float] = field(default_factory=list)
    saved_s: list[float] = field(default_factory=list)
    """Each with its save."""
    waited_s: list[float] = field(default_factory=list)
    """Of these, how long `save` waited for the disk, by laststep's own report."""

    def ratio(self) -> float | None:
        """How much longer an iteration takes, waiting for the disk included."""
        if not self.saved_s:
            return None
        return statistics.median(self.saved_s) / statistics.median(self.baseline_s)

    def ratio_without_waiting(self) -> float | None:
        """The same, less the time in which `save` waited for the disk."""
        if not self.saved_s:
            return None
        own = [s - w for s, w in zip(self.saved_s, self.waited_s, strict=True)]
        return statistics.median(own) / statistics.median(self.baseline_s)


def every_iteration(
    name: str, training: Training, peer: Laststep, folder: Path, *, rounds: int, iterations: int
) -> EveryIteration:
    """Alternate `rounds` times between `iterations` without and with a save after each."""
    result = EveryIteration(name=name, state_bytes=training.size_bytes())
    reason = peer.missing()
    if reason is not None:
        result.status = reason
        return result
    try:
        with opened(peer, training, folder):
            step = 0
            for _ in range(rounds):
                result.baseline_s += training.iteration_s(iterations)
                for _ in range(iterations):
                    step += 1
                    started = time.perf_counter()
                    peer.save(training, folder / f"step-{step}")
                    training.iteration(peer.guard)
                    result.saved_s.append(time.perf_counter() - started)
                    result.waited_s.append(peer.waited_s())
                peer.wait_durable()
    except Exception as error:  # noqa: BLE001 - a failure here is a result, not the end of the run
        result.status = f"failed: {type(error).__name__}: {error}"
    finally:
        remove(folder)
    return result
