"""The settings of a Checkpointer, as one checked value.

Knows nothing of what they do; nothing here is read from the environment.
"""

from __future__ import annotations

import numbers
import os
from dataclasses import dataclass
from enum import StrEnum

from laststep.errors import Usage
from laststep.terms import CHUNK_BYTES

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


class CompareReplicas(StrEnum):
    """When ranks compare what they should hold alike and nothing says that they do."""

    FIRST = "first"
    """With the first save of a start that is committed."""
    ALWAYS = "always"
    NEVER = "never"


_READERS_OF_ONE = 2
"""However many share a machine: while one verifies, the other reads."""
_CHOICES: dict[str, type[StrEnum]] = {
    "capture": Capture, "flush": FlushIn, "on_busy": OnBusy, "compare_replicas": CompareReplicas,
}  # fmt: skip
MIN_SLOTS = 4
MAX_UNCOMMITTED = 8
"""Saves that may be under way at once. Memory bounds large states; small ones in a tight loop would
pile up attempts, all of which are lost if both processes die."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything a Checkpointer can be told, with its defaults."""

    capture: Capture = Capture.AUTO
    flush: FlushIn = FlushIn.PROCESS
    on_busy: OnBusy = OnBusy.WAIT
    host_memory_bytes: int | None = None
    """Cap of the shared host memory; None: a quarter of what is available at construction."""
    device_margin_bytes: int = 1 << 30
    """Device memory that device-first never touches, on top of the measured peak."""
    allow_pickle: bool = False
    writers: int = 4
    """Threads that write; on restore two to four times as many read, as there are cores."""
    progress: bool | None = None
    """A progress bar on stderr; None: when a person is watching."""
    deadline_s: float = 300.0
    """In a job of several ranks: how long a rank may lag behind the first before a save fails."""
    compare_replicas: CompareReplicas = CompareReplicas.FIRST
    """In a job of several ranks: when plain tensors that they hold alike are compared."""
    new_lineage: bool = False
    """Whether saves may leave the checkpoints of a run behind that were not restored."""

    def readers(self, ranks_here: int = 1) -> int:
        """Threads that read on restore; ranks of one machine share them."""
        alone = max(2 * self.writers, min(4 * self.writers, os.cpu_count() or 1))
        return max(alone // ranks_here, min(alone, _READERS_OF_ONE))

    def __post_init__(self) -> None:
        for name, kind in _CHOICES.items():
            value = getattr(self, name)
            try:
                object.__setattr__(self, name, kind(value))
            except ValueError:
                choices = ", ".join(repr(choice.value) for choice in kind)
                raise Usage(
                    f"{name} has no such value",
                    expected=f"one of {choices}",
                    found=repr(value),
                    remedy="choose one of these, or leave it out",
                ) from None
        for name in ("writers", "device_margin_bytes", "host_memory_bytes"):
            self._check_number(name)
        for name in ("allow_pickle", "new_lineage", "progress"):
            value = getattr(self, name)
            if not isinstance(value, bool) and not (name == "progress" and value is None):
                raise Usage(
                    f"{name} is not True or False",
                    expected="a bool" + (" or None" if name == "progress" else ""),
                    found=repr(value),
                    remedy=f"pass {name}=True or {name}=False",
                )
        self._check_ranges()

    def _check_number(self, name: str) -> None:
        """A whole number, as an int; text, floats and booleans are none."""
        value = getattr(self, name)
        if name == "host_memory_bytes" and value is None:
            return
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            example = "4" if name == "writers" else "1 << 30"
            raise Usage(
                f"{name} is not a whole number",
                expected="an int",
                found=f"{value!r}, a {type(value).__name__}",
                remedy=f"pass an int, such as {name}={example}"
                + (" for 1 GiB" if name.endswith("_bytes") else ""),
            )
        object.__setattr__(self, name, int(value))

    def _check_ranges(self) -> None:
        least = MIN_SLOTS * CHUNK_BYTES
        if self.host_memory_bytes is not None and self.host_memory_bytes < least:
            raise Usage(
                "host_memory_bytes is too small",
                expected=f"at least {least} ({MIN_SLOTS} slots of {CHUNK_BYTES})",
                found=str(self.host_memory_bytes),
                remedy="raise it: a state larger than it passes through it in pieces",
            )
        if not 1 <= self.writers <= 64:
            raise Usage(
                "writers is out of range", expected="1 to 64", found=str(self.writers),
                remedy="pass about as many as there are cores to spare",
            )  # fmt: skip
        if type(self.deadline_s) not in (int, float) or not 0 < self.deadline_s < 1e6:
            raise Usage(
                "deadline_s is not a time", expected="seconds, above 0",
                found=repr(self.deadline_s), remedy="pass e.g. deadline_s=300",
            )  # fmt: skip
        if self.device_margin_bytes < 0:
            raise Usage(
                "device_margin_bytes is negative", expected="0 or more",
                found=str(self.device_margin_bytes), remedy="pass 0 to leave no margin",
            )  # fmt: skip


def seconds(timeout_s: object) -> float | None:
    """How long to wait at most; None: for ever."""
    if timeout_s is None:
        return None
    is_number = isinstance(timeout_s, numbers.Real) and not isinstance(timeout_s, bool)
    if not is_number or timeout_s != timeout_s:  # noqa: PLR0124 (nan)
        raise Usage(
            "timeout_s is not a number", expected="seconds, or None to wait as long as it takes",
            found=repr(timeout_s), remedy="pass timeout_s=60",
        )  # fmt: skip
    return float(timeout_s)  # type: ignore[arg-type]
