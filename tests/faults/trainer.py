"""The trainer that the tests of this folder start, stop and kill.

It prints one line per thing that happened and obeys one command per line on its standard input:
`save N`, `capture N` (returns when captured), `wait`, `close`, `hold N` (captures stand still after
N copies), `workers` (forks a loader's workers and keeps them busy), `return`, `exit`, `raise` and
`_exit`.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import threading

import torch

import laststep
from laststep.capture import mover
from laststep.flush import client
from laststep.restoring import choose


class Numbers(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, os.getpid()])


def hold(copies: int) -> None:
    """After so many more copies of host memory the capture thread stands still."""
    land = mover.land
    left = iter(range(copies))

    def stand_still(*arguments: object) -> None:
        if next(left, None) is None:
            say("held")
            threading.Event().wait()
        land(*arguments)

    mover.land = stand_still


class Waiting(logging.Handler):
    """Says so when a restore waits for another process."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage().startswith("waiting for the flusher"):
            say("waiting")


def say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())  # whole, whichever thread speaks


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("run")
    parser.add_argument("--flush", default="process")
    parser.add_argument("--capture", default="auto")
    parser.add_argument("--size", type=int, default=1000)
    parser.add_argument("--compression", default="none")
    parser.add_argument("--patience", type=float)
    parser.add_argument("--end", type=float)
    parser.add_argument("--tell-waiting", action="store_true")
    options = parser.parse_args()
    if options.end is not None:
        client._END_S = options.end
    if options.patience is not None:
        choose.WAIT_FOR_OTHERS_S = options.patience
    if options.tell_waiting:
        logging.getLogger("laststep").addHandler(Waiting())
        logging.getLogger("laststep").setLevel(logging.INFO)
    return options


def main() -> None:
    options = read_options()
    torch.set_num_threads(1)
    state = {"t": torch.zeros(options.size), "n": -1}
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    checkpointer = laststep.Checkpointer(
        options.run,
        state=state,
        options=laststep.Options(flush=options.flush, capture=options.capture, progress=False),
        host_memory_bytes=64 << 20,
        compression=options.compression,
    )
    restored = checkpointer.restore()
    optimizer.step()
    checkpointer._client.start()
    say("ready", checkpointer._client.helper_pid, restored.step)
    batches = None
    for line in sys.stdin:
        command, *arguments = line.split()
        try:
            if command in ("save", "capture"):
                state["t"].fill_(int(arguments[0]))
                state["n"] = int(arguments[0])
                optimizer.step()  # so that the fence is known to work
                handle = checkpointer.save(int(arguments[0]))
                if command == "capture":
                    handle.captured.wait(60)
            elif command == "wait":
                checkpointer.wait()
            elif command == "close":
                checkpointer.close()
            elif command == "hold":
                hold(int(arguments[0]))
            elif command == "workers":
                loader = torch.utils.data.DataLoader(
                    Numbers(), batch_size=2, num_workers=2, multiprocessing_context="fork"
                )
                batches = iter(loader)
                pids = {int(next(batches)[0, 1]) for _ in range(4)}
                say("workers", *sorted(pids))
                continue
            elif command == "return":
                return
            elif command == "exit":
                sys.exit(3)
            elif command == "raise":
                raise ZeroDivisionError("as asked")
            elif command == "_exit":
                os._exit(0)
            say("done", command)
        except laststep.LaststepError as error:
            say("failed", type(error).__name__, error)


if __name__ == "__main__":
    main()
