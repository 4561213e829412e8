"""The flusher: writes what the trainer captured, commits it, and applies retention.

Runs as a helper process, without torch, or by the same code on a thread of the trainer. It owns
everything that changes a run: epochs, attempts, files, commits. One thread receives, several write,
one finishes saves in the order in which they began. When the trainer dies, saves that were handed
over whole are finished and committed, others are aborted, and it ends. In a job of several ranks
only the first one's commits, and only what the trainers of all ranks have agreed on.

`Save` is one save on its way; its condition `changed` guards what several threads touch.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from laststep.catalog import starts
from laststep.catalog.lineage import AttemptName
from laststep.codecs import objects
from laststep.errors import AbortedError, LaststepError, StorageError, drop_tracebacks
from laststep.flush import base as bases
from laststep.flush.deriving import Misses
from laststep.flush.encoder import Compressor
from laststep.flush.epoch import WriterEpoch
from laststep.flush.protocol import (
    Begin,
    Begun,
    Bye,
    Chunks,
    Connection,
    Continue,
    Decide,
    Decided,
    DrainLast,
    Drop,
    Failed,
    Flushed,
    Freed,
    Granted,
    Held,
    Located,
    Orders,
    PoolSlots,
    Ready,
    Seal,
    ToFlusher,
    ToTrainer,
    Unchanged,
    Witness,
    WrittenBytes,
)
from laststep.flush.unkept import NothingKept
from laststep.flush.writer import SaveWriter
from laststep.format.manifest import Commit, WrittenIndexes
from laststep.memory.filled import Filled
from laststep.process import threads
from laststep.storage import locks
from laststep.storage.registry import open_store
from laststep.terms import CHUNK_BYTES, MEMORY
from laststep.tiers.drains import Drains
from laststep.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from laststep.catalog.epochs import Trainer
    from laststep.flush.base import Base
    from laststep.flush.keeping import Keeper
    from laststep.flush.protocol import Connection
    from laststep.storage.store import Lock, Store


_TOGETHER = 8


class FreedSlots:
    """Those that the trainer has not been told of."""

    def __init__(self, send: Callable[[Freed], None]) -> None:
        self._send = send
        self._slots: list[int] = []
        self._lock = threading.Lock()

    def add(self, slot: int, *, more_comes: bool) -> None:
        """Tell of several together, since each message takes the trainer's GIL; but keep none when
        nothing is left to write, for then the trainer may be waiting for them."""
        with self._lock:
            self._slots.append(slot)
            if len(self._slots) < _TOGETHER and more_comes:
                return
            freed, self._slots = self._slots, []
        self._send(Freed(slots=freed))


class WitnessHold:
    """Nothing before the trainer has handed it over."""

    def __init__(self, store: Store, connection: Connection) -> None:
        self._store = store
        self._connection = connection
        self._held: tuple[str, Lock] | None = None

    def take(self, message: Witness) -> None:
        """Hold it too; its descriptor has come with the message."""
        descriptor = self._connection.take_descriptor()
        if descriptor is not None:
            self._held = message.name, locks.adopt(descriptor, message.name)

    def clear(self, save: int) -> None:
        """Show that a save is over."""
        if self._held is not None:
            with contextlib.suppress(LaststepError):  # it goes with this process at the latest
                self._held[1].clear(save)

    def let_go(self) -> None:
        """No more saves will come; the trainer has it too, if it lives."""
        if self._held is None:
            return
        if self._connection.peer_is_dead():
            starts.forget(self._store, *self._held)
        else:
            self._held[1].close()


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
            raise AbortedError(self.dropped or "")
        if self.decide.reason is not None:
            raise AbortedError(self.decide.reason)
        return self.decide

    def hear_why(self) -> None:
        """That the folder is gone explains nothing: the trainer is about to hear the reason."""
        with self.changed:
            self.changed.wait_for(lambda: self.dropped is not None or self.decide, _HEAR_S)


log = logging.getLogger(__name__)

_PROGRESS_S = 0.2


class Flusher:
    """Serves one trainer until it says goodbye or dies."""

    def __init__(
        self,
        connection: Connection,
        pool: memoryview,
        *,
        run: str,
        trainer: Trainer,
        orders: Orders,
        pool_fd: int = -1,
    ) -> None:
        self._connection = connection
        self._pool = pool
        self._store = open_store(run)
        self._epoch = WriterEpoch(self._store, trainer, orders.keep, connection.peer_is_dead)
        self._compressor = (
            Compressor(orders, memory_bytes=len(pool) // 2) if orders.encodes else None
        )
        self._misses = Misses()
        self._drains = Drains(
            self._store, orders.further, self._send, rank=orders.rank, ranks=orders.ranks
        )
        self._was_told_bye = False
        self._keeper: Keeper | NothingKept = NothingKept()
        if orders.segment is not None:
            from laststep.flush.keeping import keeper_in  # every start waits for what is imported

            self._keeper = keeper_in(orders.segment, pool, pool_fd, self)
        self._witness = WitnessHold(self._store, connection)
        self._given_up = False
        self._rank = (orders.rank, orders.ranks)
        self._base: tuple[int, Base | None] = (0, None)
        """The last checkpoint that this flusher committed, or went on from, and the number of the
        save that committed it; 0 where that was another flusher's. One value: two threads set
        it."""
        self._unread: str | None = None
        """The folder of a checkpoint that nobody has read here."""
        self._saves: dict[int, Save] = {}
        self._chunks: queue.SimpleQueue[tuple[Save, Filled, bytes] | None] = queue.SimpleQueue()
        self._passing = threading.Lock()
        self._order: queue.SimpleQueue[Save | None] = queue.SimpleQueue()
        self._freed = FreedSlots(self._send)
        self._threads = [
            threading.Thread(target=self._write, name=f"laststep-write-{n}", daemon=True)
            for n in range(orders.writers)
        ]
        self._finisher = threading.Thread(
            target=self._finish_all, name="laststep-finish", daemon=True
        )

    def start(self) -> None:
        """Start the threads; where one cannot be started, the others end."""
        try:
            for thread in [self._finisher, *self._threads]:
                threads.start(thread)
            self._keeper.start(len(self._threads))
            self._drains.start()
        except StorageError:
            self._order.put(None)
            for _ in self._threads:
                self._chunks.put(None)
            raise

    def serve(self) -> None:
        """Receive until the trainer is gone, then finish what is whole; when it was started."""
        self._send(Ready(pid=os.getpid()))
        try:
            self._keeper.rescue(self._store)
            while True:
                message = self._connection.receive_in_flusher()
                if message is None or isinstance(message, Bye):
                    self._was_told_bye = message is not None
                    break
                self._handle(message)
        finally:
            self._end()

    def give_up(self) -> None:
        """Commit nothing more, whatever was handed over: the trainer has reported it as failed. The
        connection has been closed, so that `serve` comes to its end."""
        self._given_up = True

    def _handle(self, message: ToFlusher) -> None:
        if isinstance(message, Begin):
            self._begin(message)
        elif isinstance(message, Continue):
            # What it goes on from was just read, and found sound, or is not borrowed of. Others may
            # have been passed over as damaged.
            self._base = (0, None)
            unread = None if message.was_read else message.after
            self._unread = None if unread is None else unread.folder
            self._epoch.continue_from(message)
            self._keeper.continue_from(self._store, message.after)
        elif isinstance(message, Witness):
            self._witness.take(message)
        elif isinstance(message, DrainLast):
            self._drains.committed(message.at, is_last=True)
        elif isinstance(message, PoolSlots):
            self._keeper.limit(message.slots)
        elif not isinstance(message, Bye):
            save = self._saves.get(message.save)
            if save is not None:
                self._go_on(save, message)
            elif isinstance(message, Chunks):  # of a save that was given up meanwhile
                self._send(Freed(slots=[chunk.slot for chunk in message.filled]))

    def _go_on(
        self, save: Save, message: Chunks | Unchanged | Located | Seal | Decide | Drop
    ) -> None:
        if isinstance(message, Chunks):
            with save.changed:
                save.pending += len(message.filled)
                if not save.located and save.dropped is None:
                    save.early += message.filled
                    return
            self._queue(save, message.filled)
        elif isinstance(message, Unchanged):
            save.unchanged = message
            if save.located:
                self._grant(save)
        elif isinstance(message, Located):
            self._locate(save, message)
        elif isinstance(message, Drop):
            self._drop(save, message.reason)
        else:
            with save.changed:
                if isinstance(message, Seal):
                    save.seal = message
                else:
                    save.decide = message
                save.changed.notify_all()
            self._keeper.try_to_seal(save)

    def _begin(self, begin: Begin) -> None:
        save = Save(begin=begin, began_s=time.monotonic())
        self._saves[begin.save] = save
        self._keeper.begin(save)
        if save.is_member:
            save.located = False
            self._order.put(save)
            return
        try:
            save.at = self._epoch.begin(begin.step, alone=begin.role == "alone")
            save.flush = self._flush(save)
            if not begin.overwrite:
                # Only now: a writer that was taken over hears that, not that its step is taken.
                self._epoch.run.check_step_free(begin.step, epoch=save.at.epoch)
            save.opened_s = time.monotonic() - save.began_s
        except LaststepError as error:
            save.error = error
        except OSError as error:
            save.error = StorageError(
                "cannot begin a save", where=self._store.url, found=str(error)
            )
        self._order.put(save)
        if save.at is not None and save.error is None:
            self._send(Begun(save=begin.save, at=save.at))

    def _flush(self, save: Save) -> SaveWriter:
        """Begin to write a save; blocks that the last checkpoint has are used again."""
        assert save.at is not None  # noqa: S101 (the caller knows it)
        before = self._epoch.before
        save.base, base = self._base
        if base is None and before is not None and before != self._unread:
            save.base, base = 0, bases.of_checkpoint(self._store, before, self._rank[0])
        return SaveWriter(
            self._store,
            save.at.folder,
            save.begin.files,
            rank=self._rank,
            base=base,
            compressor=self._compressor,
            derived=save.begin.derived,
            is_declared=save.begin.is_declared,
            misses=self._misses,
        )

    def _grant(self, save: Save) -> None:
        """Answer which of the chunks that did not change need not come."""
        said, save.unchanged = save.unchanged, None
        if said is None:
            return
        granted: tuple[tuple[int, int], ...] = ()
        if save.flush is not None and save.error is None and said.of == save.base:
            granted = save.flush.reuse(self._keeper.inheritable(save, said))
            self._keeper.inherit(save, granted)
        self._send(Granted(save=said.save, chunks=granted))

    def _locate(self, save: Save, place: Located) -> None:
        """A member learns where to write: what has come meanwhile can be written now."""
        try:
            save.at = place.at
            save.flush = self._flush(save)
            save.opened_s = time.monotonic() - save.began_s
        except LaststepError as error:
            save.error = error
        except OSError as error:
            save.error = StorageError(
                "cannot begin a save", where=self._store.url, found=str(error)
            )
        with save.changed:
            save.located = True
            early, save.early = save.early, []
            save.changed.notify_all()
        self._grant(save)
        self._queue(save, early)

    def _drop(self, save: Save, reason: str) -> None:
        with save.changed:
            save.dropped = reason
            early, save.early = save.early, []
            save.changed.notify_all()
        self._queue(save, early)  # counted, freed, and not written
        if save.flush is not None:
            save.flush.fail(AbortedError(reason))

    def _queue(self, save: Save, filled: Iterable[Filled]) -> None:
        """Give chunks to the threads that write, or first to those that digest what is kept."""
        for chunk in filled:
            if not self._keeper.take(save, chunk):
                self.pass_on(save, chunk, b"")

    def pass_on(self, save: Save, chunk: Filled, sums: bytes) -> None:
        """Give a chunk to the threads that write, which take them in this order."""
        with self._passing:
            if save.flush is not None:
                save.flush.expect(chunk.file, chunk.start)
            self._chunks.put((save, chunk, sums))

    def _write(self) -> None:
        while True:
            task = self._chunks.get()
            if task is None:
                return
            save, chunk, sums = task
            image = self._pool[chunk.slot * CHUNK_BYTES : (chunk.slot + 1) * CHUNK_BYTES]
            if save.flush is not None and save.error is None and save.dropped is None:
                save.flush.write(chunk.file, chunk.start, image, chunk.size_bytes, sums)
            if self._keeper.release(chunk.slot):
                self._freed.add(chunk.slot, more_comes=not self._chunks.empty())
            self._report(save)
            with save.changed:
                save.pending -= 1
                save.changed.notify_all()

    def free(self, slots: Iterable[int]) -> None:
        """Give slots back that were kept."""
        if freed := list(slots):
            self._send(Freed(slots=freed))

    def facts_of(self, save: Save) -> RunFacts:
        """What the run knows of a save, as far as this rank does."""
        return RunFacts(self._epoch.run.id, self._epoch.before, self._epoch.records())

    def is_in_memory(self, save: Save) -> None:
        """Tell that a save is whole in shared memory."""
        self._send(Held(save=save.begin.save, tier=MEMORY))

    def _report(self, save: Save) -> None:
        now = time.monotonic()
        if save.flush is not None and now - save.reported_s > _PROGRESS_S:
            save.reported_s = now
            self._send(WrittenBytes(save=save.begin.save, done_bytes=save.flush.written_bytes))

    def _finish_all(self) -> None:
        while True:
            save = self._order.get()
            if save is None:
                self._epoch.clean()
                return
            save.wait_for_all_chunks()
            committed = False
            try:
                self._keeper.settle(save)
                self._finish(save)
                committed = True
            except Exception as error:  # noqa: BLE001 (told to the trainer, and logged)
                self._give_up(save, error)
                drop_tracebacks(error)  # their frames hold the save, which holds the error
            finally:
                if save.flush is not None:
                    save.flush.close()
                self._keeper.stored(save, committed=committed)
                del self._saves[save.begin.save]
            if self._order.empty():  # nobody waits for this thread
                self._epoch.clean()

    def _finish(self, save: Save) -> None:
        """Durable, then committed, then retention; raises what stands in the way."""
        if save.dropped is not None:
            raise AbortedError(save.dropped)
        if save.error is not None:
            raise save.error
        assert save.flush is not None  # noqa: S101 (set by _begin where there is no error)
        assert save.at is not None  # noqa: S101 (as above)
        assert save.seal is not None  # noqa: S101 (waited for)
        written_s = time.monotonic() - save.began_s
        written = save.flush.finish(save.seal.values)
        size = sum(file.tensor_bytes for file in save.begin.files)
        size += sum(map(len, save.seal.values.values()))
        number = save.begin.save
        durable_s = time.monotonic() - save.began_s
        self._send(
            Flushed(
                save=number,
                size_bytes=size,
                written=written,
                opened_s=save.opened_s,
                written_s=written_s,
                seconds=durable_s,
                coding=save.flush.coding(),
            )
        )
        if not save.is_member:
            commit = self._commit_record(save, save.seal, written)
            if save.begin.role == "first":
                decide = save.decided_by_all()
                commit = msgspec.structs.replace(
                    commit,
                    items=decide.items,
                    written=decide.written,
                    ranks=decide.ranks,
                    classes=decide.classes,
                )
            self._epoch.commit(save.at, commit)
        else:
            save.decided_by_all()
        self._base = save.begin.save, save.flush.as_base()
        self._send_decided(save)
        self._keeper.forget_predecessors(save)
        self._drains.committed(save.at)
        if not save.is_member:
            self._epoch.retain(
                save.at,
                overwritten=save.begin.overwrite,
                needed=self._drains.needed(),
                tell=self._send,
            )

    def _commit_record(self, save: Save, seal: Seal, written: WrittenIndexes) -> Commit:
        at = save.at
        assert at is not None  # noqa: S101 (its files are durable)
        return Commit(
            run=self._epoch.run.id,
            step=at.step,
            epoch=at.epoch,
            attempt=at.attempt,
            created_s=time.time(),
            laststep=VERSION,
            items=seal.items,
            written=written,
            metrics=objects.decode(seal.metrics, where="metrics"),  # type: ignore[arg-type]
            metadata=objects.decode(seal.metadata, where="metadata"),
            continues=self._epoch.last_folder,
        )

    def _give_up(self, save: Save, error: Exception) -> None:
        if not isinstance(error, LaststepError):
            log.error("the flush of step %d failed", save.begin.step, exc_info=error)
            error = StorageError(f"the flush of step {save.begin.step} failed", found=repr(error))
        error = self._epoch.cause(save.at, error)
        # A member gives up alone what concerns itself; for all, only when it is told to.
        member = save.is_member
        flush = save.flush
        if member and flush is not None and self._epoch.was_given_up(flush.folder):
            save.hear_why()
        if flush is not None:
            try:
                flush.close()
                abort = self._epoch.abort_as_member if member else self._epoch.abort
                for_all = not member or (save.decide and save.decide.reason is not None)
                if for_all and abort(flush.folder, str(error)):
                    self._send_decided(save)  # it is committed after all, and durable
                    return
            except (LaststepError, OSError) as second:
                log.warning("cannot clean up after a failed save: %s", second)
                if member:
                    error = StorageError(
                        f"it is not known whether step {save.begin.step} is committed",
                        where=flush.folder,
                        found=f"{error}; then {second}",
                        remedy="`laststep ls` shows it if it is",
                    )
        kind, fields = error.to_wire()
        self._witness.clear(save.begin.save)
        self._send(Failed(save=save.begin.save, kind=kind, fields=fields))

    def _send_decided(self, save: Save) -> None:
        assert save.at is not None  # noqa: S101 (what was decided was begun)
        self._witness.clear(save.begin.save)
        seconds = time.monotonic() - save.began_s
        self._send(Decided(save=save.begin.save, at=save.at, seconds=seconds))

    def _send(self, message: ToTrainer) -> None:
        with contextlib.suppress(OSError):  # the trainer is gone; there is nobody to tell
            self._connection.send(message)

    def _end(self) -> None:
        """Give up what is not whole, finish what is, and stop the threads."""
        self._keeper.nothing_more_comes()
        for save in list(self._saves.values()):
            with save.changed:
                whole = save.seal is not None and (
                    save.begin.role == "alone" or save.decide is not None
                )
            if self._given_up or not whole:
                self._drop(save, "the trainer ended in the middle of the capture")
        self._order.put(None)
        self._finisher.join()
        for _ in self._threads:
            self._chunks.put(None)
        for thread in self._threads:
            thread.join()
        self._keeper.close(for_good=self._was_told_bye or self._connection.peer_is_dead())
        self._epoch.close()
        self._witness.let_go()
        # When nobody waits for this writer any more.
        self._drains.close(at_once=self._given_up or not self._was_told_bye)
        self._connection.close()
