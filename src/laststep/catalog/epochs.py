"""Writer epochs: who writes to a run, and what each writer continues from.

Each start of a job takes the next number by creating a record that nobody changes or deletes, so
what was read once stays true. Knows nothing of manifests; aborting the attempts of older epochs is
`run`'s part. Host, process and boot are for people, who know the trainer and not its flusher, and
for telling whether a lock can be trusted.

The invariant: **an epoch is claimed only if the newest is the one that this start has seen**, when
it restored or, without that, when it began to save. Nobody is in the way of a start but others: an
epoch of its own does not count, nor one of an orphan, a flusher whose trainer was dead when it
claimed, or of one that has ended and whose trainer is known to be dead now; what others have
committed since does, and is `run`'s part. The name of the next epoch can be created once, so of two
starts that saw the same one wins; the other is superseded, and never tries a higher number by
itself. An orphan claims nothing while the writer of the newest epoch is alive: that one would be
stopped.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from typing import TYPE_CHECKING, Annotated

import msgspec

from laststep.catalog import lineage
from laststep.catalog.decision import list_checked
from laststep.catalog.lineage import Chain, Link, Point
from laststep.codecs.digests import digest_text
from laststep.errors import (
    AbortedError,
    AlreadyExistsError,
    CorruptError,
    NotFoundError,
    UsageError,
)
from laststep.format.manifest import Versioned, refuse_later
from laststep.process.system import boot, pid_namespace, process_started
from laststep.terms import FORMAT_VERSION

if TYPE_CHECKING:
    from laststep.storage.store import Store

_log = logging.getLogger(__name__)

RECORD_LIMIT_BYTES = 1 << 16
_START_BYTES = 8

_Number = Annotated[int, msgspec.Meta(ge=1)]


class EpochRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One writer: its number, the (epoch, attempt) it continues from, and its trainer."""

    format: int
    epoch: _Number
    continues: tuple[_Number, _Number] | None
    host: str
    pid: int
    boot: str
    process_started: str
    created_s: float
    start: str = ""
    """The name of the start that claimed it: each Checkpointer of a process is another start."""
    orphan: bool = False
    """Whether the trainer was dead by then: its flusher finishes what was handed over."""


class _Sealed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    digest: str
    epoch: msgspec.Raw


class Trainer(msgspec.Struct, frozen=True, kw_only=True):
    """What other processes may want to know of a process that trains."""

    host: str
    pid: int
    boot: str
    process_started: str
    start: str = ""
    """A random name of this start of the job; "" where it is not told from others."""


def new_start() -> Trainer:
    """This process, as a start of a job of its own."""
    return msgspec.structs.replace(this_writer(), start=os.urandom(_START_BYTES).hex())


def this_writer() -> Trainer:
    """This process."""
    return Trainer(
        host=socket.gethostname(),
        pid=os.getpid(),
        boot=boot(),
        process_started=f"{process_started(os.getpid())}@{pid_namespace()}",
    )


def is_here(record: EpochRecord) -> bool:
    """Whether that writer ran under this very kernel: only then does a free lock prove it dead."""
    me = this_writer()
    return record.boot == me.boot if me.boot and record.boot else record.host == me.host


def shares_pids(record: EpochRecord) -> bool:
    """Whether the number of that process means the same here: containers share a kernel, but each
    has a host name and counts processes from 1."""
    return is_here(record) and record.host == this_writer().host


def trainer_is_gone(record: EpochRecord) -> bool:
    """Whether that process is known to be dead; of those elsewhere nothing is known."""
    started, _, namespace = record.process_started.partition("@")
    return (
        shares_pids(record)
        and "" not in (started, namespace)
        and namespace == pid_namespace()  # containers may share a host's name
        and process_started(record.pid) != started
    )


def encode(record: EpochRecord) -> bytes:
    """The bytes of `epochs/N.json`."""
    content = msgspec.json.encode(record)
    return msgspec.json.encode(_Sealed(digest=digest_text(content), epoch=msgspec.Raw(content)))


def decode(data: bytes, *, epoch: int, where: str) -> EpochRecord:
    """The record of that epoch, verified; `CorruptError` for nonsense, `UsageError` for a later
    format."""
    try:
        sealed = msgspec.json.decode(data, type=_Sealed)
        content = bytes(sealed.epoch)
        if digest_text(content) != sealed.digest:
            raise _corrupt(where, sealed.digest, digest_text(content))
        said = msgspec.json.decode(content, type=Versioned)
        refuse_later(
            said.format,
            what="record of an epoch",
            where=where,
            writer=said.laststep,
            latest=FORMAT_VERSION,
        )
        record = msgspec.json.decode(content, type=EpochRecord)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise _corrupt(where, "an epoch's record", str(error)) from error
    if record.epoch != epoch or record.format != FORMAT_VERSION:
        raise _corrupt(where, f"epoch {epoch}, format {FORMAT_VERSION}", f"{record}")
    if record.continues is not None and record.continues[0] >= epoch:
        raise _corrupt(where, "an earlier epoch to continue from", f"{record.continues}")
    return record


class Epochs:
    """The epochs of one run. Safe to use from several threads: it only remembers records."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: dict[int, EpochRecord] = {}

    def numbers(self) -> tuple[int, ...]:
        """All epochs that have a record, ascending."""
        return self._listed("json")

    def locked(self) -> tuple[int, ...]:
        """All epochs whose writer is alive, newest first."""
        return tuple(n for n in reversed(self._listed("lock")) if self.is_alive(n))

    def is_alive(self, epoch: int) -> bool:
        """Whether a live process holds the lock of that epoch."""
        return self._store.is_locked(lineage.epoch_lock_name(epoch))

    def read(self, epoch: int) -> EpochRecord | None:
        """The record of an epoch, or None where there is none."""
        known = self._known.get(epoch)
        if known is not None:
            return known
        name = lineage.epoch_record_name(epoch)
        try:
            data = self._store.read(name, limit_bytes=RECORD_LIMIT_BYTES)
        except NotFoundError:
            return None
        record = decode(data, epoch=epoch, where=f"{self._store.url}/{name}")
        self._known[epoch] = record
        return record

    def chain(self, epoch: int | None) -> Chain:
        """The epochs that this one descends from, itself included. Records beside them are not
        read: their damage is harmless."""
        links: list[Link] = []
        while epoch is not None:
            record = self.read(epoch)
            if record is None:
                break
            links.append(Link(epoch=epoch, continues=record.continues))
            epoch = None if record.continues is None else record.continues[0]
        if epoch is None:
            return Chain(links=tuple(links))
        unrecorded = not any(number < epoch for number in self.numbers())
        if not unrecorded:
            _log.warning(
                "epoch %d of %s has no record: the lineage ends there", epoch, self._store.url
            )
        return Chain(links=tuple(links), unrecorded_below=unrecorded)

    def claim(
        self, continues: Point | None, *, seen: int, writer: Trainer, orphan: bool = False
    ) -> int:
        """Create the record above the newest, which MUST be `seen` (see above); else
        `AbortedError`.

        `writer` is the trainer for which this is done, and `orphan` says that it is dead.
        """
        make_folder(self._store)
        newest = max((seen, *self.numbers()))
        with contextlib.suppress(CorruptError):
            self.read(newest)  # `UsageError` for one of a later format: not a run to go on with
        while True:
            for number in range(seen + 1, newest + 1):
                if self._is_in_the_way(number, writer):
                    raise self.superseded(
                        number, before=True, expected=f"epoch {seen} to be the newest"
                    )
            if orphan and self.is_alive(newest) and not self.is_of(newest, writer):
                raise self.superseded(
                    newest, before=True, expected="no live writer beside a dead trainer's"
                )
            if self._create(newest + 1, continues, writer, orphan=orphan):
                return newest + 1
            newest += 1  # somebody was faster, who may not be in the way

    def _create(
        self, number: int, continues: Point | None, writer: Trainer, *, orphan: bool
    ) -> bool:
        """Create the record of an epoch; False where there is one now."""
        if continues is not None and not (1 <= continues[0] < number and continues[1] >= 1):
            raise UsageError(
                "cannot continue from a checkpoint that this run does not know",
                where=self._store.url,
                expected=f"an epoch below {number} and an attempt from 1",
                found=f"epoch {continues[0]}, attempt {continues[1]}",
            )
        record = _record(number, continues, writer, orphan=orphan)
        try:
            self._store.create(lineage.epoch_record_name(number), encode(record))
        except AlreadyExistsError:
            return False
        self._known[number] = record
        return True

    def superseded(
        self, epoch: int, *, expected: str, before: bool = False, saved: str | None = None
    ) -> AbortedError:
        """The error for a writer that is stopped by that epoch, or by what was `saved` in it;
        `before` this writer had the run at all."""
        who = self.described(epoch)
        return AbortedError(
            "another job was first to save to the run"
            if before
            else "the run was taken over by another writer",
            where=self._store.url,
            expected=expected,
            found=who if saved is None else f"{saved} of {who}",
            remedy="end one of the two jobs, only one at a time may save to a run; or restore(), "
            "to go on from what the other has saved",
        )

    def described(self, epoch: int) -> str:
        """An epoch and its writer, as a person knows it."""
        try:
            record = self.read(epoch)
        except CorruptError as error:
            return f"epoch {epoch} ({error.what})"
        who = "" if record is None else f", process {record.pid} on {record.host}"
        return f"epoch {epoch}{who}"

    def is_of(self, epoch: int, writer: Trainer) -> bool:
        """Whether that start has claimed the epoch."""
        record = self.read(epoch)
        return record is not None and bool(writer.start) and record.start == writer.start

    def _is_in_the_way(self, epoch: int, writer: Trainer) -> bool:
        record = self.read(epoch)
        if record is None or record.orphan or self.is_of(epoch, writer):
            return False
        # A trainer may die just after its flusher has asked whether it lives. Both have to be gone:
        # a flusher alone is replaced.
        return self.is_alive(epoch) or not trainer_is_gone(record)

    def _listed(self, kind: str) -> tuple[int, ...]:
        files = self._store.file_names(lineage.EPOCHS_FOLDER)
        if self._store.same_everywhere and not any(lineage.parse_epoch(f, "json") for f in files):
            first = lineage.epoch_record_name(1).rpartition("/")[2]
            entries = list_checked(self._store, lineage.EPOCHS_FOLDER, first)
            files = tuple(entry.name for entry in entries)
        numbers = (lineage.parse_epoch(name, kind) for name in files)
        return tuple(sorted(number for number in numbers if number is not None))


def make_folder(store: Store) -> None:
    """Make the folder of epochs and witnesses where it is absent."""
    # Where somebody made it and died before its name was durable, the sync after making the
    # folder of the first attempt sees to that.
    with contextlib.suppress(AlreadyExistsError):
        store.make_folder(lineage.EPOCHS_FOLDER)


def _record(number: int, continues: Point | None, writer: Trainer, *, orphan: bool) -> EpochRecord:
    return EpochRecord(
        format=FORMAT_VERSION,
        epoch=number,
        continues=continues,
        host=writer.host,
        pid=writer.pid,
        boot=writer.boot,
        process_started=writer.process_started,
        created_s=time.time(),
        start=writer.start,
        orphan=orphan,
    )


def _corrupt(where: str, expected: str, found: str) -> CorruptError:
    return CorruptError(
        "cannot read the record of an epoch",
        where=where,
        expected=expected,
        found=found,
        remedy="bring the file back from a copy, or move the folder `epochs` away: "
        "then all checkpoints count, in the order of their steps",
    )
