"""Find the tensors of a save that are the rounding of others and need not be written.

A bf16 or fp16 tensor that may be the rounding of an fp32 tensor comes with its *candidates*. As the
bytes of a candidate arrive they are rounded, and the digest of each rounded run is kept. A run of
the tensor with the same digest is not stored. Only digests decide this: a wrong candidate costs
time but never changes a bit. A tensor that arrives before its masters is stored. Knows neither
files on a disk nor torch.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from laststep.codecs.digests import digest
from laststep.constants import BLOCK_BYTES, CHUNK_BYTES
from laststep.format.deriving import DerivedRun, DerivedRuns, Master, pack

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from laststep.format.layout import FileLayout
    from laststep.plan.files import MasterPair

_LOOK_S = 0.2
"""Interval at which a waiting thread checks whether the save has failed."""
_MOST_BYTES = 2 * BLOCK_BYTES
"""Maximum length of a run of a master."""
_TRIES, _AGAIN = 2, 16
"""An undeclared candidate that was useless `_TRIES` times is tried in every `_AGAIN`-th save."""

Misses = Counter[tuple[str, str, Master]]
"""Consecutive saves in which a candidate (file, tensor, master) was wrong, unneeded or untried."""


class _MasterBytes(NamedTuple):
    """Bytes [start, stop) of a master's image, and the run that may be their rounding."""

    start: int
    stop: int
    file: int
    run: DerivedRun
    master: Master


class Deriving:
    """The derivations of one save. Thread-safe."""

    def __init__(
        self,
        files: Sequence[FileLayout],
        pairs: Sequence[MasterPair],
        misses: Misses,
        failed: Callable[[], bool],
        *,
        is_declared: bool,
    ) -> None:
        """`failed` returns True if the bytes that a thread waits for may never arrive."""
        self._failed = failed
        self._changed = threading.Condition()
        self._order: dict[tuple[int, int], int] = {}
        """Order of arrival of the chunks that are queued for writing."""
        self._sums: dict[tuple[int, int, Master], bytes] = {}
        self._parts: dict[tuple[int, int, Master], tuple[bytearray, int]] = {}
        """Rounded bytes of incomplete runs, and how many of them have arrived."""
        self._wanted: dict[int, list[_MasterBytes]] = {}
        self.files: dict[int, DerivedFile] = {}
        """The files with tensors that may be derived."""
        for number in sorted({pair.file for pair in pairs}):
            file = DerivedFile(self, files, number, pairs, misses, is_declared=is_declared)
            for there, wanted in file.wanted():  # else no block of it may be derived
                self.files[number] = file
                self._wanted.setdefault(there, []).append(wanted)
        for some in self._wanted.values():
            some.sort(key=lambda wanted: wanted[:2])

    def end(self) -> None:
        for file in self.files.values():
            file.end()

    def expect(self, file: int, start: int) -> None:
        """Register a chunk that is being queued for writing; call in the order of that queue."""
        self._order[file, start] = len(self._order)

    def take(self, file: int, start: int, data: memoryview) -> None:
        """Round the bytes of this chunk that tensors may be derived from."""
        from laststep.codecs.rounding import rounded  # numpy is slow to import and rarely needed

        for wanted in self.among(file, start, start + len(data)):
            low, high = max(wanted.start, start), min(wanted.stop, start + len(data))
            values = rounded(data[low - start : high - start], wanted.run.dtype)
            key = wanted.file, wanted.run.start, wanted.master
            size = (wanted.stop - wanted.start) // 2
            if len(values) < size:
                at = (low - wanted.start) // 2
                with self._changed:
                    whole, there = self._parts.pop(key, (bytearray(size), 0))
                    whole[at : at + len(values)] = values
                    if there + len(values) < size:
                        self._parts[key] = whole, there + len(values)
                        continue
                values = memoryview(whole)
            found = digest(values)
            with self._changed:
                self._sums[key] = found
                self._changed.notify_all()

    def among(self, file: int, start: int, stop: int) -> list[_MasterBytes]:
        """Return the bytes of masters in this part of a file."""
        some = self._wanted.get(file, [])
        first = bisect_left(some, start - _MOST_BYTES, key=lambda wanted: wanted.start)
        last = bisect_left(some, stop, key=lambda wanted: wanted.start)
        return [wanted for wanted in some[first:last] if wanted.stop > start]

    def rounding(
        self, file: int, run: DerivedRun, master: Master, begins: tuple[int, int]
    ) -> bytes | None:
        """Return the digest of the rounding that a run may equal; None if its master did not arrive
        before the run. Waits for masters that were queued earlier."""
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
    """The derivations in one file."""

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
        """File number of each candidate, and the byte at which it starts there."""
        self._candidates: dict[str, list[Master]] = {}
        """Candidates by tensor."""
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
        # Blocks that contain a master must not themselves be derived from other blocks.
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

    def wanted(self) -> list[tuple[int, _MasterBytes]]:
        """Return the bytes of masters that have to be rounded, each with the number of its file;
        none if no block may be derived."""
        found = []
        for block in sorted(set(self._runs.blocks()) - self._apart):
            for run in self._runs.of_block(block):
                for master in self._candidates[run.tensor]:
                    there, begins = self._begins[master]
                    start, stop = run.of_master(begins)
                    found.append((there, _MasterBytes(start, stop, self._number, run, master)))
        return found

    def is_refuted(self, start: int, data: memoryview) -> bool:
        """Return True if these bytes show that nothing in the file is derived: some of them could
        be, and none is. For declared candidates they must cover a part of every tensor."""
        first = start // BLOCK_BYTES
        there = range(first, first + -(-len(data) // BLOCK_BYTES))
        tried = sorted({b for b in self._runs.blocks() if b in there and b not in self._apart})
        tensors = {run.tensor for block in tried for run in self._runs.of_block(block)}
        if not tried or (self._is_declared and tensors < self._candidates.keys()):
            return False
        parts = [(block, block * BLOCK_BYTES - start) for block in tried]
        return all(self.payload(b, data[at : at + BLOCK_BYTES]) is None for b, at in parts)

    def used(self) -> dict[str, Master]:
        """Return the tensors that may be derived, with their masters; possibly none of a tensor's
        blocks is."""
        return {name: self._chosen.get(name, some[0]) for name, some in self._candidates.items()}

    def end(self) -> None:
        for name, some in self._candidates.items():
            chosen = self._chosen.get(name)
            for master in some:
                if master == chosen:
                    self._misses.pop((self._name, name, master), None)
                elif chosen is not None or (name, master) in self._wrong:
                    self._misses[self._name, name, master] += 1

    def payload(self, number: int, block: memoryview) -> bytes | None:
        """Return the bytes to store for a block; None if nothing in it is derived."""
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
