"""Terms: the writers of a run, the point that each continues from, and the lineage.

Each job instance takes the next number by creating a record that is never changed or deleted, so
records can be cached. `run` aborts the attempts of older terms. Host, process and boot identify the
trainer rather than its flusher, because people know the trainer; they also decide whether a lock
can be trusted.

The invariant: **a term is claimed only if the newest term is the one that this job instance has
seen** when it restored or, without a restore, when it began to save. These newer terms are ignored:
terms of the same job instance; terms of an orphan (a flusher whose trainer was dead when it
claimed); and terms whose writer has ended and whose trainer is known to be dead. Commits by others
since then do count; `run` checks them.

The name of the next term can be created only once, so of two job instances that saw the same newest
term one wins. The other is superseded and never tries a higher number by itself. An orphan claims
nothing while the writer of the newest term is alive, because that would stop a live writer.

The lineage is the ordered commits that the present state of the run descends from. It follows from
the points (term, attempt) from which terms continue and from the names of the committed
checkpoints. In a run without any record, commits are ordered by step.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import operator
import os
import re
import socket
import time
from typing import TYPE_CHECKING, Annotated, TypeVar

import msgspec

from laststep.catalog.attempt import by_point, list_checked
from laststep.codecs.digests import digest_text
from laststep.constants import FORMAT_VERSION
from laststep.errors import AbortedError, AlreadyExistsError, CorruptError, NotFoundError
from laststep.format.manifest import Versioned, refuse_later
from laststep.process.system import boot, has_died, own_birth
from laststep.process.threads import ready
from laststep.storage.store import Store

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from laststep.catalog.attempt import AttemptName

_log = logging.getLogger(__name__)

TERMS_FOLDER = "terms"
RECORD_LIMIT_BYTES = 1 << 16
_LIVENESS = re.compile(r"start-[0-9a-f]{16}-([0-9]{1,20})\.lock")
_FILE = re.compile(r"([0-9]{8,20})\.(json|lock)")

Point = tuple[int, int]
Format = Annotated[int, msgspec.Meta(ge=FORMAT_VERSION)]
"""The format of a record; `decode_record` refuses later ones."""
_Number = Annotated[int, msgspec.Meta(ge=1)]
_Record = TypeVar("_Record")


def term_record_name(term: int) -> str:
    return f"{TERMS_FOLDER}/{term:08d}.json"


def term_lock_name(term: int) -> str:
    return f"{TERMS_FOLDER}/{term:08d}.lock"


def parse_term(name: str, kind: str) -> int | None:
    """Return the term of a file in `terms/` with the extension `kind`, or None."""
    match = _FILE.fullmatch(name)
    if match is None or match.group(2) != kind:
        return None
    term = int(match.group(1))
    return term if term >= 1 and name == f"{term:08d}.{kind}" else None


def liveness_lock_name(start: str, pid: int) -> str:
    return f"{TERMS_FOLDER}/start-{start}-{pid}.lock"


def parse_liveness_lock(name: str) -> int | None:
    """Return the process id in the name of a liveness lock in `terms/`, or None for other names."""
    match = _LIVENESS.fullmatch(name)
    return None if match is None else int(match.group(1))


class Trainer(msgspec.Struct, frozen=True, kw_only=True):
    """The identity of a training process, for other processes."""

    host: str
    pid: int
    boot: str
    process_started: str
    start: str = ""
    """A random name of this job instance. Each Checkpointer of a process has its own."""


class TermRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The record of a term: its number, the point it continues from, and its `Trainer`."""

    format: Format
    term: _Number
    continues: tuple[_Number, _Number] | None
    host: str
    pid: int
    boot: str
    process_started: str
    created_s: float
    start: str = ""
    orphan: bool = False
    """True if the trainer was dead by then; its flusher only finishes the saves it had received."""


class _Sealed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    digest: str
    term: msgspec.Raw


def new_start() -> Trainer:
    """Return the identity of this process as a new job instance."""
    return msgspec.structs.replace(this_writer(), start=os.urandom(8).hex())


def this_writer() -> Trainer:
    return Trainer(
        host=socket.gethostname(), pid=os.getpid(), boot=boot(), process_started=own_birth()
    )


def is_here(record: TermRecord) -> bool:
    """Return True if the writer ran under the present kernel: only then does a free lock prove that
    it is dead."""
    me = this_writer()
    return record.boot == me.boot if me.boot and record.boot else record.host == me.host


def shares_pids(record: TermRecord) -> bool:
    """Return True if the writer's process id refers to the same process here. Containers share a
    kernel, but each has its own host name and numbers its processes from 1."""
    return is_here(record) and record.host == this_writer().host


def trainer_is_gone(record: TermRecord) -> bool:
    """Return True if the trainer is known to be dead; nothing is known of other machines."""
    return shares_pids(record) and has_died(record.pid, record.process_started)


def encode(record: TermRecord) -> bytes:
    content = msgspec.json.encode(record)
    return msgspec.json.encode(_Sealed(digest=digest_text(content), term=msgspec.Raw(content)))


def decode(data: bytes, *, term: int, where: str) -> TermRecord:
    """Decode a term's record. Raise `CorruptError` if damaged, `UsageError` for a later format."""
    try:
        sealed = msgspec.json.decode(data, type=ready(_Sealed))
        content = bytes(sealed.term)
        if digest_text(content) != sealed.digest:
            raise _corrupt(where, sealed.digest, digest_text(content))
        record = decode_record(content, TermRecord, what="record of a term", where=where)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise _corrupt(where, "a term's record", str(error)) from error
    if record.term != term:
        raise _corrupt(where, f"term {term}", f"{record}")
    if record.continues is not None and record.continues[0] >= term:
        raise _corrupt(where, "an earlier term to continue from", f"{record.continues}")
    return record


def decode_record(data: bytes, kind: type[_Record], *, what: str, where: str) -> _Record:
    """Decode a small record. Raise `UsageError` if it has a later format, and errors of msgspec or
    `UnicodeDecodeError` if it is damaged."""
    said = msgspec.json.decode(data, type=ready(Versioned))
    refuse_later(said.format, what=what, where=where, writer=said.laststep)
    return msgspec.json.decode(data, type=ready(kind))


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a run when a job chose where to continue from; 0 for what did not exist."""

    term: int = 0
    """The newest term, by its record or by its attempts."""
    commit: Point = (0, 0)


class Chain(msgspec.Struct, frozen=True, kw_only=True):
    limits: dict[int, int | None]
    """The last attempt that counts in each of these terms; None in the newest, where all count.
    Empty without any record."""
    unrecorded_from: Point | None = None
    """The point from which the oldest recorded term continues, if no term below it has a record.
    Checkpoints of such terms (folders copied by hand) count up to that point."""


def order(names: Iterable[AttemptName], chain: Chain) -> tuple[AttemptName, ...]:
    """Return the commits on the lineage, oldest first."""
    listed, limits = sorted(names, key=by_point), chain.limits
    if not limits:
        return tuple(sorted(listed, key=operator.attrgetter("step")))
    chosen = []
    for name in listed:
        limit = limits.get(name.term, 0)
        if limit is None or name.attempt <= limit:
            chosen.append(name)
    oldest = chain.unrecorded_from
    if oldest is not None:
        # Without records only the step gives an order: checkpoints beyond the step from which the
        # run continued were abandoned.
        last = next((name.step for name in listed if name.point == oldest), None)
        older = [name for name in listed if name.term < oldest[0]]
        chosen += [name for name in older if last is None or name.step <= last]
    return tuple(sorted(chosen, key=by_point))


def superseded(
    on_lineage: Sequence[AttemptName], sound: AbstractSet[AttemptName]
) -> Mapping[AttemptName, AttemptName]:
    """Map each replaced commit to the later, complete commit of the same step that replaced it."""
    latest: dict[int, AttemptName] = {}
    replaced: dict[AttemptName, AttemptName] = {}
    for name in reversed(on_lineage):
        if name.step in latest:
            replaced[name] = latest[name.step]
        elif name in sound:
            latest[name.step] = name
    return replaced


class Terms(msgspec.Struct, eq=False):
    """The terms of one run. Thread-safe: it caches only records, which never change."""

    _store: Store
    _known: dict[int, TermRecord] = {}

    def numbers(self, kind: str = "json") -> tuple[int, ...]:
        """Return all terms that have a record (or a lock), ascending."""
        files = self._store.file_names(TERMS_FOLDER)
        if self._store.same_everywhere and not any(parse_term(f, "json") for f in files):
            first = term_record_name(1).rpartition("/")[2]
            files = tuple(item.name for item in list_checked(self._store, TERMS_FOLDER, first))
        numbers = map(functools.partial(parse_term, kind=kind), files)
        return tuple(sorted(filter(None, numbers)))  # terms count from 1

    def is_alive(self, term: int) -> bool:
        return self._store.is_locked(term_lock_name(term))

    def read(self, term: int) -> TermRecord | None:
        known = self._known.get(term)
        if known is not None:
            return known
        name = term_record_name(term)
        try:
            data = self._store.read(name, limit_bytes=RECORD_LIMIT_BYTES)
        except NotFoundError:
            return None
        record = decode(data, term=term, where=f"{self._store.url}/{name}")
        self._known[term] = record
        return record

    def chain(self, term: int | None) -> Chain:
        """Return `term` and those it descends from; damage in other records does no harm."""
        limits: dict[int, int | None] = {}
        limit: int | None = None
        continues: Point | None = None
        while term is not None:
            record = self.read(term)
            if record is None:
                break
            limits[term], continues = limit, record.continues
            term, limit = (None, None) if continues is None else continues
        if term is None:
            return Chain(limits=limits)
        if limits:
            limits[term] = limit
        if not any(number < term for number in self.numbers()):
            return Chain(limits=limits, unrecorded_from=continues)
        _log.warning("term %d of %s has no record: the lineage ends there", term, self._store.url)
        return Chain(limits=limits)

    def claim(
        self, continues: Point | None, *, seen: int, writer: Trainer, orphan: bool = False
    ) -> int:
        """Create the record after the newest term, which MUST be `seen` (see the module docstring),
        else raise `AbortedError`. `orphan` is True if `writer`, the trainer, is dead."""
        make_folder(self._store)
        newest = max((seen, *self.numbers()))
        if newest:
            with contextlib.suppress(CorruptError):
                self.read(newest)  # raises `UsageError` for a later format: do not continue
        while True:
            for number in range(seen + 1, newest + 1):
                if self._is_in_the_way(number, writer):
                    raise self.superseded_error(number, f"term {seen} to be the newest")
            if orphan and self.is_alive(newest) and not self.is_of(newest, writer):
                raise self.superseded_error(newest, "no live writer")
            newest += 1
            record = TermRecord(
                format=FORMAT_VERSION,
                term=newest,
                continues=continues,
                created_s=time.time(),
                orphan=orphan,
                **msgspec.structs.asdict(writer),
            )
            try:
                self._store.create(term_record_name(newest), encode(record))
            except AlreadyExistsError:
                continue  # another writer was faster, but may be one that is ignored
            self._known[newest] = record
            return newest

    def superseded_error(
        self, term: int, expected: str, *, found: str | None = None
    ) -> AbortedError:
        """Return the error for a writer that another job, of `term`, has fenced off."""
        return AbortedError(
            "another job has saved to the run or taken it over",
            where=self._store.url,
            expected=expected,
            found=found or self.described(term),
            remedy=(
                "stop one of the two jobs: only one may save to a run at a time; or call "
                "restore() to continue from the other job's checkpoint"
            ),
        )

    def described(self, term: int) -> str:
        try:
            record = self.read(term)
        except CorruptError as error:
            return f"term {term} ({error.what})"
        if record is None:
            return f"term {term}"
        return f"process {record.pid} on {record.host} (term {term})"

    def is_of(self, term: int, writer: Trainer) -> bool:
        """Return True if this job instance claimed the term."""
        record = self.read(term)
        return record is not None and bool(writer.start) and record.start == writer.start

    def _is_in_the_way(self, term: int, writer: Trainer) -> bool:
        record = self.read(term)
        if record is None or record.orphan or self.is_of(term, writer):
            return False
        # A trainer may die just after its flusher has checked that it is alive. The term is out of
        # the way only if both are dead: a trainer replaces a dead flusher.
        return self.is_alive(term) or not trainer_is_gone(record)


def make_folder(store: Store) -> None:
    # If another process created it and died before its name was durable, the sync after creating
    # the first attempt's folder makes it durable.
    with contextlib.suppress(AlreadyExistsError):
        store.make_folder(TERMS_FOLDER)


def _corrupt(where: str, expected: str, found: str) -> CorruptError:
    return CorruptError(
        "cannot read the record of a term",
        where=where,
        expected=expected,
        found=found,
        remedy="bring the file back from a copy, or move the folder `terms` away: "
        "then all checkpoints count, in the order of their steps",
    )
