"""Several writers of one run, in any order of their steps, with deaths and errors between them: a
save that was reported as committed is on the lineage, unless who left it behind had seen it.

Each writer is a thread that stops before whatever it does to the store, and goes on when the order
says so.
"""

from __future__ import annotations

import contextlib
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from hypothesis import example, given, settings
from hypothesis import strategies as st

import attempts
from laststep.catalog.run import Run
from laststep.catalog.terms import Seen, new_start
from laststep.codecs.digests import DIGEST_BYTES
from laststep.errors import LaststepError, StorageError
from laststep.format.manifest import Commit, WrittenIndexes
from laststep.storage.directory import DirectoryStore
from waiting import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from laststep.catalog.terms import Point
    from laststep.storage.store import Lock


class _Killed(BaseException):
    """The process of a writer is gone: nothing of it runs after that."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What becomes of a writer before its n-th step."""

    step: int
    kills: bool


class _Steps(DirectoryStore):
    """The run's folder as one writer uses it."""

    def __init__(self, path: str, before: Callable[[], None]) -> None:
        super().__init__(path)
        self._before = before

    def create(self, name: str, data: bytes) -> None:
        self._before()
        super().create(name, data)

    def folder_names(self, folder: str) -> list[str]:
        self._before()
        return super().folder_names(folder)

    def file_names(self, folder: str) -> list[str]:
        if folder == "terms":
            self._before()
        return super().file_names(folder)


class _Writer:
    """One writer; `go` lets it do its next step."""

    def __init__(self, path: str, work: Callable[[_Writer], None], fault: Fault | None) -> None:
        self.run = Run.open(_Steps(path, self._stop))
        self.trainer = msgspec.structs.replace(new_start(), host="elsewhere", boot="another")
        self.lock: Lock | None = None
        self.reported: Point | None = None
        self.left_knowingly: Point = (0, 0)
        """Where it went back on purpose: the last commit that it had seen by then."""
        self._work, self._fault, self._steps = work, fault, 0
        self._may_go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self.over = False
        self._is_set_up = False
        self._thread = threading.Thread(target=self._live, daemon=True)

    def start(self) -> None:
        self._is_set_up = True
        self._thread.start()
        assert self._stopped.acquire(timeout=PATIENCE_S)

    def go(self) -> None:
        if not self.over:
            self._may_go.release()
            assert self._stopped.acquire(timeout=PATIENCE_S)

    def commit(self, folder: str, at: Point) -> None:
        """As a flusher does."""
        self.run.check_newest(at[0])
        _write_index(self.run, folder)
        attempts.commit(self.run, folder, _commit(at))
        self.reported = at

    def _stop(self) -> None:
        if not self._is_set_up:
            return
        self._stopped.release()
        assert self._may_go.acquire(timeout=PATIENCE_S)
        self._steps += 1
        if self._fault is not None and self._steps == self._fault.step:
            if self._fault.kills:
                raise _Killed
            raise StorageError("cannot reach the disk", found="EIO")

    def _live(self) -> None:
        try:
            self._work(self)
        except (LaststepError, _Killed):
            pass
        finally:
            if self.lock is not None:
                self.lock.close()
            self.over = True
            self._stopped.release()


def _step(at: Point) -> int:
    """Of each commit another, so that none supersedes one."""
    term, attempt = at
    return 2 * term + attempt


def _commit(at: Point) -> Commit:
    term, attempt = at
    return Commit(
        run="0" * 32,
        step=_step(at),
        term=term,
        attempt=attempt,
        created_s=1.0,
        laststep="0",
        items=(),
        written=WrittenIndexes(indexes=bytes(DIGEST_BYTES)),
    )


def _write_index(run: Run, folder: str) -> None:
    """Without one a checkpoint is incomplete; nobody here looks what is in it. It is no step, and
    somebody may have deleted the folder."""
    with contextlib.suppress(FileNotFoundError):
        Path(run.store.url, folder, "index-r00000").write_bytes(b"")


def _finish_the_save(folder: str) -> Callable[[_Writer], None]:
    return lambda me: me.commit(folder, (1, 2))


def _take_over(me: _Writer, *, back: bool = False) -> None:
    """Restore the newest, or go back to the first on purpose, and save twice: once more after an
    error."""
    seen = me.run.newest_point()
    newest = me.run.newest()
    assert newest is not None
    point = (1, 1) if back else newest.point
    for _ in range(2):
        try:
            term = me.run.claim_term(point, seen=seen, writer=me.trainer)
            me.lock = me.run.lock_term(term)
            folder = me.run.begin(step=_step((term, 1)), term=term, attempt=1).folder
            me.commit(folder, (term, 1))
        except StorageError:
            if me.lock is not None:
                me.lock.close()
                me.lock = None
            continue
        if back:
            me.left_knowingly = seen.commit
        return


def _go_back(me: _Writer) -> None:
    _take_over(me, back=True)


ALL = 30
"""More steps than a writer has."""
_faults = st.none() | st.builds(Fault, step=st.integers(1, 14), kills=st.booleans())
_DIES_WITH_A_RECORD = Fault(step=8, kills=True)
_CANNOT_GIVE_UP = Fault(step=8, kills=False)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 8) | st.just(ALL)), max_size=8),
    _faults,
    _faults,
    st.sampled_from([_take_over, _go_back]),
)
@example([(0, 1), (1, ALL)], None, None, _take_over)
@example([(0, 1), (1, ALL)], _DIES_WITH_A_RECORD, None, _take_over)
@example([(0, 1), (1, ALL)], _CANNOT_GIVE_UP, None, _take_over)
@example([(0, 1), (1, ALL), (2, 4), (0, ALL)], _DIES_WITH_A_RECORD, None, _take_over)
@example([(0, 1), (1, ALL), (2, 4), (0, ALL)], _DIES_WITH_A_RECORD, None, _go_back)
def test_what_was_reported_as_committed_is_on_the_lineage(
    order: list[tuple[int, int]],
    second_fails: Fault | None,
    third_fails: Fault | None,
    third: Callable[[_Writer], None],
) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as path:
        run = Run.open_or_create(DirectoryStore(path))
        elsewhere = msgspec.structs.replace(new_start(), host="elsewhere", boot="another")
        assert run.claim_term(None, writer=elsewhere) == 1
        lock = run.lock_term(1)
        first = run.begin(step=_step((1, 1)), term=1, attempt=1).folder
        _write_index(run, first)
        attempts.commit(run, first, _commit((1, 1)))
        open_save = run.begin(step=_step((1, 2)), term=1, attempt=2).folder
        writers = [
            _Writer(path, _finish_the_save(open_save), None),
            _Writer(path, _take_over, second_fails),
            _Writer(path, third, third_fails),
        ]
        for writer in writers:
            writer.start()
        for number, steps in order:
            for _ in range(steps):
                writers[number].go()
        while not all(writer.over for writer in writers):
            for writer in writers:
                writer.go()
        lock.close()
        left = max(writer.left_knowingly for writer in writers)
        lineage = {one.point for one in Run.open(DirectoryStore(path)).lineage()}
        told = {writer.reported for writer in writers if writer.reported is not None}
        assert not {point for point in told - lineage if point > left}
        assert run.newest_point().commit == max(lineage)


def test_a_look_at_a_run_without_anything_has_seen_nothing(run: Run) -> None:
    assert run.newest_point() == Seen()
