"""The saves that are under way: one record for each, and the one place where all of them are.

`save()` makes a record, which goes with the save to its end: the capture hands its chunks to it,
the client's receiving thread notes on it what the flusher says, the commit thread works with it.
Any thread may hand chunks over; whichever has some first announces the save. All are in `Saves`
until whoever called `save()` was told how they ended; queues of single threads only point to them.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from laststep.errors import Aborted, LaststepError, StorageFailed
from laststep.flush.handle import SaveHandle
from laststep.flush.protocol import (
    Begin,
    Begun,
    Chunks,
    Drop,
    Granted,
    Role,
    Seal,
    Unchanged,
)
from laststep.format.manifest import ItemRecord, Written

if TYPE_CHECKING:
    from collections.abc import Sequence

    from laststep.capture.job import CaptureTiming, Job
    from laststep.catalog.names import AttemptName
    from laststep.flush.client import Client
    from laststep.memory.filled import Filled
    from laststep.plan.files import SavePlan

log = logging.getLogger(__name__)

_LOOK_S = 0.2
"""How often one who waits for an answer looks whether there will be none."""

SealedParts = tuple[dict[str, bytes], tuple[ItemRecord, ...], bytes, bytes, bytes]
SealParts = Callable[[], SealedParts]


class SaveUnderWay:
    """A save of this process, from `save()` on; seals itself when all of its chunks are there."""

    plan: SavePlan
    """Which files it has; known from `planned` on."""

    def __init__(
        self, client: Client, step: int, *, overwrite: bool = False, role: Role = "alone"
    ) -> None:
        self._client = client
        self.handle = SaveHandle(step)
        self._overwrite = overwrite
        self._role = role
        self.number = 0
        """By which the flusher knows it; given by `Saves`."""
        self.ended = False
        """Whether somebody tells, or has told, how it ended; `Saves` sees to it that one does."""
        self.job: Job | None = None
        """Its capture, once `save()` has returned."""
        self.at: AttemptName | None = None
        """Where the flusher has begun it, unless this rank is told by the first one."""
        self.written = Written()
        """What this rank has made durable of it."""
        self.lost: LaststepError | None = None
        """Why the flusher is gone that had made all of it durable: others may still commit it, so
        whoever takes part in that finds out and reports."""
        self._news = threading.Event()
        self._granted: tuple[tuple[int, int], ...] = ()
        self._answered = threading.Event()
        self._parts: SealParts = _spent
        self._begun = False
        self._dropped = False
        self._beginning = threading.Lock()
        self.telling = threading.Lock()

    def planned(self, plan: SavePlan, parts: SealParts) -> None:
        """It is planned; `parts` gives what is sealed with it."""
        self.plan, self._parts = plan, parts

    @property
    def since(self) -> int:
        """The number of the last save that is committed; 0: none by the flusher that runs."""
        return self._client.last_committed

    @property
    def over(self) -> bool:
        """Whether it is committed or never will be."""
        return self.handle.committed.over()

    @property
    def capturing(self) -> bool:
        """Whether its capture is not over."""
        return self.job is not None and not self.job.is_over()

    @property
    def is_member(self) -> bool:
        """Whether the first rank of its job says where it is written."""
        return self._role == "member"

    @property
    def may_be_committed(self) -> bool:
        """Whether all of it is durable that this rank has to write."""
        return self.handle.durable.done()

    @property
    def decided_by_all(self) -> bool:
        """Whether the ranks of a job decide about it."""
        return self._role != "alone"

    def rest(self, timeout_s: float) -> None:
        """Wait for news of the flusher; for one thread, which then looks what they are."""
        self._news.wait(timeout_s)
        self._news.clear()

    def note(self, message: Begun | Granted | None = None) -> None:
        """The flusher has said so; or, where that is nothing more, the save is over for it."""
        if isinstance(message, Granted):
            self._granted = message.chunks
            self._answered.set()
            return
        if message is not None:
            self.at = message.at
        self._news.set()

    def begin(self) -> None:
        """Announce the save to the flusher, once; by whichever thread has something to hand over
        first, which is the capture thread unless host state is copied at once."""
        with self._beginning:  # several threads copy host state: no chunk may overtake this
            if self._begun or self._dropped:
                return
            if self._role == "alone":  # of several ranks no one can finish a save by itself
                self._client.announce(self.number)
            self._client.send(
                Begin(
                    save=self.number,
                    step=self.handle.step,
                    overwrite=self._overwrite,
                    files=tuple(file.layout for file in self.plan.files),
                    derived=self.plan.derived,
                    is_declared=self.plan.is_declared,
                    role=self._role,
                )
            )
            self._begun = True

    def chunks(self, filled: list[Filled]) -> None:
        self.begin()
        if self._dropped:
            self._client.release([chunk.slot for chunk in filled])
            return
        self._client.send(Chunks(save=self.number, filled=filled))

    def unchanged(
        self, of: int, chunks: Sequence[tuple[int, int, int]]
    ) -> frozenset[tuple[int, int]]:
        """Of chunks that hold what they held in an earlier save, those that need not be handed
        over. Waits for the flusher's answer; called by the capture thread."""
        self.begin()
        if self._dropped:
            return frozenset()
        self._client.send(Unchanged(save=self.number, of=of, chunks=tuple(chunks)))
        while not (self._answered.wait(_LOOK_S) or self.over or self.lost):
            pass
        return frozenset(self._granted)

    def captured(self, timing: CaptureTiming) -> None:
        """All chunks are handed over: serialise the objects, seal, and tell."""
        if self._dropped:
            return
        try:
            values, items, metrics, metadata, receipt = self._parts()
        except LaststepError as error:
            self.failed(error)
            return
        except Exception as error:  # such as a device error that a metric's value brings to light
            log.exception("the objects of step %d cannot be serialised", self.handle.step)
            self.failed(StorageFailed("a capture failed", found=repr(error)))
            return
        self.begin()
        seal = Seal(
            save=self.number, values=values, items=items, metrics=metrics, metadata=metadata,
            receipt=receipt,
        )  # fmt: skip
        # Sealed first: once somebody is told "captured", the death of the trainer loses nothing.
        # The lock keeps the flusher's answer from overtaking that.
        with self.telling:
            self._client.send(seal)
            self._client.note_captured(self, timing)
        self._parts = _spent

    def call_off(self, reason: str) -> None:
        """Have the flusher give it up, unless it is too late, and raise nothing then; the flusher
        says how it ended."""
        self.handle.committed.seen = True
        self.begin()  # the flusher ignores what is said of a save that it does not know
        self._client.send(Drop(save=self.number, reason=reason))

    def failed(self, error: LaststepError) -> None:
        with self._beginning:
            self._dropped = True
        self._parts = _spent
        self._client.drop(self.number, error, begun=self._begun)


def _spent() -> NoReturn:
    """In place of what a save would seal, once it is over: that held the state's trees."""
    raise Aborted("the save is over")


class Saves:
    """All saves of one Checkpointer that are under way, or whose end their caller was not told.

    The training thread enters them and takes out those that are over. Whoever hears first how one
    ended ends it, on any thread; nobody does so twice.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._saves: dict[int, SaveUnderWay] = {}
        self._failed: list[SaveHandle] = []
        self._count = 0
        self.refusal: LaststepError | None = None
        """Why no save can be entered, until that is taken back."""

    def enter(self, save: SaveUnderWay) -> None:
        """One more, under a number of its own; raises why there can be none."""
        with self._lock:
            if self.refusal is not None:
                raise self.refusal
            self._count += 1
            save.number = self._count
            self._saves[save.number] = save

    def all(self) -> list[SaveUnderWay]:
        """In the order in which they began. Takes no lock: an interrupt may come here."""
        return list(self._saves.values())

    def to_end(self) -> list[SaveUnderWay]:
        """Those that nobody has ended."""
        return [save for save in self.all() if not save.ended]

    def find(self, number: int) -> SaveUnderWay | None:
        """The save of that number, unless somebody has ended it."""
        save = self._saves.get(number)
        return None if save is None or save.ended else save

    def end(self, number: int) -> SaveUnderWay | None:
        """The same for whoever ends it: nobody else gets it after this."""
        with self._lock:
            save = self.find(number)
            if save is not None:
                save.ended = True
            return save

    def refuse(self, error: LaststepError) -> list[SaveUnderWay]:
        """Enter no more, for that reason; returns those that are to be ended. At once: a save that
        came between the two would wait for ever."""
        with self._lock:
            self.refusal = error
            return self.to_end()

    def forget(self, save: SaveUnderWay) -> None:
        """It is no longer under way."""
        self._saves.pop(save.number, None)

    def take_over(self) -> list[SaveUnderWay]:
        """Those that are over, which are no longer under way; what failed is still to be told."""
        over = [save for save in self.all() if save.over]
        for save in over:
            self.forget(save)
        self._failed += [save.handle for save in over if save.handle.error is not None]
        return over

    def tell(self) -> list[LaststepError]:
        """What made those fail that were taken over and nobody has seen: it is told now."""
        failed, self._failed = self._failed, []
        return [save.error for save in failed if save.error is not None and not save.seen]
