"""A run that is saved to, restored, damaged, moved and fought over, and the ledger that judges it.

Every method does one thing to the real run through the real API, tells the ledger, and raises
`Violation` where what happened is not what the ledger says must happen. Arguments are plain
values, so that a list of calls is a script.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import resource
import shutil
import signal
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from forms import Live, differences
from ledger import Damage, Entry, Ledger, Rules
from tally import Tally, Violation
from typer.testing import CliRunner

import laststep
from laststep.catalog.attempt import parse_folder
from laststep.catalog.run import Run
from laststep.catalog.terms import Seen
from laststep.cli import app
from laststep.errors import LaststepError
from laststep.read.verify import verify_checkpoint
from laststep.storage.directory import DirectoryStore
from laststep.tiers.runs import plan_copy

if TYPE_CHECKING:
    from pathlib import Path

    from laststep.catalog.listing import Listed

PATIENCE_S = 120.0
"""Whatever takes longer hangs."""


@dataclass(slots=True, kw_only=True)
class Pending:
    """A save that was begun."""

    step: int
    form: int
    mark: int
    loss: float
    handle: laststep.SaveHandle | None = None
    exists: bool = False
    """Whether the lineage may have that step already."""
    harmed: bool = False
    """Whether we did something that lets it fail."""


@dataclass(slots=True, kw_only=True)
class Writer:
    """A Checkpointer of this process."""

    checkpointer: laststep.Checkpointer
    live: Live
    rules: Rules | None
    resumed: str | None = None
    """What it restored."""
    head: str | None = None
    """What its next save continues: what it restored, or saved last."""
    term: int | None = None
    """None: its next save takes a new one."""
    seen: Seen | None = None
    """The newest term and its last commit when it restored, or first saved without that: what its
    claim depends on."""
    own: set[int] = field(default_factory=set)
    """The terms that it took."""
    ahead: set[int] = field(default_factory=set)
    """Steps of its lineage beyond the one that it restored: saving them replaces them."""
    pending: list[Pending] = field(default_factory=list)
    dropped: set[str] = field(default_factory=set)
    """What no rule kept at its last commit."""


class Subject:
    """One run, from its making on."""

    def __init__(self, folder: Path, tally: Tally) -> None:
        self.ledger = Ledger()
        self.writers: list[Writer] = []
        self.tally = tally
        self._folder = folder
        self._places = itertools.count()
        self._marks = itertools.count(1)
        self.path = self._place()

    def _place(self) -> Path:
        return self._folder / f"run-{next(self._places)}"

    # Checkpointers of this process

    def open(self, *, flush: str, rules: Rules | None, form: int) -> None:
        """One more."""
        live = Live(form, next(self._marks))
        checkpointer = laststep.Checkpointer(
            self.path,
            items=live.items,
            options=laststep.Options(flush=flush, progress=False),
            keep=as_keep(rules),
            host_memory_bytes=64 << 20,
            new_lineage=True,
            compression="max" if form % 2 else "none",
        )
        self.writers.append(Writer(checkpointer=checkpointer, live=live, rules=rules))

    def close(self, writer: int) -> None:
        """Close it: its saves are finished before, and its retention is done."""
        one = self.writers.pop(writer)
        self._settle(one)
        one.checkpointer.close()
        left = [folder for folder in sorted(one.dropped) if (self.path / folder).exists()]
        left = [folder for folder in left if self.ledger.entries[folder].damage is None]
        left = [folder for folder in left if not self.ledger.entries[folder].pinned]
        if left and one.term == self.ledger.newest_epoch:
            raise Violation("wrong", f"no rule keeps {left}, and retention left them")

    def reshape(self, writer: int, form: int) -> None:
        """Change the structure of its live state."""
        self.writers[writer].live.become(form, next(self._marks))

    def save(
        self, writer: int, *, step: int, loss: float, overwrite: bool = False, wait: bool = True
    ) -> None:
        """Save other bits than ever before."""
        one = self.writers[writer]
        for other in self.writers:
            if other is not one:
                self._settle(other)
        one.live.become(one.live.form, next(self._marks))
        pending = Pending(step=step, form=one.live.form, mark=one.live.mark, loss=loss)
        # A Checkpointer may remember a step that retention has deleted.
        own = {earlier.step for earlier in one.pending} | self.ledger.steps_ever(one.head)
        pending.exists = step in own - one.ahead and not overwrite
        if one.seen is None:
            one.seen = self._newest_point()
        try:
            pending.handle = one.checkpointer.save(
                step, overwrite=overwrite, metrics={"loss": loss}
            )
        except LaststepError as error:
            self._settle(one)
            self._failed(one, pending, error)
            return
        # What is captured may change at once: what is stored must not.
        one.live.weights["w"].zero_()
        one.pending.append(pending)
        if wait:
            self._settle(one)

    def fail(self, writer: int, *, how: str, step: int) -> None:
        """A save that fails or not, but whole; the next one works."""
        one = self.writers[writer]
        self.settle()
        if how == "a value that cannot be stored":
            one.live.plain["bad"] = _Odd()
            try:
                one.checkpointer.save(step, overwrite=True).wait(PATIENCE_S)
            except laststep.LaststepError:
                pass
            else:
                raise Violation("wrong", "a value was saved that no checkpoint can hold")
            finally:
                del one.live.plain["bad"]
            return
        # The flusher has to be there to be harmed.
        self.save(writer, step=step, loss=math.nan, overwrite=True)
        helper = one.checkpointer._client.helper_pid
        self.save(writer, step=step + 1, loss=math.nan, overwrite=True, wait=False)
        if helper is None:
            return
        for pending in one.pending:
            pending.harmed = True
        if how == "its flusher is killed":
            os.kill(helper, signal.SIGKILL)
            self.tally.fault("model: flusher killed under a live trainer")
            self._settle(one)
            # Where all was committed before its death, the next save hears of that at the latest.
            self.save(writer, step=step + 2, loss=math.nan, overwrite=True, wait=False)
            for pending in one.pending:
                pending.harmed = True
            self._settle(one)
        else:
            self._settle(one)
            limit = (1000, resource.RLIM_INFINITY)
            resource.prlimit(helper, resource.RLIMIT_FSIZE, limit)
            self.tally.fault("model: files limited")
            self.save(writer, step=step + 2, loss=math.nan, overwrite=True, wait=False)
            for pending in one.pending:
                pending.harmed = True
            self._settle(one)
            resource.prlimit(helper, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        self.save(writer, step=step + 3, loss=math.nan, overwrite=True)

    def flushers(self) -> set[int]:
        """Return the flusher processes of this process."""
        pids = {writer.checkpointer._client.helper_pid for writer in self.writers}
        return {pid for pid in pids if pid is not None}

    def settle(self) -> None:
        """Wait for all saves of this process."""
        for one in self.writers:
            self._settle(one)

    def _settle(self, one: Writer) -> None:
        waiting, one.pending = one.pending, []
        for pending in waiting:
            assert pending.handle is not None
            try:
                if not pending.handle.wait(PATIENCE_S):
                    raise Violation("hang", f"the save of step {pending.step} does not end")
            except LaststepError as error:
                self._failed(one, pending, error)
                continue
            folder = pending.handle.report.folder
            if folder is None:
                raise Violation("wrong", f"step {pending.step} is committed nowhere")
            self._committed(one, pending, folder)
        if waiting:
            one.checkpointer.wait(PATIENCE_S)  # each failure is raised once, and was

    def _descent(self, one: Writer) -> list[Entry]:
        if one.term is not None and one.term == self.ledger.newest_epoch:
            return self.ledger.lineage()
        return self.ledger.descent(one.head)

    def _committed(self, one: Writer, pending: Pending, folder: str) -> None:
        """It is said to be: may it?"""
        steps = [e.step for e in self._descent(one) if e.is_sound and not e.may_go]
        if pending.exists and pending.step in steps:
            raise Violation("wrong", f"step {pending.step} is on the lineage, and saved once more")
        number = _point(folder)[0]
        if self._is_taken_over(one, by_the_dead=False):
            raise Violation("wrong", f"{folder} of a writer that was taken over is committed")
        if number != one.term:
            self._claimed(number, one.head)
            one.own.add(number)
        one.ahead.discard(pending.step)
        one.dropped = self.add(pending, folder, one.rules, one.resumed)
        one.head, one.term = folder, number

    def _is_taken_over(self, one: Writer, *, by_the_dead: bool = True) -> bool:
        """Whether another start has taken the run, or committed to it, since this one saw what it
        continues. One of another process, which is dead by now, may be ignored if it has committed
        nothing."""
        if one.term is not None:
            return one.term != self.ledger.newest_epoch
        seen = one.seen or Seen()
        commits = [_point(entry.folder) for entry in self.ledger.there()]
        if any(point > seen.commit and point[0] not in one.own for point in commits):
            return True
        since = [n for n in self.ledger.terms if n > seen.term and n not in one.own]
        records = filter(None, [self.run().term(number) for number in since])
        return any(
            not record.orphan and (by_the_dead or record.pid == os.getpid()) for record in records
        )

    def _newest_point(self) -> Seen:
        points = [_point(entry.folder) for entry in self.ledger.there()]
        return Seen(term=self.ledger.newest_epoch, commit=max(points, default=(0, 0)))

    def _claimed(self, number: int, head: str | None, *, own: frozenset[int] = frozenset()) -> None:
        """A new term, which must continue from `head`, or from what one of the `own` terms
        committed after that and has deleted since."""
        if number <= self.ledger.newest_epoch:
            raise Violation("wrong", f"term {number} was taken twice")
        record = self.run().term(number)
        wanted = None if head is None else _point(head)
        after = record is not None and record.continues is not None and record.continues[0] in own
        if record is None or (record.continues != wanted and not after):
            raise Violation("wrong", f"term {number} says {record}, it continues {wanted}")
        self.ledger.terms[number] = head

    def add(
        self, pending: Pending, folder: str, rules: Rules | None, resumed: str | None
    ) -> set[str]:
        """One more commit, and the retention after it; what that drops."""
        self.ledger.entries[folder] = Entry(
            folder=folder,
            step=pending.step,
            form=pending.form,
            mark=pending.mark,
            term=_point(folder)[0],
            loss=pending.loss,
        )
        return self.ledger.retain(rules, resumed_from=resumed, abandoned=False)

    def _failed(self, one: Writer, pending: Pending, error: LaststepError) -> None:
        """It failed: may it?"""
        taken_over = self._is_taken_over(one)
        allowed = (
            (isinstance(error, laststep.AlreadyExistsError) and pending.exists)
            or (isinstance(error, laststep.AbortedError) and taken_over)
            or (isinstance(error, laststep.StorageError) and pending.harmed)
        )
        if not allowed:
            raise Violation("wrong", f"step {pending.step} failed: {error!r}")
        self._check_remedy(error)
        self.tally.note(f"model: save failed and said so: {type(error).__name__}")

    def _check_remedy(self, error: LaststepError) -> None:
        if not error.remedy:
            told = f"{type(error).__name__}: {error.what}, found {error.found}"
            self.tally.flaw("foreign error", f"an error without a remedy: {told}")

    # Restoring

    def restore(self, writer: int, *, step: int | None = None) -> None:
        """Restore, and compare every bit."""
        one = self.writers[writer]
        self._settle(one)
        before = (one.live.form, one.live.mark)
        one.live.become(*before)
        restored = error = None
        try:
            restored = one.checkpointer.restore(step)
        except LaststepError as told:
            error = told
        for other in self.writers:
            if any(not pending.handle.committed.over() for pending in other.pending):
                raise Violation("wrong", "restore() did not wait for a save of this process")
            self._settle(other)
        if step is None:
            allowed, damaged = self.ledger.of_newest()
        else:
            allowed, damaged = [], []
            for entry in self.ledger.all_of_step(step):
                (allowed if entry.is_sound else damaged).append(entry)
        if restored is not None:
            self._restored(one, restored, allowed, damaged if step is None else [])
        else:
            assert error is not None
            self._not_restored(writer, error, allowed, damaged, before, step)

    def _restored(
        self, one: Writer, restored: laststep.Restored, allowed: list[Entry], damaged: list[Entry]
    ) -> None:
        one.term, one.seen = None, self._newest_point()
        if restored.step is None:
            if any(not entry.may_go for entry in allowed) or damaged:
                raise Violation("wrong", f"nothing was restored where {_names(allowed)} is due")
            one.head = one.resumed = None
            one.ahead = set()
            return
        entry = next((e for e in allowed if e.folder == restored.folder), None)
        if entry is None:
            raise Violation("wrong", f"restored {restored}, allowed are {_names(allowed)}")
        wrong = one.live.wrong(entry.form, entry.mark)
        if wrong or restored.step != entry.step:
            raise Violation("wrong", f"{entry.folder} came back wrong: {wrong}")
        one.live.form, one.live.mark = entry.form, entry.mark
        order = list(self.ledger.entries)
        newer = {e.folder for e in damaged if order.index(e.folder) > order.index(entry.folder)}
        sure = {folder for folder in newer if not self.ledger.entries[folder].may_go}
        skipped = {one.folder for one in restored.skipped}
        if not sure <= skipped <= newer:
            raise Violation("wrong", f"passed over {newer}, said {restored.skipped}")
        one.head = one.resumed = entry.folder
        steps = {e.step for e in self.ledger.descent(entry.folder)}
        one.ahead = {step for step in steps if step > entry.step}
        if restored.next_step != entry.step + 1:
            raise Violation("wrong", f"next_step {restored.next_step} after {entry.step}")
        self.tally.checkpoint()

    def _not_restored(
        self,
        writer: int,
        error: LaststepError,
        allowed: list[Entry],
        damaged: list[Entry],
        before: tuple[int, int],
        step: int | None,
    ) -> None:
        one = self.writers[writer]
        sure = [entry for entry in allowed if not entry.may_go]
        fits = (
            (
                isinstance(error, laststep.NotFoundError)
                and step is not None
                and not sure
                and not damaged
            )
            or (isinstance(error, laststep.CorruptError) and not sure and bool(damaged))
            or (
                isinstance(error, laststep.MismatchError)
                and any(entry.form != before[0] for entry in (*allowed, *damaged))
            )
        )
        if not fits:
            raise Violation("wrong", f"restore({step}) of {_names(allowed)}: {error!r}")
        self._check_remedy(error)
        if isinstance(error, laststep.CorruptError):
            # The live state may be mixed now, and the next save refused: that is another's story.
            self.writers.pop(writer)
            one.checkpointer.close()
            return
        wrong = one.live.wrong(*before)
        if wrong:
            raise Violation("wrong", f"a restore that failed has changed the state: {wrong}")

    # What others do to the run

    def corrupt(self, which: int, *, file: int, how: str, place: float) -> None:
        """Damage one file of a checkpoint, in a way that hurts a restore: headers of data files are
        for others to read, and are left alone."""
        self.settle()
        self.look()
        there = [entry for entry in self.ledger.there() if entry.is_sound and not entry.may_go]
        if not there:
            return
        entry = there[which % len(there)]
        files = sorted(f for f in (self.path / entry.folder).iterdir() if f.name != "pinned")
        chosen = files[file % len(files)]
        is_manifest = chosen.name == "manifest.json"
        if is_manifest and self.writers and how == "delete":
            # It would be an attempt of a live writer, for which every restore waits for minutes.
            how = "flip"
        data = bytearray(chosen.read_bytes())
        if how == "delete":
            chosen.unlink()
            entry.gone = is_manifest  # without its manifest it is an attempt, which nobody sees
        elif how == "truncate":
            chosen.write_bytes(data[: int(place * len(data))])
        else:
            length = int.from_bytes(data[:8], "little")
            start = 8 + length if chosen.suffix == ".safetensors" else 0
            data[start + int(place * (len(data) - start))] ^= 1 << int(place * 1009) % 8
            chosen.write_bytes(data)
        # A listing sees that an index is missing, but not how long it should be.
        is_cut_index = how == "truncate" and chosen.name.startswith("index-r")
        damage: Damage = "flipped" if how == "flip" or is_cut_index else "incomplete"
        entry.damage = "unreadable" if is_manifest else damage
        self.tally.fault(f"model: file damaged ({how})")
        # Retention may come after that, and then keeps an older one in the place of this.
        for one in self.writers:
            one.dropped.clear()

    def pin(self, step: int, *, pinned: bool) -> None:
        """`laststep pin` and `unpin`."""
        self.settle()
        self.look()
        entry = self.ledger.of_step(step)
        if entry is None or entry.may_go or entry.damage is not None:
            return
        self._command("pin" if pinned else "unpin", str(self.path), str(step))
        entry.pinned = pinned

    def prune(self, rules: Rules, *, abandoned: bool) -> None:
        """`laststep prune`."""
        self.settle()
        self.look()
        if not self.ledger.there():
            return
        words = [
            f"--{name}={value}"
            for name, value in (("last", rules.last), ("every", rules.every), ("best", rules.best))
            if value is not None
        ]
        words += ["--metric=loss"] * (rules.best is not None) + ["--abandoned"] * abandoned
        newest = [entry for entry in self.ledger.lineage() if entry.is_whole][-1:]
        may_refuse = not newest or newest[0].damage is not None
        self._command("prune", str(self.path), "--yes", *words, may_fail=may_refuse)
        # The one that the newest writer resumed from stays; it may be any that a term continues.
        self.ledger.retain(rules, resumed_from=None, abandoned=abandoned)

    def _command(self, *words: str, may_fail: bool = False) -> None:
        done = CliRunner().invoke(app, list(words))
        error = done.exception
        if isinstance(error, LaststepError) and may_fail:
            return
        if done.exit_code != 0:
            raise Violation("wrong", f"laststep {' '.join(words)}: {error!r} {done.output}")

    def move(self, *, copy: bool) -> None:
        """The run is moved, or copied; what follows is done to the new one."""
        self.settle()
        while self.writers:
            self.close(0)
        if self.path.exists():
            place = self._place()
            (shutil.copytree if copy else shutil.move)(self.path, place)
            self.path = place

    def copy(self) -> None:
        """All that is sound is copied elsewhere, and nothing else; on the same lineage."""
        self.settle()
        if not (before := self.listed()):
            return
        here, there = DirectoryStore(self.path), DirectoryStore(self._place())
        report = plan_copy(here.url, there.url).execute()
        stayed = {item.folder for item in before} & {item.folder for item in self.listed()}
        for folder in stayed:  # retention may take others at any time
            with contextlib.suppress(laststep.NotFoundError):
                if is_sound(here, folder) != (folder in report.copied):
                    raise Violation("wrong", f"{folder} of {here.url}: {report}")
        if not all(is_sound(there, folder) for folder in report.copied):
            raise Violation("wrong", f"{there.url} is damaged")
        if len(report.copied) == len(before):
            one, other = (
                [(item.folder, item.on_lineage, item.superseded_by, item.pinned) for item in listed]
                for listed in (before, Run.open(there).checkpoints())
            )
            if one != other:
                raise Violation("wrong", f"{one} was copied, and is {other}")

    # Looking

    def run(self) -> Run:
        return Run.open(DirectoryStore(self.path))

    def listed(self) -> tuple[Listed, ...]:
        """All that is committed."""
        try:
            return self.run().checkpoints()
        except laststep.NotFoundError:
            return ()

    def look(self) -> None:
        """What must be there is, nothing else is, and the lineage is what it must be."""
        if not self.ledger.entries or any(one.pending for one in self.writers):
            return
        listed = {item.folder: item for item in self.listed()}
        expected = {entry.folder: entry for entry in self.ledger.there()}
        for folder, entry in expected.items():
            if folder not in listed:
                if not entry.may_go:
                    raise Violation("wrong", f"{folder} is gone")
                entry.gone = True
        if strangers := listed.keys() - expected.keys():
            raise Violation("wrong", f"{sorted(strangers)} are there and should not be")
        if any(entry.may_go for entry in self.ledger.there()):
            return  # being deleted, perhaps just now
        current = [item.folder for item in listed.values() if item.on_lineage]
        wanted = [entry.folder for entry in self.ledger.lineage()]
        if current != wanted:
            raise Violation("wrong", f"the lineage is {current}, it must be {wanted}")

    def compare(self) -> None:
        """Every checkpoint that must be there, every bit."""
        self.settle()
        self.look()
        for entry in self.ledger.there():
            if entry.may_go:
                continue
            try:
                loaded = laststep.load(self.path / entry.folder)
            except LaststepError as error:
                if entry.is_sound:
                    raise Violation("wrong", f"{entry.folder}: {error!r}") from error
                continue
            wrong = differences(loaded["weights"], loaded["plain"], entry.form, entry.mark)
            if wrong or not entry.is_sound:
                raise Violation("wrong", f"{entry.folder} ({entry.damage}) loads: {wrong}")
            self.tally.checkpoint()

    def end(self) -> None:
        """Close everything and compare once more."""
        while self.writers:
            self.close(0)
        self.compare()


class _Odd:
    """Of a class that no checkpoint knows."""


def is_sound(store: DirectoryStore, folder: str) -> bool:
    """Whether all of a checkpoint is as it was written."""
    return not verify_checkpoint(store, folder).damage


def as_keep(rules: Rules | None) -> laststep.Keep | None:
    """The rules as the API has them."""
    if rules is None:
        return None
    metric = "loss" if rules.best is not None else None
    return laststep.Keep(last=rules.last, every=rules.every, best=rules.best, metric=metric)


def _point(folder: str) -> tuple[int, int]:
    name = parse_folder(folder)
    assert name is not None
    return name.point


def _names(entries: list[Entry]) -> list[str]:
    return [entry.folder for entry in entries]
