"""A run, trainers on it that report everything, and a judge: what all faults of `system` share.

A fault is a function that lets trainers work while something goes wrong. Whatever that is, the
judge, a fresh process without the fault, then finds: what was reported as committed, bit for bit;
nothing of what was reported as failed; as the newest one the last that was committed, or one whose
end nobody heard. And the next save works. Errors are laststep's own and say what to do.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

from processes import Child, descendants, wait_until_dead
from tally import Violation

import laststep
import state
from laststep.catalog.run import Run
from laststep.errors import LaststepError
from laststep.settings import as_keywords
from laststep.storage.directory import DirectoryStore

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from processes import Say
    from shim import Control
    from tally import Tally

PATIENCE_S = 120.0
"""Whatever takes longer hangs."""


class Impossible(Exception):
    """This machine does not allow the fault; the text says why."""


class Trainer:
    """In a process of its own: restores, saves, and says how each of it ends."""

    def __init__(self, say: Say, run: Path | str, **settings: object) -> None:
        self.say = say
        self.live = state.new()
        self.handles: list[laststep.SaveHandle] = []
        self.checkpointer: laststep.Checkpointer | None = None
        self.step = 0
        with self.told("restore", -1):
            self.checkpointer = laststep.Checkpointer(
                run,
                host_memory_bytes=64 << 20,
                compression=state.COMPRESSION,
                **as_keywords({"progress": False, **settings}),
                **self.live,
            )
            restored = self.checkpointer.restore()
            self.step = restored.next_step
            if restored.step is not None and (wrong := state.wrong(self.live, restored.step)):
                say("wrong", f"restored step {restored.step} with {wrong}")
            say("restored", restored.step)

    @contextlib.contextmanager
    def told(self, word: str, step: int) -> Iterator[None]:
        """An error of laststep's is an answer; what else comes out is not."""
        try:
            yield
        except LaststepError as error:
            if not error.remedy:
                told = f"{type(error).__name__}: {error.what}, found {error.found}"
                self.say("flaw", f"an error without a remedy: {told}")
            self.say(f"{word} failed", step, repr(error))
        except (OSError, MemoryError, RuntimeError, ValueError, KeyError, TypeError) as error:
            self.say("flaw", f"a raw {error!r} from {word}")
            self.say(f"{word} failed", step, repr(error))

    def save(self, count: int = 1, *, wait: bool = True) -> None:
        """Save the next step; it may fail, and says so."""
        for _ in range(count):
            if self.checkpointer is None:
                return  # it could not even be made
            state.advance(self.live, self.step)
            self.say("saving", self.step)
            with self.told("save", self.step):
                self.handles.append(self.checkpointer.save(self.step))
                for tensor in self.live["weights"].values():
                    tensor.zero_()  # what is captured may change at once
            self.step += 1
            if wait:
                self.settle()

    def settle(self) -> None:
        """Wait for all that was begun, and say how it ended."""
        waiting, self.handles = self.handles, []
        for handle in waiting:
            with self.told("save", handle.step):
                if not handle.wait(PATIENCE_S):
                    self.say("hang", f"the save of step {handle.step} does not end")
                    return
                self.say("committed", handle.step)

    def close(self) -> None:
        """Settle, and close."""
        self.settle()
        if self.checkpointer is not None:
            with self.told("close", -1):
                self.checkpointer.close()


class Scene:
    """One run and what is known of it. `chance` is seeded, `control` is the shim's, if there."""

    def __init__(
        self, folder: Path, chance: random.Random, tally: Tally, control: Control | None
    ) -> None:
        self.folder = folder
        self.run = folder / "run"
        self.chance = chance
        self.tally = tally
        self.control = control
        self.begun: set[int] = set()
        self.failed: set[int] = set()
        self.committed: set[int] = set()
        self.harmless = False
        """Whether the fault had no occasion to act."""

    def flush(self) -> str:
        """Where the next trainer flushes."""
        return self.chance.choice(("process", "process", "thread"))

    @contextlib.contextmanager
    def trainer(
        self, body: Callable[[Trainer], None], run: Path | str | None = None, **settings: object
    ) -> Iterator[Child]:
        """A trainer that does `body` in a process of its own, while the block does harm to it.

        After the block it is waited for, unless the block has killed it, and heard.
        """
        place = self.run if run is None else run
        settings.setdefault("flush", self.flush())
        self.tally.step(f"a trainer with {settings} at {place!r}")

        def act(say: Say) -> None:
            trainer = Trainer(say, place, **settings)
            body(trainer)
            trainer.close()

        child = Child.fork(act)
        try:
            yield child
            if not child.wait(PATIENCE_S):
                self._hangs(child, "a trainer does not end")
            self._hear(child)
        finally:
            helpers = [pid for pid in descendants(child.pid) if pid != child.pid]
            child.close()
            wait_until_dead(helpers, PATIENCE_S)

    def work(self, body: Callable[[Trainer], None], **settings: object) -> Child:
        """A trainer that does `body` and ends."""
        with self.trainer(body, **settings) as child:
            pass
        return child

    def _hangs(self, child: Child, what: str) -> None:
        for line in child.stacks():
            self.tally.step(f"# {line}")
        raise Violation("hang", f"{what}; it said {child.heard[-6:]}")

    def _hear(self, child: Child) -> None:
        for word, *rest in child.heard:
            if word == "saving":
                self.begun.add(rest[0])
                self.failed.discard(rest[0])
            elif word == "committed":
                self.committed.add(rest[0])
            elif word == "save failed":
                self.failed.add(rest[0])
                self.tally.note("system: save failed and said so")
            elif word in ("wrong", "hang"):
                raise Violation(word, rest[0])
            elif word == "foreign":
                self.tally.flaw("foreign error", rest[0])
            elif word == "flaw":
                self.tally.flaw("foreign error", rest[0].replace(str(self.folder), ""))
            elif word == "restored":
                self._check_restored(rest[0])
        last = child.heard[-1][0] if child.heard else None
        if last not in ("end", "foreign") and not getattr(child, "was_killed", False):
            for line in child.stacks():
                self.tally.step(f"# {line}")
            raise Violation("crash", f"a trainer died; it said {child.heard[-6:]}")

    def _check_restored(self, step: int | None) -> None:
        """Never older than what was committed before this trainer: it saves later ones only."""
        before = [old for old in self.committed if step is None or old > step]
        if before:
            raise Violation("wrong", f"restored {step}, {max(before)} was committed")

    def judge(self, run: Path | None = None) -> None:
        """A fresh process looks at everything, and saves once more."""
        place = self.run if run is None else run
        child = Child.fork(lambda say: _inspect(say, place))
        try:
            if not child.wait(PATIENCE_S + len(self.begun)):
                self._hangs(child, "the judge does not end")
            for word, *rest in child.heard:
                if word in ("wrong", "foreign"):
                    raise Violation("wrong", f"afterwards: {rest[0]}")
            if child.heard[-1:] != [["end"]]:
                raise Violation("crash", f"the judge died; it said {child.heard}")
            lineage, restored, saved = (
                child.said(word)[0][0] for word in ("lineage", "restored", "saved")
            )
        finally:
            child.close()
        there = set(lineage)
        if lost := self.committed - there:
            raise Violation("wrong", f"steps {sorted(lost)} were committed and are not there")
        if ghosts := there & self.failed - self.committed:
            raise Violation("wrong", f"steps {sorted(ghosts)} were reported failed and are there")
        if strangers := there - self.begun:
            raise Violation("wrong", f"steps {sorted(strangers)} are there, nobody saved them")
        if restored != (lineage[-1] if lineage else None):
            raise Violation("wrong", f"restored {restored} of {lineage}")
        self.committed = {*there, saved}
        self.begun.add(saved)
        self.tally.checkpoint(len(lineage) + 1)


def _inspect(say: Say, run: Path) -> None:
    """Compare every checkpoint, restore the newest, save the next."""
    lineage = []
    if (run / "run.json").exists():
        for item in Run.open(DirectoryStore(run)).checkpoints():
            live = state.new()
            laststep.load(run / item.folder, into=live)
            if wrong := state.wrong(live, item.step):
                say("wrong", f"{item.folder} has {wrong}")
            if item.on_lineage:
                lineage.append(item.step)
    live = state.new()
    with laststep.Checkpointer(
        str(run), options=laststep.Options(progress=False, flush="thread"), **live
    ) as checkpointer:
        restored = checkpointer.restore()
        if restored.step is not None and (wrong := state.wrong(live, restored.step)):
            say("wrong", f"restored {restored.step} with {wrong}")
        if restored.skipped:
            say("wrong", f"passed over {restored.skipped}")
        state.advance(live, restored.next_step)
        checkpointer.save(restored.next_step).wait(PATIENCE_S)
    say("lineage", lineage)
    say("restored", restored.step)
    say("saved", restored.next_step)


def pause(chance: random.Random, seconds: float) -> None:
    """A random while, at most that."""
    time.sleep(chance.uniform(0.0, seconds))
