"""A job of 2 to 4 real ranks against a plain list of what must be restorable, bit for bit.

A trial is a run that several jobs take up one after the other, each with another number of ranks
and another layout. What a job does is drawn: saves, bursts of saves, overwriting, rolling back,
another structure, a replica that has gone apart, a wrong step on one rank, reads that fail on one
rank, ranks stopped for a while, ranks killed with saves under way. Every content has a number of
its own, the `version`, from which all bits follow, so any copy can be judged.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import random
import select
import signal
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
import torch._dynamo  # DTensors import it when they are first used: here, once for all ranks
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import laststep
from laststep.plan import who_writes
from laststep.storage.files import FileReader

sys.path.insert(0, str(Path(__file__).parent))

from trials import Violation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trials import Tally

DEADLINE_S = 8.0
PATIENCE_S = 120.0
WAYS = ("plain", "fsdp", "tp", "replicated", "both")
NEEDED = (laststep.Checkpointer, laststep.PerRank, laststep.load, laststep.open)
"""Imported when they are asked for: here, once for all ranks."""
_ODD = 0x9E3779B1


def shapes(structure: int) -> dict[str, tuple[int, ...]]:
    """The tensors of a structure."""
    return {"w": (12, 8), "v": (7, 5)} | {f"x{n}": (5, n + 2) for n in range(structure)}


def content(name: str, version: int, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor of a version, whole."""
    count = torch.Size(shape).numel()
    mixed = (torch.arange(count) + 1_000_003 * version + 7919 * sum(name.encode())) * _ODD
    return mixed.to(torch.int32).view(shape)


# -- a rank ---------------------------------------------------------------------------------------


class Member:
    """One rank: obeys a line of JSON after the other, and answers each."""

    def __init__(self, pipe: socket.socket, rank: int, ranks: int, port: int, way: str) -> None:
        self.rank, self.ranks, self.way = rank, ranks, way
        self._lines, self._pipe = pipe.makefile("r"), pipe
        store = dist.TCPStore(
            "127.0.0.1",
            port,
            None,
            False,
            timeout=timedelta(seconds=PATIENCE_S),
            wait_for_workers=False,
        )
        dist.init_process_group(
            "gloo", store=dist.PrefixStore("job", store), rank=rank, world_size=ranks
        )
        sizes = (2, ranks // 2) if way == "both" and ranks % 2 == 0 else (ranks,)
        self.mesh = init_device_mesh("cpu", sizes)
        self.state: dict[str, Any] = {}
        self.mine = {"t": torch.zeros(4, dtype=torch.int32), "v": -1}
        self.saves: list[tuple[int, laststep.SaveHandle]] = []

    def placements(self) -> list[Any]:
        cut = Shard(1) if self.way == "tp" else Shard(0)
        if self.way == "both" and self.mesh.ndim == 2:
            return [Replicate(), cut]
        return [Replicate() if self.way == "replicated" else cut]

    def part(self, whole: torch.Tensor) -> torch.Tensor:
        """What this rank holds of a tensor that lies on the mesh."""
        for axis, place in enumerate(self.placements()):
            if isinstance(place, Shard):
                parts = whole.chunk(self.mesh.size(axis), place.dim)
                at = self.mesh.get_local_rank(axis)
                whole = parts[at] if at < len(parts) else whole.narrow(place.dim, 0, 0)
        return whole.contiguous()

    def lay_out(self, structure: int) -> None:
        """Tensors of that structure, in place of what there is; `v` is plain in every layout."""
        self.state.clear()
        for name, shape in shapes(structure).items():
            whole = torch.zeros(shape, dtype=torch.int32)
            if self.way == "plain" or name == "v":
                self.state[name] = whole
            else:
                self.state[name] = DTensor.from_local(
                    self.part(whole),
                    self.mesh,
                    self.placements(),
                    run_check=False,
                    shape=whole.shape,
                    stride=whole.stride(),
                )
        self.state["n"] = -1

    def become(self, version: int) -> None:
        for name, tensor in self.tensors().items():
            whole = content(name, version, tuple(self.state[name].shape))
            tensor.copy_(self.part(whole) if isinstance(self.state[name], DTensor) else whole)
        self.state["n"] = self.mine["v"] = version
        self.mine["t"].fill_(1000 * version + self.rank)

    def tensors(self) -> dict[str, torch.Tensor]:
        """What lies in this rank's memory."""
        found = {name: one for name, one in self.state.items() if isinstance(one, torch.Tensor)}
        return {n: t.to_local() if isinstance(t, DTensor) else t for n, t in found.items()}

    def wrong(self, ranks: int) -> list[str]:
        """All that is not of the version that the state says it is; `ranks` saved it."""
        version, found = self.state["n"], []
        for name, tensor in self.tensors().items():
            whole = content(name, version, tuple(self.state[name].shape))
            right = self.part(whole) if isinstance(self.state[name], DTensor) else whole
            if not torch.equal(tensor, right):
                found.append(name)
        if self.rank < ranks and self.mine["t"].tolist() != [1000 * version + self.rank] * 4:
            found.append("mine")
        return found

    def work(self) -> None:
        for line in self._lines:
            command, *arguments = json.loads(line)
            try:
                answer = ["done", getattr(self, f"do_{command}")(*arguments)]
            except laststep.LaststepError as error:
                answer = ["failed", type(error).__name__, str(error)]
            except Exception as error:  # noqa: BLE001 (the trial says what it is)
                answer = ["foreign", repr(error)]
            self._pipe.sendall((json.dumps(answer) + "\n").encode())

    def do_open(self, run: str, structure: int, keep: int | None) -> int:
        self.lay_out(structure)
        self.checkpointer = laststep.Checkpointer(
            run,
            state=self.state,
            options=laststep.Options(progress=False, deadline_s=DEADLINE_S),
            mine=laststep.PerRank(self.mine, when_ranks_change="keep"),
            keep=None if keep is None else laststep.Keep(last=keep),
            host_memory_bytes=64 << 20,
        )
        return os.getpid()

    def do_structure(self, structure: int) -> None:
        self.lay_out(structure)

    def do_restore(self, step: int | None, ranks_of: dict[str, int]) -> list[Any]:
        restored = self.checkpointer.restore(step)
        if restored.step is None:
            return [None, None, [], []]
        version = self.state["n"]
        skipped = [[one.step, one.reason] for one in restored.skipped]
        return [restored.step, version, self.wrong(ranks_of.get(str(version), 0)), skipped]

    def do_restore_badly(self) -> None:
        """Reads of tensors fail here."""

        def fail(reader: FileReader, offset: int, into: memoryview) -> int:
            raise laststep.StorageError("cannot read", found="Input/output error (EIO)")

        with mock.patch.object(FileReader, "read_into", fail):
            self.checkpointer.restore()

    def do_save(self, step: int, version: int, overwrite: bool, apart: bool) -> None:
        self.become(version)
        if apart:  # this rank's replica is another
            self.state["v"].add_(1)
        self.saves.append((step, self.checkpointer.save(step, overwrite=overwrite)))

    def do_outcomes(self) -> list[Any]:
        """How the saves ended that were begun since the last time."""
        saves, self.saves, found = self.saves, [], []
        for step, handle in saves:
            if not handle.committed.over_within(PATIENCE_S):
                raise TimeoutError(f"the save of step {step} does not end")
            found.append([step, None if handle.error is None else str(handle.error)])
        with contextlib.suppress(laststep.LaststepError):
            self.checkpointer.wait()
        return found

    def do_close(self) -> None:
        self.checkpointer.close()


def _host(pipe: socket.socket) -> None:
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    pipe.sendall(f"{store.port}\n".encode())
    pipe.recv(1)


# -- the trial ------------------------------------------------------------------------------------


class Child:
    """A forked process, to talk to."""

    def __init__(self, body: Any, *arguments: Any) -> None:
        self.pipe, theirs = socket.socketpair()
        self._heard = b""
        self.pid = os.fork()
        if self.pid == 0:
            try:
                self.pipe.close()
                body(theirs, *arguments)
            finally:
                os._exit(0)
        theirs.close()

    def tell(self, *words: Any) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.pipe.sendall((json.dumps(words) + "\n").encode())

    def hear(self) -> Any:
        while b"\n" not in self._heard:
            if not select.select([self.pipe], [], [], PATIENCE_S)[0]:
                raise Violation("hang", f"a rank says nothing for {PATIENCE_S:g} s")
            data = self.pipe.recv(1 << 16)
            if not data:
                raise Violation("crash", "a rank has ended by itself")
            self._heard += data
        line, _, self._heard = self._heard.partition(b"\n")
        return json.loads(line)

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self.pipe.close()


def _member(pipe: socket.socket, *arguments: Any) -> None:
    Member(pipe, *arguments).work()


class Model:
    """What must be restorable: the lineage as (step, version), oldest first."""

    def __init__(self, run: Path, keep: int | None, tally: Tally) -> None:
        self.run, self.keep, self.tally = run, keep, tally
        self.lineage: list[tuple[int, int]] = []
        self.perhaps: list[tuple[int, int]] = []
        """Saves of which nobody said how they ended."""
        self.free: set[tuple[int, int]] = set()
        """What retention may have deleted by now."""
        self.resumed: tuple[int, int] | None = None
        """What the job went on from, which always stays: also where it was saved again, and that
        was deleted since."""
        self.structures: dict[int, int] = {}
        self.ranks: dict[int, int] = {}
        self.compared: dict[str, int] = {}
        """The version of each checkpoint that was compared, by its folder."""

    def look(self) -> None:
        """Judge what is there, all of it that is new bit by bit, and take over what is certain."""
        found = self._judge_all() if self.run.exists() else []
        known = [*self.lineage, *self.perhaps]
        found = [one for one in found if one in known or one != self.resumed]
        allowed = iter(known)
        if not all(one in allowed for one in found):
            raise Violation("wrong", f"{found} of {self.lineage}, perhaps {self.perhaps}")
        needed = self.needed()
        if self.keep is not None:  # what was committed unheard makes others go
            needed = needed[len([one for one in found if one in self.perhaps]) :]
        if lost := [one for one in needed if one not in found]:
            raise Violation("wrong", f"lost {lost}: there are {found}")
        self.lineage, self.perhaps = found, []
        self.age()

    def age(self) -> None:
        """After a commit: all but the last few may go, and do not come back by rolling back."""
        if self.keep is not None:
            self.free.update(self.lineage[: -self.keep])

    def needed(self) -> list[tuple[int, int]]:
        """What must be there."""
        return [one for one in self.lineage if one not in self.free]

    def _judge_all(self) -> list[tuple[int, int]]:
        while True:
            judged = []
            for one in laststep.open(self.run):
                try:
                    judged.append(self._judge(one))
                except laststep.NotFoundError:
                    if (self.run / one.folder / "manifest.json").exists():
                        raise
                    break  # a flusher's retention came between: what is there now?
            else:
                return judged

    def _judge(self, checkpoint: laststep.Checkpoint) -> tuple[int, int]:
        folder = checkpoint.folder
        if folder in self.compared:
            return checkpoint.step, self.compared[folder]
        state = laststep.load(self.run / folder)["state"]
        version = self.compared[folder] = state.pop("n")
        expected = shapes(self.structures[version])
        if sorted(state) != sorted(expected):
            raise Violation("wrong", f"{folder} has {sorted(state)}")
        for name, shape in expected.items():
            if not torch.equal(state[name], content(name, version, shape)):
                raise Violation("wrong", f"{name} of {folder}, version {version}")
        self.tally.checkpoint()
        return checkpoint.step, version


class Job:
    """One start: so many ranks, in a layout."""

    def __init__(self, model: Model, rng: random.Random, tally: Tally, versions: Any) -> None:
        self.model, self.rng, self.tally, self.versions = model, rng, tally, versions
        count, way = rng.randint(2, 4), rng.choice(WAYS)
        tally.step(f"start {count} ranks, {way}")
        self.host = Child(_host)
        port = self.host.hear()
        self.ranks = [Child(_member, rank, count, port, way) for rank in range(count)]
        newest = model.lineage[-1][1] if model.lineage else None
        self.structure = 0 if newest is None else model.structures[newest]
        self.ask("open", str(model.run), self.structure, model.keep)
        self.restore(None)

    def ask(self, *words: Any) -> list[Any]:
        """All ranks do that, and it works."""
        for rank in self.ranks:
            rank.tell(*words)
        return [self.answer(rank.hear()) for rank in self.ranks]

    def answer(self, heard: list[Any], *, fails: bool = False) -> Any:
        if heard[0] == "foreign":
            raise Violation("foreign error", heard[1])
        if (heard[0] == "failed") != fails:
            raise Violation("wrong", f"unexpected: {heard}")
        return heard[1:] if fails else heard[1]

    def restore(self, step: int | None) -> None:
        """All restore that, or the newest; what they get is what must be there."""
        model = self.model
        found = self.ask("restore", step, model.ranks)
        wanted = [one for one in model.lineage if step in (None, one[0])]
        expected = list(wanted[-1]) if wanted else [None, None]
        for rank, (got, version, wrong, skipped) in enumerate(found):
            if [got, version] != expected or wrong or skipped:
                what = f"rank {rank} got step {got}, version {version}, wrong {wrong}, {skipped}"
                raise Violation("wrong", f"{what}; expected {expected}")
        model.resumed = wanted[-1] if wanted else None

    def begin(
        self, steps: Sequence[int], version: int, *, overwrite: bool = False, apart: int = 0
    ) -> None:
        """Each rank begins to save its step; `apart` is a rank whose replica is another."""
        self.model.structures[version] = self.structure
        self.model.ranks[version] = len(self.ranks)
        for number, (rank, step) in enumerate(zip(self.ranks, steps, strict=True)):
            rank.tell("save", step, version, overwrite, bool(apart) and apart == number)

    def begun(self) -> None:
        for rank in self.ranks:
            heard = rank.hear()
            self.answer(heard, fails=heard[0] == "failed")  # of an earlier save: told by outcomes

    def next_step(self) -> int:
        done = [step for step, _ in (*self.model.lineage, *self.model.perhaps)]
        return max(done, default=0) + self.rng.randint(1, 3)

    def outcomes(self) -> list[tuple[int, str | None]]:
        """How the saves ended, the same on all ranks."""
        every = self.ask("outcomes")
        ended = [[(step, error is None) for step, error in one] for one in every]
        if any(one != ended[0] for one in ended):
            raise Violation("wrong", f"ranks disagree on how saves ended: {every}")
        return [(step, error) for step, error in every[0]]

    def save(self, *, overwrite: int | None = None, apart: int = 0) -> None:
        """One save of all, which is committed."""
        step, version = self.next_step() if overwrite is None else overwrite, next(self.versions)
        self.begin([step] * len(self.ranks), version, overwrite=overwrite is not None, apart=apart)
        self.begun()
        self.ended([(step, version)])

    def ended(self, saves: list[tuple[int, int]]) -> None:
        """Note which of these were committed; one that the machine was too slow for may fail."""
        for (step, error), one in zip(self.outcomes(), saves, strict=True):
            if error is None:
                self.model.lineage = [other for other in self.model.lineage if other[0] != step]
                self.model.lineage.append(one)
                self.model.age()
            elif "within" in error:
                self.tally.note("saves that were too slow")
            else:
                raise Violation("wrong", f"step {step} failed: {error}")

    # What is drawn

    def burst(self) -> None:
        saves = []
        for _ in range(self.rng.randint(2, 4)):
            step, version = self.next_step(), next(self.versions)
            self.model.perhaps.append((step, version))
            saves.append((step, version))
            self.begin([step] * len(self.ranks), version)
            self.begun()
        self.model.perhaps = []
        self.ended(saves)

    def overwrite(self) -> None:
        if self.model.lineage:
            self.save(overwrite=self.model.lineage[-1][0])

    def apart(self) -> None:
        self.tally.fault("replica gone apart")
        self.save(apart=self.rng.randrange(1, len(self.ranks)))

    def grow(self) -> None:
        self.structure = self.rng.randint(0, 3)
        self.ask("structure", self.structure)
        self.save()

    def wrong_step(self) -> None:
        """One rank saves another step: it fails on all, and the next works."""
        self.tally.fault("wrong step on one rank")
        step, version = self.next_step(), next(self.versions)
        steps = [step] * len(self.ranks)
        steps[self.rng.randrange(len(steps))] += self.rng.choice((1, 50))
        self.begin(steps, version)
        self.begun()
        for number, one in enumerate(self.ask("outcomes")):
            if one[0][1] is None:
                raise Violation("wrong", f"rank {number} says that {steps} is committed")
        self.save()

    def roll_back(self) -> None:
        fitting = [
            one for one in self.model.needed() if self.model.structures[one[1]] == self.structure
        ]
        if not fitting:
            return
        step, version = self.rng.choice(fitting)
        self.restore(step)
        kept = self.model.lineage[: self.model.lineage.index((step, version)) + 1]
        before, self.model.lineage = self.model.lineage, kept
        self.save()
        if self.model.lineage == kept:  # too slow: which line it is now is for the run to say
            self.model.lineage, self.model.perhaps = kept, before[len(kept) :]

    def restore_badly(self) -> None:
        """One rank cannot read: all say so, and nothing else is taken."""
        if not self.model.lineage:
            return
        if self.model.structures[self.model.lineage[-1][1]] != self.structure:
            return
        self.tally.fault("reads fail on one rank")
        bad = self.rng.randrange(len(self.ranks))
        for number, rank in enumerate(self.ranks):
            rank.tell(*(("restore_badly",) if number == bad else ("restore", None, {})))
        for rank in self.ranks:
            kind, text = self.answer(rank.hear(), fails=True)
            if kind != "StorageError" or "Input/output error" not in text:
                raise Violation("wrong", f"a rank that cannot read gives {kind}: {text}")
        self.restore(None)

    def stop(self) -> None:
        """A rank stands still for a while with a save under way."""
        self.tally.fault("SIGSTOP of a rank")
        step, version = self.next_step(), next(self.versions)
        victim = self.rng.choice(self.ranks)
        self.begin([step] * len(self.ranks), version)
        time.sleep(self.rng.random() * 0.05)
        os.kill(victim.pid, signal.SIGSTOP)
        time.sleep(self.rng.random() * 0.3)
        os.kill(victim.pid, signal.SIGCONT)
        self.begun()
        self.ended([(step, version)])

    def kill(self) -> None:
        """Kill a rank with saves under way, and the others a moment later."""
        for _ in range(self.rng.randint(1, 3)):
            step, version = self.next_step(), next(self.versions)
            self.model.perhaps.append((step, version))
            self.begin([step] * len(self.ranks), version)
            time.sleep(self.rng.random() * 0.1)
        self.tally.fault("SIGKILL of ranks", len(self.ranks))
        for rank in self.rng.sample(self.ranks, len(self.ranks)):
            os.kill(rank.pid, signal.SIGKILL)
            time.sleep(self.rng.random() * 0.05)

    def end(self) -> None:
        for child in (*self.ranks, self.host):
            child.end()


def settled(run: Path) -> None:
    """Until no flusher of a killed rank is at work any more."""
    deadline = time.monotonic() + PATIENCE_S
    while _flushers(run):
        if time.monotonic() > deadline:
            raise Violation("hang", "a flusher outlives its rank")
        time.sleep(0.02)


def _flushers(run: Path) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit():
                words = (entry / "cmdline").read_bytes()
                if b"laststep.flush" in words and str(run).encode() in words:
                    found.append(int(entry.name))
    return found


def trial(folder: Path, seed: int, tally: Tally, *, starts: int = 3, deeds: int = 6) -> None:
    """Some starts of a job on one run, each of which does some of it all."""
    rng = random.Random(seed)
    logging.getLogger("laststep").setLevel(logging.CRITICAL)
    torch.set_num_threads(1)
    who_writes.MIN_ASSIGNMENT_BYTES = 64  # ranks share the work though there is little of it
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    versions = itertools.count(1)
    model = Model(folder / "run", rng.choice((None, None, 2, 3)), tally)
    chances = {
        "save": 3,
        "burst": 2,
        "overwrite": 1,
        "apart": 2,
        "grow": 2,
        "wrong_step": 1,
        "roll_back": 2,
        "restore_badly": 1,
        "stop": 2,
    }
    for _ in range(starts):
        job = Job(model, rng, tally, versions)
        try:
            for deed in rng.choices(list(chances), list(chances.values()), k=deeds):
                tally.step(f"{deed}: {model.lineage[-3:]}")
                getattr(job, deed)()
            model.look()
            if rng.random() < 0.6:
                tally.step("kill")
                job.kill()
            else:
                job.ask("close")
        finally:
            job.end()
        settled(model.run)
        model.look()
