"""How often a run has failed: its history of starts, read from the records of their epochs.

A start that did not say that it ended well counts as failed. It ran from its first save until its
last sign of life: its last commit. Time in which nothing ran does not count. Retention may have
deleted all commits of a start; then it ran until the next one began, but no longer than is usual
between two starts of this run.

Timestamps alone prove little: a clock may be set while a job runs. A start that ended well says how
long it ran by a monotonic clock. Any other cannot have run for longer than until the next process
of this run began under the same kernel, whose count of ticks nobody sets; without such a process
no more than `UNPROVEN_S` is counted. Too short an uptime only makes saves more frequent.
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
from laststep.catalog.epochs import RECORD_LIMIT_BYTES, EpochRecord, Epochs, Trainer, this_writer
from laststep.catalog.listing import Scanner
from laststep.errors import LaststepError
from laststep.format.manifest import Commit

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from laststep.storage.store import Store

_log = logging.getLogger(__name__)

_LATEST = 64
"""So many epochs are looked at: what a job was like long ago tells little of what it is now."""
UNPROVEN_S = 7 * 24 * 3600.0
"""The longest uptime of one start that is believed by timestamps alone: a usual limit of jobs."""


class Past(NamedTuple):
    """How often a run failed, and in how much time of running."""

    failures: int = 0
    uptime_s: float = 0.0


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """What a start leaves that ends well, under a name of its own."""

    ended_s: float
    ran_s: Annotated[float, msgspec.Meta(ge=0)] | None = None
    """By a monotonic clock, since the start was made."""


class _PastStart(NamedTuple):
    began_s: float
    seen_s: float | None
    """Its last sign of life; None where nothing of it is left."""
    failed: bool
    ran_s: float | None = None
    """How long it ran by a monotonic clock, if it has said so."""
    at_most_s: float = UNPROVEN_S


def past_of(store: Store, start: str) -> Past:
    """What the records of a run tell to that start, which is not counted. Damaged ones are passed
    over: this is an estimate, and whoever saves will report them."""
    try:
        return _sum_up(list(_starts(store, start)))
    except LaststepError as error:
        _log.warning("how often %s has failed is not known: %s", store.url, error)
        return Past()


def _sum_up(starts: list[_PastStart]) -> Past:
    """Pure. Clocks may have been set meanwhile: no time is counted below 0, or above what is
    credible."""
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
    epochs, ended = Epochs(store), _ended(store)
    attempts = _attempts(store)
    records: dict[str, list[EpochRecord]] = {}
    for number in epochs.numbers()[-_LATEST:]:
        try:
            record = epochs.read(number)
        except LaststepError:
            continue
        if record is not None and (record.start != own or not own):
            records.setdefault(record.start or f"epoch {number}", []).append(record)
    processes: list[EpochRecord | Trainer] = [its[0] for its in records.values()]
    processes.append(this_writer())
    for place, (start, its) in enumerate(records.items()):
        seen = [_last_commit_s(store, attempts.get(one.epoch, ())) for one in its]
        ending = ended.get(start)
        signs = [one for one in seen if one is not None] if ending is None else [ending.ended_s]
        yield _PastStart(
            began_s=min(one.created_s for one in its),
            seen_s=max(signs, default=None),
            failed=ending is None,
            ran_s=None if ending is None else ending.ran_s,
            at_most_s=_longest_s(its[0], processes[place + 1 :]),
        )


def _longest_s(record: EpochRecord, later: Iterable[EpochRecord | Trainer]) -> float:
    """How long that process can have run at most, given those that came after it."""
    began = _ticks(record)
    for process in later:
        ticks = _ticks(process) if process.boot == record.boot else None
        if began is not None and ticks is not None and ticks > began:
            return (ticks - began) / os.sysconf("SC_CLK_TCK")
    return UNPROVEN_S


def _ticks(process: EpochRecord | Trainer) -> int | None:
    """When that process began, in ticks since its machine was booted; None where not known."""
    ticks = process.process_started.partition("@")[0]
    return int(ticks) if process.boot and ticks.isdecimal() else None


def _attempts(store: Store) -> dict[int, list[lineage.AttemptName]]:
    """The attempts of each epoch that are there, the last first."""
    found: dict[int, list[lineage.AttemptName]] = {}
    for name in sorted(Scanner(store).names(), key=lambda name: name.point, reverse=True):
        found.setdefault(name.epoch, []).append(name)
    return found


def _last_commit_s(store: Store, attempts: Iterable[lineage.AttemptName]) -> float | None:
    for name in attempts:
        with contextlib.suppress(LaststepError):
            decided = decision.read_manifest(store, name.folder)
            if isinstance(decided, Commit):
                return decided.created_s
    return None


def _ended(store: Store) -> dict[str, Ending]:
    """The starts that ended well, and when."""
    found = {}
    for name in store.file_names(lineage.EPOCHS_FOLDER):
        start = lineage.parse_ending(name)
        if start is not None:
            data = store.read(f"{lineage.EPOCHS_FOLDER}/{name}", limit_bytes=RECORD_LIMIT_BYTES)
            try:
                found[start] = msgspec.json.decode(data, type=Ending)
            except (msgspec.MsgspecError, UnicodeDecodeError):
                continue
    return found
