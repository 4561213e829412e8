"""Try again what a server may do the next time: with growing pauses, until a deadline.

Knows nothing of what is asked for. Whoever asks says by `Trouble` what was found, in words that
hold no key and no signature: they end in errors and logs.
"""

from __future__ import annotations

import contextvars
import math
import random
import time
from typing import TYPE_CHECKING, TypeVar

import msgspec

from laststep.errors import StorageFailed

if TYPE_CHECKING:
    from collections.abc import Callable

_Result = TypeVar("_Result")

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 10.0
_LOOK = "look at the server and at the network, and try again"


_until: contextvars.ContextVar[float] = contextvars.ContextVar("_until", default=math.inf)
"""When the request ends that this one is a part of."""


class Patience(msgspec.Struct, frozen=True, kw_only=True):
    """How long a server is waited for."""

    deadline_s: float = 300.0
    """For one request, with all that is tried again, and asked meanwhile; the last try may end up
    to `request_s` later."""
    request_s: float = 120.0
    """For one request, with its body."""
    idle_s: float = 20.0
    """For the next bytes of one."""


class Trouble(Exception):
    """One try failed; `transient` says that the next may not."""

    def __init__(
        self, found: str, *, transient: bool, expected: str | None = None, remedy: str = _LOOK
    ) -> None:
        super().__init__(found)
        self.found = found
        self.transient = transient
        self.expected = expected
        self.remedy = remedy


def persist(
    attempt: Callable[[], _Result], *, what: str, where: str, patience: Patience
) -> _Result:
    """What `attempt` returns, once it raises no `Trouble`; `StorageFailed` when it is in vain."""
    began = time.monotonic()
    until = min(began + patience.deadline_s, _until.get())
    tries = 0
    while True:
        tries += 1
        outer = _until.set(until)
        try:
            return attempt()
        except Trouble as error:
            trouble = error
        finally:
            _until.reset(outer)
        spent = time.monotonic() - began
        pause = min(_FIRST_PAUSE_S * 2 ** min(tries - 1, 10), _LONGEST_PAUSE_S)
        pause *= random.uniform(0.5, 1.0)  # noqa: S311 (ranks must not come back all at once)
        if not trouble.transient or began + spent + pause > until:
            break
        time.sleep(pause)
    # Outside of `except`: a client's own error may quote what must not be told, and an error keeps
    # the one that was being handled when it was raised.
    often = f", {tries} times in {spent:.1f} s" if tries > 1 else ""
    failure = StorageFailed(
        f"cannot {what}", where=where, expected=trouble.expected, found=f"{trouble.found}{often}",
        remedy=trouble.remedy,
    )  # fmt: skip
    failure.transient = trouble.transient
    raise failure
