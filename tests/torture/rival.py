"""A second process on the same run, which restores, saves, and is killed at a random instant."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from forms import Live
from ledger import Rules
from processes import children_of, command_of, descendants, lives, wait_until_dead
from subject import PATIENCE_S, Pending, as_keep
from tally import Violation

import laststep
from laststep.catalog.terms import Terms
from laststep.errors import LaststepError
from laststep.storage.registry import open_store

if TYPE_CHECKING:
    from processes import Child, Nursery, Say
    from subject import Subject


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """What it does, and what is done to it."""

    victim: str
    fresh: bool
    form: int
    flush: str
    rules: Rules | None
    saves: int
    at_start: bool
    """Killed so many milliseconds after it was started, or after its first save began."""
    delay_ms: int
    hurried: bool
    """Whether the next reader comes at once, while a flusher may still be at work."""

    def act(self, subject: Subject, nursery: Nursery) -> None:
        """Start it, kill, and see what it leaves."""
        subject.settle()
        subject.look()
        newest, _ = subject.ledger.of_newest()
        last = newest or subject.ledger.lineage()[-1:]
        form = last[0].form if last else self.form
        marks = [next(subject._marks) for _ in range(self.saves)]
        others = set(descendants(os.getpid()))
        child = nursery.child(
            {
                "path": str(subject.path),
                "fresh": self.fresh,
                "form": form,
                "flush": self.flush,
                "keep": self.rules and [self.rules.last, self.rules.every, self.rules.best],
                "marks": marks,
            }
        )
        try:
            self._kill(subject, child)
            if self.hurried and self.victim == "trainer":
                _hurry(subject, child, form, promises=self.flush == "process")
        finally:
            left = set(descendants(os.getpid())) - others - {child.pid}
            # On a busy machine the subject's own flusher may have started only meanwhile.
            left -= subject.flushers()
            ended = wait_until_dead(left, PATIENCE_S)
            child.close()
        if not ended:
            commands = [command_of(pid) for pid in left if lives(pid)]
            raise Violation("hang", f"processes live on after their trainer's death: {commands}")
        _judge(subject, child, form, marks, self)

    def _kill(self, subject: Subject, child: Child) -> None:
        begun = (lambda: True) if self.at_start else (lambda: bool(child.said("saving")))
        if not child.wait(PATIENCE_S, until=lambda: begun() or _is_over(child)):
            _hangs(subject, child, "another process did not begin")
        to_its_end = self.victim == "nobody"
        if to_its_end and not child.wait(PATIENCE_S, until=lambda: _is_over(child)):
            _hangs(subject, child, "another process does not end")
        until = time.monotonic() + self.delay_ms / 1000
        while (left_s := until - time.monotonic()) > 0 and not _is_over(child):
            child.listen(left_s)
        helpers = children_of(child.pid)
        if self.victim in ("trainer", "both") or (self.victim == "flusher" and helpers):
            subject.tally.fault(f"model: kill -9 of another process ({self.victim})")
        if self.victim in ("flusher", "both"):
            for pid in helpers:
                os.kill(pid, signal.SIGKILL)
        if self.victim == "flusher" and not child.wait(PATIENCE_S, until=lambda: _is_over(child)):
            _hangs(subject, child, "a trainer hangs without its flusher")
        child.kill()
        child.wait(PATIENCE_S)


def train(say: Say, arguments: dict[str, object]) -> None:
    """The other process."""
    live = Live(arguments["form"], 0)
    keep = arguments["keep"] and Rules(
        **dict(zip(("last", "every", "best"), arguments["keep"], strict=True))
    )
    try:
        checkpointer = laststep.Checkpointer(
            arguments["path"],
            items=live.items,
            options=laststep.Options(flush=arguments["flush"], progress=False),
            keep=as_keep(keep),
            host_memory_bytes=64 << 20,
            new_lineage=True,
        )
        first = 100
        if not arguments["fresh"]:
            restored = checkpointer.restore()
            first = restored.next_step
            mark = live.plain["mark"]
            wrong = [] if restored.step is None else live.wrong(arguments["form"], mark)
            say("restored", restored.folder, mark, first, wrong)
        for number, mark in enumerate(arguments["marks"]):
            live.become(arguments["form"], mark)
            say("saving", first + number, mark)
            # The first is free, or restore() said wrong; the steps after it may be taken.
            handle = checkpointer.save(first + number, metrics={"loss": 0.5}, overwrite=number > 0)
            live.weights["w"].zero_()
            if number % 3 == 1:
                handle.captured.wait(PATIENCE_S)
                if _has_claimed(arguments["path"], handle):
                    say("promised", mark)
            if number % 3 == 2:
                handle.wait(PATIENCE_S)
                say("committed", mark)
        checkpointer.wait(PATIENCE_S)
        say("committed", *arguments["marks"][-1:])
    except LaststepError as error:
        say("told", type(error).__name__, str(error))
    say("over")
    time.sleep(PATIENCE_S)  # until it is killed


def _has_claimed(path: object, handle: laststep.SaveHandle) -> bool:
    """Wait until this process has a term of its own; False where the save ends before that. Until
    then a flusher without its trainer leaves the run to another writer that lives."""
    terms = Terms(open_store(str(path)))
    until = time.monotonic() + PATIENCE_S
    while not handle.committed.over() and time.monotonic() < until:
        records = [terms.read(number) for number in terms.numbers()[-2:]]
        if any(record is not None and record.pid == os.getpid() for record in records):
            return True
        time.sleep(0.01)
    return handle.committed.done()


def _is_over(child: Child) -> bool:
    return bool(child.said("over") or child.said("foreign"))


def _hangs(subject: Subject, child: Child, what: str) -> NoReturn:
    for line in child.stacks():
        subject.tally.step(f"# {line}")
    raise Violation("hang", f"{what}; it said {child.heard}")


def _hurry(subject: Subject, child: Child, form: int, *, promises: bool) -> None:
    """A restore at the heels of a dead trainer finds what was committed, and what was promised,
    unless the flusher was a thread of that trainer."""
    told = child.said("committed") + (child.said("promised") if promises else [])
    sure = [mark for words in told for mark in words]
    if not sure:
        return
    live = Live(form, 0)
    with laststep.Checkpointer(
        subject.path, items=live.items, options=laststep.Options(progress=False)
    ) as checkpointer:
        checkpointer.restore()
    if live.plain["mark"] < max(sure):
        raise Violation(
            "wrong",
            f"a restore right after the death of a trainer gives mark "
            f"{live.plain['mark']}, {max(sure)} was promised",
        )


def _judge(subject: Subject, child: Child, form: int, marks: list[int], rival: Rival) -> None:
    """What it left is what it said, and perhaps more of what it had begun."""
    if foreign := child.said("foreign"):
        raise Violation("foreign error", str(foreign[0]))
    ledger = subject.ledger
    for kind, text in child.said("told"):
        allowed, damaged = ledger.of_newest()
        nothing_left = damaged and all(entry.may_go for entry in allowed)
        # Of both victims the trainer may hear of the flusher's death before its own.
        flusher_died = kind == "StorageError" and rival.victim in ("flusher", "both")
        if not flusher_died and not (
            kind in ("CorruptError", "MismatchError") and nothing_left and not rival.fresh
        ):
            raise Violation("wrong", f"the other process was told {kind}: {text}")
    head = _restored(subject, child)
    begun = [
        Pending(step=step, form=form, mark=mark, loss=0.5) for step, mark in child.said("saving")
    ]
    sure = {mark for words in child.said("committed") for mark in words}
    if rival.victim == "trainer" and rival.flush == "process":
        sure |= {mark for words in child.said("promised") for mark in words}
    # What is there and the ledger does not know, in the order of commits.
    resumed, found = head, set()
    terms = _terms(subject.path) - ledger.terms.keys()
    own = terms if rival.rules is not None else frozenset()
    for item in subject.listed():
        if item.folder in ledger.entries:
            continue
        pending = next((one for one in begun if one.step == item.step), None)
        if pending is None:
            raise Violation("wrong", f"{item.folder} is there, nobody saved it")
        for number in sorted(n for n in terms - ledger.terms.keys() if n <= item.term):
            subject._claimed(number, head, own=own)
        subject.add(pending, item.folder, rival.rules, resumed)
        found.add(pending.mark)
        head = item.folder
    # A term that was taken and has no commit counts as well.
    for number in sorted(terms - ledger.terms.keys()):
        subject._claimed(number, head, own=own)
    lost = [mark for mark in sure - found if not _may_be_gone(begun, mark, found, rival)]
    if lost:
        raise Violation("wrong", f"marks {lost} were committed or promised, found {found}")


def _terms(path: str) -> frozenset[int]:
    return frozenset(int(record.stem) for record in Path(path, "terms").glob("*.json"))


def _restored(subject: Subject, child: Child) -> str | None:
    """What it restored is what it had to."""
    if not child.said("restored"):
        return None
    folder, mark, first, wrong = child.said("restored")[0]
    allowed, _ = subject.ledger.of_newest()
    if folder is None:
        if any(not entry.may_go for entry in allowed):
            raise Violation("wrong", "another process restored nothing")
        return None
    entry = next((entry for entry in allowed if entry.folder == folder), None)
    if entry is None or wrong or entry.mark != mark or first <= entry.step:
        raise Violation("wrong", f"another process restored {folder} with {wrong}")
    subject.tally.checkpoint()
    return folder


def _may_be_gone(begun: list[Pending], mark: int, found: set[int], rival: Rival) -> bool:
    """Its own retention may have deleted it, after a later commit."""
    return rival.rules is not None and any(later > mark for later in found)
