"""The flusher: a pipeline that writes captured state and commits it.

receive → digest → reuse → encode → write → finish → commit

Runs as a helper process without torch, or on a thread of the trainer, and owns everything that
changes a run. One thread receives; a pool of threads digests and writes chunks, and finishes one
save at a time, in the order in which they began. With a memory tier, a separate pool digests ahead
of writing, so that the save is complete in memory long before it is on disk. Optional features are
listeners.

When the trainer dies, the flusher finishes and commits the saves that were handed over completely,
aborts the others, and exits. In a job of several ranks only rank 0's flusher commits, and only
saves that the trainers of all ranks have agreed on.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
import time
from operator import attrgetter
from typing import TYPE_CHECKING, TextIO

import msgspec

from laststep.catalog import attempt as attempts
from laststep.catalog.attempt import Attempt, read_decision
from laststep.catalog.run import RunWriter
from laststep.catalog.terms import Trainer
from laststep.codecs import objects
from laststep.constants import CHUNK_BYTES
from laststep.errors import AbortedError, LaststepError, StorageError, drop_tracebacks
from laststep.flush import base as bases
from laststep.flush import listeners, protocol
from laststep.flush.encoder import Compressor
from laststep.flush.listeners import FlusherSave, Listener, SlotHolds
from laststep.flush.writer import SaveWriter
from laststep.format.manifest import Abort, Commit
from laststep.memory.segments import Mapping
from laststep.process import threads
from laststep.process.signals import OF_SCHEDULERS
from laststep.process.threads import WorkerPool, ready
from laststep.storage.locks import FileLock
from laststep.storage.registry import open_store, register_store
from laststep.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Callable

    from laststep.catalog.attempt import AttemptName
    from laststep.flush.base import Base
    from laststep.flush.memory_tier import MemoryTier
    from laststep.memory.pool import Filled

log = logging.getLogger(__name__)

NOT_FOR_THE_HELPER = tuple(signal.Signals[name] for name in OF_SCHEDULERS)
"""Ctrl-C and the signals that a scheduler sends to all processes of a job are meant for the
trainer. The helper ignores them and exits after the trainer, when its work is done."""
_PROGRESS_S = 0.2
_HEAR_S = 5.0
_DIGESTERS = 8
"""Threads that digest ahead of writing, if there are enough cores: a device delivers 48 GB/s, but 4
threads digested only 19 GB/s, so a save was complete in memory long after its capture."""


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that a flusher needs to start; passed to a helper process on its command line."""

    run: str
    trainer: Trainer
    orders: protocol.Orders
    # The others are for a helper process.
    pool_fd: int = -1
    opener: str | None = None
    """Import path of the function that opens the run's store; None for a directory."""
    socket_fd: int = -1
    trainer_pidfd: int = -1
    rank: int | None = None
    """Rank of the trainer in a job of several ranks, for the log."""


class Flusher:
    """Serves one trainer until it sends `Bye` or dies."""

    def __init__(self, connection: protocol.Connection, pool: memoryview, setup: Setup) -> None:
        orders = setup.orders
        self._connection = connection
        self._pool = pool
        self._store = open_store(setup.run)
        self._rank = (orders.rank, orders.ranks)
        self._run_writer = RunWriter(self._store, setup.trainer, connection.peer_is_dead)
        self._compressor = (
            Compressor(orders, memory_bytes=len(pool) // 2) if orders.encodes else None
        )
        self._base: tuple[int, Base | None] = (0, None)
        """The last checkpoint, and the number of the save that committed it, 0 if another flusher
        did. A single tuple, because two threads set it."""
        self._unread: str | None = None
        """Folder of a checkpoint that was not read from this run, so that none of it is reused."""
        self._saves: dict[int, FlusherSave] = {}
        """Unfinished saves by number, in the order in which they began."""
        self._changed = threading.Condition()
        """Guards these, and the fields of a `FlusherSave` that several threads touch."""
        self._was_told_bye = False
        self.is_given_up = False
        """Set from outside, after the connection was closed, to commit nothing more: the trainer
        has reported all uncommitted saves as failed."""
        self._slots = SlotHolds(connection.send)
        # One extra thread: one may be finishing a save and waiting for other ranks.
        self._writers = WorkerPool("write", orders.writers + 1)
        self._digesters: WorkerPool | None = None
        self._memory: MemoryTier | None = None
        self._replication: listeners.ReplicationListener | None = None
        self._listeners: tuple[Listener, ...] = ()
        if orders.segment is not None:
            self._keep_in_memory(orders.segment, orders.writers, setup.pool_fd)
        if orders.replicas:
            self._replication = listeners.ReplicationListener(self._store, orders, connection.send)
            self._listeners += (self._replication,)
        kept = None if orders.keep is None else orders.keep.bound()
        in_use = frozenset if self._replication is None else self._replication.needed
        self._listeners += (
            listeners.Retention(self._run_writer, orders.keep, in_use, connection.send),
            listeners.DiskCheck(self._store, kept, connection.send),
        )

    def _keep_in_memory(self, segment: str, writers: int, pool_fd: int) -> None:
        """Set up the memory tier, or continue without it if the segment has been removed."""
        from laststep.flush.memory_tier import MemoryTier  # late: every start waits for imports

        try:
            self._memory = MemoryTier(
                segment,
                self._store,
                self._run_writer,
                self._slots,
                self._connection.send,
                slots_there=len(self._pool) // CHUNK_BYTES,
                is_gone=lambda: self._was_told_bye or self._connection.peer_is_dead(),
                pool_fd=pool_fd,
            )
        except StorageError as error:
            log.warning("saves are not kept in shared memory: %s", error)
            return
        self._listeners = (self._memory,)
        count = max(writers, min((os.cpu_count() or 1) // 2, _DIGESTERS))
        self._digesters = WorkerPool("digest", count)

    def serve(self) -> None:
        """Receive until the trainer is gone, then finish complete saves."""
        self._connection.send(protocol.News(kind="ready"))
        try:
            self._tell(Listener.started)
            while (message := self._connection.receive(protocol.in_flusher)) is not None:
                if isinstance(message, protocol.Bye):
                    self._was_told_bye = True
                    self._connection.is_read = message.waits
                    break
                if isinstance(message, protocol.Begin):
                    self._begin(message)
                elif isinstance(message, protocol.Instruct):
                    self._follow(message)
                else:
                    self._handle(message)
        finally:
            self._end()

    # Receive

    def _handle(self, message: protocol.OfSave) -> None:
        save = self._saves.get(message.save)
        if save is None:  # it is over
            if isinstance(message, protocol.Chunks):
                slots = [chunk.slot for chunk in message.filled]
                self._connection.send(protocol.Freed(slots=slots))
            return
        if isinstance(message, protocol.Chunks | protocol.Unchanged) and not save.is_open:
            save.early.append(message)
        elif isinstance(message, protocol.Chunks):
            self._slots.hold(map(attrgetter("slot"), message.filled))
            with self._changed:
                save.pending += len(message.filled)
            for chunk in message.filled:
                if self._digesters is None:
                    self._writers.put(self._write, save, chunk, None)
                else:
                    self._digesters.put(self._digest_ahead, save, chunk)
        elif isinstance(message, protocol.Unchanged):
            self._reuse(save, message)
        elif isinstance(message, protocol.Begun):
            self._open(save, message.at)
        elif isinstance(message, protocol.CaptureDone):
            save.captured = message
            self._tell(Listener.captured, save)
            with self._changed:
                save.is_whole = True
        elif isinstance(message, protocol.Decide):
            if message.reason is None or message.by_all:
                with self._changed:
                    save.decision = message
                    self._changed.notify_all()
            else:
                self._drop(save, message.reason)
        self._advance()

    def _follow(self, message: protocol.Instruct) -> None:
        if message.continues is not None:
            continues = message.continues
            # The checkpoint to continue from was just read and verified, or is not reused. Later
            # ones may have been skipped as damaged.
            self._base = (0, None)
            unread = None if continues.was_read else continues.after
            self._unread = None if unread is None else unread.folder
            self._run_writer.continue_from(continues.after, continues.seen, continues.resumed_from)
        if message.pool_slots is not None and self._memory is not None:
            self._memory.limit(message.pool_slots)
        if message.replicate is not None and self._replication is not None:
            self._replication.bring_last(message.replicate)

    def _begin(self, begin: protocol.Begin) -> None:
        if begin.liveness is not None and self._connection.descriptors:
            lock = FileLock(self._connection.descriptors.pop(), begin.liveness)
            liveness = listeners.LivenessLock(
                lock, begin.liveness, self._store, self._connection.peer_is_dead
            )
            self._listeners = (liveness, *self._listeners)
        try:
            self._writers.start()
            if self._digesters is not None:
                self._digesters.start()
        except StorageError as error:
            self._send_failed(begin.save, error)
            return
        save = FlusherSave(begin=begin)
        with self._changed:
            self._saves[begin.save] = save
        self._tell(Listener.begun, save)
        if begin.role != "member":
            self._open(save, None)
            if save.attempt is not None and save.error is None:
                self._connection.send(protocol.Begun(save=begin.save, at=save.attempt.name))

    def _open(self, save: FlusherSave, at: AttemptName | None) -> None:
        """Begin an attempt, or join that of rank 0, and queue the chunks that have arrived."""
        begin = save.begin
        try:
            if at is None:
                attempt = self._run_writer.begin(begin.step, needs_trainer=begin.role != "alone")
            else:
                attempt = Attempt(self._store, at)
            save.attempt = attempt
            before = self._run_writer.last_folder
            save.base, base = self._base
            if base is None and before is not None and before != self._unread:
                save.base, base = 0, bases.of_checkpoint(self._store, before, self._rank[0])
            save.writer = SaveWriter(
                attempt, begin.files, rank=self._rank, base=base, compressor=self._compressor
            )
            if at is None and not begin.overwrite:
                # Checked last: a fenced-off writer must get that error, not "step already saved".
                self._run_writer.run.check_step_free(begin.step, own=attempt.name)
        except (LaststepError, OSError) as error:
            save.error = error
        self._handle_early(save)
        self._tell(Listener.opened, save)

    def _handle_early(self, save: FlusherSave) -> None:
        """Handle the messages that came before the files were open, or were known never to be."""
        early, save.early = save.early, []
        save.is_open = True
        for message in early:
            self._handle(message)

    def _reuse(self, save: FlusherSave, said: protocol.Unchanged) -> None:
        """Answer which of the unchanged chunks need not be sent."""
        reused: tuple[tuple[int, int, int], ...] = ()
        if save.writer is not None and save.error is None and said.of == save.base:
            if self._memory is None:
                reused = save.writer.reuse(said.chunks)
            else:
                reused = save.writer.reuse(self._memory.reusable(save, said))
                self._memory.reuse(save, reused)
        self._connection.send(protocol.Unchanged(save=said.save, of=said.of, chunks=reused))

    def _drop(self, save: FlusherSave, reason: str) -> None:
        """Give a save up; its chunks are freed, not written."""
        with self._changed:
            save.error = save.error or AbortedError(reason)
            self._changed.notify_all()
        self._handle_early(save)
        if save.writer is not None:
            save.writer.fail(AbortedError(reason))

    # Digest and write

    def _digest_ahead(self, save: FlusherSave, chunk: Filled) -> None:
        """Queue a chunk for the writing threads once it is digested, with a memory tier."""
        self._writers.put(self._write, save, chunk, self._digest(save, chunk))

    def _digest(self, save: FlusherSave, chunk: Filled) -> bytes:
        """Return the digests of a chunk's blocks; empty if nothing needs them any more."""
        if save.writer is None or save.error is not None:
            return b""
        if save.writer.error is not None and self._memory is None:
            return b""
        at = chunk.slot * CHUNK_BYTES
        data = self._pool[at : at + chunk.size_bytes]
        digests = save.writer.digests(chunk.file, chunk.start, data)
        if digests:
            self._tell(Listener.chunk, save, chunk, digests)
        return digests

    def _write(self, save: FlusherSave, chunk: Filled, digests: bytes | None) -> None:
        if digests is None:
            digests = self._digest(save, chunk)
        if digests and save.writer is not None and save.error is None:
            at = chunk.slot * CHUNK_BYTES
            image = self._pool[at : at + CHUNK_BYTES]
            save.writer.write(chunk.file, chunk.start, image, chunk.size_bytes, digests)
        self._slots.release([chunk.slot], more_comes=not self._writers.queued.empty())
        now_s = time.monotonic()
        if save.writer is not None and now_s - save.reported_s > _PROGRESS_S:
            save.reported_s = now_s
            done_bytes = save.writer.written_bytes
            news = protocol.News(kind="written", save=save.begin.save, done_bytes=done_bytes)
            self._connection.send(news)
        with self._changed:
            save.pending -= 1
        self._advance()

    # Finish and commit

    def _advance(self) -> None:
        """Finish the oldest save if everything it will get is written."""
        with self._changed:
            save = next(iter(self._saves.values()), None)
            if save is None or save.is_finishing or save.pending:
                return
            if save.error is None and not (save.is_whole and save.is_open):
                return
            save.is_finishing = True
        self._writers.put(self._end_save, save)

    def _end_save(self, save: FlusherSave) -> None:
        # The thread that wrote the last chunk may have seen this task in the queue and so kept back
        # free slots.
        self._slots.release(())
        try:
            self._finish(save)
            committed = True
        except Exception as error:  # noqa: BLE001 (reported to the trainer and logged)
            committed = self._give_up(save, error)
            drop_tracebacks(error)  # their frames hold the save, which holds the error
        self._tell(Listener.committed if committed else Listener.failed, save)
        with self._changed:
            del self._saves[save.begin.save]
            is_idle = not self._saves
        if is_idle:  # no save waits for this thread
            self._run_writer.clean()
        self._advance()

    def _finish(self, save: FlusherSave) -> None:
        """Make a save durable and commit it; raise the error that prevents it."""
        if save.error is not None:
            raise save.error
        captured, writer, attempt = save.captured, save.writer, save.attempt
        assert captured is not None  # noqa: S101 (else it is not written)
        assert writer is not None  # noqa: S101 (else there is an error)
        assert attempt is not None  # noqa: S101 (as above)
        written = writer.finish(captured.values)
        self._connection.send(
            protocol.Flushed(save=save.begin.save, written=written, coding=writer.coding())
        )
        decision = protocol.Decide(save=save.begin.save, items=captured.items, written=written)
        if save.begin.role != "alone":
            decision = self._decision_of(save)
        if save.begin.role != "member":
            at = attempt.name
            commit = Commit(
                run=self._run_writer.run.id,
                step=at.step,
                term=at.term,
                attempt=at.attempt,
                created_s=time.time(),
                laststep=VERSION,
                items=decision.items,
                written=decision.written,
                ranks=decision.ranks,
                layout_groups=decision.layout_groups,
                metrics=objects.decode(captured.metrics, where="metrics"),  # type: ignore[arg-type]
                metadata=objects.decode(captured.metadata, where="metadata"),
                continues=self._run_writer.last_folder,
            )
            self._run_writer.commit(attempt, commit)
        self._base = save.begin.save, writer.as_base()
        self._connection.send(protocol.Ended(save=save.begin.save, at=attempt.name))

    def _decision_of(self, save: FlusherSave) -> protocol.Decide:
        """Wait for the ranks' common decision; raise if they give the save up."""
        with self._changed:
            self._changed.wait_for(lambda: save.decision or save.error)
        if save.decision is None:
            raise save.error or AbortedError("")
        if save.decision.reason is not None:
            raise AbortedError(save.decision.reason)
        return save.decision

    def _give_up(self, save: FlusherSave, error: Exception) -> bool:
        """Abort a save and report its error; return True if it turns out to be committed."""
        if not isinstance(error, LaststepError):
            log.error("the flush of step %d failed", save.begin.step, exc_info=error)
            error = StorageError(f"the flush of step {save.begin.step} failed", found=repr(error))
        attempt = save.attempt
        error = self._run_writer.cause(None if attempt is None else attempt.name, error)
        if save.writer is not None and attempt is not None:
            try:
                save.writer.close()
                if self._abort(save, attempt, str(error)):
                    self._connection.send(protocol.Ended(save=save.begin.save, at=attempt.name))
                    return True
            except (LaststepError, OSError) as second:
                log.warning("cannot clean up after a failed save: %s", second)
                if save.begin.role == "member":
                    error = attempts.unknown_decision(attempt.name, f"{error}; then {second}")
        self._send_failed(save.begin.save, error)
        return False

    def _send_failed(self, number: int, error: LaststepError) -> None:
        kind, fields = error.to_wire()
        self._connection.send(protocol.Ended(save=number, kind=kind, fields=fields))

    def _abort(self, save: FlusherSave, attempt: Attempt, reason: str) -> bool:
        """Decide against an attempt; return True if it has been committed. A member gives up only
        its own part, unless all ranks abort, and leaves the folder to rank 0: other ranks may still
        be writing, and the decision gives them the reason."""
        if save.begin.role != "member":
            return attempt.abort(reason)
        if self._was_given_up(attempt):
            # A missing folder explains nothing: wait for the reason, which the trainer will send.
            with self._changed:
                self._changed.wait_for(lambda: save.decision or save.error, _HEAR_S)
        if save.decision is None or save.decision.reason is None:
            return False
        return isinstance(attempts.abort(self._store, attempt.folder, reason), Commit)

    def _was_given_up(self, attempt: Attempt) -> bool:
        """Return True if rank 0 has aborted a member's save or removed its folder."""
        with contextlib.suppress(LaststepError, OSError):
            if isinstance(read_decision(self._store, attempt.folder), Abort):
                return True
            return not self._store.list(attempt.folder)
        return False

    def _tell(self, event: Callable[..., None], *details: object) -> None:
        """Call this method of `Listener` on all listeners that have one of their own."""
        for listener in self._listeners:
            kind = type(listener)
            if getattr(kind, event.__name__) is not event:
                with threads.outlasting(log, "%s failed", kind.__name__):
                    getattr(listener, event.__name__)(*details)

    def _end(self) -> None:
        """Give up incomplete saves, finish complete ones, and stop the threads."""
        try:
            self._tell(Listener.ending)
            for save in list(self._saves.values()):
                is_decided = save.begin.role == "alone" or save.decision is not None
                if self.is_given_up or not (save.is_whole and is_decided):
                    self._drop(save, "the trainer ended in the middle of the capture")
            self._advance()
            if self._digesters is not None:
                self._digesters.close()
            self._writers.close()
            self._run_writer.clean()
            self._run_writer.close()
            self._tell(Listener.close, self.is_given_up or not self._was_told_bye)
        finally:
            self._connection.close()  # after any failure: it unblocks the trainer


class _TrainerLog(logging.StreamHandler[TextIO]):
    """Sends log records to the trainer, which logs them under its rank; prints them on stderr if
    the trainer is gone."""

    def __init__(self, trainer: protocol.Connection, rank: int | None) -> None:
        super().__init__()
        self._trainer = trainer
        self._plain = logging.Formatter()
        self.setFormatter(
            logging.Formatter(f"{'' if rank is None else f'rank {rank}: '}%(message)s")
        )

    def emit(self, record: logging.LogRecord) -> None:
        if self._trainer.is_cut():
            super().emit(record)
            return
        text = self._plain.format(record).encode(errors="backslashreplace").decode()
        self._trainer.send(
            protocol.News(kind="logged", logger=record.name, level=record.levelno, text=text)
        )


def main(text: str) -> None:
    """Serve as the helper process until the trainer is gone. `text` is a `Setup` as JSON. The
    process starts with the signals of `NOT_FOR_THE_HELPER` blocked."""
    setup = msgspec.json.decode(text, type=ready(Setup))
    trainer = protocol.Connection(socket.socket(fileno=setup.socket_fd), peer=setup.trainer_pidfd)
    logging.getLogger().addHandler(_TrainerLog(trainer, setup.rank))
    for url, opener in [(setup.run, setup.opener)] + [
        (tier.url, tier.opener) for tier in setup.orders.replicas
    ]:
        if opener is not None:
            register_store(url.partition(":")[0], opener)
    for number in NOT_FOR_THE_HELPER:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, NOT_FOR_THE_HELPER)
    pool_bytes = os.fstat(setup.pool_fd).st_size
    pool = Mapping(setup.pool_fd, pool_bytes)  # kept: a forked child closes what still exists
    Flusher(trainer, pool.view, setup).serve()
