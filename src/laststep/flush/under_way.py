"""A save on its way through the flusher: what has come of it, and waiting for what has not.

Knows nothing of who writes or commits. `changed` guards what several threads touch.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

import msgspec

from laststep.catalog.names import AttemptName
from laststep.errors import Aborted, LaststepError
from laststep.flush.protocol import Begin, Decide, Seal, Unchanged
from laststep.flush.writer import SaveWriter
from laststep.memory.filled import Filled

_HEAR_S = 5.0


class RunFacts(NamedTuple):
    """What a run knows of a save under way."""

    run: str
    """The id of the run."""
    continues: str | None
    """The folder that the save continues."""
    records: tuple[tuple[str, bytes], ...]
    """The records of the run and of the epoch, for where these are lost."""


class Save(msgspec.Struct):
    """`changed` guards `pending`, `seal`, `decide`, `early` and `dropped`."""

    begin: Begin
    began_s: float
    flush: SaveWriter | None = None
    at: AttemptName | None = None
    """Which attempt it is; known as soon as `flush` is."""
    error: LaststepError | None = None
    pending: int = 0
    located: bool = True
    seal: Seal | None = None
    decide: Decide | None = None
    early: list[Filled] = []
    """Chunks that came before a member knew where to write them."""
    base: int = 0
    """The number of the save whose blocks it uses again."""
    unchanged: Unchanged | None = None
    """What the trainer says of it, until that is answered."""
    dropped: str | None = None
    reported_s: float = 0.0
    opened_s: float = 0.0
    changed: threading.Condition = msgspec.field(default_factory=threading.Condition)

    @property
    def is_member(self) -> bool:
        """Whether the first rank of its job decides about it."""
        return self.begin.role == "member"

    def wait_for_all_chunks(self) -> None:
        """Until all is written that will be."""
        with self.changed:
            while (
                self.dropped is None and (self.seal is None or not self.located)
            ) or self.pending:
                self.changed.wait()

    def decided_by_all(self) -> Decide:
        """Wait for what the ranks agree on. Raises if they give the save up, or if nobody is there
        any more to tell."""
        with self.changed:
            while self.decide is None and self.dropped is None:
                self.changed.wait()
        if self.decide is None:
            raise Aborted(self.dropped or "")
        if self.decide.reason is not None:
            raise Aborted(self.decide.reason)
        return self.decide

    def hear_why(self) -> None:
        """That the folder is gone explains nothing: the trainer is about to hear the reason."""
        with self.changed:
            self.changed.wait_for(lambda: self.dropped is not None or self.decide, _HEAR_S)
