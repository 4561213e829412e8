"""A job of many ranks in one process: notes in a dict, flushers that are told what happens to them,
a run in a folder, and a clock of its own.

Each rank that saves is a thread. Time stands still while any of them works; when all wait it goes
on by a bit, and all look again. So a deadline of 30 s passes in no time, and only if nobody can go
on without it: what a test sees does not depend on how fast or how loaded the machine is.
"""

from __future__ import annotations

import contextlib
import enum
import math
import shutil
import tempfile
import threading
from typing import TYPE_CHECKING, Any

from laststep.catalog import attempt
from laststep.catalog.attempt import AttemptName, read_decision
from laststep.codecs.digests import DIGEST_BYTES
from laststep.commit.layouts import GlobalLayouts
from laststep.commit.rounds import Leader, Member, Participant, Round
from laststep.errors import AbortedError, LaststepError, StorageError, brief
from laststep.events import Bus
from laststep.flush.protocol import Begin, Begun, Decide
from laststep.flush.saves import Save
from laststep.format.manifest import Commit, WrittenIndexes
from laststep.plan.files import ItemSpec, SavePlan
from laststep.plan.layouts import LocalItem, LocalTensor
from laststep.plan.receipts import Groups
from laststep.ranks.group import Rank
from laststep.storage.directory import DirectoryStore
from laststep.storage.files import Disk
from saves_of import flush

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from laststep.plan.layouts import LocalLayout

DEADLINE_S = 30.0
_TICK_S = 0.5
_END_S = 1000.0
"""Nobody waits that long: then somebody waits for ever."""


class Unsynced(Disk):
    """Nothing that a job leaves has to survive it."""

    @staticmethod
    def sync(_: int) -> None:
        pass

    sync_folder = sync


class Clock:
    """Time that passes only while all threads that take part wait."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._changed = threading.Condition()
        self._changes = 0
        self._working = self._waiting = 0

    def enter(self) -> None:
        with self._changed:
            self._working += 1

    def leave(self) -> None:
        with self._changed:
            self._working -= 1
            self._go_on()

    @contextlib.contextmanager
    def standing(self) -> Iterator[None]:
        """It stands still meanwhile."""
        self.enter()
        try:
            yield
        finally:
            self.leave()

    def stir(self) -> None:
        """Something has changed: whoever waits looks again."""
        with self._changed:
            self._wake()

    def until(self, look: Callable[[], Any], until_s: float) -> Any:
        while True:
            with self._changed:
                seen, late = self._changes, self.now_s >= until_s
            if (found := look()) or late:
                return found
            with self._changed:
                if self._changes != seen:
                    continue
                self._working -= 1
                self._waiting += 1
                self._go_on()
                while self._changes == seen:
                    self._changed.wait()
            if self.now_s > _END_S:
                raise AssertionError("somebody waits for ever")

    def pass_s(self, seconds: float) -> None:
        """Wait so long."""
        self.enter()
        try:
            self.until(lambda: None, self.now_s + seconds)
        finally:
            self.leave()

    def _go_on(self) -> None:
        if not self._working and self._waiting:
            self.now_s += _TICK_S
            self._wake()

    def _wake(self) -> None:
        """Whoever is woken counts as working from now on, not only once it runs."""
        self._changes += 1
        self._working, self._waiting = self._working + self._waiting, 0
        self._changed.notify_all()


GONE = "the store does not answer"


class Loss(enum.Enum):
    """What becomes of a note when its store does not answer whoever leaves it."""

    LOST = "it is never there"
    UNHEARD = "it is there, though nobody says so"
    LATE = "it is there when this rank leaves its next: until then the question stood"


class MemoryBoard:
    """What `laststep.ranks.key_value.Board` does, with notes in a dict that all ranks share."""

    prefix = "simulated"

    def __init__(self, clock: Clock, notes: dict[str, bytes], told: Callable[[str], None]) -> None:
        self._clock, self._notes, self._told = clock, notes, told
        self.loses: Callable[[str], Loss | None] = lambda name: None
        """What becomes of a note that this rank leaves; None: it is there."""
        self.reaches: Callable[[], bool] = lambda: True
        """Whether the store answers this rank; asked for each note that it leaves or looks for."""
        self._late: list[tuple[str, bytes]] = []

    def now_s(self) -> float:
        return self._clock.now_s

    def put(self, name: str, note: bytes) -> None:
        self._told(name)
        loss = self.loses(name) if self._answered() else Loss.LATE
        if loss is Loss.LATE:
            self._late.append((name, note))
        if loss is None:
            self._notes.update(self._late)
            self._late.clear()
        if loss in (None, Loss.UNHEARD):
            self._notes[name] = note
            self._clock.stir()
        if loss is not None:
            raise StorageError(GONE)

    def look(self, name: str) -> bytes | None:
        if not self._answered():
            raise StorageError(GONE)
        return self._notes.get(name)

    def look_all(self, names: Iterable[str]) -> dict[str, bytes]:
        notes = {name: self.look(name) for name in names}
        return {name: note for name, note in notes.items() if note is not None}

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            self._notes.pop(name, None)

    def until(self, look: Callable[[], Any], until_s: float = math.inf, *, rest: Any = None) -> Any:
        return self._clock.until(look, until_s)

    def wait_all(
        self, names: Iterable[str], until_s: float, *, meanwhile: Callable[[], None] | None = None
    ) -> dict[str, bytes]:
        wanted = list(names)

        def look() -> bool:
            found = len(self.look_all(wanted)) == len(wanted)
            if not found and meanwhile is not None:
                meanwhile()
            return found

        self.until(look, until_s)
        return self.look_all(wanted)

    def _answered(self) -> bool:
        """Whether the store answers a question as long as somebody waits for that."""
        if self.reaches():
            return True
        until_s = self._clock.now_s + DEADLINE_S
        return self._clock.until(self.reaches, until_s)


class Killed(BaseException):
    """The rank is dead: nothing of it runs any more."""


def written_by(rank: int) -> WrittenIndexes:
    """What a rank reports of its files; no two ranks report the same."""
    digest = rank.to_bytes(DIGEST_BYTES, "big")
    return WrittenIndexes(indexes=digest, files=1, size_bytes=8192 + rank)


class Flusher:
    """What the client of a flusher does for a rank's commit thread. Its files are durable as soon
    as it knows where they are; what is to happen instead is told by the test."""

    def __init__(self, job: SimulatedJob, rank: int) -> None:
        self._job, self._rank = job, rank
        self.bus = Bus()
        self.save: Save | None = None
        self.stands = False
        """It is stopped: messages wait."""
        self.kept: list[object] = []
        self.full = False
        """It has no room for its files."""

    def send(self, message: object) -> None:
        if isinstance(message, Decide) and message.reason is None and self._rank == 0:
            self._job.ranks[0].comes_to("decide")
        if self.stands:
            self.kept.append(message)
            return
        save = self.save
        if save is None or save.lost is not None or save.over:
            return
        if isinstance(message, Begin) and self._rank == 0:
            self._job.attempts += 1
            at = AttemptName(step=message.step, term=1, attempt=self._job.attempts)
            self._job.store.make_folder(at.folder)
            save.hear(Begun(save=save.number, at=at))
            self._write(save)
        elif isinstance(message, Begun):
            save.at = message.at
            self._write(save)
        elif isinstance(message, Decide) and message.by_all:
            self._decide(save, message)
        self._job.clock.stir()

    def resume(self) -> None:
        self.stands = False
        kept, self.kept = self.kept, []
        for message in kept:
            self.send(message)

    def die(self) -> None:
        """As `Client` tells it: what is durable may still be committed by others."""
        error = StorageError("the flusher ended", found="it was killed by signal 9")
        save = self.save
        assert save is not None
        if save.handle.durable.done():
            save.lose_flusher(error)
        else:
            self._end(save, error)
        self._job.clock.stir()

    def save_ends(self, save: Save, at: AttemptName | None) -> None:
        """Nothing follows from it here."""

    def _write(self, save: Save) -> None:
        if self.full:
            self._end(save, StorageError("cannot write", found="No space left on device"))
            return
        flush(save, written_by(self._rank))

    def _decide(self, save: Save, decide: Decide) -> None:
        store, at = self._job.store, save.at
        assert at is not None
        try:
            if decide.reason is not None:
                if isinstance(attempt.abort(store, at.folder, decide.reason), Commit):
                    self._end(save, None)
                else:
                    self._end(save, AbortedError(decide.reason))
                return
            if self._rank == 0:
                commit = Commit(
                    run="run",
                    step=at.step,
                    term=at.term,
                    attempt=at.attempt,
                    created_s=0.0,
                    laststep="",
                    items=decide.items,
                    written=decide.written,
                    layout_groups=decide.layout_groups,
                    ranks=decide.ranks,
                )
                attempt.Attempt(store, at).commit(commit)
            self._end(save, None)
        except LaststepError as error:
            self._end(save, error)

    def _end(self, save: Save, error: LaststepError | None) -> None:
        if error is None:
            assert save.at is not None
            save.decided(save.at)
        else:
            save.fail(error)
        self._job.clock.stir()


class SimulatedRank:
    """One rank: `begin` a save, and hear by `outcome` what became of it."""

    def __init__(self, job: SimulatedJob, number: int) -> None:
        self._job, self.number = job, number
        self.flusher = Flusher(job, number)
        self.tensors = ["w"]
        """What this rank holds, and how large each is."""
        self.size = 4
        self.value = b"1"
        """The plain values of its item."""
        self.at: dict[str, Callable[[], None]] = {}
        """What happens once, before this rank leaves a note whose name ends so; `decide`: before
        the first rank, which has all receipts, has its flusher commit."""
        self._thread: threading.Thread | None = None
        self._error: LaststepError | None = None
        self._died: BaseException | None = None
        self.kv = kv = MemoryBoard(job.clock, job.notes, self.comes_to)
        rank = Rank(number, job.groups.ranks)
        self.global_layouts = GlobalLayouts(rank, kv, deadline_s=DEADLINE_S)
        shared = (rank, kv, self.flusher, self.global_layouts, job.store, DEADLINE_S, job.groups)
        self._participant: Participant = Leader(*shared, Bus()) if number == 0 else Member(*shared)
        self.global_layouts.known = lambda: self._participant.known

    def comes_to(self, name: str) -> None:
        for end in [end for end in self.at if name.endswith(end)]:
            self.at.pop(end)()

    def die(self) -> None:
        """For `at`: it is killed, and its flusher lives on and commits nothing."""
        raise Killed

    def sleep(self) -> None:
        """For `at`: it is stopped, until long after everybody's time is up."""
        self._job.clock.until(lambda: None, self._job.clock.now_s + 5 * DEADLINE_S)

    def begin(self, step: int, *, problem: str = "") -> None:
        """Save that step; with a problem, take no part in it."""
        self._job.clock.stir()
        self._thread = self._start(self._save, step, problem)

    def outcome(self) -> str:
        """ "" once it is committed, else why it has failed."""
        assert self._thread is not None
        self._thread.join(60)
        assert not self._thread.is_alive(), "it hangs"
        if self._died is not None:
            raise self._died
        return "" if self._error is None else str(self._error)

    def _save(self, step: int, problem: str) -> None:
        self._error = self._died = None
        try:
            self._go(step, problem)
        except Killed:
            return
        except LaststepError as error:
            self._error = error
        except BaseException as error:  # noqa: BLE001 (raised by who asks)
            self._died = error

    def _start(self, work: Callable[..., None], *arguments: object) -> threading.Thread:
        """A thread that the clock counts."""

        def go() -> None:
            try:
                work(*arguments)
            finally:
                self._job.clock.leave()

        self._job.clock.enter()
        thread = threading.Thread(target=go, daemon=True)
        thread.start()
        return thread

    def _go(self, step: int, problem: str) -> None:
        try:
            if problem:
                raise AbortedError(problem)
            global_layout = self.global_layouts.on(self._local_layout(), step)
        except LaststepError as error:
            self._participant.go_through(Round(step, None, None, problem=brief(error)))
            raise
        save = Save(self.flusher, step, role="first" if self.number == 0 else "member")
        item = ItemSpec(name="m", kind="value", standalone=False, pieces=())
        save.plan = SavePlan(items=(item,), files=(), pieces=(), values=("m",))
        self.flusher.save = save
        if self.number == 0:
            save.begin()
        round_ = Round(step, save, global_layout)
        round_.seal({"m": self.value}, self.number)
        self._participant.go_through(round_)
        if save.error is not None:
            raise save.error

    def _local_layout(self) -> LocalLayout:
        tensors = tuple(LocalTensor(name, "float32", (self.size,), None) for name in self.tensors)
        return (LocalItem("m", "value", False, tensors),)


class SimulatedJob:
    """So many ranks, in groups of so many."""

    def __init__(self, ranks: int, *, group: int | None = None) -> None:
        self.clock = Clock()
        self.notes: dict[str, bytes] = {}
        self._folder = tempfile.mkdtemp(prefix="laststep-job-")
        self.store = DirectoryStore(self._folder, disk=Unsynced())
        self.attempts = 0
        self.groups = Groups(ranks, group or ranks)
        self.ranks = [SimulatedRank(self, number) for number in range(ranks)]

    def begin(self, step: int, *numbers: int) -> list[SimulatedRank]:
        """These ranks save that step, or all."""
        chosen = [self.ranks[number] for number in numbers] or self.ranks
        with self.clock.standing():
            for rank in chosen:
                rank.begin(step)
        return chosen

    def save(self, step: int, *numbers: int) -> list[str]:
        """The same; returns what each hears in the end."""
        return [rank.outcome() for rank in self.begin(step, *numbers)]

    def committed(self) -> list[int]:
        """The steps that are committed, in order."""
        return [commit.step for commit in self.commits()]

    def commits(self) -> list[Commit]:
        """The manifests of these."""
        found = [read_decision(self.store, entry.name) for entry in self.store.list("")]
        return [manifest for manifest in found if isinstance(manifest, Commit)]

    def close(self) -> None:
        shutil.rmtree(self._folder)
