"""The settings of a Checkpointer: defaults and allowed values, from which all checks follow.

This module does not know what the settings do, and reads nothing from the environment.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping  # noqa: TC003 (types are read at run time)
from enum import StrEnum
from typing import Annotated, Any

from msgspec import Meta

from laststep.checks import Checked
from laststep.constants import CHUNK_BYTES, DURATION
from laststep.process.signals import OF_SCHEDULERS

WAIT_FOR_OTHERS_S = 120.0
"""Longest time that a restore waits for a save that another process has not finished."""


class Capture(StrEnum):
    """The way to capture tensors on a device. docs/guides/guarantees.md explains why each one is
    correct."""

    AUTO = "auto"
    """Copy on the device as much as fits into its spare memory, and the rest lazily; copy CPU
    tensors before save() returns."""
    DEVICE = "device"
    """Copy on the device, in stream order; raise an error if its memory does not suffice."""
    LAZY = "lazy"
    """Copy during the next forward and backward pass. The optimizer's step waits for the copies,
    and fingerprints prove that they are consistent."""
    BLOCKING = "blocking"
    """Copy everything before save() returns."""


class FlushIn(StrEnum):
    """The place where digests and writes run."""

    PROCESS = "process"
    """A helper process, which finishes captured saves even if the trainer dies."""
    THREAD = "thread"
    """Threads of the trainer."""


class OnBusy(StrEnum):
    """The reaction of save() while an earlier save is being captured or holds memory that it needs,
    or while `MAX_UNCOMMITTED` (8) earlier saves are not committed yet: wait for them, or skip this
    save."""

    WAIT = "wait"
    SKIP = "skip"
    """Do not save this step; `SaveReport.skipped` holds the reason."""


class OnError(StrEnum):
    """The reaction to a save that failed in the background."""

    RAISE = "raise"
    """Raise its error at the next save(), wait() or close()."""
    WARN = "warn"
    """Log its error and let training continue."""


class Compression(StrEnum):
    """The ways to encode blocks."""

    NONE = "none"
    """Store blocks as they are."""
    ADAPTIVE = "adaptive"
    """Encode each block in the way that makes the save durable soonest, using only idle cores."""
    MAX = "max"
    """Make blocks as small as possible."""
    PLANES = "planes"
    """Store the bytes of elements by their position, which shrinks the exponents of floats."""


ALL_ITEMS = "*"
"""In settings per item: all items that are not named."""
Compressions = Annotated[
    Compression | dict[str, Compression],
    Meta(description=f"one of {', '.join(Compression)}, or a dict with one of them per item"),
]


class CompareReplicas(StrEnum):
    """The saves in which ranks compare tensors that all of them hold but that no layout declares to
    be equal."""

    FIRST = "first"
    """Compare in the first save of a job instance, and again in the next one if that fails."""
    ALWAYS = "always"
    NEVER = "never"


_OFTEN = "'auto' or a duration such as '10 min'"
Every = (
    Annotated[int, Meta(ge=1)]
    | Annotated[str, Meta(pattern=f"^(auto|{DURATION})$", description=_OFTEN)]
    | None
)
Words = dict[Annotated[str, Meta(min_length=1)], Annotated[str, Meta(min_length=1)]]
Duration = Annotated[str, Meta(pattern=f"^{DURATION}$", description="a duration such as '6 h'")]


class Preemption(Checked, frozen=True, kw_only=True):
    """The signals that announce a preemption, and the reaction: the job saves once more within the
    grace period and exits. See docs/guides/preemption.md."""

    signals: Annotated[
        tuple[Annotated[str, Meta(pattern=f"^({'|'.join(OF_SCHEDULERS)})$")], ...],
        Meta(min_length=1, description=f"a tuple of some of {', '.join(OF_SCHEDULERS)}"),
    ] = ("SIGTERM", "SIGUSR1")
    """The names of the signals that announce a preemption."""
    grace: Duration = "25 s"
    """Time from the signal until the job stops waiting for its last save. Kubernetes and Slurm kill
    a job after 30 s by default."""
    exit_code: Annotated[int, Meta(ge=0, le=255)] | None = 75
    """The exit code of the program, set by raising `Preempted`. None raises nothing: the training
    loop has to end by itself. 75 is EX_TEMPFAIL ("try again")."""


_READERS_OF_SERVERS = 8
_READERS_OF_ONE = 2
"""Minimum per rank: one thread reads while the other verifies."""
MIN_SLOTS = 4
MAX_UNCOMMITTED = 8
"""Maximum number of saves in progress. Memory bounds only large states, and all attempts are lost
if both processes die."""


OWN_KEYWORDS = (
    "items",
    "keep",
    "tiers",
    "every",
    "compression",
    "allow_pickle",
    "new_lineage",
    "host_memory_bytes",
    "preemption",
    "options",
)
"""The keywords of a Checkpointer that are not items. All other settings are in `Options`."""


class Options(Checked, frozen=True, kw_only=True):
    """Rarely needed settings of a Checkpointer: `Checkpointer(…, options=Options(flush="thread"))`.

    Immutable. Raises `UsageError` for invalid values and unknown names.
    """

    capture: Capture = Capture.AUTO
    """The way to capture device tensors, a `Capture` or its text."""
    flush: FlushIn = FlushIn.PROCESS
    """The place where digests and writes run, a `FlushIn` or its text."""
    on_busy: OnBusy = OnBusy.WAIT
    """The reaction of save() while earlier saves are in the way, an `OnBusy` or its text."""
    on_error: OnError = OnError.RAISE
    """The reaction to a save that failed in the background, an `OnError` or its text. Errors of the
    call itself, such as wrong arguments, are raised in any case."""
    progress: bool | None = None
    """Show a progress bar on stderr; None means only if stderr is a terminal."""
    subscribers: Annotated[
        tuple[Callable[..., None], ...],
        Meta(description="functions that take an event, subscribers=[on_event]"),
    ] = ()
    """Functions that are called with every event; see `laststep.events`."""
    lossy: (
        Annotated[Words, Meta(description="a dict of patterns and what to round them to")] | None
    ) = None
    """Tensors to round when they are saved: glob patterns over `item/tensor` names, mapped to
    "bf16" or "int8", for example {"optimizer/*exp_avg": "int8"}."""
    mtbf: Duration | None = None
    """With every="auto": the mean time between failures of the whole job; None estimates it."""
    most_share: Annotated[float, Meta(gt=0, lt=1)] = 0.01
    """With every="auto": the largest fraction of training time that saves may cost. Cheap saves
    cost far less (5 ms every 15 s at one failure in 6 h); this keeps the cost of expensive saves
    below the normal variation between steps."""
    deadline_s: Annotated[float, Meta(gt=0, lt=1e6)] = 300.0
    """With several ranks: seconds that a rank may lag behind rank 0 before a save fails."""
    compare_replicas: CompareReplicas = CompareReplicas.FIRST
    """With several ranks: the saves that compare plain tensors which all ranks hold."""
    writers: Annotated[int, Meta(ge=1, le=64)] = 4
    """Number of threads that write. A restore reads with up to four times as many, limited by the
    number of cores."""
    device_margin_bytes: Annotated[int, Meta(ge=0)] = 1 << 30
    """Device memory that captures leave free, in addition to the measured peak of training."""


class Settings(Options, frozen=True, kw_only=True):
    """The `Options` of a Checkpointer and its own keywords, which `Checkpointer` describes."""

    every: Every = None
    compression: Compressions = Compression.NONE
    allow_pickle: bool = False
    new_lineage: bool = False
    host_memory_bytes: Annotated[int, Meta(ge=MIN_SLOTS * CHUNK_BYTES)] | None = None

    def readers(self, ranks_here: int, *, remote: bool = False) -> int:
        """Return the number of reader threads of a restore; the ranks of one machine share them.
        Threads that read from a `remote` server mostly wait and may exceed the cores."""
        cores = max(os.cpu_count() or 1, _READERS_OF_SERVERS if remote else 1)
        return max(min(4 * self.writers, cores) // ranks_here, _READERS_OF_ONE)


def compression_of(item: str | None, asked: str | Mapping[str, str]) -> str:
    """Return the compression of an item's files, or with None of those that small items share."""
    if isinstance(asked, str):
        return asked
    default = asked.get(ALL_ITEMS, Compression.NONE)
    return default if item is None else asked.get(item, default)


DEFAULTS = Settings()


def as_keywords(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by name as keywords of a Checkpointer: rare ones in `options`."""
    rare = {name: settings[name] for name in Options.__struct_fields__ if name in settings}
    own = {name: value for name, value in settings.items() if name not in rare}
    return {**own, "options": Options(**rare)} if rare else own
