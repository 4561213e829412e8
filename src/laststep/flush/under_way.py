"""A save on its way through the flusher: what has come of it, and waiting for what has not.

Knows nothing of who writes or commits. `changed` guards what several threads touch.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

import msgspec

from laststep.catalog.names import AttemptName
from laststep.errors import Aborted, LaststepError
from laststep.flush.protocol import Begin, Decide, Gathered, Seal, Unchanged
from laststep.flush.writer import SaveFlush
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
    """`changed` guards `pending`, `seal`, `gathered`, `decide`, `early` and `dropped`."""

    begin: Begin
    began_s: float
    flush: SaveFlush | None = None
    at: AttemptName | None = None
    """Which attempt it is; known as soon as `flush` is."""
    error: LaststepError | None = None
    pending: int = 0
    located: bool = True
    seal: Seal | None = None
    gathered: Gathered | None = None
    """What the group of ranks has written that this rank speaks for, until that is written down."""
    decide: Decide | None = None
    early: list[Filled] = []
    """Chunks that came before a member knew where to write them."""
    lender: int = 0
    """The number of the save whose files it borrows of."""
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

    def next_word(self) -> Gathered | Decide:
        """Wait for what the ranks say: what a group has written, or what all agree on. Raises if
        they give the save up, or if nobody is there any more to tell."""
        with self.changed:
            while self.gathered is None and self.decide is None and self.dropped is None:
                self.changed.wait()
            gathered, self.gathered = self.gathered, None
        if self.decide is None and self.dropped is not None:
            raise Aborted(self.dropped)
        if self.decide is not None and self.decide.reason is not None:
            raise Aborted(self.decide.reason)
        word = gathered or self.decide
        assert word is not None  # noqa: S101 (waited for)
        return word

    def hear_why(self) -> None:
        """That the folder is gone explains nothing: the trainer is about to hear the reason."""
        with self.changed:
            self.changed.wait_for(lambda: self.dropped is not None or self.decide, _HEAR_S)
