"""State of your own kind: a replay buffer whose tensors are saved without copying them twice.

Most objects need none of this: anything with `state_dict()` and `load_state_dict()` is an item as
it is. A provider is for state that should be described by reference and restored in place.

    python examples/custom_provider.py runs/replay
"""

from __future__ import annotations

import sys

import torch

import laststep


class ReplayBuffer:
    """The last `size` observations, in a ring."""

    def __init__(self, size: int, width: int) -> None:
        self.rows = torch.zeros(size, width)
        self.count = 0

    def add(self, row: torch.Tensor) -> None:
        self.rows[self.count % len(self.rows)] = row
        self.count += 1


class ReplayProvider(laststep.StateProvider):
    """Describes a ReplayBuffer: its tensor by reference, its count as a plain value."""

    kind = "replay"

    def __init__(self, buffer: ReplayBuffer) -> None:
        self._buffer = buffer

    def describe(self) -> laststep.State:
        """Called in `save()`, so it must be quick: nothing is copied here."""
        return laststep.State(value={"rows": self._buffer.rows, "count": self._buffer.count})

    def restore(self, value: object) -> None:
        """By now `rows` has been filled in place; what is left are the plain values."""
        if not isinstance(value, dict):
            raise TypeError(f"a replay buffer is a dict, not a {type(value).__name__}")
        if value["count"] is not laststep.ABSENT:
            self._buffer.count = value["count"]

    def check(self, stored: object) -> list[str]:
        """Refuse what is not a replay buffer before anything is touched."""
        return [] if isinstance(stored, dict) and "count" in stored else ["is not a replay buffer"]


def main() -> None:
    run = sys.argv[1] if len(sys.argv) > 1 else "runs/replay"
    buffer = ReplayBuffer(size=1000, width=8)
    ckpt = laststep.Checkpointer(run, replay=ReplayProvider(buffer), rng=laststep.RNG())
    start = ckpt.restore().next_step
    print(f"starting at step {start} with {buffer.count} observations")
    for step in range(start, start + 50):
        buffer.add(torch.randn(8))
        if step % 50 == 49:
            ckpt.save(step)
    ckpt.close()

    # The same, read back by somebody else: one row of the tensor, without the rest.
    last = laststep.open(run).latest()
    print(f"step {last.step}: first row {last.tensor('replay/rows')[0:1]}")


if __name__ == "__main__":
    main()
