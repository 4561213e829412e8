"""A trainer whose checkpoints are kept in shared memory, as a program that tests kill.

    memory_trainer.py BASE RUN [SAVES] [stuck]

Says what it restored and what has become of each save. After so many saves it waits to be killed.
`stuck`: nothing of a save is ever durable in the run.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import TYPE_CHECKING

import torch

import laststep
from laststep import events
from laststep.flush import server
from laststep.storage.directory import DirectoryStore

if TYPE_CHECKING:
    from laststep.storage.store import FileWriting

ELEMENTS = 5 << 20


class Stuck(DirectoryStore):
    """A store in which no file is ever finished."""

    def open_writer(self, name: str, *, expected_bytes: int) -> FileWriting:
        writer = super().open_writer(name, expected_bytes=expected_bytes)
        writer.finish = lambda _: threading.Event().wait()  # type: ignore[assignment, method-assign]
        return writer


def tell(event: events.Event) -> None:
    if isinstance(event, events.TierHolds | events.Committed | events.SaveFailed):
        print(type(event).__name__, event.step, flush=True)


def main(base: str, run: str, saves: int, *, stuck: bool) -> None:
    print("process", os.getpid(), flush=True)
    state = {"weight": torch.full((ELEMENTS,), -1.0), "small": torch.full((3,), -1.0)}
    if stuck:
        server.open_store = Stuck  # the flusher's: to all others it is a folder
    with laststep.Checkpointer(
        tiers=[f"shm://{base}", run],
        state=state,
        host_memory_bytes=160 << 20,
        options=laststep.Options(
            progress=False, flush="thread" if stuck else "process", subscribers=[tell]
        ),
        keep=laststep.Keep(last=3),
    ) as ckpt:
        restored = ckpt.restore()
        found = {
            float(value) for tensor in state.values() for value in (tensor.min(), tensor.max())
        }
        print("restored", restored.step, *found, flush=True)
        for step in range(restored.next_step, restored.next_step + saves):
            for tensor in state.values():
                tensor.fill_(step)
            ckpt.save(step)
        threading.Event().wait()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), stuck=sys.argv[4:] == ["stuck"])
