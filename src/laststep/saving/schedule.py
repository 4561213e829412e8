"""When `step()` saves: the running state, and how all ranks come to decide alike.

Belongs to the training thread. By steps, every rank knows by itself. By the clock, the first rank
alone measures and decides, and the others read: calls of `step()` are counted, and at some of them,
the meetings, all ranks look at one note. It says whether all save at this very call, and after how
many more calls the next meeting is. The first rank leaves each note one meeting ahead, so nobody
waits for it, and no clock but its own matters. Meetings come closer as the next save does, by half
of what is left, and are never more than `_LOOK_S` apart: should training slow down, it is noticed.
"""

from __future__ import annotations

import logging
import math
import time
from typing import TYPE_CHECKING, Protocol

import msgspec

from laststep.errors import Aborted, Usage
from laststep.plan import frequency
from laststep.process import interrupts
from laststep.saving.pace import Pace
from laststep.terms import duration_s, duration_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from laststep.catalog.failures import Past
    from laststep.flush.handle import SaveHandle
    from laststep.plan.frequency import Reckoning
    from laststep.ranks.board import Board
    from laststep.ranks.rank import Rank
    from laststep.settings import Settings

log = logging.getLogger(__name__)

FIRST_S = 60.0
"""With every="auto" the first save, by which all is measured, begins no later than this."""
AFTER_FAILURE = 0.25
"""A save that failed is made good after this part of an interval: what it would have saved is
older than it should be, and what was in its way may be gone."""
_LOOK_S, _LOOK_EACH_S = 2.0, 0.002
"""So far apart are meetings at most. All ranks ask one store: the more there are, the farther."""
_SOON_S = 1.0
"""The same while a save is under way that the next one waits for."""
_CLOSE = 0.02
"""Within this part of an interval before a save it is not looked any more closely."""
_RING = 1024
"""Notes are left under so many names, one after the other. No rank is so many meetings behind
whose saves are not given up long before."""


class MeetingNote(msgspec.Struct, frozen=True, kw_only=True):
    """What is done at a meeting, which all ranks read there."""

    number: int
    save: bool = False
    gap: int = 1
    """The next meeting is so many calls later."""


class Notes(Protocol):
    """Where notes are left and read."""

    def leave(self, note: MeetingNote) -> None: ...

    def read(self, number: int) -> MeetingNote: ...


class OwnNotes:
    """Of a rank by itself."""

    def __init__(self) -> None:
        self._notes = {0: MeetingNote(number=0)}

    def leave(self, note: MeetingNote) -> None:
        self._notes[note.number] = note

    def read(self, number: int) -> MeetingNote:
        self._notes.pop(number - 1, None)
        return self._notes[number]


class BoardNotes(OwnNotes):
    """Of several ranks: on a board whose prefix no other start, and no other restore, has used."""

    def __init__(self, board: Board, *, is_first: bool, deadline_s: float) -> None:
        super().__init__()
        self._board = board
        self._is_first = is_first
        self._deadline_s = deadline_s

    def leave(self, note: MeetingNote) -> None:
        self._board.put(str(note.number % _RING), msgspec.msgpack.encode(note))
        super().leave(note)

    def read(self, number: int) -> MeetingNote:
        if self._is_first or number == 0:
            return super().read(number)

        def look() -> MeetingNote | None:
            data = self._board.look(str(number % _RING))
            note = None if data is None else msgspec.msgpack.decode(data, type=MeetingNote)
            return None if note is None or note.number < number else note

        note = self._board.until(look, self._board.now_s() + self._deadline_s)
        if note is None or note.number != number:
            late = (
                f"nothing within {self._deadline_s:g} s" if note is None else "that of much later"
            )
            raise Aborted(
                "this rank does not know when to save next", expected="rank 0's word on it",
                found=late, remedy="every rank must call step() for the same steps; rank 0 may be "
                "stopped, slow or dead: see its log; a larger deadline_s waits longer",
            )  # fmt: skip
        return note


class Schedule:
    """Decides at each call of `step()` whether it saves; the same on all ranks."""

    def __init__(
        self,
        settings: Settings,
        rank: Rank,
        past: Callable[[], Past],
        *,
        clock: Callable[[], float] = time.monotonic,
        may_only_end: bool = False,
    ) -> None:
        """`past` tells how the run fared before, and is asked once. `may_only_end`: without `every`
        `step()` is of use, since it knows when the job is to end."""
        every = settings.every
        self._every = every
        self._fixed_s = duration_s(every) if isinstance(every, str) and every != "auto" else None
        self._mtbf = settings.mtbf
        self._most_share = settings.most_share
        self._ranks = rank.ranks
        self._look_s = max(_LOOK_S, rank.ranks * _LOOK_EACH_S)
        self._ask_past, self._clock = past, clock
        self._may_only_end = may_only_end
        self._past: Past | None = None
        self._pace = Pace() if rank.is_first and isinstance(every, str) else None
        """What the first rank measures; None on the others, and where nothing is to be."""
        self._began_s: float | None = None
        self._resumed_s = 0.0
        self._last_step: int | None = None
        self._saved_step: int | None = None
        self._wanted_step: int | None = None
        """The step that `step()` wants saved, until a save begins."""
        self._was_refused = False
        """Whether that save itself cannot be made, rather than an earlier failure being raised."""
        self._notes: Notes | None = None
        self._said: MeetingNote | None = None
        """What is done at the next meeting, where it could not be left yet."""
        self._calls = self._at = self._number = 0

    def anew(self) -> None:
        """The state was restored: steps may go back, and ranks meet anew."""
        self._last_step = self._saved_step = self._wanted_step = None
        self._notes = self._said = None
        if self._pace is not None:
            self._pace.anew()

    def due(self, step: int, meet: Callable[[], Notes], *, last: bool = False) -> bool:
        """Whether all ranks save at this call: the `last` step in any case, and none twice. Takes
        microseconds but at a meeting; `meet` brings all ranks together for the first one after a
        start or a restore.

        If a save that was due did not begin because the failure of an earlier one was raised, it is
        due at the next call; if it could not be made itself, when the same step is tried again. Not
        so with several ranks: the save began on the others."""
        is_owed = self._ranks == 1 and self._wanted_step is not None
        is_owed = is_owed and (not self._was_refused or step == self._wanted_step)
        is_time = self._is_time(step, meet)
        due = (is_time or last or is_owed) and step != self._saved_step
        self._wanted_step, self._was_refused = step if due else None, False
        return due

    def refused(self) -> None:
        """The save that was due cannot be made as the state is now."""
        self._was_refused = True

    def give_up_due(self) -> None:
        """Do not make up for the save that was due: it was skipped, or the job ends."""
        self._wanted_step = None

    def _is_time(self, step: int, meet: Callable[[], Notes]) -> bool:
        before = self._last_step
        if before is not None and step <= before:
            if step == before:
                return False
            raise Usage(
                f"step {step} comes after step {before}", expected=f"a step from {before} on",
                found=str(step), remedy="count steps over the whole training, not within an epoch; "
                "restore() an earlier step to go back to it",
            )  # fmt: skip
        if self._every is None and not self._may_only_end:
            raise Usage(
                "step() does not know how often to save", expected="a Checkpointer with every=…",
                found="every=None", remedy="pass every='auto', every=1000 or every='10 min'; or "
                "call save() where you want to",
            )  # fmt: skip
        self._last_step = step
        if self._every is None:
            return False
        if isinstance(self._every, int):
            # Also where steps are counted in strides; of nothing but step 0, nothing is lost.
            before = max(step - 1, 0) if before is None else before
            return step // self._every > before // self._every
        return self._called(meet)

    def began(self, handle: SaveHandle) -> None:
        """A save begins, of `step()` or of the user's own."""
        self._saved_step = handle.step
        if self._pace is not None:
            if handle.step == self._wanted_step and (reckoning := self.reckoning) is not None:
                handle.reckoned(reckoning)
                log.info("step %d: %s", handle.step, reckoning)
            self._pace.began(handle, self._clock())
        self._wanted_step = None

    def end(self) -> bool:
        """Training is over: say what was not saved. Whether it matters that it ended well."""
        if self._last_step is not None and self._last_step != self._saved_step:
            saved = (
                "none" if self._saved_step is None else f"step {self._saved_step} is the last that"
            )
            log.warning(
                "training ends with step %d, which is not saved (%s was): step(…, last=True) saves "
                "the last step in any case", self._last_step, saved,
            )  # fmt: skip
        return self._pace is not None and self._fixed_s is None

    # -- by the clock -----------------------------------------------------------------------------

    def _called(self, meet: Callable[[], Notes]) -> bool:
        if self._pace is not None:
            self._pace.iterated(self._clock())
        if self._notes is None:
            self._notes = self._begin(meet())
        self._calls += 1
        saves = False
        while self._at <= self._calls:
            with interrupts.held():
                saves = self._at_meeting(self._notes)
        return saves

    def _at_meeting(self, notes: Notes) -> bool:
        """Read what is to be done now and, as the first rank, say what is to be done next."""
        note = notes.read(self._number)
        if self._pace is not None:
            # Whatever keeps it from being left: who has read it must not be told otherwise later.
            self._said = self._said or self._decided(note, self._pace)
            notes.leave(self._said)
        saves = note.save and self._at == self._calls
        if note.save and not saves:  # the store of the ranks did not answer then
            log.warning("this rank has missed a save that the others made: see above")
        self._at += note.gap
        self._number += 1
        self._said = None
        return saves

    def _begin(self, notes: Notes) -> Notes:
        self._calls, self._at, self._number = 0, 1, 0
        if self._pace is not None:
            self._resumed_s = self._clock()
            if self._began_s is None:
                self._began_s = self._resumed_s
            if self._pace.captured_s is not None:
                self._pace.captured_s = self._resumed_s  # nothing is lost that was restored
            if self._past is None and self._fixed_s is None and self._mtbf is None:
                self._past = self._ask_past()
        return notes

    def _decided(self, note: MeetingNote, pace: Pace) -> MeetingNote:
        """What is done at the meeting after this one, at which `note` is."""
        number, step_s = note.number + 1, pace.step_s
        if step_s is None:
            return MeetingNote(number=number)
        step_s = max(step_s, 1e-6)
        interval_s = self._interval_s()
        then_s = math.inf if interval_s is None else interval_s
        wait_s = then_s if note.save else self._due_s(pace, step_s, interval_s) - self._clock()
        left_s = wait_s - note.gap * step_s
        save = left_s <= 0.05 * step_s
        if save:
            left_s = then_s
        left = min(left_s / step_s, 1e9)
        close = max(2.0, _CLOSE * (interval_s or 0.0) / step_s)
        look_s = _SOON_S if math.isinf(left_s) else self._look_s
        gap = min(math.ceil(left - 0.05) if left <= close else left // 2, look_s // step_s)
        return MeetingNote(number=number, save=save, gap=max(int(gap), 1))

    def _due_s(self, pace: Pace, step_s: float, interval_s: float | None) -> float:
        """When the next save begins; infinite while that is not known."""
        if pace.busy:
            return math.inf  # saves must not pile up, however long this one takes
        if pace.captured_s is None:
            if self._fixed_s is not None:
                return self._resumed_s + self._fixed_s
            return min(self._clock() + pace.missing * step_s, self._resumed_s + FIRST_S)
        wait_s = FIRST_S if interval_s is None else interval_s
        return pace.captured_s + wait_s * (AFTER_FAILURE if pace.failed else 1.0)

    def _interval_s(self) -> float | None:
        """How far apart saves are to be; None before the first one has shown its cost."""
        if self._fixed_s is not None:
            return self._fixed_s
        reckoning = self.reckoning
        return None if reckoning is None else reckoning.interval_s

    @property
    def reckoning(self) -> Reckoning | None:
        """What the interval follows from, with every="auto", on the first rank, once the first save
        has ended."""
        pace = self._pace
        if pace is None or self._fixed_s is not None:
            return None
        cost_s, step_s = pace.cost_s, pace.step_s
        if cost_s is None or step_s is None:
            return None
        mtbf_s, mtbf_from = self._mtbf_s()
        tiers = (frequency.TierCost(cost_s, pace.latency_s, mtbf_s),)
        (chosen,) = frequency.intervals(tiers, self._most_share)
        return frequency.Reckoning(
            interval_s=chosen.seconds, bound=chosen.bound, cost_s=cost_s,
            latency_s=pace.latency_s, mtbf_s=mtbf_s, mtbf_from=mtbf_from,
            lost_share=frequency.lost_share(tiers, [chosen.seconds]), step_s=step_s,
            size_bytes=pace.size_bytes, bytes_per_s=pace.bytes_per_s,
        )  # fmt: skip

    def _mtbf_s(self) -> tuple[float, str]:
        """The mean time between failures, and where it comes from, in words."""
        if self._mtbf is not None:
            return duration_s(self._mtbf), "given"
        past = self._past
        failures = 0 if past is None else past.failures
        uptime_s = 0.0 if past is None else past.uptime_s
        running_s = self._clock() - (self._began_s or 0.0)
        prior_s = frequency.believed_mtbf_s(0, 0.0, self._ranks)
        known = f"{failures or 'no'} failure{'' if failures == 1 else 's'} in "
        known += f"{duration_text(uptime_s + running_s)} of this run"
        known += f", and a prior belief of one in {duration_text(prior_s)}"
        return frequency.believed_mtbf_s(failures, uptime_s + running_s, self._ranks), known
