"""The training that test_preemption.py has signals sent to. It says what happens, line by line.

It stands at one phase of its life until it knows that it is to end, so that a signal comes right
there: `training` (with nothing saved yet), `idle` (with nothing under way), a phase of a save, or
`restore`; with `until` for longer. Otherwise it goes on by itself.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
import threading
import time
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist

import laststep
from laststep import running
from laststep.catalog.run import RunWriter
from laststep.events import Captured, Committed, PreemptionEnded, TierHolds
from laststep.flush.listeners import Retention
from laststep.flush.saves import Save, Saves
from laststep.flush.writer import SaveWriter
from laststep.process import signals
from laststep.settings import as_keywords

PATIENCE_S = 120.0
PHASES: dict[str, tuple[Any, str]] = {
    "capture": (Save, "chunks"),
    "seal": (Save, "captured"),
    "flush": (SaveWriter, "write"),
    "durable": (SaveWriter, "finish"),
    "commit": (RunWriter, "commit"),
    "retention": (Retention, "committed"),
    "restore": (running, "restore_into"),
}


def say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())  # whole, whichever thread speaks


class Training:
    """A state that is a number, and a loop."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.request = request
        self.state: dict[str, Any] = {"t": torch.zeros(request.get("size", 1000)), "n": -1}
        self.stood = False
        self.go_on = threading.Event()

    def stand(self, phase: str) -> None:
        """Wait here, the first time, until it is known that the job is to end."""
        if self.request.get("phase") == phase and not self.stood:
            self.stood = True
            say("at", phase)
            self.wait_until_known()
            if self.request.get("until"):
                self.go_on.wait()

    def wait_until_known(self) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while self.ckpt._ending._watched.known is None and time.monotonic() < deadline:
            time.sleep(0.002)

    def keep_back(self, step: int) -> None:
        """Where a save is to stand at a phase, take three steps and no more until it is known that
        the job is to end: else so many saves pile up that one waits for the others, where the phase
        or the signal comes late. Those that are to be called off are captured by then."""
        if self.request.get("phase") in PHASES and step > self.start + 2:
            if self.request.get("until") == "called off":
                self.ckpt._capturer.settle()
            self.wait_until_known()

    def open_when_called_off(self) -> None:
        """With `until` "called off", go on when that was done with the saves that wait."""
        call_off = Saves.call_off_queued

        def act(*arguments: Any) -> None:
            call_off(*arguments)
            if self.request.get("until") == "called off":
                self.go_on.set()

        Saves.call_off_queued = act

    def gate(self, phase: str) -> None:
        self.open_when_called_off()
        if phase in PHASES:
            where, name = PHASES[phase]
            inner = getattr(where, name)

            def held(*arguments: Any, **more: Any) -> Any:
                self.stand(phase)
                return inner(*arguments, **more)

            setattr(where, name, held)

    def tell(self, event: object) -> None:
        if isinstance(event, PreemptionEnded):
            say("ended", json.dumps(msgspec.structs.asdict(event)))
        elif not self.request.get("tells_saves"):
            return
        elif isinstance(event, TierHolds):
            say("holds", event.tier)
        elif isinstance(event, Captured | Committed):
            say(type(event).__name__.lower(), event.step)

    def listen(self) -> None:
        """End the grace when the test says so: how far a save is by then does not depend on how
        fast the machine is."""
        for _ in sys.stdin:
            self.ckpt._ending._watched.grace_s = 0.0

    def run(self) -> None:
        request = self.request
        how = {"flush": "thread", "every": 1, "keep": laststep.Keep(last=3), **request["settings"]}
        place = [request["run"]]
        if "tiers" in request:
            laststep.register_store("gated", "stuck_store:Gated")
            *near, far = request["tiers"]
            tier = laststep.Tier(far, every=request.get("far_every", 1))
            place, how["tiers"] = [], [*near, tier]
        self.ckpt = laststep.Checkpointer(
            *place,
            state=self.state,
            host_memory_bytes=128 << 20,
            preemption=laststep.Preemption(**request["preemption"]),
            **as_keywords({"progress": False, "subscribers": [self.tell], **how}),
        )
        self.gate(request.get("phase", ""))
        threading.Thread(target=self.listen, daemon=True).start()
        with contextlib.nullcontext(self.ckpt) if request.get("bare") else self.ckpt as ckpt:
            start = self.start = ckpt.restore().next_step
            if how["flush"] == "process":
                ckpt._client.start()
            say("ready", start, ckpt._client.helper_pid)
            for step in range(start, request["steps"]):
                self.train(step)
                if "own" in request:
                    if ckpt.preempted or (request["own"] and step % 5 == 0):
                        ckpt.save(step)
                    if ckpt.preempted:
                        say("stops", step, ckpt.wait(PATIENCE_S))
                        break
                else:
                    ckpt.step(step)
                if ckpt.preempted:
                    say("stops", step)
                    break
                if step == start + 2:
                    say("steps")
        say("closed")

    def train(self, step: int) -> None:
        self.stand("training")
        self.keep_back(step)
        if self.request.get("phase") == "idle" and step == 3:
            self.ckpt.wait()
            self.stand("idle")
        time.sleep(self.request.get("step_s", 0.005))
        if self.request.get("together"):
            dist.barrier()
        self.state["t"].fill_(step)
        self.state["n"] = step


def handlers(request: dict[str, Any]) -> None:
    for name in request.get("handlers", ()):
        signal.signal(getattr(signal, name), lambda number, _: say("handler", number))


def main(request: dict[str, Any]) -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    signals.SAME_S = request.get("same_s", signals.SAME_S)
    if "ranks" in request:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        patience = timedelta(seconds=PATIENCE_S)
        store = dist.TCPStore("127.0.0.1", request["port"], None, False, timeout=patience)
        dist.init_process_group(
            "gloo", store=store, rank=request["rank"], world_size=request["ranks"], timeout=patience
        )
    handlers(request)
    before = signal.getsignal(signal.SIGTERM)
    try:
        Training(request).run()
    finally:
        say("unwound", signal.getsignal(signal.SIGTERM) is before)
