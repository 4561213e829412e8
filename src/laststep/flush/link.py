"""The sink of one capture: its chunks on their way to the flusher, and what came of them.

Any thread may hand chunks over; whichever has some first announces the save. What the flusher says
of it is noted here by the client's receiving thread.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from laststep.errors import Aborted, LaststepError, StorageFailed
from laststep.flush.protocol import Begin, Begun, Chunks, FileBegin, Grouped, Role, Seal
from laststep.format.manifest import FileRecord, GroupRecord, ItemRecord

if TYPE_CHECKING:
    from laststep.capture.job import CaptureTiming
    from laststep.catalog.names import AttemptName
    from laststep.flush.client import Client
    from laststep.flush.handle import SaveHandle
    from laststep.memory.filled import Filled
    from laststep.plan.files import SavePlan

log = logging.getLogger(__name__)

SealParts = Callable[
    [], tuple[tuple[tuple[int, str, bytes], ...], tuple[ItemRecord, ...], bytes, bytes]
]


class SaveLink:
    """The sink of one capture: passes its chunks on and seals the save when all are there."""

    def __init__(
        self,
        client: Client,
        number: int,
        handle: SaveHandle,
        plan: SavePlan,
        parts: SealParts,
        *,
        overwrite: bool,
        role: Role = "alone",
    ) -> None:
        self._client = client
        self.number = number
        self.at: AttemptName | None = None
        """Where the flusher has begun it, unless this rank is told by the first one."""
        self.files: tuple[FileRecord, ...] = ()
        """What this rank has made durable of it."""
        self.group: GroupRecord | None = None
        """The manifest of the group of ranks that this one speaks for, once it is durable."""
        self.lost: LaststepError | None = None
        """Why the flusher is gone that had made all of it durable: others may still commit it, so
        whoever takes part in that finds out and reports."""
        self._news = threading.Event()
        self._role = role
        self.handle = handle
        self._plan = plan
        self._parts = parts
        self._overwrite = overwrite
        self._begun = False
        self._dropped = False
        self._beginning = threading.Lock()
        self.size_bytes = plan.tensor_bytes
        self.telling = threading.Lock()

    @property
    def may_be_committed(self) -> bool:
        """Whether all of it is durable that this rank has to write."""
        return self.handle.durable.done()

    @property
    def decided_by_all(self) -> bool:
        """Whether the ranks of a job decide about it."""
        return self._role != "alone"

    @property
    def awaited(self) -> bool:
        """Whether the next flusher has to know what becomes of it: saves go on from there."""
        return self._role == "first" and self.lost is not None

    def rest(self, timeout_s: float) -> None:
        """Wait for news of the flusher; for one thread, which then looks what they are."""
        self._news.wait(timeout_s)
        self._news.clear()

    def note(self, message: Begun | Grouped | None = None) -> None:
        """The flusher has said so; or, where that is nothing more, the save is over for it."""
        if isinstance(message, Begun):
            self.at = message.at
        elif message is not None:
            self.group = message.group
        self._news.set()

    def begin(self) -> None:
        """Announce the save to the flusher, once; by whichever thread has something to hand over
        first, which is the capture thread unless host state is copied at once."""
        with self._beginning:  # several threads copy host state: no chunk may overtake this
            if self._begun or self._dropped:
                return
            files = tuple(map(FileBegin.of, self._plan.files))
            if self._role == "alone":  # of several ranks no one can finish a save by itself
                self._client.announce(self.number)
            self._client.send(
                Begin(
                    save=self.number, step=self.handle.step, overwrite=self._overwrite,
                    files=files, role=self._role,
                )
            )  # fmt: skip
            self._begun = True

    def chunks(self, filled: list[Filled]) -> None:
        self.begin()
        if self._dropped:
            self._client.release([chunk.slot for chunk in filled])
            return
        self._client.send(Chunks(save=self.number, filled=filled))

    def captured(self, timing: CaptureTiming) -> None:
        """All chunks are handed over: serialise the objects, seal, and tell."""
        if self._dropped:
            return
        try:
            objects, items, metrics, metadata = self._parts()
        except LaststepError as error:
            self.failed(error)
            return
        except Exception as error:  # such as a device error that a metric's value brings to light
            log.exception("the objects of step %d cannot be serialised", self.handle.step)
            self.failed(StorageFailed("a capture failed", found=repr(error)))
            return
        self.begin()
        seal = Seal(
            save=self.number, objects=objects, items=items, metrics=metrics, metadata=metadata
        )
        # Sealed first: once somebody is told "captured", the death of the trainer loses nothing.
        # The lock keeps the flusher's answer from overtaking that.
        with self.telling:
            self._client.send(seal)
            self._client.note_captured(self, timing)
        self._parts = _spent

    def failed(self, error: LaststepError) -> None:
        with self._beginning:
            self._dropped = True
        self._parts = _spent
        self._client.drop(self.number, error, begun=self._begun)


def _spent() -> NoReturn:
    """In place of what a save would seal, once it is over: that held the state's trees."""
    raise Aborted("the save is over")
