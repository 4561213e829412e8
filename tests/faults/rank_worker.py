"""The ranks that test_ranks_* start, stop and kill, and the host of the store that they meet in.

Run as a program it imports torch once and then forks one process for each request that comes over
the socket whose file descriptor it is told: a rank, or a host of a store. A request brings the
three standard streams of the new process. A rank prints one line per thing that happened and obeys
one command per line on its standard input; see `Worker`.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import queue
import signal
import socket
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import stuck_store
import torch
import torch.distributed as dist
from torch.distributed import device_mesh, distributed_c10d
from torch.distributed import tensor as dist_tensor

import laststep
from laststep import events
from laststep.commit import thread as teaming
from laststep.commit.layouts import GlobalLayouts
from laststep.commit.rounds import Leader, Member, Participant
from laststep.flush import server
from laststep.format import index as index_format
from laststep.plan.receipts import Groups
from laststep.ranks import key_value
from laststep.ranks.key_value import KeyValueStore
from laststep.settings import as_keywords

NEEDED = (laststep.Checkpointer, laststep.PerRank)
"""Both are imported when they are asked for: here, once for all ranks."""


def say(*words: object) -> None:
    text = " ".join(map(str, words)).replace("\n", " / ")
    os.write(1, (text + "\n").encode())  # whole, whichever thread speaks


def ramp_at(step: int, size: int) -> torch.Tensor:
    """The values of a ramp at a step: no two are the same."""
    return torch.arange(size, dtype=torch.float32).add_(step * size)


def drawn(step: int) -> torch.Generator:
    """This rank's random numbers at a step, of which it has drawn some."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    torch.rand(7, generator=generator)
    return generator


def _is_all(tensor: torch.Tensor, value: float) -> bool:
    return tensor.unique().tolist() == [value]


class Flaky:
    """An item whose description fails when it is told to."""

    def __init__(self) -> None:
        self.fails = False

    def state_dict(self) -> dict[str, object]:
        if self.fails:
            self.fails = False
            raise ZeroDivisionError("as asked")
        return {"a": 1}

    def load_state_dict(self, state: dict[str, object]) -> None:
        pass


class Gate:
    """A point in the code at which the next to come by stands still."""

    def __init__(self) -> None:
        self.closed = False
        self.opened = threading.Event()

    def shut(self) -> None:
        self.closed = True
        self.opened.clear()

    def pass_by(self, name: str) -> None:
        if self.closed:
            self.closed = False
            say("at", name)
            self.opened.wait()


GATES = {name: Gate() for name in ("agree", "post", "receipt", "summary", "decide", "tell")}


def put_gates() -> None:
    """`agree`: before the ranks agree on what they hold. `post`: the first rank has said where.
    `receipt`: a rank is durable, and has not said so. `summary`: the first rank of a group has all
    receipts of its group, and has not said so. `decide`: the first rank has all receipts. `tell`:
    it is committed, and nobody knows."""

    def stand(kind: Any, method: str, name: str, *, after: bool) -> None:
        inner = getattr(kind, method)

        def held(self: Any, *arguments: Any, **more: Any) -> Any:
            if not after:
                GATES[name].pass_by(name)
            result = inner(self, *arguments, **more)
            if after:
                GATES[name].pass_by(name)
            return result

        setattr(kind, method, held)

    stand(GlobalLayouts, "on", "agree", after=False)
    stand(Leader, "_post", "post", after=True)
    stand(Participant, "_own_receipt", "receipt", after=True)
    stand(Member, "_summary", "summary", after=True)
    stand(Leader, "_summaries", "decide", after=True)
    stand(Leader, "_tell", "tell", after=False)


class Ahead:
    """How far the clock of this rank's commit rounds is ahead."""

    seconds = 0.0

    @classmethod
    def put(cls) -> None:
        now_s = KeyValueStore.now_s
        KeyValueStore.now_s = lambda kv: now_s(kv) + cls.seconds


def pretend(group: int | None, *, folders: bool) -> None:
    """Have groups of so many ranks, and folders for the files of two, as only large jobs have."""
    if group is not None:
        teaming.cut = lambda ranks: Groups(ranks, group)
    if folders:
        index_format.FLAT_RANKS, index_format._RANKS_PER_FOLDER = 2, 2


class Worker:
    """One rank. Commands:

    - `answer N`: the store has to answer within so many seconds from the next `open` on;
    - `open RUN` with options as JSON: a Checkpointer; says `open`, and the pid of its flusher. With
      `memory` its saves are kept in shared memory there, with `replica` they are replicated to that
      place, with `stuck` nothing is ever durable, with `sharded` the state is one tensor that lies
      over all ranks; with `ramp` of so many elements, each of which has another value, beside a
      tensor that all ranks hold alike and random numbers of each rank's own;
    - `restore`: says `restored` and the step; with the name of an item, that alone;
    - `exact N`: says whether all that it holds is what it was at step N, or one item is;
    - `train N`: save from step N on, until it is killed; says `TierHolds` and `Committed`;
    - `differ`: a plain value is another one on each rank from now on;
    - `try N`: save it and wait; says `committed N`, `skipped N` or `failed ERROR`;
    - `save N`, `wait`, `close`: say `done` or `failed ERROR`; `save` also `skipped`;
    - `over`: wait until all saves are over, and say nothing of how they ended;
    - `shut GATE`, `go GATE`: the next to come by stands still, and goes on. At once, also while
      another command runs;
    - `pass N`: so many seconds pass at once for whoever waits for other ranks. At once, as well;
    - `fail`: the next description raises;
    - `grow`: the state is described otherwise from now on;
    - `reshape N`: a tensor has so many elements from now on;
    - `forget`: end without `close()`.
    """

    def __init__(self, patience_s: float) -> None:
        self.patience_s = patience_s
        self.checkpointer: laststep.Checkpointer | None = None
        self.flaky = Flaky()
        self.trains = False
        self.lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self.read, daemon=True).start()

    def read(self) -> None:
        for line in sys.stdin:
            command, *words = line.split()
            if command == "shut":
                GATES[words[0]].shut()
                say("done", "shut")
            elif command == "go":
                GATES[words[0]].opened.set()
                say("done", "go")
            elif command == "pass":
                Ahead.seconds += float(words[0])
                say("done", "pass")
            else:
                self.lines.put(line)
        self.lines.put("forget")

    def work(self) -> None:
        while (line := self.lines.get()) != "forget" and line.strip() != "forget":
            command, _, rest = line.strip().partition(" ")
            try:
                getattr(self, f"do_{command}")(rest)
            except Exception as error:  # noqa: BLE001 (told; the next command may follow)
                say("failed", type(error).__name__, error)

    def do_answer(self, rest: str) -> None:
        key_value._CALL_S = float(rest)
        say("done", "answer")

    def do_open(self, rest: str) -> None:
        run, _, options = rest.partition(" ")
        rank = dist.get_rank()
        how = {"host_memory_bytes": 64 << 20, **json.loads(options or "{}")}
        self.state: dict[str, Any] = {"t": torch.zeros(1 << 18), "n": -1}
        self.mine: dict[str, Any] = {"t": torch.zeros(1000), "rank": rank}
        self.ramp = how.pop("ramp", 0)
        if how.pop("sharded", False) or self.ramp:
            mesh = device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
            whole = torch.zeros(self.ramp) if self.ramp else self.state["t"]
            self.state["t"] = dist_tensor.distribute_tensor(whole, mesh, [dist_tensor.Shard(0)])
        if self.ramp:
            self.state["same"] = dist_tensor.distribute_tensor(
                torch.zeros(self.ramp), mesh, [dist_tensor.Replicate()]
            )
            how["rng"] = laststep.RNG()
        if how.pop("stuck", False):
            server.open_store = stuck_store.Stuck
        place: tuple[str, ...] = (run,)
        if (base := how.pop("memory", None)) is not None:
            place, how["tiers"] = (), [f"shm://{base}", run]
        if (far := how.pop("replica", None)) is not None:
            laststep.register_store("gated", "stuck_store:Gated")
            place, how["tiers"] = (), [*how.get("tiers", [run]), far]
        self.checkpointer = laststep.Checkpointer(
            *place,
            state=self.state,
            flaky=self.flaky,
            mine=laststep.PerRank(self.mine, when_ranks_change="keep"),
            new_lineage=True,
            **as_keywords({"progress": False, "subscribers": [self.hear], **how}),
        )
        self.checkpointer._client.start()
        say("open", self.checkpointer._client.helper_pid)

    def do_restore(self, rest: str) -> None:
        restored = self.checkpointer.restore(only=rest.split() or None)
        say("restored", restored.step)

    def hear(self, event: events.Event) -> None:
        if self.trains and isinstance(event, events.TierHolds | events.Committed):
            say(type(event).__name__, event.step)

    def do_train(self, rest: str) -> None:
        self.trains = True
        for step in range(int(rest), int(rest) + 50):  # more would fill the disk if nobody kills it
            self._save(step)

    def do_exact(self, rest: str) -> None:
        number, _, item = rest.partition(" ")
        step, held = float(number), self.state["t"]
        local = held.to_local() if isinstance(held, dist_tensor.DTensor) else held
        exact = [self.state["n"] == step, self.mine["rank"] == dist.get_rank()]
        if self.ramp:
            exact.append(torch.equal(local, self._part(int(number))))
            exact.append(torch.equal(self.state["same"].to_local(), self._same(int(number))))
            exact.append(torch.equal(torch.get_rng_state(), drawn(int(number)).get_state()))
        else:
            exact.append(_is_all(local, step))
        if not item:
            exact.append(_is_all(self.mine["t"], step))
        say("exact", all(exact))

    def do_differ(self, rest: str) -> None:
        self.state["odd"] = dist.get_rank()
        say("done", "differ")

    def _part(self, step: int) -> torch.Tensor:
        """What this rank has of a ramp at that step."""
        whole = ramp_at(step, self.ramp)
        parts = whole.chunk(dist.get_world_size())
        return parts[dist.get_rank()] if dist.get_rank() < len(parts) else whole[:0]

    def _same(self, step: int) -> torch.Tensor:
        """What all ranks hold alike at that step."""
        return ramp_at(step, self.ramp).neg_()

    def _save(self, step: int) -> laststep.SaveHandle:
        if self.ramp:
            self.state["t"].to_local().copy_(self._part(step))
            self.state["same"].to_local().copy_(self._same(step))
            torch.set_rng_state(drawn(step).get_state())
        else:
            self.state["t"].fill_(step)
        self.state["n"] = step
        self.mine["t"].fill_(step)
        return self.checkpointer.save(step)

    def do_try(self, rest: str) -> None:
        handle = self._save(int(rest))
        committed = handle.wait(self.patience_s)
        said = "committed" if committed else "skipped" if handle.report.skipped else "hangs"
        say(said, rest)

    def do_save(self, rest: str) -> None:
        handle = self._save(int(rest))
        for save in self.checkpointer._client.saves.all():
            if save.handle is handle and save.job is not None:
                save.job.over.wait(
                    self.patience_s
                )  # captured: the next one finds nothing in its way
        say("skipped" if handle.report.skipped else "done", "save")

    def do_wait(self, rest: str) -> None:
        self.checkpointer.wait()
        say("done", "wait")

    def do_over(self, rest: str) -> None:
        for save in self.checkpointer._client.saves.all():
            save.handle.committed.over_within(self.patience_s)
        say("done", "over")

    def do_close(self, rest: str) -> None:
        self.checkpointer.close()
        say("done", "close")

    def do_fail(self, rest: str) -> None:
        self.flaky.fails = True
        say("done", "fail")

    def do_grow(self, rest: str) -> None:
        self.state[f"more{len(self.state)}"] = torch.ones(10)
        say("done", "grow")

    def do_reshape(self, rest: str) -> None:
        self.state["t"] = torch.zeros(int(rest))
        say("done", "reshape")

    def do_helper(self, rest: str) -> None:
        say("helper", self.checkpointer._client.helper_pid)


def enter(network: str | None) -> None:
    """Go into a network namespace."""
    if network is not None:
        with Path(network).open() as file:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0) != 0:
                raise OSError(ctypes.get_errno(), "setns")


def rank(request: dict[str, Any]) -> None:
    enter(request.get("network"))
    os.environ.update(request["environment"])
    logging.basicConfig(level=logging.INFO, format=f"[{request['rank']}] %(message)s")
    torch.set_num_threads(1)
    store = dist.TCPStore(
        request["address"],
        request["port"],
        None,
        request.get("hosts", False),
        timeout=timedelta(seconds=request["patience_s"]),
        wait_for_workers=False,
    )
    if request.get("hosts"):
        say("port", store.port)
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(request["start"], store),
        rank=request["rank"],
        world_size=request["ranks"],
    )
    say("ready")
    if request["notes"]:
        notes = dist.PrefixStore(request["notes"], store)
        distributed_c10d._get_default_store = lambda: notes
    put_gates()
    Ahead.put()
    pretend(request["group"], folders=request["folders"])
    Worker(request["patience_s"]).work()
    say("ends")


def host(request: dict[str, Any]) -> None:
    enter(request.get("network"))
    store = dist.TCPStore(request["address"], 0, None, True, wait_for_workers=False)
    say("port", store.port)
    while os.read(0, 1):
        pass


def train(request: dict[str, Any]) -> None:
    """The trainer of single processes."""
    import trainer

    sys.argv = ["trainer.py", *request["arguments"]]
    trainer.main()


def preempt(request: dict[str, Any]) -> None:
    """A training that is told to end."""
    import preempted

    preempted.main(request)


def child(request: dict[str, Any], streams: list[int]) -> None:
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    sys.stdin = os.fdopen(0, closefd=False)
    kinds = {"rank": rank, "host": host, "trainer": train, "preempted": preempt}
    kinds[request["what"]](request)


def warm_up() -> None:
    """The first step of an optimizer imports half of torch: once, for all."""
    torch.set_num_threads(1)
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0).step()


def zygote() -> None:
    warm_up()
    requests = socket.socket(fileno=int(sys.argv[1]))
    while True:
        data, streams, _, _ = socket.recv_fds(requests, 1 << 16, 3)
        if not data:
            return
        request = json.loads(data)
        if request["what"] == "poll":
            pid, status = os.waitpid(request["pid"], os.WNOHANG)
            requests.send(json.dumps(os.waitstatus_to_exitcode(status) if pid else None).encode())
            continue
        pid = os.fork()
        if pid == 0:
            requests.close()
            child(request, streams)
            return
        for stream in streams:
            os.close(stream)
        requests.send(json.dumps(pid).encode())


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    zygote()
