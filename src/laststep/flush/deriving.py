"""Find out what of a save follows from what, and need not be written.

A tensor of bf16 or fp16 that may be the rounding of one of fp32 comes with its *candidates*. As the
bytes of these come by, they are rounded, and the digests of that kept, a run at a time. A run of
the tensor with the same digest as one of them is not stored. Whether that is so is decided by
digests alone: a candidate that is none costs time, never a bit. What comes before its masters is
stored. Knows nothing of files on a disk, nor of torch.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from laststep.codecs.digests import digest
from laststep.flush.encoder import EncodedBlock
from laststep.flush.protocol import CodingReport
from laststep.format.deriving import ROUNDED, DerivedRun, DerivedRuns, Master, pack
from laststep.format.index import Encoding
from laststep.terms import BLOCK_BYTES, CHUNK_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from laststep.flush.encoder import FileCoder
    from laststep.format.index import BaseRef
    from laststep.format.layout import FileLayout
    from laststep.plan.files import MasterPair

_LOOK_S = 0.2
"""How often one who waits looks whether the save has failed."""
_MOST_BYTES = 2 * BLOCK_BYTES
"""A run of a master is no longer."""
_TRIES, _AGAIN = 2, 16
"""A candidate that nobody has declared, and that was of no use in so many saves, is left alone, but
for every 16th save."""

Misses = Counter[tuple[str, str, Master]]
"""In how many saves of one flusher, one after the other, a candidate of a tensor of a file was
wrong, or not needed, or was left alone."""


class _Wanted(NamedTuple):
    """Bytes [start, stop) of a master's image, and the run that may be their rounding."""

    start: int
    stop: int
    file: int
    run: DerivedRun
    master: Master

    @property
    def key(self) -> tuple[int, int, Master]:
        return self.file, self.run.start, self.master


class Deriving:
    """What follows from what in one save; several threads may use it."""

    def __init__(
        self,
        files: Sequence[FileLayout],
        pairs: Sequence[MasterPair],
        misses: Misses,
        failed: Callable[[], bool],
        *,
        is_declared: bool,
    ) -> None:
        """`failed` tells that what is waited for may never come."""
        self._failed = failed
        self._changed = threading.Condition()
        self._order: dict[tuple[int, int], int] = {}
        """Of chunks that are on their way: which came first."""
        self._sums: dict[tuple[int, int, Master], bytes] = {}
        self._parts: dict[tuple[int, int, Master], tuple[bytearray, int]] = {}
        """Of runs of which some bytes have come: those, rounded, and how many."""
        self._wanted: dict[int, list[_Wanted]] = {}
        made = {
            number: DerivedFile(self, files, number, pairs, misses, is_declared=is_declared)
            for number in sorted({pair.file for pair in pairs})
        }
        self._files = {number: file for number, file in made.items() if file.is_hopeful}
        for file in self._files.values():
            for there, wanted in file.wanted():
                self._wanted.setdefault(there, []).append(wanted)
        for some in self._wanted.values():
            some.sort(key=lambda wanted: wanted[:2])

    def of(self, file: int) -> DerivedFile | None:
        """What follows in that file from others."""
        return self._files.get(file)

    def end(self) -> None:
        """All of the save has come."""
        for file in self._files.values():
            file.end()

    def expect(self, file: int, start: int) -> None:
        """A chunk is on its way to the threads that write; called in the order in which they get
        them."""
        self._order[file, start] = len(self._order)

    def needs(self, file: int, start: int, size: int) -> bool:
        """Whether something may follow from these bytes of a file."""
        return bool(self._among(file, start, start + size))

    def take(self, file: int, start: int, data: memoryview) -> None:
        """Round what may be wanted of these bytes of a file."""
        from laststep.codecs.rounding import rounded  # numpy takes long to import, and few need it

        for wanted in self._among(file, start, start + len(data)):
            low, high = max(wanted.start, start), min(wanted.stop, start + len(data))
            values = rounded(data[low - start : high - start], wanted.run.dtype)
            if high - low < wanted.stop - wanted.start:
                self._put_together(wanted, (low - wanted.start) // 2, values)
            else:
                self._note(wanted, digest(values))

    def _put_together(self, wanted: _Wanted, at: int, values: memoryview) -> None:
        with self._changed:
            size = (wanted.stop - wanted.start) // 2
            whole, there = self._parts.pop(wanted.key, (bytearray(size), 0))
            whole[at : at + len(values)] = values
            if there + len(values) < size:
                self._parts[wanted.key] = whole, there + len(values)
                return
        self._note(wanted, digest(whole))

    def _note(self, wanted: _Wanted, found: bytes) -> None:
        with self._changed:
            self._sums[wanted.key] = found
            self._changed.notify_all()

    def _among(self, file: int, start: int, stop: int) -> list[_Wanted]:
        some = self._wanted.get(file, [])
        first = bisect_left(some, start - _MOST_BYTES, key=lambda wanted: wanted.start)
        last = bisect_left(some, stop, key=lambda wanted: wanted.start)
        return [wanted for wanted in some[first:last] if wanted.stop > start]

    def rounding(
        self, file: int, run: DerivedRun, master: Master, begins: tuple[int, int]
    ) -> bytes | None:
        """The digest of the rounding that a run may be, where that has come before the run itself.
        What was on its way before is waited for: another thread has it at hand."""
        key, there = (file, run.start, master), begins[0]
        start, stop = run.of_master(begins[1])
        chunks = range(start // CHUNK_BYTES, -(-stop // CHUNK_BYTES))
        mine = self._order.get((file, run.start // CHUNK_BYTES * CHUNK_BYTES), -1)
        with self._changed:
            if all(self._order.get((there, n * CHUNK_BYTES), mine) < mine for n in chunks):
                while key not in self._sums and not self._failed():
                    self._changed.wait(_LOOK_S)
            return self._sums.get(key)


class DerivedFile:
    """What of one file follows from others."""

    def __init__(
        self,
        save: Deriving,
        files: Sequence[FileLayout],
        number: int,
        pairs: Sequence[MasterPair],
        misses: Misses,
        *,
        is_declared: bool,
    ) -> None:
        """`pairs` are the candidates of the whole save."""
        self._save = save
        self._number = number
        self._name = files[number].name
        self._misses = misses
        self._lock = threading.Lock()
        self._begins: dict[Master, tuple[int, int]] = {}
        """Of each candidate the number of its file, and the byte at which it begins there."""
        self._candidates: dict[str, list[Master]] = {}
        """Of each tensor."""
        self._is_declared = is_declared
        entries = files[number].tensors
        for file, own, there, entry in pairs:
            if file != number:
                continue
            master = Master(files[there].name, files[there].tensors[entry].name)
            known = self._candidates.setdefault(entries[own].name, [])
            if master not in known and (is_declared or self._is_tried(entries[own].name, master)):
                self._begins[master] = there, files[there].tensors[entry].start
                known.append(master)
        self._candidates = {name: some for name, some in self._candidates.items() if some}
        self._chosen: dict[str, Master] = {}
        self._wrong: set[tuple[str, Master]] = set()
        self._runs = DerivedRuns(entries, self._candidates)
        # What a master lies in must not need other blocks itself.
        self._apart = {
            block
            for file, entry in {(pair.master_file, pair.master_entry) for pair in pairs}
            if file == number
            for block in range(
                entries[entry].start // BLOCK_BYTES, -(-entries[entry].stop // BLOCK_BYTES)
            )
        }

    def _is_tried(self, tensor: str, master: Master) -> bool:
        wrong = self._misses[self._name, tensor, master]
        if wrong < _TRIES or wrong % _AGAIN == 0:
            return True
        self._misses[self._name, tensor, master] += 1
        return False

    @property
    def is_hopeful(self) -> bool:
        """Whether any block may follow from others."""
        return not self._apart.issuperset(self._runs.blocks())

    def wanted(self) -> list[tuple[int, _Wanted]]:
        """The bytes of masters that are to be rounded, with the file that they come in."""
        found = []
        for block in sorted(set(self._runs.blocks()) - self._apart):
            for run in self._runs.of_block(block):
                for master in self._candidates[run.tensor]:
                    there, begins = self._begins[master]
                    start, stop = run.of_master(begins)
                    found.append((there, _Wanted(start, stop, self._number, run, master)))
        return found

    def is_refuted(self, start: int, data: memoryview) -> bool:
        """Whether by these bytes of the file nothing of it follows from others: some of them could,
        and none does. Of what is declared they have to hold some of every tensor."""
        first = start // BLOCK_BYTES
        there = range(first, first + -(-len(data) // BLOCK_BYTES))
        tried = sorted({b for b in self._runs.blocks() if b in there and b not in self._apart})
        tensors = {run.tensor for block in tried for run in self._runs.of_block(block)}
        if not tried or (self._is_declared and tensors < self._candidates.keys()):
            return False
        parts = [(block, block * BLOCK_BYTES - start) for block in tried]
        return all(self.payload(b, data[at : at + BLOCK_BYTES]) is None for b, at in parts)

    def used(self) -> dict[str, Master]:
        """The tensors that may follow from others, and which: of some it may be that no block
        does."""
        return {name: self._chosen.get(name, some[0]) for name, some in self._candidates.items()}

    def end(self) -> None:
        """All of the file has come: remember which candidates were wrong, or not needed."""
        for name, some in self._candidates.items():
            chosen = self._chosen.get(name)
            for master in some:
                if master == chosen:
                    self._misses.pop((self._name, name, master), None)
                elif chosen is not None or (name, master) in self._wrong:
                    self._misses[self._name, name, master] += 1

    def payload(self, number: int, block: memoryview) -> bytes | None:
        """What is to be stored of a block; None where nothing of it follows from others."""
        if number in self._apart:
            return None
        at, runs = number * BLOCK_BYTES, self._runs.of_block(number)
        rounded = [self._follows(run, block[run.start - at : run.stop - at]) for run in runs]
        return pack(block, at, runs, rounded) if any(rounded) else None

    def _follows(self, run: DerivedRun, data: memoryview) -> bool:
        found = digest(data)
        chosen = self._chosen.get(run.tensor)
        for master in self._candidates[run.tensor] if chosen is None else [chosen]:
            rounding = self._save.rounding(self._number, run, master, self._begins[master])
            with self._lock:
                if rounding == found:
                    # Another thread may have chosen meanwhile.
                    return self._chosen.setdefault(run.tensor, master) == master
                if rounding is not None:
                    self._wrong.add((run.tensor, master))
        return False


class DerivingCoder:
    """Stores nothing of what follows from others; the rest goes another coder's way."""

    def __init__(self, derived: DerivedFile, inner: FileCoder | None) -> None:
        self.derived = derived
        self._inner = inner
        self._lock = threading.Lock()
        self._raw_bytes = self._stored_bytes = self._blocks = 0

    def encode(
        self, number: int, data: memoryview, digest: bytes, base: BaseRef | None
    ) -> EncodedBlock:
        """As that of a `FileCoder`."""
        payload = self.derived.payload(number, data)
        if payload is None or 2 * len(payload) > len(data):
            other = (
                EncodedBlock(data, None, against_base=False)
                if self._inner is None
                else self._inner.encode(number, data, digest, base)
            )
            if payload is None or len(other.data) <= len(payload):
                return other
        with self._lock:
            self._blocks += 1
            self._raw_bytes += len(data)
            self._stored_bytes += len(payload)
        return EncodedBlock(payload, Encoding(*ROUNDED), against_base=False)

    def report(self, file: str) -> CodingReport:
        """What has become of the blocks that follow from others."""
        with self._lock:
            return CodingReport(
                file=file,
                mode="derived",
                picked=ROUNDED[0],
                why=f"{self._blocks} blocks follow from what is stored in fp32",
                raw_bytes=self._raw_bytes,
                stored_bytes=self._stored_bytes,
            )
