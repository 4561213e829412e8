"""Count the failures of a run and estimate its uptime from the term records of its job instances.

A job instance that did not record a clean end counts as failed. Its uptime lasts from its first
save to its last sign of life, which is its last commit; time in which nothing ran does not count.
If retention has deleted all its commits, its uptime lasts until the next job instance began, but no
longer than the median time between two job instances of this run.

Timestamps alone prove little, because a clock may be set while a job runs. A job instance that
ended well records its uptime by a monotonic clock. Any other cannot have run for longer than until
the next process of this run began under the same kernel, whose tick count cannot be set; without
such a process at most `UNPROVEN_S` is counted. An underestimated uptime only makes saves more
frequent.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import statistics
from typing import TYPE_CHECKING, Annotated, NamedTuple

import msgspec

from laststep.catalog import decision, lineage
from laststep.catalog.listing import Scanner
from laststep.catalog.terms import RECORD_LIMIT_BYTES, TermRecord, Terms, Trainer, this_writer
from laststep.errors import LaststepError
from laststep.format.manifest import Commit

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from laststep.storage.store import Store

_log = logging.getLogger(__name__)

_LATEST = 64
"""The number of latest terms that count. Older ones predict little about the present job."""
UNPROVEN_S = 7 * 24 * 3600.0
"""The longest uptime of one job instance that is believed from timestamps alone: a common time
limit of jobs."""


class Past(NamedTuple):
    """The number of failures of a run and its total uptime."""

    failures: int = 0
    uptime_s: float = 0.0


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """The content of the file that a job instance writes when it ends well."""

    ended_s: float
    ran_s: Annotated[float, msgspec.Meta(ge=0)] | None = None
    """The time since the job instance began, by a monotonic clock."""


class _PastStart(NamedTuple):
    began_s: float
    seen_s: float | None
    """The last sign of life; None if no trace is left."""
    failed: bool
    ran_s: float | None = None
    """The uptime by a monotonic clock, if it was recorded."""
    at_most_s: float = UNPROVEN_S


def past_of(store: Store, start: str) -> Past:
    """Return the failures and uptime of all job instances of a run except `start`. Damaged records
    are skipped: this is an estimate, and the next save reports them."""
    try:
        return _sum_up(list(_starts(store, start)))
    except LaststepError as error:
        _log.warning("the number of failures of %s is unknown: %s", store.url, error)
        return Past()


def _sum_up(starts: list[_PastStart]) -> Past:
    """Sum up failures and uptimes. Pure. Clocks may have been set, so each uptime is clamped to
    between 0 and a credible maximum."""
    began = sorted(start.began_s for start in starts)
    gaps = [later - earlier for earlier, later in itertools.pairwise(began)]
    usual_s = statistics.median(gaps) if gaps else 0.0
    uptime_s = 0.0
    for start in starts:
        if start.ran_s is not None:
            uptime_s += start.ran_s
        elif start.seen_s is not None:
            uptime_s += min(max(start.seen_s - start.began_s, 0.0), start.at_most_s)
        else:
            until_s = next((one for one in began if one > start.began_s), start.began_s)
            uptime_s += min(until_s - start.began_s, usual_s, start.at_most_s)
    return Past(failures=sum(start.failed for start in starts), uptime_s=uptime_s)


def _starts(store: Store, own: str) -> Iterator[_PastStart]:
    terms, ended = Terms(store), _ended(store)
    attempts = _attempts(store)
    records: dict[str, list[TermRecord]] = {}
    for number in terms.numbers()[-_LATEST:]:
        try:
            record = terms.read(number)
        except LaststepError:
            continue
        if record is not None and (record.start != own or not own):
            records.setdefault(record.start or f"term {number}", []).append(record)
    processes: list[TermRecord | Trainer] = [its[0] for its in records.values()]
    processes.append(this_writer())
    for place, (start, its) in enumerate(records.items()):
        seen = [_last_commit_s(store, attempts.get(one.term, ())) for one in its]
        ending = ended.get(start)
        signs = [one for one in seen if one is not None] if ending is None else [ending.ended_s]
        yield _PastStart(
            began_s=min(one.created_s for one in its),
            seen_s=max(signs, default=None),
            failed=ending is None,
            ran_s=None if ending is None else ending.ran_s,
            at_most_s=_longest_s(its[0], processes[place + 1 :]),
        )


def _longest_s(record: TermRecord, later: Iterable[TermRecord | Trainer]) -> float:
    """Return the longest time that this process can have run, given the processes that began after
    it."""
    began = _ticks(record)
    for process in later:
        ticks = _ticks(process) if process.boot == record.boot else None
        if began is not None and ticks is not None and ticks > began:
            return (ticks - began) / os.sysconf("SC_CLK_TCK")
    return UNPROVEN_S


def _ticks(process: TermRecord | Trainer) -> int | None:
    """Return the start time of the process in ticks since boot; None if unknown."""
    ticks = process.process_started.partition("@")[0]
    return int(ticks) if process.boot and ticks.isdecimal() else None


def _attempts(store: Store) -> dict[int, list[lineage.AttemptName]]:
    """Return the attempts of each term, latest first."""
    found: dict[int, list[lineage.AttemptName]] = {}
    for name in sorted(Scanner(store).names(), key=lambda name: name.point, reverse=True):
        found.setdefault(name.term, []).append(name)
    return found


def _last_commit_s(store: Store, attempts: Iterable[lineage.AttemptName]) -> float | None:
    for name in attempts:
        with contextlib.suppress(LaststepError):
            decided = decision.read(store, name.folder)
            if isinstance(decided, Commit):
                return decided.created_s
    return None


def _ended(store: Store) -> dict[str, Ending]:
    """Return the recorded ending of each job instance that ended well."""
    found = {}
    for name in store.file_names(lineage.TERMS_FOLDER):
        start = lineage.parse_ending(name)
        if start is not None:
            data = store.read(f"{lineage.TERMS_FOLDER}/{name}", limit_bytes=RECORD_LIMIT_BYTES)
            try:
                found[start] = msgspec.json.decode(data, type=Ending)
            except (msgspec.MsgspecError, UnicodeDecodeError):
                continue
    return found
