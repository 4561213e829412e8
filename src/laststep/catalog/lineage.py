"""The lineage of a run: the ordered commits that its present state descends from.

Pure: computed from the points (term, attempt) from which terms continue and from the names of the
committed checkpoints. Commits are ordered by their points. In a run without any term record they
are ordered by step.

This module also converts names within a run to values and back. The mapping is one to one: every
attempt has exactly one name, and every name at most one attempt.
"""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING

import msgspec

from laststep.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


RUN_NAME = "run.json"
TERMS_FOLDER = "terms"
PIN_NAME = "pinned"

_FOLDER = re.compile(r"step-([0-9]{8,20})\.([0-9]{1,20})-([0-9]{1,20})")
_WITNESS = re.compile(r"start-[0-9a-f]{16}-([0-9]{1,20})\.lock")
_COPYING = re.compile(r"copying(-r[0-9]{5,8})?\.lock")
_ENDING = re.compile(r"start-([0-9a-f]{16})\.ended")
_EPOCH = re.compile(r"([0-9]{8,20})\.(json|lock)")


class AttemptName(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The name of an attempt or a checkpoint: the step, the term of the writer, and the number of
    the attempt in that term."""

    step: int
    term: int
    attempt: int

    @property
    def point(self) -> tuple[int, int]:
        """The position in the order of commits."""
        return self.term, self.attempt

    @property
    def folder(self) -> str:
        return f"step-{self.step:08d}.{self.term}-{self.attempt}"


def name_attempt(*, step: int, term: int, attempt: int) -> AttemptName:
    """Return the name of an attempt. Raise `UsageError` if a number is out of range."""
    if step < 0 or term < 1 or attempt < 1 or max(step, term, attempt) >= 10**20:
        raise UsageError(
            "cannot name a checkpoint",
            expected="step from 0, term and attempt from 1, at most 20 digits",
            found=f"step {step}, term {term}, attempt {attempt}",
        )
    return AttemptName(step=step, term=term, attempt=attempt)


@functools.lru_cache(maxsize=1 << 14)
def parse_folder(folder: str) -> AttemptName | None:
    """Return the attempt whose folder has this name, or None if it is not an attempt's folder.
    Cached, because every scan of a run parses each folder name more than once."""
    match = _FOLDER.fullmatch(folder)
    if match is None:
        return None
    step, term, attempt = (int(digits) for digits in match.groups())
    name = AttemptName(step=step, term=term, attempt=attempt)
    return name if term >= 1 and attempt >= 1 and name.folder == folder else None


def term_record_name(term: int) -> str:
    """Return the name of a term's record, relative to the run."""
    return f"{TERMS_FOLDER}/{term:08d}.json"


def term_lock_name(term: int) -> str:
    """Return the name of a term's lock, relative to the run."""
    return f"{TERMS_FOLDER}/{term:08d}.lock"


def parse_term(name: str, kind: str) -> int | None:
    """Return the term of a file in `terms/` with the extension `kind`, or None."""
    match = _EPOCH.fullmatch(name)
    if match is None or match.group(2) != kind:
        return None
    term = int(match.group(1))
    return term if term >= 1 and name == f"{term:08d}.{kind}" else None


def liveness_lock_name(start: str, pid: int) -> str:
    """Return the name of a job instance's liveness lock, relative to the run."""
    return f"{TERMS_FOLDER}/start-{start}-{pid}.lock"


def parse_liveness_lock(name: str) -> int | None:
    """Return the process id in the name of a liveness lock in `terms/`, or None for other names."""
    match = _WITNESS.fullmatch(name)
    return None if match is None else int(match.group(1))


def copying_name(first_rank: int | None = None) -> str:
    """Return the name of the lock in the folder of an uncommitted copy. `first_rank` is given if
    only the files of some ranks are copied."""
    return f"copying{'' if first_rank is None else f'-r{first_rank:05d}'}.lock"


def is_copying_name(name: str) -> bool:
    """Return True if a file of this name marks an attempt's folder as a copy."""
    return _COPYING.fullmatch(name) is not None


def ending_name(start: str) -> str:
    """Return the name of the file that a job instance writes when it ends well, relative to the
    run."""
    return f"{TERMS_FOLDER}/start-{start}.ended"


def parse_ending(name: str) -> str | None:
    """Return the job instance that wrote this file in `terms/` when it ended, or None for other
    names."""
    match = _ENDING.fullmatch(name)
    return None if match is None else match.group(1)


Point = tuple[int, int]


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a run at the time a job chose where to continue from; 0 where nothing
    existed."""

    term: int = 0
    """The newest term, by its record or by its attempts."""
    commit: Point = (0, 0)
    """The last commit of the run, which may belong to an older term."""


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """A term and the point from which it continues; None if it starts from scratch."""

    term: int
    continues: Point | None


class Chain(msgspec.Struct, frozen=True, kw_only=True):
    """The terms of the lineage, newest first.

    `unrecorded_below` is True if no term below the last link has a record. Checkpoints of such
    terms (folders copied by hand) count up to the point from which the last link continues.
    """

    links: tuple[Link, ...]
    unrecorded_below: bool = False


def order(names: Iterable[AttemptName], chain: Chain) -> tuple[AttemptName, ...]:
    """Return the commits on the lineage, oldest first."""
    listed = list(names)
    if not chain.links:
        return tuple(sorted(listed, key=lambda name: (name.step, name.term, name.attempt)))
    limits = _limits(chain)
    chosen = [
        name for name in listed if name.term in limits and _within(name.attempt, limits[name.term])
    ]
    if chain.unrecorded_below:
        chosen += _unrecorded(listed, chain.links[-1].continues)
    return tuple(sorted(chosen, key=lambda name: name.point))


def superseded(
    on_lineage: Sequence[AttemptName], sound: frozenset[AttemptName]
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


def _limits(chain: Chain) -> dict[int, int | None]:
    """Return the last attempt that counts in each term of the lineage, or None if all count."""
    limits: dict[int, int | None] = {chain.links[0].term: None}
    for link in chain.links:
        if link.continues is not None:
            term, attempt = link.continues
            limits[term] = attempt
    return limits


def _within(attempt: int, limit: int | None) -> bool:
    return limit is None or attempt <= limit


def _unrecorded(names: Sequence[AttemptName], continues: Point | None) -> list[AttemptName]:
    if continues is None:
        return []
    # Without records only the step gives an order: checkpoints beyond the step from which the run
    # continued were abandoned.
    steps = [name.step for name in names if name.point == continues]
    last = steps[0] if steps else None
    return [
        name for name in names if name.term < continues[0] and (last is None or name.step <= last)
    ]
