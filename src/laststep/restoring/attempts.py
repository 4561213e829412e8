"""Try checkpoints until one can be read: the newest that verifies, or the one that is named.

Only `Corrupt`, which readers raise after a second look, makes an older checkpoint count; storage
that cannot be reached and state that does not fit raise. Everything passed over is reported.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from laststep.errors import Corrupt, LaststepError, NotFound
from laststep.events import Bus, PassedOver
from laststep.process import interrupts
from laststep.restoring.choose import Choosing, StandsOrGone

if TYPE_CHECKING:
    from collections.abc import Callable

    from laststep.restoring.choose import Chosen

log = logging.getLogger(__name__)

_Found = TypeVar("_Found")


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """A newer checkpoint that was passed over."""

    step: int
    folder: str
    reason: str


class Attempts:
    """Tries checkpoints, one after the other, on all ranks."""

    def __init__(self, choosing: Choosing, bus: Bus, *, named: bool) -> None:
        """`named`: no other one may stand in for the first."""
        self._choosing = choosing
        self._bus = bus
        self._named = named
        self._skipped: list[Skipped] = []
        self._deleted: list[Skipped] = []
        """Those that were gone when they were to be opened."""

    def until_one_succeeds(
        self, attempt: Callable[[Chosen], _Found]
    ) -> tuple[_Found, tuple[Skipped, ...]] | None:
        """What comes of the first that can be opened and read, and those that were passed over;
        None where there is none to try."""
        last: LaststepError | None = None
        while (chosen := self._choosing.next()) is not None:
            interrupts.let_in()
            try:
                outcome = attempt(chosen)
            except (Corrupt, NotFound) as error:
                self._go_on_after(chosen, error)
                last = error
                continue
            newer = [skipped for skipped in self._deleted if skipped.step > chosen.step]
            return outcome, (*newer, *self._skipped)
        if last is not None:
            raise self._none_left() from last
        return None

    def _go_on_after(self, chosen: Chosen, error: Corrupt | NotFound) -> None:
        """Choose what to try next: the same again, one of a new list, or an older one. One that
        was named has none to stand in for it: its error is raised."""
        if self._choosing.spoil(chosen, error):
            return
        verdict = self._choosing.judge(chosen, error)
        if verdict is StandsOrGone.UNSEEN:
            self._choosing.wait_to_see(chosen, error)
        elif verdict is StandsOrGone.DELETED and not self._named:
            log.warning("%s is gone, and the run is listed again: %s", chosen.folder, error)
            self._deleted.append(_skip(chosen, "it was deleted meanwhile"))
            self._choosing.list_again()
        elif self._choosing.stand_in(chosen, error):
            return
        elif self._named or isinstance(error, NotFound):
            raise error
        else:
            # Without the remedy, which is to take the newest good one: so it is done.
            skipped = _skip(chosen, error.without_remedy())
            self._skipped.append(skipped)
            self._bus.emit(
                PassedOver(step=skipped.step, folder=skipped.folder, reason=skipped.reason)
            )
            self._choosing.go_on()

    def _none_left(self) -> LaststepError:
        url, skipped = self._choosing.url, self._skipped
        if not skipped:
            return NotFound(
                "the checkpoints of this run were deleted while they were looked at", where=url,
                found="; ".join(f"{gone.folder} is gone" for gone in self._deleted[:3]),
                remedy="`laststep ls` lists what is there; restore() again to begin anew if it is "
                "none",
            )  # fmt: skip
        return Corrupt(
            f"none of the {len(skipped)} checkpoints of this run can be restored", where=url,
            found="; ".join(f"step {s.step}: {s.reason}" for s in skipped[:3]),
            remedy=f"`laststep verify {url}` lists all damage; a copy of the run may still be "
            "good, and a new run elsewhere begins from the start",
        )  # fmt: skip


def _skip(chosen: Chosen, reason: str) -> Skipped:
    return Skipped(step=chosen.step, folder=chosen.folder, reason=reason)
