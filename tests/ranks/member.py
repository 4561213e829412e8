"""One process of a crew: takes tasks from a pipe, does each as a rank of a new job, and reports."""

from __future__ import annotations

import importlib
import sys
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from laststep.commit import thread as teaming
from laststep.ranks import key_value

_GROUP_S = 120.0
key_value.PATIENCE_S = _GROUP_S  # what is warned of is not how slow the machine is


def do(task: str, rank: int, ranks: int, port: int, arguments: dict[str, Any]) -> object:
    """Be a rank of a job that does a task."""
    # A job starts with processes that have made no Checkpointer; these may have, and not all of
    # them as many.
    teaming._made.clear()
    patience = timedelta(seconds=_GROUP_S)
    store = dist.PrefixStore("job", dist.TCPStore("127.0.0.1", port, None, False, patience))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=patience)
    try:
        module, _, function = task.partition(":")
        result = getattr(importlib.import_module(module), function)(**arguments)
        dist.barrier()  # nobody leaves before the others are done
        return result
    finally:
        dist.destroy_process_group()


def main() -> None:
    """Until the pipe closes."""
    torch.set_num_threads(1)
    pipe = Connection(int(sys.argv[1]))
    pipe.send("ready")
    while True:
        try:
            message = pipe.recv()
        except EOFError:
            return
        try:
            answer = (True, do(*message))
        except BaseException:  # noqa: BLE001 (reported to the test, which fails)
            answer = (False, traceback.format_exc())
        pipe.send(answer)


if __name__ == "__main__":
    main()
