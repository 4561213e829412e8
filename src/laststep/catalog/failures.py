"""How often a run has failed: its history of starts, read from the records of their epochs.

A start that did not say that it ended well counts as failed. It ran from its first save until its
last sign of life: its last commit. Time in which nothing ran does not count. Retention may have
deleted all commits of a start; then it ran until the next one began, but no longer than is usual
between two starts of this run.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import statistics
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from laststep.catalog import decision, names
from laststep.catalog.epochs import RECORD_LIMIT_BYTES, EpochRecord, Epochs
from laststep.catalog.listing import Scanner
from laststep.errors import LaststepError
from laststep.format.manifest import Commit

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from laststep.storage.store import Store

_log = logging.getLogger(__name__)

_LATEST = 64
"""So many epochs are looked at: what a job was like long ago tells little of what it is now."""


class Past(NamedTuple):
    """How often a run failed, and in how much time of running."""

    failures: int = 0
    uptime_s: float = 0.0


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """What a start leaves that ends well, under a name of its own."""

    ended_s: float


class _PastStart(NamedTuple):
    began_s: float
    seen_s: float | None
    """Its last sign of life; None where nothing of it is left."""
    failed: bool


def past_of(store: Store, start: str) -> Past:
    """What the records of a run tell to that start, which is not counted. Damaged ones are passed
    over: this is an estimate, and whoever saves will report them."""
    try:
        return _sum_up(list(_starts(store, start)))
    except LaststepError as error:
        _log.warning("how often %s has failed is not known: %s", store.url, error)
        return Past()


def _sum_up(starts: list[_PastStart]) -> Past:
    """Pure. Clocks may have been set back meanwhile: no time is counted below 0."""
    began = sorted(start.began_s for start in starts)
    gaps = [later - earlier for earlier, later in itertools.pairwise(began)]
    usual_s = statistics.median(gaps) if gaps else 0.0
    uptime_s = 0.0
    for start in starts:
        if start.seen_s is not None:
            uptime_s += max(start.seen_s - start.began_s, 0.0)
        else:
            until_s = next((one for one in began if one > start.began_s), start.began_s)
            uptime_s += min(until_s - start.began_s, usual_s)
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
    for start, its in records.items():
        seen = [_last_commit_s(store, attempts.get(one.epoch, ())) for one in its]
        signs = [ended[start]] if start in ended else [one for one in seen if one is not None]
        yield _PastStart(
            began_s=min(one.created_s for one in its),
            seen_s=max(signs, default=None),
            failed=start not in ended,
        )


def _attempts(store: Store) -> dict[int, list[names.AttemptName]]:
    """The attempts of each epoch that are there, the last first."""
    found: dict[int, list[names.AttemptName]] = {}
    for name in sorted(Scanner(store).names(), key=lambda name: name.point, reverse=True):
        found.setdefault(name.epoch, []).append(name)
    return found


def _last_commit_s(store: Store, attempts: Iterable[names.AttemptName]) -> float | None:
    for name in attempts:
        with contextlib.suppress(LaststepError):
            decided = decision.read_manifest(store, name.folder)
            if isinstance(decided, Commit):
                return decided.created_s
    return None


def _ended(store: Store) -> dict[str, float]:
    """The starts that ended well, and when."""
    found = {}
    for name in store.file_names(names.EPOCHS_FOLDER):
        start = names.parse_ending(name)
        if start is not None:
            data = store.read(f"{names.EPOCHS_FOLDER}/{name}", limit_bytes=RECORD_LIMIT_BYTES)
            try:
                found[start] = msgspec.json.decode(data, type=Ending).ended_s
            except (msgspec.MsgspecError, UnicodeDecodeError):
                continue
    return found
