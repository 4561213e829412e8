"""When `step()` saves: the running state, and how all ranks come to decide alike.

Belongs to the training thread. By steps, every rank knows by itself. By the clock, the first rank
alone measures and decides, and the others read: calls of `step()` are counted, and at some of them,
the meetings, all ranks look at one note. It says whether all save at this very call, and after how
many more calls the next meeting is. The first rank leaves each note one meeting ahead, so nobody
waits for it, and no clock but its own matters. Meetings come closer as the next save does, by half
of what is left, and are never more than `_LOOK_S` apart: should training slow down, it is noticed.

How fast training goes, and what saves cost it, is measured where `step()` is called.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec

from laststep.errors import AbortedError, UsageError
from laststep.plan import frequency
from laststep.plan.frequency import mid
from laststep.process import signals
from laststep.terms import duration_s, duration_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from laststep.catalog.failures import Past
    from laststep.flush.saves import SaveHandle
    from laststep.plan.frequency import Reckoning
    from laststep.ranks.board import Board
    from laststep.ranks.rank import Rank
    from laststep.settings import Settings


WARM_UP = 3
"""So many iterations of a start are left out: kernels are compiled and chosen, buffers made."""
BASELINE = 8
"""So many undisturbed iterations are seen before the first save, if that does not take long."""
_RECENT, _SAVES = 16, 5


class _Beside(NamedTuple):
    """The iterations in which a save was under way."""

    number: int
    usual_s: float | None
    """What those just before it took; None where none were seen."""
    seconds: list[float]

    @property
    def lost_s(self) -> float:
        """What they took longer, all together; by chance that may be less than nothing."""
        if self.usual_s is None:
            return 0.0
        return (mid(self.seconds) - self.usual_s) * len(self.seconds)


class _Ended(NamedTuple):
    """What one save took."""

    stall_s: float
    device_s: float
    slower_s: float
    latency_s: float
    size_bytes: int
    bytes_per_s: float


class Pace:
    """What was seen so far; also of saves that a user asked for himself."""

    def __init__(self) -> None:
        self._alone: deque[float] = deque(maxlen=_RECENT)
        """Seconds of the last iterations without a save."""
        self._recent: deque[float] = deque(maxlen=_RECENT)
        """Of the last of all."""
        self._ended: deque[_Ended] = deque(maxlen=_SAVES)
        self._under_way: dict[SaveHandle, _Beside] = {}
        self._fresh: deque[SaveHandle] = deque(maxlen=_SAVES)
        """The last saves of this iteration."""
        self._seen = 0
        self._last_s: float | None = None
        self._saves = 0
        self.captured_s: float | None = None
        """When the last save began."""
        self.failed = False
        """Whether that came to nothing."""

    def anew(self) -> None:
        """A restore came between: what iterations take is seen anew, what saves cost is known."""
        self._last_s, self._seen = None, 0
        self._alone.clear()
        self._recent.clear()

    def iterated(self, now_s: float) -> None:
        """An iteration is over, and the next begins."""
        if self._last_s is not None:
            self._seen += 1
            # What saves held up is told by themselves.
            held_s = sum(handle.report.stall_s for handle in self._fresh)
            seconds = max(now_s - self._last_s - held_s, 0.0)
            self._recent.append(seconds)
            for beside in self._under_way.values():
                beside.seconds.append(seconds)
            if self._seen > WARM_UP and not self._under_way:
                self._alone.append(seconds)
        self._last_s = now_s
        self._fresh.clear()
        if self._under_way:
            self._look()

    def began(self, handle: SaveHandle, now_s: float) -> None:
        """A save begins."""
        self._look()  # where nobody calls step(), nobody else does
        self._saves += 1
        usual_s = mid(self._alone) if self._alone else None
        self._under_way[handle] = _Beside(self._saves, usual_s, [])
        self._fresh.append(handle)
        self.captured_s, self.failed = now_s, False

    def _look(self) -> None:
        """See which saves are over."""
        for handle in list(self._under_way):
            if not handle.done():
                continue
            beside, report = self._under_way.pop(handle), handle.report
            if report.committed_s is None:
                self.failed = self.failed or beside.number == self._saves
                continue
            moved = (report.written_bytes or 0) / max(report.durable_s or 0.0, 1e-9)
            self._ended.append(
                _Ended(
                    report.stall_s,
                    report.device_copy_s + report.fence_s,
                    beside.lost_s,
                    report.committed_s,
                    report.size_bytes,
                    moved,
                )
            )

    @property
    def busy(self) -> bool:
        """Whether a save is under way."""
        return bool(self._under_way)

    @property
    def missing(self) -> int:
        """How many undisturbed iterations are still to be seen before the first save."""
        return max(WARM_UP + BASELINE - self._seen, 0)

    @property
    def step_s(self) -> float | None:
        """What an iteration takes now; None while that is not known."""
        return mid(self._recent) if self._recent else None

    @property
    def cost_s(self) -> float | None:
        """What a save costs training: what it held up, and the longer of what the device did for it
        and what the iterations beside it took longer, which may be the same. None before the first
        has ended."""
        if not self._ended:
            return None
        slower_s = mid([one.slower_s for one in self._ended])
        device_s = mid([one.device_s for one in self._ended])
        return mid([one.stall_s for one in self._ended]) + max(device_s, slower_s)

    @property
    def latency_s(self) -> float:
        """How long a save takes until it is committed."""
        return mid([one.latency_s for one in self._ended])

    @property
    def size_bytes(self) -> int:
        return self._ended[-1].size_bytes if self._ended else 0

    @property
    def bytes_per_s(self) -> float:
        """What a save writes in a second, until it is durable."""
        return mid([one.bytes_per_s for one in self._ended])


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
            raise AbortedError(
                "this rank does not know when to save next",
                expected="rank 0's word on it",
                found=late,
                remedy="every rank must call step() for the same steps; rank 0 may be "
                "stopped, slow or dead: see its log; a larger deadline_s waits longer",
            )
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
            raise UsageError(
                f"step {step} comes after step {before}",
                expected=f"a step from {before} on",
                found=str(step),
                remedy="count steps over the whole training, not within an epoch; "
                "restore() an earlier step to go back to it",
            )
        if self._every is None and not self._may_only_end:
            raise UsageError(
                "step() does not know how often to save",
                expected="a Checkpointer with every=…",
                found="every=None",
                remedy="pass every='auto', every=1000 or every='10 min'; or "
                "call save() where you want to",
            )
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
                "the last step in any case",
                self._last_step,
                saved,
            )
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
            with signals.held():
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
            interval_s=chosen.seconds,
            bound=chosen.bound,
            cost_s=cost_s,
            latency_s=pace.latency_s,
            mtbf_s=mtbf_s,
            mtbf_from=mtbf_from,
            lost_share=frequency.lost_share(tiers, [chosen.seconds]),
            step_s=step_s,
            size_bytes=pace.size_bytes,
            bytes_per_s=pace.bytes_per_s,
        )

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
