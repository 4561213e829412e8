"""Which commits the present state of a run descends from, and in what order.

Pure: from the points (epoch, attempt) from which epochs continue, and the names of the committed
checkpoints. The order of commits is the order of points. A run without any record has only the
order of its steps.

Also has the names within a run, to and from values: every attempt has exactly one name, and every
name at most one attempt.
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
EPOCHS_FOLDER = "epochs"
PIN_NAME = "pinned"
FATE_NAME = "fate"

_FOLDER = re.compile(r"step-([0-9]{8,20})\.([0-9]{1,20})-([0-9]{1,20})")
_WITNESS = re.compile(r"start-[0-9a-f]{16}-([0-9]{1,20})\.lock")
_COPYING = re.compile(r"copying(-r[0-9]{5,8})?\.lock")
_ENDING = re.compile(r"start-([0-9a-f]{16})\.ended")
_EPOCH = re.compile(r"([0-9]{8,20})\.(json|lock)")


class AttemptName(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What names an attempt or a checkpoint everywhere: the step that it saves, the epoch of its
    writer, and the number of the attempt in that epoch."""

    step: int
    epoch: int
    attempt: int

    @property
    def point(self) -> tuple[int, int]:
        """Its place in the order of commits."""
        return self.epoch, self.attempt

    @property
    def folder(self) -> str:
        """The name of its folder."""
        return f"step-{self.step:08d}.{self.epoch}-{self.attempt}"


def format_folder(*, step: int, epoch: int, attempt: int) -> str:
    """The folder of an attempt; `UsageError` for numbers that cannot be."""
    if step < 0 or epoch < 1 or attempt < 1 or max(step, epoch, attempt) >= 10**20:
        raise UsageError(
            "cannot name a checkpoint",
            expected="step from 0, epoch and attempt from 1, at most 20 digits",
            found=f"step {step}, epoch {epoch}, attempt {attempt}",
        )
    return AttemptName(step=step, epoch=epoch, attempt=attempt).folder


@functools.lru_cache(maxsize=1 << 14)
def parse_folder(folder: str) -> AttemptName | None:
    """The attempt of that folder, or None where it is not the name of one. Remembered: every look
    at a run asks for each of its folders, more than once."""
    match = _FOLDER.fullmatch(folder)
    if match is None:
        return None
    step, epoch, attempt = (int(digits) for digits in match.groups())
    name = AttemptName(step=step, epoch=epoch, attempt=attempt)
    return name if epoch >= 1 and attempt >= 1 and name.folder == folder else None


def epoch_record_name(epoch: int) -> str:
    """The record of an epoch, within the run."""
    return f"{EPOCHS_FOLDER}/{epoch:08d}.json"


def epoch_lock_name(epoch: int) -> str:
    """The lock of an epoch, within the run."""
    return f"{EPOCHS_FOLDER}/{epoch:08d}.lock"


def parse_epoch(name: str, kind: str) -> int | None:
    """The epoch of a file in `epochs/` that ends in `kind`, or None where it is not one."""
    match = _EPOCH.fullmatch(name)
    if match is None or match.group(2) != kind:
        return None
    epoch = int(match.group(1))
    return epoch if epoch >= 1 and name == f"{epoch:08d}.{kind}" else None


def witness_name(start: str, pid: int) -> str:
    """The witness of a start, within the run."""
    return f"{EPOCHS_FOLDER}/start-{start}-{pid}.lock"


def parse_witness(name: str) -> int | None:
    """The process whose witness a file in `epochs/` is, or None where it is not one."""
    match = _WITNESS.fullmatch(name)
    return None if match is None else int(match.group(1))


def copying_name(first_rank: int | None = None) -> str:
    """What lies in the folder of an attempt that is a copy, until it is committed; `first_rank`
    where only the files of some ranks are brought."""
    return f"copying{'' if first_rank is None else f'-r{first_rank:05d}'}.lock"


def is_copying_name(name: str) -> bool:
    """Whether a file in an attempt's folder says that it is a copy."""
    return _COPYING.fullmatch(name) is not None


def ending_name(start: str) -> str:
    """What a start leaves that ends well, within the run."""
    return f"{EPOCHS_FOLDER}/start-{start}.ended"


def parse_ending(name: str) -> str | None:
    """The start that left a file in `epochs/` when it ended, or None where it is not such a one."""
    match = _ENDING.fullmatch(name)
    return None if match is None else match.group(1)


Point = tuple[int, int]


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """What there was when it was decided to continue from somewhere; 0 for what there is not."""

    epoch: int = 0
    """The newest epoch, by its record or by what it saved."""
    commit: Point = (0, 0)
    """The last commit of all: the newest epoch need not have one."""


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """One epoch and the point from which it continues (None: it starts fresh)."""

    epoch: int
    continues: Point | None


class Chain(msgspec.Struct, frozen=True, kw_only=True):
    """The epochs of the lineage, newest first.

    `unrecorded_below` says that there is no record of any epoch below the last link: what was
    committed there (folders copied by hand) counts up to the point from which that link continues.
    """

    links: tuple[Link, ...]
    unrecorded_below: bool = False


def order(names: Iterable[AttemptName], chain: Chain) -> tuple[AttemptName, ...]:
    """The commits on the lineage, oldest first."""
    listed = list(names)
    if not chain.links:
        return tuple(sorted(listed, key=lambda name: (name.step, name.epoch, name.attempt)))
    limits = _limits(chain)
    chosen = [
        name
        for name in listed
        if name.epoch in limits and _within(name.attempt, limits[name.epoch])
    ]
    if chain.unrecorded_below:
        chosen += _unrecorded(listed, chain.links[-1].continues)
    return tuple(sorted(chosen, key=lambda name: name.point))


def superseded(
    on_lineage: Sequence[AttemptName], sound: frozenset[AttemptName]
) -> Mapping[AttemptName, AttemptName]:
    """Which commit replaced which: a later one of the same step, if that one is whole."""
    latest: dict[int, AttemptName] = {}
    replaced: dict[AttemptName, AttemptName] = {}
    for name in reversed(on_lineage):
        if name.step in latest:
            replaced[name] = latest[name.step]
        elif name in sound:
            latest[name.step] = name
    return replaced


def _limits(chain: Chain) -> dict[int, int | None]:
    """The last attempt that counts of each epoch of the lineage; None where all of them count."""
    limits: dict[int, int | None] = {chain.links[0].epoch: None}
    for link in chain.links:
        if link.continues is not None:
            epoch, attempt = link.continues
            limits[epoch] = attempt
    return limits


def _within(attempt: int, limit: int | None) -> bool:
    return limit is None or attempt <= limit


def _unrecorded(names: Sequence[AttemptName], continues: Point | None) -> list[AttemptName]:
    if continues is None:
        return []
    # Nothing but the step tells what such folders were to each other: what is beyond the step that
    # was taken up again was left behind.
    steps = [name.step for name in names if name.point == continues]
    last = steps[0] if steps else None
    return [
        name for name in names if name.epoch < continues[0] and (last is None or name.step <= last)
    ]
