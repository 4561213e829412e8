"""The settings of a Checkpointer, declared once: defaults, allowed values, and so all checks.

Knows nothing of what they do; nothing here is read from the environment.
"""

from __future__ import annotations

import os
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from laststep.checks import Checked
from laststep.errors import UsageError
from laststep.process.signals import OF_SCHEDULERS
from laststep.terms import CHUNK_BYTES, DURATION

if TYPE_CHECKING:
    from collections.abc import Mapping

WAIT_FOR_OTHERS_S = 120.0
"""So long a restore waits for a save that another process has not finished."""


class Capture(StrEnum):
    """How state on a device is captured; see docs/guides/guarantees.md for each one's proof."""

    AUTO = "auto"
    """Device-first for what fits into spare device memory, lazy for the rest; CPU at once."""
    DEVICE = "device"
    """A copy on the device, in stream order; a clear error where memory is short."""
    LAZY = "lazy"
    """Copied during the next forward and backward; the optimizer waits; proven by fingerprints."""
    BLOCKING = "blocking"
    """Copied before save() returns."""


class FlushIn(StrEnum):
    """Where digests and writes run."""

    PROCESS = "process"
    THREAD = "thread"


class OnBusy(StrEnum):
    """What save() does while an earlier save still holds the memory that it needs, or while
    `MAX_UNCOMMITTED` earlier ones are not committed yet."""

    WAIT = "wait"
    SKIP = "skip"


class Compression(StrEnum):
    """How blocks are encoded; any other word is the name of a codec."""

    NONE = "none"
    ADAPTIVE = "adaptive"
    """By what makes a save durable soonest, on cores that have nothing else to do."""
    MAX = "max"
    """As small as it gets."""


ALL_ITEMS = "*"
"""In settings that are made for each item: all others."""


class CompareReplicas(StrEnum):
    """When ranks compare what they should hold alike and nothing says that they do."""

    FIRST = "first"
    """With the first save of a start that is committed."""
    ALWAYS = "always"
    NEVER = "never"


_OFTEN = "'auto' or a duration such as '10 min'"
Every = (
    Annotated[int, Meta(ge=1)]
    | Annotated[str, Meta(pattern=f"^(auto|{DURATION})$", description=_OFTEN)]
    | None
)
Duration = Annotated[str, Meta(pattern=f"^{DURATION}$", description="a duration such as '6 h'")]


class Preemption(Checked, frozen=True, kw_only=True):
    """What tells a job that it is to end, and how it does; see docs/guides/preemption.md."""

    signals: Annotated[tuple[str, ...], Meta(description="a tuple of names of signals")] = (
        "SIGTERM",
        "SIGUSR1",
    )
    file: Annotated[str, Meta(description="a path")] | None = None
    """One that appears, or is touched, says the same as a signal; looked at once a second."""
    grace: Duration = "25 s"
    """From the signal on: what is not committed by then is not waited for. Kubernetes and Slurm
    kill after 30 s, unless they are told otherwise."""
    exit_code: Annotated[int, Meta(ge=0, le=255)] | None = 75
    """That of the program, by `Preempted`; None: nothing is raised, the loop ends by itself. 75 is
    EX_TEMPFAIL, try again; 143 is that of any program that has done nothing about SIGTERM."""

    def __post_init__(self) -> None:
        file: object = self.file
        if isinstance(file, os.PathLike):
            msgspec.structs.force_setattr(self, "file", os.fspath(file))
        super().__post_init__()
        unknown = [name for name in self.signals if name not in OF_SCHEDULERS]
        if unknown or not (self.signals or self.file):
            raise UsageError(
                "there is no such signal" if unknown else "nothing says when the job is to end",
                expected=f"some of {', '.join(OF_SCHEDULERS)}" + ("" if unknown else ", or a file"),
                found=", ".join(unknown) or "signals=() and no file",
                remedy="pass signals=('SIGTERM',), say, or file='/run/preempted'",
            )


_READERS_OF_SERVERS = 8
_READERS_OF_ONE = 2
"""However many share a machine: while one verifies, the other reads."""
MIN_SLOTS = 4
MAX_UNCOMMITTED = 8
"""Saves that may be under way at once. Memory bounds large states; small ones in a tight loop would
pile up attempts, all of which are lost if both processes die."""


class Settings(Checked, frozen=True, kw_only=True):
    """Everything a Checkpointer can be told, with its defaults and what may be given."""

    capture: Capture = Capture.AUTO
    flush: FlushIn = FlushIn.PROCESS
    on_busy: OnBusy = OnBusy.WAIT
    host_memory_bytes: Annotated[int, Meta(ge=MIN_SLOTS * CHUNK_BYTES)] | None = None
    """Cap of the shared host memory; None: a quarter of what is available at construction."""
    device_margin_bytes: Annotated[int, Meta(ge=0)] = 1 << 30
    """Device memory that device-first never touches, on top of the measured peak."""
    allow_pickle: bool = False
    writers: Annotated[int, Meta(ge=1, le=64)] = 4
    """Threads that write; on restore up to four times as many read, as there are cores."""
    progress: bool | None = None
    """A progress bar on stderr; None: when a person is watching."""
    deadline_s: Annotated[float, Meta(gt=0, lt=1e6)] = 300.0
    """In a job of several ranks: how long a rank may lag behind the first before a save fails."""
    compare_replicas: CompareReplicas = CompareReplicas.FIRST
    """In a job of several ranks: when plain tensors that they hold alike are compared."""
    compression: str | dict[str, str] = Compression.NONE.value
    """One of `Compression` or the name of a codec, for all items or for each by its name."""
    lossy: dict[str, str] | None = None
    """Patterns of `item/tensor`, and to what the numbers of such tensors are rounded."""
    derived: bool | dict[str, str] = False
    """Whether tensors that are others rounded are left out: True, or which of which by patterns."""
    every: Every = None
    """How often `step()` saves: after so many steps, a duration, or as often as loses least."""
    mtbf: Duration | None = None
    """The mean time between failures of the job, for every="auto"; None: learned."""
    most_share: Annotated[float, Meta(gt=0, lt=1)] = 0.01
    """What saves may cost of training at most, with every="auto". Where saves are cheap enough to
    lose least, they cost far less (5 ms every 15 s at a failure in 6 h); this keeps dear ones below
    what anybody notices among the differences from one step to the next."""
    new_lineage: bool = False
    """Whether saves may leave the checkpoints of a run behind that were not restored."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mtbf is not None and self.every != "auto":
            raise UsageError(
                "mtbf is for every='auto', which reckons with it",
                found=f"every={self.every!r}",
                remedy="pass every='auto', or leave mtbf out",
            )

    @staticmethod
    def advice(name: str, value: object) -> str:
        if value is None or isinstance(value, str | int | float):
            return Checked.advice(name, value)
        return f"{name} is a setting: an item of that name goes by items={{{name!r}: …}}"

    def readers(self, ranks_here: int = 1, *, remote: bool = False) -> int:
        """Threads that read on restore; ranks of one machine share them. Those that read from a
        `remote` server mostly wait for it, and need no core each."""
        cores = max(os.cpu_count() or 1, _READERS_OF_SERVERS if remote else 1)
        return max(min(4 * self.writers, cores) // ranks_here, _READERS_OF_ONE)


def compression_of(item: str | None, asked: str | Mapping[str, str]) -> str:
    """How the files of an item are encoded; None: those that small items share."""
    if isinstance(asked, str):
        return asked
    others = asked.get(ALL_ITEMS, Compression.NONE.value)
    return others if item is None else asked.get(item, others)


DEFAULTS = Settings()
